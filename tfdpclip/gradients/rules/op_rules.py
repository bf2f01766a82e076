"""The rules of the library: a function for each kind of op.

`rule_table.py` has the arguments and results of a rule, and how to add a rule. The
rules for contractions are in `contraction_rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip._docs import see
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.forms.base_form import Explicit, first_rows, sum_squares
from tfdpclip.gradients.forms.convolution import Convolution
from tfdpclip.gradients.forms.geometry import Geometry
from tfdpclip.gradients.forms.lookup import Lookup, PooledLookup
from tfdpclip.gradients.graph import op_copies, ops
from tfdpclip.gradients.rules.context import (
    by_example,
    in_float,
    in_steps,
    rows_of,
)
from tfdpclip.gradients.rules.row_lookup import pooling_factors, row_lookup

# Elementwise ops with broadcasting.


def _explicit(use, values, shape, context):
    """Sums `values`, `[N, ...]` of the output's shape, over the broadcast axes."""
    flow, rank = context.flows[use.output], use.output.shape.rank
    place = flow.axes[0] if flow.axes and len(flow.axes) == 1 else 0
    if not (flow.leads or place and not flow.minor):
        return None
    padded = [1] * (rank - len(shape)) + list(shape)
    if len(shape) > rank or (len(shape) == rank and shape[place] != 1):
        return None
    if place:
        # Time may be the first axis, as in `[T, B, ...]`.
        order = [place, *(i for i in range(rank) if i != place)]
        values, padded = tf.transpose(values, order), [padded[i] for i in order]
    axes = [i for i in range(1, rank) if padded[i] == 1]
    reduced = tf.reduce_sum(values, axis=vector(*axes)) if axes else values
    several = not (flow.rows == 1 and (place or flow.leads))
    if several:
        reduced = tf.reduce_sum(by_example(reduced, context, use.output), axis=1)

    def parts(count):
        each = by_example(values, context, use.output) if several else values
        return sum_squares(first_rows(each, count))

    return Explicit(
        tf.reshape(reduced, vector(context.batch_size, *shape)),
        shape,
        parts if axes or several else None,
    )


def _add(use, dz, shape, context):
    return _explicit(use, dz, shape, context)


def _subtract(use, dz, shape, context):
    return _explicit(use, -dz if use.index == 1 else dz, shape, context)


def _multiply(use, dz, shape, context):
    other = in_float(use.op.inputs[1 - use.index])
    if other.dtype != dz.dtype:
        other = tf.cast(other, dz.dtype)
    return _explicit(use, dz * other, shape, context)


def _bias_add(use, dz, shape, context):
    if use.index != 1:
        return None
    if use.op.get_attr("data_format") == b"NCHW":
        if not context.flows[use.output].leads:
            return None
        rank = use.output.shape.rank
        dz = tf.transpose(dz, [0, *range(2, rank), 1])
    return _explicit(use, dz, shape, context)


def _elementwise(use, dz, shape, context):
    """Every further elementwise op: copies the parameter for each row, differentiates.

    The op is emitted again with a copy of the parameter for each row, in float32, so
    that its ordinary gradient is the gradient row by row.
    """
    rank = use.output.shape.rank
    if not context.flows[use.output].leads:
        return None
    if len(shape) > rank or (len(shape) == rank and shape[0] != 1):
        return None
    padded = [1] * (rank - len(shape)) + list(shape)
    rows = tf.shape(use.output)[0]
    copies = tf.tile(
        tf.reshape(in_float(use.param), padded), [rows, *([1] * (rank - 1))]
    )
    inputs = [
        tf.stop_gradient(in_float(t)) if t.dtype.is_floating else t
        for t in use.op.inputs
    ]
    inputs[use.index] = copies
    (again,) = op_copies.emit_in_type(use.op, inputs)
    (gradient,) = tf.gradients(again, copies, grad_ys=dz)
    if gradient is None:
        return None
    flow, parts = context.flows[use.output], None
    if not (flow.leads and flow.rows == 1):
        by_row = by_example(gradient, context, use.output)
        gradient = tf.reduce_sum(by_row, axis=1)

        def parts(count):
            return sum_squares(first_rows(by_row, count))

    return Explicit(tf.reshape(gradient, [context.batch_size, *shape]), shape, parts)


def _tile(use, dz, shape, context):
    if use.index != 0 or use.op.type == "Tile" and len(shape) != dz.shape.rank:
        return None
    if use.op.type == "Tile":
        static = tf.get_static_value(use.op.inputs[1], partial=True)
        if static is None:
            return None
        for size, times in zip(shape, list(static), strict=True):
            if size != 1 and times != 1:
                return None
    return _explicit(use, dz, shape, context)


def _fused_batch_norm(use, dz, shape, context):
    """Inference mode: scale and offset are elementwise. Training mode couples."""
    op = use.op
    if use.index not in (1, 2):
        return None
    if op.get_attr("is_training"):
        raise ExampleIsolationError(
            f"{op.name!r} normalises with the statistics of the batch (batch "
            "normalisation in training mode), so every example reaches the gradients "
            "of the whole batch. Use GroupNormalization or LayerNormalization, or "
            "freeze the layer with layer.trainable = False." + see("mixed-examples")
        )
    x, mean, variance = (in_float(op.inputs[i]) for i in (0, 3, 4))
    if op.get_attr("data_format") in (b"NCHW", b"NCDHW"):
        if not context.flows[use.output].leads:
            return None
        perm = [0, *range(2, x.shape.rank), 1]
        x, dz = tf.transpose(x, perm), tf.transpose(dz, perm)
    if use.index == 1:
        dz = dz * (x - mean) * tf.math.rsqrt(variance + op.get_attr("epsilon"))
    return _explicit(use, dz, shape, context)


# Lookups.


def _gather(use, dz, shape, context):
    if use.index != 0 or use.op.get_attr("batch_dims") != 0:
        return None
    if use.op.type == "GatherV2":
        axis = tf.get_static_value(use.op.inputs[2])
        if axis is None or int(axis) != 0:
            return None
    ids = use.op.inputs[1]
    if not context.flows[ids].leads:
        return None
    width = math.prod(shape[1:])
    flat = tf.squeeze(in_steps(ids, context, ids, 1, 0), axis=-1)
    z = in_steps(dz, context, ids, width, len(shape) - 1)
    steps = rows_of(context, ids)
    for size in ids.shape[1:].as_list():
        steps = None if steps is None or size is None else steps * size
    pooling = pooling_factors(use.output, context.flows)
    if pooling is None:
        return Lookup(flat, z, shape, steps)
    factors, even = pooling
    factors = in_steps(factors, context, ids, 1, 1)
    factors = tf.cast(tf.squeeze(factors, axis=-1), z.dtype)
    if even:
        row = _shared_row(dz, z)
        return PooledLookup(flat, factors, row, shape, steps, even=True)
    # The gradient at the sum over the tokens, from the token of the largest factor.
    best = tf.argmax(tf.abs(factors), axis=1)[:, tf.newaxis]
    row = tf.squeeze(tf.gather(z, best, batch_dims=1), axis=1)
    row = tf.math.divide_no_nan(row, tf.gather(factors, best, batch_dims=1))
    return PooledLookup(flat, factors, row, shape, steps)


def _shared_row(dz: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """The row `[B, D]` that all of an example's rows `z`, `[B, T, D]`, are equal to.

    Where `dz` is the gradient of a sum or a mean, the equal rows are not made for it.
    """
    rows, count = dz, None
    if dz.op.type == "RealDiv" and dz.op.inputs[1].shape.rank == 0:
        rows, count = dz.op.inputs
    if rows.op.type != "BroadcastTo":
        return z[:, 0]
    row = tf.reshape(rows.op.inputs[0], vector(-1, z.shape[-1]))
    return row if count is None else row / count


def _row_lookup(use, dz, shape, context):
    """Rows summed by example, by lists of ids: a sparse batch."""
    found = row_lookup(use.op)
    flow = context.flows[use.output]
    if found is None or not flow.leads or flow.rows != 1 or not use.path.isometric:
        return None
    ids, factors = found.padded(context.batch_size)
    row = tf.reshape(dz, [context.batch_size, math.prod(shape[1:])])
    return PooledLookup(ids, tf.cast(factors, dz.dtype), row, shape, None)


# Convolutions.


def _convolution(use, dz, shape, context):
    op = use.op
    if use.index != 1:
        return None
    transposed = op.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
    source = op.inputs[2] if transposed else op.inputs[0]
    x = in_float(source)
    layout = op.get_attr("data_format").decode()
    first = layout in ("NCHW", "NCDHW")
    strides, dilations = list(op.get_attr("strides")), list(op.get_attr("dilations"))
    padding = op.get_attr("padding").decode()
    explicit = None
    if padding == "EXPLICIT":
        flat = list(op.get_attr("explicit_paddings"))
        explicit = list(zip(flat[::2], flat[1::2], strict=True))
    if first:
        perm = [0, *range(2, x.shape.rank), 1]
        x, dz = tf.transpose(x, perm), tf.transpose(dz, perm)
        cut = slice(2, None)
    else:
        cut = slice(1, -1)
    big, small = (dz, x) if transposed else (x, dz)
    if big.shape[-1] is None or small.shape[-1] is None:
        return None
    depthwise = op.type == "DepthwiseConv2dNative"
    groups = 1 if depthwise else big.shape[-1] // shape[-2]
    geometry = Geometry(
        kernel=tuple(shape[:-2]),
        strides=tuple(strides[cut]),
        dilations=tuple(dilations[cut]),
        padding=tuple(explicit[cut]) if explicit else padding,
        groups=groups,
        depthwise=depthwise,
    )
    if context.flows[use.output].minor:
        big, small = (_major(t, context, use.output) for t in (big, small))
    flow = context.flows[use.output]
    rows = flow.rows if flow.leads else None
    return Convolution(big, small, geometry, shape, context.batch_size, rows)


def _major(tensor, context, like):
    """The rows of each example next to each other."""
    grouped = by_example(tensor, context, like)
    rest = tf.shape(tensor)[1:]
    flat = tf.reshape(grouped, tf.concat([[-1], rest], 0))
    flat.set_shape([None, *tensor.shape[1:]])
    return flat


_ELEMENTWISE = """RealDiv Div DivNoNan Maximum Minimum Pow SquaredDifference SelectV2
    Atan2 Xlogy Xlog1py Xdivy FloorMod"""
_CONVOLUTIONS = """Conv2D Conv3D DepthwiseConv2dNative Conv2DBackpropInput
    Conv3DBackpropInputV2"""
_BY_ROWS = (*ops.SEGMENT_LOOKUPS, "SegmentSum", "SparseTensorDenseMatMul")
#: The rules, by type of op.
RULES: dict[str, Callable] = {
    **dict.fromkeys(("Add", "AddV2"), _add),
    "Sub": _subtract,
    "Mul": _multiply,
    "BiasAdd": _bias_add,
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(("BroadcastTo", "Tile"), _tile),
    "FusedBatchNormV3": _fused_batch_norm,
    **dict.fromkeys(("ResourceGather", "GatherV2"), _gather),
    **dict.fromkeys(_BY_ROWS, _row_lookup),
    **dict.fromkeys(_CONVOLUTIONS.split(), _convolution),
}
