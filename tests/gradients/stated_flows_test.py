"""A statement about an op's flow is tried, and a false statement is found."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.gradients.cases import randoms, variable
from tfdpclip._registered import REGISTERED
from tfdpclip.gradients import PerExampleGradients, op_flow


@tf.custom_gradient
def turned_back(x):
    return tf.identity(x), lambda dy: tf.reverse(dy, [0])


def places(x):
    return tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, tf.newaxis]


@tf.custom_gradient
def by_place_on_the_way_back(x):
    return tf.identity(x), lambda dy: dy * places(dy)


def model_with(function):
    """A model whose second layer calls a function of its inputs."""

    class Stated(tf.keras.layers.Layer):
        def call(self, inputs):
            return function(inputs)

    layers = [tf.keras.layers.Dense(4), Stated(), tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential([tf.keras.Input((4,)), *layers])
    model.compile(
        dpc.keras.DPSGD(0.1, noise_multiplier=1.0, expected_batch_size=5), "mse"
    )
    return model


X, Y = randoms(5, 4).numpy(), randoms(5, 3).numpy()


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda x: tf.reverse(x, [0]), "Replacing example"),
        (lambda x: x - tf.reduce_mean(x, axis=0), "Replacing example"),
        (turned_back, "Replacing example"),
        (lambda x: x * places(x), "place of an example"),
        (lambda x: x / tf.cast(tf.shape(x)[0], x.dtype), "number of examples"),
        (by_place_on_the_way_back, "place of an example"),
    ],
    ids=["order", "mean", "gradient", "place", "number", "place of a gradient"],
)
def test_a_false_statement_is_found(function, said):
    with pytest.raises(AssertionError, match=said):
        dpc.testing.assert_isolated(model_with(function), X, Y)


@pytest.mark.parametrize(
    "function", [tf.nn.softmax, lambda x: tf.sort(x, axis=1)], ids=["softmax", "sort"]
)
def test_rows_that_stay_apart_pass(function):
    dpc.testing.assert_isolated(model_with(function), X, Y)


def cropped(x, kernel):
    """By `CropAndResize`, of which the table has no entry."""
    count = tf.shape(x)[0]
    boxes = tf.tile([[0.0, 0.0, 0.7, 0.7]], [count, 1])
    h = tf.image.crop_and_resize(x, boxes, tf.range(count), [3, 3])
    return tf.reduce_sum(tf.nn.conv2d(h, kernel, 1, "VALID") ** 2, axis=[1, 2, 3])


def verdict(kernel):
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 6, 6, 1])], autograph=False)
    def step(x):
        found.append(PerExampleGradients(cropped(x, kernel), [kernel]))
        return found[0].norms

    norms = step(randoms(3, 6, 6, 1))
    return found[0].proof, norms.numpy()


@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning")
def test_gradients_one_at_a_time_are_those_of_the_batch(monkeypatch):
    kernel = variable(2, 2, 1, 3)
    proof, alone = verdict(kernel)
    assert not proof.proven and proof.op.type == "CropAndResize"
    monkeypatch.setitem(REGISTERED.op_flows, "CropAndResize", "rows")
    proof, together = verdict(kernel)
    # Its boxes have numbers of images, which say where in the batch to look.
    np.testing.assert_allclose(alone, together, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", ["Relu", "CTCLoss", "NoSuchOp", "EagerPyFunc", "While", 3]
)
def test_a_statement_about_what_is_known_or_nothing_is_refused(kind):
    with pytest.raises(ValueError, match="kind"):
        op_flow(kind)
