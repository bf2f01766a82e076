"""Norms and gradients are those of each example alone, and nothing else changes."""

import numpy as np
import pytest
import tensorflow as tf

from keras_examples.least_error import optimal_clip
from tests.diagnostics.models import (
    digits,
    images,
    keras_regression,
    network,
    regression,
)
from tests.keras.helpers import DPSGD, gradients_one_at_a_time
from tfdpclip.diagnostics import GradientMeter

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
EACH = tf.keras.losses.MeanSquaredError(reduction="none")


def gradient_norms(model, data, **options):
    return GradientMeter(model, **options).norms(data)


def alone(model, x, y, variables=None):
    variables = model.trainable_variables if variables is None else variables
    return gradients_one_at_a_time(
        lambda i: LOSS(y[i : i + 1], model(x[i : i + 1])), variables, len(x)
    )


@pytest.mark.slow
def test_norms_and_gradients():
    model, (x, y) = network(), images(21)
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(True))
    meter = GradientMeter(model)
    found = meter.norms((x, y), batch_size=8)
    expected = alone(model, x, y)
    np.testing.assert_allclose(found.norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    assert found.groups == ("conv", "head") and found.by_group.shape == (21, 2)
    np.testing.assert_allclose(
        found.by_group[:, 0], np.linalg.norm(expected[:, :40], axis=1), rtol=1e-5
    )
    np.testing.assert_allclose(
        np.linalg.norm(found.by_group, axis=1), found.norms, rtol=1e-5
    )
    gradients = meter.gradients((x, y), batch_size=8)
    np.testing.assert_allclose(gradients, expected, atol=1e-6)
    assert "21 gradient norms" in str(found) and "not be released" in str(found)


@pytest.mark.slow
def test_some_variables_and_groups():
    model, (x, y) = network(), images(10)
    head = model.get_layer("head").trainable_variables
    model.compile("sgd", LOSS)
    found = gradient_norms(model, (x, y), variables=head, groups="variable")
    expected = alone(model, x, y, head)
    np.testing.assert_allclose(found.norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    assert found.groups == ("head/kernel", "head/bias")
    # The closed form of a linear head: |p - y| sqrt(|h|^2 + 1).
    body = tf.keras.Model(model.inputs, model.layers[-2].output)
    h = body(x).numpy()
    residual = tf.nn.softmax(model(x)).numpy() - np.eye(10)[y]
    closed = np.linalg.norm(residual, axis=1) * np.sqrt((h**2).sum(1) + 1)
    np.testing.assert_allclose(found.norms, closed, rtol=1e-4)


@pytest.mark.slow
def test_real_norms():
    """Digits after 100 steps of descent: known least, median and greatest norms."""
    x, y = digits()
    model = keras_regression(100)
    found = gradient_norms(model, (x[:256].astype("float32"), y[:256]))
    expected = [0.047816, 0.580111, 4.896591]
    got = [found.norms.min(), np.median(found.norms), found.norms.max()]
    np.testing.assert_allclose(got, expected, rtol=1e-3)
    meter = GradientMeter(model)
    best = optimal_clip(meter.gradients((x[:256].astype("float32"), y[:256])), 0.5)
    assert best.clip_norm == pytest.approx(1.55828783, rel=1e-4)
    assert regression(100)[0].shape == (65, 10)


@pytest.mark.slow
def test_kinds_of_data():
    model, (x, y) = network(), images(20)
    model.compile("sgd", LOSS)
    whole = gradient_norms(model, (x, y)).norms
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    np.testing.assert_allclose(gradient_norms(model, batches).norms, whole, rtol=1e-5)
    empty = tf.data.Dataset.from_tensors((x[:0], y[:0]))
    some = gradient_norms(model, empty.concatenate(batches))
    np.testing.assert_allclose(some.norms, whole, rtol=1e-5)
    weights = np.ones(20, "float32")
    weights[[3, 4]] = 0
    kept = gradient_norms(model, (x, y, weights))
    np.testing.assert_allclose(kept.norms, np.delete(whole, [3, 4]), rtol=1e-5)
    onehot = np.eye(10, dtype="float32")[y]
    model.compile("sgd", tf.keras.losses.CategoricalCrossentropy(True))
    found = gradient_norms(model, (x, onehot))
    np.testing.assert_allclose(found.norms, whole, rtol=1e-5)


def test_a_perfectly_fitted_example_counts():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    x = np.ones((3, 2), "float32")
    y = model(x).numpy()
    y[0] += 1
    model.compile("sgd", EACH)
    found = gradient_norms(model, (x, y))
    assert len(found) == 3 and (found.norms[1:] == 0).all() and found.norms[0] > 0


@pytest.mark.slow
def test_measuring_leaves_everything_as_it_was():
    model, (x, y) = network(), images(16)
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(
        optimizer,
        tf.keras.losses.SparseCategoricalCrossentropy(True),
        metrics=["accuracy"],
    )
    model.fit(x, y, batch_size=8, verbose=0)
    state = [
        v.numpy()
        for v in (
            *model.variables,
            *optimizer.variables,
            *(v for m in model.metrics for v in m.variables),
        )
    ]
    meter = GradientMeter(model)
    meter.norms((x, y))
    meter.gradients((x, y))
    after = [
        v.numpy()
        for v in (
            *model.variables,
            *optimizer.variables,
            *(v for m in model.metrics for v in m.variables),
        )
    ]
    for a, b in zip(state, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_of_the_moment_are_used():
    model, (x, y) = network(), images(8)
    model.compile("sgd", LOSS)
    meter = GradientMeter(model)
    before = meter.norms((x, y)).norms
    for v in model.trainable_variables:
        v.assign(2 * v + 0.1)
    expected = np.linalg.norm(alone(model, x, y), axis=1)
    after = meter.norms((x, y)).norms
    np.testing.assert_allclose(after, expected, rtol=1e-5)
    assert not np.allclose(before, after, rtol=1e-2)


def test_bad_arguments():
    model, (x, y) = network(), images(4)
    with pytest.raises(ValueError, match="call model.compile first"):
        GradientMeter(model)
    model.compile("sgd", LOSS)
    meter = GradientMeter(model)
    for bad in (None, "x", 3):
        with pytest.raises(ValueError, match="data must be"):
            meter.norms(bad)
    with pytest.raises(ValueError, match="data has no targets"):
        meter.norms((x,))
    with pytest.raises(ValueError, match="data has no examples"):
        meter.norms((x[:0], y[:0]))
    with pytest.raises(ValueError, match="batch_size"):
        meter.norms((x, y), batch_size=0)
