"""Gradients that are little but rounding: saturated activations, and underflow.

TensorFlow rewrites the ops of a step: it fuses a product and an activation, and it
reorders sums. Near 1, a different last digit of tanh changes the gradient, and the
gradient of a cross-entropy at logit 17 is -4e-8 or 0 by the order of a sum.
"""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import randoms
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import clipped_sum
from tfdpclip.gradients.errors import ExampleIsolationError
from tfdpclip.gradients.forms import outer

pytestmark = pytest.mark.every_check
X = randoms(24, 6)
L = tf.keras.layers


def checked(size, activation="tanh", far=1.0, share=1.0):
    """Sums of a step that checks itself, of data `size` times as large.

    Args:
      size: the factor on all data.
      activation: of the last layer, whose product is fused.
      far: a further factor on the first example.
      share: the factor by which a simulated bug lowers the norms.
    """
    model = tf.keras.Sequential([L.Dense(5), L.Dense(3, activation)])
    model(X)
    sizes = np.full([len(X), 1], size, np.float32)
    sizes[0] *= far
    norms = outer.Outer.squared_norms

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def step(x):
        loss = tf.reduce_sum(tf.square(model(x) - 0.5), axis=1)
        return clipped_sum(
            loss, model.trainable_variables, FixedClip(1.0), check_gradients="always"
        )[0]

    with mock.patch.object(
        outer.Outer, "squared_norms", lambda *args: share**2 * norms(*args)
    ):
        # A step compares one of 24 examples; one that is saturated shows nothing.
        for _ in range(5):
            sums = step(X * sizes)
    return sums


@pytest.mark.parametrize("probabilities", [True, False])
def test_right_answers_without_a_doubt_are_no_mismatch(probabilities):
    """All gradients of all batches are what is left where terms cancel."""
    W = tf.Variable([[1.0]])
    to_probability = tf.sigmoid if probabilities else tf.identity
    entropy = tf.keras.losses.BinaryCrossentropy(
        from_logits=not probabilities, reduction="none"
    )

    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def step(x):
        answers = to_probability(x @ W)
        loss = entropy(tf.cast(x > 0, tf.float32), answers)
        return clipped_sum(loss, [W], FixedClip(1.0), check_gradients="always")[0]

    for logit in np.linspace(8, 24, 40):
        x = np.array([[logit], [-logit - 0.3], [logit + 0.7]], np.float32)
        assert np.isfinite(step(x)[0]).all()


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize("size", [1.0, 10.0, 30.0, 1e3])
@pytest.mark.slow
def test_a_saturated_layer_is_no_mismatch(size, activation):
    assert all(np.isfinite(part).all() for part in checked(size, activation))


@pytest.mark.slow
def test_nor_is_one_saturated_example():
    assert all(np.isfinite(part).all() for part in checked(1.0, far=300.0))


@pytest.mark.parametrize("size", [1.0, 3.0])
@pytest.mark.thinned(2)
def test_a_wrong_norm_is_found_all_the_same(size):
    with pytest.raises(tf.errors.InvalidArgumentError, match="GradientMismatchError"):
        checked(size, share=0.97)


@pytest.mark.slow
def test_and_beside_a_saturated_example():
    with pytest.raises(tf.errors.InvalidArgumentError, match="GradientMismatchError"):
        checked(1.0, far=300.0, share=0.97)


def cross_entropy(share=1.0):
    """Self-checked sums of a logistic model that is sure of half of the examples.

    The gradient of a sure example at its logit, 1 - 1 + e^-z, is e^-z or 0: the order
    of the sum decides, and is not the same in the step and in the check.
    """
    w = tf.Variable([[1.0]])
    x = np.concatenate([np.linspace(-50, -30, 12), np.linspace(15, 30, 12)])
    x = x.astype(np.float32)[:, None]
    norms = outer.Outer.squared_norms

    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def step(x):
        logits = (x @ w)[:, 0]
        loss = tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(logits), logits)
        return clipped_sum(loss, [w], FixedClip(1.0), check_gradients="always")[0]

    with mock.patch.object(
        outer.Outer, "squared_norms", lambda *args: share**2 * norms(*args)
    ):
        for _ in range(40):  # Each step compares one example.
            found = step(x)
    return found


@pytest.mark.slow
def test_nor_is_a_sure_example_of_a_cross_entropy():
    assert np.isfinite(cross_entropy()[0]).all()


@pytest.mark.slow
def test_and_a_wrong_norm_beside_sure_examples_is_found():
    with pytest.raises(tf.errors.InvalidArgumentError, match="GradientMismatchError"):
        cross_entropy(share=0.97)


@pytest.mark.slow
def test_nor_is_a_saturated_layer_behind_tokens():
    """Data that cannot be nudged: the model's weights are."""
    layers = L.Input((3,)), L.Embedding(9, 6), L.Dense(5, "tanh"), L.Dense(4, "tanh")
    model = tf.keras.Sequential([*layers, L.Flatten(), L.Dense(3, "tanh")])
    tokens = tf.constant(np.random.default_rng(0).integers(9, size=(24, 3)))
    model(tokens)
    for layer in (model.layers[0], model.layers[-1]):
        kernel = layer.trainable_variables[0]
        kernel.assign(100.0 * tf.convert_to_tensor(kernel))

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def step(tokens):
        loss = tf.reduce_sum(tf.square(model(tokens) - 0.5), axis=1)
        return clipped_sum(
            loss, model.trainable_variables, FixedClip(1.0), check_gradients="always"
        )[0]

    for _ in range(3):
        assert all(np.isfinite(part).all() for part in step(tokens))


@pytest.mark.parametrize("exponent", [-20, -28, -32, -36, -44])
@pytest.mark.slow
def test_gradients_that_underflow_are_no_mixed_examples(exponent):
    w = tf.Variable(randoms(6, 5))

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def step(x):
        loss = tf.reduce_sum(tf.nn.softmax(x @ w)[:, :2], axis=1)
        loss *= math.ldexp(1.0, exponent * 3)
        return clipped_sum(loss, [w], FixedClip(1.0), check_gradients="always")[0]

    assert np.isfinite(step(X)[0]).all()


def test_mixing_among_tiny_gradients_is_found():
    w = tf.Variable(randoms(6, 5))

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def step(x):
        h = x @ w
        # The ids are computed by `tf.repeat`, so no rule covers the mixing.
        pairs = tf.repeat(tf.reduce_sum(tf.reshape(h, [-1, 2, 5]), 1), 2, axis=0)
        loss = 1e-25 * tf.reduce_sum(tf.tanh(h + pairs), axis=1)
        return clipped_sum(loss, [w], FixedClip(1.0), check_gradients="always")[0]

    with pytest.raises(ExampleIsolationError, match="from its own data alone"):
        step(X)
