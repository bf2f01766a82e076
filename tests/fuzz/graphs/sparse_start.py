"""Random graphs that begin with a sparse batch."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tests.fuzz.graphs.values import ROWS, Drawer, Value, fixed

#: How many columns the batch has.
WIDTH = 6


def start(draw: Drawer, batch: tf.SparseTensor) -> Value:
    """A dense tensor `[rows, ...]` of a sparse batch."""
    how = draw.pick(["matmul", "dense", "lookup", "softmax", "segments", "row sums"])
    draw.names.append(f"sparse {how}")
    if how == "matmul":
        found = tf.sparse.sparse_dense_matmul(batch, draw.parameters(WIDTH, 3))
        return Value(found, (ROWS, fixed(3)))
    if how == "dense":
        return Value(tf.sparse.to_dense(batch), (ROWS, fixed(WIDTH)))
    if how == "lookup":
        ids = tf.sparse.map_values(
            lambda v: tf.cast(tf.clip_by_value(tf.abs(v) * 2, 0, 4), tf.int64), batch
        )
        combiner = draw.pick(["sum", "mean", "sqrtn"])
        found = tf.nn.safe_embedding_lookup_sparse(
            draw.parameters(5, 4), ids, combiner=combiner
        )
        return Value(found, (ROWS, fixed(4)))
    if how == "softmax":
        batch = tf.sparse.softmax(batch)
    elif how == "segments":
        # Rows that have no entry at the end have no sum.
        found = tf.math.segment_sum(batch.values, batch.indices[:, 0])
        return Value(found[:, tf.newaxis], (ROWS, fixed(1)))
    elif how == "row sums":
        batch = tf.sparse.map_values(lambda v: v / tf.reduce_max(v), batch)
    found = tf.sparse.sparse_dense_matmul(batch, draw.parameters(WIDTH, 3))
    return Value(found, (ROWS, fixed(3)))


def of_dense(function: Callable) -> Callable:
    """The same function, given a dense batch; numbers below 0.2 are absent entries."""

    def given(x, y, weight):
        places = tf.where(tf.logical_not(x < 0.2))
        batch = tf.SparseTensor(places, tf.gather_nd(x, places), tf.shape(x, tf.int64))
        return function(batch, y, weight)

    return given
