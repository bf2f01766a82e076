"""Groups of variables that are clipped separately."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpclip import _arguments
from tfdpclip._arguments import function, items, shown, text

# None: a group for each layer. "variable": a group for each variable. A number: that
# many groups of layers of similar norm. Otherwise patterns, named patterns, or a
# function of the variable's name.
GroupSpec = None | int | str | Sequence[Any] | Mapping[str, Any] | Callable[[str], Any]

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
    if isinstance(groups, bool):
        raise ValueError(_not_groups(groups))
    if isinstance(groups, int):
        return _arguments.integer("groups", groups, 1)
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


def make_groups(
    groups: GroupSpec, names: Sequence[str], norms: Mapping[str, float] | None = None
) -> Groups:
    """Sorts variables into groups.

    Args:
      groups: the specification of the groups, see `LayerwiseClip`.
      names: the variables' names, in order.
      norms: public gradient norms by layer, for a number of groups.

    Raises:
      ValueError: if a variable has no group, or a group no variable.
    """
    groups = normalize_groups(groups)
    names = tuple(_bare(text("names", name)) for name in items("names", names))
    if not names:
        raise ValueError("names is empty: there are no variables to group.")
    if norms is not None and not isinstance(norms, (Mapping, Sequence)):
        norms = items("norms", norms)
    if groups is None or groups == "layer":
        labels = [layer_of(name) for name in names]
    elif groups == "variable":
        # Names need not be unique; still, every variable gets a group of its own.
        labels = [
            f"{name}#{i}" if name in names[:i] else name for i, name in enumerate(names)
        ]
    elif callable(groups):
        labels = [str(groups(name)) for name in names]
    elif isinstance(groups, int):
        labels = _similar(groups, names, norms)
    else:
        labels = _matched(groups, names)
    order = tuple(dict.fromkeys(labels))
    if isinstance(groups, Mapping):
        order = tuple(groups)
    places = {label: i for i, label in enumerate(order)}
    return Groups(order, tuple(places[label] for label in labels), names)


def by_group(name: str, values: Any, groups: Groups) -> list[float]:
    """A number for each group, from a mapping or a sequence.

    Args:
      name: the argument's name, for errors.
      values: by group name, or by layer name (norms of layers in a group are joined:
        the root of the sum of squares), or in the groups' order.
      groups: the groups.

    Raises:
      ValueError: if a group has no number.
    """
    if not isinstance(values, Mapping):
        values = items(name, values)
        if len(values) != len(groups):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(groups)} groups: "
                f"{', '.join(groups.names)}."
            )
        return [
            _arguments.non_negative(f"{name}[{i}]", v) for i, v in enumerate(values)
        ]
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
        checked = [_arguments.non_negative(f"{name}[{group!r}]", v) for v in numbers]
        found.append(math.sqrt(math.fsum(v * v for v in checked)))
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


def _similar(count: int, names: Sequence[str], norms: Any) -> list[str]:
    """Joins layers of similar norm: least squares of the logarithms."""
    layers = list(dict.fromkeys(layer_of(name) for name in names))
    if count == 1:
        return ["all"] * len(names)
    if count > len(layers):
        raise ValueError(
            f"groups={shown(count)}, but there are only {len(layers)} layers."
        )
    if norms is None:
        raise ValueError(
            f"groups={count} puts layers of similar gradient norm together, so it "
            "needs their norms on public data: "
            "norms=dpc.keras.public_gradient_norms(model, (x, y))."
        )
    per_layer = make_groups(None, names)
    sizes = np.array(by_group("norms", norms, per_layer))
    floor = sizes.max() * 1e-6 if sizes.max() > 0 else 1.0
    values = np.log(np.maximum(sizes, floor))
    order = np.argsort(values, kind="stable")
    cuts = _partition(values[order], count)
    label_of = {}
    for place, cluster in zip(order, cuts, strict=True):
        label_of[per_layer.names[place]] = f"norms_{cluster}"
    return [label_of[layer_of(name)] for name in names]


def _partition(values: np.ndarray, count: int) -> list[int]:
    """The cluster of each sorted value: exact one-dimensional k-means."""
    size = len(values)
    sums = np.concatenate([[0], np.cumsum(values)])
    squares = np.concatenate([[0], np.cumsum(values**2)])

    def spread(start, end):
        total = sums[end] - sums[start]
        return squares[end] - squares[start] - total * total / (end - start)

    best = np.full((count + 1, size + 1), np.inf)
    cut = np.zeros((count + 1, size + 1), int)
    best[0, 0] = 0
    for k in range(1, count + 1):
        for end in range(k, size + 1):
            options = [best[k - 1, s] + spread(s, end) for s in range(k - 1, end)]
            choice = int(np.argmin(options))
            best[k, end], cut[k, end] = options[choice], choice + k - 1
    clusters, end = [0] * size, size
    for k in range(count, 0, -1):
        start = cut[k, end]
        clusters[start:end] = [k - 1] * (end - start)
        end = start
    return clusters


def _not_groups(groups: Any) -> str:
    return (
        "groups must be None (one per layer), 'variable', a number, a list of names or "
        f"regular expressions, a mapping or a function, got {shown(groups)}. For "
        f"example {_EXAMPLE}."
    )
