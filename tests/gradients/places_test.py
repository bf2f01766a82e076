"""Neither an example's place in the batch nor the batch's size decides its gradient."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients import ExampleIsolationError, per_example_norms

pytestmark = pytest.mark.every_check

SIZE = 10
W = tf.Variable(np.random.default_rng(0).standard_normal((3, 4)), dtype=tf.float32)
X = tf.constant(np.random.default_rng(1).standard_normal((SIZE, 3)), tf.float32)


def norms(change, static, jit=False):
    """Of a dense layer whose rows go through `change(hidden, x)`."""

    @tf.function(
        input_signature=[tf.TensorSpec([SIZE if static else None, 3])],
        jit_compile=jit,
        autograph=False,
    )
    def step(x):
        loss = tf.reduce_sum(tf.square(change(tf.tanh(x @ W), x)), axis=1)
        found = per_example_norms(loss, [W])
        return found

    return step(X)


def by_place(hidden, x):
    place = tf.range(tf.shape(x)[0])
    return hidden * (1.0 + tf.cast(place, tf.float32))[:, tf.newaxis]


def every_other(hidden, x):
    odd = tf.range(tf.shape(x)[0]) % 2
    return tf.where((odd == 0)[:, tf.newaxis], hidden, 3.0 * hidden)


def by_place_behind_a_mask(hidden, x):
    return by_place(tf.nn.dropout(hidden, 0.5), x)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("change", [by_place, every_other, by_place_behind_a_mask])
@pytest.mark.thinned(3)
def test_a_loss_that_depends_on_the_place_is_refused(change, static):
    with pytest.raises(tf.errors.InvalidArgumentError, match="another place"):
        norms(change, static)


def parity(hidden, x):
    return hidden * tf.cast(tf.shape(x)[0] % 2, tf.float32)


def root(hidden, x):
    return hidden / tf.sqrt(tf.cast(tf.shape(x)[0], tf.float32))


def where_many(hidden, x):
    return tf.where(tf.shape(x)[0] > 5, hidden, 3.0 * hidden)


def in_a_branch(hidden, x):
    return tf.cond(tf.shape(x)[0] > 5, lambda: hidden, lambda: 3.0 * hidden)


@pytest.mark.parametrize("change", [parity, root, where_many, in_a_branch])
def test_a_loss_that_depends_on_the_size_is_refused(change):
    with pytest.raises(ExampleIsolationError, match="number of examples"):
        norms(change, static=False)


@pytest.mark.parametrize("change", [parity, root, where_many, in_a_branch])
def test_a_static_size_is_public(change):
    assert np.all(np.isfinite(norms(change, static=True)))


def masks(hidden, x):
    return tf.nn.dropout(hidden, 0.5)


def noise(hidden, x):
    return hidden + tf.random.normal(tf.shape(hidden))


def stateless(hidden, x):
    return tf.nn.experimental.stateless_dropout(hidden, 0.5, seed=[1, 2])


DROPOUT = tf.keras.layers.Dropout(0.5)


def keras_masks(hidden, x):
    return DROPOUT(hidden, training=True)


def masks_in_a_loop(hidden, x):
    return tf.map_fn(lambda row: tf.nn.dropout(row, 0.5), hidden)


def masks_along_another_axis(hidden, x):
    return tf.transpose(tf.nn.dropout(tf.transpose(hidden), 0.5))


def chosen(hidden, x):
    rows = tf.range(tf.shape(x)[0])
    places = tf.stack([rows, tf.cast(x[:, 0] > 0, tf.int32)], axis=1)
    return tf.gather_nd(hidden, places)[:, tf.newaxis]


def of_a_padded_sequence(hidden, x):
    mask = tf.sequence_mask(tf.cast(tf.abs(x[:, 0]) * 2, tf.int32), 4)
    return hidden * tf.cast(mask, tf.float32)


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        masks,
        noise,
        stateless,
        keras_masks,
        masks_in_a_loop,
        masks_along_another_axis,
        chosen,
        of_a_padded_sequence,
    ],
)
@pytest.mark.thinned(6)
def test_random_numbers_and_rows_by_number_pass(change, static, jit):
    if jit and change is masks_in_a_loop:
        pytest.skip("XLA does not compile random numbers in a list of tensors")
    assert np.all(np.isfinite(norms(change, static, jit)))
