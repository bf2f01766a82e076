"""Copies of a graph's ops, and which of them may be made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._constants import once
from tfdpclip.gradients.graph import ops, origins

# The attribute of ops that `tf.custom_gradient` makes.
_OWN_GRADIENT = "_gradient_op_type"


def repeatable(op: tf.Operation) -> bool:
    """Whether the op gives the same result again, and changes nothing.

    Calls and loops do if all that they call does, at any depth.
    """
    return all(
        name in ops.FIRST_ARGUMENT
        or name in ops.DETERMINISTIC
        or not _is_stateful(name)
        for name in _ops_within(op)
    )


def calls_python(op: tf.Operation) -> bool:
    """Whether the op, or a function that it calls, runs Python code."""
    return not ops.PYTHON.isdisjoint(_ops_within(op))


def kept_elsewhere(op: tf.Operation, of_examples: bool = False) -> str | None:
    """The type of an op, here or in a function, that may give what is kept elsewhere.

    Python, files, queues, tables that change: what other batches left there. Variables
    are not meant: `state.find_state_reads` finds them.

    Args:
      op: the op.
      of_examples: whether what others of the same batch left is meant, too, as in an
        array of one run. Data sets are data then, but for Python in them.
    """
    for name in sorted(_ops_within(op)):
        if of_examples and ("Dataset" in name or "Iterator" in name):
            continue
        if name in ops.FROM_OUTSIDE and (of_examples or name not in ops.OF_ONE_RUN):
            return name
        known = name in ops.KEEPS_NOTHING or name in ops.FIRST_ARGUMENT
        known = known or name.startswith((*ops.COLLECTIVES, *ops.SEEDED_DRAWS))
        if _is_stateful(name) and not known:
            return name
    return None


def draws(op: tf.Operation) -> bool:
    """Whether the op, or a function that it calls, draws random numbers.

    Classes that are sampled for all examples do not count: none has a class of its own.
    """
    random = ops.RANDOM - ops.CANDIDATE_SAMPLERS
    return any(
        name in random or name.startswith(ops.SEEDED_DRAWS) for name in _ops_within(op)
    )


def has_own_gradient(op: tf.Operation) -> bool:
    """Whether an op, here or in a function, has a gradient function of its own."""
    calling = ops.FUNCTION_CALLS | ops.CONTROL_FLOW
    if op.type not in calling and (
        _tf_private.own_gradient(op) is not None or _OWN_GRADIENT in op.node_def.attr
    ):
        return True
    return any(
        node.op not in calling and _OWN_GRADIENT in node.attr
        for name in origins.functions_of(op)
        for definition in origins.definitions(op.graph, name)
        if definition is not None
        for node in definition.node_def
    )


def _is_stateful(name: str) -> bool:
    known = _tf_private.definition_of(name)
    return known is None or known.is_stateful or name in ops.PYTHON


def _ops_within(op: tf.Operation) -> set[str]:
    """The type of an op, and of all ops of all functions that it calls."""
    found = {op.type}
    for name in origins.functions_of(op):
        for definition in origins.definitions(op.graph, name):
            if definition is None:
                found.add("a function that is not known")
            else:
                found |= {node.op for node in definition.node_def}
    return found


def emit_again(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Adds the same op, on other inputs, to the current graph."""
    return emitter(op)(inputs)


def emitter(op: tf.Operation) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    """What adds an op, as it is now, to the graph that is current then.

    Returns:
      A function from the op's new inputs to its outputs.
    """
    attributes = {
        name: value
        for name, value in op.node_def.attr.items()
        # Where the original is, and what its output looked like.
        if name not in ("_class", "_output_shapes")
    }
    dtypes = [t.dtype for t in op.outputs]

    def emit(inputs):
        graph = tf.compat.v1.get_default_graph()
        copy = _tf_private.make_op(
            graph,
            op.type,
            # A constant of another graph is no longer one once it is captured, and some
            # ops need to know what it is.
            [_here(t, graph) for t in inputs],
            dtypes,
            name=f"{op.name.split('/')[-1]}_again",
            attrs=attributes,
            op_def=op.op_def,
        )
        return list(copy.outputs)

    return emit


def _here(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    if (
        tensor.op.type != "Const"
        or tensor.graph is graph
        or not tensor.dtype.is_integer
    ):
        return tensor

    def make():
        value = np.asarray(tf.get_static_value(tensor))
        key = ("copy", tensor.dtype, value.shape, value.tobytes())
        return once(key, lambda: tf.constant(value, tensor.dtype))

    return once(("copy", tensor.ref()), make)


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a call, in a branch of `tf.cond`, which runs as it is.

    TensorFlow otherwise puts the ops of both branches into the graph around, and goes
    through those of the branch that is not taken in every step: four times what a
    small model's step need pay for a check that is not due. And it would rewrite the
    ops before it first runs them, for longer than a few checks take.
    """
    made = tf.function(
        function, autograph=False, experimental_attributes={"_noinline": True}
    )

    def call(*arguments):
        result = made(*arguments)
        _tf_private.run_as_it_is(tf.nest.flatten(result)[0].op)
        return result

    return call


@contextlib.contextmanager
def scratch_graph() -> Iterator[tf.Graph]:
    """A graph within the current one, for looking at ops that are then dropped."""
    graph = _tf_private.new_function_graph("scratch")
    with graph.as_default():
        yield graph
