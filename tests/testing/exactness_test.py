"""`assert_exact` passes a right engine, and finds an error in one example."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.testing.mutations import LAYERWISE, QUANTILE, data, model_of
from tfdpclip.gradients.eager import EagerGradients
from tfdpclip.gradients.forms import outer
from tfdpclip.testing import assert_exact

pytestmark = pytest.mark.every_check

CLIPS = {"fixed": {}, "quantile": QUANTILE, "layerwise": LAYERWISE}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.slow
def test_sound_code_is_exact(name, shared):
    model = model_of(shared=shared, **CLIPS[name])
    before = [v.numpy() for v in model.variables]
    report = assert_exact(model, data())
    assert report.examples == len(data()[0])
    assert report.worst < 1e-5 and report.excess < 1e-4, report
    assert str(report.examples) in str(report)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 3}, {"perturbation": 0.5}], ids=str
)
@pytest.mark.slow
def test_sound_code_is_exact_with(options):
    assert assert_exact(model_of(**options), data()).worst < 1e-3


@pytest.mark.slow
def test_padding_and_weights_are_compared_as_they_are():
    x, y = data()
    weight = np.linspace(0, 3, len(x)).astype(np.float32)
    assert assert_exact(model_of(), (x, y, weight)).worst < 1e-5


_outer_norms = outer.Outer.squared_norms


def of_one_example_only(self, budget):
    """Wrong for one example, which the two random examples of a step may miss."""
    found = _outer_norms(self, budget)
    order = tf.argsort(found)
    place = tf.one_hot(order[len(data()[0]) // 2], tf.shape(found)[0])
    return found * (1.0 - 0.5 * place)


@pytest.mark.slow
def test_an_error_in_one_example_of_many_is_found():
    # The model is made before: its training step compares only two examples.
    with (
        mock.patch.object(outer.Outer, "squared_norms", of_one_example_only),
        pytest.raises(AssertionError, match="norms too small|MismatchError: the norm"),
    ):
        assert_exact(model_of(), data())


@pytest.mark.slow
def test_what_the_step_itself_finds_is_told():
    def halved(self, budget):
        return 0.5 * _outer_norms(self, budget)

    with (
        mock.patch.object(outer.Outer, "squared_norms", halved),
        pytest.raises(AssertionError, match=r"MismatchError: the norm .*hidden"),
    ):
        assert_exact(model_of(), data())


def test_mixed_examples_are_an_assertion_error():
    with pytest.raises(AssertionError, match="xample"):
        assert_exact(model_of(norm=True), data())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"unit": "batch", "expected_batch_size": None}, "unit"), (None, "private")],
)
def test_what_clips_no_examples_is_refused(options, message):
    model = model_of(**(options or {}))
    if options is None:
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=message):
        assert_exact(model, data())


def test_eager_models_are_refused_with_the_reason():
    model = model_of()
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(model.optimizer, loss, run_eagerly=True)
    with pytest.raises(ValueError, match="eager"):
        assert_exact(model, data())


def test_a_step_that_does_not_minimize_is_refused():
    class Silent(tf.keras.Sequential):
        def train_step(self, data):
            return {}

    model = Silent([tf.keras.Input((8,)), tf.keras.layers.Dense(3)])
    model.compile(model_of().optimizer, "mse")
    model.optimizer = dpc.keras.DPSGD(
        0.1, noise_multiplier=1.0, clip=1.0, expected_batch_size=24
    )
    with pytest.raises(ValueError, match="minimize"):
        assert_exact(model, data())


def test_a_wrong_jacobian_is_found_where_the_tape_is_persistent():
    x, _ = data()
    layer = tf.keras.layers.Dense(3)
    layer(x)
    jacobian = tf.GradientTape.jacobian

    def wrong(self, target, sources):
        return [1.1 * part for part in jacobian(self, target, sources)]

    def gradients(persistent):
        with tf.GradientTape(persistent=persistent) as tape:
            loss = tf.reduce_sum(tf.square(layer(x)), axis=1)
        return EagerGradients(loss, layer.trainable_variables, tape)

    with pytest.warns(UserWarning, match="persistent"):
        gradients(True)
    with mock.patch.object(tf.GradientTape, "jacobian", wrong), pytest.warns():
        gradients(False)
        with pytest.raises(dpc.GradientMismatchError, match="kernel"):
            gradients(True)
