r"""Does adaptive clipping keep what correlated noise gains? On images, equal epsilon.

    python -m keras_examples.correlated_noise --data_dir=DIR
    python -m keras_examples.correlated_noise --dataset=digits --batch_size=120

Noise that is independent over the steps against a tree, a banded Toeplitz matrix and
buffers, all with batches in a fixed order: nothing is amplified by sampling. Each under
a fixed clip norm, a normalised quantile, and the median as Andrew et al. (2021) have
it. Two references are amplified, for which batches must be drawn at random and kept
secret: independent noise with Poisson sampling, a banded matrix with cyclic Poisson.

The learning rate (and a fixed clip norm) is chosen for each noise and clip rule on
images that are held out, by equally many runs; fresh runs measure the choice on the
test images. DIR is as for keras_examples.mnist_cnn. Every run is kept with its
statement in OUTPUT_DIR/trials.jsonl, and a study that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import tfdpclip as dpc
from driver_kit import kept, programs, progress, settings
from keras_examples import image_data, noise_trials, trials
from tfdpclip import pictures

_NOISES = (*noise_trials.FIXED_ORDER, *noise_trials.AMPLIFIED)
_INDEPENDENT = noise_trials.FIXED_ORDER[0]
# The rates of a rule whose clipped gradients are not divided by the clip norm, which is
# well below 1 most of the time, are so much wider.
_WIDER = 2.0
CLIPS: dict[str, Callable[[float], dpc.ClipRule]] = {
    "fixed": lambda norm: dpc.FixedClip(norm, normalize=True),
    "quantile": lambda norm: dpc.QuantileClip(
        0.65, initial_norm=1.0, normalize=True, minimum_norm=0.1
    ),
    "median": lambda norm: dpc.QuantileClip(initial_norm=1.0),
}
#: Settings that change nothing of what was measured.
_FREE = (
    *("data_dir", "noises", "clips", "epsilons", "clip_norms", "learning_rates"),
    *("repeats", "report_only", "figure_format", "output_dir"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a study."""

    dataset: str = settings.choice(
        "mnist",
        ("mnist", "fashion_mnist", "digits", "synthetic"),
        "Which images; the last two offline.",
    )
    data_dir: str | None = settings.words(
        None, f"Directory with {image_data.MNIST_LAYOUT}."
    )
    noises: tuple[str, ...] = settings.choices(
        _NOISES, _NOISES, "Which noises; poisson and cyclic are amplified by sampling."
    )
    clips: tuple[str, ...] = settings.choices(
        tuple(CLIPS), tuple(CLIPS), "Which clip rules."
    )
    epsilons: tuple[float, ...] = settings.numbers(
        (4, 1), "Privacy budgets.", good=4, above=0
    )
    delta: float = settings.delta()
    bands: int | None = settings.count(
        None, "Of toeplitz; by default the steps of an epoch, of which no more pay."
    )
    buffers: int = settings.count(3, "Of buffered.", most=8)
    clip_norms: tuple[float, ...] = settings.numbers(
        (1,), "Clip norms of fixed to choose from.", good=1, above=0
    )
    learning_rates: tuple[float, ...] = settings.numbers(
        (0.1, 0.25, 0.6, 1.5, 4, 10),
        "Learning rates to choose from (momentum 0.9); median has twice these.",
        above=0,
    )
    batch_size: int = settings.count(2000, "Examples per step.")
    epochs: int = settings.count(8, "How often to go through the data.")
    held_out: float = settings.number(
        1 / 6, "Share of the training images to choose by.", above=0, below=1
    )
    repeats: int = settings.count(5, "Fresh runs of the chosen settings.", least=2)
    report_only: bool = settings.switch(
        False, "Train nothing: report the noises and clips whose runs are all kept."
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("correlated_noise")


def _norms_and_rates(clip: str, used: Settings) -> Iterator[tuple[float, float]]:
    wider = _WIDER if clip == "median" else 1.0
    norms = used.clip_norms if clip == "fixed" else (math.nan,)
    for norm, rate in itertools.product(norms, used.learning_rates):
        yield norm, wider * rate


class _NotRun(Exception):
    """A run that a report would need."""


class Study:
    """Runs what was not run yet.

    Args:
      used: the settings.
    """

    def __init__(self, used: Settings):
        self.used, self.data = used, noise_trials.load(used)
        unchanged = {k: v for k, v in vars(used).items() if k not in _FREE}
        self._kept = kept.Kept(
            pathlib.Path(used.output_dir) / "trials.jsonl", unchanged
        )
        self.plan = functools.cache(
            lambda name, epsilon: noise_trials.planned(
                name, epsilon, len(self.data.train[1]), used
            )
        )
        #: A row for every run.
        self.runs: list[dict[str, Any]] = []
        #: What a run stated, by noise and epsilon.
        self.statements: dict[tuple[str, float], str] = {}

    def score(
        self,
        noise: str,
        epsilon: float,
        clip: str,
        norm: float,
        rate: float,
        part: str,
        repeat: int,
    ) -> float:
        """The accuracy of one run, of now or of before."""
        place = {
            "noise": noise,
            "epsilon": epsilon,
            "clip": clip,
            "clip_norm": None if math.isnan(norm) else norm,
            "learning_rate": rate,
            "part": part,
            "repeat": repeat,
        }

        def measure():
            return noise_trials.trained(
                self.data,
                self.plan(noise, epsilon),
                CLIPS[clip](norm),
                rate,
                epsilon,
                part,
                self.used,
            )

        key = tuple(place.values())
        if self.used.report_only and key not in self._kept:
            raise _NotRun
        found = self._kept.get(key, measure)
        self.runs.append(place | {k: v for k, v in found.items() if k != "statement"})
        self.statements.setdefault((noise, epsilon), found["statement"])
        return found["accuracy"]

    def result(self, noise: str, epsilon: float, clip: str) -> dict[str, Any]:
        """Chooses norm and rate on images that are held out; measures on the test."""
        score = functools.partial(self.score, noise, epsilon, clip)
        chosen = max(
            _norms_and_rates(clip, self.used),
            key=lambda choice: score(*choice, "validation", 0),
        )
        repeats = itertools.count()
        fresh = lambda rate: score(*chosen, "test", next(repeats))  # noqa: E731
        row = trials.measured(clip, (math.nan, *chosen, fresh), self.used.repeats)
        rates = [rate for _, rate in _norms_and_rates(clip, self.used)]
        return {
            "epsilon": epsilon,
            "noise": noise,
            **row,
            "end_of_grid": chosen[1] in (min(rates), max(rates)),
        }


def run(used: Settings) -> programs.Outcome:
    """Measures what is not measured yet, and reports."""
    study = Study(used)
    cells = list(itertools.product(used.epsilons, used.noises, used.clips))
    bar, results = progress.Progress("measuring", len(cells), unit="cell"), []
    for done, (epsilon, noise, clip) in enumerate(cells, 1):
        known = len(study.runs)
        try:
            results.append(study.result(noise, epsilon, clip))
        except _NotRun:
            del study.runs[known:]
            continue
        accuracy = f"{100 * results[-1]['macro_accuracy']:.1f} %"
        bar.show(done, [f"epsilon {epsilon:g}, {noise}, {clip}: {accuracy}"])
    bar.close()
    if not results:
        raise settings.UsageError(
            f"flag --report_only: {used.output_dir} has not all runs of any noise and "
            "clip; run it without, or with fewer --learning_rates or --repeats."
        )
    gains = list(_gains(results))
    return programs.Outcome(
        title=f"Correlated noise under clips that adapt, on {study.data.name}",
        findings=_findings(gains, used),
        privacy="\n".join(
            f"{noise}, epsilon {epsilon:g}, one run: {text}"
            for (noise, epsilon), text in study.statements.items()
        ),
        caveats=[
            "The statements are for one run each. The runs that chose clip norms and "
            "learning rates are not counted; the data are public.",
            "poisson and cyclic rest on another assumption: that nobody knows which "
            "images a step had.",
            "Clip norm and learning rate were chosen by one run each on "
            f"{len(study.data.validation[1])} images that no run trains on.",
            "end_of_grid: the best learning rate was the least or the greatest of all "
            "that were tried, and another might have been better.",
            f"Intervals are of 95 %, of the mean of {used.repeats} runs (t), over new "
            "weights and noise (and batches, where they are drawn at random).",
        ],
        tables={
            "gains": gains,
            "results": results,
            "noises": list(_noises(study, results)),
            "runs": study.runs,
        },
        figures=_figures(results, study.runs, used),
        shown=("results", "gains", "noises"),
        numbers={"runs": len(study.runs)},
    )


def _noises(study: Study, results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the accounting says of each noise, before anything is trained."""
    for epsilon, noise in dict.fromkeys((r["epsilon"], r["noise"]) for r in results):
        how = study.plan(noise, epsilon)
        yield {
            "epsilon": epsilon,
            "noise": noise,
            "noise_multiplier": how.noise_multiplier,
            "sensitivity": 1.0 if how.noise is None else how.noise.sensitivity,
            "deviation": how.deviation,
            "bands": getattr(how.matrix, "bands", None),
        }


def _difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """One mean less another, as a row that has its error."""
    return {
        "macro_accuracy": one["macro_accuracy"] - other["macro_accuracy"],
        "standard_error": math.hypot(one["standard_error"], other["standard_error"]),
        "runs": min(one["runs"], other["runs"]),
    }


def _gains(results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What each noise gains over independent noise, and how a clip changes that."""
    rows = {(r["epsilon"], r["noise"], r["rule"]): r for r in results}
    for (epsilon, noise, clip), row in rows.items():
        base = rows.get((epsilon, _INDEPENDENT, clip))
        if base is None or noise == _INDEPENDENT:
            continue
        gain, half, words = trials.verdict(row, base)
        told = {
            "epsilon": epsilon,
            "noise": noise,
            "clip": clip,
            "accuracy": round(100 * row["macro_accuracy"], 2),
            "independent": round(100 * base["macro_accuracy"], 2),
            "gain": round(100 * gain, 2),
            "gain_half_width": round(100 * half, 2),
            "verdict": words,
        }
        pair = [rows.get((epsilon, n, "fixed")) for n in (noise, _INDEPENDENT)]
        if clip != "fixed" and None not in pair:
            more, half, words = trials.verdict(
                _difference(row, base), _difference(*pair)
            )
            told |= {
                "more_than_fixed": round(100 * more, 2),
                "more_half_width": round(100 * half, 2),
                "against_fixed": words,
            }
        yield told


def _findings(gains: list[dict[str, Any]], used: Settings) -> list[str]:
    texts = []
    for epsilon, clip in itertools.product(used.epsilons, used.clips):
        parts = []
        for row in gains:
            if (row["epsilon"], row["clip"]) != (epsilon, clip):
                continue
            text = f"{row['noise']} {row['gain']:+.2f} +- {row['gain_half_width']:.2f}"
            if "more_than_fixed" in row:
                text += (
                    f" ({row['more_than_fixed']:+.2f} +- {row['more_half_width']:.2f} "
                    "to its gain under fixed)"
                )
            parts.append(text)
        if parts:
            texts.append(
                f"Epsilon {epsilon:g}, clip {clip}, points gained over independent "
                f"noise: {'; '.join(parts)}."
            )
    return texts or ["Without independent noise there is nothing to compare with."]


def _figures(results, runs, used: Settings) -> dict[str, Any]:
    columns = len(used.epsilons)
    accuracy, axes = pictures.new(1.8 + 3.6 * columns, 4.0, columns=columns)
    noises = [n for n in used.noises if any(r["noise"] == n for r in results)]
    for ax, epsilon in zip(axes[0], used.epsilons, strict=True):
        for k, clip in enumerate(used.clips):
            mine = [r for r in results if (r["epsilon"], r["rule"]) == (epsilon, clip)]
            shift = (k - (len(used.clips) - 1) / 2) * 0.2
            ax.errorbar(
                [noises.index(r["noise"]) + shift for r in mine],
                [100 * r["macro_accuracy"] for r in mine],
                yerr=[100 * (r["high"] - r["macro_accuracy"]) for r in mine],
                **pictures.style(k) | {"linestyle": "none"},
                capsize=3,
                label=clip,
            )
        for k, noise in enumerate(noises):
            if noise in noise_trials.AMPLIFIED:
                ax.axvspan(k - 0.5, k + 0.5, color="#eeeeee", lw=0)
        ax.set_xticks(range(len(noises)), noises, rotation=30, ha="right")
        ax.set_title(f"epsilon = {epsilon:g}", fontsize=10.5)
    axes[0, 0].set_ylabel("macro accuracy on test images (%)")
    axes[0, 0].legend(fontsize=8, frameon=False, title="clip", title_fontsize=8)
    words = f"Mean and 95 % interval of {used.repeats} runs"
    if not set(noises).isdisjoint(noise_trials.AMPLIFIED):
        words += " (grey: amplified by sampling)"
    pictures.title(accuracy, words, fontsize=9.5)
    return {"accuracy": accuracy, "rates": _rates(runs, noises, used)}


def _rates(runs, noises, used: Settings):
    """The accuracies by which learning rates were chosen."""
    rows, columns = len(used.epsilons), len(used.clips)
    figure, axes = pictures.new(
        1.5 + 3 * columns, 0.8 + 2.5 * rows, rows, columns, sharey="row"
    )
    tried = [run for run in runs if run["part"] == "validation"]
    for (i, epsilon), (j, clip), (k, noise) in itertools.product(
        enumerate(used.epsilons), enumerate(used.clips), enumerate(noises)
    ):
        best: dict[float, float] = {}
        for r in tried:
            if (r["epsilon"], r["clip"], r["noise"]) == (epsilon, clip, noise):
                rate = r["learning_rate"]
                best[rate] = max(best.get(rate, 0.0), 100 * r["accuracy"])
        if best:
            axes[i, j].plot(
                *zip(*sorted(best.items()), strict=True),
                **pictures.style(k),
                label=noise,
            )
        axes[i, j].set_xscale("log")
        axes[i, j].set_title(f"epsilon = {epsilon:g}, {clip}", fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("learning rate")
    for ax in axes[:, 0]:
        ax.set_ylabel("macro accuracy (%)")
    axes[0, 0].legend(fontsize=7, frameon=False)
    pictures.title(figure, "Held-out images, one run each: how rates were chosen")
    return figure


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
