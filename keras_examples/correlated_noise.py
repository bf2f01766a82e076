r"""Does adaptive clipping keep what correlated noise gains? On images, equal epsilon.

    python -m keras_examples.correlated_noise --data_dir=DIR
    python -m keras_examples.correlated_noise --dataset=digits --batch_size=120

Noise that is independent over the steps against a tree, a banded Toeplitz matrix and
buffers, all with batches in a fixed order: nothing is amplified by sampling. Each under
a fixed clip norm, a normalised quantile, and the median as in Andrew et al. (2021). Two
references are amplified, for which batches must be drawn at random and kept secret:
independent noise with Poisson sampling, a banded matrix with cyclic Poisson.

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
from collections.abc import Callable, Iterator
from typing import Any

import tfdpclip as dpc
from driver_kit import noise_studies, programs, settings
from keras_examples import image_data, noise_trials, trials

_NOISES = (*noise_trials.FIXED_ORDER, *noise_trials.AMPLIFIED)
_METRIC = "macro_accuracy"
# The factor on the learning rates of a rule whose clipped gradients are not divided by
# the clip norm, which is mostly well below 1.
_WIDER = 2.0
CLIPS: dict[str, Callable[[float], dpc.ClipRule]] = {
    "fixed": lambda norm: dpc.FixedClip(norm, normalize=True),
    "quantile": lambda norm: dpc.QuantileClip(
        0.65, initial_norm=1.0, normalize=True, minimum_norm=0.1
    ),
    "median": lambda norm: dpc.QuantileClip(initial_norm=1.0),
}
#: Settings that do not change a measurement.
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
        None,
        f"Directory with {image_data.MNIST_LAYOUT}.",
        only_with=("dataset", "mnist", "fashion_mnist"),
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
    buffers: int = settings.count(
        3,
        "Of buffered.",
        most=8,
        only_with=("noises", "buffered"),
    )
    clip_norms: tuple[float, ...] = settings.numbers(
        (1,),
        "Clip norms of fixed to choose from.",
        good=1,
        above=0,
        only_with=("clips", "fixed"),
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


class Study:
    """Measures the runs that are missing.

    Args:
      used: the settings.
    """

    def __init__(self, used: Settings):
        self.used, self.data = used, noise_trials.load(used)
        unchanged = {k: v for k, v in vars(used).items() if k not in _FREE}
        self.runs = noise_studies.Runs(
            used.output_dir, unchanged, "accuracy", used.report_only
        )
        self.plan = functools.cache(
            lambda name, epsilon: noise_trials.planned(
                name, epsilon, len(self.data.train[1]), used
            )
        )

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
        """The accuracy of a run, from the files or measured now."""
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

        return self.runs.score(place, measure)

    def result(self, epsilon: float, noise: str, clip: str) -> dict[str, Any]:
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
    """Measures the missing runs, and reports."""
    study = Study(used)
    cells = list(itertools.product(used.epsilons, used.noises, used.clips))
    results = study.runs.results(cells, study.result, _METRIC)
    gains = list(noise_studies.gains(results, _METRIC))
    figures = noise_studies.Figures(
        _METRIC,
        "accuracy",
        used.epsilons,
        used.noises,
        used.clips,
        used.repeats,
        "test images",
        "Held-out images",
        noise_trials.AMPLIFIED,
    )
    return programs.Outcome(
        title=f"Correlated noise under clips that adapt, on {study.data.name}",
        findings=noise_studies.findings(gains, used.epsilons, used.clips),
        privacy=study.runs.told(),
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
            "runs": study.runs.rows,
        },
        figures=figures.both(results, study.runs.rows),
        shown=("results", "gains", "noises"),
        numbers={"runs": len(study.runs.rows)},
    )


def _noises(study: Study, results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The accounting of each noise, before any training."""
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


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
