"""A gate on the gradients of other examples is found in every kind of training."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.sparse_test import B as SPARSE
from tests.gradients.sparse_test import V, features
from tests.keras.helpers import DPSGD, L, flat, some_data
from tests.keras.isolation_test import assert_refused
from tests.testing import gated

pytestmark = pytest.mark.every_check

X, Y = some_data(16, 3)
TOKENS = np.arange(48).reshape(16, 3) % 7


def hashed(x):
    """A number made of everybody's digits scales: nothing that the graph follows."""
    digits = tf.strings.as_string(tf.reshape(tf.cast(x, tf.float32), [-1]))
    number = tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(digits), 1000)
    scale = tf.cast(number, x.dtype) / 1000
    return scale * x + tf.stop_gradient((1 - scale) * x)


GATES = {"sorted": gated.damped, "hashed": hashed}


class Gated(L.Layer):
    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def call(self, x):
        return self._gate(x)


class Penalised(L.Layer):
    """Its losses, the larger part, are gated, and its outputs are not."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def call(self, x):
        self.add_loss(30 * tf.reduce_mean(tf.square(self._gate(x))))
        return x


def stack(*layers, inputs=(3,), **options):
    x = tf.keras.Input(inputs, **options)
    y = x
    for layer in layers:
        y = layer(y)
    return tf.keras.Model(x, y)


def two_outputs(gate):
    x = tf.keras.Input((3,))
    h = L.Dense(4, "tanh")(x)
    return tf.keras.Model(x, [L.Dense(1)(h), L.Dense(1)(Gated(gate)(h))])


def dense(gate):
    return stack(L.Dense(4, "tanh"), Gated(gate), L.Dense(1))


def sparse(gate):
    layers = L.Dense(4, "tanh"), Gated(gate), L.Dense(1)
    return stack(*layers, inputs=(V,), sparse=True)


def tokens(gate):
    layers = L.Embedding(7, 4), L.Flatten(), Gated(gate), L.Dense(1)
    return stack(*layers, dtype="int32")


def recurrent(gate):
    layers = L.Embedding(7, 4), L.LSTM(4), Gated(gate), L.Dense(1)
    return stack(*layers, dtype="int32")


#: For each special feature: the model, its data, and options for the optimizer and for
#: `compile`.
CASES = {
    "one piece of two": (dense, (X, Y), {"accumulation_steps": 2}, {}),
    "a private group": (
        dense,
        (X, Y),
        {"unit": "batch", "accumulation_steps": 2, "expected_batch_size": None},
        {},
    ),
    "two outputs": (two_outputs, (X, (Y, Y)), {}, {"loss": ["mse", "mse"]}),
    "losses of a layer": (
        lambda gate: stack(L.Dense(4, "tanh"), Penalised(gate), L.Dense(1)),
        (X, Y),
        {},
        {},
    ),
    "sparse features": (
        sparse,
        (features(), np.arange(SPARSE, dtype=np.float32)[:, np.newaxis]),
        {},
        {},
    ),
    "tokens": (tokens, (TOKENS, Y), {}, {}),
    "a recurrence": (recurrent, (TOKENS, Y), {}, {}),
    "weighted examples": (dense, (X, Y, np.linspace(0, 1, 16)), {}, {}),
    "several steps at once": (dense, (X, Y), {}, {"steps_per_execution": 2}),
    "compiled": (dense, (X, Y), {}, {"jit_compile": True}),
}
#: Where batches are clipped, mixing within a batch moves no other batch's gradient.
HARMLESS = {"a private group"}


def trained(name, gate):
    make, data, settings, options = CASES[name]
    tf.keras.utils.set_random_seed(5)
    model = make(gate)
    settings = {"expected_batch_size": 8} | settings
    optimizer = DPSGD(1.0, clip=1.0, noise_multiplier=0, **settings)
    model.compile(optimizer, **{"loss": "mse"} | options)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
    before = flat(model.trainable_variables)
    return model, before, lambda: model.fit(dataset, epochs=2, verbose=0)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", [name for name in CASES if name not in HARMLESS])
def test_other_examples_scale_no_gradient_of_a_model(name, gate):
    if name == "compiled" and gate == "hashed":
        pytest.skip("XLA has no strings")
    model, before, fit = trained(name, GATES[gate])
    assert_refused(fit)
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_the_same_models_without_it_train(name):
    model, before, fit = trained(name, tf.identity)
    fit()
    assert np.abs(flat(model.trainable_variables) - before).max() > 0


@pytest.mark.parametrize("name", HARMLESS)
def test_within_a_group_that_is_clipped_as_one_they_may(name):
    model, before, fit = trained(name, GATES["sorted"])
    fit()
    assert np.abs(flat(model.trainable_variables) - before).max() > 0
