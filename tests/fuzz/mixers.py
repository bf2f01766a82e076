"""Blocks that combine examples: each that has an effect must be refused."""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.env import flat_size, floats, number_of, sequence, vector
from tests.fuzz.layers import tokens_of
from tests.fuzz.registry import block

L = tf.keras.layers


def _mean(x):
    return tf.reduce_mean(x, axis=0, keepdims=True)


def _segments(x, reduce):
    ids = tokens_of(vector_of(x)[:, 0], 2)
    return tf.gather(reduce(x, ids, 2), ids)


def vector_of(x):
    return tf.reshape(x, [-1, flat_size(x)])


def _interleaved(x):
    """Reshapes the batch in transposed order."""
    rest = list(range(2, x.shape.rank))
    return tf.reshape(tf.transpose(x, [1, 0, *rest]), [-1, *x.shape[1:]])


def _attention(x):
    flat = vector_of(x)
    weights = tf.nn.softmax(tf.matmul(flat, flat, transpose_b=True))
    return tf.reshape(weights @ flat, [-1, *x.shape[1:]])


def _running(x):
    return tf.scan(lambda h, row: 0.5 * h + row, x, tf.zeros_like(x[0]))


def _until(x):
    """As many steps as the slowest example needs."""

    def go(x):
        return tf.reduce_any(tf.abs(x) > 0.6)

    # An eager loop of no steps returns its very argument, which carries Keras's mask.
    return tf.while_loop(
        lambda x: go(x), lambda x: (0.7 * x,), (tf.identity(x),), maximum_iterations=6
    )[0]


def _scatter(x):
    count = number_of(x)
    places = (tf.range(count) + 1) % tf.maximum(count, 1)
    return tf.tensor_scatter_nd_add(x, places[:, tf.newaxis], x)


MIXES = {
    "mean": lambda x: x - _mean(x),
    "stopped_mean": lambda x: x - tf.stop_gradient(_mean(x)),
    "stopped_std": lambda x: (
        x / (0.1 + tf.stop_gradient(tf.math.reduce_std(x, axis=0, keepdims=True)))
    ),
    "max": lambda x: x - tf.reduce_max(x, axis=0, keepdims=True),
    "max_of_all": lambda x: x / (1 + tf.reduce_max(tf.abs(x))),
    "roll": lambda x: x + tf.roll(x, 1, axis=0),
    "rolled": lambda x: tf.roll(x, 1, axis=0),
    "reverse": lambda x: tf.reverse(x, [0]) + x * x,
    "gather": lambda x: x + tf.gather(x, (tf.range(number_of(x)) + 1) % number_of(x)),
    "gather_by_data": lambda x: tf.gather(x, tf.argsort(vector_of(x)[:, 0])),
    "sort": lambda x: tf.sort(x, axis=0),
    "softmax": lambda x: tf.nn.softmax(x, axis=0),
    "normalise": lambda x: tf.math.l2_normalize(x, axis=0),
    "global_norm": lambda x: tf.clip_by_norm(x, 1.0),
    "attention": lambda x: x + _attention(x),
    "cumsum": lambda x: tf.cumsum(x, axis=0),
    "scan": _running,
    "segment_mean": lambda x: x - _segments(x, tf.math.unsorted_segment_mean),
    "segment_sum": lambda x: x + 0.3 * _segments(x, tf.math.unsorted_segment_sum),
    "segment_max": lambda x: x - _segments(x, tf.math.unsorted_segment_max),
    "stopped_segment": lambda x: (
        x - tf.stop_gradient(_segments(x, tf.math.unsorted_segment_mean))
    ),
    "interleave": _interleaved,
    "shuffle": tf.random.shuffle,
    "cond": lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: 2 * x, lambda: x * x),
    "until": _until,
    "scatter": _scatter,
    "first": lambda x: x * (1 + x[:1]),
    "concat_shift": lambda x: x + tf.concat([x[1:], x[:1]], axis=0),
    "conv": lambda x: (
        x
        + tf.reshape(
            tf.nn.conv1d(
                vector_of(x)[tf.newaxis],
                tf.ones([2, flat_size(x), flat_size(x)], x.dtype) / 10,
                1,
                "SAME",
            )[0],
            [-1, *x.shape[1:]],
        )
    ),
    "unique_count": lambda x: (
        x * tf.cast(tf.size(tf.unique(tokens_of(vector_of(x)[:, 0], 3)).y), x.dtype)
    ),
    "any": lambda x: x * (1 + tf.cast(tf.reduce_any(vector_of(x)[:, 0] > 1), x.dtype)),
    "numpy": lambda x: (
        x
        + tf.ensure_shape(
            tf.numpy_function(
                lambda v: v - v.mean(axis=0, keepdims=True),
                [tf.stop_gradient(x)],
                x.dtype,
            ),
            x.shape,
        )
    ),
}


@block("mix", how=tuple(MIXES), mixes=True, weight=6)
def mix(env, path, x, args, node):
    return MIXES[args["how"]](floats(env, x))


@block("mix_time_major", how=("wrong_axis", "merged"), mixes=True)
def mix_time_major(env, path, x, args, node):
    """A layer that takes the batch for time."""
    x = sequence(env, x)
    if args["how"] == "merged":
        return tf.cumsum(tf.reshape(x, [-1, x.shape[2]]), axis=0)[: number_of(x)]

    def make(**kw):
        return L.SimpleRNN(3, return_sequences=True, unroll=False, **kw)

    return env.layer(path, make, tf.transpose(x, [1, 0, 2]))[0]


@block("mix_batch_norm", mixes=True, weight=1.5)
def mix_batch_norm(env, path, x, args, node):
    make = L.BatchNormalization
    return env.layer(path, make, floats(env, x), training=True)


@block("mix_gate", on=("zero", "one"), stop=(False, True), mixes=True, weight=1.5)
def mix_gate(env, path, x, args, node):
    """A batch statistic behind a gate, which may begin at 0."""
    x = floats(env, x)
    gate = env.weight(path, [x.shape[-1]], scale=float(args["on"] == "one"))
    mean = _mean(x)
    mean = tf.stop_gradient(mean) if args["stop"] else mean
    return x + env.read(gate, x) * mean


@block("mix_memory", how=("before", "after"), trained=(False, True), mixes=True)
def mix_memory(env, path, x, args, node):
    """A variable that keeps a statistic of the batch."""
    x = vector(env, x)
    memory = env.weight(path, [x.shape[1]], trainable=False)
    if args["trained"] and all(v is not memory for v in env.variables):
        env.variables.append(memory)
    mean = tf.cast(tf.stop_gradient(tf.reduce_mean(x, axis=0)), memory.dtype)
    if args["how"] == "before":
        return x * (1 + env.read(memory.assign(mean, read_value=True), x))
    old = env.read(memory, x)
    with tf.control_dependencies([old]):
        written = memory.assign(mean, read_value=False)
    with tf.control_dependencies([written] if written is not None else []):
        return x * (1 + old)
