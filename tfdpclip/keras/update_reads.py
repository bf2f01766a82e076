"""Finding what a private step, and its update, are given that was made of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._variables import components, path_of, unwrapped
from tfdpclip.keras.weight_watch import (
    APPLY_MARK,
    READS,
    SKIPPED,
    UPDATE_MARK,
    Search,
    node_of,
)


def read_by_update(
    concrete: Any,
    own: Sequence[tf.Variable],
    is_public: Callable[[Any, str | None], bool],
    identity: str,
) -> str | None:
    """What an optimizer's update reads, of what the rest of the step writes to.

    A metric, for one, of which the private gradient's update must know nothing.

    Args:
      concrete: the traced training step.
      own: what the optimizer trains and keeps, which others may not write to.
      is_public: whether a handle, of a variable of this name, was declared public.
      identity: of the optimizer.

    Returns:
      The name of a variable, or None.
    """
    known = {id(part.handle) for variable in own for part in components(variable)}
    names = _names(concrete.graph)
    roots = {
        inside.op.name: outside
        for outside, inside in concrete.graph.captures
        if outside.dtype == tf.resource
        and id(outside) not in known
        and not is_public(outside, names.get(id(outside)))
    }
    definition = concrete.graph.as_graph_def()
    search = _ReadSearch(definition.library, identity.encode())
    search.follow(definition.node, roots, "the training step")
    both = [key for key in search.read if key in search.written]
    return names.get(both[0], "a variable") if both else None


def _names(graph: Any) -> dict[int, str]:
    try:
        variables = graph.variables
    except AssertionError:  # One of them is gone, but for its value.
        return {}
    return {
        id(part.handle): path_of(variable)
        for variable in variables
        for part in components(unwrapped(variable))
    }


class _ReadSearch(Search):
    """Finds what the update reads, and what others write to.

    In the place of a variable stands its handle. Functions that are called are of
    whoever calls them.

    Attributes:
      read: what the update takes, by whatever op.
      written: what other ops take that are not known to only read it.
    """

    def __init__(self, library, identity: bytes):
        super().__init__(library, identity)
        self.read: set[int] = set()
        self.written: set[int] = set()
        self._whose = (False, False)

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known, outer = dict(roots), self._whose
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            handles = [known.get(name) for name in inputs]
            given = {id(handle) for handle in handles if handle is not None}
            if not given:
                continue
            if node.op == "Identity":
                known[node.name] = handles[0]
                continue
            own = outer[0] or node.attr[UPDATE_MARK].s == self._identity
            applies = outer[1] or node.attr[APPLY_MARK].s == self._identity
            called = self.called_by(node)
            for name in called or ():
                self._whose = own, applies
                self._seen.clear()  # Whoever called it before may have been another.
                self._enter(name, handles[SKIPPED.get(node.op, 0) :])
                self._whose = outer
            if called:
                continue
            if applies:
                self.read |= given
            elif not own and node.op not in READS:
                self.written |= given


def made_of_data(concrete: Any, identity: str) -> str | None:
    """Where a function or branch that has the private step in it gets more than data.

    The optimizer reads the graph of the loss, and takes its arguments for the batch.

    Args:
      concrete: the traced function, whose arguments are what it is given.
      identity: of the optimizer.

    Returns:
      The name of an op between the data and such a function, which may have combined
      examples.
    """
    graph = concrete.graph
    given = {tensor.op.name for tensor in graph.inputs if tensor.dtype != tf.resource}
    definition = graph.as_graph_def()
    search = _BetweenSearch(definition.library, identity.encode())
    search.follow(definition.node, dict.fromkeys(given, _DATA), "the training step")
    return search.other


# What tensors are: data as they came, or what an op made of them, by its name.
_DATA = ""
# What leaves every number where it is.
_UNCHANGED = frozenset("Identity Cast EnsureShape StopGradient".split())
_BY_A_CONSTANT = frozenset("Mul AddV2 Add Sub RealDiv".split())


class _BetweenSearch(Search):
    """Follows data to the functions that have the private step in them.

    In the place of a variable stands `_DATA`, or what made something else of them.

    Attributes:
      other: the name of an op that made what such a function is given.
    """

    other: str | None = None

    def __init__(self, library, identity: bytes):
        super().__init__(library, identity)
        self._private: dict[str, bool] = {}

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known = dict(roots)
        constants = {node.name for node in nodes if node.op == "Const"}
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            given = [known.get(name) for name in inputs]
            called = self.called_by(node) or []
            private = [name for name in called if self._is_private(name)]
            if private and node.attr[UPDATE_MARK].s != self._identity:
                made = next(filter(None, given), None)
                self.other = self.other or made
                skip = SKIPPED.get(node.op, 0)
                for name in private:
                    # Of what it is given, all has been looked at.
                    arguments = [None if g is None else _DATA for g in given[skip:]]
                    self._enter(name, arguments)
            if node.op.startswith(("IteratorGetNext", "OptionalGetValue")):
                known[node.name] = _DATA
            elif node.op != "OptionalHasValue" and any(g is not None for g in given):
                first = next(filter(None, given), _DATA)
                others = [n for n, g in zip(inputs, given, strict=True) if g is None]
                same = node.op in _UNCHANGED
                same |= node.op in _BY_A_CONSTANT and constants.issuperset(others)
                same &= len(others) < len(inputs) == len(others) + 1
                by = f"{node.op} {node.name!r} in {where}"
                known[node.name] = first if same or first else by

    def _is_private(self, name: str) -> bool:
        """Whether a function, or one that it calls, updates what is trained."""
        if name not in self._private:
            self._private[name] = False  # Against circles.
            nodes = self._functions[name].node_def
            self._private[name] = any(
                node.attr[UPDATE_MARK].s == self._identity
                or any(self._is_private(f) for f in self.called_by(node) or [])
                for node in nodes
            )
        return self._private[name]
