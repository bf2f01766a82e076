"""Data, models, and one example at a time for the tests of gradients."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients import (
    ExampleIsolationError,
    JacobianFallbackWarning,
    LossStructureError,
    PerExampleGradients,
    per_example_norms,
)

L = tf.keras.layers
BATCH = 5


def randoms(*shape, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return tf.constant(values, tf.float32)


def integers(*shape, below=10):
    values = np.random.default_rng(shape).integers(below, size=shape)
    return tf.constant(values, tf.int32)


def variable(*shape, seed=1):
    return tf.Variable(randoms(*shape, seed=seed))


def squash(tensor):
    """A loss per example that is linear in none of its inputs."""
    squashed = tf.tanh(tf.cast(tensor, tf.float32))
    return tf.reduce_sum(squashed, axis=list(range(1, tensor.shape.rank)))


def one_at_a_time(per_example, variables, *data):
    """`[B, P]`: the reference."""

    @tf.function(reduce_retracing=True, autograph=False)
    def gradients_of_one(*example):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(per_example(*example))
        return tape.gradient(
            loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    rows = [
        flat(gradients_of_one(*(t[i : i + 1] for t in data)), variables)
        for i in range(len(data[0]))
    ]
    return np.stack(rows)


def flat(gradients, variables):
    parts = [
        tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g)
        for g, v in zip(gradients, variables, strict=True)
    ]
    return np.concatenate([tf.cast(p, tf.float64).numpy().ravel() for p in parts])


def traced(per_example, variables, data, dynamic=True, jit=False, **options):
    """`step(weights, *data)` -> norms and weighted sums."""
    lead = None if dynamic else len(data[0])
    specs = [tf.TensorSpec([lead, *t.shape[1:]], t.dtype) for t in data]

    @tf.function(
        input_signature=[tf.TensorSpec([lead]), *specs],
        jit_compile=jit,
        autograph=False,
    )
    def step(weights, *tensors):
        gradients = PerExampleGradients(per_example(*tensors), variables, **options)
        return gradients.norms, gradients.weighted_sum(weights)

    return step


def assert_matches(step, variables, expected, data, tolerance=1e-5):
    count = len(data[0])
    weights = np.linspace(-1, 2, count).astype(np.float32)
    norms, sums = step(tf.constant(weights), *data)
    wanted = np.linalg.norm(expected[:count], axis=1)
    np.testing.assert_allclose(norms, wanted, rtol=tolerance)
    total = weights.astype(np.float64) @ expected[:count]
    worst = np.abs(total).max()
    np.testing.assert_allclose(flat(sums, variables), total, atol=tolerance * worst)


def check_engine(
    per_example,
    variables,
    *data,
    loss=None,
    dynamic=True,
    tolerance=1e-5,
    **options,
):
    """Checks the engine on `loss` (by default `per_example`) against the reference."""
    expected = one_at_a_time(per_example, variables, *data)
    step = traced(loss or per_example, variables, data, dynamic, **options)
    for count in (len(data[0]), 1) if dynamic else (len(data[0]),):
        part = [t[:count] for t in data]
        assert_matches(step, variables, expected, part, tolerance)


X, SEQUENCE, IDS = randoms(BATCH, 3), randoms(BATCH, 6, 3), integers(BATCH, 6)
IMAGE = randoms(BATCH, 5, 6, 2)


def batch_of(x):
    return tf.shape(x)[0]


def last_axes_first(x):
    return tf.transpose(x, [1, 0, 2])


def check(case, no_fallback=True, **options):
    per_example, shapes, data = case
    variables = [variable(*shape, seed=i) for i, shape in enumerate(shapes)]
    with warnings.catch_warnings():
        if no_fallback:
            warnings.simplefilter("error", JacobianFallbackWarning)
        check_engine(lambda x: per_example(x, *variables), variables, data, **options)


def opaque(x, v):
    """A loop in which the variable changes from step to step, though only by name."""

    def body(i, h):
        return i + 1, tf.tanh(h @ (v * tf.cast(i >= 0, v.dtype)))

    return tf.while_loop(lambda i, h: i < 3, body, (0, x))[1]


class Block(L.Layer):
    """A pre-activation transformer block."""

    def __init__(self):
        super().__init__()
        self.attend = L.MultiHeadAttention(2, 3)
        self.first, self.second = L.LayerNormalization(), L.LayerNormalization()
        self.wide, self.narrow = L.Dense(9, "gelu"), L.Dense(6)

    def call(self, x):
        x = self.first(x + self.attend(x, x, use_causal_mask=True))
        return self.second(x + self.narrow(self.wide(x)))


def transformer():
    tokens = tf.keras.Input([6], dtype="int32")
    hidden = L.Embedding(10, 6, mask_zero=True)(tokens)
    hidden = hidden + L.Embedding(6, 6)(tf.range(6))
    hidden = Block()(Block()(hidden))
    return tf.keras.Model(tokens, L.Dense(10)(hidden))


def norms_of(per_example, variables, *data, dynamic=True, when="always", jit=False):
    lead = None if dynamic else len(data[0])
    specs = [tf.TensorSpec([lead, *t.shape[1:]], t.dtype) for t in data]

    @tf.function(input_signature=specs, jit_compile=jit, autograph=False)
    def step(*tensors):
        loss = per_example(*tensors)
        return per_example_norms(loss, variables, check_gradients=when)

    return step(*data)


def assert_reaches_no_other(per_example, variables, *data, dynamic=True):
    """Asserts that a loss is refused, or trains each example on its own data alone."""
    try:
        norms = norms_of(per_example, variables, *data, dynamic=dynamic, when="never")
    except ExampleIsolationError:
        return
    for i, norm in enumerate(norms):
        own = [t[i : i + 1] for t in data]
        if not dynamic:
            # In a batch of a static size, the example stands in each place, and the
            # loss at the first place is the example's, whatever its place among `data`.
            own = [tf.repeat(t, len(u), axis=0) for t, u in zip(own, data, strict=True)]
        with tf.GradientTape() as tape:
            loss = per_example(*own)[0]
        found = [g for g in tape.gradient(loss, variables) if g is not None]
        np.testing.assert_allclose(norm, tf.linalg.global_norm(found), rtol=1e-4)


def assert_refused(per_example, variables, *data, **options):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        norms_of(per_example, variables, *data, **options)
    own = isinstance(caught.value, (ExampleIsolationError, LossStructureError))
    if not own:
        assert "ExampleIsolationError" in str(caught.value)


def two_by_two(h):
    """Rows 2k and 2k + 1 get their sum."""
    pairs = tf.reduce_sum(tf.reshape(h, [-1, 2, 5]), 1)
    return tf.repeat(pairs, 2, axis=0)


def shaken(layer, *data, **arguments):
    """The layer, built, with biases that are not zero."""
    layer(*data, **arguments)
    for number, v in enumerate(layer.trainable_variables):
        v.assign_add(0.1 * randoms(*v.shape, seed=number))
    return layer
