"""Gradients layer by layer, on public images: their norms, and their noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from keras_examples import batch_settings, batch_training, training
from tfdpclip import pictures
from tfdpclip.clipping import make_groups


class Signal(tf.keras.callbacks.Callback):
    """Compares clipped gradients with their noise, at the first and the last weights.

    Public batches take the place of private ones, of the size and clipped as in
    training, without augmentation. Batches or groups only, not single examples.

    *Formal guarantees*: none of its own; it reads public images, and weights that were
    released with noise.

    Args:
      used: the settings of the run.
      data: its data.
      batches: how many batches to average over.

    Attributes:
      rows: for each layer, and "all", at each moment: its number of parameters, the
        root mean squares of the norms of the gradient, of the clipped sum and of the
        noise, their ratio; for "all", the mean cosine of the step's release with the
        gradient.
    """

    def __init__(
        self, used: batch_settings.OneRun, data: batch_training.Data, batches: int = 8
    ):
        super().__init__()
        if used.unit == "individual":
            raise ValueError("used.unit must be 'batch' or 'group', got 'individual'.")
        self._used, self._data, self._batches = used, data, batches
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(self, logs=None):
        del logs
        self.model.optimizer.build(self.model.trainable_variables)
        self._graph = tf.function(self._gradients)
        self._measure("start")

    def on_train_end(self, logs=None):
        del logs
        self._measure("end")

    def _gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = training.LOSS(y, self.model(x, training=True))
        return tape.gradient(loss, self.model.trainable_variables)

    def _measure(self, moment):
        # Batch normalisation in training mode moves its averages.
        state = self.model.non_trainable_variables
        before = [v.numpy() for v in state]
        gradients = list(self._read())
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
        self.rows += [{"moment": moment, **row} for row in self._compare(gradients)]

    def _read(self):
        """The groups' gradients of each batch: arrays [groups, parameters]."""
        m, (x, y) = self._used.batch_size, self._data.public
        pieces = self._used.groups if self._used.unit == "group" else 1
        size = m // pieces
        for k in range(max(1, min(self._batches, len(y) // m))):
            found = []
            for start in range(k * m, k * m + m, size):
                # Fewer images than a batch take turns.
                kept = np.arange(start, start + size) % len(y)
                parts = self._graph(tf.constant(x[kept]), tf.constant(y[kept]))
                found.append([part.numpy().ravel() for part in parts])
            yield [np.stack(column) for column in zip(*found, strict=True)]

    def _compare(self, batches):
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        rule, state = optimizer.clip, optimizer.clip_state
        spec = batch_settings.group_spec(self._used)
        names = [getattr(v, "path", v.name) for v in variables]
        layers = make_groups(spec, names)
        column = [0] * len(variables) if rule.assignment is None else rule.assignment
        scales = np.reshape(rule.noise_scales(state), [-1])
        stddevs = float(optimizer.gradient_noise_multiplier) * scales
        gradient, signal = np.zeros((2, len(layers), len(batches)))
        products = np.zeros(len(batches))
        for b, parts in enumerate(batches):
            squares = np.zeros((len(parts[0]), len(scales)), np.float32)
            for i, part in enumerate(parts):
                squares[:, column[i]] += np.sum(part**2, axis=1)
            norms = np.sqrt(squares)
            norms = norms[:, 0] if rule.assignment is None else norms
            weights = np.asarray(rule.weights(tf.constant(norms), state))
            weights = weights.reshape(len(parts[0]), -1)
            for i, part in enumerate(parts):
                mean, clipped = part.mean(axis=0), weights[:, column[i]] @ part
                gradient[layers.assignment[i], b] += np.sum(mean**2)
                signal[layers.assignment[i], b] += np.sum(clipped**2)
                products[b] += mean @ clipped
        noise, sizes = np.zeros(len(layers)), np.zeros(len(layers), int)
        for i, part in enumerate(batches[0]):
            layer = layers.assignment[i]
            sizes[layer] += part.shape[1]
            noise[layer] += stddevs[column[i]] ** 2 * part.shape[1]
        for h, name in enumerate(layers.names):
            yield _row(name, sizes[h], gradient[h], signal[h], noise[h])
        total = signal.sum(axis=0) + noise.sum()
        cosines = products / np.sqrt(gradient.sum(axis=0) * total)
        row = _row("all", sizes.sum(), gradient.sum(0), signal.sum(0), noise.sum())
        yield row | {"cosine": float(np.mean(cosines))}


def _row(name, size, gradient, signal, noise) -> dict[str, Any]:
    gradient, signal, noise = (
        float(np.sqrt(np.mean(v))) for v in (gradient, signal, noise)
    )
    return {
        "layer": name,
        "parameters": int(size),
        "gradient": gradient,
        "signal": signal,
        "noise": noise,
        "ratio": signal / noise,
    }


class LayerNorms(tf.keras.callbacks.Callback):
    """Each layer's mean gradient norm of single public examples, epoch by epoch.

    Gradients are taken in inference mode, as `PublicGradientNorms` takes them: in
    training mode batch normalisation leaves no example a gradient of its own.

    Args:
      used: the settings of the run.
      data: its data.

    Attributes:
      rows: epoch, layer and its mean norm; epoch 0 is before training.
    """

    def __init__(self, used: batch_settings.Common, data: batch_training.Data):
        super().__init__()
        self._spec, self._data = batch_settings.group_spec(used), data
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(self, logs=None):
        del logs
        self._meter = dpc.diagnostics.GradientMeter(self.model, groups=self._spec)
        self._measure(0)

    def on_epoch_end(self, epoch, logs=None):
        del logs
        self._measure(epoch + 1)

    def _measure(self, epoch):
        found = self._meter.norms(self._data.public)
        means = found.by_group.mean(axis=0).tolist()
        self.rows += [
            {"epoch": epoch, "layer": name, "mean_norm": mean}
            for name, mean in zip(found.groups, means, strict=True)
        ]


def plot_layer_norms(runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str):
    """Norms by layer, at some epochs of each run; `runs` are rows of `LayerNorms`."""
    picture, axes = pictures.new(
        1.6 + 4.6 * len(runs), 4.6, 1, len(runs), sharey=True, grid="y"
    )
    for ax, (name, rows) in zip(axes[0], runs.items(), strict=True):
        layers = list(dict.fromkeys(row["layer"] for row in rows))
        epochs = sorted({row["epoch"] for row in rows})
        some = np.unique(np.linspace(0, len(epochs) - 1, 6).round().astype(int))
        colors = matplotlib.colormaps[pictures.SEQUENTIAL](
            np.linspace(0, 0.9, len(some))
        )
        for k, epoch in enumerate(epochs[i] for i in some):
            found = {r["layer"]: r["mean_norm"] for r in rows if r["epoch"] == epoch}
            ax.plot(
                [found[layer] for layer in layers],
                color=colors[k],
                marker=pictures.MARKERS[k],
                ms=4.5,
                label=f"epoch {epoch}",
            )
        # Of many layers, some names.
        ticks = range(0, len(layers), -(-len(layers) // 20))
        words = [layers[i] for i in ticks]
        ax.set_xticks(ticks, words, rotation=60, ha="right", fontsize=8)
        ax.set_yscale("log")
        ax.set_title(name, fontsize=10)
        ax.legend(fontsize=8)
    axes[0, 0].set_ylabel("mean gradient norm, public examples", fontsize=9)
    pictures.title(picture, title)
    return picture
