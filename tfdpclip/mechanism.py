"""The one place where privacy happens: clip, sum, noise, divide, adapt.

A step of training and a round of federated learning are the same mechanism, for every
way to compute the records' gradients and to sum them:

1. *clip* every record with C_t, the rule's state at step t (`Mechanism.clip`);
2. *sum* the clipped records, and the rule's indicators (the caller);
3. *noise* both sums, scaled by C_t (`Mechanism.release`);
4. *divide* by the public number of records;
5. *adapt*: the noised fractions, and nothing else, move C_t to C_{t+1}.

Keras optimizers, the aggregators of `tfdpclip.federated` and the benchmarks' engine
release through `Mechanism`, so that they cannot differ. This module depends on none of
them: it imports neither Keras nor TensorFlow Federated.

*Formal guarantees*, for a mechanism of noise multiplier z (the number that is given to
the accountant) and a rule that keeps the guarantees of `ClipRule`:
* With s_k the stddev of the noise on count k, let z_g^-2 = z^-2 - sum_k (2 s_k)^-2.
  Noise of stddev z_g times ``rule.noise_scales(C_t)[h]`` on the sum of group h, and of
  s_k on count k, makes all sums of a step one Gaussian mechanism of noise multiplier z
  for adding or removing one record, given C_t (Andrew et al. 2021, Theorem 1). That
  holds for every s_k, also for default s_k that were enlarged.
* C_{t+1} is a function of C_t and of the noised counts, so that all steps together are
  an adaptive composition of such mechanisms.
* The divisor is a public number, never the actual number of records; the division and
  the clamping of fractions to [0, 1] are processing of private results.
* Unsound settings fail closed: with noise, a clip rule without a bound is refused,
  and so are counts too precise for z. Under a schedule, each z is known only in its
  step: there, a step with too precise counts releases NaN, for the fractions too, and
  C_t stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfdpclip._arguments import non_negative, positive, shown
from tfdpclip._docs import see
from tfdpclip._schedules import setting, value_at
from tfdpclip.accounting import noise_split
from tfdpclip.clipping import ClipRule
from tfdpclip.clipping.bounds import check_rule
from tfdpclip.clipping.held import (
    limit_indicators,
    limit_weights,
    scales_of,
    trace_scales,
)


class NoiseSource(Protocol):
    """A source of noise, such as `tfdpclip.noise.GaussianNoise`."""

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence
    ) -> list[tf.Tensor]:
        """Independent Gaussian noise: a tensor for each shape, stddev and type."""


class Release(NamedTuple):
    """The release of one step.

    Attributes:
      means: the noised sums over the public number of records; None for a sum of None.
      fractions: the noised fractions, `[K]`, each in [0, 1].
      next_state: the rule's state C_{t+1}.
      stddevs: the noise stddev on the sum of each group, `[L]`; L is 1 without groups.
    """

    means: list[tf.Tensor | None]
    fractions: tf.Tensor
    next_state: Any
    stddevs: tf.Tensor


class Mechanism:
    """A clip rule, a noise multiplier and a number of records: a private step.

    *Formal guarantees*: see this module.

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
      ValueError: if an argument is out of range, a record can exceed the rule's bound,
        its counts are too precise for z, or there is noise but no bound for the noise
        to hide.

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
        if not isinstance(rule, ClipRule):
            raise ValueError(
                f"rule must be a clip rule such as QuantileClip(), got {shown(rule)}."
            )
        # Every mechanism checks its rule before the rule scales noise.
        self.rule = rule if isinstance(rule, Unclipped) else check_rule(rule, "rule")
        trace_scales(self.rule)
        assignment = rule.assignment
        #: L, the number of groups of variables; 1 for a rule without groups.
        self.groups = 1 if assignment is None else max(assignment) + 1
        self.noise_multiplier = setting(
            "noise_multiplier", noise_multiplier, non_negative
        )
        self.records = positive("records", records)
        self.inflation = positive("inflation", inflation)
        self.divisor = self.records
        if divisor is not None:
            self.divisor = positive("divisor", divisor)
        self.scheduled = callable(self.noise_multiplier)
        z = self.noise_multiplier
        private = callable(z) or z > 0
        if private and isinstance(rule, Unclipped):
            raise ValueError(
                "clip must not be None with noise: one record would have no bound. Use "
                "clip=dpc.QuantileClip(), or noise_multiplier=0 for a baseline."
                + see("updates-without-a-bound")
            )
        # The rule's own noise on counts, before default noise is enlarged.
        counts = rule.count_stddevs(self.records, private)
        if self.scheduled and 0 in counts:
            raise ValueError(
                "count_stddev is 0, an exact count, but noise_multiplier follows a "
                "schedule, so the run is meant to be private."
            )
        with tf.init_scope():
            first = float(value_at(self.noise_multiplier, 0))
        self._free = rule.default_counts
        self._precisions = noise_split.count_precisions(counts, self._free)
        self._least_stddevs = counts
        #: s_k of every count; under a schedule, those of step 0.
        self.count_stddevs = tuple(counts)
        if first > 0:
            self.count_stddevs = noise_split.count_stddevs(rule, self.records, first)
        self._split = 0.0
        if first > 0:
            self._split = noise_split.split_noise_multiplier(first, self.count_stddevs)

    def gradient_noise_multiplier(self, step: Any = 0) -> Any:
        """z_g, the part of z that the counts leave for the sums.

        Args:
          step: t, counted from 0; matters for a schedule only.

        Returns:
          A float. For a schedule a float32 scalar, NaN where z is negative or the
          counts are too precise for it.
        """
        if not self.scheduled:
            return self._split
        z = value_at(self.noise_multiplier, step)
        chosen, free = self._precisions
        spent = chosen**2 + (free / self._raised(z)) ** 2
        # The square root of a negative number is NaN, so that the step releases NaN.
        z = tf.where(z >= 0, z, math.nan)
        return z / tf.sqrt(1.0 - spent * z**2)

    def _raised(self, z: tf.Tensor) -> tf.Tensor:
        """The factor of the default noise on counts under a schedule's z.

        As in `noise_split.count_stddevs`; 1 if the chosen counts take all of z.
        """
        chosen, free = self._precisions
        room = noise_split.DEFAULT_SHARE * (1.0 - (chosen * z) ** 2)
        factor = free * z / tf.sqrt(tf.where(room > 0, room, 1.0))
        return tf.where(room > 0, tf.maximum(factor, 1.0), 1.0)

    def _count_stddevs(self, step: Any, part: float) -> tf.Tensor:
        """`part` times s_k of every count in a step, float32 `[K]`."""
        if not self.scheduled or not any(self._free):
            return tf.constant([part * s for s in self.count_stddevs], tf.float32)
        factor = self._raised(value_at(self.noise_multiplier, step))
        least = tf.constant([part * s for s in self._least_stddevs], tf.float32)
        return tf.where(self._free, factor * least, least)

    def noise_stddevs(self, state: Any, step: Any = 0) -> tf.Tensor:
        """The stddev of the noise on the sum of each group, float32 `[L]`.

        Args:
          state: C_t, with which the records were clipped.
          step: t.
        """
        return self._stddevs(state, step, 1.0)

    def _stddevs(self, state: Any, step: Any, divisor: float) -> tf.Tensor:
        multiplier = self.gradient_noise_multiplier(step) * self.inflation
        scales = tf.reshape(scales_of(self.rule)(state), [self.groups])
        return (multiplier / divisor) * scales

    @tf.autograph.experimental.do_not_convert
    def clip(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The weight of each record, and its indicators for the counts.

        Args:
          norms: the records' norms, `[B]`, or `[B, L]` for a rule with groups.
          state: C_t.
          present: `[B]`, False for padding; None if every record is real.

        Returns:
          Weights, of the norms' shape, and indicators, `[B, K]`, in [-1/2, 1/2].
        """
        weights = limit_weights(
            self.rule, norms, state, self.rule.weights(norms, state)
        )
        indicators = self.rule.indicators(norms, state, present)
        return weights, limit_indicators(self.rule, indicators)

    @tf.autograph.experimental.do_not_convert
    def release(
        self,
        state: Any,
        sums: Sequence[tf.Tensor | None],
        counts: tf.Tensor,
        noise: NoiseSource,
        step: Any = 0,
        *,
        divided: bool = False,
    ) -> Release:
        """Adds noise scaled by C_t, divides, and adapts C_t.

        Args:
          state: C_t, with which the records were clipped.
          sums: the sum of the clipped records' parts, of static shape, for each
            variable that the rule was bound to (any parts for a rule without groups);
            None for a sum that is not released.
          counts: the sums of the indicators, `[K]`.
          noise: the source of the noise.
          step: t.
          divided: whether every weight has been divided by `divisor` already, which is
            cheaper since there are fewer weights than coordinates.
        """
        noised = self.add_noise(state, sums, counts, noise, step, divided=divided)
        return self.finish(state, *noised, step=step, divided=divided)

    @tf.autograph.experimental.do_not_convert
    def add_noise(
        self,
        state: Any,
        sums: Sequence[tf.Tensor | None],
        counts: tf.Tensor,
        noise: NoiseSource,
        step: Any = 0,
        *,
        divided: bool = False,
        shares: int = 1,
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """Adds noise scaled by C_t: the first half of `release`, for divided sums.

        *Formal guarantees*: if each of `shares` places adds independent noise here, the
        sum over the places has the noise of one release: variances of independent
        Gaussians add up. The result of a single place, released alone, has too little
        noise.

        Args:
          state: C_t.
          sums: a place's part of the sums, see `release`.
          counts: the place's part of the counts.
          noise: the source of the noise, independent of the noise of all other places.
          step: t.
          divided: see `release`.
          shares: the number of places.

        Returns:
          The sums and the counts, each with 1 / `shares` of the noise's variance.
        """
        part_of_stddev = shares**-0.5
        if not self.scheduled and self._split == 0:
            columns: list[Any] = [0.0] * self.groups
        else:
            unit = (self.divisor if divided else 1.0) / part_of_stddev
            columns = tf.unstack(self._stddevs(state, step, unit), self.groups)
        assignment = self.rule.assignment
        of = (0,) * len(sums) if assignment is None else assignment
        if len(of) != len(sums):
            raise ValueError(
                f"sums has {len(sums)} entries, but the clip rule was bound to "
                f"{len(of)} variables."
            )
        known = len(self.count_stddevs)
        if not counts.shape.is_compatible_with([known]):
            raise ValueError(
                f"counts has shape {counts.shape}, but the clip rule counts {known}."
            )
        parts = {i: part for i, part in enumerate(sums) if part is not None}
        *drawn, count_noise = noise.sample_all(
            [*(part.shape for part in parts.values()), [known]],
            [*(columns[of[i]] for i in parts), 1.0],
            [*(part.dtype for part in parts.values()), tf.float32],
        )
        noised = list(sums)
        for (i, part), added in zip(parts.items(), drawn, strict=True):
            noised[i] = part + added
        if self.count_stddevs:
            counts += count_noise * self._count_stddevs(step, part_of_stddev)
        return noised, counts

    @tf.autograph.experimental.do_not_convert
    def finish(
        self,
        state: Any,
        sums: Sequence[tf.Tensor | None],
        counts: tf.Tensor,
        *,
        step: Any = 0,
        divided: bool = False,
    ) -> Release:
        """Divides and adapts, once the noise is in the sums.

        For sums with noise from the records' owners. For all other sums, use
        `release`.

        Args:
          state: C_t.
          sums: the noised sums.
          counts: the noised sums of the indicators, `[K]`.
          step: t.
          divided: see `release`.
        """
        means = [
            part if part is None or divided else part / self.divisor for part in sums
        ]
        fractions = self.fractions(counts)
        next_state = self.rule.next_state(state, fractions)
        if self.scheduled:
            # Counts that are too precise for z reveal more than z accounts for.
            covered = tf.math.is_finite(self.gradient_noise_multiplier(step))
            fractions = tf.where(covered, fractions, math.nan)
            next_state = tf.nest.map_structure(
                lambda new, old: tf.where(covered, new, old), next_state, state
            )
        return Release(means, fractions, next_state, self.noise_stddevs(state, step))

    def fractions(self, counts: tf.Tensor) -> tf.Tensor:
        """The fractions, in [0, 1], from noised sums of indicators."""
        counts = tf.cast(counts, tf.float32)
        return tf.clip_by_value(counts / self.records + 0.5, 0.0, 1.0)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Unclipped(ClipRule):
    """No clipping, for baselines without noise: every finite record has weight 1."""

    def initial_state(self) -> Any:
        return ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return tf.ones_like(norms)

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(math.inf, tf.float32)

    def noise_scales(self, state: Any) -> tf.Tensor:
        # No noise would suffice, and 0 times infinity is not 0.
        return tf.constant(0.0, tf.float32)
