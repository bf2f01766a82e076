"""The mechanism of `tfdpclip.kernel`, with errors that say what to do.

This module imports neither Keras nor TensorFlow Federated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfdpclip._arguments import instance, non_negative, positive
from tfdpclip._docs import see
from tfdpclip._schedules import setting, value_at
from tfdpclip.accounting import noise_split
from tfdpclip.clipping import ClipRule
from tfdpclip.clipping.interface import check_rule
from tfdpclip.kernel import mechanism
from tfdpclip.kernel.mechanism import NoiseSource, Release

__all__ = ["Mechanism", "NoiseSource", "Release", "Unclipped"]


class Mechanism(mechanism.Mechanism):
    """A clip rule, a noise multiplier and a number of records: a private step.

    *Formal guarantees*: see `tfdpclip.kernel.mechanism`.

    Args:
      rule: a clip rule, bound to the variables if it has groups.
      noise_multiplier: z, as given to the accountant, or a Keras schedule of z by the
        step. 0 adds no noise and is not private.
      records: the public expected number of records per step: the divisor.
      inflation: the largest norm that a record can have in the sum, in units of its
        clip norm; the noise on sums grows by it.
      divisor: the divisor of sums, if records have weights of at most 1: the public
        expected sum of weights. By default `records`.

    Raises:
      ValueError: if an argument is out of range, a rule's methods do not fit each
        other, its counts are too precise for z, or there is noise but no bound for the
        noise to hide.

    >>> from tfdpclip.clipping import FixedClip
    >>> from tfdpclip.noise import GaussianNoise
    >>> mechanism = Mechanism(FixedClip(2.0), noise_multiplier=0.0, records=4)
    >>> gradients = tf.constant([[3.0, 4.0], [0.0, 1.0]])
    >>> weights, bits = mechanism.clip(tf.norm(gradients, axis=1), ())
    >>> total = tf.linalg.matvec(gradients, weights, transpose_a=True)
    >>> counts = tf.reduce_sum(bits, axis=0)
    >>> release = mechanism.release((), [total], counts, GaussianNoise())
    >>> release.means[0].numpy().round(6).tolist()
    [0.3, 0.65]

    A count takes its share of z, and the sum gets more noise for it:

    >>> from tfdpclip.clipping import QuantileClip
    >>> mechanism = Mechanism(QuantileClip(initial_norm=0.5), 1.0, records=100)
    >>> mechanism.count_stddevs
    (5.0,)
    >>> round(mechanism.gradient_noise_multiplier(), 6)
    1.005038
    >>> mechanism.noise_stddevs(tf.constant(0.5)).numpy().round(6).tolist()
    [0.502519]
    """

    def __init__(
        self,
        rule: ClipRule,
        noise_multiplier: float | Any,
        records: float,
        *,
        inflation: float = 1.0,
        divisor: float | None = None,
    ):
        instance("rule", rule, ClipRule, "a clip rule such as QuantileClip()")
        check_rule(rule, "clip")
        z = setting("noise_multiplier", noise_multiplier, non_negative)
        with tf.init_scope():
            first = float(value_at(z, 0))
        if (callable(z) or first > 0) and isinstance(rule, Unclipped):
            raise ValueError(
                "clip must not be None with noise: one record would have no bound. Use "
                "clip=dpc.QuantileClip(), or noise_multiplier=0 for a baseline."
                + see("updates-without-a-bound")
            )
        positive("records", records)
        if callable(z) and 0 in rule.count_stddevs(records, True):
            raise ValueError(
                "count_stddev is 0, an exact count, but noise_multiplier follows a "
                "schedule, so the run is meant to be private."
            )
        if first > 0:
            counts = noise_split.count_stddevs(rule, records, first)
            noise_split.split_noise_multiplier(first, counts)
        super().__init__(rule, z, records, inflation=inflation, divisor=divisor)
        if self.count_stddevs:
            rule.check_noise([s / self.records for s in self.count_stddevs])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Unclipped(ClipRule):
    """No clipping, for baselines without noise: every finite record has weight 1."""

    def initial_state(self) -> Any:
        return ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return tf.ones_like(norms)

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(math.inf, tf.float32)
