"""Examples whose weight is 0 in every term are padding, and may hold anything."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import BATCH, SEQUENCE, X
from tests.gradients.losses import LOSSES, W, vector
from tfdpclip.gradients import PerExampleGradients


def present_of(loss, *data):
    @tf.function
    def step(*tensors):
        gradients = PerExampleGradients(loss(*tensors), [W])
        mask = gradients.mask(tf.ones_like(gradients.norms))
        return gradients.present, mask

    present, mask = step(*data)
    return present.numpy().tolist(), mask.numpy().tolist()


WEIGHT = tf.constant([1.0, 0.0, 2.0, 0.0, 0.5])
REAL = [True, False, True, False, True]


@pytest.mark.parametrize("reduction", ["none", "sum", "sum_over_batch_size"])
@pytest.mark.thinned(3)
def test_weight_zero_is_padding(reduction):
    loss = LOSSES.MeanSquaredError(reduction=reduction)
    present, mask = present_of(
        lambda x, w: loss(tf.zeros_like(x @ W), x @ W, sample_weight=w), X, WEIGHT
    )
    assert present == REAL
    assert mask == [float(real) for real in REAL]


def test_padding_by_weights_for_every_step():
    loss = LOSSES.MeanSquaredError()
    weights = WEIGHT[:, tf.newaxis] * tf.constant([0.0, 1, 0, 1, 1, 1])
    present, _ = present_of(
        lambda x, w: loss(tf.zeros_like(x @ W), x @ W, sample_weight=w),
        SEQUENCE,
        weights,
    )
    assert present == REAL


def test_an_example_of_weight_zero_in_one_term_only_is_real():
    present, mask = present_of(
        lambda x, w: (
            tf.reduce_mean(w * vector(x)) + tf.reduce_mean((2 - w) * vector(x))
        ),
        X,
        WEIGHT,
    )
    assert present == [True] * BATCH and mask == [1.0] * BATCH


def test_labels_that_multiply_a_term_are_no_padding_of_another():
    present, mask = present_of(
        lambda x, y: tf.reduce_mean(y * vector(x)) + tf.reduce_mean(vector(2 * x)),
        X,
        WEIGHT,
    )
    assert present == [True] * BATCH and mask == [1.0] * BATCH


def test_padding_may_hold_anything():
    """A padded example of weight 0 with NaN data changes nothing."""
    x = tf.tensor_scatter_nd_update(X, [[1]], [[np.nan] * 3])

    @tf.function
    def step(x, w):
        loss = tf.reduce_mean(w * vector(x))
        gradients = PerExampleGradients(loss, [W])
        ones = tf.ones_like(gradients.norms)
        return gradients.present, gradients.weighted_sum(gradients.mask(ones))

    present, (clean,) = step(X, WEIGHT)
    also, (total,) = step(x, WEIGHT)
    assert present.numpy().tolist() == also.numpy().tolist() == REAL
    np.testing.assert_array_equal(total, clean)
