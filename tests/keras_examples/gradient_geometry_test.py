"""Geometry: definitions by hand, theorems that must hold, and a test with its level."""

import numpy as np
import pytest
from scipy import optimize

from keras_examples.gradient_geometry import gradient_geometry
from keras_examples.symmetry import symmetry_score


def clip(gradients, c):
    norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
    return gradients * np.minimum(1, c / np.maximum(norms, 1e-300))


def skewed(n=400, d=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.exponential(size=(n, d)) ** 1.5 - rng.uniform(0, 1, d)


def test_definitions():
    g = skewed()
    v = g.mean(0)
    found = gradient_geometry(g, projections=3)
    norms = np.linalg.norm(g, axis=1)
    np.testing.assert_allclose(found.norms, norms)
    assert found.mean_norm == pytest.approx(np.linalg.norm(v))
    cosines = g @ v / norms / np.linalg.norm(v)
    np.testing.assert_allclose(found.cosines, cosines)
    residuals = np.linalg.norm(g - v, axis=1)
    np.testing.assert_allclose(found.residual_norms, residuals)
    for c in (0.3, 2.0, 100.0):
        bias = found.clipping_bias(c)
        here = clip(g, c) @ v
        there = clip(2 * v - g, c) @ v
        assert bias.progress == pytest.approx(here.mean())
        symmetric = (here.mean() + there.mean()) / 2
        assert bias.symmetric_progress == pytest.approx(symmetric)
        assert bias.bias == pytest.approx(here.mean() - symmetric, abs=1e-12)
        assert bias.small_residuals == pytest.approx(np.mean(residuals < c / 4))
        assert bias.fraction_clipped == pytest.approx(np.mean(norms > c))


def test_wasserstein_distance_is_the_cheapest_transport():
    """Against the assignment problem, in the full space with the paper's distance."""
    g = skewed(40, 3)
    v, c = g.mean(0), 1.0
    bias = gradient_geometry(g).clipping_bias(c)
    one = np.repeat(clip(g, c) @ v, 2)
    other = np.concatenate([clip(g, c) @ v, clip(2 * v - g, c) @ v])
    cost = np.abs(one[:, None] - other[None])
    rows, columns = optimize.linear_sum_assignment(cost)
    assert bias.wasserstein == pytest.approx(cost[rows, columns].mean())


@pytest.mark.parametrize("seed", range(10))
def test_theorems_hold(seed):
    """Theorem 5: |bias| <= distance. Theorem 2: symmetric progress is guaranteed."""
    found = gradient_geometry(skewed(seed=seed), seed=seed)
    for c in (0.1, 0.5, 1.0, 3.0, 10.0, 50.0):
        bias = found.clipping_bias(c)
        slack = 1e-9 * (1 + abs(bias.progress))
        assert abs(bias.bias) <= bias.wasserstein + slack
        assert bias.symmetric_progress >= bias.guaranteed - slack


def test_symmetric_gradients_have_no_bias():
    xi = skewed(300)
    g = np.concatenate([xi, -xi]) + 0.5
    bias = gradient_geometry(g).clipping_bias(1.0)
    assert bias.bias == pytest.approx(0, abs=1e-12)
    assert bias.wasserstein == pytest.approx(0, abs=1e-9)


def test_example_1_of_the_paper_climbs():
    """Gradients x + 3, x + 3, x - 9 at c = 1: clipped descent stalls at -2.5."""
    at = np.array([[-1.0], [-1.0], [-1.0]]) - np.array([[-3.0], [-3.0], [9.0]])
    bias = gradient_geometry(at).clipping_bias(1.0)
    # The mean gradient is -2; two of three clipped gradients have the opposite sign.
    assert bias.progress == pytest.approx(-2 / 3)
    assert bias.symmetric_progress == pytest.approx(0, abs=1e-12)
    assert bias.bias == pytest.approx(-2 / 3) and bias.wasserstein >= 2 / 3 - 1e-9


def test_projections_keep_norms_on_average():
    g = np.random.default_rng(0).standard_normal((300, 2000))
    found = gradient_geometry(g, projections=8, seed=1)
    assert found.projections.shape == (8, 300, 2)
    squares = (found.projections**2).sum(-1).mean()
    # A chi-squared of some 4,800 degrees of freedom: false alarms below 1e-7.
    assert squares == pytest.approx(2000, rel=0.15)
    np.testing.assert_allclose(found.means, found.projections.mean(1), atol=1e-9)
    again = gradient_geometry(g, projections=8, seed=1)
    np.testing.assert_array_equal(found.projections, again.projections)
    other = gradient_geometry(g, projections=8, seed=2)
    assert not np.allclose(found.projections, other.projections)


def test_chunks_give_the_same():
    g = skewed(100)
    whole = gradient_geometry(g)
    parts = gradient_geometry(lambda: (g[i : i + 7] for i in range(0, 100, 7)))
    np.testing.assert_allclose(parts.inner, whole.inner)
    np.testing.assert_allclose(parts.projections, whole.projections)


def test_zero_gradients():
    found = gradient_geometry(np.zeros((5, 3)))
    assert found.cosines.tolist() == [0.0] * 5
    bias = found.clipping_bias(1.0)
    assert bias.progress == bias.wasserstein == 0.0


# Symmetry.


def test_energy_distance_by_hand():
    points = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    n = len(points)
    apart = against = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                apart += np.linalg.norm(points[i] - points[j]) / (n * (n - 1))
                against += np.linalg.norm(points[i] + points[j]) / (n * (n - 1))
    found = symmetry_score(points, 50)
    assert found.energy_distance == pytest.approx(2 * (against - apart))
    assert found.score == pytest.approx((against - apart) / apart)


def test_level_of_the_permutation_test():
    """For symmetric points p-values are uniform: P(p <= 0.1) <= 0.1."""
    rng = np.random.default_rng(0)
    p = [
        symmetry_score(rng.laplace(size=(60, 2)), 99, seed=k).p_value
        for k in range(400)
    ]
    # Binomial(400, 0.1) is above 73 with probability 3e-7, below 13 with 1e-7.
    assert 13 <= np.sum(np.array(p) <= 0.1) <= 73


def test_asymmetry_is_found():
    rng = np.random.default_rng(0)
    points = rng.exponential(size=(200, 2)) - 1
    found = symmetry_score(points, 199)
    assert found.p_value == 1 / 200 and found.score > 0.02
    assert min(found.skewness) > 1
    mixed = np.concatenate([points, -points])
    assert symmetry_score(mixed, 199).score < found.score / 5


def test_exactly_symmetric_points_are_no_news():
    found = symmetry_score(np.array([[1.0], [-1.0]] * 20), 99)
    assert found.score <= 0 and found.p_value > 0.3
    zero = symmetry_score(np.zeros((10, 2)), 19)
    assert (zero.score, zero.p_value) == (0.0, 1.0)


def test_many_points_are_thinned_out():
    points = np.random.default_rng(0).standard_normal((500, 2))
    assert symmetry_score(points, 9, most=50).count == 50


@pytest.mark.slow
def test_summary():
    found = gradient_geometry(skewed(), projections=5)
    row = found.summary(1.0, permutations=99)
    assert row["count"] == 400 and row["clip_norm"] == 1.0
    assert row["cosine_negative"] == pytest.approx(np.mean(found.cosines < 0))
    assert 0 < row["p_value_median"] <= 1


def test_symmetry_about_the_mean_about_zero_and_of_directions():
    """Each symmetry sees differences that the two remaining symmetries do not."""
    rng = np.random.default_rng(0)

    def scores(gradients):
        found = gradient_geometry(gradients, projections=8)
        return [
            np.mean([s.score for s in found.symmetry(1, of=of)])
            for of in ("residuals", "directions", "gradients")
        ]

    moved = rng.standard_normal((500, 30)) + 3
    residuals, directions, about_zero = scores(moved)
    assert abs(residuals) < 0.01 and abs(directions) < 0.01 and about_zero > 0.3
    # Every fiftieth gradient is long, in the same direction; the rest lie together.
    few = 0.01 * rng.standard_normal((500, 30))
    few[::50] += 10 * np.sign(np.arange(30) - 14.5)
    residuals, directions, about_zero = scores(few)
    assert directions > 5 * residuals > 0 and about_zero > 0
    with pytest.raises(ValueError, match='of must be "residuals", "directions"'):
        gradient_geometry(moved).symmetry(of="norms")


def test_bad_gradients():
    with pytest.raises(ValueError, match="gradients must be"):
        gradient_geometry([1.0, 2.0])
    with pytest.raises(ValueError, match="gradients has entries"):
        gradient_geometry([[np.nan]])
    with pytest.raises(ValueError, match="gradients has no examples"):
        gradient_geometry(np.zeros((0, 3)))
    calls = iter([[np.ones((2, 1))], [np.ones((1, 1))]])
    with pytest.raises(ValueError, match="different chunks"):
        gradient_geometry(lambda: next(calls))
    for points in ([[1.0]], [[np.nan], [1.0]], np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match="points must be"):
            symmetry_score(points)
