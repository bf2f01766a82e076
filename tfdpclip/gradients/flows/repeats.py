"""Where a parameter is repeated for each example, on an axis behind others of size 1.

`tf.repeat(p, B, axis=0)`, of a p of shape `[1, T, d]`, is a Tile to `[1, B, T, d]` and
a Reshape to `[B, T, d]`: relative positions are given to every example so. What follows
keeps the copies apart, and so a variable behind p has met the batch at the Tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, Flow
from tfdpclip.gradients.flows.sizes import counted_rows


def repeated(
    op: tf.Operation,
    output: tf.Tensor,
    length: int | None,
    rows_per_example: int,
    flow_of: Callable[[tf.Tensor], Flow],
    trained: bool,
) -> Flow | None:
    """The flow of copies of a parameter, one for each row of the data.

    Args:
      op: what a parameter goes into, beside public numbers or sizes.
      output: its output.
      length: how many rows the data have, if that is static. Then it is a guess, which
        is tested when the step runs, that as many copies are one for each.
      rows_per_example: how many rows belong to one example.
      flow_of: the flow of a tensor.
      trained: whether the parameter is: of others nothing is guessed.

    Returns:
      None if there are no such copies, or their axis is the first.
    """
    if op.type != "Tile" or not output.shape.rank:
        return None
    before, after = op.inputs[0].shape.as_list(), output.shape.as_list()
    axis = next((i for i, size in enumerate(after) if size != 1), 0)
    if axis == 0 or before[axis] != 1 or None in after[axis + 1 :]:
        return None
    if after[axis] is None:
        like = counted_rows(op, flow_of, axis)
        if like is None or like.minor:
            return None
        rows = like.rows
    elif trained and after[axis] == length and _come_first(output):
        rows = rows_per_example
    else:
        return None
    entries = rows * math.prod(after[axis + 1 :])
    return Flow(DATA, (axis,), rows, entries=entries, made=True)


def _come_first(copies: tf.Tensor) -> bool:
    """Whether the copies are what is counted on axis 0 next, as in `tf.repeat`."""
    after = [size for size in copies.shape.as_list() if size != 1]
    return bool(copies.consumers()) and all(
        op.type == "Reshape" and op.outputs[0].shape[:1] == after[:1]
        for op in copies.consumers()
    )
