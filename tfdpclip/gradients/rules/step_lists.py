"""Lists that a loop carries, with a value for each step."""

from __future__ import annotations

import tensorflow as tf

from tfdpclip._devices import has_form_of_xla


def empty_list(
    tensor: tf.Tensor, loop: tf.Operation, length: tf.Tensor | None = None
) -> tf.Tensor:
    """An empty list for a value of `tensor` at each step.

    Args:
      tensor: a tensor of the loop's body.
      loop: the loop.
      length: how many rows the tensor has, if its static shape does not tell. XLA makes
        no list for elements of unknown shape.
    """
    shape = _shape_of(tensor)
    if length is not None:
        shape[0] = length
    return tf.raw_ops.EmptyTensorList(
        element_shape=shape,
        # XLA needs the largest number of elements.
        max_num_elements=loop.inputs[1] if has_form_of_xla() else tf.constant(-1),
        element_dtype=tensor.dtype,
    )


def stacked(values: tf.Tensor, tensor: tf.Tensor, count: int | None) -> tf.Tensor:
    """A list of `count` values of `tensor` as `[T, N, ...]`."""
    steps = tf.raw_ops.TensorListStack(
        input_handle=values,
        element_shape=_shape_of(tensor),
        element_dtype=tensor.dtype,
        num_elements=-1,
    )
    if has_form_of_xla():
        steps = steps[:count]
    return tf.ensure_shape(steps, [count, *tensor.shape])


def _shape_of(tensor: tf.Tensor) -> list[int]:
    return [-1 if size is None else size for size in tensor.shape]


def rows_first(steps: tf.Tensor) -> tf.Tensor:
    """`[T, N, ...]` as `[N * T, ...]`."""
    rank, shape = steps.shape.rank, tf.shape(steps)
    turned = tf.transpose(steps, [1, 0, *range(2, rank)])
    flat = tf.reshape(turned, tf.concat([[shape[0] * shape[1]], shape[2:]], 0))
    known = None not in steps.shape[:2].as_list()
    rows = steps.shape[0] * steps.shape[1] if known else None
    return tf.ensure_shape(flat, [rows, *steps.shape[2:]])
