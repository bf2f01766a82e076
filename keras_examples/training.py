"""A private training run of an image model: batches, budget, results."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, TextIO

import numpy as np
import tensorflow as tf
from matplotlib import ticker

import tfdpclip as dpc
from driver_kit import plotting, programs, settings
from keras_examples import image_data, tracking
from keras_examples.class_weights import ClassAccuracy, class_accuracy
from keras_examples.resuming import Unfinished
from tfdpclip import pictures

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
      rows: one per epoch: epoch, step, epsilon (if private), clip_norm (if there is
        one), loss, test_accuracy, seconds.
      statement: the privacy statement; None without privacy.
      accuracy: test accuracy by class at the end.
      ledger: of the private steps; None without privacy.
    """

    rows: list[dict[str, float]]
    statement: Any
    accuracy: ClassAccuracy
    ledger: dpc.accounting.Ledger | None = None


def scaled(images: np.ndarray) -> np.ndarray:
    """uint8 images as float32 in [0, 1]."""
    return images.astype(np.float32) / 255


def draw(
    scheme: dpc.sampling.SamplingScheme,
    data: Any,
    physical: int,
    seed: int | None,
    **options: Any,
) -> dpc.sampling.Batches:
    """Batches, cut into pieces of no more than `physical` rows."""
    whole = scheme.batches(data, seed=seed, **options)
    pieces = -(-whole.physical_batch_size // physical)
    if pieces == 1:
        return whole
    return scheme.batches(data, accumulation_steps=pieces, seed=seed, **options)


def noise_for(used: Any, steps: int, batches: Any, unit: str = "example") -> float:
    """The noise multiplier: as given, or calibrated to --epsilon."""
    if used.epsilon is None:
        return used.noise_multiplier
    return dpc.accounting.noise_multiplier(
        used.epsilon, used.delta, steps, getattr(batches, "scheme", batches), unit=unit
    )


def clip_rule(
    name: str,
    clip_norm: float,
    target_quantile: float = 0.5,
    normalize: bool = False,
) -> dpc.ClipRule:
    """A flat clip rule by name."""
    if name == "quantile":
        return dpc.QuantileClip(
            target_quantile, initial_norm=clip_norm, normalize=normalize
        )
    if name == "automatic":
        return dpc.AutomaticClip()
    return dpc.FixedClip(clip_norm, normalize=normalize)


def private_run(
    used,
    images,
    model,
    optimizer_class=dpc.keras.DPSGD,
    rate=None,
    rule: dpc.ClipRule | None = None,
    **options,
):
    """Compiles a model for training as `used` says, and draws its batches.

    Args:
      used: the settings.
      images: the training data.
      model: the model.
      optimizer_class: of `dpc.keras`.
      rate: the learning rate, given the steps of an epoch; a constant by default.
      rule: the clip rule; by default that of --clip and --clip_norm.
      **options: for the optimizer.

    Returns:
      The batches.

    Raises:
      UsageError: if the settings do not go together.
    """
    x, y = images.train
    check_batch_size(used.batch_size, len(x))
    if used.seed is not None:
        tf.keras.utils.set_random_seed(used.seed)
    scheme = dpc.sampling.Poisson(used.batch_size / len(x))
    batches = draw(scheme, (scaled(x), y), used.physical_batch_size, used.seed)
    steps = used.epochs * batches.steps_per_epoch
    try:
        optimizer = optimizer_class(
            used.learning_rate if rate is None else rate(batches.steps_per_epoch),
            clip=rule or clip_rule(used.clip, used.clip_norm),
            noise_multiplier=noise_for(used, steps, batches),
            expected_batch_size=batches.expected_batch_size,
            accumulation_steps=batches.accumulation_steps,
            seed=used.seed,
            **options,
        )
    except ValueError as error:
        raise settings.UsageError(
            f"flag --clip={used.clip}: {error} Larger --batch_size or --clip=fixed "
            "would do."
        ) from error
    model.compile(optimizer, LOSS)
    return batches


def _for_one_record(transform: Callable) -> Callable:
    """Turns a transform of batches into a transform of a single record."""

    def apply(x, y):
        x, y = transform(x[tf.newaxis], y[tf.newaxis])
        return x[0], y[0]

    return apply


def fit(
    model: tf.keras.Model,
    batches: Any,
    epochs: int,
    test: tuple[np.ndarray, np.ndarray],
    *,
    delta: float | None,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    transform: Callable | None = None,
    accountant: str = "pld",
    stream: TextIO | None = None,
    unfinished: Unfinished | None = None,
    measured: Collection[int] | None = None,
    **options: Any,
) -> Trained:
    """Trains a compiled model.

    Args:
      model: the model; its optimizer is private if `delta` is given.
      batches: drawn by a scheme, or, without privacy, any dataset of batches.
      epochs: how many.
      test: images and labels.
      delta: for the privacy statement; None for training without privacy.
      callbacks: further callbacks.
      transform: a change to each batch, such as augmentation.
      accountant: of the privacy statement.
      stream: where to show progress; standard output by default.
      unfinished: the state of the training, from which it goes on after a kill.
      measured: the epochs after which accuracy is measured; all by default.
      **options: for `fit`.

    Returns:
      The finished run.
    """
    rows: list[dict[str, float]] = [] if unfinished is None else unfinished.rows
    before = rows[-1]["seconds"] if rows else 0.0
    started = time.monotonic() - before
    predict = tf.function(lambda x: model(x, training=False))

    def correct():
        parts = [
            np.argmax(predict(test[0][k : k + 256]), axis=1)
            for k in range(0, len(test[0]), 256)
        ]
        return np.concatenate(parts) == test[1]

    def record(epoch, logs=None):
        if measured is not None and epoch + 1 not in measured:
            return
        logs = logs or {}
        spent = {}
        if delta is not None:
            spent = {
                "epsilon": float(logs.get("epsilon", 0.0 if epoch < 0 else np.nan))
            }
        row = {
            "epoch": epoch + 1,
            "step": int(model.optimizer.iterations.numpy()),
            **spent,
            **_clip_norm(model.optimizer),
            "loss": float(logs.get("loss", np.nan)),
            "test_accuracy": float(np.mean(correct())),
            "seconds": round(time.monotonic() - started, 1),
        }
        (rows.append if unfinished is None else unfinished.add)(row)

    def record_first(logs=None):
        # After a kill the rows of earlier epochs are there.
        if not rows:
            record(-1)

    budget = None
    if delta is not None:
        budget = dpc.keras.PrivacyBudget(
            float("inf"),
            delta,
            batches,
            accountant,
            ledger=None if unfinished is None else unfinished.ledger,
        )
    pieces = int(getattr(model.optimizer, "accumulation_steps", 1))
    data = batches
    if transform is not None:
        private = isinstance(batches, dpc.sampling.Batches)
        data = batches.map(_for_one_record(transform) if private else transform)
    model.fit(
        data,
        epochs=epochs,
        shuffle=False,  # Datasets shuffle; Keras 3 warns otherwise.
        verbose=0,
        callbacks=[
            *([] if budget is None else [budget]),
            *callbacks,
            tf.keras.callbacks.LambdaCallback(
                on_train_begin=record_first, on_epoch_end=record
            ),
            # Behind the tables, so that the backup is never ahead of them.
            *([] if unfinished is None else [unfinished.backup()]),
            tracking.Progress(
                "training" if delta is not None else "training without privacy",
                epochs * _steps_of(batches),
                types.SimpleNamespace(rows=rows),
                pieces,
                stream,
            ),
        ],
        **options,
    )
    return Trained(
        rows,
        None if budget is None else budget.statement(),
        class_accuracy(test[1], correct()),
        None if budget is None else budget.ledger,
    )


def _steps_of(batches: Any) -> int:
    """Steps of an epoch."""
    if isinstance(batches, dpc.sampling.Batches):
        return batches.steps_per_epoch
    return int(batches.cardinality())


def _clip_norm(optimizer: Any) -> dict[str, float]:
    """The clip norm, where all variables have a common norm."""
    rule = getattr(optimizer, "clip", None)
    if rule is None or rule.has_groups or rule.threshold is None:
        return {}
    return {"clip_norm": float(optimizer.clip_norm)}


def check_batch_size(batch_size: int, size: int) -> None:
    """Raises unless a batch is no larger than the data."""
    if batch_size > size:
        raise settings.UsageError(
            f"flag --batch_size={batch_size}: there are only {size} training images, "
            f"for example --batch_size={max(1, size // 4)}."
        )


def caveats(images: image_data.Images, used: Any, table: str = "history") -> list[str]:
    """The caveats of every report on private training; `table` has the losses."""
    found = [
        f"Trained on {len(images.train[0])} images ({images.name}), whose number is "
        f"treated as public; tested on {len(images.test[0])}, which are not protected.",
        f"The loss by epoch in {table}.csv is measured on training images without "
        "noise and is outside the guarantee: do not release it for private data.",
    ]
    if used.delta >= 1 / len(images.train[0]):
        found.append(
            f"delta = {used.delta:g} is not small against 1/{len(images.train[0])}."
        )
    return found


def curves(runs: dict[str, list[dict[str, float]]], title: str, guess: float):
    """Test accuracy by epoch of some runs, and epsilon of the private ones."""
    # Without noise epsilon is infinite.
    private = any(
        np.isfinite(rows[-1].get("epsilon", np.nan)) for rows in runs.values()
    )
    columns = 2 if private else 1
    picture, axes = pictures.new(5.2 * columns, 3.8, 1, columns)
    seen = []
    for k, (name, rows) in enumerate(runs.items()):
        epochs = [row["epoch"] for row in rows]
        look = pictures.style(k, marked=len(rows) < 15)
        values = [100 * r["test_accuracy"] for r in rows]
        axes[0, 0].plot(epochs, values, label=name, **look)
        # The untrained model guesses; its accuracy would flatten the rest of the curve.
        seen += values[1:] or values
        if private and "epsilon" in rows[-1]:
            axes[0, 1].plot(epochs, [r["epsilon"] for r in rows], label=name, **look)
    axes[0, 0].set(xlabel="epoch", ylabel="test accuracy (%)")
    plotting.accuracy_axis(axes[0, 0], seen, most=100)
    plotting.guessing(axes[0, 0], guess, most=100)
    axes[0, 0].legend(fontsize=8.5)
    for ax in axes[0]:
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if private:
        axes[0, 1].set(xlabel="epoch", ylabel="epsilon spent")
        axes[0, 1].set_ylim(bottom=0)
        if len(runs) > 1:
            axes[0, 1].legend(fontsize=8.5)
    pictures.title(picture, title)
    return picture


def report_accuracy(trained: Trained) -> dict[str, float]:
    """Numbers for config.json."""
    return {
        "test_accuracy": trained.accuracy.micro,
        "macro_accuracy": trained.accuracy.macro,
        "epsilon": None if trained.statement is None else trained.statement.epsilon,
    }


def unfinished(used: Any, images: image_data.Images) -> Unfinished:
    """The state of a training on images, from which it goes on after a kill."""
    return Unfinished(used, images=images.name, examples=len(images.train[0]))


def simple_run(
    title: str,
    images: image_data.Images,
    used: Any,
    model: tf.keras.Model,
    batches: dpc.sampling.Batches,
) -> programs.Outcome:
    """Trains a compiled model, goes on after a kill, and reports."""
    test = (scaled(images.test[0]), images.test[1])
    place = unfinished(used, images)
    trained = fit(model, batches, used.epochs, test, delta=used.delta, unfinished=place)
    outcome = _simple_outcome(title, images, used, model, trained)
    outcome.written = place.remove
    return outcome


def _simple_outcome(
    title: str, images: image_data.Images, used: Any, model: Any, trained: Trained
) -> programs.Outcome:
    """The outcome of a single run."""
    accuracy = trained.accuracy
    return programs.Outcome(
        title=title,
        findings=[
            f"Test accuracy {accuracy.micro:.2%} (mean over classes "
            f"{accuracy.macro:.2%}; guessing: {1 / images.classes:.0%}) after "
            f"{trained.rows[-1]['epoch']} epochs, {trained.rows[-1]['step']} steps; "
            f"{model.count_params():,} parameters.",
        ],
        privacy=trained.statement,
        caveats=caveats(images, used),
        tables={"history": trained.rows},
        figures={
            "history": curves({"DP-SGD": trained.rows}, title, 1 / images.classes)
        },
        numbers={"parameters": model.count_params(), **report_accuracy(trained)},
    )
