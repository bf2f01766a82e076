"""Numbers that depend on the batch's size alone, and how.

A factor of a loss may be divided by the number of examples: that makes a mean. A factor
that depends on that number in any other way would let one example's presence rescale
everybody's gradient. So every size carries its power of B.
"""

from __future__ import annotations

import dataclasses
import fractions
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpclip.gradients import ops
from tfdpclip.gradients.flow import DATA, PUBLIC, SIZE, Flow


def size_flow(
    op: tf.Operation,
    output: tf.Tensor,
    inputs: list[Flow],
    flow_of: Callable[[tf.Tensor], Flow],
) -> Flow:
    """The flow of an output that is a size, or a vector of sizes.

    `Flow.power` is the power of B of a number, None if it is none; `Flow.dims` the
    powers of a vector's entries.
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
    if op.type == "Pack" and output.shape.rank == 1:
        return _vector(tuple(f.power for f in inputs))
    if op.type == "Prod" and first.dims is not None and output.shape.rank == 0:
        return _number(None if None in first.dims else sum(first.dims))
    if op.type == "Maximum" and len(known) == 1 and _is_one_at_most(op, inputs):
        # So that nothing is divided by 0: of a batch of nobody, it is no other number.
        return _number(known[0].power)
    made = _made_of_vectors(op, output, inputs)
    if made is not None:
        return _vector(made)
    powers = [f.power if f.dims is None else None for f in inputs]
    if op.type == "FloorDiv" and counted_number(output, flow_of) is not None:
        # Nothing is left over: as many records as there are rows, over rows of each.
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
    """The flow of the tensor whose rows an op of `ops.SHAPERS` makes as many of.

    Args:
      op: what makes a new tensor of a shape that is computed.
      flow_of: the flow of a tensor.
      axis: the axis on which it makes them.

    Returns:
      None if the graph does not tell. In `tf.zeros([tf.shape(x)[0], 3])` it is that of
      x, which may have several rows for each example.
    """
    if op.type == "Tile" and op.inputs[0].shape[axis : axis + 1] != [1]:
        return None
    tensor = op.inputs[1 if op.type == "Range" else ops.SHAPE_INPUTS.get(op.type, 0)]
    if axis:
        if tensor.op.type != "Pack":
            return None
        tensor = tensor.op.inputs[axis]
    return counted_number(tensor, flow_of)


def counted_number(
    tensor: tf.Tensor, flow_of: Callable[[tf.Tensor], Flow]
) -> Flow | None:
    """The flow of the tensor whose rows a number is, or a vector's first; or None."""
    factors: list[fractions.Fraction] = []
    while tensor.op.type in _FIRST_OF or tensor.op.type in ("Mul", "FloorDiv"):
        if tensor.op.type == "Cast" and _rounds(tensor.op):
            return None
        if tensor.op.type == "ConcatV2" and tensor.op.inputs[0].shape[:1] in ([], [0]):
            return None
        if tensor.op.type == "StridedSlice":
            bounds = [tf.get_static_value(tensor.op.inputs[i]) for i in (1, 3)]
            if any(bound is None for bound in bounds):
                return None
            if bounds[0].any() or (bounds[1] != 1).any():
                return None
        if tensor.op.type in ("Mul", "FloorDiv"):
            counted, other = tensor.op.inputs
            if tensor.op.type == "Mul" and tf.get_static_value(other) is None:
                counted, other = other, counted
            factor = tf.get_static_value(other)
            if tensor.shape.rank != 0 or factor is None or factor <= 0:
                return None
            one = fractions.Fraction(int(factor))
            factors.append(one if tensor.op.type == "Mul" else 1 / one)
            tensor = counted
            continue
        tensor = tensor.op.inputs[0]
    if tensor.op.type == "Max" and tensor.op.inputs[0].op.type == "Pack":
        # As many examples as each of the arguments of `tf.vectorized_map` has.
        found = [counted_number(t, flow_of) for t in tensor.op.inputs[0].op.inputs]
        same = len({None if flow is None else flow.rows for flow in found}) == 1
        return found[0] if same and not factors else None
    if tensor.op.type != "Shape":
        return None
    flow = flow_of(tensor.op.inputs[0])
    if not flow.leads or not flow.rows:
        return None
    rows = fractions.Fraction(flow.rows)
    for factor in reversed(factors):
        rows *= factor
        if rows.denominator != 1:
            return None  # Rounded, for some numbers of examples.
    return dataclasses.replace(flow, rows=int(rows))


#: Whose first number is that of their first input.
_FIRST_OF = ops.SAME_NUMBERS | {"StridedSlice", "Pack", "ConcatV2", "ExpandDims"}


def _made_of_vectors(op, output, inputs) -> tuple | None:
    """The powers of a vector's entries: 0 where no size is in them, else unknown."""
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
    """Whether one input is known, and 1 or less, and the other a number of rows."""
    known = [tf.get_static_value(tensor) for tensor in op.inputs]
    if not any(value is not None and np.all(value <= 1) for value in known):
        return False
    (tensor,) = (t for t, f in zip(op.inputs, inputs, strict=True) if f.kind == SIZE)
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype.is_integer


def _rounds(op: tf.Operation) -> bool:
    """Whether a cast may make another number of a size."""
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
        # How many entries a sparse batch has is a statistic of all examples.
        return (
            _vector((None,) * source.shape.rank) if op.type != "Size" else _number(None)
        )
    # Of a tensor that nothing is known of, the batch is taken to be on axis 0, as it
    # is everywhere; that is tested when the step runs.
    axes = (0,) if flow.axes is None else flow.axes
    dims = tuple(int(axis in axes) for axis in range(source.shape.rank))
    return _number(sum(dims)) if op.type == "Size" else _vector(dims)


def _gathered(op, dims) -> Flow:
    """`tf.tensordot` gathers lengths so."""
    places = tf.get_static_value(op.inputs[1])
    if places is None or tf.get_static_value(op.inputs[2]) != 0:
        return Flow(SIZE, power=None)
    if places.ndim == 0:
        return _number(dims[int(places)])
    if places.ndim > 1 or op.get_attr("batch_dims"):
        return Flow(SIZE, power=None)
    return _vector(tuple(dims[int(place)] for place in places))


def _slice(op, output, dims) -> Flow:
    bounds = [tf.get_static_value(op.inputs[i]) for i in (1, 2, 3)]
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
