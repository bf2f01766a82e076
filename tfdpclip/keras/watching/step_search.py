"""Searches the graph of a traced training step for writes and reads of variables.

All searches work the same way: they start from named tensors (handles of variables, or
data), and follow them from node to node, through all functions that the graph calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._variables import components, path_of, unwrapped
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.walks import functions_in_attributes
from tfdpclip.keras.watching.weight_watch import APPLY_MARK, UPDATE_MARK


def find_other_updates(
    concrete: Any, variables: Sequence[tf.Variable], identity: str
) -> list[tuple[tf.Variable, str]]:
    """Finds writes to variables in a traced function by anything but one optimizer.

    An op that takes a variable counts as a write unless the op is known to only read.

    Args:
      concrete: the traced function.
      variables: the variables.
      identity: the identity of the optimizer.

    Returns:
      Pairs of a variable and a description of the op that writes to the variable.
    """
    definition = concrete.graph.as_graph_def()
    search = Search(definition.library, identity.encode())
    roots = _variables_within(concrete, variables)
    search.follow(definition.node, roots, "the training step")
    return list(search.found.values())


def _variables_within(
    concrete: Any, variables: Sequence[tf.Variable]
) -> dict[str, tf.Variable]:
    """Variables by the names of their handles inside a traced function."""
    by_handle = {
        id(part.handle): variable
        for variable in variables
        for part in components(variable)
    }
    return {
        inside.op.name: by_handle[id(outside)]
        for outside, inside in concrete.graph.captures
        if id(outside) in by_handle
    }


def find_other_step(concrete: Any, identity: str) -> str | None:
    """Finds a step of a second private optimizer in a traced function.

    Args:
      concrete: the traced function.
      identity: the identity of the first optimizer.

    Returns:
      The name of an op of the second optimizer's step; None if there is no second step.
    """
    definition = concrete.graph.as_graph_def()
    inner = (function.node_def for function in definition.library.function)
    for node in itertools.chain(definition.node, *inner):
        # Reading a missing attribute with [] would create the attribute.
        if APPLY_MARK in node.attr and node.attr[APPLY_MARK].s != identity.encode():
            return node.name
    return None


def find_other_data(concrete: Any) -> str | None:
    """Finds a data set in a traced training step that is no argument of the step.

    Args:
      concrete: the traced function; its arguments are the data of `fit`.

    Returns:
      The name of an op that reads the additional data set, or None.
    """
    graph = concrete.graph
    given = {tensor.op.name for tensor in graph.inputs}
    given -= {inside.op.name for _, inside in graph.captures}
    definition = graph.as_graph_def()
    search = _DataSearch(definition.library, b"")
    search.brought = any(inside.dtype == tf.variant for _, inside in graph.captures)
    search.follow(definition.node, dict.fromkeys(given, True), "the training step")
    return search.other


class Search:
    """Follows handles of variables through a graph and the functions it calls."""

    def __init__(self, library, identity: bytes):
        self._functions = {f.signature.name: f for f in library.function}
        self._identity = identity
        self._seen: set = set()
        self.found: dict[int, tuple[Any, str]] = {}

    def follow(self, nodes, roots: dict[str, tf.Variable], where: str) -> None:
        """Searches nodes; `roots` are the variables by tensor name."""
        known = dict(roots)
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            variables = [known.get(name) for name in inputs]
            if not any(variable is not None for variable in variables):
                continue
            if node.attr[UPDATE_MARK].s == self._identity or node.op in ops.READS:
                continue
            if node.op == "Identity":
                known[node.name] = next(v for v in variables if v is not None)
                continue
            called = self.called_by(node)
            if called is None:
                for variable in filter(lambda v: v is not None, variables):
                    what = f"{node.op} {node.name!r} in {where}"
                    self.found.setdefault(id(variable), (variable, what))
                continue
            for name in called:
                self._enter(name, arguments_of(node, variables))

    def called_by(self, node) -> list[str] | None:
        """The functions that get the node's inputs unchanged, or None."""
        if node.op in self._functions:
            return [node.op]
        if node.op not in ops.FIRST_ARGUMENT:
            return None
        names = functions_in_attributes(node)
        return names if all(name in self._functions for name in names) else None

    def _enter(self, name: str, variables) -> None:
        key = (name, tuple(id(variable) for variable in variables))
        if key in self._seen:
            return
        self._seen.add(key)
        function = self._functions[name]
        arguments = [argument.name for argument in function.signature.input_arg]
        roots = {
            argument: variable
            for argument, variable in zip(arguments, variables, strict=True)
            if variable is not None
        }
        self.follow(function.node_def, roots, name)


def find_variables_given_data(
    concrete: Any, variables: Sequence[tf.Variable], identity: str
) -> list[tf.Variable]:
    """The variables to which a traced training step writes values made from its data.

    Values made from variables only (an average of trained weights) do not count.

    Args:
      concrete: the traced function; its arguments are the data.
      variables: the variables.
      identity: the identity of the optimizer.
    """
    handles = _variables_within(concrete, variables)
    return _written_with_data(concrete.graph, handles, identity)


def _written_with_data(graph: Any, handles: dict[str, Any], identity: str) -> list[Any]:
    """The values of `handles` (by handle name) to which data are written."""
    captured = {id(inside) for _, inside in graph.captures}
    given = (t for t in graph.inputs if id(t) not in captured)
    data = {t.op.name: _DATA for t in given if t.dtype != tf.resource}
    definition = graph.as_graph_def()
    search = _GivenDataSearch(definition.library, identity.encode())
    search.follow(definition.node, handles | data, "the training step")
    return [what for what, _ in search.found.values()]


class _GivenDataSearch(Search):
    """Follows variables and data, and finds ops that write data to a variable.

    The known value of a tensor is its variable, or `_DATA` if the tensor is made from
    data.
    """

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known = dict(roots)
        for node in nodes:
            given = [known.get(node_of(name)) for name in node.input if name[0] != "^"]
            variables = [g for g in given if g is not None and g is not _DATA]
            of_data = any(g is _DATA for g in given)
            if node.op.startswith(("IteratorGetNext", "OptionalGetValue")):
                known[node.name] = _DATA
                continue
            if node.op == "Identity" and variables:
                known[node.name] = variables[0]
                continue
            called = self.called_by(node) or []
            for name in called if variables else ():
                self._enter(name, arguments_of(node, given))
            own = node.attr[UPDATE_MARK].s == self._identity
            if of_data and not (called or own or node.op in ops.READS):
                for variable in variables:
                    self.found.setdefault(id(variable), (variable, node.name))
            if of_data:
                known[node.name] = _DATA


class _DataSearch(Search):
    """Follows the iterators that the step is given, and finds further iterators.

    The known value of a tensor is True if the tensor comes from an argument.

    Attributes:
      other: the name of an op that reads a further data set.
      brought: whether a variant tensor, which could be an optional element, was
        captured from outside. Otherwise every optional element is made in the step, for
        example by the gradient of a branch from values that the branch kept; an
        iterator that makes an optional element is found directly.
    """

    other: str | None = None
    brought: bool = True

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known = dict(roots)
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            given = [known.get(name) for name in inputs]
            reads = node.op.startswith(("IteratorGetNext", "OptionalGetValue"))
            fed = reads and given and given[0]
            fed = fed or (node.op == "OptionalGetValue" and not self.brought)
            data = "Dataset" in node.op or "Iterator" in node.op or reads
            if data and not fed:
                self.other = self.other or f"{node.op} {node.name!r} in {where}"
            called = self.called_by(node)
            if called is not None:
                for name in called:
                    self._enter(name, arguments_of(node, given))
            else:
                # The functions may get the node's inputs in another order.
                for name in functions_in_attributes(node):
                    if name in self._functions and name not in self._seen:
                        self._seen.add(name)
                        self.follow(self._functions[name].node_def, {}, name)
            if node.op in ("Identity", "IteratorGetNextAsOptional") and given[0]:
                known[node.name] = True


def arguments_of(node, inputs: list[Any]) -> list[Any]:
    """The inputs of a node that the functions called by the node get."""
    return inputs[ops.FIRST_ARGUMENT.get(node.op, 0) :]


def node_of(name: str) -> str:
    """The name of the node or argument that a tensor comes from."""
    return name.split(":", 1)[0]


def find_private_read(
    concrete: Any,
    own: Sequence[tf.Variable],
    is_public: Callable[[Any, str | None], bool],
    identity: str,
) -> str | None:
    """Finds a variable that the update reads and the rest of the step writes to.

    Such a variable, a metric for instance, may hold private data, so the update of the
    weights must not depend on the variable.

    Args:
      concrete: the traced training step.
      own: the variables that the optimizer trains or keeps; a separate check refuses
        writes to them by other code.
      is_public: `is_public(handle, name)` says whether a variable was declared public.
      identity: the identity of the optimizer.

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
    except AssertionError:  # A variable object is gone, and only its value is left.
        return {}
    return {
        id(part.handle): path_of(variable)
        for variable in variables
        for part in components(unwrapped(variable))
    }


class _ReadSearch(Search):
    """Finds the reads of the update, and the writes of the rest of the step.

    The known value of a tensor is the handle of its variable. The ops of a called
    function count as ops of the caller.

    Attributes:
      read: ids of the handles that the update takes, by any op.
      written: ids of the handles that the rest of the step gives to an op that is not
        known to only read.
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
                self._seen.clear()  # An earlier call may have been by the other part.
                self._enter(name, arguments_of(node, handles))
                self._whose = outer
            if called:
                continue
            if applies:
                self.read |= given
            elif not own and node.op not in ops.READS:
                self.written |= given


def find_altered_data(
    graph: Any, own: Sequence[tf.Variable], identity: str
) -> str | None:
    """Finds a function with the private step inside that gets more than data.

    The optimizer reads the graph of the loss, and takes the arguments of this graph for
    the batch. An argument made from several examples would escape its proof.

    Args:
      graph: the graph of the traced function, whose arguments are the data.
      own: the variables that the optimizer trains or keeps.
      identity: the identity of the optimizer.

    Returns:
      The name of an op between the data and a function or branch with the private step,
      which may have combined examples; or None.
    """
    known = {id(part.handle) for variable in own for part in components(variable)}
    handles = {
        inside.op.name: outside
        for outside, inside in graph.captures
        if outside.dtype == tf.resource and id(outside) not in known
    }
    # Variables that hold data of this step or of earlier steps.
    kept = {id(handle) for handle in _written_with_data(graph, handles, identity)}
    roots: dict[str, Any] = {n: h for n, h in handles.items() if id(h) in kept}
    given = {tensor.op.name for tensor in graph.inputs if tensor.dtype != tf.resource}
    definition = graph.as_graph_def()
    search = _AlteredDataSearch(definition.library, identity.encode())
    search.follow(
        definition.node, roots | dict.fromkeys(given, _DATA), "the training step"
    )
    return search.other


def has_several_steps(graph: Any, identity: str) -> bool:
    """Whether functions with the private step inside are called more than once."""
    definition = graph.as_graph_def()
    search = _AlteredDataSearch(definition.library, identity.encode())
    return search.has_several_steps(definition.node)


ALTERED_DATA = (
    "A function or a branch with the private step inside gets more than data: it gets "
    "the result of {}. Examples may have been combined there, unseen by the proof; and "
    "a skipped step reveals that the draw was empty. Compute this result in the "
    "function that computes the loss, or, record by record, in the data pipeline."
    + see("mixed-examples")
)

# The known value of a tensor: unchanged data, or the name of the op that changed data.
_DATA = ""
# Ops that leave every number in its place. Iterators give sparse batches serialized.
_UNCHANGED = frozenset(
    "Identity Cast EnsureShape StopGradient DeserializeSparse".split()
)
# Lists of a number of places, without values.
_EMPTY_LISTS = frozenset(("TensorListReserve", "EmptyTensorList"))
_BY_A_CONSTANT = frozenset("Mul AddV2 Add Sub RealDiv".split())


def _shapes_of_sparse_batches(nodes) -> dict[str, str]:
    """The shapes of sparse batches with static lengths, each with the op of the batch.

    TensorFlow unpacks the shape, and packs each length, or the static length in its
    place. Every other use of the shape is an op that changes data.
    """
    by_name = {node.name: node for node in nodes}
    shapes = {}
    for pack in nodes:
        # An argument of the function is no node; `pack` itself in its place refuses.
        sources = {by_name.get(node_of(name), pack).name for name in pack.input}
        unpacks = [by_name[s] for s in sources if by_name[s].op != "Const"]
        if pack.op != "Pack" or [s.op for s in unpacks] != ["Unpack"]:
            continue
        in_place = all(
            name in (f"{source}:output:{i}", f"{source}:{i}", source if i == 0 else "")
            for i, name in enumerate(pack.input)
            if (source := node_of(name)) == unpacks[0].name
        )
        shape = unpacks[0].input[0]
        batch = node_of(shape)
        is_shape = shape in (f"{batch}:2", f"{batch}:sparse_shape:0")
        if in_place and is_shape and by_name[batch].op == "DeserializeSparse":
            shapes[pack.name] = batch
    return shapes


class _AlteredDataSearch(Search):
    """Follows data to the functions that contain the private step.

    The known value of a tensor is `_DATA`, the description of the op that changed the
    data, or the handle of a variable in which the step keeps data.

    Attributes:
      other: the description of an op whose result goes into a function with the private
        step.
    """

    other: str | None = None

    def __init__(self, library, identity: bytes):
        super().__init__(library, identity)
        self._library = library
        self._private: dict[str, bool] = {}
        # The known values of a function's results, by its name and its arguments.
        self._results: dict[Any, list[Any]] = {}
        self._last: dict[str, Any] = {}

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known = dict(roots)
        constants = {node.name for node in nodes if node.op == "Const"}
        shapes = _shapes_of_sparse_batches(nodes)
        for node in nodes:
            inputs = [node_of(name) for name in node.input if name[0] != "^"]
            found = [known.get(name) for name in inputs]
            given = [g if isinstance(g, str) else None for g in found]
            handles = [g for g in found if g is not None and not isinstance(g, str)]
            by = f"{node.op} {node.name!r} in {where}"
            called = self.called_by(node) or []
            private = [name for name in called if self._is_private(name)]
            if private and node.attr[UPDATE_MARK].s != self._identity:
                made = next(filter(None, given), None)
                self.other = self.other or made
                # Changed data were reported above, so all data count as unchanged.
                arguments = [_DATA if isinstance(g, str) else g for g in found]
                for name in private:
                    self._within(node, name, arguments_of(node, arguments))
            if node.op in _EMPTY_LISTS:
                continue
            if node.op.startswith(("IteratorGetNext", "OptionalGetValue")):
                known[node.name] = _DATA
            elif node.name in shapes:
                known[node.name] = known.get(shapes[node.name])
            elif handles and node.op == "Identity":
                known[node.name] = handles[0]
            elif handles and not called:
                known[node.name] = by
            elif node.op != "OptionalHasValue" and any(g is not None for g in given):
                first = next(filter(None, given), _DATA)
                others = [n for n, g in zip(inputs, given, strict=True) if g is None]
                same = node.op in _UNCHANGED
                same |= node.op in _BY_A_CONSTANT and constants.issuperset(others)
                same &= len(others) < len(inputs) == len(others) + 1
                if called and not first:
                    arguments = arguments_of(node, found)
                    results = [r for f in called for r in self._given_by(f, arguments)]
                    first = next((r for r in results if isinstance(r, str) and r), "")
                    same = not first
                known[node.name] = first if same or first else by
        self._last = known

    def _given_by(self, name: str, arguments: list[Any]) -> list[Any]:
        """The known values of a function's results."""
        key = (name, tuple(id(argument) for argument in arguments))
        if key not in self._results:
            function = self._functions[name]
            self._results[key] = [None] * len(function.signature.output_arg)
            names = [argument.name for argument in function.signature.input_arg]
            given = zip(names, arguments, strict=True)
            roots = {name: g for name, g in given if g is not None}
            self.follow(function.node_def, roots, name)
            self._results[key] = [
                self._last.get(node_of(function.ret[result.name]))
                for result in function.signature.output_arg
            ]
        return self._results[key]

    def _within(self, node, name: str, arguments: list[Any]) -> None:
        """Searches a function, and the values that a loop hands to its next pass."""
        results = self._given_by(name, arguments)
        if node.op not in ops.LOOPS:
            return
        if name != node.attr["body"].func.name:
            return
        for place, made in enumerate(results):
            if isinstance(made, str) and made:
                use = _UseSearch(self._library, self._identity)
                given: list[Any] = [None] * len(arguments)
                given[place] = _DATA
                use._enter(name, given)
                self.other = self.other or (made if use.found else None)

    def has_several_steps(self, nodes: Any) -> bool:
        calls = [set(filter(self._is_private, self.called_by(n) or [])) for n in nodes]
        return len(list(filter(None, calls))) > 1 or any(
            self.has_several_steps(self._functions[name].node_def)
            for name in set().union(*calls)
        )

    def _is_private(self, name: str) -> bool:
        """Whether a function, or a function that it calls, contains the update."""
        if name not in self._private:
            self._private[name] = False  # Ends the recursion of circular calls.
            nodes = self._functions[name].node_def
            self._private[name] = any(
                node.attr[UPDATE_MARK].s == self._identity
                or any(self._is_private(f) for f in self.called_by(node) or [])
                for node in nodes
            )
        return self._private[name]


class _UseSearch(Search):
    """Follows an argument, and finds out whether the private step depends on it."""

    def follow(self, nodes, roots: dict[str, Any], where: str) -> None:
        known = dict(roots)
        for node in nodes:
            given = [known.get(node_of(name)) for name in node.input if name[0] != "^"]
            if all(g is None for g in given):
                continue
            if node.attr[UPDATE_MARK].s == self._identity:
                self.found[0] = (None, node.name)
                return
            for name in self.called_by(node) or ():
                self._enter(name, arguments_of(node, given))
            known[node.name] = _DATA
