"""The rows of examples, for the rules: gradients and inputs `[B, rows, ...]`."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.forms.base_form import merge_steps, rows_per_example


@dataclasses.dataclass
class Context:
    """The analysis of the losses, for rules.

    Attributes:
      flows: the analysis.
      batch_size: B, a scalar int32 tensor.
    """

    flows: Dataflow
    batch_size: tf.Tensor


def in_float(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in float32 at least."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.float32, tf.float64):
        return tensor
    return tf.cast(tensor, tf.float32)


def by_example(tensor: tf.Tensor, context: Context, like: tf.Tensor) -> tf.Tensor:
    """`[N, ...]` as `[B, rows, ...]`; the analysis of `like` has the number of rows.

    Args:
      tensor: has the rows of `like` on axis 0.
      context: the analysis and B.
      like: a tensor of the analysed graph.
    """
    flow = context.flows[like]
    rest = tensor.shape[1:].as_list()
    if None in rest:
        dynamic = tf.shape(tensor)
        rest = [dynamic[i + 1] if d is None else d for i, d in enumerate(rest)]
    if flow.leads and flow.minor:
        split = tf.reshape(tensor, [flow.repeats, context.batch_size, -1])
        split = tf.transpose(split, [1, 0, 2])
        return tf.reshape(split, [context.batch_size, flow.rows, *rest])
    if flow.leads and flow.rows == 1:
        return tensor[:, tf.newaxis]
    rows = flow.rows if flow.leads else None
    rows = rows or rows_per_example(tensor, context.batch_size)
    return tf.reshape(tensor, [context.batch_size, rows, *rest])


def in_steps(tensor, context: Context, like, width: int, axes: int) -> tf.Tensor:
    """`[N, ..., *tail]` as `[B, T, width]`, with a tail of `axes` axes."""
    flow = context.flows[like]
    if flow.leads and flow.rows and not flow.minor:
        return merge_steps(tensor, context.batch_size, width, axes, flow.rows)
    tensor = by_example(tensor, context, like)
    return merge_steps(tensor, context.batch_size, width, axes, 1)


def rows_of(context: Context, like: tf.Tensor) -> int | None:
    flow = context.flows[like]
    return flow.rows if flow.leads else None
