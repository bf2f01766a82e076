"""Steps with functions, gradients of their own, sizes, matrices, and places."""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.graphs.array_steps import _pair, step
from tests.fuzz.graphs.values import SkipStep, Value, fixed

# Functions.


def _statistic(draw, v):
    """A statistic of all the examples, of a single example, or of none."""
    how = draw.pick(["mean", "largest", "first", "weights"])
    if how == "mean":
        return tf.reduce_mean(v.tensor)
    if how == "largest":
        return tf.reduce_max(v.tensor)
    if how == "first":
        return tf.reshape(v.tensor, [-1])[0]
    return tf.reduce_sum(draw.parameters(2))


@step(0.8)
def branch(draw, v):
    if draw.chance(0.5):
        decides = _statistic(draw, v) > 0.1
    else:
        decides = draw.size() > 2
    one, other = draw.parameters(1)[0], draw.constant(1)[0]
    found = tf.cond(
        decides, lambda: tf.tanh(v.tensor) * one, lambda: v.tensor * 0.3 + other
    )
    return v.with_tensor(found)


@step(0.5)
def switch(draw, v):
    if draw.chance(0.5):
        decides = tf.cast(tf.clip_by_value(_statistic(draw, v), 0, 2), tf.int32)
    else:
        decides = draw.size() % 3
    one = draw.parameters(1)[0]
    found = tf.switch_case(
        decides, [lambda: v.tensor, lambda: v.tensor * one, lambda: tf.sin(v.tensor)]
    )
    return v.with_tensor(found)


@step(1)
def loop(draw, v):
    """A number of steps, of the whole batch or with a reduction inside."""
    how = draw.pick(["fixed", "fixed", "size", "data"])
    if how == "fixed":
        steps: int | tf.Tensor = draw.pick([1, 3])
    elif how == "size":
        steps = draw.size()
    else:
        steps = tf.cast(tf.clip_by_value(_statistic(draw, v), 0, 3), tf.int32)
    kernel = draw.parameters(1)[0]
    inside = draw.pick(["own", "own", "own", "mixed", "rolled"])

    def body(i, h):
        if inside == "mixed":
            h = h - tf.reduce_mean(h)
        elif inside == "rolled":
            h = tf.roll(h, 1, 0) if h.shape.rank else h
        return i + 1, tf.tanh(h * kernel + 0.1)

    _, found = tf.while_loop(lambda i, h: i < steps, body, [0, v.tensor])
    found.set_shape(v.tensor.shape)
    return v.with_tensor(found)


@step(0.7)
def over_time(draw, v):
    """A loop that reads an entry of an axis at each step and keeps a list."""
    if v.rank < 2:
        raise SkipStep
    axis = draw.axis(v)
    order = [axis, *(i for i in range(v.rank) if i != axis)]
    steps = tf.transpose(v.tensor, order)
    kernel = draw.parameters(1)[0]
    first = tf.zeros_like(steps[0])
    found = tf.scan(lambda h, x: tf.tanh(x + h * kernel), steps, first)
    return Value(found, tuple(v.dims[i] for i in order))


@step(1)
def mapped(draw, v):
    """A function of each entry of the first axis, perhaps with all of them beside."""
    if v.rank < 1:
        raise SkipStep
    how = draw.pick(["own", "own", "own", "all", "counter"])
    kernel = draw.parameters(1)[0]
    vectorized = draw.chance(0.5) and v.rank > 1

    def function(x):
        if how == "all":
            return x * kernel + tf.reduce_mean(v.tensor, 0)
        if x.shape.rank and draw.chance(0.5):
            return tf.tanh(x * kernel) - tf.reduce_sum(x)
        return tf.tanh(x * kernel)

    if how == "counter":
        places = tf.range(tf.shape(v.tensor)[0])
        found = tf.map_fn(
            lambda i: v.tensor[i] * kernel, places, fn_output_signature=tf.float32
        )
    else:
        found = (tf.vectorized_map if vectorized else tf.map_fn)(function, v.tensor)
    return v.with_tensor(found)


@step(0.5)
def row_by_row(draw, v):
    """A loop that takes rows by number and writes them to a list."""
    if v.rank < 1:
        raise SkipStep
    count = tf.shape(v.tensor)[0]
    how = draw.pick(["own", "own", "place", "before", "sum", "all"])
    kernel = draw.parameters(1)[0]

    def body(i, total, rows):
        x = v.tensor[i]
        if how == "place":
            x = x * tf.cast(i, tf.float32)
        elif how == "before":
            x = x - v.tensor[tf.maximum(i - 1, 0)]
        elif how == "sum":
            x = x + total
        elif how == "all":
            x = x + tf.reduce_max(v.tensor - x, 0)
        total = total + x
        return i + 1, total, rows.write(i, tf.tanh(x * kernel))

    rows = tf.TensorArray(tf.float32, size=count, element_shape=v.tensor.shape[1:])
    start = tf.zeros(tf.shape(v.tensor)[1:])
    _, _, rows = tf.while_loop(lambda i, t, r: i < count, body, [0, start, rows])
    found = rows.stack()
    found.set_shape(v.tensor.shape)
    return v.with_tensor(found)


@step(0.5)
def accumulated(draw, v):
    """A loop of a fixed number of steps that adds up rows, or columns, by number."""
    axis = draw.axis(v, lambda d: d.fixed and d.more > 1 or not d.fixed)
    steps = 2 if v.dims[axis].fixed or not draw.rows else draw.rows
    kernel = draw.parameters(1)[0]

    def body(i, total):
        return i + 1, tf.tanh(total * kernel + tf.gather(v.tensor, [i], axis=axis))

    start = v.tensor if draw.chance(0.5) else tf.zeros_like(v.tensor)
    _, found = tf.while_loop(lambda i, t: i < steps, body, [0, start])
    found.set_shape(v.tensor.shape)
    return v.with_tensor(found)


@step(0.5)
def called(draw, v):
    kernel = draw.parameters(1)[0]
    inside = draw.pick(["own", "mixed", "own"])

    @tf.function(jit_compile=False)
    def function(x):
        if inside == "mixed":
            x = x - tf.reduce_mean(x, 0, keepdims=True)
        return tf.tanh(x * kernel)

    if not v.rank:
        raise SkipStep
    return v.with_tensor(function(v.tensor))


# Gradients of their own.


def _by_largest(dy):
    return dy / (1 + tf.reduce_max(tf.abs(dy)))


_GRADIENTS = {
    "scaled": lambda dy, x: dy * 0.5,
    "clipped": lambda dy, x: tf.clip_by_value(dy, -0.3, 0.3),
    "gated": lambda dy, x: dy * tf.sigmoid(x),
    "where": lambda dy, x: tf.where(x > 0, dy, 0.1 * dy),
    "by own norm": lambda dy, x: dy / (1 + tf.norm(dy, axis=-1, keepdims=True)),
    "in time": lambda dy, x: tf.reverse(dy, [-1]),
    "mean": lambda dy, x: dy * tf.reduce_mean(x),
    "norm": lambda dy, x: tf.clip_by_norm(dy, 0.05),
    "centred": lambda dy, x: dy - tf.reduce_mean(dy, 0, keepdims=True),
    "reversed": lambda dy, x: tf.reverse(dy, [0]),
    "rolled": lambda dy, x: tf.roll(dy, 1, 0),
    "largest": lambda dy, x: _by_largest(dy),
    "sized": lambda dy, x: dy * tf.cast(tf.shape(dy)[0], tf.float32) / 4,
    "by size": lambda dy, x: dy / tf.cast(tf.size(dy) // 3 + 1, tf.float32),
    "looped": lambda dy, x: tf.while_loop(
        lambda i, d: i < tf.shape(dy)[0] // 2, lambda i, d: (i + 1, d * 0.9), [0, dy]
    )[1],
    "by first": lambda dy, x: dy * tf.tanh(tf.reshape(x, [-1])[0]),
    "taken twice": lambda dy, x: tf.gather(dy, [0] * 4) if dy.shape[0] == 4 else dy,
}
#: The forms that keep the rows of axis 0 apart, for every batch.
_SOUND = ("scaled", "clipped", "gated", "where", "by own norm", "in time")


@step(1.5)
def own_gradient(draw, v):
    if not v.rank:
        raise SkipStep
    name = draw.pick(_SOUND if draw.chance(0.5) else _GRADIENTS)
    draw.names[-1] += f" {name}"

    @tf.custom_gradient
    def function(x):
        def gradient(dy):
            # The gradient of a lookup comes as slices.
            dy = tf.convert_to_tensor(dy)
            found = _GRADIENTS[name](dy, x)
            found.set_shape(x.shape)
            return found

        return tf.tanh(x), gradient

    return v.with_tensor(function(v.tensor))


@step(0.5)
def recomputed(draw, v):
    if not v.rank:
        raise SkipStep
    mixed = draw.chance(0.3)

    def function(x):
        return tf.tanh(x - tf.reduce_mean(x, 0, keepdims=True) if mixed else x * 2)

    return v.with_tensor(tf.recompute_grad(function)(v.tensor))


# Sizes.


@step(2)
def by_size(draw, v):
    """Something that the number of examples decides about."""
    n = draw.size(v if any(not d.fixed for d in v.dims) else None)
    how = draw.pick(
        """factor mean quotient root maximum index bound top hot roll reshape range fill
        power parity expand mask pad axis tile count""".split()
    )
    draw.names[-1] += f" {how}"
    x, number = v.tensor, tf.cast(n, tf.float32)
    if how == "factor":
        return v.with_tensor(x * number * 0.2)
    if how == "mean":
        return v.with_tensor(x / number * tf.cast(n, tf.float32))
    if how == "quotient":
        return v.with_tensor(x * (tf.cast(n * 2, tf.float32) / number))
    if how == "root":
        return v.with_tensor(x * tf.sqrt(number) * tf.math.rsqrt(number + 1))
    if how == "maximum":
        return v.with_tensor(x * (number / tf.maximum(number / 4, 1.0)))
    if how == "power":
        return v.with_tensor(x * tf.pow(0.9, number))
    if how == "parity":
        return v.with_tensor(x * tf.cast(n % 2, tf.float32) + x)
    if how == "range":
        return v.with_tensor(x * tf.cast(tf.reduce_sum(tf.range(n)), tf.float32) * 0.1)
    if how == "fill":
        return v.with_tensor(x + tf.fill(tf.shape(x), number))
    if how == "count":
        ones = tf.ones([n, 1])
        return v.with_tensor(x * tf.reduce_sum(ones) * 0.2)
    if not v.rank:
        raise SkipStep
    axis = draw.axis(v, lambda d: d.fixed and d.more > 1)
    length = v.dims[axis].more
    dims = list(v.dims)
    if how == "index":
        dims.pop(axis)
        return Value(tf.gather(x, n % length, axis=axis), tuple(dims))
    if how == "bound":
        spec: list = [slice(None)] * v.rank
        spec[axis] = slice(None, 1 + n % length)
        dims.pop(axis)
        return Value(tf.reduce_sum(x[tuple(spec)], axis), tuple(dims))
    if how == "roll":
        return v.with_tensor(tf.roll(x, n, axis))
    if how == "hot":
        shape = [1] * v.rank
        shape[axis] = length
        return v.with_tensor(x * tf.reshape(tf.one_hot(n % length, length), shape))
    if how == "expand":
        return v.with_tensor(
            tf.reduce_sum(tf.tile(tf.expand_dims(x, -1), [1] * v.rank + [n]), -1) * 0.2
        )
    if how == "tile":
        multiples = [1] * v.rank
        multiples[axis] = n
        dims.pop(axis)
        return Value(tf.reduce_sum(tf.tile(x, multiples), axis) * 0.2, tuple(dims))
    if how == "axis":
        return v.with_tensor(tf.cumsum(x, tf.where(n > 3, axis, axis)))
    if how == "mask":
        seen = tf.range(length) < n
        shape = [1] * v.rank
        shape[axis] = length
        return v.with_tensor(tf.where(tf.reshape(seen, shape), x, 0.5 * x))
    if how == "pad":
        paddings = [[0, n if i == axis else 0] for i in range(v.rank)]
        dims.pop(axis)
        found = tf.reduce_mean(tf.pad(x, paddings), axis)
        return Value(found, tuple(dims))
    if how == "top" and axis == v.rank - 1:
        found = tf.math.top_k(x, tf.minimum(n, length)).values
        return Value(tf.reduce_sum(found, -1), v.dims[:-1])
    if how == "reshape" and axis == v.rank - 1 and length % 2 == 0:
        parts = tf.where(n > 4, 2, 1)
        lead = tf.shape(x)[:-1]
        found = tf.reshape(x, tf.concat([lead, [parts, length // parts]], 0))
        found = tf.reduce_sum(tf.nn.softmax(found, -1), [-1, -2])
        return Value(found, v.dims[:-1])
    raise SkipStep


# Matrices and images.


@step(0.8)
def matrix(draw, v):
    if not v.rank:
        raise SkipStep
    how = draw.pick(["diag", "part", "band", "set"])
    x = v.tensor
    if how == "diag":
        if v.rank > 3:
            raise SkipStep
        return Value(tf.linalg.diag(x), (*v.dims, v.dims[-1]))
    if v.rank < 2:
        raise SkipStep
    if how == "band":
        return v.with_tensor(tf.linalg.band_part(x, 0, 1))
    if v.dims[-1] != v.dims[-2]:
        raise SkipStep
    if how == "part":
        return Value(tf.linalg.diag_part(x), v.dims[:-1])
    return v.with_tensor(tf.linalg.set_diag(x, x[..., 0]))


@step(0.6)
def decomposed(draw, v):
    if v.rank < 2 or not (v.dims[-1].fixed and v.dims[-2].fixed):
        raise SkipStep
    x = tf.tanh(v.tensor)
    size = v.dims[-1].more
    square = tf.matmul(x, x, transpose_a=True) + 2 * tf.eye(size)
    dims = (*v.dims[:-2], v.dims[-1], v.dims[-1])
    how = draw.pick(["cholesky", "inverse", "det", "solve", "svd"])
    if how == "cholesky":
        return Value(tf.linalg.cholesky(square), dims)
    if how == "inverse":
        return Value(tf.linalg.inv(square), dims)
    if how == "det":
        return Value(tf.linalg.det(square) * 0.1, v.dims[:-2])
    if how == "svd":
        return Value(
            tf.linalg.svd(square, compute_uv=False), (*v.dims[:-2], v.dims[-1])
        )
    return Value(
        tf.linalg.solve(square, tf.linalg.matrix_transpose(x)),
        (*v.dims[:-2], v.dims[-1], v.dims[-2]),
    )


@step(0.8)
def image(draw, v):
    """Convolutions and pools over the middle axes."""
    if v.rank == 3:
        v = Value(v.tensor[:, :, :, tf.newaxis], (*v.dims, fixed(1)))
    if v.rank != 4 or not all(d.fixed for d in v.dims[1:]):
        raise SkipStep
    channels = v.dims[-1].more
    how = draw.pick(["conv", "depthwise", "max", "mean", "lrn", "norm", "back"])
    x = v.tensor
    if how == "conv":
        found = tf.nn.conv2d(x, draw.parameters(2, 2, channels, 2), 1, "SAME")
        return Value(found, (*v.dims[:3], fixed(2)))
    if how == "back":
        shape = [tf.shape(x)[0], v.dims[1].more, v.dims[2].more, 2]
        kernel = draw.parameters(2, 2, 2, channels)
        found = tf.nn.conv2d_transpose(x, kernel, shape, 1, "SAME")
        return Value(found, (*v.dims[:3], fixed(2)))
    if how == "depthwise":
        kernel = draw.parameters(2, 2, channels, 1)
        return v.with_tensor(tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME"))
    if how == "max":
        return v.with_tensor(tf.nn.max_pool2d(x, 2, 1, "SAME"))
    if how == "mean":
        return v.with_tensor(tf.nn.avg_pool2d(x, 2, 1, "SAME"))
    if how == "lrn":
        return v.with_tensor(tf.nn.lrn(x, 1))
    scale = tf.ones([channels])
    training = draw.chance(0.6)
    empty = [] if training else [channels]
    found = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=scale,
        offset=scale,
        mean=tf.zeros(empty) + 0.1,
        variance=tf.ones(empty),
        is_training=training,
    )
    return v.with_tensor(found.y)


@step(0.5)
def blocks(draw, v):
    """Through `SpaceToBatchND` and back."""
    if v.rank < 2 or not v.dims[1].fixed or v.dims[1].more % 2:
        raise SkipStep
    found = tf.space_to_batch(v.tensor, [2], [[0, 0]])
    half = (v.dims[0] * 2, fixed(v.dims[1].more // 2), *v.dims[2:])
    if draw.chance(0.4):
        return Value(found, half)
    return v.with_tensor(tf.batch_to_space(tf.tanh(found), [2], [[0, 0]]))


@step(0.5)
def fourier(draw, v):
    if not v.rank:
        raise SkipStep
    found = tf.signal.fft(tf.cast(v.tensor, tf.complex64))
    return v.with_tensor(tf.abs(found))


@step(0.8)
def by_place(draw, v):
    """Sums by segment or index, and ops whose output shape depends on the data."""
    if not v.rank:
        raise SkipStep
    x, first = v.tensor, v.dims[0]
    how = draw.pick(["segments", "unsorted", "scatter", "update", "masked", "bincount"])
    if how == "segments":
        if not first.fixed or first.more < 2:
            raise SkipStep
        ids = [0] + [1] * (first.more - 1)
        found = draw.pick([tf.math.segment_sum, tf.math.segment_mean])(x, ids)
        return Value(found, (fixed(2), *v.dims[1:]))
    if how == "unsorted":
        ids = tf.range(tf.shape(x)[0]) % 2
        found = tf.math.unsorted_segment_sum(x, ids, 2)
        return Value(found, (fixed(2), *v.dims[1:]))
    if how == "scatter":
        rows = tf.range(tf.shape(x)[0])[:, tf.newaxis]
        return v.with_tensor(tf.scatter_nd(rows, x, tf.shape(x)))
    if how == "update":
        return v.with_tensor(tf.tensor_scatter_nd_add(x, [[0]], x[-1:]))
    if how == "masked":
        flat = tf.reshape(x, [-1])
        some = tf.boolean_mask(flat, flat > 0)
        return v.with_tensor(x - tf.reduce_sum(some) * 0.1)
    if v.rank != 2:
        raise SkipStep
    numbers = tf.cast(tf.clip_by_value(x, 0, 2), tf.int32)
    found = tf.math.bincount(
        numbers, minlength=3, maxlength=3, dtype=tf.float32, axis=-1
    )
    return Value(found, (first, fixed(3)))


def _row_numbers(draw, count):
    """The numbers of the rows, or numbers that are other rows' now and then."""
    how = draw.pick("own own own own next reversed first half before".split())
    rows = tf.range(count)
    others = {
        "next": lambda: (rows + 1) % count,
        "reversed": lambda: count - 1 - rows,
        "first": lambda: rows * 0,
        "half": lambda: rows // 2,
        "before": lambda: tf.maximum(rows - 1, 0),
    }
    return others[how]() if how in others else rows


@step(0.8)
def by_row_numbers(draw, v):
    """Reads, writes and sums at places that begin with a number of a row."""
    if v.rank != 2 or not v.dims[1].fixed or v.dims[0].fixed or v.dims[1].more < 2:
        raise SkipStep
    x, width = v.tensor, v.dims[1].more
    count = tf.shape(x)[0]
    rows = _row_numbers(draw, count)
    columns = draw.pick(
        [
            lambda: tf.argsort(x)[:, :2],
            lambda: tf.tile(tf.argmax(x, 1, tf.int32)[:, tf.newaxis], [1, 2]),
            lambda: tf.tile(tf.range(2)[tf.newaxis], [count, 1]),
            lambda: tf.tile(tf.range(count)[:, tf.newaxis] % width, [1, 2]),
        ]
    )()
    if draw.chance(0.5):
        rows = tf.tile(rows[:, tf.newaxis], [1, 2])
    else:
        rows = tf.zeros_like(columns) + rows[:, tf.newaxis]
    places = tf.stack([rows, columns], -1)
    if draw.chance(0.3):
        join = [rows[..., tf.newaxis], columns[..., tf.newaxis]]
        places = tf.cast(tf.concat(join, -1), tf.int64)
    how = draw.pick(["read", "write", "add", "largest", "sums", "list"])
    if how == "read":
        return Value(tf.gather_nd(x, places), (v.dims[0], fixed(2)))
    if how == "write":
        shape = draw.pick([tf.shape(x), tf.stack([count, width])])
        shape = tf.cast(shape, places.dtype)
        return v.with_tensor(tf.scatter_nd(places, tf.tanh(x[:, :2]), shape) + x)
    if how in ("add", "largest"):
        kind = tf.tensor_scatter_nd_add if how == "add" else tf.tensor_scatter_nd_max
        base = draw.pick([x, tf.zeros_like(x)])
        return v.with_tensor(kind(base, places, x[:, -2:] * 0.5))
    kind = draw.pick([tf.math.unsorted_segment_sum, tf.math.unsorted_segment_max])
    number = draw.pick([count, count, count, count + 1])
    if how == "sums":
        found = kind(x[:, :2], rows, number)
    else:
        found = kind(tf.reshape(x[:, :2], [-1]), tf.reshape(rows, [-1]), number)
    return Value(found[:count, tf.newaxis], (v.dims[0], fixed(1)))


@step(0.8)
def of_what_a_mask_keeps(draw, v):
    """Lists of the entries that a mask keeps, and back to the rows."""
    if not 1 <= v.rank <= 2 or v.dims[0].fixed:
        raise SkipStep
    x = v.tensor
    mask = draw.pick([x > 0, x > 0, x[..., :1] > -9 if v.rank > 1 else x > -9])
    mask = mask if v.rank == 1 or draw.chance(0.7) else x[:, 0] > 0
    other = mask if draw.chance(0.9) else tf.logical_not(mask)
    if mask.shape.rank != v.rank or mask.shape[-1:] != x.shape[-1:]:
        mask = other = x > 0.1
    kept = tf.boolean_mask(x, mask)
    places = tf.where(other)
    listed = draw.pick("tanh square total roll softmax size weights rows".split())
    rows = places[:, 0]
    if listed == "tanh":
        kept = tf.tanh(kept)
    elif listed == "square":
        kept = kept * tf.gather_nd(x, places)
    elif listed == "total":
        kept = kept - tf.reduce_mean(kept)
    elif listed == "roll":
        kept = tf.roll(kept, 1, 0)
    elif listed == "softmax":
        kept = tf.nn.softmax(kept)
    elif listed == "size":
        kept = kept / (1 + tf.cast(tf.size(kept), tf.float32))
    elif listed == "weights":
        kept = kept * draw.parameters(1)[0]
    else:
        kept = kept + tf.gather(tf.reshape(x, [tf.shape(x)[0], -1])[:, 0], rows)
    if draw.chance(0.5):
        found = tf.scatter_nd(places, kept, tf.shape(x, tf.int64))
        return v.with_tensor(found + x)
    rows = rows if draw.chance(0.85) else places[:, -1]
    found = tf.math.unsorted_segment_sum(kept, rows, tf.shape(x)[0])
    return Value(found[:, tf.newaxis], (v.dims[0], fixed(1)))


@step(1)
def with_rows_of_all(draw, v):
    """Combines each row with a statistic of all the examples, or of one."""
    return v.with_tensor(_pair(draw, v.tensor, _statistic(draw, v)))
