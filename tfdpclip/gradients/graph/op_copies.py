"""Copies of a graph's ops, and tests of which ops may be copied."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._constants import once
from tfdpclip.gradients.graph import ops, origins

# The attribute that `tf.custom_gradient` puts on its ops.
_OWN_GRADIENT = "_gradient_op_type"


def repeatable(op: tf.Operation) -> bool:
    """Whether a second run of the op gives the same result and has no effect.

    A call or a loop is repeatable if every op in its functions is, at any depth.
    """
    return all(
        name in ops.FIRST_ARGUMENT or name in ops.DETERMINISTIC or not is_stateful(name)
        for name in _ops_within(op)
    )


def calls_python(op: tf.Operation) -> bool:
    """Whether the op, or a function that it calls, runs Python code."""
    return not ops.PYTHON.isdisjoint(_ops_within(op))


def find_external_state(op: tf.Operation, of_examples: bool = False) -> str | None:
    """The type of an op that may read state outside the graph's tensors and variables.

    External state is state of Python, files, queues and mutable tables: earlier batches
    may have written to it. `state.find_state_reads` finds reads of
    variables.

    Args:
      op: the op. The functions that it calls are searched too.
      of_examples: whether state that lives for a single run counts too, such as a
        tensor array: examples of the same batch may share the array. Ops of data sets
        then count as data, not as state, except Python functions in the data set.
    """
    for name in sorted(_ops_within(op)):
        if of_examples and ("Dataset" in name or "Iterator" in name):
            continue
        if name in ops.FROM_OUTSIDE and (of_examples or name not in ops.OF_ONE_RUN):
            return name
        stateless = name in ops.KEEPS_NOTHING or name in ops.FIRST_ARGUMENT
        stateless = stateless or name.startswith((*ops.COLLECTIVES, *ops.SEEDED_DRAWS))
        if is_stateful(name) and not stateless:
            return name
    return None


def draws(op: tf.Operation) -> bool:
    """Whether the op, or a function that it calls, draws random numbers.

    Candidate samplers do not count: all examples share the sampled classes.
    """
    random = ops.RANDOM - ops.CANDIDATE_SAMPLERS
    return any(
        name in random or name.startswith(ops.SEEDED_DRAWS) for name in _ops_within(op)
    )


def has_own_gradient(op: tf.Operation) -> bool:
    """Whether the op, or an op in its functions, has its own gradient function."""
    calling = ops.FUNCTION_CALLS | ops.CONTROL_FLOW
    if op.type not in calling and (
        _tf_private.own_gradient(op) is not None or _OWN_GRADIENT in op.node_def.attr
    ):
        return True
    return any(
        node.op not in calling and _OWN_GRADIENT in node.attr
        for node in origins.nodes_within(op)
    )


def is_stateful(name: str) -> bool:
    """Whether an op of the type may have an effect, or may not be known."""
    definition = _tf_private.definition_of(name)
    return definition is None or definition.is_stateful or name in ops.PYTHON


def _ops_within(op: tf.Operation) -> set[str]:
    """The type of an op, and of all ops of all functions that it calls."""
    types = {_type_of(op.node_def)}
    for name in origins.functions_of(op):
        for definition in origins.definitions(op.graph, name):
            if definition is None:
                types.add("a function that is not known")
            else:
                types |= {
                    _type_of(node)
                    for node in definition.node_def
                    # A call as of TensorFlow 1, whose function is among these as well.
                    if origins.definition_of(op.graph, node.op) is None
                }
    return types


def _type_of(node: _tf_private.NodeDef) -> str:
    """The type of an op; Fill for an Empty whose memory is set to zeros, as in CTC."""
    return "Fill" if origins.is_zeros(node) else node.op


def copy_op(
    op: tf.Operation, inputs: list[tf.Tensor], name: str | None = None
) -> list[tf.Tensor]:
    """Adds the same op, on other inputs, to the current graph."""
    graph = tf.compat.v1.get_default_graph()
    attributes = {
        name: value
        for name, value in op.node_def.attr.items()
        # Attributes of the original's colocation and output shapes.
        if name not in ("_class", "_output_shapes")
    }
    copy = _tf_private.make_op(
        graph,
        op.type,
        # A captured constant becomes a placeholder, and some ops need its value.
        [_here(t, graph) for t in inputs],
        [t.dtype for t in op.outputs],
        name=name or f"{op.name.split('/')[-1]}_again",
        attrs=attributes,
        op_def=op.op_def,
    )
    return list(copy.outputs)


def emit_in_type(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Adds the same op to the current graph, on inputs of a new type."""
    emit = getattr(tf.raw_ops, op.type)
    # Some raw ops rename their inputs or attributes, but none reorders them.
    names = list(inspect.signature(emit).parameters)
    arguments, position = {}, 0
    for name, arg in zip(names, op.op_def.input_arg, strict=False):
        if arg.number_attr or arg.type_list_attr:
            count = len(op.inputs) - len(op.op_def.input_arg) + 1
            arguments[name] = inputs[position : position + count]
            position += count
        else:
            arguments[name] = inputs[position]
            position += 1
    inferred = {
        name for arg in op.op_def.input_arg for name in (arg.type_attr, arg.number_attr)
    }
    attrs = [
        attr.name
        for attr in op.op_def.attr
        if attr.name not in inferred and not attr.name.startswith("_")
    ]
    free = [n for n in names if n not in (*arguments, *attrs, "name")]
    for attr in attrs:
        name = attr if attr in names else free.pop(0)
        arguments[name] = op.get_attr(attr)
    return tf.nest.flatten(emit(**arguments))


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


@contextlib.contextmanager
def scratch_graph() -> Iterator[tf.Graph]:
    """A temporary graph inside the current graph, for ops that are only analysed."""
    graph = _tf_private.new_function_graph("scratch")
    with graph.as_default():
        yield graph
