"""The optimal clip norm is exact, whichever way the gradients come."""

import json
import pathlib

import numpy as np
import pytest
from sklearn import datasets

from keras_examples.least_error import clip_errors, fixed_point_clip, optimal_clip

_FILE = pathlib.Path(__file__).with_name("least_error_cases.json")
ORACLE = json.loads(_FILE.read_text())

# Gradients, sigma, d, C*, MSE, kinds, solutions of the printed equation.
WORKED = {
    "T1": ([[3, 4]], 1, 2, 5 / 3, 50 / 3, "stationary", [5 / 3]),
    "T2": ([[3, 4], [6, 8], [0, 2]], 0.5, 2, 20 / 3, 100 / 3, "stationary", [20 / 3]),
    "T3": (
        [[10]] + [[1]] * 5 + [[-3]] * 4,
        1.5,
        1,
        0.96,
        3.24,
        "stationary",
        [0.96, 40 / 13],
    ),
    "T4": ([[10] + [0] * 5, [5] + [0] * 5], 0.5, 6, 5, 62.5, "kink", []),
    "T5": ([[3, 4], [5, 12], [-8, 6]], 0, 2, 13, 0, "kink", []),
    "T6": ([[3], [-1], [-1]], 1, 1, 0, 1, "zero", [1.5]),
    "T7": (
        [[3, 0], [-1, 0], [-1, 0]],
        0.1,
        2,
        50 / 17,
        0.17647058823529413,
        "stationary",
        [50 / 17],
    ),
    "T8": (
        [[1, 2, 3], [0.5, -1, 0.25], [-2, 0.1, 0.7], [4, 0, -1], [0.2, 0.1, -0.3]],
        0.8,
        3,
        1.436994948,
        14.2246123823,
        "stationary",
        [1.4369949],
    ),
    "T9a": ([[1, 0], [2, 0], [3, 0], [4, 0]], 1, 2, 7 / 3, 49 / 3, None, [7 / 3]),
    "T9b": ([[1, 0], [2, 0], [3, 0], [4, 0]], 3, 2, 1, 54, None, [1]),
    "T9c": ([[2, 0], [4, 0], [6, 0], [8, 0]], 3, 2, 2, 216, None, [2]),
    "T10a": (
        [[10, 0, 0, 0, 0], [10, 0, 0, 0, 0], [-3, 0, 0, 0, 0]],
        2,
        5,
        17 / 21,
        275.238095,
        "stationary",
        [17 / 21],
    ),
    "T10b": (
        [[10, 0, 0, 0, 0], [10, 0, 0, 0, 0], [-4, 0, 0, 0, 0]],
        2,
        5,
        16 / 21,
        243.809524,
        "stationary",
        [16 / 21],
    ),
}


@pytest.mark.parametrize("case", WORKED.values(), ids=WORKED)
def test_worked_cases(case):
    gradients, sigma, d, clip_norm, mse, kind, stationary = case
    best = optimal_clip(np.array(gradients, np.float64), sigma, d)
    assert best.clip_norm == pytest.approx(clip_norm, abs=1e-9, rel=1e-9)
    assert best.mse == pytest.approx(mse, abs=1e-9, rel=1e-8)
    assert kind is None or best.kind == kind
    found = [c for c, _ in best.stationary_points]
    np.testing.assert_allclose(found, stationary, rtol=1e-7)


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: case["name"])
def test_oracle(case):
    inputs, expected = case["inputs"], case["expected"]
    best = optimal_clip(inputs["gradients"], inputs["sigma"], inputs["d"])
    assert best.mse == pytest.approx(expected["mse"], abs=1e-9)
    if "C_star" in expected:
        assert best.clip_norm == pytest.approx(expected["C_star"], abs=1e-9)
    else:
        assert best.clip_norm >= expected["C_star_at_least"] - 1e-9
    found = dict(best.stationary_points)
    for (c, mse), (got, value) in zip(
        expected["stationary_points"], sorted(found.items()), strict=True
    ):
        assert (got, value) == pytest.approx((c, mse), abs=1e-9)
    for c, _, _, mse in expected.get("breakpoints_C_dleft_dright_mse", ()):
        errors = clip_errors(inputs["gradients"], inputs["sigma"], [c], inputs["d"])
        assert errors.mse[0] == pytest.approx(mse, abs=1e-9)


def random_gradients(rng):
    n, d = rng.integers(1, 60), rng.integers(1, 8)
    scale = np.exp(rng.normal(size=(n, 1)))
    gradients = rng.standard_normal((n, d)) * scale + rng.normal(size=d)
    gradients[rng.random(n) < 0.1] = 0.0
    gradients[rng.random(n) < 0.2] = gradients[0]  # ties
    return gradients


@pytest.mark.thinned(4)
@pytest.mark.parametrize("seed", range(40))
def test_no_other_clip_norm_is_better(seed):
    rng = np.random.default_rng(seed)
    gradients = random_gradients(rng)
    sigma = float(np.exp(2 * rng.normal() - 1))
    options = {"sampling_rate": float(rng.choice([1.0, 0.3]))}
    best = optimal_clip(gradients, sigma, **options)
    norms = np.linalg.norm(gradients, axis=1)
    grid = np.linspace(0, norms.max() * 1.1, 5001)
    errors = clip_errors(gradients, sigma, grid, **options)
    assert best.mse <= errors.mse.min() * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_errors_are_those_of_clipping_and_noise(seed):
    """The definition, row by row; and the noise by drawing it."""
    rng = np.random.default_rng(seed)
    gradients, sigma, q, c = random_gradients(rng), 0.7, 0.25, 1.3
    d = gradients.shape[1]
    norms = np.linalg.norm(gradients, axis=1)
    factors = np.minimum(1, c / np.maximum(norms, 1e-300))[:, None]
    lost = np.linalg.norm(gradients.sum(0) - (gradients * factors).sum(0)) ** 2
    sampling = (1 - q) / q * np.sum((np.minimum(norms, c)) ** 2)
    errors = clip_errors(gradients, sigma, [c], sampling_rate=q)
    assert errors.noise[0] == pytest.approx(sigma**2 * d * c**2)
    assert errors.clipping_error[0] == pytest.approx(lost)
    assert errors.sampling_noise[0] == pytest.approx(sampling)
    assert errors.mse[0] == pytest.approx(sigma**2 * d * c**2 + lost + sampling)


def test_what_is_always_true():
    rng = np.random.default_rng(0)
    for _ in range(20):
        gradients = random_gradients(rng)
        norms = np.linalg.norm(gradients, axis=1)
        found = [optimal_clip(gradients, s).clip_norm for s in (0, 0.1, 0.3, 1, 3, 10)]
        assert all(a >= b - 1e-9 for a, b in zip(found, found[1:], strict=False))
        assert all(c < norms.max() for c in found[1:])
        scaled = optimal_clip(3 * gradients, 0.3).clip_norm
        assert scaled == pytest.approx(3 * found[2], rel=1e-9)
        padded = np.pad(gradients, ((0, 2), (0, 3)))
        assert optimal_clip(padded, 0.3, gradients.shape[1]).clip_norm == (
            pytest.approx(found[2], rel=1e-9)
        )
        assert optimal_clip(padded, 0.3).clip_norm <= found[2] * (1 + 1e-12)
        one = optimal_clip(gradients[:1], 2.0)
        expected = norms[0] / (1 + 4 * gradients.shape[1])
        assert one.clip_norm == pytest.approx(expected)


def test_without_noise_the_smallest_clip_norm_without_error():
    assert optimal_clip([[2.0, 0.0], [-2.0, 0.0]], 0.0).clip_norm == 0.0
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((50, 3))
    best = optimal_clip(gradients, 0.0)
    assert best.clip_norm == np.linalg.norm(gradients, axis=1).max()
    assert best.mse == 0.0 and best.quantile == 1.0


def test_nothing_to_clip():
    for empty in (np.zeros((3, 4)), np.zeros((0, 4))):
        best = optimal_clip(empty, 1.0)
        assert (best.clip_norm, best.mse, best.kind) == (0.0, 0.0, "zero")


def digits_gradients(steps):
    """Softmax regression on digits after `steps` of gradient descent, step 1."""
    data = datasets.load_digits()
    x = np.hstack([data.data / 16, np.ones((len(data.data), 1))])
    onehot = np.eye(10)[data.target]
    w = np.zeros((65, 10))

    def residuals():
        z = x @ w
        p = np.exp(z - z.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True) - onehot

    for _ in range(steps):
        w -= x.T @ residuals() / len(x)
    return np.einsum("ni,nj->nij", x[:256], residuals()[:256]).reshape(256, -1)


# C* for sigma 0.05, 0.1, 0.25, 0.5, 1, 2, 4, and whether it is a kink; MSE at sigma 1.
SIGMAS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4)
DIGITS = {
    0: (
        [
            4.16655208,
            4.01355126,
            3.74849926,
            3.37330500,
            2.48263156,
            1.20752239,
            0.39533248,
        ],
        {0.05, 0.1},
        6220.361576,
    ),
    100: (
        [
            3.27731066,
            2.72734598,
            2.14686683,
            1.55828783,
            0.93523229,
            0.38467932,
            0.09974746,
        ],
        {1},
        1318.056554,
    ),
    300: (
        [
            3.00390296,
            2.30132079,
            1.61699670,
            1.19038794,
            0.57860581,
            0.25573000,
            0.07124966,
        ],
        {0.05, 0.25},
        726.175556,
    ),
}


@pytest.mark.parametrize("steps", DIGITS)
def test_real_gradients(steps):
    expected, kinks, mse = DIGITS[steps]
    gradients = digits_gradients(steps)
    for sigma, clip_norm in zip(SIGMAS, expected, strict=True):
        best = optimal_clip(gradients, sigma)
        assert best.clip_norm == pytest.approx(clip_norm, abs=1e-5)
        assert best.kind == ("kink" if sigma in kinks else "stationary")
        if sigma == 1:
            assert best.mse == pytest.approx(mse, rel=1e-6)


# The printed equation, for comparison.


def test_fixed_point_can_miss_the_minimum():
    cases = {name: [np.array(c[0], float), *c[1:3]] for name, c in WORKED.items()}
    good = fixed_point_clip(*cases["T1"])
    assert good.converged and good.clip_norm == pytest.approx(5 / 3)
    # T3: the worse of two solutions from [3, 10), the better from elsewhere.
    worse = fixed_point_clip(*cases["T3"], initial=5.0)
    assert worse.converged and worse.clip_norm == pytest.approx(40 / 13)
    assert worse.mse == pytest.approx(900 / 13)
    assert fixed_point_clip(*cases["T3"], initial=1.0).clip_norm == pytest.approx(0.96)
    assert fixed_point_clip(*cases["T3"], initial=10.0).clip_norm == pytest.approx(0.96)
    # T4: no solution, a cycle.
    cycle = fixed_point_clip(*cases["T4"], initial=1.0, max_iterations=50)
    assert not cycle.converged and cycle.iterations == 50
    assert cycle.path[1:3] == pytest.approx((60 / 11, 4.0))
    # T5: 0/0 where nothing is clipped.
    nothing = fixed_point_clip(*cases["T5"], initial=13.0)
    assert not nothing.converged and nothing.iterations == 0
    # T6: a solution that is not the minimum.
    wrong = fixed_point_clip(*cases["T6"])
    assert wrong.clip_norm == pytest.approx(1.5) and wrong.mse == pytest.approx(4.5)


# Refusals.


def test_bad_gradients():
    for bad in (np.nan, np.inf, 1e200):
        with pytest.raises(ValueError, match="gradients: 1 of 2 rows are not finite"):
            optimal_clip([[1.0, 2.0], [bad, 0.0]], 1.0)


def test_text_warns_of_private_data():
    text = str(optimal_clip([[3.0, 4.0]], 1.0))
    assert "1.66667" in text and "without noise" in text and "public" in text
