"""Shapes, axes and places, which many ops take: made once in each graph.

Each is an op, or several, that Python makes one by one: of a step that checks itself a
third of all ops were constants, and most of those the same few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import tensorflow as tf

# Where a graph has its own. Not a table beside it, which would keep it alive.
_ATTRIBUTE = "tfdpclip_constants"


def once(key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What `make` makes, once in each graph.

    Args:
      key: says what it is: by the values that it is made of, and `ref()` of tensors.
      make: is called outside of control dependencies, as others use it, too.
    """
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    made = getattr(graph, _ATTRIBUTE, None)
    if made is None:
        made = {}
        setattr(graph, _ATTRIBUTE, made)
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
