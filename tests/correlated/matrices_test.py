"""C, its inverse and its stream agree; and the error is the published error."""

import json
import math

import numpy as np
import pytest
from scipy import linalg

from tfdpclip import correlated
from tfdpclip.correlated import buffered, optimized, toeplitz
from tfdpclip.correlated.matrices import root_of_workload

_ONCE = correlated.SingleEpoch()
_OFTEN = correlated.MinSeparation(8, 4)
MATRICES = [
    correlated.Independent(),
    correlated.Toeplitz((2.0, 1.0, -0.5)),
    correlated.SquareRootToeplitz(5),
    correlated.SquareRootToeplitz(5, momentum=0.9),
    correlated.SquareRootToeplitz(None),
    correlated.InverseSquareRootToeplitz(1),
    correlated.InverseSquareRootToeplitz(5),
    correlated.InverseSquareRootToeplitz(5, momentum=0.5),
    correlated.OptimizedToeplitz(4, 30, _OFTEN),
    correlated.BufferedToeplitz(1, 30, _ONCE),
    correlated.BufferedToeplitz(3, 30, _OFTEN),
    correlated.Tree(),
    correlated.Tree(honaker=False),
]
TOEPLITZ = [m for m in MATRICES if isinstance(m, correlated.ToeplitzMatrix)]


def weights_of(workload, steps):
    """A, the map from released gradients to the weights after every step."""
    sums = np.cumsum(workload.momentum ** np.arange(steps))
    rates = 1.0 if (found := workload.rates(steps)) is None else found
    return linalg.toeplitz(sums, np.zeros(steps)) * rates


def streamed(matrix, steps):
    """The stream's noise for each draw, `[steps, draws]`."""
    stream = matrix.stream()
    total = sum(stream.draws(step) for step in range(steps))
    used = iter(range(total))

    def draw():
        unit = np.zeros(total)
        unit[next(used)] = 1
        return unit

    rows = [stream.next(draw) for _ in range(steps)]
    assert next(used, None) is None, "a step made fewer draws than it said"
    return np.array(rows)


@pytest.mark.parametrize("steps", [1, 2, 13, 16])
@pytest.mark.parametrize("matrix", MATRICES, ids=repr)
class TestEveryMatrix:
    def test_noising_undoes_the_strategy(self, matrix, steps):
        product = matrix.noising(steps) @ matrix.strategy(steps)
        np.testing.assert_allclose(product, np.eye(steps), atol=1e-12)

    def test_the_stream_is_the_noising_matrix(self, matrix, steps):
        if isinstance(matrix, correlated.ToeplitzMatrix) and matrix.bandwidth is None:
            try:
                matrix.stream()
            except ValueError as error:
                assert "bands" in str(error)
                return
        expected = matrix.noising(steps)
        np.testing.assert_allclose(streamed(matrix, steps), expected, atol=1e-13)

    def test_nothing_depends_on_what_comes_later(self, matrix, steps):
        """A row of C is released when its draw is used: by then its steps are over."""
        strategy, noising = matrix.strategy(steps), matrix.noising(steps)
        for row, of_draw in zip(strategy, noising.T, strict=True):
            # Some draws of a plain tree are never looked at.
            used = np.flatnonzero(of_draw)
            assert np.flatnonzero(row).max() <= used.min(initial=steps)

    def test_deviations_are_norms_of_rows(self, matrix, steps):
        rng = np.random.default_rng(0)
        rates = tuple(rng.uniform(0.1, 1, steps))
        for workload in (
            correlated.Workload(),
            correlated.Workload(0.9),
            correlated.Workload(0.5, rates),
        ):
            product = weights_of(workload, steps) @ matrix.noising(steps)
            found = matrix.deviations(steps, workload)
            np.testing.assert_allclose(found, np.linalg.norm(product, axis=1))

    def test_bandwidth_is_how_long_a_step_is_seen(self, matrix, steps):
        rows = np.abs(matrix.strategy(steps)) > 0
        if matrix.bandwidth is not None:
            assert rows.sum(axis=0).max() <= matrix.bandwidth

    def test_settings_are_plain_values(self, matrix, steps):
        assert json.loads(json.dumps(matrix.to_dict()))["matrix"]
        assert matrix.describe()
        assert hash(matrix) == hash(matrix)


def test_every_matrix_has_an_entry():
    public = {getattr(correlated, name) for name in correlated.__all__}
    matrices = {
        kind
        for kind in public
        if isinstance(kind, type) and issubclass(kind, correlated.NoiseMatrix)
    }
    abstract = {correlated.NoiseMatrix, correlated.ToeplitzMatrix}
    assert matrices - abstract == {type(matrix) for matrix in MATRICES}


@pytest.mark.parametrize("matrix", MATRICES, ids=repr)
def test_a_matrix_is_its_settings(matrix):
    settings = json.loads(json.dumps(matrix.to_dict()))
    again = correlated.from_dict(settings)
    assert again == matrix and hash(again) == hash(matrix)
    np.testing.assert_array_equal(again.noising(9), matrix.noising(9))


@pytest.mark.parametrize(
    "settings", [None, {}, {"matrix": "Diagonal"}, {"matrix": "Tree", "depth": 3}]
)
def test_settings_of_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="settings"):
        correlated.from_dict(settings)


@pytest.mark.parametrize("matrix", TOEPLITZ, ids=repr)
def test_coefficients_are_the_columns(matrix):
    np.testing.assert_array_equal(matrix.strategy(9)[:, 0], matrix.coefficients(9))
    np.testing.assert_array_equal(
        matrix.noising(9)[:, 0], matrix.inverse_coefficients(9)
    )
    # Shorter runs are the beginnings of longer runs.
    np.testing.assert_allclose(matrix.coefficients(9)[:4], matrix.coefficients(4))


@pytest.mark.parametrize("matrix", MATRICES, ids=repr)
def test_a_run_that_stops_early_costs_no_more(matrix):
    for participation in (_ONCE, _OFTEN):
        costs = [matrix.sensitivity(n, participation) for n in (1, 5, 20, 40)]
        assert costs == sorted(costs)


class TestSquareRoot:
    def test_squared_it_is_the_workload(self):
        for momentum in (0.0, 0.9):
            matrix = correlated.SquareRootToeplitz(None, momentum).strategy(20)
            expected = weights_of(correlated.Workload(momentum), 20)
            np.testing.assert_allclose(matrix @ matrix, expected, rtol=1e-12)

    def test_sensitivity_is_that_of_fichtenberger_et_al(self):
        """s^2 = sum of (binom(2k, k) / 4^k)^2, and the last error is s^2."""
        for steps in (1, 2, 10, 500):
            exact = math.fsum((math.comb(2 * k, k) / 4**k) ** 2 for k in range(steps))
            matrix = correlated.SquareRootToeplitz(None)
            found = matrix.sensitivity(steps, _ONCE)
            assert found**2 == pytest.approx(exact, rel=1e-11)
            error = correlated.noise_error(matrix, steps, _ONCE)
            assert error.max == error.last == pytest.approx(exact, rel=1e-11)

    def test_errors_are_landaus_constants(self):
        """Landau 1913: (ln n + Euler's constant + 4 ln 2) / pi, up to 1/(4 pi n)."""
        for steps in (1000, 100_000):
            found = correlated.SquareRootToeplitz(None).sensitivity(steps, _ONCE) ** 2
            limit = (math.log(steps) + np.euler_gamma + 4 * math.log(2)) / math.pi
            assert 0 < limit - found < 1 / (2 * math.pi * steps)

    def test_the_inverse_is_the_differences_of_the_root(self):
        """C C = A, so that C^-1 = A^-1 C."""
        root = root_of_workload(12)
        found = correlated.SquareRootToeplitz(None).inverse_coefficients(12)
        np.testing.assert_allclose(found, np.diff(root, prepend=0.0), atol=1e-14)
        banded = correlated.InverseSquareRootToeplitz(5).inverse_coefficients(12)
        np.testing.assert_allclose(banded[:5], found[:5], atol=1e-14)
        assert not banded[5:].any()


class TestTree:
    @pytest.mark.parametrize("height", [1, 3, 6])
    def test_errors_are_those_of_the_nodes(self, height):
        """A prefix of i steps has as many nodes as i has binary digits 1."""
        steps = 2**height
        error = correlated.noise_error(correlated.Tree(honaker=False), steps, _ONCE)
        ones = [i.bit_count() for i in range(1, steps + 1)]
        assert error.sensitivity**2 == pytest.approx(height + 1)
        assert error.max**2 == pytest.approx((height + 1) * height)
        assert error.mean**2 == pytest.approx((height + 1) * np.mean(ones))

    def test_honakers_estimate_has_his_variance(self):
        """1 / (2 (1 - 2^-(h+1))) for the node of height h."""
        for height in range(6):
            rows = correlated.Tree().deviations(2**height)
            assert rows[-1] ** 2 == pytest.approx(1 / (2 - 2.0**-height))

    def test_no_estimate_from_below_is_better(self):
        """It is the least-squares estimate of a complete node."""
        strategy = correlated.Tree().strategy(8)
        best = np.linalg.norm(np.ones(8) @ np.linalg.pinv(strategy))
        assert correlated.Tree().deviations(8)[-1] == pytest.approx(best)


class TestBuffered:
    @pytest.mark.thinned(6)
    @pytest.mark.parametrize("buffers", [1, 2, 5, 8])
    @pytest.mark.parametrize("participation", [_ONCE, correlated.MinSeparation(50)])
    def test_is_of_the_kind_whose_sensitivity_is_exact(self, buffers, participation):
        matrix = correlated.BufferedToeplitz(buffers, 400, participation)
        assert toeplitz.never_rises(matrix.coefficients(2000))

    @pytest.mark.parametrize("buffers", [1, 2, 5])
    def test_the_inverse_is_one_too(self, buffers):
        matrix = correlated.BufferedToeplitz(buffers, 400, _ONCE)
        decay, scale = matrix.inverse
        expected = matrix.inverse_coefficients(50)
        powers = np.power.outer(decay, np.arange(49))
        np.testing.assert_allclose(scale @ powers, expected[1:], atol=1e-10)
        assert np.all(scale < 0)
        together = np.sort(np.concatenate([decay, matrix.decay]))[::-1]
        np.testing.assert_array_equal(together[::2], matrix.decay)

    def test_one_buffer_by_hand(self):
        matrix = correlated.BufferedToeplitz(1, 4, _ONCE, decay=(0.75,), scale=(0.5,))
        np.testing.assert_allclose(
            matrix.coefficients(4), [1, 0.5, 0.375, 0.28125], rtol=1e-15
        )
        # (1 - 3/4 x) / (1 - 1/4 x)
        np.testing.assert_allclose(
            matrix.inverse_coefficients(4), [1, -0.5, -0.125, -0.03125], rtol=1e-15
        )

    def test_a_few_buffers_are_as_good_as_the_square_root(self):
        """Dvijotham et al. 2024: the error is that of the best within percents."""
        root = correlated.noise_error(correlated.SquareRootToeplitz(None), 1000, _ONCE)
        few = correlated.BufferedToeplitz(4, 1000, _ONCE, error="last")
        found = correlated.noise_error(few, 1000, _ONCE)
        # Not below: the square root has the least maximal error there is.
        assert root.max * (1 - 1e-9) <= found.max <= 1.01 * root.max

    @pytest.mark.parametrize(
        "steps, buffers, factor",
        [(10, 1, 1.04), (100, 2, 1.03), (1000, 3, 1.03), (10_000, 4, 1.03)],
    )
    def test_the_error_is_within_percents_of_the_bound(self, steps, buffers, factor):
        """1 + ln(n) / pi bounds the least error (Mathias 1993, Corollary 3.5).

        The factors are the tolerances in the tests of JAX Privacy's search.
        """
        matrix = correlated.BufferedToeplitz(buffers, steps, _ONCE, error="last")
        error = correlated.noise_error(matrix, steps, _ONCE)
        assert error.max <= factor * (1 + math.log(steps) / math.pi)

    @pytest.mark.slow
    def test_it_is_what_jax_privacy_finds(self):
        """Known answer of its test for two buffers and 100,000 steps."""
        matrix = correlated.BufferedToeplitz(2, 100_000, _ONCE, error="last")
        assert matrix.decay == pytest.approx((0.9999528892, 0.9857068667), rel=1e-5)
        assert matrix.scale == pytest.approx((0.0122853238, 0.1878393665), rel=1e-5)


class TestOptimized:
    def test_no_square_root_is_better(self):
        for participation in (_ONCE, correlated.MinSeparation(25)):
            for workload in (correlated.Workload(), correlated.Workload(0.9)):
                best = correlated.OptimizedToeplitz(20, 100, participation, workload)
                root = correlated.SquareRootToeplitz(20, workload.momentum)
                errors = [
                    correlated.noise_error(m, 100, participation, workload).mean
                    for m in (best, root)
                ]
                assert errors[0] < errors[1]

    def test_with_all_bands_it_is_the_square_root_for_the_last_error(self):
        """A theorem states that this matrix is optimal."""
        matrix = correlated.OptimizedToeplitz(40, 40, _ONCE, error="last")
        expected = correlated.SquareRootToeplitz(None).coefficients(40)
        np.testing.assert_allclose(matrix.coefficients(40), expected, atol=1e-3)

    def test_a_schedule_is_taken_into_account(self):
        rates = tuple(np.linspace(1, 0.01, 60))
        workload = correlated.Workload(0.9, rates)
        errors = [
            correlated.noise_error(
                correlated.OptimizedToeplitz(10, 60, _OFTEN, given),
                60,
                _OFTEN,
                workload,
            ).mean
            for given in (workload, correlated.Workload())
        ]
        assert errors[0] < errors[1]

    @pytest.mark.parametrize("error", optimized.OBJECTIVES)
    @pytest.mark.parametrize("rates", [None, tuple(np.linspace(1, 0.1, 12))])
    def test_gradients_are_differences(self, error, rates):
        rng = np.random.default_rng(0)
        workload = correlated.Workload(0.5, rates)
        objective = optimized.Objective(
            12, correlated.MinSeparation(4, 2), workload, error
        )
        column = np.concatenate([[1.0], rng.uniform(0, 0.5, 11)])

        def value(column):
            return objective(column, toeplitz.inverse(column, 12))

        _, gradient = value(column)
        for k in range(12):
            moved = np.zeros(12)
            moved[k] = 1e-6
            slope = (value(column + moved)[0] - value(column - moved)[0]) / 2e-6
            assert gradient[k] == pytest.approx(slope, rel=1e-5, abs=1e-7)

    @pytest.mark.parametrize("error", optimized.OBJECTIVES)
    def test_the_objective_is_the_error(self, error):
        participation = correlated.MinSeparation(4, 2)
        matrix = correlated.SquareRootToeplitz(5, 0.5)
        workload = correlated.Workload(0.5, tuple(np.linspace(1, 0.1, 12)))
        objective = optimized.Objective(12, participation, workload, error)
        value, _ = objective(matrix.coefficients(12), matrix.inverse_coefficients(12))
        found = correlated.noise_error(matrix, 12, participation, workload)
        assert math.exp(value / 2) == pytest.approx(getattr(found, error))

    def test_what_was_found_is_kept(self):
        matrix = correlated.OptimizedToeplitz(4, 30, _OFTEN)
        again = correlated.OptimizedToeplitz(4, 30, _OFTEN, column=matrix.column)
        assert again == matrix


def test_gradients_of_buffers_are_differences():
    """At the search's result, no nearby matrix has a smaller error."""
    participation = correlated.MinSeparation(10)
    found = correlated.BufferedToeplitz(2, 60, participation)
    least = correlated.noise_error(found, 60, participation).mean
    rng = np.random.default_rng(0)
    for _ in range(50):
        decay = np.array(found.decay) * (1 + 0.01 * rng.normal(size=2))
        scale = np.array(found.scale) * (1 + 0.01 * rng.normal(size=2))
        if not (0 < decay[1] < decay[0] < 1 and scale.sum() <= 1):
            continue
        near = correlated.BufferedToeplitz(
            2, 60, participation, decay=tuple(decay), scale=tuple(scale)
        )
        error = correlated.noise_error(near, 60, participation).mean
        assert error >= least * (1 - 1e-6)


def test_independent_noise_grows_with_the_root():
    error = correlated.noise_error(
        correlated.Independent(), 100, correlated.MinSeparation(10)
    )
    assert error.last == pytest.approx(math.sqrt(10 * 100))
    assert error.mean == pytest.approx(math.sqrt(10 * 101 / 2))


def test_the_workload_is_that_of_keras():
    """Weights of v = mu v - eta_t g, w = w + v, by hand."""
    rates = (0.5, 0.25, 1.0)
    workload = correlated.Workload(0.9, rates)
    matrix = workload.applied(np.diag(workload.rates(3)))
    for step in range(3):
        weight = velocity = 0.0
        for t in range(3):
            velocity = 0.9 * velocity - rates[t] * (t == step)
            weight += velocity
            assert matrix[t, step] == pytest.approx(-weight)


def test_a_plot_shows_every_matrix(tmp_path):
    figure = correlated.plot_noise(
        {
            "tree": correlated.Tree(),
            "buffers": correlated.BufferedToeplitz(2, 64, _ONCE),
        },
        64,
        _ONCE,
        path=tmp_path / "noise.png",
    )
    lines, bars = figure.axes
    assert len(lines.get_lines()) == len(bars.patches) == 3
    assert bars.patches[0].get_width() == 1.0
    assert (tmp_path / "noise.png").stat().st_size > 0


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: correlated.Toeplitz(()), "column"),
        (lambda: correlated.Toeplitz((0.0, 1.0)), "above 0"),
        (lambda: correlated.Toeplitz((1.0, math.inf)), "finite"),
        (lambda: correlated.SquareRootToeplitz(0), "bands"),
        (lambda: correlated.SquareRootToeplitz(3, 1.0), "momentum"),
        (lambda: correlated.SquareRootToeplitz(None).stream(), "bands=16"),
        (lambda: correlated.InverseSquareRootToeplitz(1.5), "inverse_bands"),
        (lambda: correlated.OptimizedToeplitz(5, 4, _ONCE), "bands"),
        (lambda: correlated.OptimizedToeplitz(2, 4, "once"), "participation"),
        (lambda: correlated.OptimizedToeplitz(2, 4, _ONCE, error="max"), "error"),
        (lambda: correlated.OptimizedToeplitz(2, 4, _ONCE, 0.9), "workload"),
        (
            lambda: correlated.OptimizedToeplitz(2, 4, _ONCE, column=(1.0, 2.0)),
            "non-increasing",
        ),
        (lambda: correlated.BufferedToeplitz(0, 4, _ONCE), "buffers"),
        (lambda: correlated.BufferedToeplitz(17, 4, _ONCE), "at most 16"),
        (lambda: correlated.BufferedToeplitz(1, 4, _ONCE, decay=(0.5,)), "scale"),
        (
            lambda: correlated.BufferedToeplitz(
                1, 4, _ONCE, decay=(0.5,), scale=(1.5,)
            ),
            "add up to 1",
        ),
        (
            lambda: correlated.BufferedToeplitz(
                1, 4, _ONCE, decay=(1.0,), scale=(0.1,)
            ),
            "decay must fall",
        ),
        (lambda: correlated.Tree(honaker=1), "honaker"),
        (lambda: correlated.Tree().strategy(5000), "4096"),
        (lambda: correlated.Workload(-0.1), "momentum"),
        (lambda: correlated.Workload(0.0, (1.0, math.nan)), "learning_rates"),
        (lambda: correlated.Workload(0.0, (1.0,)).rates(2), "each of the 2"),
        (lambda: correlated.noise_error("tree", 4, _ONCE), "noise matrix"),
        (lambda: correlated.noise_error(correlated.Tree(), 0, _ONCE), "steps"),
    ],
)
def test_hostile_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_scales_are_partial_fractions():
    """A case by hand: (1 - x/4) / (1 - 3x/4) has scale 1/2."""
    found = buffered._scales(np.array([0.75]), np.array([0.25]))
    assert found == pytest.approx([0.5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("steps", "separation"), [(4, 4), (6, 2), (24, 4)])
def test_short_runs_that_need_fewer_buffers_have_a_matrix(steps, separation, momentum):
    apart = correlated.MinSeparation(separation, -(-steps // separation))
    workload = correlated.Workload(momentum)
    errors = [
        correlated.noise_error(
            correlated.BufferedToeplitz(buffers, steps, apart, workload),
            steps,
            apart,
            workload,
        ).mean
        for buffers in (1, 3)
    ]
    # More buffers are no worse, up to the tolerance of the search.
    assert errors[1] <= 1.001 * errors[0]
