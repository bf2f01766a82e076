"""Clip rules whose clip norm follows the records' norms, by private estimates."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments, _schedules
from tfdpclip._schedules import Schedule
from tfdpclip.clipping.base import ClipRule, register_rule
from tfdpclip.clipping.rules import at_least_float32, in_range, saturating_weights


class _FollowingClip(ClipRule):
    """What rules have in common that saturate at a clip norm which moves."""

    initial_norm: float
    learning_rate: float
    count_stddev: float | None
    normalize: bool

    def __post_init__(self):
        initial = _arguments.clip_norm("initial_norm", self.initial_norm)
        object.__setattr__(self, "initial_norm", initial)
        rate = _arguments.positive("learning_rate", self.learning_rate)
        object.__setattr__(self, "learning_rate", rate)
        if self.count_stddev is not None:
            stddev = _arguments.non_negative("count_stddev", self.count_stddev)
            object.__setattr__(self, "count_stddev", stddev)
        _arguments.boolean("normalize", self.normalize)

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return saturating_weights(norms, self.clip_norm(state), self.normalize)

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
        sent = self._sent(norms, self.clip_norm(state))
        return tf.where(counted, sent, tf.zeros_like(sent))

    def _sent(self, norms: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
        """What a record of each norm sends, in [-1/2, 1/2]: float32."""
        raise NotImplementedError

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        _arguments.boolean("private", private)
        if self.count_stddev is not None:
            return (self.count_stddev,)
        if not private:
            return (0.0,)
        return (_arguments.positive("records_per_step", records_per_step) / 20,)

    def clip_norm(self, state: Any) -> tf.Tensor:
        clip_norm = state[0] if isinstance(state, (tuple, list)) else state
        return tf.convert_to_tensor(clip_norm)


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantileClip(_FollowingClip):
    """Follows a quantile of the record norms, estimated privately.

    Andrew et al. (2021), Algorithm 1. Each record sends one bit, whether its norm is
    at most the clip norm C; with b the noised fraction of such records,

    * ``update="geometric"``: C becomes ``C * exp(-learning_rate * (b - q))``;
    * ``update="linear"``: C becomes ``C - learning_rate * (b - q)``, kept above 0.

    The bit is sent as +1/2 or -1/2, so that its sum has sensitivity 1/2. A real record
    with norm 0 counts as within the clip norm; padding counts as neither.

    *Formal guarantees*: given the state, sensitivity C (1 when normalised) for the sum
    and 1/2 for the count, under adding or removing one record. The next state depends
    on the data only through the noised fraction.

    Args:
      target_quantile: q, the fraction of records to leave unclipped, in [0, 1], or a
        Keras schedule of the step that gives it.
      initial_norm: the clip norm of the first step, above 0.
      learning_rate: the step of the update, above 0.
      count_stddev: the noise stddev on the sum of the bits, above 0 (or exactly 0, for
        runs without privacy); None means a twentieth of the records expected in a
        step, the paper's rule (section 3.1).
      update: "geometric" or "linear".
      normalize: whether to divide the clipped record by the current C.

    Raises:
      ValueError: if an argument is not a finite number in its range.

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

    elementwise = True

    def __post_init__(self):
        quantile = _schedules.setting(
            "target_quantile", self.target_quantile, _arguments.fraction
        )
        object.__setattr__(self, "target_quantile", quantile)
        _arguments.choice("update", self.update, ("geometric", "linear"))
        super().__post_init__()

    def initial_state(self) -> Any:
        clip_norm = tf.constant(self.initial_norm, tf.float32)
        scheduled = isinstance(self.target_quantile, Schedule)
        return (clip_norm, tf.constant(0)) if scheduled else clip_norm

    @property
    def indicator_levels(self) -> int:
        return 1

    def _sent(self, norms: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
        return tf.where(norms <= tf.cast(clip_norm, norms.dtype), 0.5, -0.5)

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        clip_norm = self.clip_norm(state)
        fractions = tf.reshape(tf.cast(fractions, tf.float32), tf.shape(clip_norm))
        quantile = self.target_quantile
        if isinstance(quantile, Schedule):
            quantile = tf.clip_by_value(
                _schedules.value_at(quantile, state[1]), 0.0, 1.0
            )
        error = tf.clip_by_value(fractions, 0.0, 1.0) - quantile
        if self.update == "geometric":
            moved = clip_norm * tf.exp(-self.learning_rate * error)
        else:
            moved = clip_norm - self.learning_rate * error
        moved = in_range(moved)
        return (moved, state[1] + 1) if isinstance(state, (tuple, list)) else moved


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeanNormClip(_FollowingClip):
    """Follows the mean of the record norms, estimated privately.

    Where the model fits most records, their norms are near 0 and those of the others
    are large: a quantile falls into one heap or the other. The mean lies between them.
    Each record of norm n sends ``min(n / (reach * C), 1) - 1/2``; with m the noised
    mean of ``min(n / C, reach)``, C becomes ``C * exp(learning_rate * (m - 1))``, the
    geometric update of Andrew et al. (2021), by a factor of e at most. It rests where
    C is the mean of the norms, each counted as `reach` clip norms at most.

    *Formal guarantees*: given the state, sensitivity C (1 when normalised) for the sum
    and 1/2 for what is sent, under adding or removing one record, as of `QuantileClip`.
    The next state depends on the data only through the noised mean.

    Args:
      initial_norm: the clip norm of the first step, above 0.
      learning_rate: the step of the update, above 0 and at most 1.
      count_stddev: the noise stddev on the sum of what is sent, above 0 (or exactly 0,
        for runs without privacy); None means a twentieth of the records expected in a
        step, as for `QuantileClip`.
      reach: as how many clip norms a record counts at most, above 1 and at most 1000.
        Where fewer than one in `reach` of the records are large, C is the mean of the
        others. The noise of m grows with it.
      normalize: whether to divide the clipped record by the current C.

    Raises:
      ValueError: if an argument is not a finite number in its range.

    >>> rule = MeanNormClip(initial_norm=1.0, learning_rate=0.5)
    >>> norms = tf.constant([0.0, 0.0, 0.0, 16.0])
    >>> sent = tf.reduce_mean(rule.indicators(norms, rule.initial_state()), axis=0)
    >>> state = rule.next_state(rule.initial_state(), sent + 0.5)
    >>> round(float(rule.clip_norm(state)), 4)  # exp((10 / 4 - 1) / 2): reach is 10.
    2.117
    """

    initial_norm: float = 1.0
    learning_rate: float = 0.2
    count_stddev: float | None = None
    reach: float = 10.0
    normalize: bool = False

    elementwise = True

    def __post_init__(self):
        super().__post_init__()
        if self.learning_rate > 1:
            raise ValueError(
                "learning_rate must be above 0 and at most 1, got "
                f"{_arguments.shown(self.learning_rate)}; for example 0.2."
            )
        reach = _arguments.positive("reach", self.reach)
        if not 1 < reach <= 1000:
            raise ValueError(
                f"reach must be above 1 and at most 1000, got {reach:g}; for example "
                "10."
            )
        object.__setattr__(self, "reach", reach)

    def initial_state(self) -> Any:
        return tf.constant(self.initial_norm, tf.float32)

    def _sent(self, norms: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
        norms = at_least_float32(norms)
        # Divided twice: reach times a clip norm is not a float32 for every clip norm.
        share = norms / tf.cast(clip_norm, norms.dtype) / self.reach
        return tf.cast(tf.clip_by_value(share, 0.0, 1.0), tf.float32) - 0.5

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        clip_norm = self.clip_norm(state)
        fractions = tf.reshape(tf.cast(fractions, tf.float32), tf.shape(clip_norm))
        mean = self.reach * tf.clip_by_value(fractions, 0.0, 1.0)
        step = tf.minimum(self.learning_rate * (mean - 1), 1.0)
        return in_range(clip_norm * tf.exp(step))
