"""Backward passes through a graph."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def gradients_at(
    losses: tf.Tensor, tensors: Sequence[tf.Tensor], grad_ys: tf.Tensor | None = None
) -> list[tf.Tensor | None]:
    """The gradients of the summed (or weighted) losses at `tensors`.

    What `tf.gradients` gives, fit for XLA also where a tensor is the output of a call
    before which nothing is differentiated: TensorFlow then emits the gradient of the
    call all the same, in a form that XLA does not have. If the gradient at the call's
    own inputs is asked for too, it takes the usual form, and is pruned.
    """
    tensors = list(tensors)
    if not tensors:
        return []
    calls = {t.op for t in tensors if t.op.type in CALLS} if in_xla() else ()
    inputs = [t for op in calls for t in op.inputs if t.dtype.is_floating]
    return tf.gradients(losses, tensors + inputs, grad_ys)[: len(tensors)]


def in_xla() -> bool:
    """Whether the code being traced will be compiled by XLA."""
    context = tf.compat.v1.get_default_graph()._get_control_flow_context()
    while context is not None:
        if context.IsXLAContext():
            return True
        context = context.outer_context
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    if outer is None or not hasattr(outer, "as_default"):
        return False
    with outer.as_default():
        return in_xla()
