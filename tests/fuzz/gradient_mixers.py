"""Gates of gradients: the value is unchanged, and its gradient is scaled.

Scaling by a statistic of the batch must be refused; scaling by the example's own
numbers is sound.
"""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.env import floats, number_of, sequence, vector
from tests.fuzz.layers import tokens_of
from tests.fuzz.mixers import vector_of
from tests.fuzz.registry import block


def norms_of(rows):
    return tf.sqrt(tf.reduce_sum(tf.square(rows), axis=1) + 1e-6)


def under(size):
    """From 1 at 0 to 0 at infinity."""
    return 1 / (1 + tf.abs(size))


def _largest_by_loop(n):
    count = tf.shape(n)[0]
    _, found = tf.while_loop(
        lambda i, found: i < count,
        lambda i, found: (i + 1, tf.maximum(found, n[i])),
        (tf.constant(0), tf.zeros([], n.dtype)),
    )
    return found


def _classes(rows):
    return tokens_of(rows[:, 0], 2)


def _of_segments(reduce):
    def found(rows, n):
        ids = _classes(rows)
        return under(tf.gather(reduce(n, ids, 2), ids))

    return found


def _capacity(rows, n):
    """1 for the first example of each class, 0 for the later examples of that class."""
    places = tf.cumsum(tf.one_hot(_classes(rows), 2, dtype=n.dtype), axis=0)
    mine = tf.gather(places, _classes(rows), axis=1, batch_dims=1)
    return tf.cast(mine <= 1, n.dtype)


def _spectrum(n):
    return tf.abs(tf.signal.fft(tf.complex(n, tf.zeros_like(n))))


def _along(n):
    """A convolution over the batch."""
    kernel = tf.ones([3, 1, 1], n.dtype) / 3
    found = tf.nn.conv1d(n[tf.newaxis, :, tf.newaxis], kernel, 1, "SAME")
    return found[0, :, 0]


def _counts(rows):
    tokens = tokens_of(rows[:, 0], 3)
    found = tf.unique_with_counts(tokens)
    return tf.gather(found.count, found.idx)


def _histogram(n):
    counts = tf.histogram_fixed_width(n, tf.constant([0, 2], n.dtype), 6)
    return tf.cast(counts[3], n.dtype)


def _quantised(n):
    """Steps of a range that is that of the batch."""
    found = tf.raw_ops.QuantizeAndDequantizeV2(
        input=n,
        input_min=tf.zeros([], n.dtype),
        input_max=tf.zeros([], n.dtype),
        num_bits=3,
        range_given=False,
    )
    return under(found)


def _ranks(n):
    return tf.argsort(tf.argsort(n))


def _share(part, n):
    # Of as many as batches have at most: a division by their size would be refused.
    return (tf.cast(part, n.dtype) + 1) / 7


# name -> g of rows `[B, n]` and their norms `[B]`: `[B]` or `[]`, from 0 to 1.
STATISTICS = {
    "sort": lambda r, n: under(tf.sort(n)[-1]),
    "max": lambda r, n: under(tf.reduce_max(n)),
    "top_k": lambda r, n: under(tf.math.top_k(n, 1).values[0]),
    "argsort": lambda r, n: under(tf.gather(n, tf.argsort(n)[-1])),
    "searchsorted": lambda r, n: _share(tf.searchsorted(tf.sort(n), n), n),
    "ranks": lambda r, n: _share(_ranks(n), n),
    "scan": lambda r, n: under(tf.scan(tf.maximum, n)),
    "map_row": lambda r, n: tf.sigmoid(tf.map_fn(lambda v: tf.norm(v - r[0]), r)),
    "vectorized_row": lambda r, n: tf.sigmoid(
        tf.vectorized_map(lambda v: tf.reduce_sum(v * r[0]), r)
    ),
    "row": lambda r, n: 0.2 + 0.8 * tf.cast(n <= n[0], n.dtype),
    "last_row": lambda r, n: under(n[-1]),
    "histogram": lambda r, n: under(_histogram(n)),
    "softmax": lambda r, n: tf.nn.softmax(n),
    "logsumexp": lambda r, n: under(tf.reduce_logsumexp(n)),
    "normalise": lambda r, n: tf.math.l2_normalize(n),
    "svd": lambda r, n: under(tf.linalg.svd(r, compute_uv=False)[0]),
    "gram": lambda r, n: under(tf.reduce_max(tf.matmul(r, r, transpose_b=True))),
    "einsum": lambda r, n: tf.sigmoid(tf.einsum("in,jn->i", r, r)),
    "fft": lambda r, n: under(_spectrum(n)[0]),
    "conv": lambda r, n: under(_along(n)),
    "quantise": lambda r, n: _quantised(n),
    "cumsum": lambda r, n: under(tf.cumsum(n)),
    "cumprod": lambda r, n: under(tf.math.cumprod(n, exclusive=True)),
    "segment_max": _of_segments(tf.math.unsorted_segment_max),
    "segment_sum": _of_segments(tf.math.unsorted_segment_sum),
    "bincount": lambda r, n: under(
        tf.cast(tf.math.bincount(_classes(r), minlength=2)[0], n.dtype)
    ),
    "capacity": _capacity,
    "any": lambda r, n: 1 - 0.7 * tf.cast(tf.reduce_any(n > 1.5), n.dtype),
    "all": lambda r, n: 1 - 0.7 * tf.cast(tf.reduce_all(n > 0.5), n.dtype),
    "median": lambda r, n: under(tf.sort(n)[tf.shape(n)[0] // 2]),
    "near_median": lambda r, n: tf.cast(
        n <= 1.5 * tf.sort(n)[tf.shape(n)[0] // 2], n.dtype
    ),
    "count": lambda r, n: under(tf.reduce_sum(tf.cast(n > 1, n.dtype))),
    "unique": lambda r, n: under(tf.cast(_counts(r), n.dtype)),
    "shift": lambda r, n: under(tf.roll(n, 1, axis=0)),
    "reverse": lambda r, n: under(tf.reverse(n, [0])),
    "loop": lambda r, n: under(_largest_by_loop(n)),
    "partition": lambda r, n: under(
        tf.reduce_sum(tf.dynamic_partition(n, _classes(r), 2)[1])
    ),
    "mask_size": lambda r, n: under(
        tf.cast(tf.size(tf.boolean_mask(n, n > 1)), n.dtype)
    ),
    "argmax": lambda r, n: (
        0.2 + 0.8 * tf.one_hot(tf.argmax(n), tf.shape(n)[0], dtype=n.dtype)
    ),
    "std": lambda r, n: under(tf.math.reduce_std(n)),
    "numpy": lambda r, n: tf.ensure_shape(
        tf.numpy_function(lambda v: 1 / (1 + v.max()), [n], n.dtype), []
    ),
}


def gate_of(x, how):
    rows = vector_of(tf.stop_gradient(x))
    if x.dtype == tf.bfloat16:
        rows = tf.cast(rows, tf.float32)
    found = STATISTICS[how](rows, norms_of(rows))
    return tf.cast(tf.stop_gradient(found), x.dtype)


def like(gate, x):
    """`[B]` or a scalar, against `[B, ...]`."""
    return tf.reshape(gate, [-1] + [1] * (x.shape.rank - 1))


def damped(x, gate):
    """The value of `x`, and `gate` times its gradient."""
    gate = like(gate, x)
    return gate * x + tf.stop_gradient((1 - gate) * x)


def masked(x, kept):
    """The value of `x`; its gradient only where `kept` is true."""
    return tf.where(like(kept, x), x, tf.stop_gradient(x))


def scaled_backwards(x, gate):
    """The same, by a gradient of its own."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda dy: dy * like(gate, dy)

    return identity(x)


def _in_loop(x, how):
    def body(i, x):
        return i + 1, damped(x, gate_of(x, how))

    _, found = tf.while_loop(
        lambda i, _: i < 2, body, (tf.constant(0), x), maximum_iterations=2
    )
    return tf.ensure_shape(found, x.shape)


def _seldom(x, how):
    """Scales only in a batch with an example much larger than the median example."""
    rows = tf.cast(vector_of(tf.stop_gradient(x)), tf.float32)
    sizes = tf.sort(norms_of(rows))
    unusual = sizes[-1] > 3 * sizes[tf.shape(sizes)[0] // 2]
    return tf.cond(unusual, lambda: damped(x, gate_of(x, how)), lambda: tf.identity(x))


FORMS = {
    "damped": lambda x, how: damped(x, gate_of(x, how)),
    "masked": lambda x, how: masked(x, gate_of(x, how) >= 0.4),
    "backwards": lambda x, how: scaled_backwards(x, gate_of(x, how)),
    # The value changes, the gradient does not.
    "straight": lambda x, how: x + tf.stop_gradient((like(gate_of(x, how), x) - 1) * x),
    "seldom": _seldom,
    "loop": _in_loop,
}


@block("mix_gradient", how=tuple(STATISTICS), form=tuple(FORMS), mixes=True, weight=8)
def mix_gradient(env, path, x, args, node):
    """A statistic of the batch scales gradients."""
    return FORMS[args["form"]](floats(env, x), args["how"])


# Scalings of the batch's gradients by a statistic of these gradients.
COTANGENTS = {
    "max": lambda dy: dy * under(tf.reduce_max(tf.abs(dy))),
    "norm": lambda dy: tf.clip_by_norm(dy, 0.01),
    "mean": lambda dy: dy - tf.reduce_mean(dy, axis=0, keepdims=True),
    "sort": lambda dy: dy * under(tf.sort(tf.reshape(dy, [-1]))[-1]),
    "shift": lambda dy: dy + tf.roll(dy, 1, axis=0),
    "shifted": lambda dy: tf.roll(dy, 1, axis=0),
    "row": lambda dy: dy * tf.cast(tf.abs(dy) <= 2 * tf.abs(dy[:1]), dy.dtype),
}


@block("mix_cotangents", how=tuple(COTANGENTS), mixes=True, weight=1.5)
def mix_cotangents(env, path, x, args, node):
    """The gradients of the batch are combined on the way back."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), COTANGENTS[args["how"]]

    return identity(floats(env, x))


# Sound: an example's own numbers.


def _own(x):
    """Norms, `[B]`."""
    return norms_of(vector_of(tf.stop_gradient(x)))


def _of_features(x, k):
    """The k-th largest entry of each example, `[B, 1, ...]`."""
    values = tf.math.top_k(vector_of(tf.stop_gradient(x)), k).values
    return like(values[:, -1], x)


def _sorted_middle(x):
    values = tf.sort(vector_of(tf.stop_gradient(x)), axis=1)
    return like(values[:, values.shape[1] // 2], x)


def _kept_entries(x, kept):
    return tf.where(kept, x, tf.stop_gradient(x))


def _straight(x, value):
    return x + tf.stop_gradient(value - x)


def _one_hot(x):
    found = tf.nn.softmax(x)
    return _straight(found, tf.one_hot(tf.argmax(x, -1), x.shape[-1], dtype=x.dtype))


def _chosen(row):
    large = tf.reduce_sum(tf.square(row)) > 1
    return tf.cond(large, lambda: row, lambda: tf.stop_gradient(row))


def _places(x):
    rows = tf.stop_gradient(vector_of(x))
    places = tf.searchsorted(tf.sort(rows, axis=1), rows[:, :1])
    return tf.cast(places[:, 0], x.dtype) / rows.shape[1]


def _largest_values(x):
    found = tf.linalg.svd(tf.stop_gradient(x), compute_uv=False)
    return tf.reshape(found, [number_of(x), -1])[:, 0]


def _own_spectrum(x):
    rows = tf.stop_gradient(vector_of(x))
    found = tf.signal.fft(tf.complex(rows, tf.zeros_like(rows)))
    return tf.abs(found)[:, 1 % rows.shape[1]]


GATES = {
    "damped": lambda x: damped(x, under(_own(x))),
    "masked": lambda x: masked(x, _own(x) > 1),
    "backwards": lambda x: scaled_backwards(x, under(_own(x))),
    "half": lambda x: scaled_backwards(x, tf.constant(0.5, x.dtype)),
    "threshold": lambda x: _kept_entries(x, tf.abs(x) > 0.5),
    "top_k": lambda x: _kept_entries(x, x >= _of_features(x, 2) - 0.01),
    "sort": lambda x: _kept_entries(x, x >= _sorted_middle(x) - 0.01),
    "searchsorted": lambda x: damped(x, _places(x)),
    "cumsum": lambda x: _kept_entries(x, tf.cumsum(tf.stop_gradient(x), axis=1) > 0),
    "softmax": lambda x: x * tf.stop_gradient(tf.nn.softmax(x)),
    "round": lambda x: _straight(x, tf.round(4 * x) / 4),
    "sign": lambda x: _straight(x, tf.sign(x)),
    "clip": lambda x: _straight(x, tf.clip_by_value(x, -0.7, 0.7)),
    "one_hot": _one_hot,
    "fake_quant": lambda x: tf.quantization.fake_quant_with_min_max_args(x, -2, 2),
    "map": lambda x: tf.map_fn(_chosen, x),
    "vectorized": lambda x: damped(
        x, tf.vectorized_map(lambda v: under(tf.norm(v)), tf.stop_gradient(x))
    ),
    "svd": lambda x: damped(x, under(_largest_values(x))),
    "fft": lambda x: damped(x, under(_own_spectrum(x))),
    "first_feature": lambda x: damped(x, tf.sigmoid(vector_of(x)[:, 0])),
}
_FLOAT32 = ("fake_quant", "svd", "fft")


@block("gate_gradient", how=tuple(GATES), weight=2)
def gate_gradient(env, path, x, args, node):
    """An example's own numbers scale its gradient."""
    how = args["how"]
    x = {"svd": sequence, "vectorized": vector}.get(how, floats)(env, x)
    if how in _FLOAT32 and (x.dtype == tf.bfloat16 or how == "fake_quant"):
        return tf.cast(GATES[how](tf.cast(x, tf.float32)), x.dtype)
    return GATES[how](x)
