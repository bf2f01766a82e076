"""The two conventions of momentum."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip import federated


def _path(optimizer, updates):
    weights = tf.zeros([2])
    state = optimizer.initialize(tf.TensorSpec([2]))
    for update in updates:
        # A server's gradient is the negative mean update.
        state, weights = optimizer.next(state, weights, -update)
    return weights.numpy()


@pytest.mark.parametrize("damped", [False, True])
def test_momentum_follows_its_convention(damped):
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(5, 2)).astype(np.float32)
    weights, velocity = np.zeros(2), np.zeros(2)
    for update in updates:
        # Andrew et al. (2021), Algorithm 1, as printed if damped.
        velocity = 0.9 * velocity + (1 - 0.9 if damped else 1) * update
        weights = weights + 0.3 * velocity
    optimizer = federated.server_momentum(0.3, 0.9, damped=damped)
    np.testing.assert_allclose(_path(optimizer, updates), weights, rtol=1e-5)


def test_without_momentum_both_are_gradient_descent():
    updates = np.float32([[1, 2], [3, 4]])
    for damped in (False, True):
        optimizer = federated.server_momentum(0.5, 0.0, damped=damped)
        np.testing.assert_allclose(_path(optimizer, updates), [2, 3])


@pytest.mark.parametrize(
    "arguments,name",
    [
        ((0.0,), "learning_rate"),
        ((float("nan"),), "learning_rate"),
        ((1.0, 1.0), "momentum"),
        ((1.0, -0.1), "momentum"),
        ((1.0, float("nan")), "momentum"),
    ],
)
def test_bad_arguments(arguments, name):
    with pytest.raises(ValueError, match=name):
        federated.server_momentum(*arguments)
    with pytest.raises(ValueError, match="damped"):
        federated.server_momentum(1.0, 0.9, damped=1)
