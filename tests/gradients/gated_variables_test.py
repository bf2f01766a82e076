"""If other examples decide where a variable's gradient goes, it is found."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    assert_reaches_no_other,
    norms_of,
    randoms,
    squash,
    variable,
)
from tfdpclip._object_notes import notes_of
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import clipped_sum

pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]
X = randoms(24, 3)
W, BIAS, SCALE = variable(3, 5), variable(5), variable(3)


def number(x):
    """Made of everybody's digits, by nothing that the graph follows."""
    digits = tf.strings.as_string(tf.reshape(tf.stop_gradient(x), [-1]))
    return tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(digits), 1000)


def of_itself(x):
    """The same number from each example alone, `[B, 1]`."""
    found = tf.strings.to_hash_bucket_fast(tf.strings.as_string(x[:, :1]), 1000)
    return tf.ensure_shape(found, [None, 1])


def odd(found):
    return tf.equal(found % 2, 1)


def selected(x, found):
    """By a condition, of which no row is compared."""
    chosen = odd(found) & (x[:, :1] > -99)
    return tf.where(chosen, BIAS, tf.stop_gradient(BIAS))


def rolled(x, found):
    """Moves the gradient to different entries, which keeps its norm."""
    moved = tf.roll(BIAS, tf.cast(found % 5, tf.int32), 0)
    return moved + tf.stop_gradient(BIAS - moved)


def turned(x, found):
    """On the way from where the bias meets the batch to the bias."""

    @tf.custom_gradient
    def identity(bias):
        sign = tf.where(odd(found), 1.0, -1.0)
        return tf.identity(bias), lambda dy: sign * dy

    return identity(BIAS)


def with_bias(bias):
    return lambda x: squash(x @ W + bias(x, number(x)))


def beside_a_giant(x):
    """A huge gradient in a unit whose input is zero."""
    h = x * [1.0, 1.0, 0.0] * SCALE
    scale = tf.cast(number(x) % 2, tf.float32)
    first = scale * h[:, :2] + tf.stop_gradient((1 - scale) * h[:, :2])
    return tf.reduce_sum(first, 1) + 1e7 * h[:, 2]


MIXED = {
    "selected": with_bias(selected),
    "rolled": with_bias(rolled),
    "turned": with_bias(turned),
    "beside_a_giant": beside_a_giant,
}


USED = dict.fromkeys(MIXED, [W, BIAS]) | {"beside_a_giant": [SCALE]}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.thinned(9)
def test_what_others_decide_reaches_no_variables_gradient(name, dynamic):
    assert_reaches_no_other(MIXED[name], USED[name], X, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.thinned(2)
def test_an_example_that_selects_for_itself_is_sound(dynamic):
    def loss(x):
        return squash(x @ W + selected(x, of_itself(x)))

    norms = norms_of(loss, [W, BIAS], X, dynamic=dynamic)
    for i in range(0, 24, 9):
        with tf.GradientTape() as tape:
            one = loss(X[i : i + 1])
        found = tape.gradient(one, [W, BIAS])
        np.testing.assert_allclose(norms[i], tf.linalg.global_norm(found), rtol=1e-4)


@pytest.mark.slow
def test_a_batch_whose_sums_are_no_numbers_proves_nothing():
    """Otherwise a batch of records with NaN gradients would end the search."""
    kernel = tf.Variable(np.ones((3, 2), np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        loss = tf.reduce_sum(tf.square(x @ kernel), axis=1)
        return clipped_sum(loss, [kernel], FixedClip(1.0))

    (status,) = notes_of(step.get_concrete_function().graph).statuses
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    step(np.full_like(x, np.nan))
    assert int(status._verdict) < 0  # No verdict, so that the next step is checked.
    step(x)
    assert int(status._verdict) == 1
