"""Gaussian perturbation of every record's gradient before it is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip.gradients.forms.base_form import Budget, in_chunks, sum_squares
from tfdpclip.noise import philox


class Perturbation:
    """Adds k * N(0, I) to each record's gradient, fresh for every record and step.

    Chen et al. (2020), section 4: the larger k, the more symmetric the distribution of
    perturbed gradients, and the smaller the bias of clipping. The perturbation gives no
    privacy, and none is claimed: it is clipped together with the gradient.

    The noise is regenerated from a seed where it is needed, a chunk of records at a
    time, so that the noise of a whole batch is never in memory.

    Args:
      scale: k, above 0.
      seed: two integers, `[2]`, new in every step. Each variable and each chunk of
        records has a stream derived from all bits of the seed.
      shapes: the shape of each variable; None for a variable without perturbation.
      budget: how much memory to use.
    """

    def __init__(self, scale: float, seed: tf.Tensor, shapes: Sequence, budget: Budget):
        self.scale = scale
        # All bits of the seed are kept, for integers of any width.
        seed = tf.cast(seed, tf.int64)
        self._seeds = [philox.derive(seed, i) for i in range(len(shapes))]
        self._shapes = [None if s is None else [int(d) for d in s] for s in shapes]
        sizes = [math.prod(s) for s in self._shapes if s is not None]
        # Memory for gradients, noise and their sum.
        self._chunk = budget.chunk(12.0 * sum(sizes))
        self._whole = budget.fits(12.0 * sum(sizes))

    def _noise(self, index: int, start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        seed = philox.derive(self._seeds[index], start)
        return self.scale * philox.normal([size, *self._shapes[index]], seed)

    def squared_norms(self, gradients, batch_size: tf.Tensor) -> tf.Tensor:
        """The squared norms of the perturbed gradients, `[B, V]`.

        Args:
          gradients: a function of (start, size) that returns each variable's gradients,
            `[size, *shape]`.
          batch_size: B.
        """

        def compute(start, size):
            squares = []
            for i, part in enumerate(gradients(start, size)):
                if self._shapes[i] is None:
                    squares.append(tf.zeros([size], tf.float32))
                    continue
                part = tf.cast(part, tf.float32) + self._noise(i, start, size)
                squares.append(sum_squares(part))
            return tf.stack(squares, axis=1)

        if self._whole:
            return compute(tf.constant(0), batch_size)
        return in_chunks(compute, batch_size, self._chunk, len(self._shapes))

    def weighted_sum(self, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """sum_i weights_i noise_i for each variable, from `[B]` weights for each."""
        batch_size = tf.shape(weights[0])[0]
        size = batch_size
        if not self._whole:
            size = tf.minimum(self._chunk, tf.maximum(batch_size, 1))

        def add(start, kept, sums):
            added = []
            for i, total in enumerate(sums):
                if self._shapes[i] is None:
                    added.append(total)
                    continue
                # Not a slice: XLA gives a slice with a dynamic end the batch's shape.
                part = tf.gather(weights[i], start + tf.range(size))
                part = tf.cast(part, tf.float32)
                part = tf.where(kept, part, tf.zeros_like(part))
                noise = self._noise(i, start, size)
                added.append(total + tf.tensordot(part, noise, 1))
            return added

        zeros = [tf.zeros(s if s is not None else [], tf.float32) for s in self._shapes]
        if self._whole:
            return add(tf.constant(0), tf.constant(True), zeros)
        # As in `in_chunks`, the last chunk is moved back to end with the batch. Records
        # in the last chunk and the chunk before count in the last chunk.
        count = tf.where(batch_size > 0, (batch_size + size - 1) // size, 0)
        last = batch_size - size

        def body(i, sums):
            start = tf.minimum(i * size, last)
            rows = start + tf.range(size)
            return i + 1, add(start, tf.logical_or(rows < last, i == count - 1), sums)

        _, sums = tf.while_loop(
            lambda i, sums: i < count,
            body,
            (tf.constant(0), zeros),
            parallel_iterations=1,
        )
        return sums
