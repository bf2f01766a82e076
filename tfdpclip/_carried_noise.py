"""Correlated noise in graphs that have no variables, such as a federated round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._noise_steps import (
    HeldTensor,
    KeptStream,
    advance,
    rows_kept,
    stream_of,
)
from tfdpclip.matrix_noise import CorrelatedNoise


class CarriedNoise:
    """The noise of one step of a matrix, for whoever carries what is kept himself.

    For graphs without variables, such as a federated round. In the place of a
    `GaussianNoise`, for one draw; what the next step needs is there afterwards.

    *Formal guarantees*

    * Those of `MatrixNoise`, as long as each step gets what the one before left.
    * Every step has fresh draws, whatever it is given: of two steps that go on from the
      same place, each has noise of its own. Together they cost no more than two
      matrices (docs/guarantees.md).
    * `kept` is as secret as the data.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise, as often as it is asked.
      step: t, an int32 scalar, counted from the beginning of this matrix.
      kept: what the step before left, `first`'s shape; counts for nothing in step 0.

    >>> from tfdpclip import correlated, sampling
    >>> from tfdpclip.noise import GaussianNoise
    >>> scheme = sampling.MinSeparation(1000, 100)
    >>> run = CorrelatedNoise(correlated.SquareRootToeplitz(4), 20, scheme)
    >>> noise = CarriedNoise(run, GaussianNoise(), 0, CarriedNoise.first(run, 5))
    >>> drawn = noise.sample_all([[2], [3]], [1.0, 2.0], [tf.float32] * 2)
    >>> [part.shape.as_list() for part in drawn], noise.kept.shape.as_list()
    ([[2], [3]], [3, 5])
    """

    def __init__(self, run: CorrelatedNoise, source: Any, step: Any, kept: tf.Tensor):
        self.run, self._source = run, source
        self._step = tf.convert_to_tensor(step, tf.int32)
        #: What the next step needs; of this one until it is drawn.
        self.kept = tf.convert_to_tensor(kept)
        self._drawn = False

    @staticmethod
    def first(run: CorrelatedNoise, size: int, dtype: Any = tf.float32) -> tf.Tensor:
        """What there is before the first step.

        Args:
          run: the matrix.
          size: coordinates of all that is noised in a step.
          dtype: float32 or float64.
        """
        return tf.zeros([rows_kept(stream_of(run.matrix), run.steps), size], dtype)

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence
    ) -> list[tf.Tensor]:
        """The step's noise; see `MatrixNoise.sample_all`.

        Args:
          shapes: static shapes, whose sizes add up to that of what is kept.
          stddevs: of independent noise, a number or a scalar tensor for each.
          dtypes: a floating type for each.

        Raises:
          ValueError: if it was drawn before, or the shapes do not fit.
        """
        if self._drawn:
            raise ValueError("This step's noise has been drawn.")
        self._drawn = True
        sizes = [math.prod(tf.TensorShape(shape).as_list()) for shape in shapes]
        count, dtype = self.kept.shape[1], self.kept.dtype
        if sum(sizes) != count:
            raise ValueError(
                f"kept is of {count} coordinates, and the noise of a step has "
                f"{sum(sizes)}."
            )
        held = HeldTensor(self.kept)

        def draw():
            return self._source.sample_all([[count]], [tf.ones([])], [dtype])

        kept = KeptStream(stream_of(self.run.matrix), held)
        scale = tf.constant(self.run.sensitivity, dtype)
        (noise,) = advance([kept], self._step, draw, [scale])
        self.kept = held.read_value()
        parts = zip(tf.split(noise, sizes), shapes, stddevs, dtypes, strict=True)
        return [
            tf.cast(tf.reshape(part, shape) * tf.cast(stddev, dtype), kind)
            for part, shape, stddev, kind in parts
        ]
