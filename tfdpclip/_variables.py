"""The `tf.Variable` behind what a framework makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def unwrapped(variable: Any) -> Any:
    """The `tf.Variable` within a variable of Keras 3; anything else as it is.

    Graphs know variables by their own handles, types and names, which a wrapper hides.

    >>> variable = tf.Variable(1.0)
    >>> unwrapped(variable) is variable
    True
    """
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def all_unwrapped(variables: Iterable[Any]) -> list[tf.Variable]:
    """`unwrapped` of each."""
    return [unwrapped(variable) for variable in variables]
