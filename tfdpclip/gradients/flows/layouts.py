"""Flows of ops that move entries: reshapes, transposes, slices, concatenations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, Flow, common_layout
from tfdpclip.gradients.flows.sizes import length_of
from tfdpclip.gradients.graph.known import (
    CONSTANT_BY_PLACE,
    rows_alike,
    static_number,
    static_order,
    static_shape,
    static_value,
)
from tfdpclip.gradients.graph.slices import SliceAxis, slice_axes


def _reshape(op, output, inputs, batch_size) -> Flow:
    """The flow of a `Reshape` for which `regrouped` finds no rows."""
    flow = inputs[0]
    if not flow.axes:
        return Flow(DATA, () if flow.kind == DATA and flow.axes == () else None)
    if keeps_shape(op, output):
        return flow
    counts = flow.leads and not flow.minor and output.shape.rank
    return Flow(DATA, (0,) if counts and output.shape[0] is None else None)


def keeps_shape(op: tf.Operation, output: tf.Tensor) -> bool:
    """Whether the output of a `Reshape` has the shape of the input."""
    source = op.inputs[0]
    if source.shape.rank is None or source.shape.rank != output.shape.rank:
        return False
    # A single unknown length follows from the number of entries.
    after = static_shape(output)
    told = [_keeps_length(op, axis, after) for axis in range(len(after))]
    return told.count(False) <= 1


def _keeps_length(op: tf.Operation, axis: int, after: list) -> bool:
    """Whether an axis of the output of a `Reshape` is as long as in the input."""
    source = op.inputs[0]
    if axis >= min(source.shape.rank, len(after)):
        return False
    same = source.shape[axis] is not None and source.shape[axis] == after[axis]
    return same or length_of(op.inputs[1], axis) == (source.ref(), axis)


def regrouped(
    op: tf.Operation,
    output: tf.Tensor,
    flow: Flow,
    batch_size: int | None,
    rows_on: Callable[[int], int | None],
) -> Flow | None:
    """The flow of a `Reshape` of a tensor with the examples on a single axis.

    Let `before` be the number of times that the tensor's entries, in their order, run
    through all examples, and `entries` the number of consecutive entries of an example
    each time. An axis of the output counts examples if the lengths ahead of the axis
    have a product that divides `before`, and the lengths behind have a product that
    divides `entries`. The quotients are the repeats on the axis, and the rows of each
    repeat. If the axis is known to have `rows` rows for each example, the rows of each
    repeat follow from `rows`, so the lengths behind the axis need not be known.

    Args:
      op: the `Reshape`.
      output: the output of `op`.
      flow: the flow of the input.
      batch_size: the static number of examples, or None.
      rows_on: the function from an axis of the output to the number of rows of each
        example, if the graph computes the length from the number of examples.

    Returns:
      None if no axis of the output is known to count examples.
    """
    source = op.inputs[0]
    if len(flow.axes or ()) != 1 or not source.shape.rank or not output.shape.rank:
        return None
    if not flow.rows and not flow.even:
        return None
    (axis,), shape, after = flow.axes, source.shape.as_list(), static_shape(output)
    leading = 0  # Axes ahead of the examples that keep their lengths.
    while leading < axis and _keeps_length(op, leading, after):
        leading += 1
    ahead = _product(shape[leading:axis])
    if not ahead:
        return None
    before = ahead * flow.repeats
    # If a length is unknown, `entries` is a divisor of the number of entries.
    exact = bool(flow.rows) and None not in shape[axis + 1 :]
    entries = math.prod(n for n in shape[axis + 1 :] if n is not None)
    entries *= (flow.rows or 1) // flow.repeats
    after = _with_rest(after, leading, before * entries, rows_on) if exact else after
    for place in range(leading, len(after)):
        first = _product(after[leading:place])
        if not first or before % first:
            return None
        repeats, rest = before // first, _product(after[place + 1 :])
        rows = rows_on(place)
        if rows is None and batch_size and after[place]:
            rows, more = divmod(after[place], batch_size)
            rows = None if more else rows
        if rest and entries % rest == 0:
            if exact:
                return Flow(DATA, (place,), repeats * (entries // rest), repeats)
            if rows is None and repeats == 1:
                return Flow(DATA, (place,), even=True)
        if rows and rows % repeats == 0:
            return Flow(DATA, (place,), rows, repeats)
    return None


def _with_rest(after: list, leading: int, entries: int, rows_on: Callable) -> list:
    """The lengths after a `Reshape`, with the length that the shape gives as -1.

    Args:
      after: the known lengths.
      leading: the number of axes that keep their lengths.
      entries: the number of entries of an example in the remaining axes.
      rows_on: see `regrouped`.
    """
    unknown = [axis for axis in range(leading, len(after)) if after[axis] is None]
    if len(unknown) != 2:
        return after
    product = math.prod(n for n in after[leading:] if n is not None)
    for counted, rest in (unknown, unknown[::-1]):
        rows = rows_on(counted)
        if rows and product and entries % (rows * product) == 0:
            length = entries // (rows * product)
            return [*after[:rest], length, *after[rest + 1 :]]
    return after


def _product(lengths: list) -> int | None:
    """The product of lengths; None if a length is unknown."""
    return None if None in lengths else math.prod(lengths)


def _transpose(op, output, inputs, batch_size) -> Flow:
    flow, perm = inputs[0], static_order(op)
    if perm is None:
        return Flow(DATA, None)
    axes = tuple(sorted(perm.index(a) for a in flow.axes))
    return flow.on(axes)


def _expand_dims(op, output, inputs, batch_size) -> Flow:
    flow, axis = inputs[0], static_number(op.inputs[1])
    if axis is None:
        return Flow(DATA, None)
    axis = int(axis) % output.shape.rank
    axes = tuple(a + 1 if a >= axis else a for a in flow.axes)
    return flow.on(axes)


def _squeeze(op, output, inputs, batch_size) -> Flow:
    flow, rank = inputs[0], op.inputs[0].shape.rank
    dims = [d % rank for d in op.get_attr("squeeze_dims")]
    if not dims:
        shape = op.inputs[0].shape.as_list()
        if None in shape[1:]:
            return Flow(DATA, None)
        dims = [i for i, d in enumerate(shape) if d == 1]
    if set(dims) & set(flow.axes):
        return Flow(DATA, None)
    axes = tuple(a - sum(1 for d in dims if d < a) for a in flow.axes)
    return flow.on(axes)


def _pack(op, output, inputs, batch_size) -> Flow:
    axis = op.get_attr("axis") % output.shape.rank
    flows = [f for f in inputs if f.kind == DATA]
    layout = common_layout(flows)
    if layout is None or any(f.axes != flows[0].axes for f in flows):
        return Flow(DATA, None)
    axes = tuple(a + 1 if a >= axis else a for a in flows[0].axes)
    result = flows[0].laid_out(layout).on(axes)
    parts = list(zip(op.inputs, inputs, strict=True))
    return _with_public_parts(result, flows[0].axes, parts)


def _with_public_parts(result: Flow, axes: tuple[int, ...], parts: Iterable) -> Flow:
    """The flow of joined parts: public parts must be the same for all examples.

    Args:
      result: the flow of the joined tensor.
      axes: the axes of a part that count examples.
      parts: the parts, with their flows.
    """
    alike = all(
        rows_alike(part, axis - part.shape.rank)
        for part, flow in parts
        for axis in axes
        if flow.kind != DATA
    )
    return result if alike else dataclasses.replace(result, obstacle=CONSTANT_BY_PLACE)


def _unpack(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    if axis in flow.axes:
        return Flow(DATA, None)
    axes = tuple(a - 1 if a > axis else a for a in flow.axes)
    return flow.on(axes)


def _along(axis_input: int, data_inputs: Callable) -> Callable:
    """The rule for ops that cut or join along a constant axis.

    Args:
      axis_input: the number of the input that is the axis.
      data_inputs: selects the flows of the inputs that may hold data.
    """

    def transfer(op, output, inputs, batch_size):
        axis = tf.get_static_value(op.inputs[axis_input])
        if axis is None:
            return Flow(DATA, None)
        axis = int(axis.reshape(-1)[0]) % output.shape.rank
        flows = [f for f in data_inputs(inputs) if f.kind == DATA]
        if not flows:
            return Flow(DATA, None)
        layout = common_layout(flows)
        same = layout is not None and all(f.axes == flows[0].axes for f in flows)
        if not same or axis in flows[0].axes:
            return Flow(DATA, None)
        result = flows[0].laid_out(layout)
        if op.type != "ConcatV2":
            return result
        parts = zip(op.inputs, inputs[:-1], strict=False)
        return _with_public_parts(result, result.axes, parts)

    return transfer


def _split(op, output, inputs, batch_size) -> Flow:
    flow, count = inputs[1], op.get_attr("num_split")
    axis = static_number(op.inputs[0])
    if axis is not None and flow.axes == (axis % output.shape.rank,):
        if flow.rows and flow.repeats % count == 0:
            # Each piece has whole batches.
            return Flow(DATA, flow.axes, flow.rows // count, flow.repeats // count)
    return _along(0, lambda inputs: inputs[1:])(op, output, inputs, batch_size)


def _strided_slice(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    axes = slice_axes(op) if flow.kind == DATA else None
    if axes is None or flow.axes is None:
        return Flow(DATA, None)
    counted = [axis for axis in axes if axis.source in flow.axes]
    bounds = [static_value(tensor) for tensor in op.inputs[1:]]
    targets = []
    for axis in counted:
        begin, end, step = (
            None if b is None or axis.entry is None else b[axis.entry] for b in bounds
        )
        if axis.target is not None and step is not None and step < 0:
            return Flow(DATA, None, coupled=op)
        if axis.target is not None and _is_whole(op, axis, begin, end, step):
            targets.append(axis.target)
    return flow.on(tuple(targets)) if len(targets) == len(counted) else Flow(DATA, None)


def _is_whole(op: tf.Operation, axis: SliceAxis, begin, end, step) -> bool:
    """Whether a `StridedSlice` keeps all entries of an axis."""
    if axis.entry is None:
        return True
    begins = op.get_attr("begin_mask") >> axis.entry & 1 or begin == 0
    ends = op.get_attr("end_mask") >> axis.entry & 1
    source = op.inputs[0]
    if end is None:
        ends |= length_of(op.inputs[2], axis.entry) == (source.ref(), axis.source)
    elif source.shape[axis.source] is not None:
        ends |= end >= source.shape[axis.source]
    return bool(step == 1 and begins and ends)


def _slice(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    begin, size = static_value(op.inputs[1]), static_value(op.inputs[2])
    if flow.kind != DATA or not flow.axes:
        return Flow(DATA, flow.axes if flow.kind == DATA else None)
    if begin is None or size is None:
        return Flow(DATA, None)
    whole = all(begin[axis] == 0 and _is_length(op, axis, size) for axis in flow.axes)
    return flow if whole else Flow(DATA, None)


def _is_length(op: tf.Operation, axis: int, sizes) -> bool:
    """Whether a `Slice` takes as many entries as the axis has."""
    source = op.inputs[0]
    if sizes[axis] is not None:
        return sizes[axis] in (-1, source.shape[axis])
    return length_of(op.inputs[2], axis) == (source.ref(), axis)


def _space_to_batch(op, output, inputs, batch_size) -> Flow:
    return _cells(op, inputs[0], lambda n, cells: n * cells)


def _batch_to_space(op, output, inputs, batch_size) -> Flow:
    return _cells(op, inputs[0], lambda n, cells: n // cells if n % cells == 0 else 0)


def _cells(op, flow: Flow, change: Callable[[int, int], int]) -> Flow:
    """The flow of a tensor with the whole batch for each cell of a block, in turn."""
    block = tf.get_static_value(op.inputs[1])
    if flow.axes != (0,) or block is None or not flow.rows:
        return Flow(DATA, None)
    repeats = change(flow.repeats, math.prod(int(b) for b in block))
    rows = flow.rows // flow.repeats * repeats
    return Flow(DATA, (0,), rows, repeats) if rows else Flow(DATA, None)


def _broadcast(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if flow.kind != DATA:
        return Flow(DATA, None)
    shift = output.shape.rank - op.inputs[0].shape.rank
    result = flow.on(tuple(axis + shift for axis in flow.axes))
    if op.type == "Tile":
        times = static_value(op.inputs[1])
        counts = [None if times is None else times[axis] for axis in flow.axes]
        if set(counts) <= {1}:
            return result
        if len(counts) > 1 or not flow.rows or not counts[0] or counts[0] < 0:
            return Flow(DATA, result.axes)
        # The whole batch is repeated; the copies of an example are not consecutive.
        count = int(counts[0])
        return Flow(DATA, result.axes, flow.rows * count, flow.repeats * count)
    before, after = op.inputs[0].shape, output.shape
    if any(before[a] is None and after[a + shift] is not None for a in flow.axes):
        # A batch of a single example would become many copies.
        return Flow(DATA, result.axes)
    return result


def _concat(op, output, inputs, batch_size) -> Flow:
    axis = static_number(op.inputs[-1])
    parts = list(zip(op.inputs, inputs[:-1], strict=False))
    batches = [flow for _, flow in parts if flow.kind == DATA]
    if axis is not None and batches:
        axis = int(axis) % output.shape.rank
        counts = [_whole_batches(t, flow, axis, batch_size) for t, flow in parts]
        rows_each = {flow.rows // flow.repeats for flow in batches if flow.rows}
        if (
            all(counts)
            and len(rows_each) == 1
            and (rows_each == {1} or len(batches) == len(parts))
        ):
            repeats = sum(count for count in counts if count)
            rows = repeats * rows_each.pop()
            alike = all(
                flow.kind == DATA or rows_alike(t, axis - t.shape.rank)
                for t, flow in parts
            )
            believed = "" if alike else CONSTANT_BY_PLACE
            return Flow(DATA, (axis,), rows, repeats, obstacle=believed)
    return _along(-1, lambda flows: flows[:-1])(op, output, inputs, batch_size)


def _whole_batches(tensor, flow: Flow, axis: int, batch_size: int | None) -> int | None:
    """The number of times that an axis runs through all examples; None if unknown."""
    if flow.kind == DATA:
        return flow.repeats if flow.axes == (axis,) and flow.rows else None
    length = tensor.shape[axis]
    if not batch_size or length is None or length % batch_size:
        return None
    return length // batch_size


RULES: dict[str, Callable] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Pack": _pack,
    "Unpack": _unpack,
    "Split": _split,
    "SplitV": _along(2, lambda inputs: inputs[:1]),
    "ConcatV2": _concat,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "SpaceToBatchND": _space_to_batch,
    "BatchToSpaceND": _batch_to_space,
    "BroadcastTo": _broadcast,
    "Tile": _broadcast,
}
