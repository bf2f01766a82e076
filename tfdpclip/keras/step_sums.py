"""The sums of a logical step over its physical batches, which have no noise yet."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class StepSums:
    """Adds up the clipped gradients and the counts of physical batches.

    *Formal guarantees*: what is summed is private data. No checkpoint and no file has
    it: Keras and TensorFlow do not look into plain objects.

    Args:
      variables: what is trained.
      counts: how many indicators the clip rule has summed.
    """

    def __init__(self, variables: Sequence[tf.Variable], counts: int):
        self._sums = [
            tf.Variable(
                tf.zeros(v.shape, v.dtype if v.dtype.size >= 4 else tf.float32),
                trainable=False,
            )
            for v in variables
        ]
        self._places = {id(v): i for i, v in enumerate(variables)}
        self._counts = tf.Variable(tf.zeros([counts], tf.float32), trainable=False)
        self._filled = tf.Variable(0, trainable=False)

    @property
    def variables(self) -> list[tf.Variable]:
        """What the sums are kept in."""
        return [*self._sums, self._counts, self._filled]

    def add(
        self,
        variables: Sequence[tf.Variable],
        sums: Sequence[tf.Tensor],
        counts: tf.Tensor,
    ) -> tf.Tensor:
        """Adds a physical batch, and returns how many there are now.

        Args:
          variables: those that are trained now.
          sums: the batch's clipped sum for each of them.
          counts: its sums of indicators.
        """
        for total, part in zip(self._of(variables), sums, strict=True):
            total.assign_add(tf.cast(part, total.dtype))
        self._counts.assign_add(counts)
        return self._filled.assign_add(1, read_value=True)

    def totals(
        self, variables: Sequence[tf.Variable]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sums of `variables`, and the counts."""
        totals = [tf.convert_to_tensor(total) for total in self._of(variables)]
        return totals, tf.convert_to_tensor(self._counts)

    def clear(self) -> None:
        """Begins the next logical step."""
        for total in self.variables:
            total.assign(tf.zeros_like(total))

    def _of(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        return [self._sums[self._places[id(v)]] for v in variables]
