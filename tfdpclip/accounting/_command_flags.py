"""The flags of `python -m tfdpclip.accounting` that each answer depends on.

A flag changes the answer or is an error: users would believe that an ignored flag was
accounted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: The flags that each question uses.
_ALWAYS = {"delta", "accountant"}
_SCHEME = {"sampling", "rate", "batch_size", "population", "unit"}
_LENGTH = {"steps", "epochs"}
USES: dict[str, set[str]] = {
    "epsilon": _ALWAYS | _SCHEME | _LENGTH | {"noise_multiplier"},
    "noise": _ALWAYS | _SCHEME | _LENGTH | {"epsilon"},
    "steps": _ALWAYS | _SCHEME | {"epsilon", "noise_multiplier"},
    "people": _ALWAYS
    | {"epsilon", "steps", "batch_size", "people", "population", "per_person"},
    "past_run": {"delta", "population", "batch_size", "epochs", "noise_multiplier"}
    | {"unit"},
}
#: Flags by the names of the arguments of plans, and of tensorflow-privacy.
ALIASES = {
    "examples": "population",
    "N": "population",
    "noise": "noise_multiplier",
    "num_epochs": "epochs",
    "number_of_examples": "population",
}
_MICROBATCHES = (
    ". Leave the flag out if every example was clipped on its own; for microbatches of "
    "several examples, write --unit=batch."
)
#: What to write in the place of tensorflow-privacy's flags: ends of absl's message.
INSTEAD = {
    "l2_norm_clip": ". Leave it out: --noise_multiplier is noise over the clip norm.",
    "max_examples_per_user": ". For people's privacy, ask `people --per_person=8`.",
    "num_microbatches": _MICROBATCHES,
    "used_microbatching": _MICROBATCHES,
}


def refuse_without_effect(question: str, flags: Any) -> None:
    """Raises if a flag was given that has no effect on the answer.

    Args:
      question: a key of `USES`.
      flags: the values of all flags, parsed.

    Raises:
      ValueError: names the flag, and the reason that it is needless.
    """
    given = {name for name in flags if flags[name].present and name not in ALIASES}
    needless = sorted(given - USES[question])
    if needless:
        raise ValueError(
            f"--{needless[0]} has no effect on `{question}`: leave it out. It uses "
            f"{', '.join('--' + name for name in sorted(USES[question]))}."
        )
    if _LENGTH <= given:
        raise ValueError("--steps and --epochs exclude each other: leave one out.")
    if question == "past_run" and flags.unit not in ("example", "batch"):
        raise ValueError(
            "`past_run` takes --unit=example, or --unit=batch for microbatches of "
            "several examples."
        )
    kind, sizes = flags.sampling, {"rate", "batch_size", "population"} & given
    if kind == "full" and sizes:
        raise ValueError(
            f"--{min(sizes)} has no effect with --sampling=full, in which every step "
            "has every record: leave it out, or choose a different --sampling."
        )
    if kind == "poisson" and "rate" in sizes and len(sizes) > 1:
        raise ValueError(
            f"--rate and --{min(sizes - {'rate'})} contradict each other: the rate is "
            "--batch_size over --population. Give --rate, or the other two."
        )
    if kind not in ("poisson", "full") and "rate" in sizes:
        raise ValueError(
            f"--rate has no effect with --sampling={kind}: give --batch_size and "
            "--population."
        )


def refuse_twice(argv: Sequence[str], flags: Any) -> None:
    """Raises for a flag that is given twice, since only the last would count."""
    names = [word.lstrip("-").split("=")[0] for word in argv if word.startswith("-")]
    names = [ALIASES.get(name, name) for name in names]
    for name in names:
        if name in flags and names.count(name) > 1:
            raise ValueError(
                f"--{name} is given twice, and only the last would count: give it "
                "once, with a list for several values, as in --steps=10,20."
            )
