"""Indices that name, in each row, the row itself.

Row i of `tf.stack([tf.range(batch), columns], 1)` names a place within row i. An op
that reads such places, writes to them, or sums by such row numbers, stays within each
row: `tf.gather_nd`, `tf.scatter_nd`, `tf.math.unsorted_segment_sum`. The row numbers
must be seen in the graph: a `Range` from 0, and ops that repeat row numbers along
further axes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpclip.gradients.flows.flow import Flow
from tfdpclip.gradients.flows.slices import WHOLE, read_slice
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.known import (
    EXACT,
    counts_up,
    known_value,
    static_number,
    takes_every_row,
)

#: The function from a tensor to its flow; None where flows are not known yet.
FlowOf = Callable[[tf.Tensor], Flow] | None

#: The number of the input that is the indices, or the segment numbers.
_INDICES = {
    "GatherNd": 1,
    **dict.fromkeys(ops.SCATTERS, 1),
    "ScatterNd": 0,
    **dict.fromkeys(ops.SEGMENT_SUMS | ops.UNSORTED_SEGMENTS, 1),
}
#: By type of elementwise op: the number that leaves the second operand as it is.
_NEUTRAL = {"Mul": 1, "Add": 0, "AddV2": 0}


def row_choice(
    op: tf.Operation, flow_of: FlowOf = None
) -> tuple[int, list[tf.Tensor]] | None:
    """The input by which an op stays, for row i, within row i of its other inputs.

    Returns:
      The number of the input, and the further columns of its indices; None if the rows
      are not known to be the rows themselves.
    """
    if op.type == "GatherV2":
        return (1, []) if takes_every_row(op) else None
    place = _INDICES.get(op.type)
    if place is None:
        return None
    if "Segment" in op.type:
        return None if named_rows(op.inputs[place], flow_of) is None else (place, [])
    columns = further_columns(op.inputs[place], flow_of)
    return None if columns is None else (place, columns)


def further_columns(
    indices: tf.Tensor, flow_of: FlowOf = None
) -> list[tf.Tensor] | None:
    """The tensors of which indices `[N, ..., K]` have the columns after column 0.

    Returns:
      None if column 0 is not known to hold i in all entries of row i. No tensors if
      all rows of a constant have the same further columns; else the constant.
    """
    op, rank = indices.op, indices.shape.rank
    if not rank or rank < 2 or indices.dtype not in EXACT:
        return None
    if op.type in ("Identity", "Cast"):
        return further_columns(op.inputs[0], flow_of)
    parts: list[tf.Tensor] = []
    if op.type == "Pack" and op.get_attr("axis") % rank == rank - 1:
        parts = list(op.inputs)
    elif op.type == "ConcatV2" and op.inputs[0].shape[-1] == 1:
        if static_number(op.inputs[-1]) in (-1, rank - 1):
            parts = list(op.inputs[:-1])
    elif indices.shape[-1] == 1:
        parts = [indices]
    if parts:
        return parts[1:] if numbers_rows(parts[0], flow_of) else None
    value = tf.get_static_value(indices)
    if value is None or not _counts(value[..., 0]):
        return None
    return [] if (value[..., 1:] == value[:1, ..., 1:]).all() else [indices]


def named_rows(numbers: tf.Tensor, flow_of: FlowOf = None) -> tf.Tensor | None:
    """The tensor whose entries are listed, in order, each by the number of its row.

    Row numbers `[N, T]` may be reshaped to a list `[N T]`, as by `tf.repeat`.

    Returns:
      The tensor with a row for each number; None if it is not known.
    """
    if numbers_rows(numbers, flow_of):
        return numbers
    if numbers.dtype not in EXACT or not numbers.op.inputs:
        return None
    source = numbers.op.inputs[0]
    if numbers.op.type in ("Identity", "Cast"):
        return named_rows(source, flow_of)
    listed = numbers.op.type == "Reshape" and numbers.shape.rank == 1
    return source if listed and numbers_rows(source, flow_of) else None


def numbers_rows(tensor: tf.Tensor, flow_of: FlowOf = None) -> bool:
    """Whether all entries in row i of a tensor, on axis 0, are i, for every row."""
    op, rank = tensor.op, tensor.shape.rank
    if not rank or tensor.dtype not in EXACT:
        return False
    if counts_up(tensor):
        return True
    if op.type == "Const":
        return _counts(tf.get_static_value(tensor))
    if not op.inputs or not op.inputs[0].shape.rank:
        return False
    source = op.inputs[0]
    if op.type in ("Identity", "Cast"):
        kept = True
    elif op.type == "ExpandDims":
        kept = static_number(op.inputs[1]) not in (None, 0, -rank)
    elif op.type == "Reshape":
        kept = all(t.shape[1:].num_elements() == 1 for t in (source, tensor))
    elif op.type == "StridedSlice":
        parts = read_slice(op)
        kept = parts is not None and parts[0].what == WHOLE and parts[0].axis == 0
    elif op.type == "Tile":
        times = known_value(op.inputs[1])
        kept = times is not None and times[0] == 1
    elif op.type == "BroadcastTo":
        kept = _same_rows(source, tensor, flow_of)
    elif op.type in _NEUTRAL:
        return any(
            _is_all(other, _NEUTRAL[op.type])
            and _same_rows(numbers, tensor, flow_of)
            and numbers_rows(numbers, flow_of)
            for numbers, other in (op.inputs, reversed(op.inputs))
        )
    else:
        return False
    return kept and numbers_rows(source, flow_of)


def _counts(value: np.ndarray) -> bool:
    """Whether all entries in row i of an array are i, for every row."""
    rows = np.arange(len(value)).reshape([-1] + [1] * (value.ndim - 1))
    return bool(value.size) and bool((value == rows).all())


def _same_rows(before: tf.Tensor, after: tf.Tensor, flow_of: FlowOf) -> bool:
    """Whether broadcasting adds no axis in front, and repeats no row."""
    if not before.shape.rank or before.shape.rank != after.shape.rank:
        return False
    if before.shape[0] is not None or after.shape[0] is not None:
        return before.shape[0] == after.shape[0]
    if flow_of is None:
        return False
    old, new = flow_of(before), flow_of(after)
    return old.leads and new.leads and bool(old.rows) and old.layout == new.layout


def _is_all(tensor: tf.Tensor, number: int) -> bool:
    """Whether all entries of a tensor are a number, 0 or 1."""
    if tensor.op.type in ops.VALUELESS:
        return (tensor.op.type == "OnesLike") == bool(number)
    filled = tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor
    value = tf.get_static_value(filled)
    return value is not None and bool(np.all(value == number))
