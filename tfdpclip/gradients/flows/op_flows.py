"""The table of ops: the flow of an output of each TensorFlow op from its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import choice, shown
from tfdpclip._registered import REGISTERED
from tfdpclip.gradients.flows import (
    contractions,
    layouts,
    mixing,
    sparse,
)
from tfdpclip.gradients.flows.flow import DATA, PUBLIC, Flow, common_layout
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.known import (
    CONSTANT_BY_PLACE,
    rows_alike,
    static_value,
    takes_every_row,
)


def transfer(op, output, inputs, batch_size, flow_of) -> Flow:
    """The flow of an output of an op with at least one DATA input."""
    by_rows = _TABLE.get(op.type) or _OF_STATEMENTS.get(
        REGISTERED.op_flows.get(op.type)
    )
    by_entry = sparse.transfer(op, output, inputs, by_rows, batch_size, flow_of)
    if by_entry is not None:
        return by_entry
    if op.type == "Where" and not _lists_labels(op):
        listed = sparse.where(op, flow_of)
        if listed is not None:
            return listed
    rule = _BY_VALUES.get(op.type)
    if rule is not None:
        return rule(op, output, inputs)
    if _examples_elsewhere(op, inputs) or output.shape.rank is None:
        return Flow(DATA, None)
    if any(f.kind == DATA and f.axes is None for f in inputs):
        # An input with known examples may be combined whatever the unknown input holds.
        return Flow(DATA, None, coupled=op if mixing.combines(op, inputs) else None)
    if by_rows is None:
        return Flow(DATA, None)
    return by_rows(op, output, inputs, batch_size)


def _data_shaped(op, output, inputs) -> Flow:
    """The flow of an op with an output length that the whole batch decides."""
    return Flow(DATA, None, coupled=None if _lists_labels(op) else op)


def _lists_labels(op) -> bool:
    """Whether an op may list the labels of each example for a CTC loss, in order."""
    return op.type == "Where" and any(
        other.type in ops.CTC for other in op.graph.get_operations()
    )


def op_flow(kind: str, flow: str = "rows") -> None:
    """States that an op, and its registered gradient, keep the examples apart.

    A loss with an op that the table of ops does not know trains one example at a time.
    With this statement the loss trains as a batch. The library trusts the statement: a
    false statement voids the guarantee. `tfdpclip.testing.assert_isolated` finds one.

    Args:
      kind: the op's type, such as ``"Igamma"``: ``tensor.op.type``.
      flow: "rows", if row i of each output depends only on row i of the inputs that
        have the examples on axis 0, and on inputs that all examples share; or
        "elements", if each entry of the output depends on the same entry of the inputs,
        with broadcasting.

    Raises:
      ValueError: if TensorFlow has no op of type `kind`, if the table knows the type,
        or if `flow` is neither "rows" nor "elements".

    *Formal guarantees*: where the statement is true, the proof that examples stay apart
    holds for every batch.

    >>> import tfdpclip as dpc
    >>> dpc.gradients.op_flow("Cos")
    Traceback (most recent call last):
    ...
    ValueError: kind='Cos' is known to the table of ops already.
    """
    choice("flow", flow, ("rows", "elements"))
    if not isinstance(kind, str) or _tf_private.definition_of(kind) is None:
        raise ValueError(
            "kind must be the type of a TensorFlow op, such as 'Igamma' "
            f"(tensor.op.type), got {shown(kind)}."
        )
    if not may_be_stated(kind):
        raise ValueError(f"kind={kind!r} is known to the table of ops already.")
    REGISTERED.op_flows[kind] = flow


def may_be_stated(kind: str) -> bool:
    """Whether `op_flow` accepts a type: no known type, Python or control flow."""
    return not is_known(kind) and kind not in (*ops.FIRST_ARGUMENT, *ops.PYTHON)


def is_known(kind: str) -> bool:
    """Whether the table has an entry for ops of a type."""
    return kind in _TABLE or kind in _BY_VALUES


def is_stated(kind: str) -> bool:
    """Whether a user stated the flow of an op type by `op_flow`."""
    return kind in REGISTERED.op_flows


def _examples_elsewhere(op, inputs) -> bool:
    """Whether the examples are in an input from which the op must not read examples.

    For an op in `_READ_FROM`, only a single input may hold the batch.
    """
    place = _READ_FROM.get(op.type)
    return place is not None and any(
        flow.kind == DATA and flow.axes != () and not flow.made
        for number, flow in enumerate(inputs)
        if number != place
    )


def _by_place(op, output, inputs) -> Flow:
    """The flow of a sum by position; a batch where each sum stays within an example."""
    if op.type == "DenseBincount" and op.inputs[0].shape.rank == 2:
        unweighted = op.inputs[2].shape.num_elements() == 0
        if unweighted and all(f.kind == PUBLIC for f in inputs[1:]):
            # The op makes a row of counts for each row of its input.
            return _first_rows(inputs)
        return Flow(DATA, None)
    if op.type == "RaggedBincount":
        return Flow(DATA, None)  # The ragged rows may be the examples.
    if op.type == "UnsortedSegmentSum" and inputs[0].kind == DATA and inputs[0].axes:
        fixed = all(f.kind == PUBLIC for f in inputs[1:])
        if fixed and 0 not in inputs[0].axes and op.inputs[1].shape.rank == 1:
            return inputs[0].on(inputs[0].axes)
    return Flow(DATA, None, coupled=op)


def _constant(tensor):
    """The value of a tensor if the graph fixes all entries; else None."""
    value = static_value(tensor)
    complete = value is not None and None not in np.reshape(value, -1).tolist()
    return value if complete else None


def _over_axes(op, flow: Flow, axes) -> Flow:
    """The flow of an op that mixes the entries along `axes` only."""
    if flow.kind != DATA:
        return Flow(DATA, None)
    if set(axes) & set(flow.axes):
        return Flow(DATA, flow.axes, flow.rows, flow.repeats, coupled=op)
    return flow


def _public(op, inputs, tensors) -> list[tf.Tensor]:
    """The public tensors among some inputs of an op."""
    public = [t for t, f in zip(op.inputs, inputs, strict=True) if f.kind == PUBLIC]
    return [t for t in tensors if any(t is other for other in public)]


def _rows_beside(op, output) -> list[tf.Tensor]:
    """The inputs of an op of rows that may have a row for each example."""
    if op.type == "ImageProjectiveTransformV3":
        return [op.inputs[1]]
    if op.type in ops.ROW_BY_ROW or output.shape.rank == 0:
        return []
    return [t for t in op.inputs if t.shape.rank and t.shape[0] == output.shape[0]]


def _first_rows(inputs, beside: Sequence[tf.Tensor] = ()) -> Flow:
    """The flow of an op that computes row i from row i of its inputs.

    Args:
      inputs: the flows of the inputs.
      beside: the public inputs that may have a row for each example.
    """
    first = next(f for f in inputs if f.kind == DATA)
    apart = all(f.kind != DATA or f.axes in ((), first.axes) for f in inputs)
    apart = apart and first.axes in ((), (0,))
    layout = common_layout([f for f in inputs if f.leads] or [first])
    if not apart or not layout:
        return Flow(DATA, None)
    alike = all(rows_alike(t, -t.shape.rank) for t in beside if t.shape.rank)
    result = first.laid_out(layout)
    return result if alike else dataclasses.replace(result, obstacle=CONSTANT_BY_PLACE)


def _row_by_row(op, output, inputs, batch_size) -> Flow:
    return _first_rows(inputs, _public(op, inputs, _rows_beside(op, output)))


def _elementwise(op, output, inputs, batch_size) -> Flow:
    rank = output.shape.rank
    axes: set = set()
    first, behind = [], []
    for tensor, flow in zip(op.inputs, inputs, strict=True):
        if flow.kind != DATA:
            continue
        shift = rank - tensor.shape.rank
        if op.type == "BiasAdd" and shift:
            return Flow(DATA, None)
        if op.type == "Select" and tensor.shape.rank == 1:
            shift = 0
        axes |= {a + shift for a in flow.axes}
        if 0 in flow.axes and shift == 0:
            first.append(flow)
        elif flow.axes:
            behind.append(flow)
    public = [t for t, f in zip(op.inputs, inputs, strict=True) if f.kind == PUBLIC]
    apart = all(
        rows_alike(tensor, axis - rank) and not _of_one_size(op, tensor, axis - rank)
        for tensor in public
        for axis in axes
    )
    believed = "" if apart else CONSTANT_BY_PLACE
    result = Flow(DATA, tuple(sorted(axes)), obstacle=believed)
    # The examples are on a later axis, as in `[time, batch, ...]`.
    only_behind = not first and len(axes) == 1
    batched = behind if only_behind else first
    if not batched:
        return result
    layout = common_layout(batched)
    if layout is None:
        return result if only_behind else Flow(DATA, None)
    return dataclasses.replace(result.laid_out(layout), obstacle=believed)


def _of_one_size(op, tensor, axis: int) -> bool:
    """Whether a tensor has several entries on an axis that counts examples.

    The number of examples is not static, and broadcasting would repeat a single example
    for all entries of the tensor.
    """
    rank = tensor.shape.rank
    if rank is None or rank < -axis or tensor.shape[axis] in (None, 1):
        return False
    lengths = [t.shape[axis] for t in op.inputs if (t.shape.rank or 0) >= -axis]
    return None in lengths


def _reduction(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    numbers = static_value(op.inputs[1])
    if flow.kind != DATA or numbers is None or None in np.reshape(numbers, -1):
        return Flow(DATA, None)
    rank = op.inputs[0].shape.rank
    axes = {int(a) % rank for a in np.reshape(numbers, -1)} if rank else set()
    keep = output.shape.rank == rank
    coupled = op if axes & set(flow.axes) else None
    left = [a for a in flow.axes if a not in axes]
    if not keep:
        left = [a - sum(1 for r in axes if r < a) for a in left]
    rows, even = (flow.rows, flow.even) if left else (None, False)
    return Flow(DATA, tuple(left), rows, flow.repeats, coupled=coupled, even=even)


def _along_last_axis(op, output, inputs, batch_size) -> Flow:
    return _over_axes(op, inputs[0], [output.shape.rank - 1])


def _scan(op, output, inputs, batch_size) -> Flow:
    axis = _constant(op.inputs[1])
    if axis is None:
        return Flow(DATA, None)
    return _over_axes(op, inputs[0], [int(axis) % output.shape.rank])


def _gather(op, output, inputs, batch_size) -> Flow:
    params, indices = inputs[0], inputs[1]
    if op.type == "ResourceGather":
        axis, batch_dims = 0, op.node_def.attr["batch_dims"].i
    else:
        axis, batch_dims = _constant(op.inputs[2]), op.get_attr("batch_dims")
        if axis is None:
            return Flow(DATA, None)
    axis, rank = int(axis), op.inputs[0].shape.rank
    if axis < 0:
        if rank is None:
            return Flow(DATA, None)
        axis += rank
    if params.kind != DATA and indices.kind == DATA and batch_dims == 0:
        return indices.on(tuple(a + axis for a in indices.axes))
    if params.kind == DATA and indices.kind != DATA and batch_dims == 0:
        if axis in params.axes:
            # The op selects or permutes examples, unless the rows hold no data.
            return Flow(DATA, None, coupled=None if params.made else op)
        if op.inputs[1].shape.rank is None:
            return Flow(DATA, None)
        shift = op.inputs[1].shape.rank - 1
        return params.on(tuple(a + shift if a > axis else a for a in params.axes))
    if params.leads and axis == 0 and batch_dims == 0 and params.rows == 1:
        one = indices.leads and indices.rows == 1 and not indices.minor
        return params if one and takes_every_row(op) else Flow(DATA, None)
    if batch_dims >= 1 and rank is not None and op.inputs[1].shape.rank is not None:
        return _batched_gather(op, inputs[:2], axis, batch_dims)
    return Flow(DATA, None)


def _batched_gather(op, inputs, axis: int, batch_dims: int) -> Flow:
    """The flow of a gather in which row i of the indices reads row i of the values.

    Args:
      op: the gather.
      inputs: the flows of the values and of the indices.
      axis: the axis of the values that the indices count.
      batch_dims: the number of the first axes that values and indices have in common.
    """
    more = op.inputs[1].shape.rank - batch_dims - 1
    places = (
        lambda a: None if a == axis else a + more * (a > axis),
        lambda a: a if a < batch_dims else a - batch_dims + axis,
    )
    gathered: list[Flow] = []
    for flow, place in zip(inputs, places, strict=True):
        if flow.kind != DATA:
            continue
        axes = tuple(map(place, flow.axes))
        if not axes or None in axes:
            return Flow(DATA, None)
        gathered.append(flow.on(axes))
    layout = common_layout(gathered)
    if layout is None or any(flow.axes != gathered[0].axes for flow in gathered):
        return Flow(DATA, None)
    apart = all(
        rows_alike(tensor, a - tensor.shape.rank)
        for tensor, flow in zip(op.inputs, inputs, strict=False)
        for a in gathered[0].axes
        if flow.kind != DATA and a < batch_dims
    )
    result = gathered[0].laid_out(layout)
    return dataclasses.replace(result, obstacle="" if apart else CONSTANT_BY_PLACE)


def _looked_up(op, output, inputs, batch_size) -> Flow:
    """The flow of keys that are looked up in a table that all examples share."""
    keys = inputs[1]
    return keys if inputs[2].kind == PUBLIC else Flow(DATA, None)


def _one_hot(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if any(f.kind == DATA for f in inputs[1:]):
        return Flow(DATA, None)
    place = op.get_attr("axis") % output.shape.rank
    return flow.on(tuple(axis + (axis >= place) for axis in flow.axes))


def _conv_transpose(op, output, inputs, batch_size) -> Flow:
    return _first_rows(inputs[2:]) if inputs[2].kind == DATA else Flow(DATA, None)


def _fused_batch_norm(op, output, inputs, batch_size) -> Flow:
    flow = inputs[0]
    if flow.kind != DATA or any(f.kind == DATA and not f.made for f in inputs[1:]):
        return Flow(DATA, None)
    if output is not op.outputs[0] and output.shape.rank != 4:
        axes: tuple | None = ()
        if flow.axes == (1,) and op.get_attr("data_format") == b"NCHW":
            axes = None
        # In training, these outputs are means and variances of all examples.
        mixed = axes is not None and flow.axes and op.get_attr("is_training")
        return Flow(DATA, axes, coupled=op if mixed else None)
    rank = op.inputs[0].shape.rank
    channel = 1 if op.get_attr("data_format") in (b"NCHW", b"NCDHW") else rank - 1
    if not op.get_attr("is_training"):
        # Each channel has its own scale.
        return Flow(DATA, None) if channel in flow.axes else flow
    result = _over_axes(op, flow, [a for a in range(rank) if a != channel])
    scales = _public(op, inputs, op.inputs[1:3]) if channel in flow.axes else ()
    alike = all(rows_alike(scale, -1) for scale in scales)
    return result if alike else dataclasses.replace(result, obstacle=CONSTANT_BY_PLACE)


def _reverse(op, output, inputs, batch_size) -> Flow:
    axes = _constant(op.inputs[1])
    if axes is None:
        return Flow(DATA, None)
    return _over_axes(op, inputs[0], [int(a) % output.shape.rank for a in axes])


def _roll(op, output, inputs, batch_size) -> Flow:
    axes = _constant(op.inputs[2])
    if axes is None:
        return Flow(DATA, None)
    axes = [int(a) % output.shape.rank for a in np.reshape(axes, -1)]
    return _over_axes(op, inputs[0], axes)


def _shuffle(op, output, inputs, batch_size) -> Flow:
    """The flow of a random order along axis 0."""
    coupled = op if inputs[0].axes and 0 in inputs[0].axes else None
    return Flow(DATA, None, coupled=coupled)


def _learning_sampler(op, output, inputs, batch_size) -> Flow:
    """The flow of a drawn class: it was a label of this or of an earlier batch."""
    return Flow(DATA, None, coupled=op)


def _pad(op, output, inputs, batch_size) -> Flow:
    """The flow of padding: padded rows on an axis of examples belong to no example."""
    flow, paddings = inputs[0], static_value(op.inputs[1])
    if flow.kind != DATA:
        return Flow(DATA, None)
    for axis in flow.axes:
        before, after = op.inputs[0].shape[axis], output.shape[axis]
        if before is not None and before == after:
            continue
        if paddings is None or any(n is None or n != 0 for n in paddings[axis]):
            return Flow(DATA, None)
    return flow.on(flow.axes)


#: The number of the input with the examples, for ops with further inputs that are axes,
#: lengths and places.
_READ_FROM = {
    **dict.fromkeys(
        """Reshape Transpose ExpandDims SplitV StridedSlice Slice
        SpaceToBatchND BatchToSpaceND BroadcastTo Tile Roll ReverseV2 OneHot Pad PadV2
        MirrorPad""".split(),
        0,
    ),
    **dict.fromkeys(ops.REDUCTIONS | ops.SCANS, 0),
    "Split": 1,
    "Conv2DBackpropInput": 2,
    "Conv3DBackpropInputV2": 2,
}

#: By op type: `rule(op, output, flows of the inputs)`. The values decide the output's
#: length or places, so the rules decide also if an input is unknown.
_BY_VALUES: dict[str, Callable] = {
    **dict.fromkeys(ops.DATA_SHAPED, _data_shaped),
    **dict.fromkeys(ops.BY_PLACE, _by_place),
    **dict.fromkeys(ops.CTC, sparse.ctc_of_dense_labels),
}

#: By op type: `rule(op, output, flows of the inputs, batch_size)`. All inputs with data
#: have known axes, and the rank of the output is known.
_TABLE: dict[str, Callable] = {
    **dict.fromkeys(ops.ELEMENTWISE, _elementwise),
    **dict.fromkeys(ops.ROW_BY_ROW, _row_by_row),
    **dict.fromkeys(ops.REDUCTIONS, _reduction),
    **dict.fromkeys(ops.LAST_AXIS, _along_last_axis),
    **dict.fromkeys(ops.SCANS, _scan),
    **dict.fromkeys(mixing.RULES, mixing.transfer),
    **layouts.RULES,
    **contractions.RULES,
    "Roll": _roll,
    "RandomShuffle": _shuffle,
    "ComputeAccidentalHits": sparse.accidental_hits,
    "StringSplitV2": sparse.split_strings,
    "SparseCross": sparse.cross,
    **dict.fromkeys(ops.LEARNING_SAMPLERS, _learning_sampler),
    "ReverseV2": _reverse,
    "GatherV2": _gather,
    "ResourceGather": _gather,
    "OneHot": _one_hot,
    "LookupTableFindV2": _looked_up,
    **dict.fromkeys("Pad PadV2 MirrorPad".split(), _pad),
    "Conv2DBackpropInput": _conv_transpose,
    "Conv3DBackpropInputV2": _conv_transpose,
    "FusedBatchNormV3": _fused_batch_norm,
}

#: The rules of the statements that `op_flow` takes.
_OF_STATEMENTS = {"elements": _elementwise, "rows": _row_by_row}
