"""A statement says that the seed of a model's own random numbers must be secret."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stack import KERAS_3
from tfdpclip.keras import _compat

L = tf.keras.layers


@pytest.fixture(autouse=True)
def no_seed():
    """Tests before this one may have set a seed."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


class Noted(tf.keras.callbacks.Callback):
    """Notes the states of the generators of a model during its steps."""

    def __init__(self):
        super().__init__()
        self.during = []

    def now(self):
        return [state.numpy() for state in _compat.random_states_of(self.model)]

    def on_train_batch_begin(self, batch, logs=None):
        self.during.append(self.now())


def stated(*layers, noted=None, epochs=1):
    x = np.linspace(0, 1, 240, dtype="float32").reshape(60, 4)
    plan = dpc.keras.PrivacyPlan(8, 1e-4, 60, batch_size=20, epochs=epochs)
    model = tf.keras.Sequential([L.Input((4,)), *layers, L.Dense(1)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    batches = plan.batches((x, x[:, 0]))
    callbacks = plan.callbacks + ([] if noted is None else [noted])
    model.fit(batches, epochs=epochs, callbacks=callbacks, verbose=0)
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


class Own(L.Layer):
    """Draws from a generator of its own, as in the guide of Keras 3."""

    def __init__(self, seed=None, **options):
        super().__init__(**options)
        self.rng = tf.keras.random.SeedGenerator(seed)

    def call(self, x, training=False):
        return tf.keras.random.dropout(x, 0.5, seed=self.rng) if training else x


only_of_keras_3 = pytest.mark.skipif(not KERAS_3, reason="generators of Keras 3")


@only_of_keras_3
def test_the_seed_of_a_generator_under_any_name_is_an_assumption():
    text = " ".join(stated(Own(1337, name="draws")).split())
    assert "the seed of the random numbers of 'draws' is secret" in text
    assert "is secret" not in stated(Own(name="draws"))


def begun(states):
    return {(i, state.ravel()[0]) for i, state in enumerate(states)}


@only_of_keras_3
@pytest.mark.parametrize("make", [lambda: L.Dropout(0.5), Own], ids=["layer", "own"])
def test_what_a_model_keeps_tells_none_of_the_numbers_that_were_drawn(make, tmp_path):
    """An export contains the states, which with their counts give every mask."""
    noted = Noted()
    stated(make(), noted=noted, epochs=2)
    used = [begun(states) for states in noted.during]
    # In an epoch, Keras counts up: the first number of a state stays.
    assert len(set(map(frozenset, used))) == 2
    assert all(len(states) == 1 for states in noted.during)
    noted.model.export(str(tmp_path))
    reader = tf.train.load_checkpoint(str(tmp_path / "variables" / "variables"))
    kept = [reader.get_tensor(name) for name in reader.get_variable_to_shape_map()]
    kept = {int(v.ravel()[0]) for v in kept if getattr(v, "dtype", None) == np.int64}
    assert kept and not kept & {value for states in used for _, value in states}


@only_of_keras_3
def test_with_a_common_seed_the_states_stay():
    tf.random.set_seed(7)
    noted = Noted()
    stated(L.Dropout(0.5), noted=noted, epochs=2)
    (first,) = begun(noted.during[0])
    assert begun(noted.now()) == {first}
