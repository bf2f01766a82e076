"""Which code is compiled by XLA."""

from __future__ import annotations

import tensorflow as tf


def in_xla() -> bool:
    """Whether the code being traced will be compiled by XLA."""
    graph = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    while context is not None:
        if context.IsXLAContext():
            return True
        context = context.outer_context
    outer = getattr(graph, "outer_graph", None)
    if outer is None or not hasattr(outer, "as_default"):
        return False
    with outer.as_default():
        return in_xla()
