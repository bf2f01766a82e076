"""Descent on the mean squared distance to points, by the library's own optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfdpclip as dpc

#: Positions that are recorded, about.
_RECORDS = 200


class _Gap(tf.keras.layers.Layer):
    """The gap from each point to the position, which is the layer's only weight.

    So scaled that its mean square is half the squared distance.
    """

    def build(self, shape):
        self.position = self.add_weight(
            name="position", shape=(shape[-1],), initializer="zeros"
        )

    def call(self, points):
        return (self.position - points) * math.sqrt(points.shape[-1] / 2)


class Descent:
    """Descends from the same start many times; its graph is made once.

    Args:
      rows: points in a batch, all with a gradient of their own.
      dimension: of the points.
      learning_rate: of plain descent.
      clip_norm: of each point's gradient.
      noise_stddev: of the noise on the mean gradient, in each coordinate.
      perturbation: stddev of the noise on each gradient before it is clipped.
      seed: of both noises; the points are made up.
    """

    def __init__(
        self,
        rows: int,
        dimension: int,
        learning_rate: float,
        clip_norm: float,
        noise_stddev: float,
        perturbation: float,
        seed: int,
    ):
        self._model = tf.keras.Sequential([tf.keras.Input((dimension,)), _Gap()])
        self._optimizer = dpc.keras.DPSGD(
            learning_rate,
            clip=clip_norm,
            noise_multiplier=noise_stddev * rows / clip_norm,
            expected_batch_size=rows,
            perturbation=perturbation,
            seed=seed,
        )
        self._rows = rows

    def follow(
        self,
        points: np.ndarray,
        draws: np.ndarray | None,
        start: float,
        steps: int,
        advance: Callable[[int], None],
    ) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of some steps, `[n]`, and the positions then, `[n, dimension]`.

        Args:
          points: `[count, dimension]`.
          draws: the points of each batch, `[steps, rows]`; all in every step if None.
          start: the position at first, in every coordinate.
          steps: how many.
          advance: gets the number of steps so far.
        """
        layer = self._model.layers[-1]
        layer.position.assign(tf.fill(layer.position.shape, float(start)))
        at_once = max(
            n for n in range(1, max(1, steps // _RECORDS) + 1) if steps % n == 0
        )
        if getattr(self._model, "optimizer", None) is None:
            self._model.compile(
                self._optimizer,
                tf.keras.losses.MeanSquaredError(),
                steps_per_execution=at_once,
            )
        points = tf.constant(points, tf.float32)
        if draws is None:
            batches = tf.data.Dataset.from_tensors(points).repeat(steps)
        else:
            batches = tf.data.Dataset.from_tensor_slices(draws)
            batches = batches.map(lambda drawn: tf.gather(points, drawn))
        batches = batches.map(
            lambda x: (tf.ensure_shape(x, [self._rows, None]), tf.zeros_like(x))
        )
        positions = [layer.position.numpy()]

        def record(batch, logs=None):
            del logs
            positions.append(layer.position.numpy())
            advance(batch + 1)

        watch = tf.keras.callbacks.LambdaCallback(on_train_batch_end=record)
        self._model.fit(batches, verbose=0, shuffle=False, callbacks=[watch])
        return np.arange(len(positions)) * at_once, np.stack(positions)
