r"""Compares Poisson sampling, random allocation and shuffling at equal privacy.

    python -m keras_examples.allocation_study --dataset=mnist --data_dir=DIR

A small network is trained privately from scratch with each, at the same epsilon, delta,
epochs, and expected batch size; `PrivacyPlan` computes the noise for the way to draw.
Runs draw fresh noise. Learning rate and clip rule are the same for all.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import intervals, programs, settings
from keras_examples import image_data
from tfdpclip import pictures

_SCHEMES = ("poisson", "random_allocation", "shuffled")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    dataset: str = settings.choice(
        "digits", ("digits", "mnist", "fashion_mnist"), "What to learn."
    )
    data_dir: str | None = settings.words(
        None, f"Directory with {image_data.MNIST_LAYOUT}."
    )
    epsilon: float = settings.number(3.0, "The budget of every run.", above=0)
    delta: float = settings.number(1e-5, "Its delta.", above=0, below=1)
    examples: int = settings.count(12_000, "How many training images, at most.")
    batch_size: int = settings.count(1200, "Expected images in a step.")
    epochs: int = settings.count(5, "How often to go through them.")
    learning_rate: float = settings.number(0.5, "Of DPSGD.", above=0)
    repeats: int = settings.count(3, "Runs of each.", good=3, least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("allocation_study")


def run(used: Settings) -> programs.Outcome:
    """Trains with each way to draw."""
    images = image_data.load(used.dataset, used.data_dir, (28, 28, 1))
    (x, y), test = (
        (a.astype(np.float32) / 255, b) for a, b in (images.train, images.test)
    )
    chosen = np.random.default_rng(0).permutation(len(x))[: used.examples]
    data = x[chosen], y[chosen]
    trials, rows = [], []
    for scheme in _SCHEMES:
        plan = dpc.keras.PrivacyPlan(
            used.epsilon,
            used.delta,
            examples=len(data[0]),
            batch_size=min(used.batch_size, len(data[0])),
            epochs=used.epochs,
            sampling=scheme,
        )
        for repeat in range(used.repeats):
            trials.append(_trained(used, plan.replace(), scheme, repeat, data, test))
            print(trials[-1], flush=True)
        own = [trial for trial in trials if trial["sampling"] == scheme]
        rows.append(
            {
                "sampling": scheme,
                "noise_multiplier": plan.noise_multiplier,
                **intervals.of_mean([t["accuracy"] for t in own], "accuracy"),
                "rows_of_a_batch": plan.physical_batch_size,
                "seconds": float(np.mean([t["seconds"] for t in own])),
            }
        )
    poisson, allocation, shuffled = rows
    texts = []
    for other in (poisson, shuffled):
        gap, half, words = intervals.verdict(allocation, other, "accuracy")
        texts.append(
            f"Random allocation against {other['sampling']}: {gap:+.2%} accuracy, "
            f"95 % interval {gap - half:+.2%} to {gap + half:+.2%}: {words}."
        )
    return programs.Outcome(
        title=f"Ways to draw batches at epsilon {used.epsilon:g}, {images.name}",
        findings=[
            *texts,
            "The noise of random allocation is "
            f"{allocation['noise_multiplier'] / poisson['noise_multiplier']:.3f} of "
            "Poisson's.",
        ],
        privacy=f"each run is ({used.epsilon:g}, {used.delta:g})-private by itself, "
        "shuffled ones for a record replaced, the others for one more or less; the "
        "comparison of all of them is not accounted for. The data are public.",
        caveats=[
            f"{len(data[0])} training images, {used.epochs} epochs, one learning "
            f"rate ({used.learning_rate:g}), {used.repeats} runs of each.",
        ],
        tables={"sampling": rows, "trials": trials},
        figures={"sampling": _plot(used, rows, trials)},
        shown=("sampling",),
    )


def _trained(used, plan, scheme, repeat, data, test):
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(8, 5, strides=2, activation="tanh"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    optimizer = plan.optimizer(
        dpc.keras.DPSGD,
        learning_rate=used.learning_rate,
        momentum=0.9,
        clip=dpc.FixedClip(0.5, normalize=True),
    )
    model.compile(
        optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    started = time.monotonic()
    model.fit(
        plan.batches(data), epochs=plan.epochs, callbacks=plan.callbacks, verbose=0
    )
    seconds = time.monotonic() - started
    guessed = model.predict(test[0], batch_size=1000, verbose=0).argmax(axis=1)
    statement = plan.statement()
    return {
        "sampling": scheme,
        "repeat": repeat,
        "accuracy": float(np.mean(guessed == test[1])),
        "epsilon": statement.epsilon,
        "steps": statement.steps,
        "seconds": seconds,
    }


def _plot(used, rows, trials):
    picture, axes = pictures.new(5.2, 3.4)
    ax = axes[0][0]
    for k, row in enumerate(rows):
        own = [t["accuracy"] for t in trials if t["sampling"] == row["sampling"]]
        ax.plot([k] * len(own), own, "o", color=pictures.COLORS[k], alpha=0.6)
        ax.plot([k - 0.2, k + 0.2], [row["accuracy"]] * 2, color=pictures.COLORS[k])
    ax.set_xticks(range(len(rows)), [row["sampling"].replace("_", " ") for row in rows])
    ax.set(ylabel="test accuracy", xlim=(-0.5, len(rows) - 0.5))
    pictures.title(picture, f"{used.dataset} at epsilon {used.epsilon:g}")
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
