"""The sums of a logical step over its physical batches, which have no noise yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class StepSums:
    """Adds up the clipped gradients and the counts of physical batches.

    *Formal guarantees*

    * The sums are private data, and are in no checkpoint and no file: Keras and
      TensorFlow do not look into plain objects.
    * If an error interrupts the addition of a batch, the whole step is dropped: the
      next batch begins a new step. So no step mixes batches of two draws.
    * All batches of a step are clipped in the state of the first batch, which the
      step's noise fits, whatever sets the optimizer's state meanwhile.

    Args:
      variables: the trained variables.
      counts: the number of indicators that the clip rule sums.
      state: a state of the clip rule.
    """

    def __init__(self, variables: Sequence[tf.Variable], counts: int, state: Any):
        self._sums = [
            tf.Variable(
                tf.zeros(v.shape, v.dtype if v.dtype.size >= 4 else tf.float32),
                trainable=False,
            )
            for v in variables
        ]
        self._places = {id(v): i for i, v in enumerate(variables)}
        self._counts = tf.Variable(tf.zeros([counts], tf.float32), trainable=False)
        # The number of batches whose addition began, and the number of added batches.
        self._begun = tf.Variable(0, trainable=False)
        self._filled = tf.Variable(0, trainable=False)
        self._state = tf.nest.map_structure(
            lambda part: tf.Variable(tf.convert_to_tensor(part), trainable=False), state
        )

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the sums, and of the state of their clip rule."""
        return [*self._summed, *tf.nest.flatten(self._state)]

    @property
    def _summed(self) -> list[tf.Variable]:
        return [*self._sums, self._counts, self._begun, self._filled]

    def state_for(self, current: Any) -> Any:
        """The clip rule's state for the current batch.

        Args:
          current: the optimizer's state, which is kept if the batch begins a step.
        """
        begins = tf.logical_or(
            tf.equal(self._filled, 0), tf.not_equal(self._begun, self._filled)
        )

        def keep(kept, part):
            return kept.assign(tf.where(begins, part, kept), read_value=True)

        return tf.nest.map_structure(keep, self._state, current)

    @property
    def state(self) -> Any:
        """The clip rule's state for the batches so far."""
        return tf.nest.map_structure(tf.convert_to_tensor, self._state)

    def add(
        self,
        variables: Sequence[tf.Variable],
        sums: Sequence[tf.Tensor],
        counts: tf.Tensor,
    ) -> tf.Tensor:
        """Adds a physical batch, and returns the number of added batches.

        Args:
          variables: the variables that are trained now.
          sums: the batch's clipped sum for each of the variables.
          counts: the batch's sums of indicators.
        """
        whole = tf.equal(self._begun, self._filled)
        tf.cond(whole, lambda: tf.no_op(), self.clear)
        with tf.control_dependencies([self._begun.assign_add(1, read_value=True)]):
            added = [
                total.assign_add(tf.cast(part, total.dtype), read_value=False)
                for total, part in zip(self._of(variables), sums, strict=True)
            ]
            added.append(self._counts.assign_add(counts, read_value=False))
        with tf.control_dependencies(added):
            return self._filled.assign_add(1, read_value=True)

    def totals(
        self, variables: Sequence[tf.Variable]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sums of `variables`, and the counts."""
        totals = [tf.convert_to_tensor(total) for total in self._of(variables)]
        return totals, tf.convert_to_tensor(self._counts)

    def clear(self) -> tf.Operation:
        """Begins the next logical step."""
        for total in self._summed:
            total.assign(tf.zeros_like(total))
        return tf.no_op()

    @property
    def filled(self) -> int:
        """The number of added batches, as a Python number: not for graphs."""
        whole = int(self._begun) == int(self._filled)
        return int(self._filled) if whole else 0

    def _of(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        return [self._sums[self._places[id(v)]] for v in variables]
