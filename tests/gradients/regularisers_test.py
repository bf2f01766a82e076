"""Regularisers are added once, unclipped; factors on examples are the examples'."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import X, flat, one_at_a_time
from tests.gradients.losses import W, assert_scaled, batch_of, reference_norms, vector
from tfdpclip.gradients import PerExampleGradients


def shared_of(loss, variables, *data):
    @tf.function
    def step(*tensors):
        gradients = PerExampleGradients(loss(*tensors), variables)
        return gradients.norms, gradients.shared_gradients()

    norms, shared = step(*data)
    return norms.numpy(), flat(shared, variables)


PENALTIES = {
    "l2": lambda: 0.1 * tf.nn.l2_loss(W),
    "keras": lambda: tf.keras.regularizers.L1L2(0.1, 0.2)(W),
    "orthogonal": lambda: tf.keras.regularizers.OrthogonalRegularizer(0.1)(W),
    "scaled_for_replicas": lambda: tf.nn.scale_regularization_loss(tf.nn.l2_loss(W)),
    "two": lambda: tf.add_n([tf.nn.l2_loss(W), tf.reduce_sum(tf.abs(W))]),
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("per_example", [False, True], ids=["scalar", "vector"])
@pytest.mark.thinned(6)
def test_a_regulariser_is_nobodys_and_comes_back_exactly_once(name, per_example):
    penalty = PENALTIES[name]

    def loss(x):
        losses = vector(x)
        return (losses if per_example else tf.reduce_mean(losses)) + penalty()

    norms, shared = shared_of(loss, [W], X)
    np.testing.assert_allclose(norms, reference_norms(vector, X), rtol=1e-5)
    with tf.GradientTape() as tape:
        value = penalty()
    wanted = flat([tape.gradient(value, W)], [W])
    np.testing.assert_allclose(shared, wanted, rtol=1e-6, atol=1e-7)


def test_a_regulariser_inside_the_mean_is_nobodys_either():
    norms, shared = shared_of(
        lambda x: tf.reduce_mean(vector(x) + tf.nn.l2_loss(W)), [W], X
    )
    np.testing.assert_allclose(norms, reference_norms(vector, X), rtol=1e-5)
    np.testing.assert_allclose(shared, W.numpy().ravel(), rtol=1e-5)


@pytest.mark.slow
def test_a_learned_scale_of_the_loss_belongs_to_the_examples():
    """Uncertainty weighting: exp(-s) * loss + s, for two outputs."""
    s, t = tf.Variable(0.3), tf.Variable(-0.2)
    variables = [W, s, t]

    def weighted(first, second, penalty):
        return tf.exp(-s) * first + tf.exp(-t) * second + penalty

    def loss(x):
        first, second = tf.reduce_mean(vector(x)), tf.reduce_mean(vector(2 * x))
        return weighted(first, second, s + t)

    expected = one_at_a_time(
        lambda x: weighted(vector(x), vector(2 * x), 0.0), variables, X
    )
    norms, shared = shared_of(loss, variables, X)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(shared, [0.0] * 12 + [1.0, 1.0])


STOPPED = {
    "a learned scale": lambda x, s: tf.reduce_mean(stop(vector(x))) * s,
    "a stopped mean": lambda x, s: stop(tf.reduce_mean(vector(x))) * s,
    "a quotient": lambda x, s: stop(tf.reduce_mean(vector(x)) * s) / s,
    "a penalty": lambda x, s: stop(tf.reduce_mean(vector(x))) * tf.nn.l2_loss(s + W),
    "within": lambda x, s: stop(-tf.reduce_sum(vector(x) + s**2)) * s / tf_size(x),
}


def stop(tensor):
    return tf.stop_gradient(tensor)


def tf_size(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", STOPPED)
def test_what_is_stopped_has_a_gradient_for_what_multiplies_it(name):
    scale = tf.Variable(1.5)

    @tf.function(input_signature=[tf.TensorSpec([None, *X.shape[1:]])])
    def step(x):
        loss = tf.reduce_mean(vector(x)) + STOPPED[name](x, scale)
        found = PerExampleGradients(loss, [W, scale], nominal_batch_size=len(X))
        ours = found.weighted_sum(tf.ones(len(X)))
        return ours, found.shared_gradients(), tf.gradients(loss, [W, scale])

    sums, shared, expected = step(X)
    for ours, public, plain in zip(sums, shared, expected, strict=True):
        ours = ours / len(X) + (0 if public is None else public)
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_half_the_sum_of_squares_of_an_activation_is_per_example():
    """As tf.keras.regularizers.L2 gives for an activity regulariser."""

    def loss(x):
        return tf.reduce_mean(vector(x)) + tf.nn.l2_loss(x @ W) / batch_of(x)

    per_example = lambda x: vector(x) + tf.reduce_sum(tf.square(x @ W), 1) / 2  # noqa: E731
    assert_scaled(loss, per_example, X)
