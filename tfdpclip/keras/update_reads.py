"""Finding what a private optimizer's update reads of what the step computed."""

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
