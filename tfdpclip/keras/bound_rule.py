"""A clip rule together with the noise that follows from it."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdpclip import accounting
from tfdpclip.clipping import ClipRule, value_at
from tfdpclip.clipping.checks import Schedule


class BoundRule:
    """A clip rule for known variables, and the noise that follows from it.

    Args:
      rule: the rule, bound to the variables if it has groups.
      noise_multiplier: z, or a schedule of it.
      records: the public expected number of records per step.

    Raises:
      ValueError: if the rule's counts are too precise for z (at the first step).
    """

    def __init__(
        self, rule: ClipRule, noise_multiplier: float | Schedule, records: float
    ):
        self.rule = rule
        self._setting = noise_multiplier
        scheduled = isinstance(noise_multiplier, Schedule)
        private = scheduled or noise_multiplier > 0
        self.count_stddevs = tuple(rule.count_stddevs(records, private))
        if scheduled and 0 in self.count_stddevs:
            raise ValueError(
                "count_stddev is 0, an exact count, but noise_multiplier follows a "
                "schedule, so the run is meant to be private."
            )
        with tf.init_scope():
            first = float(value_at(noise_multiplier, 0))
        self._split = 0.0
        if first > 0:
            self._split = accounting.split_noise_multiplier(first, self.count_stddevs)

    def gradient_noise_multiplier(self, step: Any) -> Any:
        """z_g at `step`; NaN where z is negative or the counts are too precise."""
        if not isinstance(self._setting, Schedule):
            return self._split
        z = value_at(self._setting, step)
        spent = math.fsum((2 * s) ** -2 for s in self.count_stddevs)
        # The square root of a negative number makes the step release nothing at all.
        z = tf.where(z >= 0, z, math.nan)
        return z / tf.sqrt(1.0 - spent * z**2)

    def check_names(self, names: list[str]) -> None:
        """Raises if the variables are not those that the groups were made of."""
        members = tuple(name.split(":")[0] for name in names)
        if members != self.rule.layout.members:
            raise ValueError(
                "The variables differ from those that the clip rule's groups were made "
                "of when the optimizer was built. Use a new optimizer."
            )
