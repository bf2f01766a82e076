"""What clip rules with groups of variables share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._arguments import choice, items, shown
from tfdpclip.clipping.base import ClipRule
from tfdpclip.clipping.groups import Groups, GroupSpec, make_groups
from tfdpclip.clipping.serialization import as_rule

_ALLOCATIONS = ("per_layer", "joint")


class GroupedRule(ClipRule):
    """What rules with groups share. `bind` says which variables there are."""

    groups: GroupSpec

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
        layout = make_groups(self.groups, names, getattr(self, "norms", None))
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

    @abc.abstractmethod
    def noise_scales(self, state: Any) -> tf.Tensor:
        """The noise stddev on each group's sum at noise multiplier 1, `[L]`."""

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


def check_allocation(allocation: Any) -> None:
    choice("allocation", allocation, _ALLOCATIONS)


def check_floor(floor: Any) -> None:
    if _arguments.positive("floor", floor) > 1:
        raise ValueError(f"floor must be at most 1, got {floor!r}.")


def numbers_by_group(
    name: str,
    numbers: Any,
    check: Callable[[str, Any], float] = _arguments.non_negative,
) -> Any:
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
