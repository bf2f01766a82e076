"""Functions of whole batches, which must keep a row for each record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.sampling import record_map, row_weights


def on_elements(function: Callable[..., Any]) -> Callable:
    """The function of elements that applies `function` to their batches."""

    def on_element(*element):
        parts, weight = record_map.parts_of(element), element[-1]
        x, y = apply_to_batch(function, parts, weight)
        return x, y, row_weights.refitted(weight, y)

    return on_element


def apply_to_batch(
    function: Callable[..., Any], parts: tuple, weight: Any
) -> tuple[Any, Any]:
    """Calls `function` with the batch of an element, and returns (x, y).

    Args:
      function: of x and y, or of x.
      parts: those.
      weight: a row for each of theirs.

    Raises:
      ValueError: if it returns another number of rows, or of parts.
    """
    name = record_map.name_of(function)
    weight = tf.nest.flatten(weight)[0]
    rows = weight.shape[0]
    named = "rows" if rows is None else f"{rows} rows"

    def same_rows(part):
        part = tf.convert_to_tensor(part)
        static = None if part.shape.rank is None else part.shape[:1].as_list()
        if rows and static is not None and static not in ([rows], [None]):
            raise ValueError(
                f"map_batches: {name} returns a tensor of shape {part.shape}; it "
                f"must keep the batch's {named}, one for each record."
            )
        message = f"map_batches: {name} must keep the batch's {named}."
        wanted = tf.shape(weight)[0]
        check = tf.debugging.assert_equal(tf.shape(part)[0], wanted, message)
        with tf.control_dependencies([check]):
            part = tf.identity(part)
        return tf.ensure_shape(part, [rows, *(part.shape[1:] or [])])

    result = _tf_private.converted_by_autograph(function)(*parts)
    x, y = record_map.as_parts("map_batches", name, result)
    y = None if y is None else tf.nest.map_structure(same_rows, y)
    return tf.nest.map_structure(same_rows, x), y
