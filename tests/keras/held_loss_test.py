"""Keras 3 scales a loss and later asks for an update: the calls in between."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import linear, some_data, weights_of
from tests.stack import KERAS_3

pytestmark = pytest.mark.skipif(
    not KERAS_3, reason="Keras 2: its trainer calls minimize, and scales no loss."
)
X, Y = some_data(8)


def private(**options):
    options = {"clip": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 8} | options
    return dpc.keras.DPSGD(0.1, **options)


class Model(tf.keras.Model):
    """A dense layer, trained by the test's own step."""

    def __init__(self, step):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1)
        self._own_step = step

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            given = self.optimizer.scale_loss(loss)
        self._own_step(self, tape, loss, given)
        return {"loss": loss}


def fitted(step, **options):
    model = Model(step)
    model(X)  # or Keras would trace the step twice
    model.compile(private(), "mse", **options)
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def as_keras_does(model, tape, loss, given):
    gradients = tape.gradient(given, model.trainable_weights)
    assert all(gradient is None for gradient in gradients)
    model.optimizer.apply_gradients(
        zip(gradients, model.trainable_weights, strict=True)
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_step_like_kerass_own_trains(jit_compile):
    model = fitted(as_keras_does, jit_compile=jit_compile)
    assert int(model.optimizer.iterations) == 1


def test_minimize_is_the_same_step():
    def own(model, tape, loss, given):
        model.optimizer.minimize(loss, model.trainable_weights)
        model.optimizer._held_loss.forget()

    tf.keras.utils.set_random_seed(1)
    first = weights_of(fitted(own))
    tf.keras.utils.set_random_seed(1)
    np.testing.assert_array_equal(weights_of(fitted(as_keras_does)), first)


def own_gradients(model, tape, loss, given):
    gradients = tape.gradient(loss, model.trainable_weights)
    model.optimizer.apply_gradients(
        zip(gradients, model.trainable_weights, strict=True)
    )


def scaled_again(model, tape, loss, given):
    with tape:
        twice = 2.0 * given
    gradients = tape.gradient(twice, model.trainable_weights)
    model.optimizer.apply_gradients(
        zip(gradients, model.trainable_weights, strict=True)
    )


def scaled_twice(model, tape, loss, given):
    model.optimizer.scale_loss(loss)


def applied_twice(model, tape, loss, given):
    as_keras_does(model, tape, loss, given)
    nothing = [None] * len(model.trainable_weights)
    model.optimizer.apply(nothing, model.trainable_weights)


def applied_in_a_branch(model, tape, loss, given):
    def apply():
        nothing = [None] * len(model.trainable_weights)
        model.optimizer.apply(nothing, model.trainable_weights)
        return 1

    tf.cond(loss > 0, apply, lambda: 0)


def never_applied(model, tape, loss, given):
    pass


@pytest.mark.parametrize(
    "step, words",
    [
        (own_gradients, "did not make private"),
        (scaled_again, "was used before apply"),
        (scaled_twice, "called again before"),
        (applied_twice, "before it, or twice"),
        (applied_in_a_branch, "another graph"),
        (never_applied, "never applied"),
    ],
)
def test_what_is_no_private_step_is_refused(step, words):
    with pytest.raises(ValueError, match=words):
        fitted(step)


def test_gradients_without_a_loss_are_refused():
    variable = tf.keras.Variable([1.0, 2.0])
    optimizer = private()
    with pytest.raises(ValueError, match="did not make private"):
        optimizer.apply_gradients([(tf.ones([2]), variable)])
    with pytest.raises(ValueError, match="no loss to make"):
        optimizer.apply([None], [variable])
    np.testing.assert_array_equal(variable, [1.0, 2.0])


def test_a_trace_that_an_error_ended_is_forgotten():
    def broken(model, tape, loss, given):
        raise KeyError("mine")

    model = Model(broken)
    model(X)
    model.compile(private(), "mse")
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            model.fit(X, Y, batch_size=8, verbose=0)
    model._own_step = as_keras_does
    model.compile(model.optimizer, "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_eager_training_is_refused():
    model = linear()
    model.compile(private(), "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="without run_eagerly=True"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gradient_accumulation_steps": 2}, "Write accumulation_steps=4"),
        ({"loss_scale_factor": 8.0}, "before they are clipped"),
    ],
)
def test_kerass_own_scaling_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        private(**options)
    optimizer = private()
    for name, value in options.items():
        with pytest.raises(ValueError, match=words):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) is None


def test_a_loss_scale_optimizer_is_refused_at_once():
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        tf.keras.optimizers.LossScaleOptimizer(private())


def test_mixed_float16_is_refused_by_compile():
    before = tf.keras.config.dtype_policy()
    tf.keras.config.set_dtype_policy("mixed_float16")
    try:
        model = linear()
        with pytest.raises(ValueError, match="mixed_bfloat16 or float32"):
            model.compile(private(), "mse")
    finally:
        tf.keras.config.set_dtype_policy(before)


def test_keras_distribution_is_refused(monkeypatch):
    monkeypatch.setattr("keras.distribution.distribution", lambda: "some")
    model = linear()
    model.compile(private(), "mse")
    with pytest.raises(NotImplementedError, match="set_distribution"):
        model.fit(X, Y, verbose=0)


def test_a_variable_that_its_gradient_replaces_is_refused():
    variable = tf.keras.Variable([1.0])
    variable.overwrite_with_gradient = True
    with pytest.raises(NotImplementedError, match="float8"):
        private().build([variable])


@pytest.mark.parametrize(
    "options", [{}, {"use_ema": True}, {"weight_decay": 0.1}, {"global_clipnorm": 0.1}]
)
def test_what_keras_does_after_the_gradient_is_kerass_own(options):
    """Without noise and clipping, a private optimizer is the ordinary one."""
    found = []
    for kind in (tf.keras.optimizers.SGD, dpc.keras.DPSGD):
        tf.keras.utils.set_random_seed(1)
        layer = tf.keras.layers.Dense(1, kernel_constraint="non_neg")
        model = tf.keras.Sequential([tf.keras.Input((2,)), layer])
        given = dict(options)
        if kind is dpc.keras.DPSGD:
            given |= {"clip": 1e6, "noise_multiplier": 0.0, "expected_batch_size": 4}
        model.compile(kind(0.1, **given), "mse")
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0, shuffle=False)
        found.append(weights_of(model))
        assert "use_ema" in options or (layer.kernel.numpy() >= 0).all()
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)
