"""Calls and conditions that stay apart from the graph of a step: for the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._constants import once
from tfdpclip.gradients.graph import op_copies, origins
from tfdpclip.gradients.graph.walks import before_identities


def call_uninlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function as a call that TensorFlow rewrites and does not inline.

    Rewriting reorders sums: where terms cancel, only a rewritten function gives the
    numbers of the rewritten graph around.
    """
    attributes = {"_noinline": True}
    traced = tf.function(function, autograph=False, experimental_attributes=attributes)

    def call(*arguments: tf.Tensor) -> Any:
        results = traced(*arguments)
        _drop_unread_inputs(_op_of(results))
        return results

    return call


def cond_uninlined(
    condition: tf.Tensor, branch: Callable[[], Any], other: Callable[[], Any]
) -> Any:
    """`tf.cond`, for a branch that is rarely taken.

    TensorFlow inlines both branches into the graph around, and every step then visits
    the ops of the branch that is not taken: a small model would take four times as
    long. On a single device the op of the condition calls its branches instead. Such a
    call runs on the op's device alone; with several devices, the branch is a function
    that is not inlined.
    """
    if len(tf.config.list_logical_devices()) > 1:
        return tf.cond(condition, call_uninlined(branch), other)
    results = tf.cond(condition, branch, other)
    op = _op_of(results)
    _tf_private.keep_branches(op)
    _drop_unread_inputs(op)
    return results


def _op_of(results: Any) -> tf.Operation:
    return before_identities(tf.nest.flatten(results)[0]).op


def _drop_unread_inputs(op: tf.Operation) -> None:
    """Replaces the inputs of a call that no result of its functions is made of.

    TensorFlow makes the gradients of all inputs of an op, also of constants: the
    gradient of a constant factor names the other factor, and nothing uses the result.
    An input for such a name would keep a tensor of the forward pass in memory in every
    step, and keep TensorFlow from fusing the ops around the tensor. A wrong replacement
    fails closed: the comparison gets a zero, and differs.
    """
    definitions = [origins.definition_of(op.graph, f) for f in origins.functions_of(op)]
    read = set().union(*map(_arguments_read, definitions))
    first = len(op.inputs) - len(definitions[0].signature.input_arg)
    for i, tensor in enumerate(list(op.inputs)[first:]):
        if i not in read and tensor.dtype.is_floating:
            _tf_private.replace_input(op, first + i, _nothing(tensor.dtype))


def _nothing(dtype: tf.DType) -> tf.Tensor:
    """A number that stands for a tensor of any shape."""
    return once(
        ("nothing", dtype),
        lambda: tf.compat.v1.placeholder_with_default(tf.zeros([], dtype), None),
    )


def _arguments_read(function: _tf_private.FunctionDef) -> set[int]:
    """The places of the arguments that results or stateful ops are made of."""
    nodes = {node.name: node for node in function.node_def}
    read = {*function.ret.values(), *function.control_ret.values()}
    read |= {name for name, node in nodes.items() if op_copies.is_stateful(node.op)}
    pending, names = list(read), set()
    while pending:
        name = pending.pop().lstrip("^").split(":")[0]
        if name not in names:
            names.add(name)
            pending += nodes[name].input if name in nodes else ()
    arguments = function.signature.input_arg
    return {i for i, argument in enumerate(arguments) if argument.name in names}
