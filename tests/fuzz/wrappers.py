"""Blocks with blocks inside: folds, nested functions, control flow, sharing."""

from __future__ import annotations

import tensorflow as tf

from tests.fuzz.env import flat_size, floats, image, number_of, sequence, vector
from tests.fuzz.registry import block

L = tf.keras.layers


@block("residual", children=True, how=("add", "concat", "gate"))
def residual(env, path, x, args, node):
    x = floats(env, x)
    y = env.inner(node, x, path, keep=True)
    if args["how"] != "concat" and y.shape[1:] == x.shape[1:]:
        return x + y if args["how"] == "add" else x * tf.sigmoid(y)
    return tf.concat([vector(env, x), vector(env, y)], axis=1)


@block("parallel", children=True)
def parallel(env, path, x, args, node):
    """Every child on the same input."""
    found = [
        vector(env, env.run([child], x, f"{path}/{i}_"))
        for i, child in enumerate(node.children)
    ]
    return tf.concat(found, axis=1)


@block("twice", children=True, how=("other", "self"))
def twice(env, path, x, args, node):
    """The same blocks with the same variables, on two inputs."""
    x = floats(env, x)
    first = env.inner(node, x, path, keep=True)
    if args["how"] == "self" and first.shape[1:] == x.shape[1:]:
        return env.inner(node, first, path, keep=True)
    second = 0.5 * tf.reverse(x, [x.shape.rank - 1])
    second = env.inner(node, second, path, keep=True)
    return first - second


@block(
    "fold", children=True, how=("minus_one", "shape", "transpose", "twofold"), weight=2
)
def fold(env, path, x, args, node):
    """Counts steps, or rows of an image, as examples, and then not any more."""
    if args["how"] == "twofold":
        x = image(env, x)
        y = env.inner(node, tf.reshape(x, [-1, *x.shape[2:]]), path)
        return tf.reshape(y, [-1, x.shape[1], flat_size(y)])
    x = sequence(env, x)
    _, steps, size = x.shape
    count = number_of(x)
    if args["how"] == "transpose":
        # Time first: rows of an example are apart.
        rows = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, size])
        y = env.inner(node, rows, path)
        inside = list(y.shape[1:])
        y = tf.reshape(y, tf.stack([steps, count, *inside]))
        y = tf.transpose(y, [1, 0, *range(2, 2 + len(inside))])
        return tf.ensure_shape(y, [None, steps, *inside])
    if args["how"] == "shape":
        y = env.inner(node, tf.reshape(x, tf.stack([count * steps, size])), path)
        found = tf.reshape(y, tf.stack([count, steps, flat_size(y)]))
        return tf.ensure_shape(found, [None, steps, flat_size(y)])
    y = env.inner(node, tf.reshape(x, [-1, size]), path)
    return tf.reshape(y, [-1, steps, flat_size(y)])


@block("time_major", how=("dense", "recurrent", "scan", "unstack", "conv"), weight=1.5)
def time_major(env, path, x, args, node):
    """A detour with time on axis 0."""
    x = tf.transpose(sequence(env, x), [1, 0, 2])
    how, size = args["how"], x.shape[2]
    if how == "dense":
        x = env.layer(path, lambda **kw: L.Dense(3, "tanh", **kw), x)
    elif how == "recurrent":

        def make(**kw):
            return L.LSTM(2, time_major=True, return_sequences=True, **kw)

        x = env.layer(path, make, x)
    elif how == "conv":
        w = env.read(env.weight(path, [size, 2]), x)
        x = tf.einsum("tbi,ij->tbj", x, w)
    else:
        w = env.read(env.weight(path, [size, size]), x)
        start = tf.zeros_like(x[0])
        if how == "scan" and not env.plain:
            x = tf.scan(lambda h, row: tf.tanh(row + h @ w), x, start)
        else:
            states = [start]
            for row in tf.unstack(x, axis=0):
                states.append(tf.tanh(row + states[-1] @ w))
            x = tf.stack(states[1:], axis=0)
    return tf.transpose(x, [1, 0, 2])


def _identity_gradient(env, node, path):
    @tf.custom_gradient
    def scaled(x):
        return tf.identity(x), lambda dy: dy * 0.5

    return lambda x: scaled(env.inner(node, x, path))


@block(
    "function",
    children=True,
    how=("plain", "jit", "twofold", "recompute", "custom"),
    weight=2,
)
def function(env, path, x, args, node):
    """A nested function, or a function with a custom gradient."""
    x = floats(env, x)
    how = args["how"]
    if how == "custom":
        return _identity_gradient(env, node, path)(x)

    def run(x):
        return env.inner(node, x, path)

    if env.plain:
        return tf.identity(run(x))  # Without the mask that Keras ties to a tensor.
    if how == "recompute":
        return tf.recompute_grad(run)(x)
    called = tf.function(run, jit_compile=how == "jit" or None, autograph=False)
    if how == "twofold":
        return tf.function(lambda x: called(x) * 1.0, autograph=False)(x)
    return called(x)


@block("cond", children=True, on=("size", "constant", "variable", "case"))
def cond(env, path, x, args, node):
    """Control flow that depends on public values."""
    x = floats(env, x)

    def run():
        return env.inner(node, x, path)

    if env.plain:
        return tf.identity(run())
    on = {"size": number_of(x) > 0, "constant": tf.convert_to_tensor(True)}
    if args["on"] in on:
        return tf.cond(on[args["on"]], run, lambda: run() * 2)
    switch = env.made[path + "switch"] = env.made.get(path + "switch")
    if switch is None:
        with tf.init_scope():
            switch = env.made[path + "switch"] = tf.Variable(1, trainable=False)
    if args["on"] == "case":
        return tf.switch_case(tf.convert_to_tensor(switch), [lambda: run() * 2, run])
    return tf.cond(switch > 0, run, lambda: run() * 2)


@block("loop", how=("while", "for"), count=(2, 3), invariant=(False, True))
def loop(env, path, x, args, node):
    """A number of steps of a recurrence, in a While."""
    x = floats(env, x)
    size = x.shape[-1]
    w = env.read(env.weight(path, [size, size]), x)
    bias = env.read(env.weight(path + "bias", [size]), x)
    first = x

    def body(x):
        y = tf.tanh(tf.tensordot(x, w, 1) + bias)
        return y + 0.1 * first if args["invariant"] else y

    if env.plain or args["how"] == "for":
        for _ in range(args["count"]):
            x = tf.identity(body(x))
        return x
    _, x = tf.while_loop(
        lambda i, x: i < args["count"],
        lambda i, x: (i + 1, body(x)),
        (tf.constant(0), x),
    )
    return x


@block("each", children=True, how=("map_fn", "vectorized_map"))
def each(env, path, x, args, node):
    """Runs the children on each example in a loop."""
    x = floats(env, x)

    def run(x):
        return env.inner(node, x[tf.newaxis], path)[0]

    if env.plain:
        parts = [env.inner(node, x[i : i + 1], path) for i in range(x.shape[0])]
        return tf.concat(parts, axis=0)
    shape = [None]
    with env.plainly(), tf.init_scope():
        shape += env.inner(node, tf.zeros([1, *x.shape[1:]], x.dtype), path).shape[1:]
    # Which loses gradient functions of one's own, of all but a single example.
    vectorized = args["how"] == "vectorized_map" and not _has_own_gradient(node)
    loop = tf.vectorized_map if vectorized else tf.map_fn
    return tf.ensure_shape(loop(run, x), shape)


def _has_own_gradient(node):
    own = node.args.get("how") in ("half", "backwards", "custom")
    return own or any(map(_has_own_gradient, node.children))


@block("scan_time", kind=("scan", "foldl", "map_steps"))
def scan_time(env, path, x, args, node):
    """A loop over the steps of every example."""
    x = sequence(env, x)
    size = x.shape[2]
    w = env.read(env.weight(path, [size, size]), x)
    rows = tf.transpose(x, [1, 0, 2])
    kind = args["kind"]
    if env.plain:
        state, states = tf.zeros_like(rows[0]), []
        for row in tf.unstack(rows, axis=0):
            new = tf.tanh(row @ w) if kind == "map_steps" else tf.tanh(row + state @ w)
            states.append(new)
            state = new
        found = tf.stack(states)
        return state if kind == "foldl" else tf.transpose(found, [1, 0, 2])
    if kind == "map_steps":
        return tf.transpose(tf.map_fn(lambda row: tf.tanh(row @ w), rows), [1, 0, 2])
    step = tf.scan if kind == "scan" else tf.foldl
    found = step(lambda h, row: tf.tanh(row + h @ w), rows, tf.zeros_like(rows[0]))
    return found if kind == "foldl" else tf.transpose(found, [1, 0, 2])


@block("penalty", how=("square", "abs"), weight=0.7)
def penalty(env, path, x, args, node):
    """An activity penalty, which is added to the loss."""
    x = floats(env, x)
    y = tf.square(x) if args["how"] == "square" else tf.abs(x)
    axes = list(range(1, x.shape.rank))
    env.penalties.append(0.1 * tf.reduce_mean(tf.cast(y, env.float), axis=axes))
    return x
