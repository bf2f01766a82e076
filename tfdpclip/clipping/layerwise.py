"""Clip rules that treat groups of variables, usually layers, on their own."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._arguments import choice, items, shown
from tfdpclip.clipping.groups import (
    Groups,
    GroupSpec,
    by_group,
    make_groups,
    normalized,
)
from tfdpclip.clipping.rules import AutomaticClip, ClipRule, FixedClip, QuantileClip
from tfdpclip.clipping.serialization import as_rule, serialize_rule

_ALLOCATIONS = ("per_layer", "joint")
# Marks public norms that have not been measured.
UNKNOWN = -1.0

_RULE = dict(frozen=True, eq=False, repr=False)


class GroupedRule(ClipRule):
    """What rules with groups share. `bind` says which variables there are."""

    groups: GroupSpec

    @property
    def layout(self) -> Groups:
        """The groups.

        Raises:
          ValueError: before `bind`.
        """
        layout = self.__dict__.get("_layout")
        if layout is None:
            raise ValueError(
                f"{type(self).__name__} does not know the variables yet. An optimizer "
                "binds it when it is built; elsewhere use rule.bind(names)."
            )
        return layout

    @property
    def assignment(self) -> tuple[int, ...]:
        return self.layout.assignment

    def bind(self, names: Sequence[str]) -> GroupedRule:
        layout = make_groups(self.groups, names, getattr(self, "norms", None))
        groups = layout.as_mapping() if callable(self.groups) else self.groups
        bound = dataclasses.replace(self, groups=groups)
        object.__setattr__(bound, "_layout", layout)
        bound._check_bound()
        return bound

    def _check_bound(self) -> None:
        """Raises if the settings do not fit the groups."""

    def get_config(self) -> dict[str, Any]:
        if callable(self.groups):
            raise ValueError(
                "groups is a function, which cannot be saved before the variables are "
                "known. Use names or regular expressions."
            )
        return self._identity()

    @abc.abstractmethod
    def noise_scales(self, state: Any) -> tf.Tensor:
        """The noise stddev on each group's sum at noise multiplier 1, `[L]`."""

    def clip_norms(self, state: Any) -> tf.Tensor:
        """The current clip norm of each group, `[L]`."""
        return self.sensitivity(state)

    def clip_norm(self, state: Any) -> tf.Tensor:
        """The norm of all groups' clip norms together, for reports."""
        return tf.norm(self.clip_norms(state))


@dataclasses.dataclass(**_RULE)
class LayerwiseClip(GroupedRule):
    """One clip rule for each group of variables, each with its own state.

    McMahan et al. (2018), section 2.2; Nguyen et al. (2023), section 3.2. With
    `allocation="per_layer"`, noise of stddev ``z_g * sqrt(L) * C_h`` is added to the
    sum of group h; with "joint", ``z_g * sqrt(sum_h C_h^2)`` to every coordinate. For a
    rule that counts, every group has a noised count of its own.

    *Formal guarantees*: group h of a weighted record has norm at most
    ``sensitivity(state)[h]``; with the noise above, the sums of all groups are one
    Gaussian mechanism of noise multiplier z_g (DESIGN of the noise: sum over groups of
    (sensitivity / noise stddev)^2 is at most 1 / z_g^2).

    Args:
      rule: a clip norm or rule for all groups, or one for each: a mapping by group
        name, or a list in the order in which the groups first occur.
      groups: None or "layer" (one group per layer, by the variables' names),
        "variable", a number k (k groups of layers of similar norm, needs `norms`), a
        list of layer names, variable names or regular expressions (each one group, or
        a list of them for one group), a mapping from group name to such, or a function
        from a variable's name to its group.
      allocation: how noise is shared, "per_layer" or "joint".
      norms: public gradient norms by layer, for a number of groups.

    Raises:
      ValueError: if an argument is out of range; on `bind`, if a variable has no
        group or a group no variable.

    >>> rule = LayerwiseClip(1.0).bind(["a/kernel", "a/bias", "b/kernel"])
    >>> rule.assignment
    (0, 0, 1)
    >>> rule.weights(tf.constant([[2.0, 0.5]]), rule.initial_state()).numpy().tolist()
    [[0.5, 1.0]]
    >>> rule.noise_scales(rule.initial_state()).numpy().round(4).tolist()
    [1.4142, 1.4142]
    """

    rule: Any = dataclasses.field(default_factory=QuantileClip)
    groups: GroupSpec = None
    allocation: str = "per_layer"
    norms: Mapping[str, float] | None = None

    def __post_init__(self):
        object.__setattr__(self, "groups", normalized(self.groups))
        _check_allocation(self.allocation)
        object.__setattr__(self, "norms", _numbers("norms", self.norms))
        rule = self.rule
        if isinstance(rule, Mapping) and "class_name" not in rule:
            rule = {str(key): _flat("rule", part) for key, part in rule.items()}
        elif isinstance(rule, Sequence) and not isinstance(rule, (str, bytes)):
            rule = tuple(_flat("rule", part) for part in rule)
        else:
            rule = _flat("rule", rule)
        object.__setattr__(self, "rule", rule)

    def _check_bound(self) -> None:
        names = self.layout.names
        if isinstance(self.rule, dict):
            if set(self.rule) != set(names):
                raise ValueError(
                    f"rule has groups {', '.join(self.rule)}, but the groups are "
                    f"{', '.join(names)}."
                )
        elif isinstance(self.rule, tuple) and len(self.rule) != len(names):
            raise ValueError(
                f"rule has {len(self.rule)} entries for {len(names)} groups: "
                f"{', '.join(names)}."
            )

    @property
    def rules(self) -> tuple[ClipRule, ...]:
        """The rule of each group."""
        if isinstance(self.rule, dict):
            return tuple(self.rule[name] for name in self.layout.names)
        if isinstance(self.rule, tuple):
            return self.rule
        return (self.rule,) * len(self.layout)

    @property
    def _shared(self) -> ClipRule | None:
        """The rule of all groups, if it can treat them in one operation."""
        first, *others = self.rules
        elementwise = type(first) in (FixedClip, QuantileClip, AutomaticClip)
        return first if elementwise and all(r == first for r in others) else None

    def _identity(self) -> dict[str, Any]:
        config = super()._identity()
        if isinstance(self.rule, dict):
            config["rule"] = {k: serialize_rule(r) for k, r in self.rule.items()}
        elif isinstance(self.rule, tuple):
            config["rule"] = [serialize_rule(r) for r in self.rule]
        else:
            config["rule"] = serialize_rule(self.rule)
        return config

    def initial_state(self) -> Any:
        if self._shared is None:
            return tuple(rule.initial_state() for rule in self.rules)
        return tf.nest.map_structure(self._spread, self._shared.initial_state())

    def _spread(self, part: tf.Tensor) -> tf.Tensor:
        # Steps stay one number: schedules take one.
        return tf.repeat(part, len(self.layout)) if part.dtype.is_floating else part

    def weights(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        if self._shared is not None:
            return self._shared.weights(norms, state)
        columns = tf.unstack(norms, num=len(self.layout), axis=1)
        return tf.stack(
            [r.weights(n, s) for r, n, s in self._zip(columns, state)], axis=1
        )

    def sensitivity(self, state: Any) -> tf.Tensor:
        return self._each("sensitivity", state)

    def clip_norms(self, state: Any) -> tf.Tensor:
        return self._each("clip_norm", state)

    def _each(self, method: str, state: Any) -> tf.Tensor:
        if self._shared is not None:
            values = getattr(self._shared, method)(state)
            return tf.broadcast_to(values, [len(self.layout)])
        parts = zip(self.rules, state, strict=True)
        return tf.stack([getattr(rule, method)(part) for rule, part in parts])

    def noise_scales(self, state: Any) -> tf.Tensor:
        sensitivity = self.sensitivity(state)
        if self.allocation == "joint":
            return tf.fill([len(self.layout)], tf.norm(sensitivity))
        return sensitivity * math.sqrt(len(self.layout))

    def indicators(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tf.Tensor:
        if self._shared is not None:
            if not self.count_stddevs(1.0):
                return super().indicators(norms, state, present)
            return self._shared.indicators(norms, state, present)
        columns = tf.unstack(norms, num=len(self.layout), axis=1)
        parts = [r.indicators(n, s, present) for r, n, s in self._zip(columns, state)]
        return tf.concat(parts, axis=1)

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        if self._shared is not None:
            return self._shared.next_state(state, fractions)
        sizes = [len(rule.count_stddevs(1.0)) for rule in self.rules]
        parts = tf.split(fractions, sizes)
        return tuple(r.next_state(s, f) for r, f, s in self._zip(parts, state))

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        found = [rule.count_stddevs(records_per_step, private) for rule in self.rules]
        return tuple(stddev for part in found for stddev in part)

    def _zip(self, parts, state):
        return zip(self.rules, parts, state, strict=True)


class _PublicRule(GroupedRule):
    """A flat rule and one public number per group, `[L]`, in the state."""

    def _base(self) -> ClipRule:
        raise NotImplementedError

    @property
    def given(self) -> Any:
        """Public numbers among the settings, or None to wait for the callback."""
        raise NotImplementedError

    def _check_bound(self) -> None:
        if self.given is not None:
            self._numbers()

    def _numbers(self) -> list[float]:
        name = "multipliers" if isinstance(self, ScaledClip) else "norms"
        return by_group(name, self.given, self.layout)

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

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        return self._base().count_stddevs(records_per_step, private)


@dataclasses.dataclass(**_RULE)
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
    must be measured on public data with a model that holds nothing private but what was
    released with noise.

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
    norms: Mapping[str, float] | Sequence[float] | None = None
    floor: float = 1e-3

    def __post_init__(self):
        object.__setattr__(self, "groups", normalized(self.groups))
        _check_allocation(self.allocation)
        _check_floor(self.floor)
        if self.master_norm is not None:
            rule = _flat("master_norm", self.master_norm)
            object.__setattr__(self, "master_norm", rule)
        object.__setattr__(self, "norms", _numbers("norms", self.norms))

    def _base(self) -> ClipRule:
        return FixedClip(1.0) if self.master_norm is None else self.master_norm

    @property
    def given(self) -> Any:
        return self.norms

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

    def noise_scales(self, state: Any) -> tf.Tensor:
        sensitivity = self.sensitivity(state)
        if self.allocation == "joint":
            return tf.fill([len(self.layout)], tf.norm(sensitivity))
        return sensitivity * math.sqrt(len(self.layout))

    def indicators(
        self, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
    ) -> tf.Tensor:
        if not self.count_stddevs(1.0):
            return super().indicators(norms, state, present)
        relative = self._relative(norms, state)
        bits = self._base().indicators(relative, state[0], present)
        return tf.reduce_mean(bits, axis=1, keepdims=True)


@dataclasses.dataclass(**_RULE)
class ScaledClip(_PublicRule):
    """One flat clip after multiplying group h by m_h, divided back after the noise.

    Nguyen et al. (2023), Appendix B.2, proposed there and not tested. Groups with small
    gradients get less noise, as in layerwise clipping, but one clip bounds them all, so
    that there is no factor sqrt(L).

    *Formal guarantees*: the scaled record has norm at most the rule's sensitivity S,
    so noise of stddev ``z_g * S / m_h`` on group h makes the sum a Gaussian mechanism
    of noise multiplier z_g. Multipliers must be public.

    Args:
      multipliers: m_h by group or layer name, or in the groups' order; None to take
        ``max e / e_h`` from `dpc.keras.PublicGradientNorms`.
      norm: the clip norm after scaling, a schedule of it, or a clip rule.
      groups: see `LayerwiseClip`.
      floor: the smallest e_h as a share of the largest; 1 / floor bounds m_h.

    Raises:
      ValueError: as `LayerwiseClip`.

    >>> rule = ScaledClip({"a": 4.0, "b": 1.0}, 2.0).bind(["a/kernel", "b/kernel"])
    >>> rule.noise_scales(rule.initial_state()).numpy().tolist()
    [0.5, 2.0]
    """

    multipliers: Mapping[str, float] | Sequence[float] | None = None
    norm: Any = 1.0
    groups: GroupSpec = None
    floor: float = 1e-3

    def __post_init__(self):
        object.__setattr__(self, "groups", normalized(self.groups))
        if isinstance(self.groups, int) and self.groups > 1:
            raise ValueError(
                "groups must not be a number here: layers of similar norm get similar "
                "multipliers anyway, at no cost. Use groups=None."
            )
        _check_floor(self.floor)
        object.__setattr__(self, "norm", _flat("norm", self.norm))
        numbers = _numbers("multipliers", self.multipliers, _arguments.positive)
        object.__setattr__(self, "multipliers", numbers)

    def _base(self) -> ClipRule:
        return self.norm

    @property
    def given(self) -> Any:
        return self.multipliers

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "norm": serialize_rule(self.norm)}

    def with_public_norms(self, state: Any, norms: Any) -> Any:
        norms = tf.cast(norms, tf.float32)
        largest = tf.reduce_max(norms)
        largest = tf.where(largest > 0, largest, 1.0)
        return (state[0], largest / tf.maximum(norms, self.floor * largest))

    def _scaled(self, norms: tf.Tensor, state: Any) -> tf.Tensor:
        return tf.norm(norms * tf.cast(state[1], norms.dtype), axis=1)

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


def _flat(name: str, value: Any) -> ClipRule:
    rule = as_rule(value, name)
    if isinstance(rule, GroupedRule):
        raise ValueError(f"{name} must be a rule without groups, got {rule}.")
    return rule


def _check_allocation(allocation: Any) -> None:
    choice("allocation", allocation, _ALLOCATIONS)


def _check_floor(floor: Any) -> None:
    if _arguments.positive("floor", floor) > 1:
        raise ValueError(f"floor must be at most 1, got {floor!r}.")


def _numbers(name: str, numbers: Any, check=_arguments.non_negative) -> Any:
    """Numbers per group as a dict or list of floats, or None."""
    if numbers is None:
        return None
    if isinstance(numbers, Mapping):
        return {str(k): check(f"{name}[{k!r}]", v) for k, v in numbers.items()}
    try:
        entries = items(name, numbers)
    except ValueError:
        raise ValueError(
            f"{name} must be one number per group, by name or in order, got "
            f"{shown(numbers)}."
        ) from None
    return [check(f"{name}[{i}]", v) for i, v in enumerate(entries)]
