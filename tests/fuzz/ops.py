"""Blocks: raw ops on variables, and ops within an example."""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.env import flat_size, floats, number_of, sequence, vector
from tests.fuzz.layers import tokens_of
from tests.fuzz.registry import block


@block(
    "matmul",
    form=(
        "matmul",
        "transposed",
        "tensordot",
        "einsum",
        "matvec",
        "batched",
        "broadcast",
    ),
    units=(3, 2, 4),
    weight=2,
)
def matmul(env, path, x, args, node):
    form, units = args["form"], args["units"]
    x = sequence(env, x) if form in ("batched", "broadcast") else floats(env, x)
    size = x.shape[-1]
    shape = {
        "transposed": [units, size],
        "matvec": [size],
        "batched": [x.shape[1], size, units],
        "broadcast": [1, size, units],
    }.get(form, [size, units])
    w = env.read(env.weight(path, shape), x)
    if form == "tensordot" or (x.shape.rank > 2 and form in ("matmul", "transposed")):
        w = tf.transpose(w) if form == "transposed" else w
        return tf.tensordot(x, w, 1)
    if form == "matmul":
        return x @ w
    if form == "transposed":
        return tf.matmul(x, w, transpose_b=True)
    if form == "einsum":
        return tf.einsum("...i,ij->...j", x, w)
    if form == "matvec":
        return tf.concat([x, tf.linalg.matvec(x, w)[..., tf.newaxis]], axis=-1)
    if form == "batched":
        return tf.einsum("bti,tij->btj", x, w)
    return tf.matmul(x, w)


@block(
    "elementwise",
    form=(
        "scale",
        "bias",
        "where",
        "maximum",
        "power",
        "divide",
        "difference",
        "affine",
        "scalar",
        "lerp",
        "atan2",
    ),
    axis=("last", "all", "first"),
    weight=2,
)
def elementwise(env, path, x, args, node):
    x = floats(env, x)
    rest = list(x.shape[1:])
    shape = {"last": rest[-1:], "all": rest, "first": rest[:1] + [1] * (len(rest) - 1)}[
        args["axis"]
    ]
    form = args["form"]
    w = env.read(env.weight(path, [] if form == "scalar" else shape), x)
    if form in ("scale", "scalar"):
        return x * w
    if form == "bias":
        return x + w
    if form == "where":
        other = env.read(env.weight(path + "other", shape), x)
        return tf.where(x > 0, x * w, x * x * other)
    if form == "maximum":
        return tf.maximum(x, w)
    if form == "power":
        return tf.pow(tf.abs(x) + 0.3, w)
    if form == "divide":
        return x / (tf.nn.softplus(w) + 0.3)
    if form == "difference":
        return tf.math.squared_difference(x, w)
    if form == "affine":
        other = env.read(env.weight(path + "other", shape), x)
        return (x - other) * w + x * other
    if form == "lerp":
        gate = tf.sigmoid(w)
        return gate * x + (1 - gate) * tf.reverse(x, [x.shape.rank - 1])
    return tf.atan2(x, w + 2)


@block("append", form=("token", "add_position", "outer", "tile"))
def append(env, path, x, args, node):
    """A variable that is repeated for every example."""
    x = sequence(env, x)
    _, steps, size = x.shape
    if args["form"] == "add_position":
        table = env.read(env.weight(path, [steps + 1, size]), x)
        return x + tf.gather(table, tf.range(steps))
    if args["form"] == "outer":
        w = env.read(env.weight(path, [2]), x)
        return x[..., tf.newaxis] * w
    w = env.read(env.weight(path, [1, 1, size]), x)
    count = number_of(x)
    if args["form"] == "tile":
        return tf.concat([tf.tile(w, [count, 1, 1]), x], axis=1)
    return tf.concat([tf.broadcast_to(w, [count, 1, size]), x], axis=1)


def _standardised(w):
    w = w - tf.reduce_mean(w, axis=0, keepdims=True)
    return w / (tf.math.reduce_std(w, axis=0, keepdims=True) + 0.1)


TRANSFORMS = {
    "transpose": lambda w: tf.transpose(tf.reshape(w, [w.shape[1], w.shape[0]])),
    "standardise": _standardised,
    "slice": lambda w: tf.concat([w[1:], w[:1]], axis=0),
    "softmax": lambda w: tf.nn.softmax(w, axis=0),
    "exp": tf.exp,
    "stop_part": lambda w: tf.concat([tf.stop_gradient(w[:1]), w[1:]], axis=0),
    "difference": lambda w: w - tf.roll(w, 1, axis=0),
    "cumsum": lambda w: tf.cumsum(w, axis=0),
    "symmetric": lambda w: w + tf.reverse(w, [0, 1]),
    "normalise": lambda w: w / (tf.norm(w) + 0.1),
    "gather": lambda w: tf.gather(w, [0] * w.shape[0]) + w,
    "quantise": lambda w: w + tf.stop_gradient(tf.round(w * 4) / 4 - w),
    "cast": lambda w: tf.cast(tf.cast(w, tf.float64), w.dtype),
}


@block("transformed", how=(*TRANSFORMS, "lora"), units=(3, 2), weight=2)
def transformed(env, path, x, args, node):
    """A product with a function of a variable."""
    x = floats(env, x)
    size, units = x.shape[-1], args["units"]
    if args["how"] == "lora":
        frozen = env.read(env.weight(path + "base", [size, units], trainable=False), x)
        a = env.read(env.weight(path + "a", [size, 2]), x)
        b = env.read(env.weight(path + "b", [2, units]), x)
        return tf.tensordot(x, frozen + a @ b, 1)
    w = env.read(env.weight(path, [size, units]), x)
    return tf.tensordot(x, TRANSFORMS[args["how"]](w), 1)


@block("transformed_conv", how=tuple(TRANSFORMS))
def transformed_conv(env, path, x, args, node):
    x = sequence(env, x)
    w = env.read(env.weight(path, [2 * x.shape[2], 3]), x)
    w = tf.reshape(TRANSFORMS[args["how"]](w), [2, x.shape[2], 3])
    return tf.nn.conv1d(x, w, 1, "SAME")


@block(
    "tied",
    how=("twice", "transpose", "both_sides", "difference", "bilinear", "recurrence"),
    weight=2,
)
def tied(env, path, x, args, node):
    """A variable that is used several times."""
    x = floats(env, x)
    size = x.shape[-1]
    w = env.read(env.weight(path, [size, size]), x)
    how = args["how"]
    if how == "twice":
        return tf.tanh(tf.tensordot(x, w, 1)) + tf.tensordot(x * x, w, 1)
    if how == "transpose":
        return tf.tensordot(tf.tanh(tf.tensordot(x, w, 1)), tf.transpose(w), 1)
    if how == "both_sides":
        return tf.tensordot(x, w, 1) + w[0] * x
    if how == "difference":
        other = tf.reverse(x, [1])
        return tf.tensordot(x, w, 1) - tf.tensordot(other, tf.transpose(w), 1)
    if how == "bilinear":
        return x * tf.tensordot(x, w, 1)
    for _ in range(3):
        x = tf.tanh(tf.tensordot(x, w, 1) + x)
    return x


@block("tied_table", how=("logits", "bag", "lookup", "mixed"), size=(4, 6))
def tied_table(env, path, x, args, node):
    """An embedding table that is used again."""
    ids = tokens_of(sequence(env, x)[..., 0], args["size"])
    dtype = x.dtype if x.dtype.is_floating else env.float
    table = tf.cast(tf.convert_to_tensor(env.weight(path, [args["size"], 3])), dtype)
    found = tf.nn.embedding_lookup(table, ids)
    if args["how"] == "logits":
        return tf.einsum("btd,vd->btv", tf.tanh(found), table)
    if args["how"] == "bag":
        return found - tf.reduce_mean(found, axis=1, keepdims=True)
    if args["how"] == "lookup":
        return found - tf.gather(table, (ids + 1) % args["size"])
    one_hot = tf.one_hot(ids, args["size"], dtype=dtype)
    return found + tf.tensordot(one_hot, table, 1)


_POINTWISE = {
    "tanh": tf.tanh,
    "relu": tf.nn.relu,
    "square": lambda x: 0.3 * x * x,
    "softmax": tf.nn.softmax,
    "l2": lambda x: tf.math.l2_normalize(x, axis=-1, epsilon=0.01),
    "sorted": lambda x: tf.sort(x, axis=-1),
    "reverse": lambda x: tf.reverse(x, [x.shape.rank - 1]),
    "roll": lambda x: tf.roll(x, 1, axis=1),
    "cumsum": lambda x: 0.5 * tf.cumsum(x, axis=1),
    "top": lambda x: tf.math.top_k(x, min(2, x.shape[-1])).values,
    "stop_half": lambda x: x + tf.stop_gradient(0.5 * x * x),
    "clip": lambda x: tf.clip_by_value(x, -0.7, 0.7),
    "log_softmax": lambda x: 0.3 * tf.nn.log_softmax(x),
    "centre": lambda x: (
        x - tf.reduce_mean(x, axis=list(range(1, x.shape.rank)), keepdims=True)
    ),
    "norm_per_example": lambda x: (
        x
        / (
            1
            + tf.norm(tf.reshape(x, [-1, flat_size(x)]), axis=1)[
                (..., *[tf.newaxis] * (x.shape.rank - 1))
            ]
        )
    ),
    "clip_norm": lambda x: tf.clip_by_norm(x, 2.0, axes=[-1]),
    "argmax_gate": lambda x: (
        x * tf.cast(tf.argmax(x, axis=-1)[..., tf.newaxis] > 0, x.dtype)
    ),
    "dropping_nan": lambda x: tf.where(tf.math.is_nan(x), tf.zeros_like(x), x),
}


@block("within", how=tuple(_POINTWISE), weight=2)
def within(env, path, x, args, node):
    """A function of each example alone."""
    return _POINTWISE[args["how"]](floats(env, x))


@block(
    "reorder",
    how=(
        "swap",
        "flatten",
        "stack",
        "split",
        "tile",
        "pad",
        "batch_gather",
        "mask_step",
        "expand",
        "unstack_time",
        "segment_within",
        "space_to_depth",
    ),
    weight=2,
)
def reorder(env, path, x, args, node):
    """Moves entries within each example."""
    x = sequence(env, x)
    _, steps, size = x.shape
    how = args["how"]
    if how == "swap":
        return tf.transpose(x, [0, 2, 1])
    if how == "flatten":
        return vector(env, x)
    if how == "stack":
        return tf.stack([x, -x], axis=2)
    if how == "split":
        return tf.concat(tf.split(x, size, axis=2)[::-1], axis=1)
    if how == "tile":
        return tf.tile(x, [1, 2, 1])
    if how == "pad":
        return tf.pad(x, [[0, 0], [1, 0], [0, 0]])
    if how == "batch_gather":
        order = tf.argsort(x[..., 0], axis=1)
        return tf.gather(x, order, batch_dims=1)
    if how == "mask_step":
        kept = tf.cast(x[..., :1] > -0.2, x.dtype)
        total = tf.reduce_sum(kept, axis=1)
        return tf.math.divide_no_nan(tf.reduce_sum(x * kept, axis=1), total)
    if how == "expand":
        return tf.squeeze(tf.expand_dims(x, 1), 1)[:, tf.newaxis]
    if how == "unstack_time":
        return tf.add_n(tf.unstack(x, axis=1))
    if how == "segment_within":
        ids = tokens_of(x[..., 0], 2)
        kinds = tf.one_hot(ids, 2, dtype=x.dtype)
        return tf.einsum("btk,btd->bkd", kinds, x)
    return tf.reshape(tf.transpose(x, [0, 2, 1]), [-1, 1, steps * size])


@block(
    "batch_identity",
    how=(
        "double_reverse",
        "gather_range",
        "slices",
        "transposes",
        "stack_views",
        "partition",
        "mask_all",
        "scatter",
    ),
    weight=0.7,
)
def batch_identity(env, path, x, args, node):
    """Ops along the batch that change nothing in the end."""
    x = floats(env, x)
    count, how = number_of(x), args["how"]
    rest = list(range(2, x.shape.rank))
    if how == "double_reverse":
        return tf.reverse(tf.reverse(x, [0]), [0])
    if how == "gather_range":
        return tf.gather(x, tf.range(count))
    if how == "slices":
        return tf.concat([x[:1], x[1:]], axis=0)
    if how == "transposes":
        x = tf.tanh(tf.transpose(x, [1, 0, *rest]))
        return tf.transpose(x, [1, 0, *rest])
    if how == "stack_views":
        a, b = tf.unstack(tf.stack([x, tf.tanh(x)], axis=0))
        return a + b
    if how == "partition":
        places = tf.range(count) % 2
        parts = tf.dynamic_partition(x, places, 2)
        indices = tf.dynamic_partition(tf.range(count), places, 2)
        found = tf.dynamic_stitch(indices, parts)
        return tf.reshape(found, [-1, *x.shape[1:]])
    if how == "mask_all":
        return tf.boolean_mask(x, tf.ones([count], tf.bool))
    return tf.scatter_nd(tf.range(count)[:, tf.newaxis], x, tf.shape(x))
