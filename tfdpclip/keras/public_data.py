"""Callbacks that measure public data, for numbers that private data must not give."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._data import as_batches, check_data
from tfdpclip._docs import TracedError, see
from tfdpclip._object_notes import notes_of_variable
from tfdpclip._variables import all_unwrapped, unwrapped
from tfdpclip.clipping import make_groups
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.gradient_meter import GradientMeter
from tfdpclip.keras.isolation import check_model
from tfdpclip.keras.watching.public_claims import PublicDataCallback


def _batches(data: Any, batch_size: int) -> Iterator[tuple[Any, Any, Any]]:
    """(x, y, sample_weight) from arrays, (x, y) or a data set of batches."""
    for element in as_batches("data", data, batch_size):
        yield tf.keras.utils.unpack_x_y_sample_weight(element)


class PublicBatchStatistics(PublicDataCallback):
    """Gives batch normalisation the statistics of public data.

    Training with ``unit="batch"`` may normalise by the private batch, because the whole
    batch is clipped. But the layers also write running averages of the batches into the
    model, without noise. With this callback, the layers hold statistics of public data
    at every moment: each training step restores the public statistics, and they are
    recomputed with the current weights before every evaluation, at the end of every
    epoch and at the end of training. Without the callback, `fit` refuses such a model.

    *Formal guarantees*: a layer's moving mean and variance depend on the weights and on
    `data` alone. A training step that calls the model in training mode again, after the
    private step, raises in `fit`.

    Args:
      data: public inputs: an array, (x, y), or a `tf.data.Dataset` of batches. The
        statistics of all examples are pooled, in a forward pass in training mode.
      batch_size: for arrays.

    Raises:
      ValueError: if `data` has no data, or the model has no batch normalisation.
    """

    def __init__(self, data: Any, batch_size: int = 256):
        super().__init__(check_data("data", data))
        self._batch_size = _arguments.integer("batch_size", batch_size, minimum=1)
        self._attached: tf.keras.Model | None = None
        self._current: int | None = None
        # The statistics before the first execution of an epoch.
        self._before: list[np.ndarray] | None = None

    def attach(self, model: tf.keras.Model) -> PublicBatchStatistics:
        """Marks the model's statistics and computes them, for loops without `fit`."""
        _build(model, self.public_data, self._batch_size)
        if self._attached is not model:
            self._forward = tf.function(lambda x: model(x, training=True))
        self._attached = model
        layers = self._layers()
        if not layers:
            raise ValueError(
                f"{model.name} has no BatchNormalization layer that trains, so "
                "PublicBatchStatistics has nothing to do: leave it out."
            )
        for layer in layers:
            for variable in all_unwrapped((layer.moving_mean, layer.moving_variance)):
                notes = notes_of_variable(variable)
                if notes.public_copy is None:
                    notes.public_copy = tf.Variable(variable, trainable=False)
        self.update()
        return self

    def update(self) -> None:
        """Recomputes the statistics with the current weights."""
        layers = self._layers()
        totals = [[0.0, 0.0] for _ in layers]
        count = 0
        with _compat.batch_statistics(layers):
            for x, _, _ in _batches(self.public_data, self._batch_size):
                size = len(tf.nest.flatten(x)[0])
                if size == 0:
                    continue
                self._forward(x)
                count += size
                for total, layer in zip(totals, layers, strict=True):
                    mean = layer.moving_mean.numpy().astype(np.float64)
                    variance = layer.moving_variance.numpy().astype(np.float64)
                    total[0] += size * mean
                    total[1] += size * (variance + mean**2)
        if count == 0:
            raise ValueError("data of PublicBatchStatistics has no examples.")
        for (first, second), layer in zip(totals, layers, strict=True):
            mean = first / count
            variance = np.maximum(second / count - mean**2, 0.0)
            for variable, value in (
                (unwrapped(layer.moving_mean), mean),
                (unwrapped(layer.moving_variance), variance),
            ):
                variable.assign(value.astype(variable.dtype.as_numpy_dtype))
                notes_of_variable(variable).public_copy.assign(variable)

    def on_train_begin(self, logs=None):
        del logs
        self.attach(self.model)
        self._current = self._iterations()

    def on_epoch_begin(self, epoch, logs=None):
        del epoch, logs
        self._before = None

    def on_train_batch_begin(self, batch, logs=None):
        del batch, logs
        if self._before is None:
            self._before = [v.numpy() for v in self._statistics()]

    def on_train_batch_end(self, batch, logs=None):
        """Raises if an epoch's first execution leaves statistics of its batches."""
        del batch, logs
        if not self._before:
            return
        before, self._before = self._before, []
        same = functools.partial(np.array_equal, equal_nan=True)
        for variable, was in zip(self._statistics(), before, strict=True):
            now = variable.numpy()
            copy = notes_of_variable(variable).public_copy.numpy()
            if not (same(now, was) or same(now, copy)):
                raise TracedError(
                    f"The training step writes averages of private batches to "
                    f"{variable.name}, without noise, after the private step: it calls "
                    "the model in training mode again. Write model(x, training=False) "
                    "wherever the result is not in the loss (for metrics, for "
                    "example)." + see("batch-statistics")
                )

    def _statistics(self) -> list[tf.Variable]:
        pairs = ((part.moving_mean, part.moving_variance) for part in self._layers())
        found = [variable for pair in pairs for variable in all_unwrapped(pair)]
        return [v for v in found if notes_of_variable(v).public_copy is not None]

    def on_test_begin(self, logs=None):
        del logs
        self._refresh()

    def on_epoch_end(self, epoch, logs=None):
        del epoch, logs
        self._refresh()

    def on_train_end(self, logs=None):
        del logs
        self._refresh()

    def _iterations(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def _refresh(self) -> None:
        if self._attached is not self.model:
            self.attach(self.model)
        elif self._current != self._iterations():
            self.update()
        self._current = self._iterations()

    def _layers(self) -> list[tf.keras.layers.BatchNormalization]:
        found = _compat.layers_of(self._attached, include_self=False)
        kind = tf.keras.layers.BatchNormalization
        return [layer for layer in found if isinstance(layer, kind) and layer.trainable]


def _mean_norms(meter: GradientMeter, data: Any, batch_size: int) -> dict[str, float]:
    """The mean gradient norm of each group, `[L]`."""
    found = meter.norms(data, batch_size=batch_size)
    if not np.isfinite(found.by_group).all():
        raise ValueError(
            "The gradient norms on the public data are not finite: look for NaN or "
            "infinite values in the data, or for weights that have diverged."
        )
    means = found.by_group.mean(axis=0, dtype=np.float64)
    return dict(zip(found.groups, means.tolist(), strict=True))


def public_gradient_norms(
    model: tf.keras.Model, data: Any, batch_size: int = 64
) -> dict[str, float]:
    """Mean per-example gradient norm of each layer, on public data.

    The numbers carry no noise: never run this on private data for a clip rule.

    Args:
      model: a compiled model.
      data: public (x, y), or a `tf.data.Dataset` of batches.
      batch_size: for arrays.

    Returns:
      e_h for each layer with trainable variables, by layer name, for `norms` of
      `LayerwiseClip` and `PublicNormClip`.

    Raises:
      ValueError: if the model is not compiled, or a norm is not finite.
    """
    check_model(model)
    check_data("data", data)
    batch_size = _arguments.integer("batch_size", batch_size, minimum=1)
    _build(model, data, batch_size)
    groups = make_groups(None, _compat.names_of(model.trainable_variables))
    return _mean_norms(GradientMeter(model, groups=groups), data, batch_size)


def _build(model: tf.keras.Model, data: Any, batch_size: int) -> None:
    if not model.built:
        x, _, _ = next(_batches(data, batch_size))
        with replicas.scope_of(model):
            model(x, training=False)


class PublicGradientNorms(PublicDataCallback):
    """Measures gradient norms on public data for `PublicNormClip` and `ScaledClip`.

    Nguyen et al. (2023), section 3.3: at the start of training and after every epoch.
    Gradients are taken in inference mode, where batch normalisation uses the statistics
    in the model, which `PublicBatchStatistics` keeps public (put it first).

    Args:
      data: public (x, y), or a `tf.data.Dataset` of batches.
      batch_size: for arrays.

    Raises:
      ValueError: if an argument is out of range, or the optimizer's clip rule does not
        use public norms.
    """

    def __init__(self, data: Any, batch_size: int = 64):
        super().__init__(check_data("data", data))
        self._batch_size = _arguments.integer("batch_size", batch_size, minimum=1)
        self._meter: GradientMeter | None = None

    @property
    def norms(self) -> dict[str, float]:
        """The norms measured last, by group."""
        return dict(self._norms)

    def on_train_begin(self, logs=None):
        del logs
        model = self.model
        optimizer = model.optimizer
        if not hasattr(optimizer, "set_public_norms"):
            raise ValueError(
                "PublicGradientNorms needs an optimizer of dpc.keras, with "
                "clip=dpc.PublicNormClip() or clip=dpc.ScaledClip()."
            )
        _build(model, self.public_data, self._batch_size)
        with replicas.scope_of(model):
            optimizer.build(model.trainable_variables)
        self._meter = GradientMeter(model, groups=optimizer.public_layout)
        self.update()

    def update(self) -> None:
        """Measures the norms, and gives them to the optimizer."""
        self._norms = _mean_norms(self._meter, self.public_data, self._batch_size)
        self.model.optimizer.set_public_norms(self._norms)

    def on_epoch_begin(self, epoch, logs=None):
        del logs
        if epoch > 0:
            self.update()
