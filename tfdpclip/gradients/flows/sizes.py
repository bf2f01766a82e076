"""Flows of numbers that depend on the batch size B alone.

A loss may have a factor 1/B, which makes a mean. With a factor that depends on B in a
different way, the presence of an example would rescale the gradients of all examples.
So the flow of every size records its exponent of B.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, SIZE, Flow
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.known import EXACT, known_value


def size_flow(
    op: tf.Operation,
    output: tf.Tensor,
    inputs: list[Flow],
    flow_of: Callable[[tf.Tensor], Flow],
) -> Flow:
    """The flow of an output that is a size, or a vector of sizes.

    `Flow.power` is the exponent of B in a number, None if the number is no power of B
    times a constant; `Flow.dims` has the exponents of the entries of a vector.
    """
    if op.type in ("Shape", "Size", "Rank", "ShapeN"):
        return _shape(op, output, inputs)
    known = [f for f in inputs if f.kind == SIZE]
    first = inputs[0]
    if op.type == "Cast" and _rounds(op):
        return Flow(SIZE, power=None)
    if op.type in ops.SAME_NUMBERS:
        return _same_numbers(output, first)
    if op.type == "StridedSlice" and first.dims is not None:
        return _slice(op, output, first.dims)
    if op.type == "GatherV2" and first.dims is not None:
        return _gathered(op, first.dims)
    if op.type == "Unpack" and first.dims is not None:
        return _number(first.dims[output.value_index])
    if op.type in ("Split", "SplitV", "Slice") and output.shape.rank == 1:
        dims = inputs[1 if op.type == "Split" else 0].dims
        found = None if dims is None else _ORIGIN_RULES[op.type](op, output, 0)
        if found is None or output.shape[0] is None:
            return Flow(SIZE, power=None)
        return _vector(dims[found[1] : found[1] + output.shape[0]])
    if op.type == "Pack" and output.shape.rank == 1:
        return _vector(tuple(f.power for f in inputs))
    if op.type == "Prod" and first.dims is not None and output.shape.rank == 0:
        return _number(None if None in first.dims else sum(first.dims))
    if op.type == "Maximum" and len(known) == 1 and _is_one_at_most(op, inputs):
        # `max(size, 1)` prevents a division by 0. It differs from the size only for an
        # empty batch.
        return _number(known[0].power)
    made = _made_of_vectors(op, output, inputs)
    if made is not None:
        return _vector(made)
    powers = [f.power if f.dims is None else None for f in inputs]
    if op.type == "FloorDiv" and rows_of_length(output, flow_of) is not None:
        # The number of records is the number of rows over the rows of each record; the
        # division has no remainder.
        return _number(1)
    if None in powers:
        return _number(None)
    if op.type == "Mul":
        return _number(sum(powers))
    if op.type in ops.QUOTIENTS:
        return _number(powers[0] - powers[1])
    if op.type in ("Reciprocal", "Inv"):
        return _number(-powers[0])
    if op.type == "Neg":
        return _number(powers[0])
    return _number(None)


def counted_rows(
    op: tf.Operation, flow_of: Callable[[tf.Tensor], Flow], axis: int = 0
) -> Flow | None:
    """The flow of the tensor that gives a new tensor its number of rows.

    In `tf.zeros([tf.shape(x)[0], 3])`, x gives the number of rows; x may have several
    rows for each example.

    Args:
      op: an op of `ops.SHAPERS`.
      flow_of: the function from a tensor to its flow.
      axis: the axis of the output on which the rows are counted.

    Returns:
      None if the graph does not show the tensor.
    """
    if op.type == "Tile" and op.inputs[0].shape[axis : axis + 1] != [1]:
        return None
    if op.type == "Range" and not _counts_from_zero(op):
        return None
    place = _COUNTS.get(op.type, ops.SHAPE_INPUTS.get(op.type, 0))
    return rows_of_length(op.inputs[place], flow_of, axis)


def length_of(tensor: tf.Tensor, place: int = 0) -> tuple | None:
    """The tensor and the axis that a number is the length of.

    Args:
      tensor: a number, or a vector.
      place: the entry of the vector that is the number.

    Returns:
      `(reference of the tensor, axis)`; None if the graph does not show them.
    """
    first, place, factors = _find_origin(tensor, place)
    if not _is_shape(first) or set(factors) - {1}:
        return None
    return first.op.inputs[0].ref(), place


def _is_shape(tensor: tf.Tensor) -> bool:
    """Whether a tensor is the shape of a tensor, or the length of a vector."""
    op = tensor.op
    return op.type == "Shape" or op.type == "Size" and op.inputs[0].shape.rank == 1


def _find_origin(tensor: tf.Tensor, place: int = 0) -> tuple[tf.Tensor, int, list]:
    """Follows a number back to the tensor that it was computed from.

    Args:
      tensor: a number, or a vector.
      place: the entry of the vector that is the number.

    Returns:
      The tensor, the place of the number in the tensor, and the factors that the number
      was multiplied by, the last factor first.
    """
    factors: list = []
    while tensor.op.type in _ORIGIN_RULES:
        found = _ORIGIN_RULES[tensor.op.type](tensor.op, tensor, place)
        if found is None:
            break
        tensor, place, factor = found
        factors.append(factor)
    return tensor, place, factors


def _counts_from_zero(op: tf.Operation) -> bool:
    """Whether a `Range` counts 0, 1, ..., limit - 1."""
    start, delta = (tf.get_static_value(op.inputs[i]) for i in (0, 2))
    return start is not None and delta is not None and start == 0 and delta == 1


def rows_of_length(
    tensor: tf.Tensor, flow_of: Callable[[tf.Tensor], Flow], place: int = 0
) -> Flow | None:
    """The flow of a tensor with a number of rows that is computed in the graph.

    Args:
      tensor: the number of rows, or a vector.
      flow_of: the function from a tensor to its flow.
      place: the entry of the vector that is the number of rows.

    Returns:
      None if the graph does not show how the rows belong to examples.
    """
    first, place, factors = _find_origin(tensor, place)
    if _is_largest(first) and not set(factors) - {1}:
        # `tf.vectorized_map` takes the largest length of its arguments.
        lengths = first.op.inputs[0].op.inputs
        found = [rows_of_length(length, flow_of) for length in lengths]
        return found[0] if all(flow == found[0] for flow in found) else None
    if not _is_shape(first):
        return None
    flow = flow_of(first.op.inputs[0])
    if flow.kind != DATA or flow.axes != (place,) or not flow.rows:
        return None
    rows = fractions.Fraction(flow.rows)
    for factor in reversed(factors):
        rows *= factor
        if rows.denominator != 1 or rows <= 0:
            return None  # The division rounds for some numbers of examples.
    repeats = flow.repeats * rows / flow.rows if flow.minor else 1
    if repeats != int(repeats):
        return None
    return Flow(DATA, (0,), int(rows), int(repeats))


def _is_largest(tensor: tf.Tensor) -> bool:
    """Whether a number is the largest of some numbers."""
    if tensor.op.type != "Max" or tensor.shape.rank != 0:
        return False
    return tensor.op.inputs[0].op.type == "Pack" and tensor.op.inputs[0].shape.rank == 1


#: The number of the input that is, or bounds, the number of entries.
_COUNTS = {"Range": 1, "LinSpace": 2}


_Origin = tuple[tf.Tensor, int, "fractions.Fraction | int"]


def _same(op, tensor, place) -> _Origin | None:
    ranks = {op.inputs[0].shape.rank, tensor.shape.rank}
    exact = ranks <= {0, 1} and tensor.dtype in EXACT
    return (op.inputs[0], place, 1) if exact else None


def _sliced(op, tensor, place) -> _Origin | None:
    """The origin of entry `place` of a slice of a vector of sizes."""
    begin, step = known_value(op.inputs[1]), known_value(op.inputs[3])
    masks = ("ellipsis_mask", "new_axis_mask")
    if any(map(op.get_attr, masks)) or np.size(begin) != 1 or np.size(step) != 1:
        return None
    first, step = np.reshape(begin, ())[()], np.reshape(step, ())[()]
    first = 0 if op.get_attr("begin_mask") else first
    if first is None or first < 0 or step != 1:
        return None
    return op.inputs[0], int(first) + place, 1


def _cut(op, tensor, place) -> _Origin | None:
    begin = known_value(op.inputs[1])
    if np.size(begin) != 1 or np.reshape(begin, ())[()] is None:
        return None
    first = int(np.reshape(begin, ())[()])
    return (op.inputs[0], first + place, 1) if first >= 0 else None


def _packed(op, tensor, place) -> _Origin | None:
    part = op.inputs[place] if place < len(op.inputs) else None
    return None if part is None or part.shape.rank != 0 else (part, 0, 1)


def _joined(op, tensor, place) -> _Origin | None:
    for part in op.inputs[:-1]:
        length = part.shape[0] if part.shape.rank == 1 else None
        if length is None:
            return None
        if place < length:
            return part, place, 1
        place -= length
    return None


def _picked(op, tensor, place) -> _Origin | None:
    """The origin of entry `place` of a gather from a vector of sizes."""
    indices = known_value(op.inputs[1])
    if op.get_attr("batch_dims") or op.inputs[0].shape.rank != 1 or indices is None:
        return None
    found = np.reshape(indices, [-1])
    if place >= len(found) or found[place] is None or found[place] < 0:
        return None
    return op.inputs[0], int(found[place]), 1


def _piece(op, tensor, place) -> _Origin | None:
    """The origin of entry `place` of a piece of a split vector."""
    source = op.inputs[1 if op.type == "Split" else 0]
    if source.shape.rank != 1:
        return None
    if op.type == "Split":
        lengths = [tensor.shape[0]] * len(op.outputs)
    else:
        known = known_value(op.inputs[1])
        lengths = [None] if known is None else np.reshape(known, [-1]).tolist()
    ahead = lengths[: tensor.value_index]
    if any(length is None or length < 0 for length in ahead):
        return None
    return source, int(sum(ahead)) + place, 1


def _unpacked(op, tensor, place) -> _Origin | None:
    whole = op.inputs[0].shape.rank == 1
    return (op.inputs[0], tensor.value_index, 1) if whole else None


def _times(op, tensor, place) -> _Origin | None:
    """The origin of a size that is multiplied or divided by a known number."""
    if tensor.shape.rank != 0:
        return None
    known = [known_value(part) for part in op.inputs]
    for number, part in zip(known, reversed(op.inputs), strict=True):
        value = None if np.size(number) != 1 else np.reshape(number, ())[()]
        if value is None or value <= 0 or value != int(value):
            continue
        if part.shape.rank != 0:
            continue
        one = fractions.Fraction(int(value))
        if op.type == "Mul":
            return part, 0, one
        if part is op.inputs[0]:
            return part, 0, 1 / one
    return None


def _multiplied(op, tensor, place) -> _Origin | None:
    """The origin of a product of sizes with a single unknown size."""
    sizes = known_value(op.inputs[0])
    if tensor.shape.rank != 0 or op.inputs[0].shape.rank != 1 or sizes is None:
        return None
    sizes = np.reshape(sizes, [-1]).tolist()
    unknown = [i for i, size in enumerate(sizes) if size is None]
    known = math.prod(size for size in sizes if size is not None)
    if len(unknown) != 1 or known <= 0:
        return None
    return op.inputs[0], unknown[0], fractions.Fraction(int(known))


#: Rules by op type: from an op's output and a place to the input that the number comes
#: from, the place in the input, and the factor in between.
_ORIGIN_RULES: dict[str, Callable] = {
    **dict.fromkeys(ops.SAME_NUMBERS, _same),
    "StridedSlice": _sliced,
    "Slice": _cut,
    "Pack": _packed,
    "ConcatV2": _joined,
    "GatherV2": _picked,
    "Unpack": _unpacked,
    **dict.fromkeys(("Split", "SplitV"), _piece),
    "Mul": _times,
    "FloorDiv": _times,
    "Prod": _multiplied,
}


def _made_of_vectors(op, output, inputs) -> tuple | None:
    """The exponents of B in a vector's entries.

    Entries without a size have 0; entries computed from a size have None, except in a
    `ConcatV2`, which keeps the exponents.
    """
    length = output.shape[0] if output.shape.rank == 1 else None
    if length is None:
        return None

    def entries(flow: Flow, count: int) -> tuple:
        if flow.kind == PUBLIC:
            return (0,) * count
        known = flow.dims is not None and len(flow.dims) == count
        return flow.dims if known and flow.dims is not None else (None,) * count

    if op.type == "ConcatV2":
        lengths = [t.shape[0] if t.shape.rank == 1 else None for t in op.inputs[:-1]]
        if None in lengths:
            return None
        pairs = zip(inputs[:-1], lengths, strict=True)
        return tuple(power for pair in pairs for power in entries(*pair))
    if op.type not in ops.ELEMENTWISE:
        return None
    columns = zip(*(entries(flow, length) for flow in inputs), strict=True)
    return tuple(0 if set(powers) == {0} else None for powers in columns)


def _is_one_at_most(op: tf.Operation, inputs: list[Flow]) -> bool:
    """Whether an op compares a known number, 1 or less, with an integer size."""
    known = [tf.get_static_value(tensor) for tensor in op.inputs]
    if not any(value is not None and np.all(value <= 1) for value in known):
        return False
    (tensor,) = (t for t, f in zip(op.inputs, inputs, strict=True) if f.kind == SIZE)
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype.is_integer


def _rounds(op: tf.Operation) -> bool:
    """Whether a cast may round a size."""
    (before,), after = op.inputs, op.outputs[0].dtype
    if before.dtype.is_floating:
        return not after.is_floating
    return after not in (tf.int32, tf.int64, tf.float32, tf.float64)


def _same_numbers(output: tf.Tensor, flow: Flow) -> Flow:
    if flow.dims is None:
        return _number(flow.power)
    if output.shape.rank == 1:
        return _vector(flow.dims)
    if output.shape.rank == 0 and len(flow.dims) == 1:
        return _number(flow.dims[0])
    return Flow(SIZE if any(d != 0 for d in flow.dims) else PUBLIC, power=None)


def _number(power: int | None) -> Flow:
    return Flow(PUBLIC) if power == 0 else Flow(SIZE, power=power)


def _vector(dims: tuple) -> Flow:
    return Flow(SIZE if any(d != 0 for d in dims) else PUBLIC, power=None, dims=dims)


def _shape(op, output, inputs) -> Flow:
    flow = inputs[output.value_index] if op.type == "ShapeN" else inputs[0]
    source = op.inputs[output.value_index if op.type == "ShapeN" else 0]
    if op.type == "Rank" or flow.kind == PUBLIC:
        return Flow()
    if flow.kind != DATA or source.shape.rank is None:
        return Flow(SIZE, power=None)
    if flow.entry is not None:
        # The number of entries of a sparse batch is a statistic of all examples.
        return (
            _vector((None,) * source.shape.rank) if op.type != "Size" else _number(None)
        )
    # For an unknown tensor, the analysis assumes the batch on axis 0, where data
    # arrive. The step tests this assumption.
    axes = (0,) if flow.axes is None else flow.axes
    dims = tuple(int(axis in axes) for axis in range(source.shape.rank))
    return _number(sum(dims)) if op.type == "Size" else _vector(dims)


def _known_array(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a tensor if the graph fixes all entries; else None."""
    value = known_value(tensor)
    told = value is not None and None not in np.reshape(value, -1).tolist()
    return np.asarray(value) if told else None


def _gathered(op, dims) -> Flow:
    """The flow of lengths gathered from a shape, as in `tf.tensordot`."""
    places = _known_array(op.inputs[1])
    if places is None or tf.get_static_value(op.inputs[2]) != 0:
        return Flow(SIZE, power=None)
    if places.ndim == 0:
        return _number(dims[int(places)])
    if places.ndim > 1 or op.get_attr("batch_dims"):
        return Flow(SIZE, power=None)
    return _vector(tuple(dims[int(place)] for place in places))


def _slice(op, output, dims) -> Flow:
    bounds = [_known_array(op.inputs[i]) for i in (1, 2, 3)]
    if any(bound is None for bound in bounds):
        return Flow(SIZE, power=None)
    begin, end, step = (int(bound[0]) for bound in bounds)
    if op.get_attr("shrink_axis_mask") & 1:
        return _number(dims[begin])
    if op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        return Flow(SIZE, power=None)
    cut = slice(
        None if op.get_attr("begin_mask") & 1 else begin,
        None if op.get_attr("end_mask") & 1 else end,
        step,
    )
    return _vector(dims[cut])
