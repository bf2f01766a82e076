"""Perturbed scalar gradients have the mean that a closed form gives.

The examples are from Chen et al. (2020), sections 3 and 5; the clip norm is 1.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, mostly_slow

pytestmark = pytest.mark.unchecked


def phi(t):
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def Phi(t):
    return (1 + math.erf(t / math.sqrt(2))) / 2


def expected_clip(u, k):
    """E clip(u + k zeta, 1) for a scalar u."""
    if k == 0:
        return min(1.0, max(-1.0, u))
    a, b = (-1 - u) / k, (1 - u) / k
    return -Phi(a) + 1 - Phi(b) + u * (Phi(b) - Phi(a)) + k * (phi(a) - phi(b))


def test_the_closed_form_has_the_papers_values():
    """Example 1: mean clipped gradients and fixed points, computed elsewhere."""
    a = (-3, -3, 9)
    for k, at_optimum, fixed in ((5, 0.0861, 0.0963151), (10, 0.0151, 0.7797084)):
        found = sum(expected_clip(1 - v, k) for v in a) / 3
        assert found == pytest.approx(at_optimum, abs=1e-4)
        assert sum(expected_clip(fixed - v, k) for v in a) == pytest.approx(0, abs=1e-6)


class Descent:
    """f(x) = mean of (x - a_i)^2 / 2 with a scalar parameter, by the real optimizer."""

    def __init__(self, a, k, copies, rate=1.0):
        self.x = tf.Variable(0.0)
        data = np.tile(np.float32(a), copies)
        optimizer = DPSGD(
            rate,
            clip=1.0,
            noise_multiplier=0,
            expected_batch_size=len(data),
            perturbation=k,
        )
        data = tf.constant(data)

        @tf.function
        def steps(count):
            path = tf.TensorArray(tf.float32, count)
            for i in tf.range(count):
                loss = 0.5 * tf.square(self.x - data)
                optimizer.minimize(loss, [self.x])
                path = path.write(i, self.x)
            return path.stack()

        self._steps = steps

    def run(self, start, count):
        self.x.assign(start)
        return self._steps(tf.constant(count)).numpy()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("k", mostly_slow([0, 1, 10], [0, 1, 5, 10, 20]))
@pytest.mark.parametrize("a", [(-3, -3, 9), (-3, 3)], ids=["example1", "example2"])
def test_the_mean_clipped_gradient_has_its_closed_form(a, k):
    """30,000 clipped values in [-1, 1]: six standard errors, 2e-9 each."""
    copies = 30_000 // len(a)
    descent = Descent(a, k, copies)
    for x in (-4.0, -1.0, 0.0, 1.0, 2.0, 5.0):
        moved = x - descent.run(x, 1)[0]
        expected = np.mean([expected_clip(x - v, k) for v in a])
        assert abs(moved - expected) < 6 / math.sqrt(30_000)


def test_example_one_stalls_at_a_distance_of_three_and_a_half():
    descent = Descent((-3, -3, 9), 0, 1)
    for start in (5.0, 0.0, -4.0):
        assert descent.run(start, 40)[-1] == pytest.approx(-2.5, abs=1e-3)


@pytest.mark.parametrize("k, fixed", [(5, 0.0963151), (10, 0.7797084)])
def test_example_one_comes_close_with_perturbation(k, fixed):
    """Distance 3.5 becomes 0.90 and 0.22.

    The mean of 400 steps after the start has a standard error of at most
    1 / (slope sqrt(9000 x 400)) < 0.008 (slope 0.068): six of them, 2e-9.
    """
    descent = Descent((-3, -3, 9), k, 3000, rate=8.0)
    path = descent.run(0.0, 430)[30:]
    assert abs(np.mean(path) - fixed) < 0.05
    assert abs(abs(np.mean(path) - 1.0) - {5: 0.9037, 10: 0.2203}[k]) < 0.05


def test_example_two_is_flat_between_minus_two_and_two():
    descent = Descent((-3, 3), 0, 1)
    for start in (-2.0, -1.3, 0.0, 0.7, 2.0):
        # The three-term sums round.
        np.testing.assert_allclose(descent.run(start, 3), start, atol=1e-6)
    assert descent.run(2.5, 1)[0] < 2.5


def test_example_two_is_solved_with_perturbation():
    """From 1.9 to the optimum 0; a standard error of 0.007 as in example 1."""
    descent = Descent((-3, 3), 10, 4500, rate=8.0)
    assert abs(np.mean(descent.run(1.9, 430)[30:])) < 0.05
