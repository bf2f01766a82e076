"""Faults seen in other libraries for private training, that must not occur here."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    OPTIMIZERS,
    DPRecorder,
    L,
    flat,
    linear,
    mostly_slow,
    some_data,
)
from tfdpclip import accounting
from tfdpclip.clipping import AutomaticClip, FixedClip, QuantileClip

RULES = {
    "fixed": FixedClip(0.5),
    "quantile": QuantileClip(0.5, 0.5),
    "quantile_normalize": QuantileClip(0.5, 0.5, normalize=True),
    "automatic": AutomaticClip(),
}


def test_the_noise_is_scaled_by_the_clip_that_clipped_not_by_the_next_one():
    """A step updates the clip by a factor exp(-5): the noise must not use the new clip.

    The comparison allows six standard errors: a false alarm in 2e-9.
    """
    w = tf.Variable(tf.zeros([40_000]))
    rule = QuantileClip(0.0, 1.0, 5.0, count_stddev=100.0)
    optimizer = DPRecorder(clip=rule, noise_multiplier=1.0, expected_batch_size=1e6)

    @tf.function
    def step(x):
        optimizer.minimize(x * w[0], [w])

    step(tf.zeros([2]))
    assert float(optimizer.clip_norm) < 0.1
    expected = optimizer.gradient_noise_multiplier / 1e6
    noise = flat(optimizer.seen)[1:]
    assert np.std(noise) == pytest.approx(expected, rel=6 / math.sqrt(80_000))


@pytest.mark.parametrize("start", [0.1, 10.0])
def test_the_clip_norm_does_not_run_away_from_the_median(start):
    """All norms are 1: feedback of the wrong sign leaves for 0 or for infinity."""
    model = linear(inputs=1)
    rule = QuantileClip(0.5, start, 0.2)
    optimizer = DPSGD(1.0, clip=rule, noise_multiplier=0, expected_batch_size=4)
    model.compile(optimizer, lambda y, p: p[:, 0])
    ones = np.ones([4 * 60, 1], np.float32)
    model.fit(ones, ones, batch_size=4, verbose=0)
    # Steps of 10% around 1.
    assert 0.85 < float(optimizer.clip_norm) < 1.15


@pytest.mark.parametrize("z, stddev", [(1.0, 3.2), (1.0, 1.0), (1.0, 0.6), (0.5, 5.0)])
def test_the_accountants_number_is_not_the_enlarged_one(z, stddev):
    optimizer = DPSGD(
        clip=QuantileClip(count_stddev=stddev),
        noise_multiplier=z,
        expected_batch_size=64,
    )
    assert optimizer.noise_multiplier == z
    assert optimizer.get_config()["noise_multiplier"] == z
    assert optimizer.gradient_noise_multiplier > z
    parts = optimizer.gradient_noise_multiplier**-2 + (2 * stddev) ** -2
    assert parts == pytest.approx(z**-2)
    epsilon = accounting.effective_noise_multiplier(
        optimizer.gradient_noise_multiplier, optimizer.count_stddevs
    )
    assert epsilon == pytest.approx(z)


@pytest.mark.parametrize("z", [math.nan, math.inf, -1.0, -1e-9, "1.0", None, True])
def test_a_noise_multiplier_that_is_no_noise_is_refused(z):
    with pytest.raises(ValueError, match="noise_multiplier"):
        DPSGD(clip=1.0, noise_multiplier=z, expected_batch_size=8)


@pytest.mark.parametrize("clip", [math.nan, math.inf, -1.0, 0.0])
def test_a_clip_norm_that_does_not_clip_is_refused(clip):
    with pytest.raises(ValueError, match="clip"):
        DPSGD(clip=clip, noise_multiplier=1.0, expected_batch_size=8)


def conv_model():
    layers = [tf.keras.Input((4, 4, 1)), L.Conv2D(2, 2), L.Flatten(), L.Dense(1)]
    return tf.keras.Sequential(layers)


def lookup_model():
    layers = [tf.keras.Input((4, 4, 1)), L.Flatten(), L.Embedding(3, 2), L.Flatten()]
    return tf.keras.Sequential([*layers, L.Dense(1)])


def dense_model():
    layers = [tf.keras.Input((4, 4, 1)), L.Dense(3), L.Flatten(), L.Dense(1)]
    return tf.keras.Sequential(layers)


MODELS = {"dense": dense_model, "conv": conv_model, "embedding": lookup_model}


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.thinned(3)
def test_an_empty_batch_is_a_step_of_noise(make, static, jit):
    model = make()
    rule = QuantileClip(0.5, 0.5, 0.2, count_stddev=1.0)
    optimizer = DPSGD(1.0, clip=rule, noise_multiplier=1.0, expected_batch_size=8)
    loss = tf.keras.losses.MeanSquaredError()
    size = 0 if static else None
    before = [w.copy() for w in model.get_weights()]

    @tf.function(
        input_signature=[tf.TensorSpec([size, 4, 4, 1]), tf.TensorSpec([size, 1])],
        jit_compile=jit,
    )
    def step(x, y):
        optimizer.minimize(loss(y, model(x)), model.trainable_variables)

    step(tf.zeros([0, 4, 4, 1]), tf.zeros([0, 1]))
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.all(np.isfinite(new)) and np.all(new != old)
    assert int(optimizer.iterations) == 1
    # The count is noise alone: the clip norm moved, by less than a clamped step.
    moved = math.log(float(optimizer.clip_norm) / 0.5)
    assert 0 < abs(moved) <= 0.1 + 1e-6


@pytest.mark.parametrize("rule", mostly_slow(["quantile", "automatic"], RULES))
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.thinned(3)
def test_one_example_that_is_not_finite_spoils_nothing(rule, bad):
    x, y = some_data(8)
    x[3] = bad
    others = np.delete(np.arange(8), 3)
    updates = []
    for rows in (np.arange(8), others):
        model = linear(kernel="ones")
        optimizer = DPSGD(
            1.0, clip=RULES[rule], noise_multiplier=0, expected_batch_size=8
        )
        model.compile(optimizer, "mse")
        model.train_on_batch(x[rows], y[rows])
        updates.append((model.get_weights()[0], float(optimizer.clip_norm)))
    np.testing.assert_allclose(updates[0][0], updates[1][0], rtol=1e-5)
    assert updates[0][1] == pytest.approx(updates[1][1], rel=1e-6)


# The base library's own Nadam divides by zero on its first step.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mostly_slow(["adam"], [n for n in OPTIMIZERS if n != "nadam"])
)
def test_a_batch_of_nothing_but_nan_leaves_finite_weights(name):
    model = linear(kernel="ones")
    optimizer = OPTIMIZERS[name](
        0.1, clip=0.5, noise_multiplier=1.0, expected_batch_size=8
    )
    model.compile(optimizer, "mse")
    nan = np.full([8, 2], math.nan, np.float32)
    model.train_on_batch(nan, nan[:, :1])
    assert np.all(np.isfinite(model.get_weights()[0]))
    assert int(optimizer.iterations) == 1


def test_the_count_is_over_the_whole_logical_batch_not_the_last_physical_one():
    model = linear(inputs=1)
    rule = QuantileClip(0.5, 1.0, 1.0)
    optimizer = DPSGD(
        1.0, clip=rule, noise_multiplier=0, expected_batch_size=8, accumulation_steps=4
    )
    model.compile(optimizer, lambda y, p: p[:, 0] + 1)
    # Six norms above the clip, and then two below it.
    x = np.array([5, 5, 5, 5, 5, 5, 0.1, 0.1], np.float32)[:, np.newaxis]
    model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    assert float(optimizer.clip_norm) == pytest.approx(math.exp(0.25), rel=1e-5)


def test_the_divisor_is_not_the_number_of_examples_that_came():
    x, y = some_data(3)
    updates = []
    for expected in (3, 30):
        model = linear()
        optimizer = DPSGD(
            1.0, clip=1.0, noise_multiplier=0, expected_batch_size=expected
        )
        model.compile(optimizer, "mse")
        model.train_on_batch(x, y)
        updates.append(model.get_weights()[0])
    np.testing.assert_allclose(updates[0], 10 * updates[1], rtol=1e-5)


def test_a_bias_is_clipped_together_with_its_kernel():
    x = np.array([[3.0, 4.0]], np.float32)
    model = linear(bias=True)
    optimizer = DPSGD(1.0, clip=1.0, noise_multiplier=0, expected_batch_size=1)
    model.compile(optimizer, "mse")
    model.train_on_batch(x, np.array([[15.0]], np.float32))
    assert np.linalg.norm(flat(model.trainable_variables)) == pytest.approx(1, rel=1e-5)


def test_every_trainable_variable_is_trained_or_named():
    """No variable is left out in silence because its layer is unknown."""

    class Odd(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * tf.math.sinh(tf.cumsum(self.w))

    model = tf.keras.Sequential([tf.keras.Input((3,)), Odd(), L.Dense(1)])
    before = [w.copy() for w in model.get_weights()]
    model.compile(
        DPSGD(1.0, clip=1.0, noise_multiplier=0, expected_batch_size=4), "mse"
    )
    model.train_on_batch(*some_data(4, 3))
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.any(old != new)


def test_gradients_made_by_hand_are_refused_on_every_step():
    """A guard that is set once and never reset lets the second step through."""
    x, y = some_data(4)
    model = linear()
    optimizer = DPSGD(1.0, clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(optimizer, "mse")
    for _ in range(2):
        model.train_on_batch(x, y)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        found = tape.gradient(loss, model.trainable_variables)
        before = flat(model.trainable_variables)
        with pytest.raises(ValueError, match="minimize"):
            pairs = zip(found, model.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
        np.testing.assert_array_equal(before, flat(model.trainable_variables))
