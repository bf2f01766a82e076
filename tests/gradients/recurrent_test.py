"""LSTM and GRU whose rows are not examples, or differentiated twice."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.layers_test import (
    Masking,
    check_model,
    check_without_fallback,
    head,
    images,
)
from tests.keras.helpers import mostly_slow
from tests.stack import KERAS_3
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import (
    clipped_sum,
    per_example_norms,
)

L = tf.keras.layers


class Folded(L.Layer):
    """Runs layers on `[B * rows, steps, features]`."""

    def __init__(self, *layers):
        super().__init__()
        self.inner = list(layers)

    def call(self, x):
        rows, steps, features = x.shape[1:]
        h = tf.reshape(x, [-1, steps, features])
        for layer in self.inner:
            h = layer(h)
        return tf.reshape(h, [-1, rows, *h.shape[1:]])


def attention():
    """Words to sentences, sentences to documents."""
    return [
        Folded(
            L.Bidirectional(L.GRU(3, return_sequences=True)),
            L.Dense(4, "tanh"),
            L.GlobalAveragePooling1D(),
        ),
        L.Bidirectional(L.LSTM(2)),
    ]


FOLDED = {
    "lstm": lambda: [Folded(L.LSTM(3))],
    "gru": lambda: [Folded(L.GRU(3))],
    "sequences": lambda: [Folded(L.LSTM(3, return_sequences=True))],
    "bidirectional": lambda: [Folded(L.Bidirectional(L.LSTM(3)))],
    "stacked": lambda: [Folded(L.GRU(3, return_sequences=True), L.LSTM(2))],
    "masked": lambda: [Folded(Masking(), L.LSTM(3))],
    "masked_gru_sequences": lambda: [
        Folded(Masking(), L.GRU(3, return_sequences=True))
    ],
    "with_other_variables": lambda: [
        L.Dense(4, "tanh"),
        Folded(L.LSTM(3)),
        L.Dense(2, "tanh"),
    ],
    "time_distributed": lambda: [L.TimeDistributed(L.LSTM(3))],
    "time_distributed_gru": lambda: [
        L.TimeDistributed(L.GRU(3, return_sequences=True))
    ],
    "hierarchical": attention,
}


@pytest.mark.parametrize(
    "name", mostly_slow(["masked", "with_other_variables"], FOLDED)
)
@pytest.mark.slow
def test_all_rows_of_an_example_are_one_gradient(name):
    x, y = images(3, 4, 5)
    check_without_fallback(FOLDED[name](), x, y, sizes=[len(y)])


@pytest.mark.parametrize("name", mostly_slow(["lstm"], FOLDED))
def test_all_rows_of_an_example_are_one_gradient_in_a_static_batch(name):
    x, y = images(3, 4, 5)
    check_without_fallback(FOLDED[name](), x, y, dynamic=False, sizes=[len(y)])


# With masks, Keras 2's loop over folded rows trains one example at a time, which XLA
# cannot compile.
COMPILED = [name for name in FOLDED if KERAS_3 or not name.startswith("masked")]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_all_rows_of_an_example_are_one_gradient_when_compiled(name):
    x, y = images(3, 4, 5)
    check_without_fallback(
        FOLDED[name](), x, y, dynamic=False, jit=True, sizes=[len(y)]
    )


@pytest.mark.slow
def test_norms_then_sums_of_one_loss():
    """The second pass differentiates the ops that TensorFlow rewrote in the first."""
    x, y = images(4, 5)
    model = tf.keras.Sequential([L.LSTM(3, return_sequences=True), L.GRU(2)])
    model(x)
    variables = model.trainable_variables

    @tf.function
    def both(x, y):
        loss = tf.square(tf.reduce_sum(model(x), axis=1) - y)
        norms = [per_example_norms(loss, variables)]
        gradients = tf.gradients(loss, variables)
        for _ in range(2):
            sums, again = clipped_sum(loss, variables, FixedClip(1e6))
            norms.append(again)
        return norms, gradients, sums

    (first, *others), expected, sums = both(x, y)
    for again in others:
        np.testing.assert_allclose(again, first, rtol=1e-6)
    for total, gradient in zip(sums, expected, strict=True):
        np.testing.assert_allclose(total, gradient, rtol=1e-4, atol=1e-5)


def penalised(model, x, y):
    """A loss with the squared gradient at the input, which passes the layer twice."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.reduce_sum(model(x), axis=1)
    slope = tape.gradient(score, x)
    return tf.square(score - y) + tf.reduce_sum(tf.square(slope), axis=[1, 2])


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("layer", [L.LSTM, L.GRU])
@pytest.mark.slow
def test_a_gradient_penalty_matches_one_example_at_a_time(layer, count):
    # A batch of as many as there are units, too.
    x, y = images(3, 4, batch=count)
    model = tf.keras.Sequential([layer(3), L.Dense(2)])
    model(x)
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        return clipped_sum(penalised(model, x, y), variables, FixedClip(1e6))

    @tf.function
    def alone(x, y):
        return tf.gradients(tf.reduce_sum(penalised(model, x, y)), variables)

    sums, norms = step(x, y)
    gradients = [alone(x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    expected = [tf.linalg.global_norm(g) for g in gradients]
    np.testing.assert_allclose(norms, expected, rtol=1e-4)
    for total, parts in zip(sums, zip(*gradients, strict=True), strict=True):
        np.testing.assert_allclose(total, tf.add_n(parts), rtol=1e-3, atol=1e-5)


class Sorted(L.Layer):
    """Meets its variable in an op that no rule covers."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[shape[-1]])

    def call(self, x):
        return tf.sort(x * tf.sort(self.scale), axis=-1) + tf.cumsum(self.scale)


@pytest.mark.every_check
@pytest.mark.parametrize("layer", [L.LSTM, L.GRU])
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.slow
def test_a_variable_without_a_rule_before_the_layer(layer):
    """The variable's Jacobian goes through the loop of the layer."""
    x, y = images(3, 4, batch=4)
    check_model(head(Sorted(), layer(2)), x, y, sizes=[len(y)])


@pytest.mark.parametrize("layer", mostly_slow(["LSTM"], {"LSTM": 0, "GRU": 0}))
@pytest.mark.slow
def test_a_tape_that_saw_the_layer_is_asked_afterwards(layer):
    """The tape does not use the gradient function of the call."""
    x, y = images(5, 4)
    model = tf.keras.Sequential([getattr(L, layer)(3)])
    model(x)
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = tf.square(tf.reduce_sum(model(x), axis=1) - y)
        sums, _ = clipped_sum(loss, variables, FixedClip(1e6))
        return sums, tape.gradient(loss, [*variables, x])

    x = tf.constant(x)
    sums, (*gradients, at_x) = step(x, y)
    for total, gradient in zip(sums, gradients, strict=True):
        np.testing.assert_allclose(total, gradient, rtol=1e-4, atol=1e-6)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.square(tf.reduce_sum(model(x), axis=1) - y)
    np.testing.assert_allclose(at_x, tape.gradient(loss, x), rtol=1e-4, atol=1e-6)


class OneMatrix(L.LSTM):
    """The products with the input and with the state share a tensor of weights."""

    def build(self, shape):
        super().build(shape)
        self.one = self.add_weight(name="one", shape=[self.units, 4 * self.units])

    def call(self, x):
        self.cell.kernel = self.cell.recurrent_kernel = tf.tanh(self.one)
        return super().call(x)


@pytest.mark.every_check
@pytest.mark.slow
def test_one_tensor_may_be_two_of_the_weights():
    x, y = images(5, 3)
    layer = OneMatrix(3)
    layer(x)
    one = [layer.one]

    @tf.function
    def step(x, y):
        loss = tf.square(tf.reduce_sum(layer(x), axis=1) - y)
        return clipped_sum(loss, one, FixedClip(1e6)), tf.gradients(loss, one)

    ((total,), _), (gradient,) = step(x, y)
    np.testing.assert_allclose(total, gradient, rtol=1e-4, atol=1e-6)
