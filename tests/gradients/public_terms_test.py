"""The terms set aside depend on trained variables and constants alone."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    X,
    flat,
    one_at_a_time,
    randoms,
    squash,
    variable,
)
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    PerExampleGradients,
)

W = variable(3, 4)
# As many rows as no batch has.
REPLAY = randoms(2 * BATCH + 1, 3, seed=9)
KEPT = tf.Variable(REPLAY, name="replay")
REFUSALS = (LossStructureError, ExampleIsolationError)


def own(x):
    return squash(x @ W)


def penalty(data):
    return tf.reduce_mean(squash(data @ W))


def iterator():
    return iter(tf.data.Dataset.from_tensors(REPLAY).repeat())


def table():
    keys = tf.constant([0, 1], tf.int64)
    init = tf.lookup.KeyValueTensorInitializer(keys, tf.constant([2.0, 3.0]))
    return tf.lookup.StaticHashTable(init, 0.0)


ITERATOR, TABLE = iterator(), table()
NESTED = tf.function(lambda: next(ITERATOR))
DEEPER = tf.function(lambda: tf.function(lambda: 2 * NESTED())())


def from_numpy():
    found = tf.numpy_function(REPLAY.numpy, [], tf.float32)
    return tf.ensure_shape(found, REPLAY.shape)


SOURCES = {
    "variable": lambda: KEPT.read_value(),
    "rows_of_a_variable": lambda: tf.gather(KEPT, [0, 3]),
    "captured_tensor": lambda: REPLAY,
    "constant": lambda: tf.constant(REPLAY.numpy()),
    "drawn_from_a_constant": lambda: tf.gather(
        REPLAY, tf.random.uniform([2], 0, 9, tf.int32)
    ),
    "nested_constant": lambda: tf.function(lambda: tf.constant(REPLAY.numpy()))(),
    "nested_variable": lambda: tf.function(lambda: KEPT + 0.0)(),
}


def run(loss, *variables, options=None):
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        gradients = PerExampleGradients(loss(x), [W, *variables], **(options or {}))
        return gradients.norms, gradients.shared_gradients()

    norms, shared = step(X)
    return norms, flat(shared, [W, *variables])


@pytest.mark.parametrize("form", ["mean", "vector", "inside"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_term_of_other_data_is_not_public(name, form):
    def loss(x):
        if form == "inside":
            return tf.reduce_mean(own(x) + penalty(SOURCES[name]()))
        losses = own(x) if form == "vector" else tf.reduce_mean(own(x))
        return losses + penalty(SOURCES[name]())

    with pytest.raises(REFUSALS, match="public_variables|taken apart|one loss per"):
        run(loss)


PRODUCED = {
    "in_a_function": lambda: NESTED(),
    "deep_inside": lambda: DEEPER(),
    "in_a_branch": lambda: tf.cond(
        tf.random.uniform([]) < 2, lambda: next(ITERATOR), lambda: REPLAY
    ),
    "in_a_case": lambda: tf.switch_case(
        tf.random.uniform([], 0, 3, tf.int32),
        [lambda: next(ITERATOR), lambda: REPLAY, lambda: 2 * REPLAY],
    ),
    "in_a_loop": lambda: tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, next(ITERATOR)), (0, REPLAY)
    )[1],
    "numpy": from_numpy,
    "table": lambda: tf.reshape(TABLE.lookup(tf.zeros([6], tf.int64)), [2, 3]),
    "at_once": lambda: next(ITERATOR),
}


@pytest.mark.parametrize("name", PRODUCED)
def test_data_from_elsewhere_are_data_however_they_are_called(name):
    """Refused, or taken for examples of the batch and then of the wrong number."""
    with pytest.raises((*REFUSALS, tf.errors.InvalidArgumentError)):
        run(lambda x: tf.reduce_mean(own(x)) + penalty(PRODUCED[name]()))


ANCHOR = tf.Variable(randoms(3, 4, seed=5), trainable=False, name="anchor")
SCALE = tf.Variable(0.3, trainable=False, name="scale")
S = tf.Variable(0.3, name="s")
PUBLIC = {
    "l2": lambda: 0.1 * tf.nn.l2_loss(W),
    "random_direction": lambda: tf.reduce_sum(W * tf.random.normal(W.shape, seed=1)),
    "orthogonal": lambda: tf.keras.regularizers.OrthogonalRegularizer(0.1)(W),
    "captured_number": lambda: NUMBER * tf.nn.l2_loss(W),
    "in_a_function": lambda: tf.function(lambda: tf.nn.l2_loss(W))(),
    "in_a_branch": lambda: tf.cond(S > 0, lambda: tf.nn.l2_loss(W), lambda: 0.0),
    "ones": lambda: tf.reduce_sum(W * tf.ones([3, 4])),
    "transposed": lambda: tf.nn.l2_loss(tf.transpose(W, [1, 0]) @ W),
}
NUMBER = tf.constant(0.1)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.thinned(3)
def test_terms_of_the_trained_variables_and_numbers_are(name):
    norms, shared = run(lambda x: tf.reduce_mean(own(x)) + PUBLIC[name](), S)
    expected = one_at_a_time(own, [W, S], X)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    if name != "random_direction":
        with tf.GradientTape() as tape:
            value = PUBLIC[name]()
        gradient = tape.gradient(value, [W, S])
        np.testing.assert_allclose(shared, flat(gradient, [W, S]), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("declared", [["anchor"], ["anchor:0"], [ANCHOR]])
def test_what_is_declared_is(declared):
    def loss(x):
        return tf.reduce_mean(own(x)) + tf.nn.l2_loss(W - ANCHOR)

    with pytest.raises(LossStructureError, match="anchor"):
        run(loss)
    _, shared = run(loss, options={"public_variables": declared})
    np.testing.assert_allclose(shared, (W - ANCHOR).numpy().ravel(), rtol=1e-6)


def test_the_number_of_examples_scales_no_public_term():
    for scale in (lambda n: n, lambda n: 1 / n, tf.sqrt):
        for form in (tf.reduce_mean, tf.identity):
            with pytest.raises(LossStructureError, match="number"):
                run(
                    lambda x, scale=scale, form=form: (
                        form(own(x))
                        + scale(tf.cast(tf.shape(x)[0], tf.float32)) * tf.nn.l2_loss(W)
                    )
                )


def test_a_bad_declaration_is_refused_by_name():
    for bad in ("anchor", 3, [3], [""], None):
        with pytest.raises(ValueError, match="public_variables"):
            run(own, options={"public_variables": bad})
