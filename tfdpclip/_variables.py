"""The `tf.Variable` behind what a framework makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

# What Keras 3 calls a variable, layer by layer; the name of the `tf.Variable` in it may
# lack layers, so that those of two layers have one name.
_PATH = "_tfdpclip_path"


def unwrapped(variable: Any) -> Any:
    """The `tf.Variable` within a variable of Keras 3; anything else as it is.

    Graphs know variables by their own handles, types and names, which a wrapper hides.

    >>> variable = tf.Variable(1.0)
    >>> unwrapped(variable) is variable
    True
    """
    inner = getattr(variable, "value", None)
    if not isinstance(inner, tf.Variable):
        return variable
    if hasattr(variable, "path"):
        setattr(inner, _PATH, variable.path)
    return inner


def all_unwrapped(variables: Iterable[Any]) -> list[tf.Variable]:
    """`unwrapped` of each."""
    return [unwrapped(variable) for variable in variables]


def path_of(variable: Any) -> str:
    """What Keras calls a variable, unwrapped or not; its name, if that is unknown."""
    inner = unwrapped(variable)
    return getattr(inner, _PATH, inner.name.removesuffix(":0"))


def components(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """The variable itself, or its parts on the devices of a strategy."""
    parts = getattr(variable, "values", None)
    return parts if isinstance(parts, tuple) else (variable,)


def whole_number(variable: Any) -> int:
    """The value of an integer variable, now: a third of the time of `numpy()`."""
    inner = unwrapped(variable)
    if not tf.executing_eagerly() or len(components(inner)) > 1:
        with tf.init_scope():
            return int(inner.numpy())
    read = tf.raw_ops.ReadVariableOp(
        resource=components(inner)[0].handle, dtype=inner.dtype
    )
    return int(np.asarray(read))
