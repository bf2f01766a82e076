"""The one place where privacy happens: clip, sum, noise, divide, adapt.

A step of training and a round of federated learning are the same mechanism, for every
way to compute the records' gradients and to sum them:

1. *clip* every record with C_t, the rule's state at step t (`Mechanism.clip`);
2. *sum* the clipped records, and the rule's indicators (the caller);
3. *noise* both sums, scaled by C_t (`Mechanism.release`);
4. *divide* by the public number of records;
5. *adapt*: the noised fractions, and nothing else, move C_t to C_{t+1}.

Keras optimizers, the aggregators of `tfdpclip.federated` and the benchmarks' engine
release through `Mechanism`, so that they cannot differ.

*Formal guarantees*, for a mechanism of noise multiplier z (the number that is given to
the accountant), norms that are right, and sums of records times their weights:
* No record's part is longer than the noise is scaled by, whatever the rule returns:
  `tfdpclip.kernel.limits`.
* With s_k the stddev of the noise on count k, let z_g^-2 = z^-2 - sum_k (2 s_k)^-2.
  Noise of stddev z_g times ``rule.noise_scales(C_t)[h]`` on the sum of group h, and of
  s_k on count k, makes all sums of a step one Gaussian mechanism of noise multiplier z
  for adding or removing one record, given C_t (Andrew et al. 2021, Theorem 1). That
  holds for every s_k, also for default s_k that were enlarged.
* C_{t+1} is a function of C_t and of the noised counts, so that all steps together are
  an adaptive composition of such mechanisms.
* The divisor is a public number, never the actual number of records; the division is
  processing of private results.
* Unsound settings fail closed: counts that are too precise for z are refused. Under a
  schedule, each z is known only in its step: there, a step with too precise counts
  releases NaN, for the fractions too, and C_t stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from tfdpclip.kernel import limits, noise_split
from tfdpclip.kernel.checks import non_negative, positive
from tfdpclip.kernel.rule import Rule

# The number of a step, counted from 0.
Step: TypeAlias = "int | tf.Tensor"


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
      fractions: the noised fractions, `[K]`, which noise may take out of [0, 1].
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
      noise_multiplier: z, 0 or above, as given to the accountant, or a function of the
        step that gives it. 0 adds no noise and is not private.
      records: the public expected number of records per step: the divisor.
      inflation: the largest norm that a record can have in the sum, in units of its
        clip norm; the noise on sums grows by it.
      divisor: the divisor of sums, if records have weights of at most 1: the public
        expected sum of weights. By default `records`.

    Raises:
      ValueError: if an argument is out of range, or the counts are too precise for z.
    """

    def __init__(
        self,
        rule: Rule,
        noise_multiplier: float | Callable[[Step], tf.Tensor],
        records: float,
        *,
        inflation: float = 1.0,
        divisor: float | None = None,
    ):
        self.rule = rule
        #: Whether z is a function of the step.
        self.scheduled = callable(noise_multiplier)
        self.noise_multiplier = noise_multiplier
        self.records = positive("records", records)
        self.inflation = positive("inflation", inflation)
        self.divisor = self.records if divisor is None else positive("divisor", divisor)
        assignment = rule.assignment
        #: L, the number of groups of variables; 1 for a rule without groups.
        self.groups = 1 if assignment is None else max(assignment) + 1
        with tf.init_scope():
            first = non_negative("noise_multiplier", self._multiplier_at(0))
        # The rule's own noise on counts, before default noise is enlarged.
        counts = rule.count_stddevs(self.records, self.scheduled or first > 0)
        self._free = rule.default_counts
        self._precisions = noise_split.count_precisions(counts, self._free)
        self._least_stddevs = counts
        #: s_k of every count; under a schedule, those of step 0.
        self.count_stddevs = tuple(counts)
        self._split = 0.0
        if first > 0:
            self.count_stddevs = noise_split.enlarged_stddevs(counts, self._free, first)
            self._split = noise_split.remaining_multiplier(first, self.count_stddevs)
        if math.isnan(self._split) or (self.scheduled and 0 in counts):
            raise ValueError("count_stddevs are too precise for noise_multiplier.")

    def _multiplier_at(self, step: Step) -> float | tf.Tensor:
        z = self.noise_multiplier
        return z(step) if callable(z) else z

    def gradient_noise_multiplier(self, step: Step = 0) -> float | tf.Tensor:
        """z_g, the part of z that the counts leave for the sums.

        Args:
          step: t, counted from 0; matters for a schedule only.

        Returns:
          A float. For a schedule a float32 scalar, NaN where z is negative or the
          counts are too precise for it.
        """
        if not self.scheduled:
            return self._split
        z = self._multiplier_at(step)
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

    def _count_stddevs(self, step: Step, part: float) -> tf.Tensor:
        """`part` times s_k of every count in a step, float32 `[K]`."""
        if not self.scheduled or not any(self._free):
            return tf.constant([part * s for s in self.count_stddevs], tf.float32)
        factor = self._raised(self._multiplier_at(step))
        least = tf.constant([part * s for s in self._least_stddevs], tf.float32)
        return tf.where(self._free, factor * least, least)

    def noise_stddevs(self, state: Any, step: Step = 0) -> tf.Tensor:
        """The stddev of the noise on the sum of each group, float32 `[L]`.

        Args:
          state: C_t, with which the records were clipped.
          step: t.
        """
        return self._stddevs(state, step, 1.0)

    def _stddevs(self, state: Any, step: Step, divisor: float) -> tf.Tensor:
        if not self.scheduled and self._split == 0:
            return tf.zeros([self.groups])  # Not 0 times the scale of no clip.
        multiplier = self.gradient_noise_multiplier(step) * self.inflation
        scales = tf.reshape(limits.scales_of(self.rule)(state), [self.groups])
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
        weights = limits.weights_of(self.rule, norms, state)
        return weights, limits.indicators_of(self.rule, norms, state, present)

    @tf.autograph.experimental.do_not_convert
    def release(
        self,
        state: Any,
        sums: Sequence[tf.Tensor | None],
        counts: tf.Tensor,
        noise: NoiseSource,
        step: Step = 0,
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
        step: Step = 0,
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
        count = len(self.count_stddevs)
        if not counts.shape.is_compatible_with([count]):
            raise ValueError(
                f"counts has shape {counts.shape}, but the clip rule counts {count}."
            )
        parts = {i: part for i, part in enumerate(sums) if part is not None}
        *drawn, count_noise = noise.sample_all(
            [*(part.shape for part in parts.values()), [count]],
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
        step: Step = 0,
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
        limited = limits.limit_fractions(self.rule, fractions)
        next_state = self.rule.next_state(state, limited)
        if self.scheduled:
            # Counts that are too precise for z reveal more than z accounts for.
            covered = tf.math.is_finite(self.gradient_noise_multiplier(step))
            fractions = tf.where(covered, fractions, math.nan)
            next_state = tf.nest.map_structure(
                lambda new, old: tf.where(covered, new, old), next_state, state
            )
        return Release(means, fractions, next_state, self.noise_stddevs(state, step))

    def fractions(self, counts: tf.Tensor) -> tf.Tensor:
        """The fractions from noised sums of indicators, unbiased: not clamped."""
        return tf.cast(counts, tf.float32) / self.records + 0.5
