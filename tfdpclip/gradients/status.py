"""When a step checks itself, and what came of it.

One status belongs to one loss in one trace: what one graph proved says nothing about
another one.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip._outside import outside_of_functions
from tfdpclip.gradients import chance

UNCHECKED, PASSED, FAILED = 0, 1, 2
# A batch in which fewer than two examples reach a tensor (an empty draw, a layer below
# a head that is still zero) proves nothing about it, and the next step checks again; a
# tensor that no two examples reach in this many steps is left to the later checks.
ATTEMPTS = 50
# How often a step checks itself once the first steps have passed. A check costs about
# as much as ten steps.
DEFAULT_RATE = 1e-3
# From so many steps on, what a check of the whole batch costs is no matter.
_LONG = 1024


class CheckStatus:
    """How often a step has run, and what its checks found.

    A step is checked when it runs for the first time, until a batch is conclusive;
    then at the steps 2, 4, 8, ... and at random, because examples may begin to mix
    later: where a weight that starts at 0 opens a gate, for one. A step that failed
    once is checked, and fails, ever after. Once a step has passed, others replace a few
    examples in the place of all (`replaced.py`), but for the steps 1024, 2048, ...

    Args:
      when: "first" (as above), "always" or "never".
      rate: the probability with which a later step checks itself.
      once: whether no step is checked after the first that is conclusive.
    """

    def __init__(self, when: str, rate: float = DEFAULT_RATE, once: bool = False):
        self._when = when
        self._once = once
        self._rate = rate
        self._steps: tf.Variable | None = None
        self._verdict: tf.Variable | None = None
        if when != "never":
            # Every trace makes its own, which a strategy's variables could not be.
            outside_of_functions(self._make, [], in_strategy=False)

    def _make(self) -> None:
        self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._verdict = tf.Variable(UNCHECKED, trainable=False, dtype=tf.int64)

    @property
    def failed(self) -> bool:
        """Whether a check has failed. Not for use in graphs."""
        return self._verdict is not None and int(self._verdict) == FAILED

    def due(self, batch_size: tf.Tensor) -> tf.Tensor:
        """Whether this step is to be checked: an empty batch proves nothing.

        To be called once in a step: it counts.
        """
        some = batch_size > 0
        if self._when == "always":
            return some
        if self._once:
            verdict = self._verdict.read_value()
            open_yet = (verdict <= UNCHECKED) & (verdict > -ATTEMPTS)
            return some & (open_yet | tf.equal(verdict, FAILED))
        step = self._steps.assign_add(tf.cast(some, tf.int64), read_value=True)
        zero = tf.zeros([], tf.int64)
        due = tf.equal(tf.bitwise.bitwise_and(step, step - 1), zero)
        verdict = self._verdict.read_value()
        open_yet = (verdict <= UNCHECKED) & (verdict > -ATTEMPTS)
        due |= open_yet | tf.equal(verdict, FAILED)
        if self._rate > 0:
            due |= chance.uniform([]) < self._rate
        return some & due

    def few_do(self) -> tf.Tensor:
        """Whether this step's check may look at some examples; after `due`."""
        if self._when == "always":
            return tf.constant(False)
        step = self._steps.read_value()
        long = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0) & (step >= _LONG)
        return tf.equal(self._verdict.read_value(), PASSED) & ~long

    def settle(self, ok: tf.Tensor, conclusive: tf.Tensor) -> tf.Tensor:
        """Notes what a check found.

        Args:
          ok: whether nothing was wrong.
          conclusive: whether the batch could have shown it.

        Returns:
          Whether this check and all before it were passed.
        """
        seen = self._verdict.read_value()
        # Counts down from UNCHECKED until a batch is conclusive, and then stays.
        undecided = tf.where(seen <= UNCHECKED, seen - 1, seen)
        undecided = tf.maximum(undecided, tf.constant(-ATTEMPTS, tf.int64))
        verdict = tf.where(conclusive, tf.constant(PASSED, tf.int64), undecided)
        good = ok & tf.not_equal(seen, FAILED)
        verdict = tf.where(good, verdict, tf.constant(FAILED, tf.int64))
        return tf.not_equal(self._verdict.assign(verdict, read_value=True), FAILED)

    def passed_before(self) -> tf.Tensor:
        """Whether no check has failed so far."""
        return tf.not_equal(self._verdict.read_value(), FAILED)
