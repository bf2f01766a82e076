"""A statement about an op's flow is tried, and a false statement is found."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.gradients.cases import randoms, variable
from tfdpclip._registered import REGISTERED
from tfdpclip.gradients import PerExampleGradients, op_flow

ROWS = randoms(5, 4).numpy()


@tf.custom_gradient
def turned_back(x):
    return tf.identity(x), lambda dy: tf.reverse(dy, [0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.reverse(x, [0]),
        lambda x: x - tf.reduce_mean(x, axis=0),
        turned_back,
    ],
    ids=["order", "mean", "gradient"],
)
def test_rows_that_meet_are_found(function):
    with pytest.raises(AssertionError, match="Replacing row"):
        dpc.testing.assert_op_flow(function, ROWS)


@pytest.mark.parametrize(
    "function",
    [tf.nn.softmax, lambda x: tf.sort(x, axis=1), lambda x: tf.linalg.diag(x)],
    ids=["softmax", "sort", "diag"],
)
def test_rows_that_stay_apart_pass(function):
    dpc.testing.assert_op_flow(function, ROWS)


@tf.custom_gradient
def by_place_on_the_way_back(x):
    return tf.identity(x), lambda dy: dy * tf.range(float(dy.shape[0]))[:, tf.newaxis]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * tf.range(float(x.shape[0]))[:, tf.newaxis],
        lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
        lambda x: tf.complex(x, x * tf.range(float(x.shape[0]))[:, tf.newaxis]),
        by_place_on_the_way_back,
    ],
    ids=["place", "number", "imaginary", "gradient"],
)
def test_rows_that_depend_on_their_places_are_found(function):
    with pytest.raises(AssertionError, match="depends on its place, or on the number"):
        dpc.testing.assert_op_flow(function, ROWS)


def test_integer_rows_are_replaced_too():
    table = randoms(9, 3)
    ids = np.arange(5)
    dpc.testing.assert_op_flow(lambda i: tf.gather(table, i), ids)
    with pytest.raises(AssertionError, match="output 0"):
        dpc.testing.assert_op_flow(lambda i: tf.gather(table, i[::-1]), ids)


@pytest.mark.parametrize("shapes", [(), ((1, 3),), ((4, 3), (5, 3))])
def test_inputs_without_rows_in_common_are_refused(shapes):
    with pytest.raises(ValueError, match="same number of rows"):
        dpc.testing.assert_op_flow(tf.nn.relu, *map(np.ones, shapes))


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
