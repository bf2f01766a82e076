"""Constants such as shapes and axes, made once in each graph.

Python makes each constant as one or several ops: in a step with checks, a third of all
ops were constants, most of them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import tensorflow as tf

from tfdpclip._object_notes import notes_of


def once(key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns `make()`, called once in each graph for each key.

    Args:
      key: identifies the tensor by the values that it is made from, and by `ref()` of
        tensors.
      make: makes the tensor, outside of control dependencies, since all users share it.
    """
    if tf.executing_eagerly():
        return make()
    made = notes_of(tf.compat.v1.get_default_graph()).constants
    if key not in made:
        with tf.control_dependencies(None):
            made[key] = make()
    return made[key]


def vector(*numbers: int | tf.Tensor) -> tf.Tensor:
    """Whole numbers, and scalar int32 tensors among them, as a vector.

    >>> vector(2, 3).numpy().tolist()
    [2, 3]
    """
    if not any(isinstance(number, tf.Tensor) for number in numbers):
        values = tuple(map(int, numbers))
        shape = [len(values)]
        return once(("vector", values), lambda: tf.constant(values, tf.int32, shape))
    key = tuple(n.ref() if isinstance(n, tf.Tensor) else int(n) for n in numbers)
    return once(("vector", key), lambda: tf.stack([*numbers]))
