"""Flows of parameters that are repeated for each example, on an axis after axis 0.

`tf.repeat(p, B, axis=0)`, with p of shape `[1, T, d]`, is a `Tile` to `[1, B, T, d]`
and a `Reshape` to `[B, T, d]`; layers repeat relative positions so. The flow of the
`Tile` counts examples on axis 1, so the analysis can follow the copies of each example.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, Flow
from tfdpclip.gradients.flows.sizes import counted_rows


def repeated_flow(
    op: tf.Operation,
    output: tf.Tensor,
    length: int | None,
    rows_per_example: int,
    flow_of: Callable[[tf.Tensor], Flow],
    trained: bool,
) -> Flow | None:
    """The flow of copies of a parameter, with a copy for each row of the data.

    Args:
      op: an op on a parameter and public numbers or sizes.
      output: the output of `op`.
      length: the static number of rows of the data, or None. If the number of copies
        equals `length`, this function guesses that each copy is for a row of the data;
        the guess is tested when the step runs.
      rows_per_example: the number of rows of the data for each example.
      flow_of: the function from a tensor to its flow.
      trained: whether the parameter is trained: only then is the number of copies
        compared with `length`.

    Returns:
      None if `op` makes no copies for the rows of the data, or makes them on axis 0.
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
    return Flow(DATA, (axis,), rows, made=True)


def _come_first(copies: tf.Tensor) -> bool:
    """Whether the next op moves the axis of the copies to axis 0, as in `tf.repeat`."""
    after = [size for size in copies.shape.as_list() if size != 1]
    return bool(copies.consumers()) and all(
        op.type == "Reshape" and op.outputs[0].shape[:1] == after[:1]
        for op in copies.consumers()
    )
