r"""Asks what augmented views of an example bring, at equal privacy.

    python -m keras_examples.views_study --dataset=fashion_mnist --data_dir=DIR

De et al. (2022) clip the mean gradient of K augmented views of each example, and train
with large batches, group normalisation and averaged weights. Here a network is trained
privately from scratch with K = 1, 2, 4, ... views (shifted and mirrored images; 0 is
the image as it is), with the same noise, batches and steps. Each run is scored with its
last weights and with their exponential average. The learning rate is chosen for one
view, in runs that are not reported. The measurements are kept in
OUTPUT_DIR/trials.jsonl, and a run that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import time
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import intervals, kept, programs, progress, settings
from driver_kit.lazy import tf
from keras_examples import image_data, networks, training
from tfdpclip import pictures

#: The networks, by name.
NETWORKS = {
    "cnn": lambda shape: networks.mnist_network("tutorial", shape),
    "wide_resnet": lambda shape: networks.wide_resnet(shape),
    "narrow_resnet": lambda shape: networks.wide_resnet(shape, 10, 1, 8),
}
_TUNING_SEED = 1000
# Settings that do not change a kept line.
_FREE = ("views", "seeds", "learning_rates", "figure_format", "output_dir", "data_dir")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    dataset: str = settings.choice(
        "fashion_mnist",
        ("mnist", "fashion_mnist", "cifar10", "digits", "synthetic"),
        "Which images.",
    )
    data_dir: str | None = settings.words(
        None,
        "Where the images are.",
        only_with=("dataset", "mnist", "fashion_mnist", "cifar10"),
    )
    examples: int = settings.count(60_000, "At most so many training images.", least=20)
    network: str = settings.choice("cnn", tuple(NETWORKS), "What is trained.")
    epsilon: float = settings.number(3.0, "The privacy budget.", above=0)
    delta: float = settings.delta()
    batch_size: int = settings.count(1024, "Expected number of images per step.")
    epochs: int = settings.count(10, "How often to go through the images.")
    views: tuple[int, ...] = settings.numbers(
        (0, 1, 2, 4, 8, 16), "Views of an image; 0: as it is.", integer=True, least=0
    )
    learning_rates: tuple[float, ...] = settings.numbers(
        (0.1, 0.25, 0.5, 1.0), "Among which one is chosen for one view.", above=0
    )
    shift: int = settings.count(2, "By how many pixels views are shifted at most.")
    averaging: float = settings.number(
        0.95, "The share of the average that stays in a step.", above=0, below=1
    )
    seeds: int = settings.count(3, "Runs of each kind.", least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("views_study")


class Study:
    """The images, and their measurements."""

    def __init__(self, used: Settings):
        self.used = used
        images = image_data.load(used.dataset, used.data_dir, (28, 28, 1))
        x, y = images.train
        # The same images in every run, chosen independently of their contents.
        chosen = np.random.default_rng(0).permutation(len(x))[: used.examples]
        self.x, self.y = training.scaled(x[chosen]), y[chosen]
        self.test = training.scaled(images.test[0]), images.test[1]
        self.name = images.name
        asked = dataclasses.asdict(used)
        asked = {k: v for k, v in asked.items() if k not in _FREE}
        self.known = kept.Kept(pathlib.Path(used.output_dir) / "trials.jsonl", asked)

    def plan(self, views: int) -> dpc.keras.PrivacyPlan:
        """A new plan, of which nothing is spent."""
        return dpc.keras.PrivacyPlan(
            self.used.epsilon,
            self.used.delta,
            examples=len(self.x),
            batch_size=self.used.batch_size,
            epochs=self.used.epochs,
            views=max(views, 1),
        )

    def trial(self, views: int, learning_rate: float, seed: int) -> dict[str, Any]:
        """The results of a run, measured or known."""
        place = (views, learning_rate, seed)
        return self.known.get(place, functools.partial(self._measure, *place))

    def _measure(self, views, learning_rate, seed) -> dict[str, Any]:
        tf.keras.utils.set_random_seed(seed)
        started = time.monotonic()
        plan = self.plan(views)
        model = NETWORKS[self.used.network](self.x.shape[1:])
        # Each kind checks itself in its first run.
        checks = {"check_gradients": "never"} if seed else {}
        optimizer = plan.optimizer(
            dpc.keras.DPSGD,
            learning_rate,
            momentum=0.9,
            seed=seed,
            use_ema=True,
            ema_momentum=self.used.averaging,
            **checks,
        )
        model.compile(optimizer, training.LOSS, weighted_metrics=["accuracy"])
        batches = plan.batches((self.x, self.y), seed=seed)
        if views:
            batches = batches.map(_augmented(self.used.shift, self.used.dataset))
        last: list = []

        # `fit` ends by putting the average in the place of the weights.
        def keep(epoch, logs=None):
            last[:] = model.get_weights()

        callbacks = [tf.keras.callbacks.LambdaCallback(on_epoch_end=keep)]
        callbacks += plan.callbacks
        model.fit(batches, epochs=plan.epochs, callbacks=callbacks, verbose=0)
        averaged = self._accuracy(model)
        model.set_weights(last)
        return {
            "accuracy": self._accuracy(model),
            "averaged": averaged,
            "epsilon": plan.statement().epsilon,
            "seconds": time.monotonic() - started,
        }

    def _accuracy(self, model) -> float:
        x, y = self.test
        return float(np.mean(np.argmax(model.predict(x, 500, verbose=0), 1) == y))


def _augmented(shift: int, dataset: str):
    """An image shifted by some pixels, and mirrored where that is the same thing."""

    def augmented(x, y):
        rows, columns, channels = x.shape
        padded = tf.pad(x, [[shift, shift], [shift, shift], [0, 0]])
        x = tf.image.random_crop(padded, [rows, columns, channels])
        if dataset in ("fashion_mnist", "cifar10"):
            x = tf.image.random_flip_left_right(x)
        return x, y

    return augmented


def run(used: Settings) -> programs.Outcome:
    """Runs the study."""
    study, views = Study(used), used.views
    total = len(used.learning_rates) + used.seeds * len(views)
    bar, count = progress.Progress("measuring", total, unit="run"), itertools.count(1)
    tuning = []
    for rate in used.learning_rates:
        found = study.trial(1, rate, _TUNING_SEED)
        tuning.append({"learning_rate": rate, "accuracy": found["accuracy"]})
        bar.show(next(count), [f"rate {rate:g}: {found['accuracy']:.1%}"])
    rate = max(tuning, key=lambda row: row["accuracy"])["learning_rate"]
    results: dict[int, list] = {k: [] for k in views}
    for seed in range(used.seeds):
        for k in views:
            found = study.trial(k, rate, seed)
            results[k].append(found)
            bar.show(next(count), [f"{k} views: {found['accuracy']:.1%}"])
    table = [
        {
            "views": k,
            "weights": weights,
            **intervals.of_mean([f[metric] for f in found], "accuracy"),
            "seconds": float(np.median([f["seconds"] for f in found])),
        }
        for k, found in results.items()
        for weights, metric in (("last", "accuracy"), ("averaged", "averaged"))
    ]
    gains = [
        {
            "views": k,
            "weights": weights,
            **intervals.of_mean(
                [f[m] - one[m] for f, one in zip(found, results[1], strict=True)],
                "gain",
            ),
        }
        for k, found in results.items()
        for weights, m in (("last", "accuracy"), ("averaged", "averaged"))
        if 1 in results and k != 1
    ]
    plan = study.plan(1)
    return programs.Outcome(
        title="Augmented views of an example, at equal privacy",
        findings=[
            f"{study.name}: {len(study.x):,} training images, {used.network}, rate "
            f"{rate:g} (chosen for one view).",
            *_findings(table),
        ],
        privacy=f"of one run each: ({used.epsilon:g}, {used.delta:g})-differential "
        f"privacy with noise multiplier {plan.noise_multiplier:.4g} in {plan.steps} "
        "steps, whatever the number of views.",
        caveats=[
            "Seeds make runs repeatable and not private; the images are public. The "
            "runs that chose the learning rate are not counted.",
            "The learning rate was chosen by test accuracy, for one view, in one run "
            "for each rate with a seed of its own: other numbers of views may have a "
            "better one.",
            f"low and high: a 95 % interval of the mean of {used.seeds} runs (t); the "
            "test images are the same.",
            "gains: over one view, in the run of the same seed, which has the same "
            "first weights, draws and noise; of several intervals, some miss.",
            "seconds are of whole runs: tracing, training and two evaluations.",
        ],
        tables={"results": table, "gains": gains, "tuning": tuning},
        figures={"views": _plot(table)},
        shown=("results", "gains", "tuning"),
        numbers={"learning_rate": rate},
    )


def _findings(table) -> list[str]:
    texts = []
    for weights in ("last", "averaged"):
        rows = [row for row in table if row["weights"] == weights]
        one = next((row for row in rows if row["views"] == 1), rows[0])
        best = max(rows, key=lambda row: row["accuracy"])
        gap, half, words = intervals.verdict(best, one, "accuracy")
        texts.append(
            f"{weights} weights: {best['views']} views are best, "
            f"{best['accuracy']:.2%}; less {one['views']}: {gap:+.2%} +- {half:.2%}, "
            f"{words}."
        )
    return texts


def _plot(table):
    picture, axes = pictures.new(6.5, 3.8)
    for k, weights in enumerate(("last", "averaged")):
        rows = [row for row in table if row["weights"] == weights]
        places = [i + 0.06 * (k - 0.5) for i in range(len(rows))]
        axes[0, 0].errorbar(
            places,
            [100 * row["accuracy"] for row in rows],
            yerr=[100 * (row["high"] - row["accuracy"]) for row in rows],
            capsize=2,
            label=f"{weights} weights",
            **pictures.style(k),
        )
    axes[0, 0].set_xticks(range(len(rows)), [str(row["views"]) for row in rows])
    axes[0, 0].set_xlabel("views of an image (0: as it is)")
    axes[0, 0].set_ylabel("test accuracy, %")
    axes[0, 0].legend(fontsize=8)
    pictures.title(picture, "Augmented views at equal privacy")
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
