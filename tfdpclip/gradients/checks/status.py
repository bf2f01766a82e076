"""When a step compares itself with ordinary gradients, and what was found.

One status belongs to one loss in one trace: what was found for one graph says nothing
about another.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip._outside import outside_of_functions

UNCHECKED, PASSED, FAILED = 0, 1, 2
# A batch that shows nothing (an empty draw, gradients that are 0 or no numbers) leaves
# the comparison to the next step, in so many steps at most.
ATTEMPTS = 50


class CheckStatus:
    """Whether a step has been compared with ordinary gradients, and the outcome.

    A step that failed once is compared, and fails, ever after.

    Args:
      when: "first" (until a batch shows something), "always" or "never".
    """

    def __init__(self, when: str):
        self._when = when
        self._verdict: tf.Variable | None = None
        if when != "never":
            # Every trace makes its own, which a strategy's variables could not be.
            outside_of_functions(self._make, [], in_strategy=False)

    def _make(self) -> None:
        self._verdict = tf.Variable(UNCHECKED, trainable=False, dtype=tf.int64)

    @property
    def failed(self) -> bool:
        """Whether a comparison has failed. Not for use in graphs."""
        return self._verdict is not None and int(self._verdict) == FAILED

    def due(self, batch_size: tf.Tensor) -> tf.Tensor:
        """Whether this step is to be compared: an empty batch shows nothing."""
        some = batch_size > 0
        if self._when == "always":
            return some
        verdict = self._verdict.read_value()
        open_yet = (verdict <= UNCHECKED) & (verdict > -ATTEMPTS)
        return some & (open_yet | tf.equal(verdict, FAILED))

    def settle(self, agrees: tf.Tensor, shows: tf.Tensor) -> tf.Tensor:
        """Notes the outcome of a comparison.

        Args:
          agrees: whether nothing was wrong.
          shows: whether the batch could have shown it.

        Returns:
          Whether this comparison and all before it were passed.
        """
        seen = self._verdict.read_value()
        # Counts down from UNCHECKED until a batch shows something, and then stays.
        undecided = tf.where(seen <= UNCHECKED, seen - 1, seen)
        undecided = tf.maximum(undecided, tf.constant(-ATTEMPTS, tf.int64))
        verdict = tf.where(shows, tf.constant(PASSED, tf.int64), undecided)
        good = agrees & tf.not_equal(seen, FAILED)
        verdict = tf.where(good, verdict, tf.constant(FAILED, tf.int64))
        return tf.not_equal(self._verdict.assign(verdict, read_value=True), FAILED)

    def passed_before(self) -> tf.Tensor:
        """Whether no comparison has failed so far."""
        return tf.not_equal(self._verdict.read_value(), FAILED)
