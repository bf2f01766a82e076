"""Updates beside the private step that are computed from released values alone.

The generator of a GAN learns from random numbers and from a critic that the private
optimizer trains, so every update of the generator is post-processing; an average of
past weights is post-processing too. The module reads a traced training step and lists
the variables that the step writes to without data in the written values.

A value of unknown origin counts as data: the result of an unknown op with a state, of a
resource that is no variable, of a branch chosen by data, of a large variable that the
step does not write to, or of a large constant, such as the mean of all records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._variables import components, unwrapped
from tfdpclip.gradients.graph import ops
from tfdpclip.keras.watching.step_search import Search, node_of
from tfdpclip.keras.watching.weight_watch import UPDATE_MARK

# The origin of a value that records, or the number of drawn records, may have made.
_DATA = "data"
_WRITES = ("ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
# The most entries of a public variable that the step reads only: a learning rate.
_FEW = 8
# The most entries of a public constant, unless all entries are equal.
_FEW_CONSTANTS = 16


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
    """The variables that a traced training step writes to without data.

    *Formal guarantees*: the optimizer's writes apart, every value that the step writes
    to a returned variable is a function of random numbers, small constants, the trained
    variables and returned variables. The number of drawn records counts as data,
    because no epsilon covers the sizes of Poisson batches.

    Args:
      concrete: the traced function, whose arguments are batches.
      variables: the variables to look at.
      trained: the weights that the private optimizer trains; every write to the weights
        is found.
      own: the optimizer's variables, sums and moments, which are not released.
      identity: the optimizer's mark in the graph.
    """
    graph = concrete.graph
    try:
        known = [unwrapped(variable) for variable in graph.variables]
    except AssertionError:  # A variable was deleted, and its value remains.
        return []
    trained_handles = _handles(trained)
    few = _handles(v for v in known if (v.shape.num_elements() or _FEW + 1) <= _FEW)
    handles = _handles(known)
    roots: dict[str, Any] = {t.op.name: _DATA for t in graph.inputs}
    for outside, inside in graph.captures:
        of_variable = id(outside) in handles
        held = _Handle(id(outside)) if of_variable else _DATA
        if outside.dtype != tf.resource:
            held = _origin_of_constant(tf.get_static_value(outside))
        roots[inside.op.name] = held
    definition = graph.as_graph_def()
    search = _OriginSearch(definition.library, identity.encode())
    kept = _handles(own) - trained_handles
    search.of_data, search.public = set(kept), handles
    search.origin_of(definition.node, roots, False)
    # A variable counts as data as soon as a write to the variable has data. The search
    # repeats, because a read may stand before the write in the graph's order.
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


def _origin_of_constant(value: np.ndarray | None) -> str | None:
    """The origin of a constant: data, if it is large enough for a mean of records."""
    if value is None:
        return _DATA
    few = value.size <= _FEW_CONSTANTS or bool((value == value.flat[0]).all())
    return None if few else _DATA


def _handles(variables: Iterable[tf.Variable]) -> set[int]:
    return {id(part.handle) for whole in variables for part in components(whole)}


class _OriginSearch(Search):
    """Follows records through a graph, and through the variables that it writes to.

    Attributes:
      of_data: the variables that may hold data.
      public: the variables that hold released or constant values.
      written: the variables that the step writes to.
      lost: whether the step writes to an unknown variable.
    """

    of_data: set[int]
    public: set[int]

    def __init__(self, library, identity: bytes):
        super().__init__(library, identity)
        self.written: set[int] = set()
        self._results: dict[tuple, tuple] = {}
        self.lost = False

    def forget(self) -> None:
        """Drops the results of the last pass over the graph."""
        self._results.clear()

    def origin_of(self, nodes, roots: dict[str, Any], chosen: bool) -> dict[str, Any]:
        """The origin of each node of a graph or function.

        Args:
          nodes: the nodes, each behind the node's inputs.
          roots: the origins of the arguments, by name.
          chosen: whether data may decide that the nodes run.
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
        if node.op == "Const":
            return _origin_of_constant(tf.make_ndarray(node.attr["value"].tensor))
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
        """Notes the variables that an op writes to, and returns the op's origin."""
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
        """The joint origin of the results of the functions that a node calls."""
        first = ops.FIRST_ARGUMENT.get(node.op, 0)
        arguments = given[first:]
        chosen |= _DATA in given[:first]
        if node.op in ops.LOOPS:
            test, body = (node.attr[name].func.name for name in ("cond", "body"))
            return self._looped(test, body, arguments, chosen)
        return _joined(
            part for name in called for part in self._within(name, arguments, chosen)
        )

    def _looped(self, test: str, body: str, given: list, chosen: bool) -> Any:
        """The origin of a loop's results: each turn reads the results of the last."""
        while True:
            again = _DATA in self._within(test, given, chosen)
            made = self._within(body, given, chosen or again)
            both = [_joined(pair) for pair in zip(given, made, strict=True)]
            if both == given and chosen >= again:
                return _joined(part for part in both if not isinstance(part, _Handle))
            given, chosen = both, chosen or again

    def _within(self, name: str, given: list, chosen: bool) -> tuple:
        """The origins of a function's results."""
        key = (name, tuple(given), chosen)
        if key not in self._results:
            function = self._functions[name]
            results = [function.ret[of.name] for of in function.signature.output_arg]
            # Read by a function that calls itself.
            self._results[key] = (_DATA,) * len(results)
            names = [argument.name for argument in function.signature.input_arg]
            roots = dict(zip(names, given, strict=True))
            known = self.origin_of(function.node_def, roots, chosen)
            found = (known.get(node_of(result), _DATA) for result in results)
            self._results[key] = tuple(_DATA if chosen else of for of in found)
        return self._results[key]


def _joined(origins: Iterable[Any]) -> Any:
    """The common origin; data, if the origins differ."""
    found = set(origins)
    if len(found) <= 1:
        return found.pop() if found else None
    return _DATA
