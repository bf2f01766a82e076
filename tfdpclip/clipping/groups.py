"""Groups of variables that are clipped separately."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdpclip import _arguments
from tfdpclip._arguments import function, items, shown, text

# None: a group for each layer. "variable": a group for each variable. Otherwise
# patterns, named patterns, or a function of the variable's name.
GroupSpec = None | str | Sequence[Any] | Mapping[str, Any] | Callable[[str], Any]

_EXAMPLE = "groups=['embedding', 'block_.*', '.*']"


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of the variables.

    Attributes:
      names: the groups' names, L of them.
      assignment: the index of the group of each variable.
      members: the variables' names, in the order of `assignment`.
    """

    names: tuple[str, ...]
    assignment: tuple[int, ...]
    members: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def as_mapping(self) -> dict[str, list[str]]:
        """Group names with the names of their variables."""
        found: dict[str, list[str]] = {name: [] for name in self.names}
        for member, index in zip(self.members, self.assignment, strict=True):
            found[self.names[index]].append(member)
        return found


def layer_of(name: str) -> str:
    """The layer's name in a variable's name.

    >>> layer_of("block_1/dense/kernel:0")
    'block_1/dense'
    """
    name = _bare(text("name", name))
    return name.rpartition("/")[0] or name


def normalize_groups(groups: Any) -> GroupSpec:
    """`groups` in the form that is stored, and that saving does not change.

    Raises:
      ValueError: if `groups` does not define groups of variables.
    """
    if groups is None:
        return groups
    if callable(groups):
        return function("groups", groups, 1)
    if isinstance(groups, str):
        if groups not in ("layer", "variable"):
            raise ValueError(
                f"groups must be 'layer', 'variable' or a list of names, got "
                f"{groups!r}. For a group of this name and a group of the rest: "
                f"groups=[{groups!r}, '.*']."
            )
        return groups
    if not isinstance(groups, (Mapping, Sequence)) or not len(groups):
        raise ValueError(_not_groups(groups))
    if isinstance(groups, Mapping):
        return {str(name): _pattern(part, groups) for name, part in groups.items()}
    return [_pattern(part, groups) for part in groups]


def _pattern(pattern: Any, groups: Any) -> Any:
    if isinstance(pattern, (list, tuple)) and pattern:
        return [_pattern(part, groups) for part in pattern]
    if not isinstance(pattern, str):
        raise ValueError(_not_groups(groups))
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"groups has {pattern!r}, which is no regular expression: {error}."
        ) from error
    return pattern


def make_groups(groups: GroupSpec, names: Sequence[str]) -> Groups:
    """Sorts variables into groups.

    Args:
      groups: the specification of the groups, see `LayerwiseClip`.
      names: the variables' names, in order.

    Raises:
      ValueError: if a variable has no group, or a group no variable.
    """
    groups = normalize_groups(groups)
    names = tuple(_bare(text("names", name)) for name in items("names", names))
    if not names:
        raise ValueError("names is empty: there are no variables to group.")
    if groups is None or groups == "layer":
        labels = [layer_of(name) for name in names]
    elif groups == "variable":
        # Names need not be unique; still, every variable gets a group of its own.
        labels = [
            f"{name}#{i}" if name in names[:i] else name for i, name in enumerate(names)
        ]
    elif callable(groups):
        labels = [str(groups(name)) for name in names]
    else:
        labels = _matched(groups, names)
    order = tuple(dict.fromkeys(labels))
    if isinstance(groups, Mapping):
        order = tuple(groups)
    places = {label: i for i, label in enumerate(order)}
    return Groups(order, tuple(places[label] for label in labels), names)


def named_numbers(
    name: str,
    numbers: Any,
    check: Callable[[str, Any], float] = _arguments.non_negative,
) -> dict[str, float]:
    """Numbers by the names of groups or layers, each as `check` has it."""
    _arguments.instance(name, numbers, Mapping, "one number per group, by name")
    return {str(k): check(f"{name}[{k!r}]", v) for k, v in numbers.items()}


def by_group(name: str, values: Mapping[str, Any], groups: Groups) -> list[float]:
    """A number for each group.

    Args:
      name: the argument's name, for errors.
      values: by group name, or by layer name (norms of layers in a group are joined:
        the root of the sum of squares).
      groups: the groups.

    Raises:
      ValueError: if a group has no number.
    """
    values = named_numbers(name, values)
    found = []
    for group, members in groups.as_mapping().items():
        layers = dict.fromkeys(layer_of(member) for member in members)
        if group in values:
            numbers = [values[group]]
        elif all(layer in values for layer in layers):
            numbers = [values[layer] for layer in layers]
        else:
            raise ValueError(
                f"{name} says nothing about group {group!r}; it has "
                f"{', '.join(map(repr, values))}."
            )
        found.append(math.sqrt(math.fsum(v * v for v in numbers)))
    return found


def _bare(name: str) -> str:
    return name.split(":")[0]


def _parts(pattern: Any) -> list[Any]:
    return [pattern] if isinstance(pattern, str) else list(pattern)


def _matched(groups: Any, names: Sequence[str]) -> list[str]:
    if isinstance(groups, Mapping):
        patterns = {label: _parts(part) for label, part in groups.items()}
    else:
        patterns = {}
        for entry in groups:
            parts = _parts(entry)
            patterns["+".join(parts)] = parts
    labels: list[str | None] = [None] * len(names)
    for label, parts in patterns.items():
        for part in parts:
            hits = [i for i, name in enumerate(names) if _named(part, name)]
            if not hits:
                hits = [i for i, name in enumerate(names) if re.search(part, name)]
            if not hits:
                raise ValueError(
                    f"groups has {part!r}, which matches no variable; the variables "
                    f"are {', '.join(names)}."
                )
            for i in hits:
                labels[i] = label if labels[i] is None else labels[i]
    missing = [n for n, label in zip(names, labels, strict=True) if label is None]
    if missing:
        raise ValueError(
            f"groups leaves out {', '.join(missing)}. End with '.*' to put all "
            f"remaining variables in a group: {_EXAMPLE}."
        )
    found = [label for label in labels if label is not None]
    empty = [label for label in patterns if label not in found]
    if empty:
        raise ValueError(
            f"groups has {empty[0]!r}, but all of its variables belong to groups named "
            "before it."
        )
    return found


def _named(part: Any, name: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _not_groups(groups: Any) -> str:
    return (
        "groups must be None (one per layer), 'variable', a list of names or regular "
        f"expressions, a mapping or a function, got {shown(groups)}. For example "
        f"{_EXAMPLE}."
    )
