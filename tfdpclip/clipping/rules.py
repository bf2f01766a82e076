"""Clip rules whose clip norm does not follow the records."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, _schedules
from tfdpclip._schedules import Schedule
from tfdpclip.clipping.base import ClipRule, register_rule

# Bounds of a clip norm that moves: far outside any useful value, so that they only
# keep a runaway estimate finite and positive in float32.
_SMALLEST_NORM = 1e-12
_LARGEST_NORM = 1e12
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def at_least_float32(norms: Any) -> tf.Tensor:
    norms = tf.convert_to_tensor(norms)
    return tf.cast(norms, tf.float32) if norms.dtype.size < 4 else norms


def saturating_weights(
    norms: tf.Tensor, clip_norm: tf.Tensor, normalize: bool
) -> tf.Tensor:
    """min(1, C/n), or min(1/C, 1/n) when normalised; 0 where n is not finite.

    In float32 at least: half precision would round the clip norm up, or to infinity.
    """
    norms = at_least_float32(norms)
    clip_norm = tf.cast(clip_norm, norms.dtype)
    top = tf.ones_like(clip_norm) if normalize else clip_norm
    weights = top / tf.maximum(norms, clip_norm)
    return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FixedClip(ClipRule):
    """Clips every record to one fixed norm: weight min(1, C/n).

    Abadi et al. (2016), Algorithm 1. With `normalize`, the clipped record is divided
    by C (weight min(1/C, 1/n)), so that the noise and the useful learning rate do not
    scale with C: De et al. (2022); Rehn et al. (2025), Appendix B.

    *Formal guarantees*: sensitivity C, or 1 when normalised, under adding or removing
    one record.

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
        object.__setattr__(self, "norm", _norm_setting("norm", self.norm))
        _arguments.boolean("normalize", self.normalize)

    def initial_state(self) -> Any:
        return tf.constant(0) if isinstance(self.norm, Schedule) else ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return saturating_weights(norms, self.clip_norm(state), self.normalize)

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(1.0) if self.normalize else self.clip_norm(state)

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        return state + 1 if isinstance(self.norm, Schedule) else state

    def clip_norm(self, state: Any) -> tf.Tensor:
        if not isinstance(self.norm, Schedule):
            return tf.constant(self.norm, tf.float32)
        return in_range(_schedules.value_at(self.norm, state))


def _norm_setting(name: str, value: Any) -> float | Schedule:
    return _schedules.setting(name, value, _arguments.clip_norm)


def in_range(clip_norm: tf.Tensor) -> tf.Tensor:
    """A clip norm that can be divided by; the smallest where it is not a number."""
    number = tf.where(tf.math.is_nan(clip_norm), 0.0, clip_norm)
    return tf.clip_by_value(number, _SMALLEST_NORM, _LARGEST_NORM)


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AutomaticClip(ClipRule):
    """Scales every record to nearly unit norm: weight 1 / (n + stability).

    Bu et al. (2023), AUTO-S. There is no clip norm to choose. With ``stability=0``
    (AUTO-V) every non-zero record has norm exactly 1.

    *Formal guarantees*: sensitivity 1 under adding or removing one record.

    Args:
      stability: added to the norm; 0 or above. Larger keeps small records small. With
        0, a record whose norm is below 1.2e-38 (no normal float32) counts as zero.
      normalize: accepted for symmetry with the other rules; this rule is normalised
        already, so it changes nothing.

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
        stability = _arguments.non_negative("stability", self.stability)
        object.__setattr__(self, "stability", stability)
        _arguments.boolean("normalize", self.normalize)

    def initial_state(self) -> Any:
        return ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        norms = at_least_float32(norms)
        # Of less than a normal float32 the inverse is infinite: that counts as 0.
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

    Xia et al. (2023), Algorithm 1 (DP-PSAC). `AutomaticClip` weighs a record of norm
    near 0 by 1 / r, more than any other. Here such a record weighs C; for r below 1 the
    weight grows from there to C / (2 sqrt(r) - r), at n = sqrt(r) - r, and then falls.

    *Formal guarantees*: sensitivity C under adding or removing one record. With
    s = r / (n + r), which is above 0 for every n >= 0 and r > 0, a weighted record has
    norm C n / (n + s) < C. In float32, s is at least 0 and n + s at least n, however
    they are rounded, and the weight is one more division: at most (1 + 2^-24) C / n.

    Args:
      norm: C, above 0: the length that long records come close to. 1 is the rule that
        other rules call normalised.
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
            value = _arguments.clip_norm(name, getattr(self, name))
            object.__setattr__(self, name, value)

    def initial_state(self) -> Any:
        return ()

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        norms = at_least_float32(norms)
        size = norms + self.stability / (norms + self.stability)
        # A large C over a small r overflows: less than C / n is within the bound.
        weights = tf.minimum(self.norm / size, norms.dtype.max)
        return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))

    def sensitivity(self, state: Any) -> tf.Tensor:
        return tf.constant(self.norm, tf.float32)
