"""Values and sizes that the graph fixes, beyond what TensorFlow's constants show."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.slices import slice_axes

_PAIRS = {
    "Mul": operator.mul,
    "Sub": operator.sub,
    "Add": operator.add,
    "AddV2": operator.add,
    "Maximum": max,
    "Minimum": min,
    "Equal": operator.eq,
    "GreaterEqual": operator.ge,
}

#: Types that hold every number of examples, and every row number, without rounding.
EXACT = (tf.int32, tf.int64, tf.float64)


def static_number(tensor: tf.Tensor) -> float | None:
    """The value of a constant number, through a few ops more than TensorFlow folds."""
    value = static_value(tensor)
    single = value is not None and np.size(value) == 1
    value = np.reshape(value, ())[()] if single else None
    return None if value is None else float(value)


def static_shape(output: tf.Tensor) -> list[int | None]:
    """The static shape of a `Reshape`, with the sizes known from its shape input."""
    shape = output.shape.as_list()
    if None not in shape:
        return shape
    target = static_value(output.op.inputs[1])
    if target is None or np.size(target) != len(shape):
        return shape
    told = (None if b is None or b < 0 else int(b) for b in np.reshape(target, [-1]))
    return [b if a is None else a for a, b in zip(shape, told, strict=True)]


def static_order(op: tf.Operation) -> list[int] | None:
    """The order of the axes after a `Transpose`; None if unknown."""
    order = static_value(op.inputs[1])
    if order is None:
        order = _order_for_many(op)
    if order is None or None in np.reshape(order, [-1]):
        return None
    return [int(axis) for axis in np.reshape(order, [-1])]


def _order_for_many(op: tf.Operation):
    """The axis order of a `Transpose` that `tf.vectorized_map` makes.

    `tf.vectorized_map` selects between two orders: it does not swap two axes when the
    shorter of them has length 1. For a batch with a single example, both orders give
    the same entries, so the order for several examples is returned.
    """
    choice = op.inputs[1].op
    if choice.type not in ("Select", "SelectV2"):
        return None
    test, otherwise = choice.inputs[0].op, choice.inputs[2]
    if test.type != "Equal" or static_number(test.inputs[1]) != 1:
        return None
    least = test.inputs[0].op
    if least.type != "Minimum":
        return None
    sizes = [static_value(size) for size in least.inputs]
    lengths = op.inputs[0].shape.as_list() if op.inputs[0].shape.rank else [None]
    # The size of the batch axis is unknown; the known size decides.
    if [size is None for size in sizes].count(True) != 1 or lengths[0] is not None:
        return None
    (fixed,) = (size for size in sizes if size is not None)
    return static_value(
        choice.inputs[1] if np.size(fixed) and fixed == 1 else otherwise
    )


def takes_every_row(op: tf.Operation) -> bool:
    """Whether a `GatherV2` along axis 0 takes row 0, row 1, and so on.

    `tf.vectorized_map` selects examples by this op. If there is a single row,
    `tf.vectorized_map` takes row 0 for all examples.
    """
    rows, indices = op.inputs[0], before_casts(op.inputs[1])
    if tf.get_static_value(op.inputs[2]) != 0 or op.get_attr("batch_dims"):
        return False
    if indices.op.type == "SelectV2":
        test, indices, single = indices.op.inputs
        indices = before_casts(indices)
        if test.op.type != "Greater" or static_number(single) != 0:
            return False
        if not _counts_rows(test.op.inputs[0], rows):
            return False
        if static_number(test.op.inputs[1]) != 1:
            return False
    return counts_up(indices)


#: The unproven claim about a public tensor with a separate entry for each example.
CONSTANT_BY_PLACE = (
    "whether each entry of a constant is for the example at the same place"
)
#: The remedy for such a constant.
BY_ARGUMENT = (
    "Make labels and other data arguments of the function, which makes constants of "
    "small tensors that it closes over; seed random numbers anew in each step."
)


# Ops whose output has entries of the first input, picked by public numbers.
_PASSED_ON = ops.SAME_ENTRIES | {"Slice", "StridedSlice"}


def rows_alike(tensor: tf.Tensor, axis: int) -> bool:
    """Whether a public tensor treats all positions of an axis alike.

    Args:
      tensor: a public tensor.
      axis: a negative axis number; -1 is the last axis.

    Returns:
      True if the tensor has no axis with this number, if the axis has length 1, or if
      all entries along the axis repeat a single value or are drawn from the same
      distribution.
    """
    rank, op = tensor.shape.rank, tensor.op
    if rank is None:
        return False
    if rank < -axis or tensor.shape[axis] == 1:
        return True
    if op.type == "Const":
        value = tf.get_static_value(tensor)
        return value is not None and bool((value == value.take([0], axis)).all())
    if op.type == "Fill" or _draws_alike(op):
        return True
    if op.type == "ExpandDims":
        new = static_number(op.inputs[1])
        if new is None:
            return False
        # The axis of length 1 moves every axis in front of it away from the end.
        behind = new if new < 0 else new - rank
        return rows_alike(op.inputs[0], axis + 1 if axis < behind else axis)
    if op.type in ("BroadcastTo", "Tile"):
        source = op.inputs[0]
        if (source.shape.rank or 0) < -axis or source.shape[axis] == 1:
            return True
        whole = source.shape[axis] is not None
        whole = whole and source.shape[axis] == tensor.shape[axis]
        return whole and rows_alike(source, axis)
    if _looks_up(op):
        indices, place = op.inputs[1], rank + axis
        ranked = indices.shape.rank is not None and place < indices.shape.rank
        return ranked and rows_alike(indices, place - indices.shape.rank)
    if op.type in _PASSED_ON and _is_drawn(op.inputs[0]):
        return True
    if op.type == "ConcatV2":
        joined = static_number(op.inputs[-1])
        if joined is None or axis in (joined, joined - rank):
            return False
        return all(rows_alike(t, axis) for t in op.inputs[:-1])
    if op.type == "Pack":
        # The new axis moves every axis in front of it away from the end.
        new = op.get_attr("axis") % rank - rank
        source_axis = axis + 1 if axis < new else axis
        return axis != new and all(rows_alike(t, source_axis) for t in op.inputs)
    if op.type == "OneHot" and op.get_attr("axis") == -1 and axis < -1:
        return rows_alike(op.inputs[0], axis + 1)
    if op.type in ("Reshape", "Squeeze", "StridedSlice"):
        source = op.inputs[0]
        if op.type == "StridedSlice":
            before = _sliced_axis(op, rank + axis)
        else:
            before = _same_axis(source.shape, tensor.shape, rank + axis)
        return before is not None and rows_alike(source, before - source.shape.rank)
    if op.type in ops.ELEMENTWISE and op.inputs:
        return all(rows_alike(t, axis) for t in op.inputs)
    if op.type == "MatMul" and axis == -2:
        # Row i of a product is row i of the left matrix by the whole right matrix.
        return rows_alike(op.inputs[0], -1 if op.get_attr("transpose_a") else -2)
    if op.type in _MATRICES and axis < -2:
        return all(rows_alike(t, axis) for t in op.inputs)
    if op.type == "BiasAdd" and op.get_attr("data_format") == b"NHWC" and axis < -1:
        return rows_alike(op.inputs[0], axis)
    if op.type == "IdentityN":
        return rows_alike(op.inputs[tensor.value_index], axis)
    if op.type in _IMAGES and axis == -rank:
        # Each image is convolved by itself, by one kernel.
        return rows_alike(op.inputs[_IMAGES[op.type]], axis)
    return False


#: Ops on the matrices in the last two axes, each place of the axes before by itself.
_MATRICES = frozenset("BatchMatMulV2 BatchMatMulV3 MatrixSolve".split())

#: By type of convolution: the input of images, one for each entry of axis 0.
_IMAGES = {"Conv2D": 0, "Conv2DBackpropInput": 2}


def _looks_up(op: tf.Operation) -> bool:
    """Whether an op gathers rows of a table, for indices of any shape."""
    if op.type == "GatherV2" and static_number(op.inputs[2]) != 0:
        return False
    return op.type in ("GatherV2", "ResourceGather") and not op.get_attr("batch_dims")


def _same_axis(before: tf.TensorShape, after: tf.TensorShape, axis: int) -> int | None:
    """The axis of a tensor that a reshape leaves whole, by static shapes."""
    if not (before.is_fully_defined() and after.is_fully_defined()):
        return None
    wanted = after[axis], math.prod(after[axis + 1 :])
    for place, length in enumerate(before):
        if (length, math.prod(before[place + 1 :])) == wanted:
            return place
    return None


def _sliced_axis(op: tf.Operation, target: int) -> int | None:
    """The input axis that an output axis of a `StridedSlice` is cut from."""
    axes = slice_axes(op) or ()
    return next((axis.source for axis in axes if axis.target == target), None)


def _draws_alike(op: tf.Operation) -> bool:
    """Whether an op draws all entries of its output from the same distribution."""
    if op.type in ops.DRAWS - ops.CANDIDATE_SAMPLERS - {"RandomShuffle"}:
        return all(t.shape.rank == 0 for t in op.inputs[1:])
    if not op.type.startswith(ops.SEEDED_DRAWS) or "Shuffle" in op.type:
        return False
    if draws_the_same(op):
        return False
    return all(t.shape.rank == 0 for t in op.inputs if t.dtype.is_floating)


_READ = frozenset(("Placeholder", "ReadVariableOp", "VariableV2"))


def draws_the_same(op: tf.Operation) -> bool:
    """Whether constants and single numbers make the seed: each place has its number.

    A single number that is read or given, such as the number of the step, is public. A
    seed of several is the state of a generator.
    """
    if not op.type.startswith(ops.SEEDED_DRAWS):
        return False
    pending, seen = list(op.inputs[1:]), set()
    while pending:
        tensor = pending.pop()
        before = tensor.op
        number = tensor.dtype != tf.resource and tensor.shape.num_elements() == 1
        if number and before.type in _READ:
            continue
        if before.type in ops.RANDOM:
            return False
        if not before.inputs and before.type not in ("Const", "StatelessRandomGetAlg"):
            return False
        if before not in seen:
            seen.add(before)
            pending += before.inputs
    return True


def _is_drawn(tensor: tf.Tensor) -> bool:
    """Whether all entries of a public tensor are drawn from the same distribution."""
    op = tensor.op
    if tensor.shape.num_elements() == 1:
        return True
    if _draws_alike(op):
        return True
    passed = op.type in _PASSED_ON or op.type in ops.ELEMENTWISE
    return passed and bool(op.inputs) and all(map(_is_drawn, op.inputs))


def counts_up(indices: tf.Tensor) -> bool:
    """Whether a vector is 0, 1, 2, and so on."""
    if indices.dtype not in EXACT:
        return False
    if indices.op.type != "Range" or indices.shape.rank != 1:
        return False
    start, _, delta = map(static_number, indices.op.inputs)
    return start == 0 and delta == 1


def before_casts(tensor: tf.Tensor) -> tf.Tensor:
    """The vector before ops that keep its entries (`Identity`, `Cast`, `Reshape`)."""
    while (tensor.op.type in ("Identity", "Cast") and tensor.dtype in EXACT) or (
        tensor.op.type == "Reshape"
        and tensor.shape.rank == tensor.op.inputs[0].shape.rank == 1
    ):
        tensor = tensor.op.inputs[0]
    return tensor


def _counts_rows(size: tf.Tensor, rows: tf.Tensor) -> bool:
    """Whether `size` is the number of rows of `rows`, or of a vector its length."""
    op = size.op
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(op.inputs[1])
    places = ([0], [-1]) if rows.shape.rank == 1 else ([0],)
    first = begin is not None and any(np.array_equal(begin, p) for p in places)
    return bool(
        first and op.get_attr("shrink_axis_mask") and op.inputs[0].op.inputs[0] is rows
    )


def pinned_to(op: tf.Operation) -> tf.Tensor | None:
    """The tensor n for an op that computes `min(n, max(n, anything))`; else None."""
    (output,) = op.outputs if op.type == "Minimum" else (None,)
    if output is None or output.shape.rank != 0 or not output.dtype.is_integer:
        return None
    for limit, other in (op.inputs, reversed(op.inputs)):
        if other.op.type == "Maximum" and any(t is limit for t in other.op.inputs):
            return limit
    return None


def is_pinned(op: tf.Operation) -> bool:
    """Whether an op computes a constant: `min(c, max(d, anything))` with d >= c."""
    if op.type != "Minimum" or not op.outputs[0].dtype.is_integer:
        return False
    for limit, other in (op.inputs, reversed(op.inputs)):
        top, least = tf.get_static_value(limit), _lower_bound(other)
        if top is not None and np.size(top) == 1 and least is not None:
            if least >= np.reshape(top, ())[()]:
                return True
    return False


def _lower_bound(tensor: tf.Tensor):
    value = tf.get_static_value(tensor)
    if value is not None:
        return np.min(value) if np.size(value) else None
    if tensor.op.type == "Identity":
        return _lower_bound(tensor.op.inputs[0])
    if tensor.op.type != "Maximum":
        return None
    bounds = [_lower_bound(t) for t in tensor.op.inputs]
    return max((b for b in bounds if b is not None), default=None)


def static_value(tensor: tf.Tensor):
    """The value of a tensor, with None for unknown entries; None if all are unknown."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    op = tensor.op
    if op.type == "Rank":
        return op.inputs[0].shape.rank
    if op.type == "Shape":
        rank = op.inputs[0].shape.rank
        return None if rank is None else np.array(op.inputs[0].shape.as_list(), object)
    if op.type in ops.SAME_NUMBERS:
        return _same_numbers(tensor, static_value(op.inputs[0]))
    if op.type == "Split":
        return _piece(tensor)
    compute = _COMPUTED.get(op.type)
    if compute is None:
        return None
    inputs = [static_value(t) for t in op.inputs]
    if op.type == "Pack":
        return _pack(op, *inputs)
    return None if any(value is None for value in inputs) else compute(op, *inputs)


def _same_numbers(tensor: tf.Tensor, value):
    """The numbers of a known value in the shape, and of the type, of a tensor."""
    lengths = tensor.shape.as_list() if tensor.shape.rank is not None else [None] * 2
    if value is None or lengths.count(None) > 1:
        return None
    numbers = np.reshape(value, [-1 if n is None else n for n in lengths])
    if tensor.op.type == "Cast" and tensor.dtype.is_integer:
        whole = [None if n is None else int(n) for n in np.ravel(numbers)]
        numbers = np.reshape(np.array(whole, object), numbers.shape)
    return numbers if numbers.ndim else numbers[()]


def _piece(tensor: tf.Tensor):
    """The known entries of a piece of a vector that is split into equal pieces."""
    value = static_value(tensor.op.inputs[1])
    if value is None or np.ndim(value) != 1:
        return None
    return np.split(value, len(tensor.op.outputs))[tensor.value_index]


def _pack(op, *parts):
    if any(t.shape.rank != 0 for t in op.inputs):
        return None
    entries = [None if part is None else np.reshape(part, ())[()] for part in parts]
    return np.array(entries, object)


def _slice(op, value, begin, end, step):
    names = ("ellipsis_mask", "new_axis_mask")
    if np.ndim(value) != 1 or any(map(op.get_attr, names)):
        return None
    bounds = [np.reshape(bound, [-1]).tolist() for bound in (begin, end, step)]
    if any(len(bound) != 1 or bound[0] is None for bound in bounds):
        return None
    begin, end, step = (int(bound[0]) for bound in bounds)
    if op.get_attr("shrink_axis_mask"):
        return value[begin]
    return value[
        None if op.get_attr("begin_mask") else begin : None
        if op.get_attr("end_mask")
        else end : step
    ]


def _range(op, start, limit, delta):
    bounds = [np.reshape(bound, ())[()] for bound in (start, limit, delta)]
    return None if None in bounds or bounds[2] == 0 else np.arange(*bounds)


def _cut(op, value, begin, size):
    bounds = [np.reshape(bound, [-1]).tolist() for bound in (begin, size)]
    if np.ndim(value) != 1 or any(len(b) != 1 or b[0] is None for b in bounds):
        return None
    first, count = (int(bound[0]) for bound in bounds)
    return value[first:] if count == -1 else value[first : first + count]


def _gather(op, value, indices, axis):
    if np.ndim(value) != 1 or None in np.reshape(indices, [-1]):
        return None
    return value[np.asarray(indices, int)]


def _concat(op, *parts):
    return np.concatenate([np.reshape(part, [-1]) for part in parts[:-1]])


def _prod(op, value, axes):
    entries = np.reshape(value, [-1]).tolist()
    if None in entries or np.ndim(value) > 1:
        return None
    return math.prod(entries)


def _pair(op, a, b):
    def compute(a, b):
        if a is None or b is None:
            return None
        if op.type in ops.QUOTIENTS:
            return a / b if b != 0 else None
        return _PAIRS[op.type](a, b)

    return _by_entry(compute, a, b)


def _select(op, test, yes, no):
    return _by_entry(
        lambda t, a, b: None if t is None else a if t else b, test, yes, no
    )


def _by_entry(compute: Callable, *values):
    """A function of each entry of numbers and vectors of a single length, or of 1."""
    lengths = {np.size(value) for value in values} - {1}
    if len(lengths) > 1 or any(np.ndim(value) > 1 for value in values):
        return None
    arrays = np.broadcast_arrays(*(np.array(value, object) for value in values))
    items = [compute(*entries) for entries in zip(*map(np.ravel, arrays), strict=True)]
    if all(entry is None for entry in items):
        return None
    return items[0] if arrays[0].ndim == 0 else np.array(items, object)


_COMPUTED = {
    "Pack": _pack,
    "StridedSlice": _slice,
    "Slice": _cut,
    "Range": _range,
    "GatherV2": _gather,
    "ConcatV2": _concat,
    "Prod": _prod,
    "Select": _select,
    "SelectV2": _select,
    **dict.fromkeys((*_PAIRS, *ops.QUOTIENTS), _pair),
}
