"""Which flags of `python -m tfdpclip.accounting` an answer depends on.

A flag that is given changes the answer, or is an error: what is ignored would be taken
for accounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What each question makes use of.
_ALWAYS = {"delta", "accountant", "convention", "png"}
_SCHEME = {"sampling", "rate", "batch_size", "population", "unit"}
_LENGTH = {"steps", "epochs"}
USES: dict[str, set[str]] = {
    "epsilon": _ALWAYS | _SCHEME | _LENGTH | {"noise_multiplier"},
    "noise": _ALWAYS | _SCHEME | _LENGTH | {"epsilon"},
    "steps": _ALWAYS | _SCHEME | {"epsilon", "noise_multiplier"},
    "cohort": _ALWAYS
    | {"epsilon", "steps", "noise_multiplier", "clients_per_round", "population"}
    | {"sampling"},
    "people": (_ALWAYS - {"convention"})
    | {"epsilon", "steps", "batch_size", "people", "population", "per_person"},
}
_REPLACE_ONE = ("fixed_size", "with_replacement", "shuffled")


def refuse_without_effect(question: str, flags: Any) -> None:
    """Raises if a flag was given that the answer would not depend on.

    Args:
      question: a key of `USES`.
      flags: the values of all flags, parsed.

    Raises:
      ValueError: naming the flag, and what makes it needless.
    """
    given = {name for name in flags if flags[name].present}
    needless = sorted(given - USES[question])
    if needless:
        raise ValueError(
            f"--{needless[0]} has no effect on `{question}`: leave it out. It uses "
            f"{', '.join('--' + name for name in sorted(USES[question]))}."
        )
    if _LENGTH <= given:
        raise ValueError("--steps and --epochs say the same: leave one of them out.")
    if question == "cohort" and len(flags.noise_multiplier) > 1:
        raise ValueError("`cohort` takes one --noise_multiplier, that of the trial.")
    kind, sizes = flags.sampling, {"rate", "batch_size", "population"} & given
    if question in ("epsilon", "noise", "steps"):
        if kind == "full" and sizes:
            raise ValueError(
                f"--{min(sizes)} has no effect with --sampling=full, in which every "
                "step has every record: leave it out, or say another --sampling."
            )
        if kind == "poisson" and "rate" in sizes and len(sizes) > 1:
            raise ValueError(
                f"--rate and --{min(sizes - {'rate'})} contradict each other: the rate "
                "is --batch_size over --population. Give --rate alone, or both others."
            )
        if kind in (*_REPLACE_ONE, "random_allocation") and "rate" in sizes:
            raise ValueError(
                f"--rate has no effect with --sampling={kind}: give --batch_size and "
                "--population."
            )
    if flags.convention == "paper":
        if kind not in _REPLACE_ONE:
            raise ValueError(
                "--convention=paper has no effect with --sampling="
                f"{kind}: it is about neighbours that differ by replacing one record, "
                f"as with --sampling={', '.join(_REPLACE_ONE)}."
            )
        if flags.unit in ("batch", "group"):
            raise ValueError(
                f"--convention=paper and --unit={flags.unit} contradict each other: "
                "the paper clips each record on its own."
            )


def refuse_twice(argv: Sequence[str], flags: Any) -> None:
    """Raises for a flag that is given twice, of which the last alone would count."""
    names = [word.lstrip("-").split("=")[0] for word in argv if word.startswith("-")]
    for name in names:
        if name in flags and names.count(name) > 1:
            raise ValueError(
                f"--{name} is given twice, and the last would hide the first: give it "
                "once, with a list, as in --steps=10,20, where several are meant."
            )
