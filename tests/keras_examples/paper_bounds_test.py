"""The papers' bounds on clipped descent hold by brute force; best rates are found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate

from keras_examples import best_rates, paper_bounds
from keras_examples import convergence_bounds as bounds
from keras_examples.gradient_geometry import gradient_geometry
from tests.output_files import rows_of, words_of


@pytest.mark.parametrize("problem", [1, 2])
@pytest.mark.parametrize("start", [-6.0, 0.5, 5.0])
@pytest.mark.parametrize("rate", [0.001, 0.1, 1.0])
def test_descent_without_noise_never_makes_more_progress_than_theorem_1(
    problem, start, rate
):
    used = paper_bounds.Settings(start=start, learning_rate=rate, steps=300)
    gap = (start - np.mean(paper_bounds._POINTS[problem])) ** 2 / 2
    bound = bounds.progress_bound(gap, 1.0, 1.0, rate, 300)
    assert paper_bounds.descend(used, problem, 0.0) <= bound + 1e-12


def test_theorem_5_bounds_the_mean_over_many_noisy_descents():
    """The slack is more than 6 standard errors: chance fails below 1e-8."""
    progress = [
        paper_bounds.descend(paper_bounds.Settings(steps=200, seed=s), 1, 1.0)
        for s in range(200)
    ]
    bound = bounds.progress_bound(8.0, 1.0, 1.0, 0.01, 200, 1.0)
    slack = bound - np.mean(progress)
    assert slack > 6 * np.std(progress) / math.sqrt(200)


def test_theorem_5_with_the_bias_bounds_the_gradient_norm():
    """Theorem 2's bound plus the bias is at most progress, for any gradients."""
    rng = np.random.default_rng(0)
    for spread in (0.1, 1.0, 5.0):
        gradients = rng.exponential(spread, (500, 4)) - 0.5 * spread
        found = gradient_geometry(gradients).clipping_bias(1.0)
        assert found.guaranteed + found.bias <= found.progress + 1e-12
        assert abs(found.bias) <= found.wasserstein + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_theorem_3_bounds_the_progress_of_mixtures(seed):
    """By integration over circles, and so without sampling error."""
    rng = np.random.default_rng(seed)
    mean, centers = rng.standard_normal(2), rng.standard_normal((3, 2))
    centers[(mean + centers) @ mean < 0] *= -1
    weights, radii = rng.dirichlet(np.ones(3)), rng.uniform(0.05, 0.6, 3)

    def along(angle, center, radius):
        moved = mean + center + radius * np.array([math.cos(angle), math.sin(angle)])
        return float(bounds.clipped(moved[None], 1.0)[0] @ mean)

    progress = sum(
        w * integrate.quad(along, 0, 2 * math.pi, (u, r))[0] / (2 * math.pi)
        for w, u, r in zip(weights, centers, radii, strict=True)
    )
    small = (radii < 0.25).astype(float)
    bound = bounds.mixture_progress_bound(mean, centers, weights, small, 1.0)
    assert progress >= bound - 1e-9


def test_theorem_3_is_tight_for_short_gradients_and_refuses_turned_ones():
    mean, centers = np.array([0.5, 0.0]), np.array([[0.1, 0.2], [-0.1, -0.2]])
    bound = bounds.mixture_progress_bound(mean, centers, [0.5, 0.5], [1, 1], 10.0)
    assert bound == pytest.approx(0.25)  # |v|^2: nothing is clipped
    with pytest.raises(ValueError, match="Theorem 3 has no bound"):
        bounds.mixture_progress_bound(mean, -6 * centers, [0.5, 0.5], [1, 1], 10.0)


def test_noise_skewed_along_the_gradient_helps_and_against_it_hurts():
    used = paper_bounds.Settings()
    rng = np.random.default_rng(1)
    for _ in range(20):
        found = paper_bounds.skewed(used, rng)
        assert found["along"] >= 0 >= found["against"]
        assert found["along"] == pytest.approx(-found["against"])


def test_the_bias_of_skewed_noise_is_that_of_the_diagnostics():
    gradients = np.array([[3.5, 0], [3.5, 0], [3.5, 0], [-0.5, 1.0], [-0.5, -1.0]])
    mean = gradients.mean(axis=0)
    ours = bounds.skewness_bias(mean, gradients - mean, np.full(5, 0.2), 1.0)
    theirs = gradient_geometry(gradients).clipping_bias(1.0).bias
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("clip_norm", [0.01, 1.0, 100.0])
def test_equation_6_is_the_derivative_of_5_and_has_no_zero(sigma, clip_norm):
    step = 1e-5 * clip_norm
    above, below = (
        bounds.koloskova_noise_terms(clip_norm + side, sigma, 0.1, 2.0)
        for side in (step, -step)
    )
    slope = bounds.koloskova_slope(clip_norm, sigma, 0.1, 2.0)
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6)
    assert slope > 0


def test_equation_7_is_where_the_terms_of_6_are_of_one_size():
    sigma, rate, smoothness = 1.7, 0.2, 3.0
    norm = bounds.koloskova_clip_norm(sigma, rate, smoothness)
    first = smoothness * rate * sigma**2
    second = bounds.koloskova_slope(norm, sigma, rate, smoothness) - first
    assert first == pytest.approx(second)
    # Not a minimum of (5), which rises all the way.
    terms = [bounds.koloskova_noise_terms(f * norm, sigma, rate) for f in (0.5, 1, 2)]
    assert terms == sorted(terms)


def test_the_least_of_equation_4_falls_with_noise_otherwise_than_printed():
    used = paper_bounds.Settings()
    least = [paper_bounds.best_clip_norm(sigma, used) for sigma in used.sigmas]
    printed = [bounds.koloskova_clip_norm(s, used.learning_rate) for s in used.sigmas]
    assert least == sorted(least, reverse=True)
    assert printed[0] / printed[-1] == pytest.approx(16**3)
    assert least[0] / least[-1] < 100


def test_the_program_of_bounds_writes_its_tables(tmp_path):
    paper_bounds.main(["x", f"--output_dir={tmp_path}", "--steps=50", "--mixtures=2"])
    assert "0 of 4 descents" in words_of(tmp_path)
    assert len(rows_of(tmp_path, "mixtures")) == 2


@pytest.mark.parametrize(
    ("scores", "best"), [([1, 2, 3], 1.0), ([3, 2, 1], 0.01), ([1, 3, 1], 0.1)]
)
def test_the_best_rate_is_the_top_or_an_end(scores, best):
    rates = np.geomspace(0.01, 1, 3)
    assert best_rates.best_rate(rates, np.array(scores)) == pytest.approx(best)


@pytest.mark.slow
def test_the_program_of_best_rates_fits_an_exponent(tmp_path):
    best_rates.main(
        [
            "x",
            f"--output_dir={tmp_path}",
            "--epsilons=8",
            "--batch_sizes=128,512",
            "--learning_rates=0.01,0.1,0.5",
            "--repeats=2",
            "--epochs=2",
        ]
    )
    (fit,) = rows_of(tmp_path, "exponents")
    assert float(fit["low"]) <= float(fit["high"])
    assert len(rows_of(tmp_path, "rates")) == 6


def test_a_batch_larger_than_the_data_is_refused_before_training(tmp_path):
    with pytest.raises(SystemExit, match="--batch_sizes: there are only 1437"):
        best_rates.main(["x", f"--output_dir={tmp_path}", "--batch_sizes=64,5000"])
