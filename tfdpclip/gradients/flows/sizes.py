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
from tfdpclip.gradients.graph.known import EXACT, static_value


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
    sizes = [f for f in inputs if f.kind == SIZE]
    first = inputs[0]
    if op.type == "Cast" and _rounds(op):
        return Flow(SIZE, power=None)
    if op.type in ops.SAME_NUMBERS:
        return _same_numbers(output, first)
    if op.type in _MOVES:
        return _moved(op, output, flow_of)
    if op.type == "Prod" and first.dims is not None and output.shape.rank == 0:
        return _number(None if None in first.dims else sum(first.dims))
    if op.type == "Maximum" and len(sizes) == 1 and _is_one_at_most(op, inputs):
        # `max(size, 1)` prevents a division by 0. It differs from the size only for an
        # empty batch.
        return _number(sizes[0].power)
    made = _of_entries(op, output, inputs)
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
        origin = _ORIGIN_RULES[tensor.op.type](tensor.op, tensor, place)
        if origin is None:
            break
        tensor, place, factor = origin
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
        flows = [rows_of_length(length, flow_of) for length in lengths]
        return flows[0] if all(flow == flows[0] for flow in flows) else None
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
    masks = ("ellipsis_mask", "new_axis_mask")
    if any(map(op.get_attr, masks)) or _entry(op.inputs[3]) != 1:
        return None
    begin = 0 if op.get_attr("begin_mask") else _entry(op.inputs[1])
    return _from(op.inputs[0], begin, place)


def _cut(op, tensor, place) -> _Origin | None:
    return _from(op.inputs[0], _entry(op.inputs[1]), place)


def _entry(tensor: tf.Tensor):
    """The only entry of a tensor that the graph fixes, or None."""
    value = static_value(tensor)
    return np.reshape(value, ())[()] if np.size(value) == 1 else None


def _from(vector: tf.Tensor, begin, place: int) -> _Origin | None:
    """The origin of entry `place` of a part of a vector that starts at `begin`."""
    length = vector.shape[0] if vector.shape.rank == 1 else None
    if begin is not None and begin < 0 and length is not None:
        begin += length
    return None if begin is None or begin < 0 else (vector, int(begin) + place, 1)


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
    indices = static_value(op.inputs[1])
    if op.get_attr("batch_dims") or op.inputs[0].shape.rank != 1 or indices is None:
        return None
    places = np.reshape(indices, [-1])
    if place >= len(places) or places[place] is None or places[place] < 0:
        return None
    return op.inputs[0], int(places[place]), 1


def _piece(op, tensor, place) -> _Origin | None:
    """The origin of entry `place` of a piece of a split vector."""
    source = op.inputs[1 if op.type == "Split" else 0]
    if source.shape.rank != 1:
        return None
    if op.type == "Split":
        lengths = [tensor.shape[0]] * len(op.outputs)
    else:
        sizes = static_value(op.inputs[1])
        lengths = [None] if sizes is None else np.reshape(sizes, [-1]).tolist()
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
    values = [_entry(part) for part in op.inputs]
    for value, part in zip(values, reversed(op.inputs), strict=True):
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
    sizes = static_value(op.inputs[0])
    if tensor.shape.rank != 0 or op.inputs[0].shape.rank != 1 or sizes is None:
        return None
    sizes = np.reshape(sizes, [-1]).tolist()
    unknown = [i for i, size in enumerate(sizes) if size is None]
    factor = math.prod(size for size in sizes if size is not None)
    if len(unknown) != 1 or factor <= 0:
        return None
    return op.inputs[0], unknown[0], fractions.Fraction(int(factor))


#: Rules of ops that move numbers: from an op's output and a place to the input that the
#: number comes from, the place in the input, and the factor in between.
_MOVES: dict[str, Callable] = {
    "StridedSlice": _sliced,
    "Slice": _cut,
    "Pack": _packed,
    "ConcatV2": _joined,
    "GatherV2": _picked,
    "Unpack": _unpacked,
    **dict.fromkeys(("Split", "SplitV"), _piece),
}

#: The rules of `_MOVES`, and of ops that keep numbers or multiply them.
_ORIGIN_RULES: dict[str, Callable] = {
    **_MOVES,
    **dict.fromkeys(ops.SAME_NUMBERS, _same),
    "Mul": _times,
    "FloorDiv": _times,
    "Prod": _multiplied,
}


def _moved(op, output, flow_of) -> Flow:
    """The flow of numbers that an op takes from vectors of sizes, or joins."""
    count = output.shape.num_elements()
    if output.shape.rank not in (0, 1) or count is None:
        return Flow(SIZE, power=None)
    origins = [_MOVES[op.type](op, output, place) for place in range(count)]
    flows = [None if origin is None else flow_of(origin[0]) for origin in origins]
    if flows and all(flow is not None and flow.kind == PUBLIC for flow in flows):
        return Flow(SIZE, power=None)  # A size chose which of the public numbers.
    powers = tuple(map(_power_at, origins, flows))
    return _vector(powers) if output.shape.rank else _number(*powers)


def _power_at(origin: _Origin | None, flow: Flow | None) -> int | None:
    """The exponent of B in the number at an origin, in a tensor with the flow."""
    if origin is None or flow is None:
        return None
    tensor, place, _ = origin
    if flow.kind == PUBLIC:
        return 0
    if flow.dims is None:
        return flow.power if tensor.shape.rank == 0 else None
    return flow.dims[place] if place < len(flow.dims) else None


def _of_entries(op, output, inputs) -> tuple | None:
    """The exponents of B in the entries of a vector that an op makes entry by entry.

    An entry that is computed from no size has 0, and every further entry None.
    """
    count = output.shape[0] if output.shape.rank == 1 else None
    if count is None or op.type not in ops.ELEMENTWISE:
        return None

    def entries(flow: Flow) -> tuple:
        if flow.kind == PUBLIC:
            return (0,) * count
        fits = flow.dims is not None and len(flow.dims) == count
        return flow.dims if fits and flow.dims is not None else (None,) * count

    columns = zip(*map(entries, inputs), strict=True)
    return tuple(0 if set(powers) == {0} else None for powers in columns)


def _is_one_at_most(op: tf.Operation, inputs: list[Flow]) -> bool:
    """Whether an op compares a known number, 1 or less, with an integer size."""
    values = [tf.get_static_value(tensor) for tensor in op.inputs]
    if not any(value is not None and np.all(value <= 1) for value in values):
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
