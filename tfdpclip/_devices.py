"""The devices of code: compiled by XLA or not, on CPUs alone or not."""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private


def in_xla() -> bool:
    """Whether the code being traced will be compiled by XLA."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.Graph):
        if _tf_private.compiled_by_xla(graph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def on_cpus() -> bool:
    """Whether all devices are CPUs."""
    return all(d.device_type == "CPU" for d in tf.config.list_logical_devices())
