r"""Compares clip rules at equal epsilon on handwritten digits.

    python -m keras_examples.compare

Every rule trains the same small network on the same digits with the same privacy; its
clip norm and learning rate are chosen by separate runs, and then measured in fresh
runs. Three variants: the digits as they are (plain), with strong noise on every image
(hard), and with few examples of half of the classes (imbalanced). The measure is macro
accuracy: the mean over classes.

Claims that the report looks at: larger clip norms suit smaller epsilons, automatic
clipping falls behind where the problem is hard (Rehn et al. 2025); layerwise clipping
against scaled and flat clipping (Nguyen et al. 2023); following a quantile against the
best fixed clip norm (Andrew et al. 2021).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable

import tfdpclip as dpc
from driver_kit import intervals, programs, progress, settings
from keras_examples import networks, trials
from keras_examples.digits_data import VARIANTS, load_data
from tfdpclip import pictures


def _fixed(norm: float) -> dpc.FixedClip:
    # Divided by the clip norm, so that the same grid of learning rates suits all norms.
    return dpc.FixedClip(norm, normalize=True)


#: The function that makes each rule, and whether it has a clip norm to choose.
RULES: dict[str, tuple[Callable[[float], dpc.ClipRule], bool]] = {
    "fixed": (_fixed, True),
    "quantile": (lambda c: dpc.QuantileClip(normalize=True), False),
    "automatic": (lambda c: dpc.AutomaticClip(), False),
    "layerwise": (lambda c: dpc.LayerwiseClip(_fixed(c)), True),
    "layerwise quantile": (
        lambda c: dpc.LayerwiseClip(dpc.QuantileClip(normalize=True)),
        False,
    ),
    "public norms": (lambda c: dpc.PublicNormClip(_fixed(c)), True),
    "scaled": (lambda c: dpc.ScaledClip(None, _fixed(c)), True),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a comparison."""

    rules: tuple[str, ...] = settings.choices(
        tuple(RULES), tuple(RULES), "Which rules."
    )
    variants: tuple[str, ...] = settings.choices(VARIANTS, VARIANTS, "Which variants.")
    epsilons: tuple[float, ...] = settings.numbers(
        (1, 8), "Privacy budgets.", good=4, above=0
    )
    delta: float = settings.delta()
    clip_norms: tuple[float, ...] = settings.numbers(
        (0.1, 1, 3), "Clip norms to choose from.", good=1, above=0
    )
    learning_rates: tuple[float, ...] = settings.numbers(
        (0.1, 0.3, 0.6), "Learning rates to choose from (momentum 0.9).", above=0
    )
    batch_size: int = settings.count(256, "Expected examples per step.")
    epochs: int = settings.count(10, "How often to go through the data, on average.")
    tuning_repeats: int = settings.count(
        3, "Runs per choice of clip norm and learning rate."
    )
    repeats: int = settings.count(6, "Fresh runs of the chosen settings.", least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("compare")


def problem(variant: str, used: Settings) -> trials.Problem:
    """The data and network of a variant."""
    return trials.Problem(
        variant,
        load_data(variant),
        networks.digits_network,
        used.batch_size,
        used.epochs,
        used.delta,
    )


def _candidate(name: str, used: Settings) -> trials.Candidate:
    make, has_norm = RULES[name]
    norms = used.clip_norms if has_norm else (math.nan,)
    return trials.Candidate(name, make, norms, each=name == "fixed")


def _findings(used, results) -> list[str]:
    texts = []
    found = {(r["variant"], r["epsilon"], r["rule"]): r for r in results}

    def versus(one, other, claim):
        parts = []
        for variant in used.variants:
            for epsilon in used.epsilons:
                pair = [found.get((variant, epsilon, n)) for n in (one, other)]
                if None in pair:
                    continue
                difference, half, words = intervals.verdict(*pair, "macro_accuracy")
                parts.append(
                    f"{variant} at epsilon {epsilon:g}: {difference:+.3f} "
                    f"+- {half:.3f}, {words}"
                )
        if parts:
            texts.append(f"{claim} {one} against {other}: {'; '.join(parts)}.")

    chosen = []
    for variant in used.variants:
        tops = []
        for epsilon in sorted(used.epsilons):
            swept = [
                found[variant, epsilon, f"fixed {c:g}"]
                for c in used.clip_norms
                if (variant, epsilon, f"fixed {c:g}") in found
            ]
            if len(swept) < 2:
                continue
            best, second, *_ = sorted(swept, key=lambda r: -r["macro_accuracy"])
            words = intervals.verdict(best, second, "macro_accuracy")[2]
            tops.append(
                f"epsilon {epsilon:g}: {best['clip_norm']:g} ("
                f"{best['macro_accuracy']:.3f}; next {second['clip_norm']:g} with "
                f"{second['macro_accuracy']:.3f}, {words})"
            )
        if tops:
            chosen.append(f"{variant}, {', '.join(tops)}")
    if chosen:
        texts.append(
            "Claim: larger clip norms suit smaller epsilons. Best fixed clip norm in "
            f"the fresh runs: {'; '.join(chosen)}. Where it is not told apart from the "
            "next, this decides nothing."
        )
    versus(
        "automatic", "fixed", "Claim: automatic clipping falls behind on hard problems."
    )
    versus("quantile", "fixed", "Claim: following the median does as well as tuning C.")
    versus("layerwise", "fixed", "Claim: layerwise clipping beats a flat clip.")
    versus(
        "public norms", "layerwise", "Claim: clips in proportion to public norms help."
    )
    versus("scaled", "layerwise", "Claim: scaling saves the factor sqrt(L).")
    versus("scaled", "fixed", "Scaled layers or one flat clip?")
    return texts


def run(used: Settings) -> programs.Outcome:
    """Runs the comparison."""
    tuning, results, statements = [], [], []
    started = time.monotonic()
    rules = len(used.variants) * len(used.epsilons) * len(used.rules)
    bar, count = progress.Progress("comparing", rules, unit="rule"), itertools.count(1)
    for variant in used.variants:
        for epsilon in used.epsilons:
            here = problem(variant, used)
            tried, measured = trials.compared(
                here,
                epsilon,
                [_candidate(name, used) for name in used.rules],
                used.learning_rates,
                tuning_repeats=used.tuning_repeats,
                repeats=used.repeats,
                done=lambda text: bar.show(next(count), [text]),
            )
            tuning += tried
            results += measured
            spent = trials.statement(here, epsilon)
            statements.append(f"{variant}, each run: {spent}")
    shown = [
        {k: v for k, v in r.items() if k not in ("runs", "standard_error")}
        for r in results
    ]
    return programs.Outcome(
        title="Clip rules at equal epsilon, on digits",
        findings=_findings(used, results),
        privacy="\n".join(statements),
        caveats=[
            "The statements are for one run each. Hundreds of runs were made to choose "
            "clip norms and learning rates, which they do not count; the data are "
            "public, so nothing is lost here.",
            f"low and high: a 95 % interval of the mean of {used.repeats} runs (t), "
            "over new weights, batches and noise. All runs share one split of 1797 "
            "images, so differences of a few images may not carry over.",
            "Clip norm and learning rate were chosen by accuracy on the test images, "
            "in other runs than those reported. 'fixed' is the best of the rules "
            "'fixed C', measured again.",
            "public norms and scaled use 288 images as public data.",
            f"{time.monotonic() - started:.0f} seconds.",
        ],
        tables={"results": results, "tuning": tuning, "summary": shown},
        figures={"compare": _plot(used, results)},
        shown=("summary",),
    )


def _plot(used, results):
    rows, columns = len(used.variants), len(used.epsilons)
    picture, axes = pictures.new(
        1.8 + 4.2 * columns, 1.0 + 0.32 * rows * 10, rows, columns, sharex="row"
    )
    for i, variant in enumerate(used.variants):
        for j, epsilon in enumerate(used.epsilons):
            ax = axes[i, j]
            mine = [
                r for r in results if (r["variant"], r["epsilon"]) == (variant, epsilon)
            ][::-1]
            for k, row in enumerate(mine):
                swept = row["rule"].startswith("fixed ")
                color = pictures.GREY if swept else pictures.COLORS[0]
                middle = row["macro_accuracy"]
                ax.errorbar(
                    100 * middle,
                    k,
                    xerr=[
                        [100 * (middle - row["low"])],
                        [100 * (row["high"] - middle)],
                    ],
                    fmt="o" if swept else "s",
                    color=color,
                    capsize=3,
                )
            ax.set_yticks(range(len(mine)), [r["rule"] for r in mine], fontsize=9)
            ax.set_title(f"{variant}, epsilon = {epsilon:g}", fontsize=10.5)
            if i == rows - 1:
                ax.set_xlabel("macro accuracy on test images (%)")
    pictures.title(
        picture,
        "Clip rules on digits: mean and 95 % interval over runs\n"
        "(grey: each fixed clip norm; blue: each rule with its best settings)",
        fontsize=11,
    )
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
