"""Blocks that mix rows within a record, or rows of different records (a fault).

Where a record is a single row, the blocks within a record change little or nothing.
"""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.env import floats, number_of
from tests.fuzz.gradient_mixers import damped
from tests.fuzz.mixers import vector_of
from tests.fuzz.registry import block


def _apart(x, each):
    """`[B K, ...]` as `[B, K, ...]`."""
    return tf.reshape(x, [-1, each, *x.shape[1:]])


def _mean(r):
    return tf.reduce_mean(r, axis=1, keepdims=True)


def _deviation(r):
    return 0.1 + tf.math.reduce_std(r, axis=1, keepdims=True)


def _attention(r):
    flat = tf.reshape(r, [-1, r.shape[1], r.shape[2:].num_elements()])
    weights = tf.nn.softmax(tf.matmul(flat, flat, transpose_b=True))
    return tf.reshape(weights @ flat, tf.shape(r))


# Of rows `[B, K, ...]`.
WITHIN = {
    "mean": lambda r: r - _mean(r),
    "standardised": lambda r: (r - _mean(r)) / _deviation(r),
    "stopped_std": lambda r: r / tf.stop_gradient(_deviation(r)),
    "max": lambda r: r - tf.reduce_max(r, axis=1, keepdims=True),
    "roll": lambda r: r + tf.roll(r, 1, axis=1),
    "reverse": lambda r: tf.reverse(r, [1]) + r * r,
    "softmax": lambda r: tf.nn.softmax(r, axis=1),
    "cumsum": lambda r: tf.cumsum(r, axis=1),
    "sort": lambda r: tf.sort(r, axis=1),
    "first": lambda r: r * (1 + r[:, :1]),
    "attention": lambda r: r + _attention(r),
}


@block("within_record", how=(*WITHIN, "segments", "damped"), weight=0)
def within_record(env, path, x, args, node):
    """Mixes the rows of a record, which is sound."""
    x, how = floats(env, x), args["how"]
    if how == "segments":
        return x - _segments(x, tf.range(number_of(x)) // env.each)
    rows = _apart(x, env.each)
    if how == "damped":
        largest = tf.reduce_max(vector_of(tf.abs(rows)), axis=1)
        return damped(x, tf.stop_gradient(tf.repeat(1 / (1 + largest), env.each)))
    return tf.reshape(WITHIN[how](rows), [-1, *x.shape[1:]])


def _segments(x, ids):
    means = tf.math.unsorted_segment_mean(x, ids, tf.shape(x)[0])
    return tf.gather(means, ids)


def _last(x, each):
    """Whether a row is the last of its record, `[B K, 1, ...]`."""
    found = tf.range(number_of(x)) % each == each - 1
    return tf.reshape(found, [-1] + [1] * (x.shape.rank - 1))


def _others(x, each):
    """The mean of all rows but the record's own."""
    own = tf.repeat(tf.reduce_sum(_apart(x, each), axis=1), each, axis=0)
    return (tf.reduce_sum(x, axis=0, keepdims=True) - own) / 5


def _other_order(x, each):
    """Takes the first rows of all records to come first."""
    rows = tf.reshape(x, [each, -1, *x.shape[1:]])
    return tf.reshape(rows - tf.reduce_mean(rows, 0, keepdims=True), tf.shape(x))


def _window(x):
    """Every row attends to its neighbours."""
    around = tf.stack([tf.roll(x, 1, 0), x, tf.roll(x, -1, 0)], axis=1)
    return _attention(around)[:, 1]


# Of rows `[B K, ...]` and K.
ACROSS = {
    "edge": lambda x, k: x + tf.where(_last(x, k), tf.roll(x, -1, 0), tf.zeros_like(x)),
    "shifted": lambda x, k: tf.roll(
        tf.reshape(WITHIN["mean"](_apart(tf.roll(x, 1, 0), k)), [-1, *x.shape[1:]]),
        -1,
        0,
    ),
    "next": lambda x, k: x + tf.roll(x, k, axis=0),
    "wrong_count": lambda x, k: x - _segments(x, tf.range(number_of(x)) // (k + 1)),
    "off_by_one": lambda x, k: x - _segments(x, (tf.range(number_of(x)) + 1) // k),
    "other_order": _other_order,
    "others": lambda x, k: x * (1 + _others(x, k)),
    "stopped_others": lambda x, k: x * (1 + tf.stop_gradient(_others(x, k))),
    "window": lambda x, k: x + _window(x),
    "damped": lambda x, k: damped(
        x, tf.stop_gradient(1 / (1 + tf.abs(vector_of(tf.roll(x, k, axis=0))[:, 0])))
    ),
}


@block("mix_records", how=tuple(ACROSS), mixes=True, weight=0)
def mix_records(env, path, x, args, node):
    """Rows of two records meet."""
    x = floats(env, x)
    return tf.ensure_shape(ACROSS[args["how"]](x, env.each), [None, *x.shape[1:]])
