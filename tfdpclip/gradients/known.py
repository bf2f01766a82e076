"""Values and sizes known before the step runs, though TensorFlow does not tell."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

_SAME = frozenset(
    "Cast Identity Reshape Squeeze ExpandDims EnsureShape StopGradient".split()
)
_QUOTIENTS = frozenset("RealDiv Div DivNoNan".split())


def static_number(tensor: tf.Tensor) -> float | None:
    """The value of a constant number, through a few ops more than TensorFlow folds."""
    value = known_value(tensor)
    known = value is not None and np.size(value) == 1
    value = np.reshape(value, ())[()] if known else None
    return None if value is None else float(value)


def known_shape(output: tf.Tensor) -> list[int | None]:
    """The static shape of a `Reshape`, with the sizes that its inputs tell."""
    shape = output.shape.as_list()
    if None not in shape:
        return shape
    found = known_value(output.op.inputs[1])
    if found is None or np.size(found) != len(shape):
        return shape
    told = (None if b is None or b < 0 else int(b) for b in np.reshape(found, [-1]))
    return [b if a is None else a for a, b in zip(shape, told, strict=True)]


def is_pinned(op: tf.Operation) -> bool:
    """Whether an op is a constant whatever its inputs: min(c, max(c, anything))."""
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


def known_value(tensor: tf.Tensor):
    """An array whose unknown entries are None; None if nothing is known."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    op = tensor.op
    if op.type == "Shape":
        rank = op.inputs[0].shape.rank
        return None if rank is None else np.array(op.inputs[0].shape.as_list(), object)
    if op.type in _SAME:
        return known_value(op.inputs[0])
    compute = _COMPUTED.get(op.type)
    if compute is None:
        return None
    inputs = [known_value(t) for t in op.inputs]
    if op.type == "Pack":
        return _pack(op, *inputs)
    return None if any(value is None for value in inputs) else compute(op, *inputs)


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
    a, b = (np.reshape(v, ())[()] if np.size(v) == 1 else None for v in (a, b))
    if a is None or b is None:
        return None
    if op.type == "Mul":
        return a * b
    if op.type == "Maximum":
        return max(a, b)
    return a / b if b != 0 else None


_COMPUTED = {
    "Pack": _pack,
    "StridedSlice": _slice,
    "GatherV2": _gather,
    "ConcatV2": _concat,
    "Prod": _prod,
    **dict.fromkeys(("Mul", "Maximum", *_QUOTIENTS), _pair),
}
