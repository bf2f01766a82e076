"""Clip rules with groups of variables, which are usually layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from tfdpclip._arguments import choice
from tfdpclip.clipping.base import ClipRule, register_rule
from tfdpclip.clipping.groups import Groups, GroupSpec, make_groups, normalize_groups
from tfdpclip.clipping.rules import QuantileClip
from tfdpclip.clipping.serialization import as_rule, serialize_rule

ALLOCATIONS = ("per_layer", "joint")


class GroupedRule(ClipRule):
    """The base class of rules with groups. `bind` names the variables."""

    groups: GroupSpec
    #: How the noise is shared: by each group's own norm, or by the norm of all groups.
    allocation: str = "per_layer"

    has_groups = True
    threshold: str | None = "group"

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
        layout = make_groups(self.groups, names)
        groups = layout.as_mapping() if callable(self.groups) else self.groups
        bound = dataclasses.replace(cast(Any, self), groups=groups)
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

    def noise_scales(self, state: Any) -> tf.Tensor:
        """The noise stddev on each group's sum at noise multiplier 1, `[L]`."""
        sensitivity = self.sensitivity(state)
        if self.allocation == "joint":
            return tf.fill([len(self.layout)], tf.norm(sensitivity))
        return sensitivity * math.sqrt(len(self.layout))

    def clip_norms(self, state: Any) -> tf.Tensor:
        """The current clip norm of each group, `[L]`."""
        return self.sensitivity(state)

    def clip_norm(self, state: Any) -> tf.Tensor:
        """The norm of all groups' clip norms together, for reports."""
        return tf.norm(self.clip_norms(state))


def flat_rule(name: str, value: Any) -> ClipRule:
    rule = as_rule(value, name)
    if rule.has_groups:
        raise ValueError(f"{name} must be a rule without groups, got {rule}.")
    return rule


@register_rule
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerwiseClip(GroupedRule):
    """A clip rule for each group of variables, each with its own state.

    McMahan et al. (2018), section 2.2; Nguyen et al. (2023), section 3.2. With
    `allocation="per_layer"`, noise of stddev ``z_g * sqrt(L) * C_h`` is added to the
    sum of group h; with "joint", ``z_g * sqrt(sum_h C_h^2)`` to every coordinate. For a
    rule that counts, every group has its own noised count.

    *Formal guarantees*: group h of a weighted record has norm at most
    ``sensitivity(state)[h]``; with the noise above, the sums of all groups are one
    Gaussian mechanism of noise multiplier z_g (DESIGN of the noise: sum over groups of
    (sensitivity / noise stddev)^2 is at most 1 / z_g^2).

    Args:
      rule: a clip norm or rule for all groups, or a mapping of a rule for each group,
        by group name.
      groups: None or "layer" (a group for each layer, by the variables' names),
        "variable", a list of layer names, variable names or regular expressions (each
        is a group, or a list of them is a group), a mapping from group names to entries
        of such a list, or a function from a variable's name to its group.
      allocation: how noise is shared, "per_layer" or "joint".

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

    def __post_init__(self):
        object.__setattr__(self, "groups", normalize_groups(self.groups))
        choice("allocation", self.allocation, ALLOCATIONS)
        rule = self.rule
        if isinstance(rule, Mapping) and "class_name" not in rule:
            rule = {str(key): flat_rule("rule", part) for key, part in rule.items()}
        else:
            rule = flat_rule("rule", rule)
        object.__setattr__(self, "rule", rule)

    def _check_bound(self) -> None:
        names = self.layout.names
        if isinstance(self.rule, dict) and set(self.rule) != set(names):
            raise ValueError(
                f"rule has groups {', '.join(self.rule)}, but the groups are "
                f"{', '.join(names)}."
            )

    @property  # type: ignore[override]
    def threshold(self) -> str | None:
        """ "group" if every group's rule has a norm above which it shortens records."""
        thresholds = {rule.threshold for rule in self._given_rules()}
        return "group" if thresholds == {"record"} else None

    def _given_rules(self) -> list[ClipRule]:
        return list(self.rule.values()) if isinstance(self.rule, dict) else [self.rule]

    @property
    def rules(self) -> tuple[ClipRule, ...]:
        """The rule of each group."""
        if isinstance(self.rule, dict):
            return tuple(self.rule[name] for name in self.layout.names)
        return (self.rule,) * len(self.layout)

    @property
    def _shared(self) -> ClipRule | None:
        """The rule of all groups, if it can treat them in one operation."""
        first, *others = self.rules
        one = first.elementwise and all(
            rule is first or rule == first for rule in others
        )
        return first if one else None

    def _identity(self) -> dict[str, Any]:
        config = super()._identity()
        if isinstance(self.rule, dict):
            config["rule"] = {k: serialize_rule(r) for k, r in self.rule.items()}
        else:
            config["rule"] = serialize_rule(self.rule)
        return config

    def initial_state(self) -> Any:
        if self._shared is None:
            return tuple(rule.initial_state() for rule in self.rules)
        return tf.nest.map_structure(self._spread, self._shared.initial_state())

    def _spread(self, part: tf.Tensor) -> tf.Tensor:
        # The count of steps stays a scalar, as schedules take a scalar.
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

    @property
    def indicator_levels(self) -> int:
        return math.lcm(*(rule.indicator_levels for rule in self.rules))

    def next_state(self, state: Any, fractions: tf.Tensor) -> Any:
        if self._shared is not None:
            return self._shared.next_state(state, fractions)
        sizes = [len(rule.count_stddevs(1.0)) for rule in self.rules]
        parts = tf.split(fractions, sizes)
        return tuple(r.next_state(s, f) for r, f, s in self._zip(parts, state))

    def check_noise(self, stddevs: Sequence[float]) -> None:
        for rule in self.rules:
            count = len(rule.count_stddevs(1.0))
            if count:
                rule.check_noise(stddevs[:count])
            stddevs = stddevs[count:]

    def count_stddevs(
        self, records_per_step: float, private: bool = True
    ) -> tuple[float, ...]:
        stddevs = [rule.count_stddevs(records_per_step, private) for rule in self.rules]
        return tuple(stddev for part in stddevs for stddev in part)

    @property
    def default_counts(self) -> tuple[bool, ...]:
        return tuple(free for rule in self.rules for free in rule.default_counts)

    def _zip(self, parts, state):
        return zip(self.rules, parts, state, strict=True)
