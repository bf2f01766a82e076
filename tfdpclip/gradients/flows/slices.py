"""Reads the effect of a `StridedSlice` on every axis of its input."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfdpclip.gradients.flows.sizes import length_of
from tfdpclip.gradients.graph.known import known_value

WHOLE, REVERSED, CUT, PLACE = "whole", "reversed", "cut", "place"


class Part(NamedTuple):
    """The part of an input axis that a slice keeps.

    Attributes:
      what: `WHOLE`, `CUT` (some entries), `REVERSED`, or `PLACE` (a single entry; the
        axis is dropped).
      axis: the number of the axis in the output; None if the axis is dropped.
      spec: the entry of begin, end and strides for this axis; None if there is none.
      one: the place of the only kept entry of a `CUT` axis, if it is known.
    """

    what: str
    axis: int | None
    spec: int | None = None
    one: int | None = None


def read_slice(op: tf.Operation) -> list[Part] | None:
    """A `Part` for each axis of the input; None if the static shapes are unknown."""
    rank, count = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or count is None:
        return None
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    bounds = [known_value(tensor) for tensor in op.inputs[1:]]
    listed = [
        i for i in range(count) if not (masks["ellipsis"] | masks["new_axis"]) >> i & 1
    ]
    parts: list[Part] = []
    place = 0
    for i in range(count):
        if masks["ellipsis"] >> i & 1:
            for _ in range(rank - len(listed)):
                parts.append(Part(WHOLE, place))
                place += 1
        elif masks["new_axis"] >> i & 1:
            place += 1
        elif masks["shrink_axis"] >> i & 1:
            parts.append(Part(PLACE, None, i))
        else:
            begin, end, step = (None if b is None else b[i] for b in bounds)
            axis = len(parts)
            length = op.inputs[0].shape[axis]
            if end is None:
                all_of_it = length_of(op.inputs[2], i) == (op.inputs[0].ref(), axis)
            else:
                all_of_it = length is not None and end >= length
            masks["end"] |= all_of_it << i
            parts.append(_part(masks, i, begin, end, step, place))
            place += 1
    while len(parts) < rank:
        parts.append(Part(WHOLE, place))
        place += 1
    return parts


def axes_cut(op: tf.Operation, count: int) -> list[int | None]:
    """The input axis for each entry of a slice's begin; None for a new axis.

    Args:
      op: a `StridedSlice` or `Slice`.
      count: the number of entries of begin.
    """
    if op.type != "StridedSlice":
        return list(range(count))
    new, ellipsis = op.get_attr("new_axis_mask"), op.get_attr("ellipsis_mask")
    axes: list[int | None] = []
    axis = 0
    for place in range(count):
        rest = sum(not new >> later & 1 for later in range(place + 1, count))
        if ellipsis >> place & 1:
            axis = op.inputs[0].shape.rank - rest
        if new >> place & 1 or ellipsis >> place & 1:
            axes.append(None)
            continue
        axes.append(axis)
        axis += 1
    return axes


def _part(masks, i, begin, end, step, place) -> Part:
    from_start, to_end = masks["begin"] >> i & 1, masks["end"] >> i & 1
    if step is not None and step < 0:
        return Part(REVERSED, place, i)
    if step != 1:
        return Part(CUT, place, i)
    begin = 0 if from_start else begin
    if begin == 0 and to_end:
        return Part(WHOLE, place, i)
    alone = begin == -1 and to_end
    alone = alone or (None not in (begin, end) and not to_end and end - begin == 1)
    return Part(CUT, place, i, int(begin) if alone else None)
