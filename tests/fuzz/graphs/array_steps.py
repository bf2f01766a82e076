"""Steps that move entries around, combine axes, or go entry by entry."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tests.fuzz.graphs.values import ROWS, Drawer, SkipStep, Value, fixed

STEPS: dict[str, tuple[Callable, float]] = {}


def step(weight: float = 1.0):
    """Enters a function of a drawer and a value into the table of steps."""

    def enter(function):
        STEPS[function.__name__] = (function, weight)
        return function

    return enter


_UNARY = {
    "tanh": tf.tanh,
    "sigmoid": tf.sigmoid,
    "relu": tf.nn.relu,
    "softplus": tf.nn.softplus,
    "square": lambda x: tf.square(x) * 0.1,
    "abs": tf.abs,
    "sin": tf.sin,
    "gelu": tf.nn.gelu,
    "silu": tf.nn.silu,
    "clip": lambda x: tf.clip_by_value(x, -0.7, 0.8),
    "sign": lambda x: tf.sign(x) * x,
    "stopped": lambda x: tf.stop_gradient(tf.tanh(x)) * x,
    "floor": lambda x: x + tf.floor(x),
    "cast": lambda x: (
        x * tf.cast(tf.cast(tf.clip_by_value(x, -9, 9), tf.int32), x.dtype)
    ),
    "where": lambda x: tf.where(x > 0.1, x, tf.exp(-tf.abs(x))),
    "log1p": lambda x: tf.math.log1p(tf.abs(x)),
    "erf": tf.math.erf,
    "leaky": tf.nn.leaky_relu,
    "zeros_like": lambda x: x + tf.zeros_like(x),
    "one_like": lambda x: x * tf.ones_like(x),
    "is_finite": lambda x: tf.where(tf.math.is_finite(x), x, tf.zeros_like(x)),
    "complex": lambda x: tf.math.real(tf.complex(x, x) * tf.complex(x, 0 * x)),
    "half": lambda x: tf.cast(tf.cast(x, tf.bfloat16), tf.float32),
    "atan2": lambda x: tf.atan2(x, 1 + tf.abs(x)),
    "identity_n": lambda x: tf.identity_n([x, x + 1])[0],
    "check": lambda x: tf.ensure_shape(x, x.shape),
    "pow": lambda x: tf.pow(tf.abs(x) + 0.1, 0.7),
    "bucketize": lambda x: (
        x + tf.cast(tf.raw_ops.Bucketize(input=x, boundaries=[-0.3, 0.4]), tf.float32)
    ),
    "add_n": lambda x: tf.add_n([x, x * 2, tf.tanh(x)]),
    # The byte of the sign and the exponent: rounding, which an example's place in the
    # batch may change, decides about the lowest byte.
    "bitcast": lambda x: x + tf.cast(tf.bitcast(x, tf.uint8)[..., 3], tf.float32) / 500,
}


@step(4)
def unary(draw: Drawer, v: Value) -> Value:
    name = draw.pick(_UNARY)
    draw.names[-1] += f" {name}"
    return v.with_tensor(_UNARY[name](v.tensor))


def _pair(draw, a, b):
    how = draw.pick(["add", "mul", "max", "sub", "div", "less"])
    if how == "add":
        return a + b
    if how == "mul":
        return a * b
    if how == "max":
        return tf.maximum(a, b)
    if how == "sub":
        return a - b
    if how == "div":
        return tf.math.divide_no_nan(a, 1 + tf.abs(b))
    return tf.where(a < b, a, b * 0.5)


@step(2)
def with_earlier(draw, v):
    """Combines the tensor with an earlier tensor of the same shape."""
    other = draw.pick(p for p in draw.pool if p.dims == v.dims)
    return v.with_tensor(_pair(draw, v.tensor, other.tensor))


@step(2)
def with_broadcast(draw, v):
    """Combines the tensor by broadcasting with a tensor of the same or lower rank."""
    other = draw.pick(p for p in draw.pool if 0 < p.rank <= v.rank)
    dims = v.dims[v.rank - other.rank :]
    if any(a != b and b != fixed(1) for a, b in zip(dims, other.dims, strict=True)):
        raise SkipStep
    return v.with_tensor(_pair(draw, v.tensor, other.tensor))


@step(0.6)
def pairwise(draw, v):
    """Combines two axes of the same tensor, pair by pair."""
    if v.rank > 2:
        raise SkipStep
    other = draw.pick(p for p in draw.pool if p.rank == 1)
    tensor = v.tensor[..., tf.newaxis] * other.tensor
    return Value(tensor, (*v.dims, *other.dims))


def _own_shape(draw, v):
    """A shape that broadcasts to that of a tensor with no axis of rows."""
    shape = [
        length.more if length.fixed and draw.chance(0.7) else 1 for length in v.dims
    ]
    return shape[draw.random.randrange(len(shape)) :] if shape else []


@step(2)
def with_parameters(draw, v):
    return v.with_tensor(_pair(draw, v.tensor, draw.parameters(*_own_shape(draw, v))))


@step(2)
def with_constant(draw, v):
    shape = _own_shape(draw, v)
    if draw.rows and draw.chance(0.1):
        shape = [d.per_row * draw.rows + d.more for d in v.dims]
    return v.with_tensor(_pair(draw, v.tensor, draw.constant(*shape)))


@step(2.5)
def dense(draw, v):
    if not v.dims or not v.dims[-1].fixed:
        raise SkipStep
    width, units = v.dims[-1].more, draw.pick([1, 2, 3, 4])
    kernel = (
        draw.parameters(width, units)
        if draw.chance(0.8)
        else draw.constant(width, units)
    )
    return Value(tf.tensordot(v.tensor, kernel, 1), (*v.dims[:-1], fixed(units)))


@step(1)
def raw_matmul(draw, v):
    """A product of the last two axes, as they are or transposed."""
    if v.rank < 2 or not v.dims[-1].fixed or not v.dims[-2].fixed and v.rank > 2:
        raise SkipStep
    width, units = v.dims[-1].more, draw.pick([1, 2, 3])
    flipped = draw.chance(0.5)
    shape = (units, width) if flipped else (width, units)
    tensor = tf.matmul(v.tensor, draw.parameters(*shape), transpose_b=flipped)
    return Value(tensor, (*v.dims[:-1], fixed(units)))


@step(1)
def with_itself(draw, v):
    """A product of the last two axes with themselves, as in attention."""
    if v.rank < 2:
        raise SkipStep
    if draw.chance(0.5):
        tensor = tf.matmul(v.tensor, v.tensor, transpose_b=True)
        return Value(tensor * 0.3, (*v.dims[:-1], v.dims[-2]))
    tensor = tf.matmul(v.tensor, v.tensor, transpose_a=True)
    return Value(tensor * 0.3, (*v.dims[:-2], v.dims[-1], v.dims[-1]))


@step(1.5)
def einsum(draw, v):
    """A contraction of random axes with parameters, or of the tensor with a copy."""
    if not 1 <= v.rank <= 4:
        raise SkipStep
    letters = "abcdefg"[: v.rank]
    if draw.chance(0.5):
        shared = [a for a, d in zip(letters, v.dims, strict=True) if d.fixed]
        shared = [a for a in shared if draw.chance(0.6)]
        sizes = [v.dims[letters.index(a)].more for a in shared]
        other, new = draw.parameters(*sizes, 2), "z"
        second = "".join(shared) + new
    else:
        found = draw.pick(p for p in draw.pool if p.dims == v.dims)
        other, second, new = found.tensor, letters, ""
    out = [
        a
        for a, d in zip(letters, v.dims, strict=True)
        if draw.chance(0.6 if d.fixed else 0.9)
    ]
    if draw.chance(0.3):
        draw.random.shuffle(out)
    dims = [v.dims[letters.index(a)] for a in out] + [fixed(2)] * len(new)
    equation = f"{letters},{second}->{''.join(out) + new}"
    return Value(tf.einsum(equation, v.tensor, other) * 0.5, tuple(dims))


_REDUCTIONS = (
    tf.reduce_sum,
    tf.reduce_mean,
    tf.reduce_max,
    tf.reduce_min,
    tf.reduce_prod,
    tf.reduce_logsumexp,
    tf.math.reduce_euclidean_norm,
    tf.math.reduce_std,
)


def _axes(draw, v):
    axes = {draw.axis(v)}
    if draw.chance(0.3):
        axes.add(draw.axis(v))
    return sorted(axes)


@step(2.5)
def reduction(draw, v):
    axes, keep = _axes(draw, v), draw.chance(0.5)
    found = draw.pick(_REDUCTIONS)(v.tensor, axes, keepdims=keep)
    if keep:
        dims = [fixed(1) if i in axes else d for i, d in enumerate(v.dims)]
    else:
        dims = [d for i, d in enumerate(v.dims) if i not in axes]
    if keep and draw.chance(0.4):
        return v.with_tensor(v.tensor - found)
    return Value(found, tuple(dims))


@step(0.5)
def index_of_largest(draw, v):
    axis = draw.axis(v)
    found = tf.argmax(v.tensor, axis) if draw.chance(0.5) else tf.argmin(v.tensor, axis)
    dims = (*v.dims[:axis], *v.dims[axis + 1 :])
    return Value(tf.cast(found, tf.float32) * 0.2, dims)


@step(0.5)
def condition_of_all(draw, v):
    axis = draw.axis(v)
    kind = draw.pick([tf.reduce_all, tf.reduce_any])
    found = kind(v.tensor > 0, axis, keepdims=True)
    return v.with_tensor(tf.where(found, v.tensor, tf.tanh(v.tensor)))


@step(1)
def softmax(draw, v):
    axis = draw.axis(v)
    kind = draw.pick([tf.nn.softmax, tf.nn.log_softmax])
    return v.with_tensor(kind(v.tensor, axis))


@step(1)
def normalised(draw, v):
    axes = _axes(draw, v)
    mean, variance = tf.nn.moments(v.tensor, axes, keepdims=True)
    return v.with_tensor((v.tensor - mean) * tf.math.rsqrt(variance + 0.1))


@step(1)
def scan(draw, v):
    axis = draw.axis(v)
    if draw.chance(0.2):
        found = tf.math.cumulative_logsumexp(v.tensor, axis)
    else:
        kind = draw.pick([tf.cumsum, tf.math.cumprod])
        found = kind(
            v.tensor, axis, exclusive=draw.chance(0.5), reverse=draw.chance(0.5)
        )
    return v.with_tensor(found)


@step(1)
def moved(draw, v):
    axis = draw.axis(v)
    how = draw.pick(["reverse", "roll", "shift"])
    if how == "reverse":
        return v.with_tensor(tf.reverse(v.tensor, [axis]))
    if how == "roll":
        return v.with_tensor(tf.roll(v.tensor, draw.pick([1, 2, -1]), axis))
    return v.with_tensor(v.tensor - tf.roll(v.tensor, 1, axis))


@step(0.8)
def ordered(draw, v):
    axis = draw.axis(v)
    return v.with_tensor(tf.sort(v.tensor, axis))


@step(0.8)
def top(draw, v):
    if not v.dims or (v.dims[-1].fixed and v.dims[-1].more < 2):
        raise SkipStep
    found = tf.math.top_k(v.tensor, 2)
    numbers = found.values if draw.chance(0.7) else tf.cast(found.indices, tf.float32)
    return Value(numbers, (*v.dims[:-1], fixed(2)))


@step(2)
def transposed(draw, v):
    if v.rank < 2:
        raise SkipStep
    order = list(range(v.rank))
    draw.random.shuffle(order)
    return Value(tf.transpose(v.tensor, order), tuple(v.dims[i] for i in order))


def _number(draw, v, axis):
    """The length of an axis for a shape: a number, or counted when the graph runs."""
    if v.dims[axis].fixed and draw.chance(0.7):
        return v.dims[axis].more
    return tf.shape(v.tensor)[axis]


@step(2.5)
def merged(draw, v):
    """Merges two adjacent axes."""
    if v.rank < 2:
        raise SkipStep
    axis = draw.random.randrange(v.rank - 1)
    a, b = v.dims[axis : axis + 2]
    if not a.fixed and not b.fixed:
        raise SkipStep
    length = b * a.more if a.fixed else a * b.more
    if draw.chance(0.5):
        middle = -1
    else:
        middle = _number(draw, v, axis) * _number(draw, v, axis + 1)
    shape = [
        *(_number(draw, v, i) for i in range(axis)),
        middle,
        *(_number(draw, v, i) for i in range(axis + 2, v.rank)),
    ]
    dims = (*v.dims[:axis], length, *v.dims[axis + 2 :])
    return Value(tf.reshape(v.tensor, shape), dims)


@step(2.5)
def parted(draw, v):
    """An axis becomes two."""
    if v.rank > 4:
        raise SkipStep
    axis = draw.random.randrange(v.rank) if v.rank else 0
    if not v.rank:
        raise SkipStep
    length = v.dims[axis]
    common = math.gcd(length.per_row, length.more)
    factor = draw.pick(f for f in (1, 2, 3, 4, 6) if common % f == 0)
    rest = type(length)(length.per_row // factor, length.more // factor)
    first = draw.chance(0.5)
    rest_number = -1 if draw.chance(0.5) else _number(draw, v, axis) // factor
    pair = [factor, rest_number] if first else [rest_number, factor]
    lengths = (fixed(factor), rest) if first else (rest, fixed(factor))
    others = [i for i in range(v.rank) if i != axis]
    numbers = {i: _number(draw, v, i) for i in others}
    shape = [
        *(numbers[i] for i in others if i < axis),
        *pair,
        *(numbers[i] for i in others if i > axis),
    ]
    dims = (*v.dims[:axis], *lengths, *v.dims[axis + 1 :])
    return Value(tf.reshape(v.tensor, shape), dims)


@step(1)
def whole_again(draw, v):
    """Reshapes to `[k, -1]` or `[-1, k]`, across the old axes."""
    per_row = more = 1
    rows = [d for d in v.dims if not d.fixed]
    if len(rows) != 1 or rows[0].more:
        raise SkipStep
    per_row = rows[0].per_row * math.prod(d.more for d in v.dims if d.fixed)
    factor = draw.pick(f for f in (1, 2, 3, 4, 6, 12) if per_row % f == 0)
    rest = ROWS * (per_row // factor)
    del more
    if draw.chance(0.7):
        return Value(tf.reshape(v.tensor, [-1, factor]), (rest, fixed(factor)))
    return Value(tf.reshape(v.tensor, [factor, -1]), (fixed(factor), rest))


@step(1)
def expanded(draw, v):
    if v.rank > 4:
        raise SkipStep
    axis = draw.random.randrange(v.rank + 1)
    dims = (*v.dims[:axis], fixed(1), *v.dims[axis:])
    return Value(tf.expand_dims(v.tensor, axis), dims)


@step(1)
def squeezed(draw, v):
    axis = draw.pick(i for i, d in enumerate(v.dims) if d == fixed(1))
    dims = (*v.dims[:axis], *v.dims[axis + 1 :])
    return Value(tf.squeeze(v.tensor, axis), dims)


@step(1)
def stacked(draw, v):
    if v.rank > 3:
        raise SkipStep
    other = draw.pick(p for p in draw.pool if p.dims == v.dims)
    axis = draw.random.randrange(v.rank + 1)
    dims = (*v.dims[:axis], fixed(2), *v.dims[axis:])
    return Value(tf.stack([v.tensor, other.tensor], axis), dims)


@step(1)
def joined(draw, v):
    other = draw.pick(p for p in draw.pool if p.rank == v.rank)
    axis = draw.axis(v)
    rest = [i for i in range(v.rank) if i != axis]
    if any(v.dims[i] != other.dims[i] for i in rest):
        raise SkipStep
    dims = list(v.dims)
    dims[axis] = v.dims[axis] + other.dims[axis]
    return Value(tf.concat([v.tensor, other.tensor], axis), tuple(dims))


@step(1)
def pieces(draw, v):
    axis = draw.axis(v, lambda d: d.fixed and d.more > 1 and d.more % 2 == 0)
    first, second = tf.split(v.tensor, 2, axis)
    dims = list(v.dims)
    dims[axis] = fixed(v.dims[axis].more // 2)
    return Value(_pair(draw, first, second), tuple(dims))


@step(0.8)
def entries(draw, v):
    """Takes every entry of an axis on its own."""
    axes = [i for i, d in enumerate(v.dims) if (d.fixed or draw.rows)]
    axes = [i for i in axes if v.dims[i].fixed or draw.chance(0.3)]
    axis = draw.pick(axes)
    found = tf.unstack(v.tensor, axis=axis)
    if draw.chance(0.4):
        back = [_pair(draw, part, part) for part in found]
        return v.with_tensor(tf.stack(back, axis))
    dims = (*v.dims[:axis], *v.dims[axis + 1 :])
    return Value(_pair(draw, found[0], found[-1]), dims)


@step(1.5)
def sliced(draw, v):
    axis = draw.axis(v)
    length = v.dims[axis]
    spec: list = [slice(None)] * v.rank
    dims = list(v.dims)
    how = draw.pick(["one", "from", "to", "step", "back", "all"])
    if how == "one":
        spec[axis] = draw.pick([0, -1])
        dims.pop(axis)
    elif how == "from":
        spec[axis] = slice(1, None)
        dims[axis] = length + fixed(-1)
    elif how == "to":
        spec[axis] = slice(None, -1)
        dims[axis] = length + fixed(-1)
    elif how == "back":
        spec[axis] = slice(None, None, -1)
    elif how == "step":
        if not length.fixed:
            raise SkipStep
        spec[axis] = slice(None, None, 2)
        dims[axis] = fixed((length.more + 1) // 2)
    if length.fixed and length.more < 2 and how in ("from", "to"):
        raise SkipStep
    if draw.chance(0.2):
        spec.insert(0, tf.newaxis)
        dims.insert(0, fixed(1))
    return Value(v.tensor[tuple(spec)], tuple(dims))


@step(0.6)
def raw_slice(draw, v):
    axis = draw.axis(v, lambda d: not d.fixed or d.more > 1)
    begin, size = [0] * v.rank, [-1] * v.rank
    begin[axis] = 1
    dims = list(v.dims)
    dims[axis] = dims[axis] + fixed(-1)
    return Value(tf.slice(v.tensor, begin, size), tuple(dims))


@step(1)
def padded(draw, v):
    axis, before = draw.axis(v), draw.chance(0.5)
    paddings = [[0, 0] for _ in v.dims]
    paddings[axis] = [1, 0] if before else [0, 1]
    mode = draw.pick(["CONSTANT", "CONSTANT", "SYMMETRIC"])
    dims = list(v.dims)
    dims[axis] = dims[axis] + fixed(1)
    return Value(tf.pad(v.tensor, paddings, mode), tuple(dims))


@step(0.8)
def shifted(draw, v):
    """Pads the front of an axis and cuts its end, or the reverse."""
    axis = draw.axis(v)
    paddings = [[0, 0] for _ in v.dims]
    paddings[axis] = [1, 0]
    spec: list = [slice(None)] * v.rank
    spec[axis] = slice(None, -1)
    return v.with_tensor(tf.pad(v.tensor, paddings)[tuple(spec)])


@step(1)
def gathered(draw, v):
    axis = draw.axis(v)
    length = v.dims[axis]
    if length.fixed:
        places = [draw.random.randrange(max(length.more, 1)) for _ in range(2)]
    else:
        places = [0, draw.pick([0, 1, 2])]
    dims = list(v.dims)
    if draw.chance(0.3):
        dims.pop(axis)
        return Value(tf.gather(v.tensor, places[0], axis=axis), tuple(dims))
    dims[axis] = fixed(2)
    return Value(tf.gather(v.tensor, places, axis=axis), tuple(dims))


@step(0.7)
def gathered_by_range(draw, v):
    axis = 0 if draw.chance(0.6) else draw.axis(v)
    if not v.rank:
        raise SkipStep
    rows = tf.range(tf.shape(v.tensor)[axis])
    if draw.chance(0.3):
        rows = tf.reverse(rows, [0])
    elif draw.chance(0.2):
        rows = tf.maximum(rows - 1, 0)
    return v.with_tensor(tf.gather(v.tensor, rows, axis=axis))


@step(1)
def gathered_by_data(draw, v):
    """From places that the data say."""
    if v.rank < 2 or not v.dims[-1].fixed or v.dims[-1].more < 2:
        raise SkipStep
    width = v.dims[-1].more
    how = draw.pick(["argsort", "batch", "table", "nd", "one_hot"])
    if how == "argsort":
        order = tf.argsort(v.tensor, axis=-1)
        return v.with_tensor(tf.gather(v.tensor, order, batch_dims=v.rank - 1))
    place = tf.argmax(v.tensor, -1, output_type=tf.int32)
    if how == "batch":
        found = tf.gather(v.tensor, place, batch_dims=v.rank - 1)
        return Value(found, v.dims[:-1])
    if how == "table":
        table = draw.parameters(width, 2)
        return Value(tf.gather(table, place), (*v.dims[:-1], fixed(2)))
    if how == "one_hot":
        return v.with_tensor(tf.one_hot(place, width) * v.tensor)
    if v.rank != 2:
        raise SkipStep
    rows = tf.range(tf.shape(v.tensor)[0])
    found = tf.gather_nd(v.tensor, tf.stack([rows, place], 1))
    return Value(found, v.dims[:1])


@step(1)
def repeated(draw, v):
    axis = draw.axis(v)
    dims = list(v.dims)
    dims[axis] = dims[axis] * 2
    if draw.chance(0.5):
        return Value(tf.repeat(v.tensor, 2, axis=axis), tuple(dims))
    multiples = [2 if i == axis else 1 for i in range(v.rank)]
    return Value(tf.tile(v.tensor, multiples), tuple(dims))


@step(1)
def broadcast(draw, v):
    """Along an axis of length 1, to a number or to the rows of the batch."""
    axis = draw.pick(i for i, d in enumerate(v.dims) if d == fixed(1))
    other = draw.pick(draw.pool)
    rows = draw.chance(0.3)
    length = fixed(3)
    number: int | tf.Tensor = 3
    if rows:
        place = draw.pick(i for i, d in enumerate(other.dims) if d == ROWS)
        length, number = ROWS, tf.shape(other.tensor)[place]
    shape = [number if i == axis else tf.shape(v.tensor)[i] for i in range(v.rank)]
    dims = list(v.dims)
    dims[axis] = length
    if draw.chance(0.5):
        return Value(tf.broadcast_to(v.tensor, shape), tuple(dims))
    multiples = [number if i == axis else 1 for i in range(v.rank)]
    return Value(tf.tile(v.tensor, multiples), tuple(dims))


@step(1.2)
def made_for_rows(draw, v):
    """With numbers that are made as many as there are rows."""
    axis = draw.pick(i for i, d in enumerate(v.dims) if not d.fixed)
    count = tf.shape(v.tensor)[axis]
    how = draw.pick(
        ["zeros", "fill", "range", "parameters", "linspace", "eye", "one seed"]
    )
    if how == "zeros":
        numbers = tf.zeros([count])
    elif how == "fill":
        numbers = tf.fill([count], draw.parameters(1)[0])
    elif how == "range":
        numbers = tf.cast(tf.range(count), tf.float32) / 5
    elif how == "linspace":
        numbers = tf.linspace(0.0, 1.0, count)
    elif how == "one seed":
        numbers = tf.random.stateless_uniform([count], seed=[7, 1])
    elif how == "eye":
        numbers = tf.reduce_sum(tf.eye(count) * 0.5, draw.pick([0, 1]))
    else:
        numbers = tf.repeat(draw.parameters(1), count)
    shape = [1] * v.rank
    shape[axis] = -1
    return v.with_tensor(_pair(draw, v.tensor, tf.reshape(numbers, shape)))


@step(0.6)
def square_of_rows(draw, v):
    """With a matrix that has rows and columns for the batch."""
    if v.rank != 2 or v.dims[0].fixed:
        raise SkipStep
    count = tf.shape(v.tensor)[0]
    matrix = draw.pick([tf.ones([count, count]), tf.eye(count)])
    if draw.chance(0.4):
        return v.with_tensor(tf.matmul(matrix, v.tensor) * 0.2)
    how = draw.pick([tf.reduce_sum, tf.nn.softmax])
    mask = matrix * v.tensor[:, :1]
    found = how(mask, 1) if how is tf.reduce_sum else how(mask, 1)[:, 0]
    return v.with_tensor(v.tensor * found[:, tf.newaxis])
