"""Callbacks that follow a private training run and show how far it is."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Collection
from typing import Protocol

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import large_files, npz_files, progress
from keras_examples.gradient_geometry import GradientGeometry, gradient_geometry


class Tracker(tf.keras.callbacks.Callback):
    """Keeps a row per epoch: test accuracy, epsilon, clip norm, gradient norms.

    Put it behind `PrivacyBudget`, which provides epsilon.

    Args:
      test: Images and labels to measure the accuracy on. They are not protected.
      unprotected: Images and labels whose gradient norms to measure, **without
        noise**. The norms are in the columns that start with `unprotected_` and are not
        covered by any privacy guarantee. None leaves these columns out.
      quantile: The quantile of the norms to keep.

    Attributes:
      rows: The rows, as dictionaries.
    """

    def __init__(self, test, unprotected=None, quantile: float = 0.5):
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self._test = tuple(map(tf.convert_to_tensor, test))
        self._unprotected = unprotected and tuple(
            map(tf.convert_to_tensor, unprotected)
        )
        self._quantile = quantile

    def on_train_begin(self, logs=None):
        del logs
        self._correct = tf.function(self._count_correct)
        self._norms = tf.function(self._gradient_norms)
        self._record(0, 0.0)

    def on_epoch_end(self, epoch, logs=None):
        self._record(epoch + 1, (logs or {}).get("epsilon", float("nan")))

    def _record(self, epoch, epsilon):
        optimizer = self.model.optimizer
        adaptive = optimizer.clip.threshold is not None
        row = {
            "step": int(optimizer.iterations.numpy()),
            "epoch": epoch,
            "epsilon": epsilon,
            "test_accuracy": int(self._correct()) / len(self._test[0]),
            # The automatic rule has none.
            "clip_norm": float(optimizer.clip_norm) if adaptive else float("nan"),
        }
        if self._unprotected:
            norms = self._norms(*self._unprotected).numpy()
            low, middle, high = np.quantile(norms, [0.1, self._quantile, 0.9])
            row["unprotected_norm_p10"] = float(low)
            row["unprotected_norm_quantile"] = float(middle)
            row["unprotected_norm_p90"] = float(high)
        self.rows.append(row)

    def _count_correct(self):
        images, labels = self._test
        predicted = tf.argmax(self.model(images, training=False), axis=1)
        return tf.math.count_nonzero(predicted == tf.cast(labels, predicted.dtype))

    def _gradient_norms(self, images, labels):
        loss = tf.keras.losses.sparse_categorical_crossentropy(
            labels, self.model(images, training=True), from_logits=True
        )
        # A strategy's variables are read on the first device.
        strategy = self.model.distribute_strategy
        variables = [
            strategy.experimental_local_results(variable)[0]
            for variable in self.model.trainable_variables
        ]
        return dpc.gradients.per_example_norms(loss, variables)


class HasRows(Protocol):
    """An object with rows of numbers by name, a row for each epoch so far."""

    rows: list[dict[str, float]]


class Progress(tf.keras.callbacks.Callback):
    """Shows the progress of `fit`, and a tracker's numbers.

    Args:
      title: The name of the training.
      steps: Number of steps in the whole run.
      tracker: Shows its newest row; None shows progress alone.
      accumulation_steps: Physical batches per step.
      stream: Where to write; standard output by default.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        tracker: HasRows | None = None,
        accumulation_steps: int = 1,
        stream=None,
    ):
        super().__init__()
        self._title = title
        self._steps = steps
        self._tracker = tracker
        self._pieces = accumulation_steps
        self._stream = stream

    def on_train_begin(self, logs=None):
        del logs
        # After a kill some steps ran in another process.
        done = 0 if self.model is None else int(self.model.optimizer.iterations.numpy())
        self._batches = done * self._pieces
        self._progress = progress.Progress(
            self._title, self._steps, done, stream=self._stream
        )

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        self._batches += 1
        done = self._batches // self._pieces
        if self.params.get("epochs") == 1 and done < self._steps:
            # No epoch will end before the last step.
            self._progress.show(done)
        else:
            self._progress.advance(done)

    def on_epoch_end(self, epoch, logs=None):
        del epoch, logs
        done = self._batches // self._pieces
        rows = self._tracker.rows if self._tracker else []
        row = rows[-1] if rows and rows[-1]["step"] == done else {}
        parts = [
            f"{name} {row[key]:{form}}"
            for name, key, form in (
                ("accuracy", "test_accuracy", "5.1%"),
                ("epsilon", "epsilon", ".2f"),
                ("clip", "clip_norm", ".3g"),
            )
            if not np.isnan(row.get(key, np.nan))
        ]
        self._progress.show(done, parts)

    def on_train_end(self, logs=None):
        del logs
        self._progress.close()


class Geometry(tf.keras.callbacks.Callback):
    """Measures the geometry of the gradients after some epochs.

    Args:
      data: The examples.
      epochs: After how many epochs; 0 is before training.
      planes: The number of random projections, the same after every epoch.
      chunk: Gradients at a time.
      folder: Where the geometries are kept, for a training that goes on after a kill.

    Attributes:
      found: The geometry, by epoch.
    """

    def __init__(
        self,
        data,
        epochs: Collection[int],
        planes: int,
        chunk: int,
        folder: pathlib.Path,
    ):
        super().__init__()
        self._data, self._epochs = data, epochs
        self._planes, self._chunk, self._folder = planes, chunk, folder
        kind = GradientGeometry
        self._names = [field.name for field in dataclasses.fields(kind)]
        self.found: dict[int, GradientGeometry] = {}
        for epoch in epochs:
            path = self._path(epoch)
            if path.exists():
                self.found[epoch] = kind(**npz_files.read_npz(path, self._names))

    def _path(self, epoch: int) -> pathlib.Path:
        return self._folder / f"geometry_{epoch}.npz"

    def _measure(self, epoch):
        if epoch not in self._epochs:
            return
        found = gradient_geometry(
            self._meter.chunks(self._data, batch_size=self._chunk),
            projections=self._planes,
        )
        with large_files.replacing(self._path(epoch)) as path, path.open("wb") as file:
            np.savez(file, **{name: getattr(found, name) for name in self._names})
        self.found[epoch] = found

    def on_train_begin(self, logs=None):
        self._meter = dpc.diagnostics.GradientMeter(self.model)
        if 0 not in self.found:
            self._measure(0)

    def on_epoch_end(self, epoch, logs=None):
        self._measure(epoch + 1)


class Cosine(tf.keras.callbacks.Callback):
    """Lowers the rate to 0 by half a cosine: a schedule would be a trace of its own."""

    def __init__(self, learning_rate: float, steps: int):
        super().__init__()
        self.first, self.steps = learning_rate, steps

    def on_train_batch_begin(self, batch, logs=None):
        del batch, logs
        optimizer = self.model.optimizer
        share = min(1.0, int(optimizer.iterations) / self.steps)
        optimizer.learning_rate = self.first * 0.5 * (1 + math.cos(math.pi * share))
