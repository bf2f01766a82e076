"""`tf.vectorized_map` over the examples, with variables inside."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import expected_sum, mostly_slow
from tests.stack import KERAS_3
from tfdpclip.gradients import (
    ExampleIsolationError,
    JacobianFallbackWarning,
    OneByOneWarning,
)
from tfdpclip.gradients import clipped_sum as clipped

# A variable without a rule, and a loss without a proof.
SLOW = (JacobianFallbackWarning, OneByOneWarning)
B, T, D, N = 5, 6, 4, 3


def variable(*shape):
    rng = np.random.default_rng(len(shape) + shape[-1])
    return tf.Variable(rng.normal(size=shape).astype(np.float32))


def vectors():
    return np.random.default_rng(1).normal(size=[B, D]).astype(np.float32)


def sequences():
    return np.random.default_rng(2).normal(size=[B, T, D]).astype(np.float32)


def tokens():
    return np.random.default_rng(3).integers(0, 7, [B, T])


def layer(made, *shape):
    """A layer on a single example, given to the layer as a batch of size 1."""
    tf.keras.utils.set_random_seed(4)
    made.build((None, *shape))
    return made.trainable_variables, lambda row: made(row[tf.newaxis])[0]


def with_kernel(shape, function):
    kernel = variable(*shape)
    return [kernel], lambda row: function(row, kernel)


# name: data, the function that makes variables and `row -> loss`, and whether a proof
# and a rule cover it for a static and for a dynamic batch.
CASES = {
    "row": (vectors, lambda: with_kernel((D, N), lambda r, k: (r[None] @ k)[0]), 1, 1),
    "matvec": (vectors, lambda: with_kernel((N, D), lambda r, k: _matvec(k, r)), 1, 0),
    "tensordot": (
        vectors,
        lambda: with_kernel((D, N), lambda r, k: tf.tensordot(r, k, 1)),
        1,
        1,
    ),
    "einsum": (
        vectors,
        lambda: with_kernel((D, N), lambda r, k: tf.einsum("d,dn->n", r, k)),
        1,
        1,
    ),
    "elementwise": (
        vectors,
        lambda: with_kernel((D,), lambda r, k: tf.tanh(r * k) + k),
        1,
        1,
    ),
    "sequence": (sequences, lambda: with_kernel((D, N), lambda r, k: r @ k), 1, 1),
    "kernel first": (
        sequences,
        lambda: with_kernel((N, D), lambda r, k: tf.matmul(k, r, transpose_b=True)),
        1,
        1,
    ),
    "both turned": (
        sequences,
        lambda: with_kernel(
            (D, N),
            lambda r, k: tf.matmul(k, r, transpose_a=True, transpose_b=True),
        ),
        1,
        1,
    ),
    "table": (
        tokens,
        lambda: with_kernel((7, D), lambda r, k: tf.reduce_sum(tf.gather(k, r), 0)),
        0,
        0,
    ),
    "dense": (sequences, lambda: layer(tf.keras.layers.Dense(N), T, D), 1, 1),
    "convolution": (sequences, lambda: layer(tf.keras.layers.Conv1D(2, 3), T, D), 1, 1),
    "normalisation": (
        sequences,
        lambda: layer(tf.keras.layers.LayerNormalization(), T, D),
        int(KERAS_3),  # Keras 2 makes one row of all entries.
        1,
    ),
    "recurrence": (sequences, lambda: layer(tf.keras.layers.LSTM(N), T, D), 0, 0),
}


def _matvec(kernel, row):
    return tf.linalg.matvec(kernel, row)


def losses(function, x, count):
    out = tf.reshape(tf.vectorized_map(function, x), [count, -1])
    return tf.reduce_mean(tf.square(out), axis=1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "name",
    mostly_slow(["matvec", "kernel first", "table", "normalisation"], list(CASES)),
)
@pytest.mark.thinned(9)
def test_each_example_is_clipped_by_itself(name, dynamic):
    data, make, *covered = CASES[name]
    x = data()
    variables, function = make()
    gradients = []
    for row in x:
        with tf.GradientTape() as tape:
            out = function(tf.constant(row))
            loss = tf.reduce_mean(tf.square(out))
        parts = tape.gradient(loss, variables)
        gradients.append(
            np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in parts])
        )
    gradients = np.stack(gradients)
    rule = dpc.FixedClip(float(np.median(np.linalg.norm(gradients, axis=1))))
    shape = [None if dynamic else B, *x.shape[1:]]

    @tf.function(input_signature=[tf.TensorSpec(shape, x.dtype)])
    def step(x):
        count = tf.shape(x)[0] if dynamic else B
        return clipped(losses(function, x, count), variables, rule)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sums, norms = step(x)
    slow = any(issubclass(w.category, SLOW) for w in caught)
    assert slow is not bool(covered[dynamic])
    np.testing.assert_allclose(norms, np.linalg.norm(gradients, axis=1), rtol=1e-5)
    sums = np.concatenate([np.ravel(s) for s in sums])
    np.testing.assert_allclose(
        sums, expected_sum(rule, gradients), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.every_check
def test_examples_that_meet_in_between_are_refused(dynamic):
    """The variable's examples may be on any axis; mixed they are on none."""
    kernel, other = variable(N, D), variable(D, D)

    def function(row):
        return tf.linalg.matvec(kernel, row)

    @tf.function(input_signature=[tf.TensorSpec([None if dynamic else B, D])])
    def step(x):
        rows = tf.vectorized_map(function, x)
        mixed = rows @ tf.transpose(rows) @ (x @ other)
        return clipped(tf.reduce_mean(mixed, 1), [kernel, other], dpc.FixedClip(1.0))

    with pytest.raises((ExampleIsolationError, tf.errors.InvalidArgumentError)) as info:
        step(vectors())
    assert "ExampleIsolationError" in str(info.value) or info.type is (
        ExampleIsolationError
    )


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: tf.gather(x, tf.range(tf.shape(x)[0] // 2)),
        lambda x: tf.gather(
            x, tf.where(tf.shape(x)[0] > 6, tf.range(tf.shape(x)[0]), 0)
        ),
        lambda x: tf.gather(x, tf.range(tf.shape(x)[0])[::-1]),
    ],
    ids=["fewer", "all the first one", "reversed"],
)
@pytest.mark.every_check
@pytest.mark.slow
def test_rows_in_another_order_are_not_taken_for_every_row(rows):
    kernel = variable(D, N)

    @tf.function(input_signature=[tf.TensorSpec([None, D])])
    def step(x):
        out = tf.square(rows(x) @ kernel)
        return clipped(
            tf.reduce_mean(out, 1) + tf.reduce_sum(x, 1)[: tf.shape(out)[0]],
            [kernel],
            dpc.FixedClip(1.0),
        )

    with pytest.raises((ExampleIsolationError, tf.errors.InvalidArgumentError)):
        step(vectors())
