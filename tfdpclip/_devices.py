"""The devices of code: compiled by XLA or not, on CPUs alone or not."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

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


_FORM_OF_XLA = contextvars.ContextVar("form_of_xla", default=False)


def has_form_of_xla() -> bool:
    """Whether the code being traced takes the form that XLA can compile.

    Code that XLA compiles does, and code inside of `form_of_xla`.
    """
    return _FORM_OF_XLA.get() or in_xla()


@contextlib.contextmanager
def form_of_xla() -> Iterator[None]:
    """Traces code in the form that XLA can compile, to run it uncompiled."""
    token = _FORM_OF_XLA.set(True)
    try:
        yield
    finally:
        _FORM_OF_XLA.reset(token)


def on_cpus() -> bool:
    """Whether all devices are CPUs."""
    return all(d.device_type == "CPU" for d in tf.config.list_logical_devices())
