"""The `tf.Variable` inside a framework's variable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._object_notes import notes_of_variable


def unwrapped(variable: Any) -> Any:
    """The `tf.Variable` inside a variable of Keras 3; anything else unchanged.

    Graphs know variables by their own handles, types and names, which a wrapper hides.

    >>> variable = tf.Variable(1.0)
    >>> unwrapped(variable) is variable
    True
    """
    inner = getattr(variable, "value", None)
    if not isinstance(inner, tf.Variable):
        return variable
    if hasattr(variable, "path"):
        notes_of_variable(inner).path = variable.path
    return inner


def all_unwrapped(variables: Iterable[Any]) -> list[tf.Variable]:
    """Applies `unwrapped` to each variable."""
    return [unwrapped(variable) for variable in variables]


def path_of(variable: Any) -> str:
    """Keras's path of a variable, wrapped or not; its name, if the path is unknown."""
    inner = unwrapped(variable)
    return notes_of_variable(inner).path or inner.name.removesuffix(":0")


def components(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """The variable, or its components on the devices of a strategy."""
    parts = getattr(variable, "values", None)
    return parts if isinstance(parts, tuple) else (variable,)


def whole_number(variable: Any) -> int:
    """The current value of an integer variable, in a third of the time of `numpy()`.

    The value of the first replica, which all replicas have: the scope of a further
    strategy does not let the variable read itself.
    """
    inner = components(unwrapped(variable))[0]
    if not tf.executing_eagerly():
        with tf.init_scope():
            return int(inner.numpy())
    read = tf.raw_ops.ReadVariableOp(resource=inner.handle, dtype=inner.dtype)
    return int(np.asarray(read))
