"""Decides which steps compare with ordinary gradients, and stores the outcome.

Each loss has a separate status in each trace: the outcome for a graph does not hold for
a different graph.
"""

from __future__ import annotations

from collections.abc import Hashable

import tensorflow as tf

from tfdpclip._devices import TRACING
from tfdpclip._object_notes import notes_of
from tfdpclip._outside import outside_of_functions

UNCHECKED, PASSED, FAILED = 0, 1, 2
# After a batch without finite, nonzero gradients (an empty draw, for example), the next
# step compares again. At most this many steps compare.
ATTEMPTS = 50


class CheckStatus:
    """Whether a step was compared with ordinary gradients, and the outcome.

    After a failed comparison, every later step compares again and fails.

    Args:
      when: "first" (until a batch has finite, nonzero gradients), "always" or "never".
      error: the error that a failed comparison means, for code that cannot raise.
      key: the same for equal graphs of losses.
      graph: the graph of the loss, which keeps the status alive.
    """

    def __init__(self, when: str, error: Exception, key: Hashable, graph: tf.Graph):
        self.error, self.key = error, key
        around = TRACING.get()
        if when == "first" and key in around.compared:
            when = "never"
        self._when = when
        self._verdict: tf.Variable | None = None
        if when != "never":
            # Every trace makes a variable, and a strategy makes none during a trace.
            outside_of_functions(self._make, [], in_strategy=False)
        notes_of(graph).statuses.append(self)
        if around.tell is not None:
            around.tell(self, graph)

    def _make(self) -> None:
        # float32, in which the ops below are in the step anyway: TensorFlow prepares
        # each pair of an op and a type at a cost.
        self._verdict = tf.Variable(UNCHECKED, trainable=False, dtype=tf.float32)

    @property
    def compares(self) -> bool:
        """Whether any step of the trace compares."""
        return self._when != "never"

    @property
    def settled(self) -> bool:
        """Whether the loss passed, or too many comparisons showed nothing.

        A Python bool; a loss that failed a comparison is never settled.
        """
        verdict = UNCHECKED if self._verdict is None else int(self._verdict)
        return not self.compares or verdict in (PASSED, -ATTEMPTS)

    @property
    def undecided(self) -> bool:
        """Whether steps were compared, and the next step will be compared as well."""
        return not self.settled and int(self._verdict) != UNCHECKED

    @property
    def failed(self) -> bool:
        """Whether a comparison has failed, as a Python bool, outside of graphs."""
        return self._verdict is not None and int(self._verdict) == FAILED

    def due(self, batch_size: tf.Tensor) -> tf.Tensor:
        """Whether this step compares. A step with an empty batch does not."""
        some = batch_size > 0
        if self._when == "always":
            return some
        verdict = self._verdict.read_value()
        open_yet = (verdict <= UNCHECKED) & (verdict > -ATTEMPTS)
        return some & (open_yet | tf.equal(verdict, FAILED))

    def record(self, agrees: tf.Tensor, shows: tf.Tensor) -> tf.Tensor:
        """Stores the outcome of a comparison.

        Args:
          agrees: whether the gradients agree.
          shows: whether the gradients of the batch were finite and not 0, so that the
            comparison could have failed.

        Returns:
          Whether this comparison and all before it were passed.
        """
        seen = self._verdict.read_value()
        # Counts attempts down from UNCHECKED until the first conclusive comparison.
        undecided = tf.where(seen <= UNCHECKED, seen - 1, seen)
        undecided = tf.maximum(undecided, -ATTEMPTS)
        verdict = tf.where(shows, float(PASSED), undecided)
        good = agrees & tf.not_equal(seen, FAILED)
        verdict = tf.where(good, verdict, float(FAILED))
        return tf.not_equal(self._verdict.assign(verdict, read_value=True), FAILED)

    def passed_before(self) -> tf.Tensor:
        """Whether no comparison has failed so far."""
        return tf.not_equal(self._verdict.read_value(), FAILED)
