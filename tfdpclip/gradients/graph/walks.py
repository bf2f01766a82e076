"""Walks through graphs: the ops before a tensor, and the functions that an op calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tensorflow as tf

from tfdpclip import _tf_private


def ancestors(
    outputs: Iterable[tf.Tensor], stop: Collection[tf.Operation] = frozenset()
) -> list[tf.Operation]:
    """The ops that `outputs` depend on, inputs first.

    Args:
      outputs: tensors of one graph.
      stop: ops to leave out, with the ops that are reached through them only.
    """
    order, seen = [], set(stop)
    stack = [(t.op, False) for t in outputs]
    while stack:
        op, done = stack.pop()
        if done:
            order.append(op)
        elif op not in seen:
            seen.add(op)
            stack.append((op, True))
            stack.extend((t.op, False) for t in op.inputs if t.op not in seen)
    return order


def descendants(op: tf.Operation) -> list[tf.Operation]:
    """The ops of the same graph that read a result of `op`, directly or not."""
    reached, stack = {op}, [op]
    while stack:
        for tensor in stack.pop().outputs:
            readers = [o for o in tensor.consumers() if o not in reached]
            reached.update(readers)
            stack += readers
    return list(reached - {op})


def before_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a chain of `Identity` ops passes on as `tensor`."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def find_function(graph: tf.Graph, name: str | bytes):
    """The function called `name` that ops of `graph` can call, or None."""
    while graph is not None:
        function = _tf_private.function_named(graph, name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def functions_in_attributes(node: _tf_private.NodeDef) -> list[str]:
    """The names of the functions in a node's attributes, by the attributes' names."""
    names = []
    for _, value in sorted(node.attr.items()):
        if value.HasField("func"):
            names.append(value.func.name)
        names.extend(function.name for function in value.list.func)
    return names
