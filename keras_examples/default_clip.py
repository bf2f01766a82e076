r"""Asks which clip rule should be the default: at equal epsilon, on real data.

    python -m keras_examples.default_clip --data_dir=DIR

Every rule that needs no clip norm is measured against fixed clip norms (normalised, so
that the learning rate does not depend on the norm), each with its own learning rate:
"fixed" is the best of the grid's norms and rates, which a search would find if it cost
no privacy. The measure is macro accuracy, the mean over classes.

DIR has mnist and fashion_mnist in it, each as keras_examples.mnist_cnn reads it, and
for the tasks plays and plays_embedding (whether a speech is from a comedy, a history or
a tragedy) shakespeare, the plays as keras_examples.people_study reads them. The
measurements are kept in OUTPUT_DIR/trials.jsonl, and a run that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import intervals, kept, programs, progress, settings
from driver_kit.lazy import tf
from keras_examples import (
    features,
    image_data,
    networks,
    plays,
    training,
    trials,
    tuning_models,
)
from keras_examples.digits_data import load_data
from tfdpclip import pictures


def _following(
    quantile: float, minimum_norm: float = 0.0, maximum_norm: float | None = None
) -> Callable[[], dpc.ClipRule]:
    return lambda: dpc.QuantileClip(
        quantile,
        initial_norm=1.0,
        normalize=True,
        minimum_norm=minimum_norm,
        maximum_norm=maximum_norm,
    )


#: Rules that need no clip norm, by name.
RULES: dict[str, Callable[[], dpc.ClipRule]] = {
    # As in Andrew et al. (2021): not normalised.
    "quantile": lambda: dpc.QuantileClip(),
    "quantile 0.5": _following(0.5),
    "quantile 0.65": _following(0.65),
    "quantile 0.8": _following(0.8),
    "automatic": lambda: dpc.AutomaticClip(),
    # Bounded below, or on both sides; the last is the default of the optimizers.
    "0.65 over 0.1": _following(0.65, minimum_norm=0.1),
    "0.5 in 0.1-1": _following(0.5, minimum_norm=0.1, maximum_norm=1.0),
    "0.65 in 0.1-1": _following(0.65, minimum_norm=0.1, maximum_norm=1.0),
    "0.65 in 0.1-3": _following(0.65, minimum_norm=0.1, maximum_norm=3.0),
}
_UNBOUNDED = ("quantile", "quantile 0.5", "quantile 0.65", "quantile 0.8", "automatic")
_DIGITS = {
    "digits": "plain",
    "hard_digits": "hard",
    "imbalanced_digits": "imbalanced",
}
_IMAGES = ("mnist", "fashion_mnist", "imbalanced_fashion", "fashion_resnet")
_PLAYS = ("plays", "plays_embedding")
TASKS = (*_DIGITS, *_IMAGES, *_PLAYS, "features")
#: Factors for a rule that is not normalised, whose useful rates are times 1 / C.
_WIDER = (1.0, 4.0, 16.0)
_KEPT = "trials.jsonl"
#: Settings that do not change a kept line.
_FREE = (
    "tasks",
    "features",
    "data_dir",
    "rules",
    "epsilons",
    "figure_format",
    "output_dir",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a study."""

    tasks: tuple[str, ...] = settings.choices(("mnist",), TASKS, "What to train on.")
    features: str | None = settings.words(
        None,
        "Files of features of a frozen network, separated by commas: the task features "
        "trains a linear head on each.",
        good="features.npz",
    )
    data_dir: str | None = settings.words(
        None, "Directory with mnist, fashion_mnist and shakespeare in it."
    )
    rules: tuple[str, ...] = settings.choices(
        _UNBOUNDED, tuple(RULES), "Which rules, beside fixed."
    )
    epsilons: tuple[float, ...] = settings.numbers(
        (0.5, 1, 3, 8), "Privacy budgets.", good=4, above=0
    )
    delta: float = settings.delta()
    clip_norms: tuple[float, ...] = settings.numbers(
        (0.1, 0.3, 1, 3, 10), "Fixed clip norms to choose from.", good=1, above=0
    )
    learning_rates: tuple[float, ...] = settings.numbers(
        (0.05, 0.15, 0.5), "Learning rates to choose from (momentum 0.9).", above=0
    )
    batch_size: int = settings.count(512, "Expected examples per step.")
    epochs: int = settings.count(5, "How often to go through the data, on average.")
    examples: int | None = settings.count(
        None, "Train on no more than so many examples of each task.", good=20_000
    )
    tuning_repeats: int = settings.count(1, "Runs per choice of norm and rate.")
    repeats: int = settings.count(5, "Fresh runs of the chosen settings.", least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("default_clip")


def _feature_files(used: Settings) -> list[str]:
    if not used.features:
        raise settings.UsageError(
            "flag --features is missing: --tasks=features needs files, for example "
            "--features=runs/features/features.npz."
        )
    return [name for name in used.features.split(",") if name]


def problem(task: str, used: Settings) -> trials.Problem:
    """The data and network of a task."""
    if task in _DIGITS:
        data, make = load_data(_DIGITS[task]), networks.digits_network
    elif task == "fashion_resnet":
        data, make = _images(task, used), networks.small_resnet
    elif task in _IMAGES:
        data, make = _images(task, used), lambda: networks.mnist_network("tutorial")
    elif task in _PLAYS:
        train, test = plays.kinds(used.data_dir, as_bag=task == "plays")
        data = trials.Data(train, None, test)
        make = lambda: _head(plays.BUCKETS, 3)  # noqa: E731
        if task == "plays_embedding":
            make = tuning_models.pooled_embedding(plays.WORDS, plays.BUCKETS, 16, 3)
    else:
        found = features.read(task)
        if found.spent:
            raise settings.UsageError(
                f"flag --features={task}: their network was trained on these very "
                "records, at a cost that the statements of this study leave out. Use "
                "features of a frozen network, or keras_examples.tune_grid."
            )
        data = trials.Data(found.train, None, found.test)
        width = found.train[0].shape[1]
        make = lambda: _head(width, found.classes)  # noqa: E731
    if used.examples is not None:
        # In an order of their own: files may be sorted by class.
        order = np.random.default_rng(0).permutation(len(data.train[1]))
        kept = order[: used.examples]
        x, y = data.train
        data = dataclasses.replace(data, train=(x[kept], y[kept]))
    path = pathlib.Path(task)
    name = task if task in TASKS else f"{path.absolute().parent.name}/{path.stem}"
    return trials.Problem(name, data, make, used.batch_size, used.epochs, used.delta)


def _images(task: str, used: Settings) -> trials.Data:
    folder = "mnist" if task == "mnist" else "fashion_mnist"
    images = image_data.of_folder(folder, used.data_dir)
    x, y = training.scaled(images.train[0]), images.train[1]
    if task == "imbalanced_fashion":
        # Every tenth example of classes 5 to 9 stays.
        rank = np.zeros(len(y), int)
        for label in range(images.classes):
            rank[y == label] = np.arange(np.sum(y == label))
        kept = (y < 5) | (rank % 10 == 0)
        x, y = x[kept], y[kept]
    test = training.scaled(images.test[0]), images.test[1]
    return trials.Data((x, y), None, test)


def _head(width: int, classes: int) -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((width,)), layers.Dense(classes)])


def candidates(used: Settings) -> list[trials.Candidate]:
    """The fixed norms, and the rules that need none."""
    fixed = trials.Candidate(
        "fixed",
        lambda norm: dpc.FixedClip(norm, normalize=True),
        used.clip_norms,
        each=True,
    )
    found = [fixed]
    for name in used.rules:
        rule = RULES[name]
        rates = None
        if not getattr(rule(), "normalize", True):
            rates = tuple(sorted({r * w for r in used.learning_rates for w in _WIDER}))
        found.append(
            trials.Candidate(name, lambda norm, rule=rule: rule(), rates=rates)
        )
    return found


def _kept(used: Settings) -> kept.Kept:
    """The earlier measurements with the same settings."""
    unchanged = dataclasses.asdict(used)
    for name in _FREE:
        del unchanged[name]
    return kept.Kept(pathlib.Path(used.output_dir) / _KEPT, unchanged)


def run(used: Settings) -> programs.Outcome:
    """Measures the missing runs, and reports."""
    known = _kept(used)
    tuning: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    statements = []
    tasks = [task for task in used.tasks if task != "features"]
    if "features" in used.tasks:
        tasks += _feature_files(used)
    rules = len(tasks) * len(used.epsilons) * (1 + len(used.rules))
    bar, count = progress.Progress("measuring", rules, unit="rule"), itertools.count(1)
    for task in tasks:
        here = problem(task, used)
        for epsilon in used.epsilons:
            for candidate in candidates(used):
                found = known.get(
                    (here.name, epsilon, candidate.name),
                    functools.partial(_measure, used, here, epsilon, candidate),
                )
                tuning += found["tuning"]
                results += found["results"]
                accuracy = f"{100 * results[-1]['macro_accuracy']:.1f} %"
                text = f"{here.name}, epsilon {epsilon:g}, {candidate.name}: {accuracy}"
                bar.show(next(count), [text])
            statements.append(
                f"{here.name}, each run: {trials.statement(here, epsilon)}"
            )
    gaps = list(_gaps(results))
    return programs.Outcome(
        title="Which clip, when nobody says? Rules at equal epsilon",
        findings=_findings(gaps, used),
        privacy="\n".join(statements),
        caveats=[
            "The statements are for one run each. The runs that chose clip norms and "
            "learning rates are not counted; the data are public.",
            "Clip norm and learning rate were chosen by accuracy on the test images, "
            "in other runs than those reported. Rules without a norm chose a rate "
            "only; 'quantile', which is not normalised, among more of them.",
            "gap_to_greatest is to the greatest fresh mean of any norm, which flatters "
            "fixed norms: a maximum is above what any of them would get again.",
            f"low and high: a 95 % interval of the mean of {used.repeats} runs (t), "
            "over new weights, batches and noise.",
        ],
        tables={"gaps": gaps, "results": results, "tuning": tuning},
        figures={"gaps": _plot(gaps)} if gaps else {},
        shown=("gaps",),
    )


def _measure(used, here, epsilon, candidate) -> dict[str, Any]:
    tuning, results = trials.compared(
        here,
        epsilon,
        [candidate],
        used.learning_rates,
        tuning_repeats=used.tuning_repeats,
        repeats=used.repeats,
    )
    return {"tuning": tuning, "results": results}


def _gaps(results):
    """Each rule's accuracy less that of the best fixed clip norm."""
    by_place: dict[tuple, dict[str, dict]] = {}
    for row in results:
        by_place.setdefault((row["variant"], row["epsilon"]), {})[row["rule"]] = row
    for (task, epsilon), rows in by_place.items():
        best = rows["fixed"]
        greatest = max(
            row["macro_accuracy"]
            for name, row in rows.items()
            if name.startswith("fixed")
        )
        for name, row in rows.items():
            if name == "fixed":
                continue
            difference, half, words = intervals.verdict(row, best, "macro_accuracy")
            yield {
                "task": task,
                "epsilon": epsilon,
                "rule": name,
                "learning_rate": row["learning_rate"],
                "accuracy": round(100 * row["macro_accuracy"], 2),
                "best_fixed": round(100 * best["macro_accuracy"], 2),
                "best_norm": best["clip_norm"],
                "gap": round(100 * difference, 2),
                "gap_half_width": round(100 * half, 2),
                "gap_to_greatest": round(100 * (row["macro_accuracy"] - greatest), 2),
                "verdict": words,
            }


def _findings(gaps, used) -> list[str]:
    texts = []
    for name in used.rules:
        mine = [row for row in gaps if row["rule"] == name]
        within = [row for row in mine if row["gap"] >= -0.5]
        worst = min(mine, key=lambda row: row["gap"])
        texts.append(
            f"{name}: within 0.5 points of the best fixed clip in {len(within)} of "
            f"{len(mine)} cases; {np.mean([row['gap'] for row in mine]):+.2f} points "
            f"on average, at worst {worst['gap']:+.2f} +- "
            f"{worst['gap_half_width']:.2f} ({worst['task']}, epsilon "
            f"{worst['epsilon']:g})."
        )
    return texts


def _plot(gaps):
    names = [n for n in dict.fromkeys(row["rule"] for row in gaps)]
    places = list(dict.fromkeys((row["task"], row["epsilon"]) for row in gaps))
    picture, axes = pictures.new(8.5, 1.5 + 0.34 * len(names), 1, 1)
    ax = axes[0, 0]
    for k, place in enumerate(places):
        mine = {r["rule"]: r for r in gaps if (r["task"], r["epsilon"]) == place}
        shift = (k - (len(places) - 1) / 2) * 0.6 / max(1, len(places))
        ax.errorbar(
            [mine[n]["gap"] for n in names],
            [i + shift for i in range(len(names))],
            xerr=[mine[n]["gap_half_width"] for n in names],
            fmt="osD^"[k // len(pictures.COLORS) % 4],
            ms=4,
            color=pictures.COLORS[k % len(pictures.COLORS)],
            label=f"{place[0]}, epsilon {place[1]:g}",
        )
    ax.axvspan(-0.5, 0.5, color=pictures.GREY, alpha=0.2, lw=0)
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel("macro accuracy less that of the best fixed clip (points)")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    pictures.title(
        picture,
        "Rules without a clip norm to choose, against the best one",
        fontsize=11,
    )
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
