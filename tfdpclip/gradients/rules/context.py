"""The rows of examples, for the rules: gradients and inputs `[B, rows, ...]`."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip._docs import see
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
    rows = flow.rows if flow.leads and flow.rows else None
    if rows is None:
        rows = rows_per_example(tensor, context.batch_size)
        with tf.control_dependencies(_whole_examples(tensor, rows, context, like)):
            tensor = tf.identity(tensor)
    return tf.reshape(tensor, [context.batch_size, rows, *rest])


def in_steps(tensor, context: Context, like, width: int, axes: int) -> tf.Tensor:
    """`[N, ..., *tail]` as `[B, T, width]`, with a tail of `axes` axes."""
    flow = context.flows[like]
    if flow.leads and flow.rows and not flow.minor:
        return merge_steps(tensor, context.batch_size, width, axes, flow.rows)
    tensor = by_example(tensor, context, like)
    return merge_steps(tensor, context.batch_size, width, axes, 1)


def _whole_examples(tensor, rows, context, like) -> list[tf.Operation]:
    """An assertion (which XLA drops) that axis 0 divides into examples."""
    assertion = tf.debugging.Assert(
        tf.equal(rows * context.batch_size, tf.shape(tensor)[0]),
        [
            f"ExampleIsolationError: the rows of {like.name!r} cannot be told apart by "
            "example: their number is no multiple of the number of losses. Keep the "
            "batch on axis 0, and give a loss for each example."
            + see("mixed-examples"),
        ],
    )
    return [] if assertion is None else [assertion]


def batch_first(tensor: tf.Tensor, context: Context) -> bool:
    """Whether axis 0 counts examples, if known; the first step's comparison tests.

    The entries of a sparse batch are on no axis of examples: the examples of two
    batches differ in how many of the entries are theirs.
    """
    axes = context.flows[tensor].axes
    if context.flows[tensor].entry is not None:
        return False
    if axes is None and context.flows.batch_size and tensor.shape.rank:
        length = tensor.shape[0]
        return length is None or length % context.flows.batch_size == 0
    return axes is None or axes == (0,)


def rows_of(context: Context, like: tf.Tensor) -> int | None:
    flow = context.flows[like]
    return flow.rows if flow.leads else None
