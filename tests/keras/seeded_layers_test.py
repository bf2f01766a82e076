"""A statement says that the seed of a model's own random numbers must be secret."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc

L = tf.keras.layers


@pytest.fixture(autouse=True)
def no_seed():
    """Tests before this one may have set a seed."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


def stated(*layers):
    x = np.linspace(0, 1, 240, dtype="float32").reshape(60, 4)
    plan = dpc.keras.PrivacyPlan(8, 1e-4, 60, batch_size=20, epochs=1)
    model = tf.keras.Sequential([L.Input((4,)), *layers, L.Dense(1)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    model.fit(plan.batches((x, x[:, 0])), callbacks=plan.callbacks, verbose=0)
    return str(plan.statement())


DRAWS = {
    "dropout": lambda: L.Dropout(0.5, name="draws"),
    "noise": lambda: L.GaussianNoise(0.1, name="draws"),
    "gaussian": lambda: L.GaussianDropout(0.1, name="draws"),
}
NEVER = {
    "dense": lambda: L.Dense(3),
    "dropout of 0": lambda: L.Dropout(0.0),
}


@pytest.mark.parametrize("make", DRAWS.values(), ids=DRAWS)
def test_a_common_seed_of_layers_that_draw_is_an_assumption(make):
    tf.random.set_seed(7)
    text = " ".join(stated(make()).split())
    assert "the seed of the random numbers of 'draws' is secret" in text


def test_so_is_a_seed_of_the_layer():
    text = " ".join(stated(L.Dropout(0.5, seed=3, name="draws")).split())
    assert "the seed of the random numbers of 'draws' is secret" in text


@pytest.mark.parametrize("make", NEVER.values(), ids=NEVER)
def test_layers_that_never_draw_need_no_secret(make):
    tf.random.set_seed(7)
    assert "is secret" not in stated(make())


def test_without_a_seed_nothing_is_assumed():
    assert "is secret" not in stated(L.Dropout(0.5), L.GaussianNoise(0.1))


def test_nor_of_a_recurrent_layer_without_dropout():
    tf.random.set_seed(7)
    lstm = [L.Reshape((2, 2)), L.LSTM(3)]
    assert "is secret" not in stated(*lstm)
