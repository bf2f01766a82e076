"""Reads which axes of its input a `StridedSlice` keeps, and where."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class SliceAxis(NamedTuple):
    """An axis of the input or of the output of a `StridedSlice`, or of both.

    Attributes:
      entry: the entry of begin, end and strides for the axis; None if there is none.
      source: the number of the axis in the input; None for a new axis.
      target: the number of the axis in the output; None for a dropped axis.
    """

    entry: int | None
    source: int | None
    target: int | None


def slice_axes(op: tf.Operation) -> list[SliceAxis] | None:
    """The axes of a `StridedSlice`, in order; None if the static shapes are unknown."""
    rank, count = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or count is None:
        return None
    new, dropped, rest = (
        op.get_attr(f"{name}_mask") for name in ("new_axis", "shrink_axis", "ellipsis")
    )
    listed = sum(not (new | rest) >> entry & 1 for entry in range(count))
    axes: list[SliceAxis] = []
    source = target = 0
    for entry in (*range(count), None):
        if entry is None or rest >> entry & 1:
            # The axes behind the last entry are whole, as are those of an ellipsis.
            whole = rank - source if entry is None else rank - listed
            axes += [SliceAxis(None, source + i, target + i) for i in range(whole)]
            source, target = source + whole, target + whole
        elif new >> entry & 1:
            axes.append(SliceAxis(entry, None, target))
            target += 1
        elif dropped >> entry & 1:
            axes.append(SliceAxis(entry, source, None))
            source += 1
        else:
            axes.append(SliceAxis(entry, source, target))
            source, target = source + 1, target + 1
    return axes


def axes_cut(op: tf.Operation, count: int) -> list[int | None]:
    """The input axis for each entry of a slice's begin; None for a new axis.

    Args:
      op: a `StridedSlice` or `Slice`.
      count: the number of entries of begin.
    """
    if op.type != "StridedSlice":
        return list(range(count))
    sources = {axis.entry: axis.source for axis in slice_axes(op) or ()}
    return [sources.get(entry) for entry in range(count)]
