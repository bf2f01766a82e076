"""Flows of ops that move entries: reshapes, transposes, slices, concatenations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, Flow, common_layout
from tfdpclip.gradients.flows.sizes import length_of
from tfdpclip.gradients.flows.slices import REVERSED, WHOLE, read_slice
from tfdpclip.gradients.graph.known import (
    CONSTANT_BY_PLACE,
    is_one_row,
    known_order,
    known_shape,
    known_value,
    rows_alike,
    starts_with_rows,
    static_number,
)


def _reshape(op, output, inputs, batch_size) -> Flow:
    flow, source = inputs[0], op.inputs[0]
    if not flow.axes:
        return Flow(DATA, () if flow.kind == DATA and flow.axes == () else None)
    if _keeps_shape(op, output):
        return flow
    if flow.axes != (0,):
        return _reshape_inner(op, output, flow)
    if source.shape.rank == 1 and is_one_row(op.inputs[1], source):
        return Flow(DATA, (1,), entries=_entries(flow, 1))
    shape = known_shape(output) if output.shape.rank else None
    before = _tail(source.shape.as_list() if source.shape.rank else None)
    after = _tail(shape)
    rank = output.shape.rank
    if flow.minor and flow.rows and rank and rank > 1:
        # [T B, ...] -> [T, B, ...]
        if shape[0] == flow.rows and _tail(shape[1:]) == before is not None:
            return Flow(DATA, (1,), 1)
    if rank and flow.rows is not None and batch_size:
        lead = output.shape[0]
        whole = lead is not None and lead % batch_size == 0 and lead > 0
        if whole and (not flow.minor or lead == flow.rows * batch_size):
            return Flow(DATA, (0,), lead // batch_size, flow.minor)
    if before is not None and after and flow.rows is not None:
        if (flow.rows * before) % after == 0:
            rows = flow.rows * before // after
            if not flow.minor or rows == flow.rows:
                return Flow(DATA, (0,), rows, flow.minor)
    if rank and output.shape[0] == 1 and rank > 1:
        # [N, ...] -> [1, N', ...]: layer normalisation reshapes so.
        inner = _tail(shape[1:])
        if before is not None and inner and flow.rows is not None:
            if (flow.rows * before) % inner == 0:
                own = flow.rows * before // inner
                rows = own if not flow.minor else None
                return Flow(DATA, (1,), rows, entries=_entries(flow, before))
        if before is None and _divides(flow, source, inner):
            return Flow(DATA, (1,), even=True)
        return Flow(DATA, None)
    if rank and output.shape[0] is None and not flow.minor:
        return Flow(DATA, (0,), None, even=_divides(flow, source, after))
    return Flow(DATA, None)


def _keeps_shape(op: tf.Operation, output: tf.Tensor) -> bool:
    """Whether the output of a `Reshape` has the shape of the input."""
    source = op.inputs[0]
    if source.shape.rank is None or source.shape.rank != output.shape.rank:
        return False
    told = [
        size is not None and size == after
        for size, after in zip(source.shape, known_shape(output), strict=True)
    ]
    # A single unknown length follows from the number of entries.
    told = [
        known or length_of(op.inputs[1], axis) == (source.ref(), axis)
        for axis, known in enumerate(told)
    ]
    return told.count(False) <= 1


def _divides(flow: Flow, source: tf.Tensor, tail: int | None) -> bool:
    """Whether, in rows of `tail` numbers, no row has numbers of two examples.

    The product of the known lengths of an example in `source` must be a multiple of
    `tail`; unknown lengths only multiply the product.
    """
    if not flow.regular or not tail or source.shape.rank is None:
        return False
    known = math.prod(size for size in source.shape.as_list()[1:] if size is not None)
    return (flow.rows or 1) * known % tail == 0


def by_counted_rows(source: tf.Tensor, flow: Flow, like: Flow | None) -> Flow | None:
    """The flow of a `Reshape` to the number of rows of a second tensor.

    Args:
      source: the tensor that is reshaped.
      flow: the flow of `source`.
      like: the flow of a tensor with as many rows as the output; None if unknown.

    Returns:
      None if `like` is None, or if the entries of an example are not consecutive in
      `source`.
    """
    if like is None or flow.kind != DATA or flow.minor or flow.coupled is not None:
        return None
    if not flow.regular or (flow.axes != (0,) and not _is_single(flow, source)):
        return None
    return Flow(DATA, (0,), like.rows)


def by_counted_examples(
    op: tf.Operation, output: tf.Tensor, flow: Flow, like: Flow | None
) -> Flow | None:
    """The flow of a `Reshape` from `[rows B, ...]` to `[rows, B, ...]`.

    Args:
      op: the `Reshape`.
      output: the output of `op`.
      flow: the flow of the input; axis 0 runs through the examples fastest.
      like: the flow of a tensor as long as axis 1 of the output; None if unknown.

    Returns:
      None if the output does not have the examples on axis 1.
    """
    if like is None or like.rows != 1 or not flow.leads or not output.shape.rank:
        return None
    before, after = _tail(op.inputs[0].shape.as_list()), _tail(known_shape(output)[1:])
    return Flow(DATA, (1,), 1) if before == after and before else None


def _is_single(flow: Flow, source: tf.Tensor) -> bool:
    """Whether the examples are on axis 1, and axis 0 has length 1."""
    return flow.axes == (1,) and source.shape.rank is not None and source.shape[0] == 1


def _reshape_inner(op, output, flow) -> Flow:
    """The flow of a `Reshape` of a tensor with the examples not on axis 0.

    Layer normalisation reshapes `[1, N, D, 1]` to `[N, ...]`; a Dense layer on all time
    steps reshapes `[T, B, ...]` to `[T B, ...]`.
    """
    source = op.inputs[0]
    if flow.axes == (1,) and flow.rows == 1 and not flow.minor and output.shape.rank:
        steps, before = source.shape[0], _tail(source.shape.as_list()[1:])
        if steps and _tail(known_shape(output)) == before is not None:
            return Flow(DATA, (0,), steps, minor=steps > 1)
    if len(flow.axes) == 1 and output.shape.rank:
        axis = flow.axes[0]
        before, after = source.shape.as_list(), known_shape(output)
        tail = _tail(before[axis:])
        for place in _places_behind(before[:axis], after):
            if tail and tail == _tail(after[place:]):
                # The numbers of entries before and after the batch axis stay the same.
                return dataclasses.replace(flow.on((place,)), entries=flow.entries)
        if before[:axis] == after[:axis] and None not in before[:axis]:
            tails = tail, _tail(after[axis:]) if len(after) > axis else None
            own = flow.entries or _entries(flow, tails[0])
            if own and tails[1] and own % tails[1] == 0:
                return Flow(DATA, flow.axes, own // tails[1], entries=own)
    single = source.shape[0] == 1 or (source.shape[0] is None and flow.entries)
    if flow.axes != (1,) or not single or not output.shape.rank:
        return Flow(DATA, None)
    after = _tail(known_shape(output))
    if flow.entries is None or not after or flow.entries % after:
        return Flow(DATA, (0,), None)
    return Flow(DATA, (0,), flow.entries // after)


def _places_behind(before: list, after: list) -> Iterator[int]:
    """The axes of `after` that follow as many entries as the lengths `before` have."""
    if None in before:
        return
    wanted, found = math.prod(before), 1
    for place, size in enumerate(after):
        if found == wanted:
            yield place
        if size is None:
            return
        found *= size


def _entries(flow: Flow, tail: int | None) -> int | None:
    """The number of entries of an example if they are consecutive; else None."""
    if flow.rows is None or tail is None or flow.minor:
        return None
    return flow.rows * tail


def _tail(shape: list | None) -> int | None:
    """The product of the lengths after axis 0; None if unknown."""
    if not shape or None in shape[1:]:
        return None
    return math.prod(shape[1:])


def _transpose(op, output, inputs, batch_size) -> Flow:
    flow, perm = inputs[0], known_order(op)
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
    if inputs[0].kind == PUBLIC and starts_with_rows(output):
        # Row numbers, which only ops that choose rows may read.
        result, parts = dataclasses.replace(result, placed=True), parts[1:]
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
    if flow.leads and flow.minor and flow.rows and flow.rows % count == 0:
        if tf.get_static_value(op.inputs[0]) in (0, -output.shape.rank):
            # The pieces are whole batches that were concatenated along axis 0.
            rows = flow.rows // count
            return Flow(DATA, (0,), rows, minor=rows > 1)
    return _along(0, lambda inputs: inputs[1:])(op, output, inputs, batch_size)


def _strided_slice(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    parts = read_slice(op) if flow.kind == DATA else None
    if parts is None or flow.axes is None:
        return Flow(DATA, None)
    found = [parts[axis] for axis in flow.axes]
    if any(part.what == REVERSED for part in found):
        return Flow(DATA, None, coupled=op)
    if any(part.what != WHOLE for part in found):
        return Flow(DATA, None)
    axes = tuple(part.axis for part in found)
    return flow.on(axes)


def _slice(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    begin, size = known_value(op.inputs[1]), known_value(op.inputs[2])
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
    flow, block = inputs[0], tf.get_static_value(op.inputs[1])
    if flow.axes != (0,) or block is None or flow.rows != 1:
        return Flow(DATA, None)
    cells = math.prod(int(b) for b in block)
    return Flow(DATA, (0,), cells, minor=cells > 1)


def _batch_to_space(op, output, inputs, batch_size) -> Flow:
    flow, block = inputs[0], tf.get_static_value(op.inputs[1])
    if flow.axes != (0,) or block is None:
        return Flow(DATA, None)
    cells = math.prod(int(b) for b in block)
    if flow.rows != cells or (cells > 1 and not flow.minor):
        return Flow(DATA, None)
    return Flow(DATA, (0,), 1)


def _broadcast(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if flow.kind != DATA:
        return Flow(DATA, None)
    shift = output.shape.rank - op.inputs[0].shape.rank
    rows = flow.rows if shift == 0 else None
    if op.type == "Tile":
        # `Tile` repeats the whole batch; the copies of an example are not consecutive.
        times = known_value(op.inputs[1])
        if times is None or any(times[axis] != 1 for axis in flow.axes):
            rows = None
    else:
        before, after = op.inputs[0].shape, output.shape
        if any(before[a] is None and after[a + shift] is not None for a in flow.axes):
            rows = None  # A batch of a single example would become many copies.
    return Flow(DATA, tuple(a + shift for a in flow.axes), rows, flow.minor)


def _batches(tensor: tf.Tensor, flow: Flow, batch_size: int | None) -> int | None:
    """The number of whole batches that follow each other along axis 0, or None."""
    if flow.leads:
        return flow.rows if flow.minor or flow.rows == 1 else None
    if flow.kind == DATA or not batch_size or not tensor.shape.rank:
        return None
    length = tensor.shape[0]
    return None if length is None or length % batch_size else length // batch_size


def _concat(op, output, inputs, batch_size) -> Flow:
    if tf.get_static_value(op.inputs[-1]) in (0, -output.shape.rank):
        # The inputs are whole batches, concatenated along axis 0.
        pairs = zip(op.inputs, inputs[:-1], strict=False)
        counts = [_batches(tensor, flow, batch_size) for tensor, flow in pairs]
        if all(counts):
            rows = sum(count for count in counts if count)
            joined = zip(op.inputs, inputs[:-1], strict=False)
            alike = all(
                f.kind == DATA or rows_alike(t, -t.shape.rank) for t, f in joined
            )
            believed = "" if alike else CONSTANT_BY_PLACE
            return Flow(DATA, (0,), rows, minor=rows > 1, obstacle=believed)
    return _along(-1, lambda flows: flows[:-1])(op, output, inputs, batch_size)


RULES: dict[str, Callable] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ConjugateTranspose": _transpose,
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
