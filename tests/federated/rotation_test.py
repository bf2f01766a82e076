"""The random rotation: orthonormal, its own inverse, with signs that are signs."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.federated import _discrete_noise


@pytest.mark.parametrize("dimension", [2, 32, 64, 128, 256, 2048])
def test_hadamard_is_orthonormal_and_its_own_inverse(dimension):
    matrix = np.ones([1, 1])
    while len(matrix) < dimension:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    rng = np.random.default_rng(4)
    x = rng.normal(size=dimension)
    found = _discrete_noise.hadamard(tf.constant(x)).numpy()
    np.testing.assert_allclose(found, matrix @ x / math.sqrt(dimension), atol=1e-12)
    back = _discrete_noise.hadamard(tf.constant(found)).numpy()
    np.testing.assert_allclose(back, x, atol=1e-12)


def test_norms_are_kept_to_what_the_plan_allows_for():
    # Two thousandths of `distributed._ARITHMETIC`, at most.
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=2**17).astype(np.float32)
        norm = np.linalg.norm(x.astype(np.float64))
        found = _discrete_noise.hadamard(tf.constant(x)).numpy().astype(np.float64)
        assert np.linalg.norm(found) == pytest.approx(norm, rel=5e-7)


def test_signs_are_independent_signs():
    dimension = 2**17
    found = _discrete_noise.signs(dimension, tf.constant([1, 2], tf.int64), 3.0).numpy()
    assert set(found) == {-3.0, 3.0}
    # Five standard deviations each, of the mean and of 64 correlations.
    found = found / 3
    assert abs(np.mean(found)) < 5 / math.sqrt(dimension)
    for lag in range(1, 65):
        assert abs(np.mean(found[lag:] * found[:-lag])) < 5.7 / math.sqrt(dimension)
    for column in range(8):
        assert abs(np.mean(found[column::8])) < 5.7 / math.sqrt(dimension / 8)


@pytest.mark.parametrize("dimension", [2, 4, 32, 64, 128])
def test_there_is_a_sign_for_each_coordinate(dimension):
    found = _discrete_noise.signs(dimension, tf.constant([1, 2], tf.int64))
    assert found.shape == [dimension] and found.dtype == tf.float32
