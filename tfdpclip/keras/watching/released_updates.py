"""Updates beside the private step that are made of released values alone.

A generator learns from random numbers and from a critic that the private optimizer
trains: its update is post-processing, whatever other optimizer makes it. So is an
average of past weights. Goes in: a traced training step. Comes out: which variables
the step writes to without any data in what it writes.

What cannot be told is taken for data: an unknown op with a state, a resource that is no
variable, a branch that data choose, a large variable from elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._variables import components, unwrapped
from tfdpclip.gradients.graph import ops
from tfdpclip.keras.watching.step_search import SKIPPED, Search, node_of
from tfdpclip.keras.watching.weight_watch import UPDATE_MARK

# Says of a value that records, or how many records were drawn, may have made it.
_DATA = "data"
_WRITES = ("ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
# How many numbers a variable may have that the step only reads: a learning rate.
_FEW = 8


@dataclasses.dataclass(frozen=True)
class _Handle:
    """A variable, in the place of its handle."""

    identity: int


def made_of_releases(
    concrete: Any,
    variables: Iterable[tf.Variable],
    trained: Sequence[tf.Variable],
    own: Sequence[tf.Variable],
    identity: str,
) -> list[tf.Variable]:
    """Which variables a traced training step writes to without data in what it writes.

    *Formal guarantees*: beside the writes of the optimizer itself, a variable that is
    returned gets values that are functions of random numbers, constants, the trained
    variables, and variables of which the same is true. How many records were drawn is
    data: no epsilon covers the sizes of Poisson's batches.

    Args:
      concrete: the traced function, whose arguments are batches.
      variables: the variables to look at.
      trained: the weights of the model that gradients train: whoever writes to them is
        found.
      own: what the optimizer writes to: its sums and moments, which are not released.
      identity: of the optimizer.
    """
    graph = concrete.graph
    try:
        known = [unwrapped(variable) for variable in graph.variables]
    except AssertionError:  # One of them is gone, but for its value.
        return []
    trained_handles = _handles(trained)
    few = _handles(v for v in known if (v.shape.num_elements() or _FEW + 1) <= _FEW)
    handles = _handles(known)
    roots: dict[str, Any] = {t.op.name: _DATA for t in graph.inputs}
    for outside, inside in graph.captures:
        of_variable = id(outside) in handles
        held = _Handle(id(outside)) if of_variable else _DATA
        roots[inside.op.name] = held if outside.dtype == tf.resource else None
    definition = graph.as_graph_def()
    search = _OriginSearch(definition.library, identity.encode())
    kept = _handles(own) - trained_handles
    search.of_data, search.public = set(kept), handles
    search.origin_of(definition.node, roots, False)
    # From here on variables hold something of records as soon as one write does: in the
    # order of the graph, and then again, as a read may stand before the write.
    search.of_data, search.public = kept, trained_handles | few | search.written
    count = -1
    while count != len(search.of_data):
        count = len(search.of_data)
        search.forget()
        search.origin_of(definition.node, roots, False)
    if search.lost:
        return []
    return [
        variable
        for variable in variables
        if not _handles([variable]) & (search.of_data | _handles(own))
    ]


def _handles(variables: Iterable[tf.Variable]) -> set[int]:
    return {id(part.handle) for whole in variables for part in components(whole)}


class _OriginSearch(Search):
    """Follows records through a graph, and through the variables that it writes to.

    Attributes:
      of_data: the variables that may hold something of records.
      public: the other variables that may be read.
      written: the variables that the step writes to.
      lost: whether it writes to a variable that is not known.
    """

    of_data: set[int]
    public: set[int]

    def __init__(self, library, identity: bytes):
        super().__init__(library, identity)
        self.written: set[int] = set()
        self._results: dict[tuple, tuple] = {}
        self.lost = False

    def forget(self) -> None:
        """Before the graph is gone through once more."""
        self._results.clear()

    def origin_of(self, nodes, roots: dict[str, Any], chosen: bool) -> dict[str, Any]:
        """What each node of a graph or function is made of.

        Args:
          nodes: the nodes, each behind its inputs.
          roots: what the arguments are made of, by name.
          chosen: whether records may decide that the nodes run.
        """
        known = dict(roots)
        for node in nodes:
            if node.name in roots:
                continue
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            given = [known.get(name, _DATA) for name in inputs]
            known[node.name] = self._origin(node, given, chosen)
        return known

    def _origin(self, node, given: list, chosen: bool) -> Any:
        handles = [g for g in given if isinstance(g, _Handle)]
        of_records = _DATA in given
        if node.op in ("Identity", "StopGradient") and given:
            return given[0]
        if node.attr[UPDATE_MARK].s == self._identity:
            return _DATA if of_records or handles else None
        called = self.called_by(node)
        if called is not None:
            return self._called(node, called, given, chosen)
        if node.op in ops.READS:
            unknown = any(not self._is_public(handle) for handle in handles)
            return _DATA if of_records or unknown or not handles else None
        if handles:
            return self._written(node, handles, of_records or chosen)
        self.lost |= node.op in ops.WRITES or node.op.startswith(_WRITES)
        known = _tf_private.definition_of(node.op)
        harmless = ops.DRAWS | {"Assert"}
        if known is None or (known.is_stateful and node.op not in harmless):
            return _DATA
        if node.op in ops.FROM_OUTSIDE | {"Placeholder"}:
            return _DATA
        return _DATA if of_records else None

    def _is_public(self, handle: _Handle) -> bool:
        return handle.identity in self.public - self.of_data

    def _written(self, node, handles: list[_Handle], of_records: bool) -> Any:
        """What an op writes to, that takes variables and does not only read them."""
        writes = node.op in ops.WRITES | ops.GENERATORS
        writes |= node.op.startswith(_WRITES)
        identities = {handle.identity for handle in handles}
        if writes:
            self.written |= identities
        if of_records or not writes or identities & self.of_data:
            self.of_data |= identities
            return _DATA
        return None

    def _called(self, node, called: list[str], given: list, chosen: bool) -> Any:
        """What comes of the functions that a node calls."""
        first = SKIPPED.get(node.op, 0)
        arguments = given[first:]
        chosen |= _DATA in given[:first]
        if node.op in ops.LOOPS:
            return self._looped(*called, arguments, chosen)
        return _joined(
            part for name in called for part in self._within(name, arguments, chosen)
        )

    def _looped(self, test: str, body: str, given: list, chosen: bool) -> Any:
        """What comes of a loop: each turn is given what the turn before made."""
        while True:
            again = _DATA in self._within(test, given, chosen)
            made = self._within(body, given, chosen or again)
            both = [_joined(pair) for pair in zip(given, made, strict=True)]
            if both == given and chosen >= again:
                return _joined(part for part in both if not isinstance(part, _Handle))
            given, chosen = both, chosen or again

    def _within(self, name: str, given: list, chosen: bool) -> tuple:
        """What the results of a function are made of."""
        key = (name, tuple(given), chosen)
        if key not in self._results:
            function = self._functions[name]
            results = [function.ret[of.name] for of in function.signature.output_arg]
            # Of a function that calls itself.
            self._results[key] = (_DATA,) * len(results)
            names = [argument.name for argument in function.signature.input_arg]
            roots = dict(zip(names, given, strict=True))
            known = self.origin_of(function.node_def, roots, chosen)
            found = (known.get(node_of(result), _DATA) for result in results)
            self._results[key] = tuple(_DATA if chosen else of for of in found)
        return self._results[key]


def _joined(origins: Iterable[Any]) -> Any:
    """What is one of these, or made of all of them."""
    found = set(origins)
    if len(found) <= 1:
        return found.pop() if found else None
    return _DATA
