"""The origins of values: ops that bring data in, constants, captures and handles.

An op brings data unless its type is on a list of harmless types.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.walks import (
    before_identities,
    find_function,
    functions_in_attributes,
)

# Stateful ops with outputs that depend only on inputs, variables and randomness.
_HARMLESS = (
    ops.RANDOM
    | ops.READS
    | ops.FIRST_ARGUMENT.keys()
    | frozenset(
        """Assert Print PrintV2 CheckNumericsV2 DebugIdentityV2 DebugIdentityV3
        CudnnRNN CudnnRNNV2 CudnnRNNV3 VarHandleOp""".split()
    )
)
# The longest list of integers that is still a shape, an order of axes or the like.
_AXES = 8


def brings_data(op: tf.Operation) -> bool:
    """Whether an op may output data even if its inputs hold no data.

    The functions that the op calls count, at any depth.
    """
    kind = op.type
    if is_zeros(op.node_def):
        return False
    if kind in ops.ITERATORS or kind in ops.FROM_OUTSIDE or "Dataset" in kind:
        return True
    if not op.inputs and op.outputs and kind != "Placeholder":
        if kind not in ops.PUBLIC_LEAVES and kind not in _HARMLESS:
            return True
    if op.op_def.is_stateful and op.outputs and kind not in _HARMLESS:
        return True
    return any(_function_brings_data(op.graph, name) for name in functions_of(op))


def functions_of(op: tf.Operation) -> list[str]:
    """The names of the functions that an op calls."""
    calls = any(attr.type in ("func", "list(func)") for attr in op.op_def.attr)
    return functions_in_attributes(op.node_def) if calls else []


def _function_brings_data(graph, name: str) -> bool:
    return any(
        definition is None or any(map(_node_brings_data, definition.node_def))
        for definition in definitions(graph, name)
    )


def _node_brings_data(node: _tf_private.NodeDef) -> bool:
    if node.op in ops.ITERATORS or node.op in ops.FROM_OUTSIDE or "Dataset" in node.op:
        return True
    if node.op in _HARMLESS or node.op in ops.PUBLIC_LEAVES or is_zeros(node):
        return False
    definition = _tf_private.definition_of(node.op)
    if definition is None or (definition.is_stateful and definition.output_arg):
        return True
    return bool(definition.output_arg) and not any(
        not name.startswith("^") for name in node.input
    )


def is_zeros(node: _tf_private.NodeDef) -> bool:
    """Whether this is an `Empty`, of memory that nothing was in, set to zeros."""
    return node.op == "Empty" and node.attr["init"].b


def definitions(graph, name: str) -> Iterator[_tf_private.FunctionDef | None]:
    """A function and the functions that it calls, at any depth.

    Yields:
      The definition of each function; None for a function that is not found.
    """
    pending, visited = [name], set()
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        definition = definition_of(graph, name)
        yield definition
        for node in definition.node_def if definition is not None else ():
            if definition_of(graph, node.op) is not None:
                pending.append(node.op)  # A call as of TensorFlow 1.
            pending += functions_in_attributes(node)


def nodes_within(op: tf.Operation) -> Iterator[_tf_private.NodeDef]:
    """The nodes of the functions that an op calls, at any depth, where found."""
    for name in functions_of(op):
        for definition in definitions(op.graph, name):
            yield from () if definition is None else definition.node_def


def definition_of(graph, name: str) -> _tf_private.FunctionDef | None:
    """The definition of a function that `graph` may call."""
    function = find_function(graph, name)
    if function is None:
        return None
    cached = getattr(function, "cached_definition", None)
    return cached if cached is not None else function.definition


def first_handle(handle: tf.Tensor) -> tf.Tensor:
    """The origin of a handle, before identities and before loops that pass it on."""
    while True:
        handle = before_identities(handle)
        op, index = handle.op, handle.value_index
        if op.type not in ops.LOOPS:
            return handle
        body = _tf_private.body_of_loop(op)
        if before_identities(body.outputs[index]) is not body.inputs[index]:
            return handle
        handle = op.inputs[index]


def handle_in(graph: tf.Graph, handle: tf.Tensor) -> tf.Tensor:
    """The origin of a handle in `graph`, if a graph inside captured the handle."""
    handle = first_handle(handle)
    while handle.graph is not graph:
        captures = getattr(handle.graph, "captures", ())
        outer = next((e for e, i in captures if i is handle), None)
        if outer is None or _tf_private.is_eager(outer):
            return handle
        handle = first_handle(outer)
    return handle


def is_number(op: tf.Operation) -> bool:
    """Whether a constant is a number, a repeated number, a shape or a list of axes."""
    tensor = op.outputs[0]
    if tensor.dtype == tf.string:
        return False
    count = tensor.shape.num_elements()
    if count is None:
        return False
    integers = tensor.dtype.is_integer and tensor.shape.rank <= 1
    if count <= 1 or (integers and count <= _AXES):
        return True
    return op.type == "Const" and is_uniform(tf.get_static_value(tensor))


def large_constant(graph, name: str) -> str | None:
    """The name of a constant in a function that `is_number` would reject, or None."""
    for definition in definitions(graph, name):
        for node in definition.node_def if definition is not None else ():
            if node.op != "Const":
                continue
            value = tf.make_ndarray(node.attr["value"].tensor)
            integers = value.dtype.kind in "iu" and value.ndim <= 1
            small = value.size <= 1 or (integers and value.size <= _AXES)
            if value.dtype.kind in "OSU" or not (small or is_uniform(value)):
                return node.name
    return None


def is_uniform(value: np.ndarray | None) -> bool:
    """Whether all entries of a constant are equal."""
    return value is not None and value.size > 0 and bool(np.all(value == value.flat[0]))


def captured_from(tensor: tf.Tensor):
    """The outermost tensor behind a captured tensor.

    Returns:
      An eager tensor, an op's output in an outer graph, or `tensor` if it was not
      captured.
    """
    graph = tensor.graph
    while True:
        captures = [e for e, i in getattr(graph, "captures", ()) if i is tensor]
        if not captures:
            return tensor
        tensor = captures[0]
        if _tf_private.is_eager(tensor):
            return tensor
        graph = tensor.graph


def handle_users(op: tf.Operation, index: int) -> Iterator[str]:
    """The types of the ops that use the resource at input `index` of `op`.

    Yields:
      The type of `op`, or, if `op` calls functions, the types of the ops that use the
      resource in these functions.
    """
    if op.type not in ops.FIRST_ARGUMENT:
        yield op.type
        return
    place = index - ops.FIRST_ARGUMENT[op.type]
    for name in functions_of(op):
        yield from _argument_users(op.graph, name, place)


def _argument_users(graph, name: str, place: int, seen=()) -> Iterator[str]:
    definition = definition_of(graph, name)
    if definition is None or (name, place) in seen:
        yield "a function that is not there"
        return
    seen = (*seen, (name, place))
    aliases = _aliases(definition, definition.signature.input_arg[place].name)
    for node in definition.node_def:
        inputs = [i for i in node.input if not i.startswith("^")]
        for index, source in enumerate(inputs):
            if source not in aliases or node.op == "Identity":
                continue
            if node.op not in ops.FIRST_ARGUMENT:
                yield node.op
                continue
            for function in functions_in_attributes(node):
                yield from _argument_users(
                    graph, function, index - ops.FIRST_ARGUMENT[node.op], seen
                )


def _aliases(definition, argument: str) -> set[str]:
    """The names of a function's argument and of its identities in the function."""
    aliases, before = {argument}, 0
    while len(aliases) > before:
        before = len(aliases)
        aliases |= {
            f"{node.name}:output:0"
            for node in definition.node_def
            if node.op == "Identity" and node.input[0] in aliases
        }
    return aliases
