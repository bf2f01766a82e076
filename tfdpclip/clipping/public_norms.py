"""Clip rules that take numbers for each group of variables from public data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip.clipping.base import ClipRule, register_rule
from tfdpclip.clipping.groups import (
    GroupSpec,
    by_group,
    named_numbers,
    normalize_groups,
)
from tfdpclip.clipping.layerwise import (
    ALLOCATIONS,
    GroupedRule,
    flat_rule,
)
from tfdpclip.clipping.rules import FixedClip
from tfdpclip.clipping.serialization import serialize_rule

# The value of public norms before they are measured.
UNKNOWN = -1.0


class _PublicRule(GroupedRule):
    """A flat rule and a public number for each group, `[L]`, in the state."""

    takes_public_norms = True
    # The name of the setting with the numbers.
    _given_by = "norms"

    def _base(self) -> ClipRule:
        raise NotImplementedError

    @property
    def given(self) -> Any:
        """Public numbers among the settings, or None to wait for the callback."""
        return getattr(self, self._given_by)

    def _check_bound(self) -> None:
        if self.given is not None:
            self._numbers()

    def _numbers(self) -> list[float]:
        return by_group(self._given_by, self.given, self.layout)

    def initial_state(self) -> Any:
        if self.given is None:
            numbers = tf.fill([len(self.layout)], UNKNOWN)
        else:
            numbers = tf.constant(self._numbers(), tf.float32)
        return (self._base().initial_state(), numbers)

    def with_public_norms(self, state: Any, norms: Any) -> Any:
        """The state after gradient norms, `[L]`, were measured on public data."""
        raise NotImplementedError

    def knows_norms(self, state: Any) -> tf.Tensor:
        """Whether public norms were given or measured."""
        return tf.reduce_all(state[1] != UNKNOWN)

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        return (self._base().next_state(state[0], fractions), state[1])

    def check_noise(self, stddevs: Sequence[float]) -> None:
        self._base().check_noise(stddevs)

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        return self._base().count_stddevs(records_per_step, private)

    @property
    def default_counts(self) -> tuple[bool, ...]:
        return self._base().default_counts


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PublicNormClip(_PublicRule):
    """Layerwise clipping in proportion to gradient norms on public data.

    Nguyen et al. (2023), section 3.3. With e_h the mean norm of group h's per-example
    gradients on public data, group h is clipped to ``C_h = C * e_h / max_h e_h``, so
    that the master clip C bounds all of them. `dpc.keras.PublicGradientNorms` measures
    e_h, at the start of training and after every epoch. With ``master_norm=None``,
    ``C_h = e_h`` (Zhang et al. 2018).

    With an adaptive master, C follows the quantile of all groups' norms relative to
    their shares (norm of group h times max e / e_h), by one noised count per step: each
    record sends the mean of its groups' bits.

    *Formal guarantees*: as `LayerwiseClip`; additionally, everything that is measured
    must be measured on public data, with a model that holds no private information
    except through noised releases.

    Args:
      master_norm: C: a number, a schedule (the paper's decay of 0.9 per epoch), a clip
        rule, or None.
      groups: see `LayerwiseClip`.
      allocation: see `LayerwiseClip`.
      norms: e_h, by group or layer name; None to wait for the callback.
      floor: the smallest e_h as a share of the largest, above 0, at most 1: a group
        without gradient on public data would otherwise never be trained.

    Raises:
      ValueError: as `LayerwiseClip`.

    >>> rule = PublicNormClip(2.0, norms={"a": 1.0, "b": 4.0})
    >>> rule = rule.bind(["a/kernel", "b/kernel"])
    >>> rule.clip_norms(rule.initial_state()).numpy().tolist()
    [0.5, 2.0]
    """

    master_norm: Any = 1.0
    groups: GroupSpec = None
    allocation: str = "per_layer"
    norms: Mapping[str, float] | None = None
    floor: float = 1e-3

    def __post_init__(self):
        object.__setattr__(self, "groups", normalize_groups(self.groups))
        _arguments.choice("allocation", self.allocation, ALLOCATIONS)
        _arguments.rate("floor", self.floor)
        if self.master_norm is not None:
            rule = flat_rule("master_norm", self.master_norm)
            object.__setattr__(self, "master_norm", rule)
            if not rule.elementwise:
                raise ValueError(
                    f"master_norm is {rule}, but must be a rule that clips all groups "
                    "in one operation: see `elementwise` in dpc.clipping.ClipRule."
                )
        _arguments.set_field(self, "norms", named_numbers)

    def _base(self) -> ClipRule:
        return FixedClip(1.0) if self.master_norm is None else self.master_norm

    def _identity(self) -> dict[str, Any]:
        config = super()._identity()
        if self.master_norm is not None:
            config["master_norm"] = serialize_rule(self.master_norm)
        return config

    def with_public_norms(self, state: Any, norms: Any) -> Any:
        return (state[0], tf.cast(norms, tf.float32))

    def shares(self, state: Any) -> tf.Tensor:
        """``e_h / max e``, or e_h itself without a master, `[L]`."""
        norms = state[1]
        largest = tf.reduce_max(norms)
        usable = tf.logical_and(tf.math.is_finite(largest), largest > 0)
        largest = tf.where(usable, largest, 1.0)
        norms = tf.where(usable, norms, tf.ones_like(norms))
        norms = tf.maximum(norms, self.floor * largest)
        return norms if self.master_norm is None else norms / largest

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return self._base().weights(self._relative(norms, state), state[0])

    def _relative(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return norms / tf.cast(self.shares(state), norms.dtype)

    def sensitivity(self, state: Any) -> tf.Tensor:
        return self.shares(state) * self._base().sensitivity(state[0])

    def clip_norms(self, state: Any) -> tf.Tensor:
        return self.shares(state) * self._base().clip_norm(state[0])

    def indicators(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tf.Tensor:
        if not self.count_stddevs(1.0):
            return super().indicators(norms, state, present)
        relative = self._relative(norms, state)
        bits = self._base().indicators(relative, state[0], present)
        return tf.reduce_mean(bits, axis=1, keepdims=True)

    @property
    def indicator_levels(self) -> int:
        # The mean over groups.
        return self._base().indicator_levels * len(self.layout)


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledClip(_PublicRule):
    """A flat clip after multiplying group h by m_h, divided back after the noise.

    Nguyen et al. (2023), Appendix B.2, proposed there and not tested. Groups with small
    gradients get less noise, as in layerwise clipping, but a single clip bounds all
    groups together, so there is no factor sqrt(L).

    *Formal guarantees*: the scaled record has norm at most the rule's sensitivity S,
    so noise of stddev ``z_g * S / m_h`` on group h makes the sum a Gaussian mechanism
    of noise multiplier z_g. Multipliers must be public.

    Args:
      multipliers: m_h by group or layer name; None to take ``max e / e_h`` from
        `dpc.keras.PublicGradientNorms`.
      norm: the clip norm after scaling, a schedule of it, or a clip rule.
      groups: see `LayerwiseClip`.
      floor: the smallest e_h as a share of the largest; 1 / floor bounds m_h.

    Raises:
      ValueError: as `LayerwiseClip`.

    >>> rule = ScaledClip({"a": 4.0, "b": 1.0}, 2.0).bind(["a/kernel", "b/kernel"])
    >>> rule.noise_scales(rule.initial_state()).numpy().tolist()
    [0.5, 2.0]
    """

    multipliers: Mapping[str, float] | None = None
    norm: Any = 1.0
    groups: GroupSpec = None
    floor: float = 1e-3

    threshold = None
    _given_by = "multipliers"

    def __post_init__(self):
        object.__setattr__(self, "groups", normalize_groups(self.groups))
        _arguments.rate("floor", self.floor)
        object.__setattr__(self, "norm", flat_rule("norm", self.norm))
        _arguments.set_field(self, "multipliers", named_numbers, _arguments.positive)

    def _base(self) -> ClipRule:
        return self.norm

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "norm": serialize_rule(self.norm)}

    def with_public_norms(self, state: Any, norms: Any) -> Any:
        norms = tf.cast(norms, tf.float32)
        largest = tf.reduce_max(norms)
        largest = tf.where(largest > 0, largest, 1.0)
        return (state[0], largest / tf.maximum(norms, self.floor * largest))

    def _scaled(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        # Squares in float32 vanish below 1e-19, which would leave a norm too small, and
        # overflow above 1e19.
        scaled = tf.cast(norms, tf.float64) * tf.cast(state[1], tf.float64)
        return tf.cast(tf.norm(scaled, axis=1), norms.dtype)

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        weights = self._base().weights(self._scaled(norms, state), state[0])
        return tf.repeat(weights[:, tf.newaxis], len(self.layout), axis=1)

    def sensitivity(self, state: Any) -> tf.Tensor:
        return self._base().sensitivity(state[0]) / state[1]

    def noise_scales(self, state: Any) -> tf.Tensor:
        return self.sensitivity(state)

    def clip_norm(self, state: Any) -> tf.Tensor:
        """The clip norm of the scaled record."""
        return self._base().clip_norm(state[0])

    def indicators(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tf.Tensor:
        return self._base().indicators(self._scaled(norms, state), state[0], present)

    @property
    def indicator_levels(self) -> int:
        return self._base().indicator_levels
