"""Clip rules for records as a whole."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, _schedules
from tfdpclip._schedules import Schedule
from tfdpclip.clipping.base import ClipRule, register_rule

# Bounds of a clip norm that moves: far outside any useful value, they only keep a
# runaway estimate finite and positive in float32.
_SMALLEST_NORM = 1e-12
_LARGEST_NORM = 1e12
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def _at_least_float32(norms: Any) -> tf.Tensor:
    norms = tf.convert_to_tensor(norms)
    return tf.cast(norms, tf.float32) if norms.dtype.size < 4 else norms


def _saturating_weights(
    norms: tf.Tensor, clip_norm: tf.Tensor, normalize: bool
) -> tf.Tensor:
    """min(1, C/n), or min(1/C, 1/n) when normalised; 0 where n is not finite.

    In float32 at least: half precision would round the clip norm up, or to infinity.
    """
    norms = _at_least_float32(norms)
    clip_norm = tf.cast(clip_norm, norms.dtype)
    top = tf.ones_like(clip_norm) if normalize else clip_norm
    weights = top / tf.maximum(norms, clip_norm)
    return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FixedClip(ClipRule):
    """Clips every record to a fixed norm: weight min(1, C/n).

    Abadi et al. (2016), Algorithm 1. With `normalize`, the clipped record is divided
    by C (weight min(1/C, 1/n)), so that the noise and the useful learning rate do not
    scale with C: De et al. (2022); Rehn et al. (2025), Appendix B.

    *Formal guarantees*: sensitivity C, or 1 when normalised, under adding or removing
    a record.

    Args:
      norm: the clip norm C, above 0, or a Keras schedule of the step that gives it.
      normalize: whether to divide the clipped record by C.

    Raises:
      ValueError: if `norm` is not a finite number above 0.

    >>> FixedClip(2.0).weights(tf.constant([1.0, 4.0]), ()).numpy().tolist()
    [1.0, 0.5]
    """

    norm: float | Schedule
    normalize: bool = False

    elementwise = True

    def __post_init__(self):
        _arguments.set_field(self, "norm", _schedules.setting, _arguments.clip_norm)
        _arguments.boolean("normalize", self.normalize)

    def initial_state(self) -> Any:
        return tf.constant(0) if isinstance(self.norm, Schedule) else ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return _saturating_weights(norms, self.clip_norm(state), self.normalize)

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(1.0) if self.normalize else self.clip_norm(state)

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        return state + 1 if isinstance(self.norm, Schedule) else state

    def clip_norm(self, state: Any) -> tf.Tensor:
        if not isinstance(self.norm, Schedule):
            return tf.constant(self.norm, tf.float32)
        return _in_range(_schedules.value_at(self.norm, state))


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantileClip(ClipRule):
    """Follows a quantile of the record norms, estimated privately.

    Andrew et al. (2021), Algorithm 1. Each record sends a bit, whether its norm is at
    most the clip norm C; with b the noised fraction of records with this bit,

    * ``update="geometric"``: C becomes ``C * exp(-learning_rate * (b - q))``;
    * ``update="linear"``: C becomes ``C - learning_rate * (b - q)``, kept above 0.

    Noise may take b outside of [0, 1], and b stays there: clamped to [0, 1], the noise
    would have a mean, and C would run away from quantiles near 0 and 1. Beyond
    Algorithm 1, ``b - q`` is limited to [-1, 1], symmetric around the target, which
    matters only where the noise on b is near 1 or more: a step then moves ln C by at
    most the learning rate.

    The bit is sent as +1/2 or -1/2, so that its sum has sensitivity 1/2. A real record
    with norm 0 counts as within the clip norm; padding counts as neither.

    *Formal guarantees*: given the state, sensitivity C (1 when normalised) for the sum
    and 1/2 for the count, under adding or removing a record. The next state depends
    on the data only through the noised fraction.

    Args:
      target_quantile: q, the fraction of records to leave unclipped, in [0, 1], or a
        Keras schedule of the step that gives it.
      initial_norm: the clip norm of the first step, above 0.
      learning_rate: the step of the update, above 0.
      count_stddev: the noise stddev on the sum of the bits, in records, above 0 (or
        exactly 0, for runs without privacy). None means a twentieth of the records
        expected in a step, the paper's rule (section 2.1), or more in small batches:
        at least 0.71 times the noise multiplier, sqrt(L) times that with L groups,
        which leaves the sum at most sqrt(2) times the noise it would have alone
        (`dpc.accounting.count_stddevs`).
      update: "geometric" or "linear".
      normalize: whether to divide the clipped record by the current C.
      minimum_norm: a lower bound of C. Where a model fits most records, their gradients
        are nearly 0; a C that follows them to 0 clips every record to the same norm,
        and normalised steps no longer shrink as training converges.
      maximum_norm: an upper bound of C, or None. Where noise makes the weights large,
        the weights make the gradients large, and C follows: a normalised record then
        counts for little unless its norm is as large.

    Raises:
      ValueError: if an argument is not a finite number in its range.

    Warns:
      UserWarning: where the rule is used, if the noise on the count is too large for
        the target, so that C strays from the quantile by a factor of 2 or more.

    >>> rule = QuantileClip(target_quantile=0.5, initial_norm=0.1)
    >>> state = rule.next_state(rule.initial_state(), tf.constant([0.3]))
    >>> round(float(rule.clip_norm(state)), 4)
    0.1041
    """

    target_quantile: float | Schedule = 0.5
    initial_norm: float = 0.1
    learning_rate: float = 0.2
    count_stddev: float | None = None
    update: str = "geometric"
    normalize: bool = False
    minimum_norm: float = 0.0
    maximum_norm: float | None = None

    elementwise = True

    def __post_init__(self):
        set_field = functools.partial(_arguments.set_field, self)
        set_field("target_quantile", _schedules.setting, _arguments.fraction)
        set_field("initial_norm", _arguments.clip_norm)
        set_field("learning_rate", _arguments.positive)
        set_field("count_stddev", _arguments.non_negative)
        _arguments.choice("update", self.update, ("geometric", "linear"))
        _arguments.boolean("normalize", self.normalize)
        set_field("minimum_norm", _arguments.non_negative)
        set_field("maximum_norm", _arguments.clip_norm)
        if self.minimum_norm > self.initial_norm:
            raise ValueError(
                f"minimum_norm must be at most initial_norm ({self.initial_norm:g}), "
                f"got {self.minimum_norm:g}."
            )
        if self.maximum_norm is not None and self.maximum_norm < self.initial_norm:
            # Not below minimum_norm then, which is at most initial_norm.
            raise ValueError(
                f"maximum_norm must be at least initial_norm ({self.initial_norm:g}), "
                f"got {self.maximum_norm:g}."
            )

    def initial_state(self) -> Any:
        clip_norm = tf.constant(self.initial_norm, tf.float32)
        scheduled = isinstance(self.target_quantile, Schedule)
        return (clip_norm, tf.constant(0)) if scheduled else clip_norm

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return _saturating_weights(norms, self.clip_norm(state), self.normalize)

    def sensitivity(self, state: Any) -> tf.Tensor:
        clip_norm = self.clip_norm(state)
        return tf.ones_like(clip_norm) if self.normalize else clip_norm

    def indicators(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tf.Tensor:
        norms = tf.convert_to_tensor(norms)
        norms = norms[:, tf.newaxis] if norms.shape.rank == 1 else norms
        counted = tf.math.is_finite(norms)
        if present is not None:
            counted = tf.logical_and(counted, present[:, tf.newaxis])
        within = norms <= tf.cast(self.clip_norm(state), norms.dtype)
        bits = tf.where(within, 0.5, -0.5)
        return tf.where(counted, bits, tf.zeros_like(bits))

    indicator_levels = 1

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        clip_norm = self.clip_norm(state)
        fractions = tf.reshape(tf.cast(fractions, tf.float32), tf.shape(clip_norm))
        quantile = self.target_quantile
        if isinstance(quantile, Schedule):
            quantile = tf.clip_by_value(
                _schedules.value_at(quantile, state[1]), 0.0, 1.0
            )
        error = tf.clip_by_value(fractions - quantile, -1.0, 1.0)
        if self.update == "geometric":
            moved = clip_norm * tf.exp(-self.learning_rate * error)
        else:
            moved = clip_norm - self.learning_rate * error
        moved = tf.maximum(_in_range(moved), self.minimum_norm)
        if self.maximum_norm is not None:
            moved = tf.minimum(moved, self.maximum_norm)
        return (moved, state[1] + 1) if isinstance(state, (tuple, list)) else moved

    def mean_fraction(self, before: Any, after: Any, steps: int) -> float | None:
        if isinstance(self.target_quantile, Schedule):
            return None
        first, last = (float(self.clip_norm(state)) for state in (before, after))
        most = math.inf if self.maximum_norm is None else self.maximum_norm
        low, high = 1.0001 * self.minimum_norm, 0.9999 * most
        if steps < 1 or min(first, last) <= low or max(first, last) >= high:
            return math.nan
        moved = first - last
        if self.update == "geometric":
            moved = math.log(first / last)
        mean = self.target_quantile + moved / (self.learning_rate * steps)
        # No step moves C by more: a checkpoint did, or a bound of the norm.
        return mean if abs(mean - self.target_quantile) <= 1.001 else math.nan

    def check_noise(self, stddevs: Sequence[float]) -> None:
        target, rate = self.target_quantile, self.learning_rate
        if isinstance(target, Schedule) or self.update != "geometric":
            return
        noise = stddevs[0]
        # Beyond the quantile at most min(q, 1 - q) pulls C back: ln C then has an
        # exponential tail of scale least / min(q, 1 - q) * ln 2, as a random walk with
        # drift has. Above 1, noise is limited, and weakens the pull by 0.8 / noise.
        least = rate * noise * min(noise, 1.25) / (2 * math.log(2))
        room = min(target, 1 - target)
        if least <= room:
            return
        factor = 2 ** min(least / max(room, 1e-9), 40)
        # Two digits, rounded away from the limit.
        nearest = float(f"{1.05 * least:.1e}")
        line = f"target_quantile={min(max(target, nearest), 1 - nearest):.6g}"
        if nearest > 0.5:
            line = f"learning_rate={0.95 * rate * room / least:.1e}"
        warnings.warn(
            f"target_quantile={target:g} is out of reach: noise of {noise:.3g} on the "
            "fraction of unclipped records lets the clip norm stray by a factor of "
            f"{factor:.3g}. Use larger batches or cohorts, or write {line}.",
            stacklevel=2,
        )

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        _arguments.boolean("private", private)
        if self.count_stddev is not None:
            return (self.count_stddev,)
        if not private:
            return (0.0,)
        return (_arguments.positive("records_per_step", records_per_step) / 20,)

    @property
    def default_counts(self) -> tuple[bool, ...]:
        return (self.count_stddev is None,)

    def clip_norm(self, state: Any) -> tf.Tensor:
        clip_norm = state[0] if isinstance(state, (tuple, list)) else state
        return tf.convert_to_tensor(clip_norm)


def _in_range(clip_norm: tf.Tensor) -> tf.Tensor:
    """A clip norm that can be divided by; the smallest where it is not a number."""
    number = tf.where(tf.math.is_nan(clip_norm), 0.0, clip_norm)
    return tf.clip_by_value(number, _SMALLEST_NORM, _LARGEST_NORM)


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AutomaticClip(ClipRule):
    """Scales every record to nearly unit norm: weight 1 / (n + stability).

    Bu et al. (2023), AUTO-S. There is no clip norm to choose. With ``stability=0``
    (AUTO-V) every non-zero record has norm exactly 1.

    *Formal guarantees*: sensitivity 1 under adding or removing a record.

    Args:
      stability: added to the norm; 0 or above. Larger keeps small records small. With
        0, a record whose norm is below 1.2e-38 (no normal float32) counts as zero.
      normalize: accepted for symmetry with the remaining rules; this rule is always
        normalised, so the setting changes nothing.

    Raises:
      ValueError: if `stability` is not a finite number, 0 or above.

    >>> AutomaticClip(0.01).weights(tf.constant([4.99]), ()).numpy().round(4).tolist()
    [0.2]
    """

    stability: float = 0.01
    normalize: bool = False

    elementwise = True
    threshold = None

    def __post_init__(self):
        _arguments.set_field(self, "stability", _arguments.non_negative)
        _arguments.boolean("normalize", self.normalize)

    def initial_state(self) -> Any:
        return ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        norms = _at_least_float32(norms)
        # The inverse of less than a normal float32 is infinite: the size counts as 0.
        size = norms + self.stability
        counts = tf.logical_and(tf.math.is_finite(norms), size >= _SMALLEST_NORMAL)
        inverse = 1 / tf.maximum(size, _SMALLEST_NORMAL)
        return tf.where(counts, inverse, tf.zeros_like(inverse))

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(1.0, tf.float32)


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PerSampleAdaptiveClip(ClipRule):
    """Scales records to nearly C, small ones less: weight C / (n + r / (n + r)).

    Xia et al. (2023), Algorithm 1 (DP-PSAC). `AutomaticClip` gives a record of norm
    near 0 the largest weight, 1 / r. Here the weight of this record is C; for r below 1
    the weight grows from there to C / (2 sqrt(r) - r), at n = sqrt(r) - r, then falls.

    *Formal guarantees*: sensitivity C under adding or removing a record. With
    s = r / (n + r), which is above 0 for every n >= 0 and r > 0, a weighted record has
    norm C n / (n + s) < C. In float32, s is at least 0 and n + s at least n, however
    they are rounded, and the weight is a further division: at most (1 + 2^-24) C / n.

    Args:
      norm: C, above 0: the length that long records come close to. C = 1 corresponds
        to `normalize=True` of further rules.
      stability: r, above 0, which the paper tunes. Larger keeps small records small.

    Raises:
      ValueError: if an argument is not a normal float32 above 0.

    >>> rule = PerSampleAdaptiveClip(2.0, stability=0.1)
    >>> rule.weights(tf.constant([0.0, 0.3, 9.99]), ()).numpy().round(4).tolist()
    [2.0, 3.6364, 0.2]
    """

    norm: float
    stability: float = 0.1

    elementwise = True
    threshold = None

    def __post_init__(self):
        for name in ("norm", "stability"):
            # r too: were it 0 in float32, a record of norm 0 would weigh 0 / 0.
            _arguments.set_field(self, name, _arguments.clip_norm)

    def initial_state(self) -> Any:
        return ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        norms = _at_least_float32(norms)
        size = norms + self.stability / (norms + self.stability)
        # A large C over a small r overflows; the largest float is within the bound.
        weights = tf.minimum(self.norm / size, norms.dtype.max)
        return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(self.norm, tf.float32)
