"""The devices of code, compiled by XLA or not; and settings of such code."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

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


class Tracing(NamedTuple):
    """How losses are traced, for a step that runs uncompiled before XLA compiles it.

    Attributes:
      form_of_xla: whether code takes the form that XLA can compile, to run uncompiled.
      tell: called with the `CheckStatus` of each loss, and its graph; an error of the
        function ends the trace of the loss.
      compared: the `key` of each loss that was compared, whose first steps need no
        comparison.
    """

    form_of_xla: bool = False
    tell: Callable[[Any, tf.Graph], None] | None = None
    compared: frozenset[Hashable] = frozenset()


_ORDINARY = Tracing()
TRACING = contextvars.ContextVar("tracing", default=_ORDINARY)


@contextlib.contextmanager
def traced_with(**settings: Any) -> Iterator[None]:
    """Has losses inside traced with some settings of `Tracing`."""
    token = TRACING.set(TRACING.get()._replace(**settings))
    try:
        yield
    finally:
        TRACING.reset(token)


def has_form_of_xla() -> bool:
    """Whether the code being traced takes the form that XLA can compile.

    Code that XLA compiles does, and code that runs uncompiled in its place.
    """
    return TRACING.get().form_of_xla or in_xla()


def on_cpus() -> bool:
    """Whether all devices are CPUs."""
    return all(d.device_type == "CPU" for d in tf.config.list_logical_devices())
