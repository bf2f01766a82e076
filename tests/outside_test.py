"""The optimizer's variables are made outside of the step that needs them."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip._outside import outside_of_functions

X = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
Y = np.arange(64) % 3
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(optimizer, lazy=False):
    layers = [tf.keras.layers.Dense(4, "relu"), tf.keras.layers.Dense(3)]
    if not lazy:
        layers.insert(0, tf.keras.Input((5,)))
    model = tf.keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss=LOSS)
    return model


def private(kind=dpc.keras.DPAdam, **options):
    options = {"noise_multiplier": 1.0, "expected_batch_size": 32, **options}
    return kind(0.1, **options)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"use_ema": True}])
def test_the_first_step_is_traced_once(options):
    """A function that sees a variable made in its first trace is traced again."""
    model = model_of(private(**options))
    traces = []
    original = model.train_step

    def train_step(data):
        traces.append(1)
        return original(data)

    model.train_step = train_step
    model.fit(X, Y, batch_size=32, epochs=2, verbose=0)
    assert len(traces) == 1
    assert int(model.optimizer.iterations) == 4 / options.get("accumulation_steps", 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"use_ema": True}])
def test_a_model_that_makes_its_variables_in_the_first_step_trains(options):
    model = model_of(private(**options), lazy=True)
    model.fit(X, Y, batch_size=32, epochs=2, verbose=0)
    assert len(model.optimizer.variables) > 4
    assert all(np.all(np.isfinite(v)) for v in model.get_weights())


@pytest.mark.slow
def test_a_strategy_of_one_device_trains():
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = model_of(private(dpc.keras.DPSGD, momentum=0.9))
    model.fit(X, Y, batch_size=32, verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_errors_reach_the_caller():
    class LostError(Exception):
        pass

    def build():
        raise LostError

    with pytest.raises(LostError):
        outside_of_functions(build, [tf.Variable(1.0)])


def test_inside_a_graph_of_its_own_variables_belong_to_that_graph():
    made = []
    with tf.Graph().as_default() as graph:
        outside_of_functions(lambda: made.append(tf.Variable(1.0)), [])
    assert made[0].graph is graph
