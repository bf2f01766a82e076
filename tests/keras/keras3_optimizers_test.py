"""Optimizers that only Keras 3 has make the same updates under privacy as without."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stack import KERAS_3
from tfdpclip.keras import privatize

if not KERAS_3:
    pytest.skip("Keras 2 has neither Muon nor MultiOptimizer", allow_module_level=True)

OPTIMIZERS = tf.keras.optimizers
SIZE = 16
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer_map():
    """Adam for all variables but the embedding, which has SGD."""
    return OPTIMIZERS.OptimizerMap(OPTIMIZERS.Adam(0.01), {".*words.*": sgd()})


def sgd():
    return OPTIMIZERS.SGD(0.5, momentum=0.9)


CASES = {
    "muon": (OPTIMIZERS.Muon, lambda: 0.01),
    "multi": (OPTIMIZERS.MultiOptimizer, optimizer_map),
}


def model_with(optimizer):
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((5,), dtype="int32"),
            layers.Embedding(20, 4, name="words"),
            layers.Conv1D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(6, activation="relu"),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer, LOSS)
    return model


def data(size=SIZE):
    rng = np.random.default_rng(0)
    return rng.integers(0, 20, [size, 5]), rng.integers(0, 3, size)


@pytest.mark.parametrize("kind, argument", CASES.values(), ids=CASES)
def test_updates_are_those_of_the_plain_optimizer(kind, argument):
    """No noise and a clip that no gradient reaches leave the plain optimizer's updates.

    The model has a matrix, an embedding, a convolution and biases.
    """
    private = privatize(kind)(
        argument(), clip=1e6, noise_multiplier=0.0, expected_batch_size=SIZE
    )
    models = [model_with(kind(argument())), model_with(private)]
    start = models[0].get_weights()
    x, y = data()
    for _ in range(3):
        models[1].train_on_batch(x, y)
        # As a sum for each word: Keras's Adam squares the parts of the sum instead.
        with tf.GradientTape() as tape:
            loss = LOSS(y, models[0](x))
        variables = models[0].trainable_variables
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        models[0].optimizer.apply(list(gradients), variables)
    pairs = zip(*(model.get_weights() for model in models), start, strict=True)
    for plain, found, before in pairs:
        assert np.abs(plain - before).max() > 1e-3
        np.testing.assert_allclose(found, plain, atol=2e-5)
    assert int(private.iterations) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind, argument", CASES.values(), ids=CASES)
def test_a_plan_trains_and_a_file_goes_on(kind, argument, tmp_path):
    x, y = data(64)
    plan = dpc.keras.PrivacyPlan(8, 1e-4, 64, batch_size=16, epochs=2)
    model = model_with(plan.optimizer(kind, argument()))
    for _ in range(2):
        batches = plan.batches((x, y))
        model.fit(batches, epochs=1, callbacks=plan.callbacks, verbose=0)
        path = str(tmp_path / "model.keras")
        model.save(path)
        before, model = model.optimizer, tf.keras.models.load_model(path)
        assert type(model.optimizer) is type(before)
        # Keras's MultiOptimizer maps by paths, of which loading takes the model's name.
        assert (
            model.optimizer._step_history.known_steps()
            == before._step_history.known_steps()
        )
        for found, kept in zip(
            model.optimizer.variables, before.variables, strict=True
        ):
            np.testing.assert_array_equal(found.numpy(), kept.numpy())
    assert plan.ledger.steps == plan.steps == 8
    assert 7.9 < plan.statement().epsilon <= 8


@pytest.mark.parametrize("private", ["default", "mapped", "selected"])
def test_a_plain_multi_optimizer_takes_no_private_ones(private):
    """It would give its private parts gradients that were not clipped."""
    made = dpc.keras.DPSGD(0.1, noise_multiplier=1.0, expected_batch_size=SIZE)
    multi = OPTIMIZERS.MultiOptimizer
    with pytest.raises(ValueError, match=r"optimizer\(keras.optimizers.MultiOptimizer"):
        if private == "selected":
            multi(lambda variable: made).build([tf.keras.Variable([1.0])])
        parts = (made, sgd()) if private == "default" else (sgd(), made)
        multi(OPTIMIZERS.OptimizerMap(parts[0], {".*words.*": parts[1]}))
