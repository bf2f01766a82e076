"""The ops of a called function, and whether they can be copied out of the function."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.walks import (
    ancestors,
    find_function,
    functions_in_attributes,
)

_READS = ops.READS | ops.TABLE_READS
_CHECKS = frozenset(["Assert", "NoOp"])


@dataclasses.dataclass(frozen=True)
class Body:
    """The graph of a called function, with the call's inputs and outputs in it."""

    graph: tf.Graph
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]


def body_of(op: tf.Operation) -> Body | None:
    """The graph of the function that `op` calls; None if that graph is not known."""
    if op.type not in ops.FUNCTION_CALLS:
        return None
    function = find_function(op.graph, op.get_attr("f").name)
    body = getattr(function, "graph", None)
    if body is None or not _tf_private.is_function_graph(body):
        return None
    # TensorFlow adds outputs when it differentiates the function.
    inputs, outputs = list(body.inputs), list(body.outputs)[: len(op.outputs)]
    if len(inputs) != len(op.inputs) or len(outputs) != len(op.outputs):
        return None
    return Body(body, inputs, outputs)


def is_compiled(op: tf.Operation) -> bool:
    """Whether XLA compiles the function, also if the caller is not compiled."""
    return op.node_def.attr["_XlaMustCompile"].b


def functions_in(op: tf.Operation) -> list:
    """The functions that an op may call, by its attributes or, in TF 1, its type."""
    names = [op.type, *functions_in_attributes(op.node_def)]
    functions = [find_function(op.graph, name) for name in names]
    return [function for function in functions if function is not None]


def add_functions(op: tf.Operation, graph: tf.Graph) -> None:
    """Makes the functions that `op` may call known to `graph`."""
    for function in functions_in(op):
        _tf_private.add_function(graph, function)


def gradient_function(op: tf.Operation) -> Callable | None:
    """The gradient function of this op alone, not of its op type; or None."""
    function = _tf_private.own_gradient(op)
    if function is not None:
        return function
    try:
        op.get_attr("_gradient_op_type")
    except ValueError:
        return None
    try:
        return _tf_private.registered_gradient(op)
    except LookupError:  # A loaded model names a gradient that was not registered.
        return None


def count_recomputed(op: tf.Operation) -> int:
    """The number of function outputs in an op of `tf.recompute_grad`; else 0.

    The op is an `IdentityN`. Its first outputs are the outputs of the recomputed
    function; the remaining outputs are tensors that the gradient needs. Its gradient
    runs the function a second time. Differentiating the ops before the `IdentityN`
    gives the same gradient and draws no second dropout mask.
    """
    if op.type != "IdentityN":
        return 0
    closure = _closure(gradient_function(op))
    inner = _closure(closure.get("tape_grad_fn"))
    code = getattr(inner.get("grad_fn"), "__code__", None)
    if code is None or code not in _codes_in(tf.recompute_grad):
        return 0
    return int(inner.get("flat_result_len", 0))


def _closure(function) -> dict:
    code, cells = (getattr(function, n, None) for n in ("__code__", "__closure__"))
    if code is None or cells is None:
        return {}
    contents = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            contents[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    return contents


def _codes_in(function) -> set:
    """The code of all functions that are defined inside `function`."""
    todo = [function.__code__]
    codes = set()
    while todo:
        inner = [c for c in todo.pop().co_consts if isinstance(c, types.CodeType)]
        codes.update(inner)
        todo += inner
    return codes


def is_stateful(op: tf.Operation) -> bool:
    """Whether an op type may have an effect, or a different result in each run."""
    return op.op_def.is_stateful


def run_in_any_order(op: tf.Operation) -> None:
    """Keeps an op out of the order in which a function's effects happen."""
    manager = getattr(op.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


def needs_order(op: tf.Operation) -> bool:
    """Whether a function runs this op in program order though it uses no resource."""
    return (
        is_stateful(op)
        and op.type not in ops.DRAWS
        and not any(t.dtype == tf.resource for t in op.inputs)
    )


def is_generator(op: tf.Operation) -> bool:
    """Whether the op draws from the state of a `tf.random.Generator`."""
    return op.type in ops.GENERATORS


def resources_of(op: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The resources that an op only reads, and the resources that it may change."""
    resources = [t for t in op.inputs if t.dtype == tf.resource]
    if op.type in _READS or op.type in ("Identity", "IdentityN"):
        return resources, []
    if not resources:
        return [], []
    attribute = op.node_def.attr.get("_read_only_resource_inputs")
    read_only = set(attribute.list.i) if attribute is not None else set()
    reads = [t for i, t in enumerate(op.inputs) if i in read_only]
    names = {t.ref() for t in reads}
    return reads, [t for t in resources if t.ref() not in names]


def can_be_opened(op: tf.Operation, compiled: bool = False) -> bool:
    """Whether the ops of the function that `op` calls can be copied out of it.

    The copies must give the result of the call. The call stays in the graph, so the
    copies must not repeat its effects: a function that draws the next batch, or reads a
    variable after assigning to the variable, is not copied.

    Args:
      op: a call.
      compiled: whether XLA compiles the function around `op`.
    """
    body = body_of(op)
    if body is None:
        return False
    compiled = compiled or is_compiled(op)
    inputs = {t.ref() for t in body.inputs}
    touched = set()
    for inner in ancestors(body.outputs):
        if inner.type == "Placeholder":
            if inner.outputs[0].ref() not in inputs:
                return False
        elif not _can_be_copied(inner, compiled):
            return False
        touched.update(t.ref() for part in resources_of(inner) for t in part)
    return not touched & {t.ref() for t in _written(body)}


def _can_be_copied(op: tf.Operation, compiled: bool) -> bool:
    if compiled and (op.type in ops.CONTROL_FLOW or op.type.startswith("Xla")):
        return False  # The op may have a kernel inside XLA only.
    if op.type in ops.FUNCTION_CALLS and can_be_opened(op, compiled):
        return True
    if op.type in ops.FUNCTION_CALLS or op.type in ops.CONTROL_FLOW:
        return all(_is_harmless(inner, op) for inner in _all_inside(op))
    return not is_stateful(op) or op.type in _READS | ops.DRAWS | ops.GENERATORS


def _is_harmless(op: tf.Operation, outer: tf.Operation) -> bool:
    """Whether an op may run twice, inside a function that is copied as a whole."""
    if outer.type in ops.CONTROL_FLOW and op.node_def.attr["_gradient_op_type"].s:
        # The op's own gradient function reads tensors of the traced branch.
        return op.type in ops.FUNCTION_CALLS
    if op.type in ops.FUNCTION_CALLS or op.type in ops.CONTROL_FLOW:
        return True
    return not is_stateful(op) or op.type in _READS | ops.DRAWS | _CHECKS


def _all_inside(op: tf.Operation) -> Iterator[tf.Operation]:
    for function in functions_in(op):
        for inner in function.graph.get_operations():
            yield inner
            yield from _all_inside(inner)


def _written(body: Body) -> list[tf.Tensor]:
    """The resources that the function changes, except the state of generators."""
    return [
        t
        for op in body.graph.get_operations()
        if not is_generator(op)
        for t in resources_of(op)[1]
    ]


def convolution_groups(op: tf.Operation) -> int:
    """The number of feature groups of a convolution; 1 if unknown, or for other ops."""
    if op.type not in ops.CONVOLUTIONS:
        return 1
    axis = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else -1
    channels, per_group = op.inputs[0].shape[axis], op.inputs[1].shape[-2]
    return channels // per_group if channels and per_group else 1
