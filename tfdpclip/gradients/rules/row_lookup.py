"""Rows of a table that are looked up, and summed by example."""

from __future__ import annotations

import tensorflow as tf

from tfdpclip.gradients.graph.calls import gradient_function


def entries_by_example(
    product: tf.Operation, batch_size: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The columns and values of each row of a sparse batch, `[B, T]` both.

    Args:
      product: a `SparseTensorDenseMatMul` of the batch with a table.
      batch_size: B.
    """
    rows, columns = tf.unstack(product.inputs[0], num=2, axis=1)
    order = tf.argsort(rows, stable=True)

    def by_example(entries):
        ragged = tf.RaggedTensor.from_value_rowids(
            tf.gather(entries, order),
            tf.gather(rows, order),
            nrows=tf.cast(batch_size, tf.int64),
            validate=False,
        )
        return ragged.to_tensor()

    return by_example(columns), by_example(product.inputs[1])


def pooling_factors(rows: tf.Tensor, flows) -> tuple[tf.Tensor, bool] | None:
    """The factors by which looked-up rows enter a sum over all rows of their example.

    Args:
      rows: `[B, ..., D]`, the output of a lookup.
      flows: the analysis.

    Returns:
      The factors `[B, ..., 1]`, and whether the rows are added or averaged as they are,
      so that all factors are 1: the gradient at `rows` is the product of the factors
      and of one row for each example. None if the rows have another use, or none that
      this function knows.
    """
    flow, tensor, factors = flows[rows], rows, None
    if not (flow.leads and flow.rows == 1 and not flow.minor):
        return None
    while True:
        users = [user for user in tensor.consumers() if user in flows]
        if len(users) != 1 or gradient_function(users[0]) is not None:
            return None
        (user,) = users
        if user.type in ("Sum", "Mean"):
            axes = tf.get_static_value(user.inputs[1])
            if axes is None or user.inputs[0].ref() != tensor.ref():
                return None
            axes = sorted(axis % tensor.shape.rank for axis in axes.reshape([-1]))
            if axes != list(range(1, tensor.shape.rank - 1)):
                return None
            even = factors is None
            return (tf.ones_like(rows[..., :1]) if even else factors), even
        others = [t for t in user.inputs if t.ref() != tensor.ref()]
        if user.type == "Mul" and len(others) == 1:
            if others[0].shape.num_elements() != 1:
                if factors is not None or not _scales_rows(others[0], tensor):
                    return None
                factors = tf.broadcast_to(others[0], tf.shape(tensor[..., :1]))
        elif user.type == "RealDiv" and user.inputs[0].ref() == tensor.ref():
            if len(others) != 1 or others[0].shape.num_elements() != 1:
                return None
        elif user.type != "Identity":
            return None
        tensor = user.outputs[0]


def _scales_rows(factors: tf.Tensor, rows: tf.Tensor) -> bool:
    """Whether `factors` have an entry for each row, of static places in an example."""
    if factors.shape.rank != rows.shape.rank or factors.shape[-1] != 1:
        return False
    places = rows.shape[1:-1]
    return places.is_fully_defined() and factors.shape[1:-1] == places
