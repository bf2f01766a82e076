"""Answers that can be worked out by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L, flat, linear
from tests.stack import MEAN


def minimize(variables, loss_of, batches, clip, *, lr=1.0, count, k=1, eager=False):
    """Trains on the batches; returns the variables' values after each call."""
    optimizer = DPSGD(
        lr,
        clip=clip,
        noise_multiplier=0,
        expected_batch_size=count,
        accumulation_steps=k,
    )

    def step(*data):
        with tf.GradientTape() as tape:
            loss = loss_of(*data)
        optimizer.minimize(loss, variables, tape=tape)

    if not eager:
        step = tf.function(step)
    values = []
    for batch in batches:
        step(*(tf.constant(part, tf.float32) for part in batch))
        values.append(flat(variables))
    return values


def two_quadratics():
    v0, v1 = tf.Variable([1.0, 2.0]), tf.Variable([3.0])

    def loss(data0, data1):
        first = tf.reduce_sum(tf.square(data0 - v0), axis=1)
        return 0.5 * first + 0.5 * tf.square(data1 - v1)

    return [v0, v1], loss


in_every_mode = pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
eager_warns = pytest.mark.filterwarnings("ignore:Eager steps")


@eager_warns
@in_every_mode
def test_gradients_within_the_clip_are_averaged(eager):
    variables, loss = two_quadratics()
    data = [[3, 4], [5, 6], [7, 8], [-1, 0]], [8, 2, 3, 1]
    start = flat(variables)
    (after,) = minimize(variables, loss, [data], 100.0, count=4, eager=eager)
    np.testing.assert_allclose(start - after, [-2.5, -2.5, -0.5], rtol=1e-6)


@eager_warns
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.slow
def test_gradients_beyond_the_clip_are_scaled_to_it(eager):
    v = tf.Variable([0.0, 0.0])

    def loss(data):
        return 0.5 * tf.reduce_sum(tf.square(data - v), axis=1)

    data = ([[3, 4], [6, 8]],)
    (after,) = minimize([v], loss, [data], 1.0, count=2, eager=eager)
    np.testing.assert_allclose(after, [0.6, 0.8], rtol=1e-6)


@eager_warns
@in_every_mode
def test_the_norm_runs_over_all_variables(eager):
    variables, loss = two_quadratics()
    data = [[3, 6], [5, 6], [4, 8], [-1, 0]], [8, 2, 3, 1]
    start = flat(variables)
    (after,) = minimize(variables, loss, [data], 2.5, count=4, eager=eager)
    expected = [-0.540198, -1.006045, 0.003795]
    np.testing.assert_allclose(start - after, expected, atol=2e-6)


@pytest.mark.parametrize(
    "clip, weight, expected",
    [
        (200.0, 1.0, [0.90, 1.20, 0.30]),
        (40.0, 1.0, [0.235339, 0.313786, 0.078446]),
        (10.0, 1.0, [0.058835, 0.078446, 0.019612]),
        (10.0, 0.18, [0.058835, 0.078446, 0.019612]),
        (40.0, 0.18, [0.162, 0.216, 0.054]),
    ],
)
@pytest.mark.thinned(6)
def test_one_example_of_a_linear_model(clip, weight, expected):
    model = linear(bias=True)
    optimizer = DPSGD(0.01, clip=clip, noise_multiplier=0, expected_batch_size=1)
    model.compile(optimizer, "mse")
    x, y = np.array([[3.0, 4.0]], np.float32), np.array([[15.0]], np.float32)
    model.train_on_batch(x, y, sample_weight=np.array([weight], np.float32))
    np.testing.assert_allclose(flat(model.trainable_variables), expected, atol=2e-6)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "weights, expected",
    [
        (None, [-0.03394, 0.026563]),
        ([0.1, 0.2, 0.3, 0.4], [-0.072615, -0.031449]),
    ],
)
@pytest.mark.parametrize("reduction", ["none", MEAN])
def test_four_examples_of_a_linear_model(weights, expected, reduction):
    model = linear()
    optimizer = DPSGD(1.0, clip=1.0, noise_multiplier=0, expected_batch_size=4)
    model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction=reduction))
    x = np.array([[2, 3], [4, 5], [6, 7], [8, 9]], np.float32)
    y = np.array([[1], [3], [-2], [-4]], np.float32)
    if weights is not None:
        weights = np.array(weights, np.float32)
    model.train_on_batch(x, y, sample_weight=weights)
    np.testing.assert_allclose(model.get_weights()[0].ravel(), expected, atol=2e-6)


@pytest.mark.parametrize(
    "clip, expected",
    [
        (200.0, [0.49, 0.56, 0.19]),
        (1.0, [0.005828, 0.001036, 0.003867]),
    ],
)
def test_two_kinds_of_examples(clip, expected):
    x = np.tile([[3, 4], [1, -1]], (10, 1)).astype("float32")
    y = x @ np.array([[3.0], [1.0]], np.float32) + 2
    model = linear(bias=True)
    optimizer = DPSGD(0.01, clip=clip, noise_multiplier=0, expected_batch_size=20)
    model.compile(optimizer, "mse")
    model.train_on_batch(x, y)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, atol=2e-6)


def test_linear_regression_converges():
    rng = np.random.default_rng(0)
    x = (3 * rng.standard_normal((1000, 4))).astype("float32")
    y = x @ np.array([[-5.0], [4.0], [3.0], [2.0]], np.float32) + 6
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(1)])
    optimizer = DPSGD(0.05, clip=100.0, noise_multiplier=0, expected_batch_size=8)
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    found = flat(model.trainable_variables)
    np.testing.assert_allclose(found, [-5, 4, 3, 2, 6], atol=0.05)


def test_accumulation_steps_on_every_second_call_only():
    v0, v1 = tf.Variable([[1.0], [2.0]]), tf.Variable([3.0])

    def loss(x):
        return (x @ v0 + v1)[:, 0]

    x1, x2 = ([[2, 0], [0, 1]],), ([[4, 2], [2, 1]],)
    found = minimize([v0, v1], loss, [x1, x2, x2, x2], 100.0, count=4, k=2)
    expected = [[1, 2, 3], [-1, 1, 2], [-1, 1, 2], [-4, -0.5, 1]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
