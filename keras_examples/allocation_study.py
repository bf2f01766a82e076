r"""Compares Poisson sampling, random allocation and shuffling at equal privacy.

    python -m keras_examples.allocation_study --dataset=mnist --data_dir=DIR
    python -m keras_examples.allocation_study --dataset=texts --data_dir=DIR

A small network is trained privately from scratch with each, at the same epsilon, delta,
epochs, and expected batch size; `PrivacyPlan` computes the noise for the way to draw.
Runs draw fresh noise. The clip rule is the same for all. Of several learning rates, the
best of each way to draw is compared.

Texts: the paragraphs of text files, in a directory with a folder for each class, as for
`tf.keras.utils.text_dataset_from_directory`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable

import numpy as np

import tfdpclip as dpc
from driver_kit import intervals, programs, settings
from driver_kit.lazy import tf
from keras_examples import image_data, text_records
from tfdpclip import pictures

_SCHEMES = ("poisson", "random_allocation", "shuffled")
# Words of a paragraph that are read, and public buckets that they are hashed to.
_WORDS, _BUCKETS = 64, 2048
# The characters of a paragraph, at least.
_SHORTEST = 100


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    dataset: str = settings.choice(
        "digits", ("digits", "mnist", "fashion_mnist", "texts"), "What to learn."
    )
    data_dir: str | None = settings.words(
        None,
        f"Directory with {image_data.MNIST_LAYOUT}; or a folder of texts for each "
        "class.",
        only_with=("dataset", "mnist", "fashion_mnist", "texts"),
    )
    epsilon: float = settings.number(3.0, "The budget of every run.", above=0)
    delta: float = settings.number(1e-5, "Its delta.", above=0, below=1)
    examples: int = settings.count(12_000, "How many training records, at most.")
    batch_size: int = settings.count(1200, "Expected records in a step.")
    epochs: int = settings.count(5, "How often to go through them.")
    learning_rates: tuple[float, ...] = settings.numbers(
        (0.5,), "Of DPSGD; the best of each way to draw is compared.", above=0
    )
    repeats: int = settings.count(3, "Runs of each.", good=3, least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("allocation_study")


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
      train: the records `[n, ...]` and their classes `[n]`.
      test: the same.
      name: for reports.
      build: makes an untrained model, which returns logits.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    name: str
    build: Callable[[], tf.keras.Model]


def run(used: Settings) -> programs.Outcome:
    """Trains with each way to draw."""
    task = _texts(used) if used.dataset == "texts" else _images(used)
    examples = len(task.train[0])
    trials, rows = [], []
    for scheme in _SCHEMES:
        plan = dpc.keras.PrivacyPlan(
            used.epsilon,
            used.delta,
            examples=examples,
            batch_size=min(used.batch_size, examples),
            epochs=used.epochs,
            sampling=scheme,
        )
        tried = []
        for rate in used.learning_rates:
            own = []
            for repeat in range(used.repeats):
                own.append(_trained(task, plan.replace(), scheme, rate, repeat))
                print(own[-1], flush=True)
            trials += own
            tried.append(
                {
                    "sampling": scheme,
                    "learning_rate": rate,
                    "noise_multiplier": plan.noise_multiplier,
                    **intervals.of_mean([t["accuracy"] for t in own], "accuracy"),
                    "rows_of_a_batch": plan.physical_batch_size,
                    "seconds": float(np.mean([t["seconds"] for t in own])),
                }
            )
        rows.append(max(tried, key=lambda row: row["accuracy"]))
    poisson, allocation, shuffled = rows
    texts = []
    for other in (poisson, shuffled):
        gap, half, words = intervals.verdict(allocation, other, "accuracy")
        texts.append(
            f"Random allocation against {other['sampling']}: {gap:+.2%} accuracy, "
            f"95 % interval {gap - half:+.2%} to {gap + half:+.2%}: {words}."
        )
    rates = ", ".join(f"{rate:g}" for rate in used.learning_rates)
    return programs.Outcome(
        title=f"Ways to draw batches at epsilon {used.epsilon:g}, {task.name}",
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
            f"{examples} training records, {used.epochs} epochs, {used.repeats} runs "
            f"of each learning rate ({rates}); the best rate of each way to draw was "
            "chosen by the test accuracy, so intervals are a little too narrow.",
        ],
        tables={"sampling": rows, "trials": trials},
        figures={"sampling": _plot(used, rows, trials)},
        shown=("sampling",),
    )


def _images(used: Settings) -> Task:
    images = image_data.load(used.dataset, used.data_dir, (28, 28, 1))
    (x, y), test = (
        (a.astype(np.float32) / 255, b) for a, b in (images.train, images.test)
    )
    chosen = np.random.default_rng(0).permutation(len(x))[: used.examples]
    layers = tf.keras.layers
    build = lambda: tf.keras.Sequential(  # noqa: E731
        [
            layers.Conv2D(8, 5, strides=2, activation="tanh"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    return Task((x[chosen], y[chosen]), test, images.name, build)


def _texts(used: Settings) -> Task:
    if used.data_dir is None:
        raise settings.UsageError(
            "flag --data_dir: texts are read from a directory with a folder of .txt "
            "files for each class, --data_dir=DIR."
        )
    folders = sorted(p for p in pathlib.Path(used.data_dir).glob("*") if p.is_dir())
    if len(folders) < 2:
        raise settings.UsageError(
            f"flag --data_dir: {used.data_dir} has no two folders, one for each class."
        )
    rows, classes = [], []
    for number, folder in enumerate(folders):
        for path in text_records.files_of(str(folder)):
            text = path.read_text("utf-8", "replace")
            parts = list(text_records.paragraphs(text, _SHORTEST))
            rows += [text_records.hashed(part, _WORDS, _BUCKETS) for part in parts]
            classes += [number] * len(parts)
    order = np.random.default_rng(0).permutation(len(rows))
    x, y = np.array(rows)[order], np.array(classes)[order]
    test = len(x) // 5
    layers = tf.keras.layers
    build = lambda: tf.keras.Sequential(  # noqa: E731
        [
            layers.Embedding(_BUCKETS, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(len(folders)),
        ]
    )
    train = x[test:][: used.examples], y[test:][: used.examples]
    name = f"paragraphs of {len(folders)} kinds of text"
    return Task(train, (x[:test], y[:test]), name, build)


def _trained(task, plan, scheme, learning_rate, repeat):
    model = task.build()
    optimizer = plan.optimizer(
        dpc.keras.DPSGD,
        learning_rate=learning_rate,
        momentum=0.9,
        clip=dpc.FixedClip(0.5, normalize=True),
    )
    model.compile(
        optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    started = time.monotonic()
    model.fit(
        plan.batches(task.train),
        epochs=plan.epochs,
        callbacks=plan.callbacks,
        verbose=0,
    )
    seconds = time.monotonic() - started
    x, y = task.test
    guessed = model.predict(x, batch_size=1000, verbose=0).argmax(axis=1)
    statement = plan.statement()
    return {
        "sampling": scheme,
        "learning_rate": learning_rate,
        "repeat": repeat,
        "accuracy": float(np.mean(guessed == y)),
        "epsilon": statement.epsilon,
        "steps": statement.steps,
        "seconds": seconds,
    }


def _plot(used, rows, trials):
    picture, axes = pictures.new(5.2, 3.4)
    ax = axes[0][0]
    for k, row in enumerate(rows):
        same = ("sampling", "learning_rate")
        own = [
            t["accuracy"] for t in trials if all(t[name] == row[name] for name in same)
        ]
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
