"""The cost of correlated noise follows from its matrix and the scheme together."""

import json
import math

import dp_accounting
import numpy as np
import pytest

from tests.correlated.patterns import patterns
from tfdpclip import accounting, correlated, sampling
from tfdpclip.accounting import _ledger_file

_FIXED = sampling.MinSeparation(1000, 50, relation="zero_out")
_REPLACED = sampling.MinSeparation(1000, 50)
_CYCLIC = sampling.CyclicPoisson(1000, rate=0.05, separation=4)
_BANDED = correlated.SquareRootToeplitz(4)
_BUFFERED = correlated.BufferedToeplitz(2, 100, _FIXED)


def _mu(event):
    """The mu of a composition of Gaussians."""
    return accounting.gdp_mu(accounting.event_epsilon(event, 1e-5, "gdp"), 1e-5)


class TestEvent:
    @pytest.mark.parametrize(
        "matrix", [_BANDED, _BUFFERED, correlated.Tree(), correlated.Independent()]
    )
    def test_a_whole_run_is_one_gaussian_of_z(self, matrix):
        for scheme, factor in ((_FIXED, 1), (_REPLACED, 2)):
            event = accounting.correlated_event(matrix, 3.0, 100, scheme)
            assert event == dp_accounting.GaussianDpEvent(3.0 / factor)
            grouped = accounting.correlated_event(
                matrix, 3.0, 100, scheme, unit="batch"
            )
            assert grouped == dp_accounting.GaussianDpEvent(1.5)

    def test_independent_noise_costs_what_it_does_without_a_matrix(self):
        """Both have noise z: the matrix has it as z / s(I) times s(I)."""
        z, steps = 1.3, 90
        once = correlated.Independent().sensitivity(steps, _FIXED)
        event = accounting.correlated_event(
            correlated.Independent(), z / once, steps, _FIXED
        )
        assert _mu(event) == pytest.approx(_mu(_FIXED.event(z, steps)))
        cyclic = accounting.correlated_event(
            correlated.Independent(), z, steps, _CYCLIC
        )
        assert cyclic == _CYCLIC.event(z, steps)

    def test_a_run_that_ends_early_costs_its_own_sensitivity(self):
        z, horizon = 2.0, 100
        whole = _BUFFERED.sensitivity(horizon, _FIXED)
        for steps in (1, 20, 21, 99):
            event = accounting.correlated_event(
                _BUFFERED, z, steps, _FIXED, horizon=horizon
            )
            part = _BUFFERED.sensitivity(steps, _FIXED)
            assert event.noise_multiplier == pytest.approx(z * whole / part)
            assert event.noise_multiplier > z

    def test_after_the_horizon_another_matrix_begins(self):
        one = accounting.correlated_event(_BUFFERED, 2.0, 100, _FIXED)
        rest = accounting.correlated_event(_BUFFERED, 2.0, 7, _FIXED, horizon=100)
        event = accounting.correlated_event(_BUFFERED, 2.0, 307, _FIXED, horizon=100)
        expected = math.sqrt(3 * _mu(one) ** 2 + _mu(rest) ** 2)
        assert _mu(event) == pytest.approx(expected)

    def test_banded_matrices_are_amplified_as_independent_noise_is(self):
        for steps, turns in ((100, 25), (99, 25), (3, 1)):
            event = accounting.correlated_event(_BANDED, 1.1, steps, _CYCLIC)
            assert event == dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    0.2, dp_accounting.GaussianDpEvent(1.1)
                ),
                turns,
            )

    def test_no_noise_is_not_private(self):
        for scheme in (_FIXED, _CYCLIC):
            event = accounting.correlated_event(_BANDED, 0.0, 10, scheme)
            assert accounting.event_epsilon(event, 1e-5) == math.inf

    @pytest.mark.parametrize(
        "arguments, match",
        [
            (dict(matrix="tree"), "noise matrix"),
            (dict(noise_multiplier=-1), "noise_multiplier"),
            (dict(noise_multiplier=math.nan), "noise_multiplier"),
            (dict(steps=-1), "steps"),
            (dict(sampling=correlated.SingleEpoch()), "scheme"),
            (dict(sampling=sampling.Poisson(0.1)), "CyclicPoisson"),
            (dict(sampling=_CYCLIC), "amplified"),
            (dict(horizon=0), "horizon"),
            (dict(unit="somebody"), "unit"),
            (dict(steps=0, sampling=sampling.Poisson(0.1)), "CyclicPoisson"),
        ],
    )
    def test_hostile_arguments(self, arguments, match):
        given = dict(matrix=_BUFFERED, noise_multiplier=1.0, steps=10, sampling=_FIXED)
        with pytest.raises(ValueError, match=match):
            accounting.correlated_event(**(given | arguments))


class TestAgainstTheDefinition:
    """The exact mechanism at small sizes: nothing is spent that is not accounted."""

    @pytest.mark.parametrize(
        "matrix", [_BANDED, _BUFFERED, correlated.Tree(), correlated.Tree(False)]
    )
    def test_no_record_is_seen_better_than_z(self, matrix):
        """The distance of two neighbours in the noise that is added, all patterns.

        The released stream is x + z s N Z. Its Gaussian has covariance (z s)^2 N N^T;
        a shift x by a record is seen at Mahalanobis distance sqrt(x^T cov^-1 x).
        """
        steps, z = 8, 1.7
        scheme = sampling.MinSeparation(30, 10, relation="zero_out")
        participation = scheme.participation(steps)
        noise = z * matrix.sensitivity(steps, scheme) * matrix.noising(steps)
        precision = np.linalg.inv(noise @ noise.T)
        worst = 0.0
        for pattern in patterns(participation, steps):
            shift = np.zeros(steps)
            shift[list(pattern)] = 1
            worst = max(worst, math.sqrt(shift @ precision @ shift))
        event = accounting.correlated_event(matrix, z, steps, scheme)
        # A tree is released by prefix sums alone, and so says less than its nodes.
        assert worst <= _mu(event) * (1 + 1e-9)
        if matrix == _BANDED:
            assert worst == pytest.approx(_mu(event))

    def test_counts_through_the_same_matrix_are_in_the_split(self):
        """A record's sum of norm 1 and its bits, in the noise that each has.

        Noise z_g s C^-1 Z on the sum and s_k s C^-1 Z_k on two counts: at Mahalanobis
        distance 1/z, when the bits are +-1/2 and signs agree, and no further.
        """
        steps, z, stddevs = 8, 1.7, [3.0, 4.0]
        scheme = sampling.MinSeparation(30, 10, relation="zero_out")
        sum_z = accounting.split_noise_multiplier(z, stddevs)
        s, noising = _BANDED.sensitivity(steps, scheme), _BANDED.noising(steps)
        precision = np.linalg.inv(noising @ noising.T)
        rng = np.random.default_rng(0)
        worst = 0.0
        for pattern in patterns(scheme.participation(steps), steps):
            for trial in range(10):
                squared = 0.0
                for stddev, most in ((sum_z, 1.0), *((k, 0.5) for k in stddevs)):
                    shift = np.zeros(steps)
                    signs = rng.choice([-1, 1], len(pattern)) if trial else 1
                    shift[list(pattern)] = most * np.asarray(signs)
                    squared += shift @ precision @ shift / (stddev * s) ** 2
                worst = max(worst, math.sqrt(squared))
        assert worst == pytest.approx(1 / z)

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("turns", [False, True])
    @pytest.mark.parametrize(
        "matrix", [correlated.SquareRootToeplitz(3), _BUFFERED, _BANDED]
    )
    def test_a_clip_and_a_record_that_adapt_are_seen_no_better(self, matrix, turns):
        """The likelihoods of a run under both neighbours, from its releases.

        The clip follows the releases, and so do the remaining records. The record has
        its full length whenever it takes part; where it turns, its sign follows the
        releases, too.
        """
        steps, z, runs = 7, 1.1, 100_000
        scheme = sampling.MinSeparation(30, 10, relation="zero_out")
        record = (0, 3, 6)
        scale = z * matrix.sensitivity(steps, scheme)
        strategy, noising = matrix.strategy(steps), matrix.noising(steps)
        rng = np.random.default_rng(0)
        noise = scale * rng.normal(size=(runs, steps)) @ noising.T

        def stream(released, present):
            """x of every step, given the earlier releases."""
            clip, before = np.ones(runs), np.zeros(runs)
            for step in range(steps):
                others = sum(np.clip(k * before, -clip, clip) for k in (1, -2, 3))
                sign = np.where(before > 0, 1.0, -1.0) if turns else 1.0
                own = np.clip(5 * sign, -clip, clip) * (present and step in record)
                yield (others + own) / clip
                before = released[:, step]
                clip = clip * np.exp(-0.5 * np.tanh(before))

        released = np.zeros((runs, steps))
        for step, x in enumerate(stream(released, True)):
            released[:, step] = x + noise[:, step]
        squares = []
        for present in (True, False):
            x = np.array(list(stream(released, present))).T
            squares.append(np.sum(((released - x) @ strategy.T / scale) ** 2, axis=1))
        loss = (squares[1] - squares[0]) / 2
        for epsilon in (0.3, 1.0, 2.0):
            values = np.maximum(0, -np.expm1(epsilon - loss))
            # Six deviations: a false alarm in 10^9.
            margin = 6 * values.std() / math.sqrt(runs)
            stated = accounting.delta(z, steps, scheme, epsilon, matrix=matrix)
            assert values.mean() - margin <= stated
            if not turns:
                # Signs that agree are the worst there is, to the letter.
                assert values.mean() + margin >= stated

    def test_amplification_bounds_the_exact_divergence(self):
        """Two turns of a banded matrix, on a grid: E_gamma of the mixtures.

        Group 0 of two: steps 0 and 2 of four. With two bands the turns are two blocks
        of rows, each a mixture of a Gaussian and the same Gaussian moved along a
        column.
        """
        matrix, z, rate = correlated.SquareRootToeplitz(2), 0.9, 0.25
        scheme = sampling.CyclicPoisson(100, rate=rate / 2, separation=2)
        strategy = matrix.strategy(4)
        s = matrix.sensitivity(4, scheme)
        rng = np.random.default_rng(0)
        # Importance sampling from the sampled side; both turns, two rows each.
        draws = 400_000
        entered = rng.random((draws, 2)) < rate
        y = z * s * rng.normal(size=(draws, 4))
        for turn, column in enumerate((0, 2)):
            y += entered[:, turn, np.newaxis] * strategy[:, column]
        log_ratio = np.zeros(draws)
        for column in (0, 2):
            moved = strategy[:, column]
            gain = (y @ moved - moved @ moved / 2) / (z * s) ** 2
            log_ratio += np.log1p(rate * np.expm1(gain))
        for epsilon in (0.2, 0.5, 1.0):
            values = np.maximum(0, -np.expm1(epsilon - log_ratio))
            # Six deviations: a false alarm in 10^9.
            low = values.mean() - 6 * values.std() / math.sqrt(draws)
            event = accounting.correlated_event(matrix, z, 4, scheme)
            stated = accounting.delta(z, 4, scheme, epsilon, matrix=matrix)
            assert low <= stated
            assert values.mean() == pytest.approx(stated, rel=0.05)
            assert event.count == 2


class TestCalibration:
    def test_epsilon_delta_and_noise_agree(self):
        for matrix, scheme in ((_BUFFERED, _FIXED), (_BANDED, _CYCLIC)):
            z = accounting.noise_multiplier(1.0, 1e-5, 100, scheme, matrix=matrix)
            spent = accounting.epsilon(z, 100, scheme, 1e-5, matrix=matrix)
            assert 0.9999 <= spent <= 1.0
            found = accounting.delta(z, 100, scheme, spent, matrix=matrix)
            assert found == pytest.approx(1e-5, rel=1e-3)

    def test_the_number_of_steps_does_not_matter_without_sampling(self):
        found = [
            accounting.noise_multiplier(1.0, 1e-5, n, _FIXED, matrix=_BUFFERED)
            for n in (1, 100, 1000)
        ]
        assert found[0] == found[1] == found[2]

    def test_a_sensitivity_of_another_kind_is_refused(self):
        with pytest.raises(ValueError, match="sensitivity must be None"):
            accounting.epsilon(1.0, 9, _FIXED, 1e-5, sensitivity=1.0, matrix=_BANDED)


SETTINGS = dict(
    noise_multiplier=2.0, sampling=_FIXED, clip="QuantileClip()", noise=_BUFFERED
)


class TestLedger:
    def ledger(self, path=None, **changes):
        ledger = accounting.Ledger(delta=1e-5, path=path)
        ledger.begin(**(SETTINGS | {"horizon": 100} | changes))
        return ledger

    def test_a_run_is_one_gaussian_however_it_is_recorded(self):
        ledger = self.ledger()
        for _ in range(100):
            with ledger.step():
                pass
        expected = accounting.epsilon(2.0, 100, _FIXED, 1e-5, matrix=_BUFFERED)
        assert ledger.epsilon() == pytest.approx(expected)
        assert ledger.epsilon(more=1) > ledger.epsilon()

    def test_another_process_begins_another_matrix(self):
        ledger = self.ledger()
        ledger.record(40)
        ledger.begin(**SETTINGS, horizon=100)
        ledger.record(60)
        assert [phase.runs for phase in ledger.phases] == [[40, 60]]
        # Each costs its own s(C), against noise that was made for 100 steps.
        parts = [
            accounting.correlated_event(_BUFFERED, 2.0, n, _FIXED, horizon=100)
            for n in (40, 60)
        ]
        expected = math.hypot(*map(_mu, parts))
        assert ledger.epsilon() == pytest.approx(
            accounting.gdp_epsilon(expected, 1e-5), rel=1e-6
        )

    def test_restored_noise_goes_on(self):
        ledger = self.ledger()
        ledger.record(40)
        ledger.begin(**SETTINGS, horizon=100, continued=40)
        ledger.record(60)
        assert [phase.runs for phase in ledger.phases] == [[100]]

    @pytest.mark.parametrize("restored", [0, 39, 41])
    def test_noise_that_was_released_is_not_used_again(self, restored):
        ledger = self.ledger()
        ledger.record(40)
        before = ledger.to_dict()
        with pytest.raises(accounting.PrivacyMismatchError, match="never used again"):
            ledger.begin(**SETTINGS, horizon=100, continued=restored)
        assert ledger.to_dict() == before

    def test_a_step_that_was_cut_short_was_released(self, tmp_path):
        ledger = self.ledger(tmp_path / "ledger.json")
        ledger.record(40)
        ledger.reserve(1)
        again = accounting.Ledger.load(tmp_path / "ledger.json")
        with pytest.raises(accounting.PrivacyMismatchError, match="run of 41"):
            again.begin(**SETTINGS, horizon=100, continued=40)
        again.begin(**SETTINGS, horizon=100, continued=41)
        assert again.phases[-1].runs == [41]

    def test_nothing_goes_on_that_has_not_begun(self):
        ledger = accounting.Ledger(delta=1e-5)
        with pytest.raises(accounting.PrivacyMismatchError, match="no run"):
            ledger.begin(**SETTINGS, horizon=100, continued=0)
        ledger = self.ledger()
        with pytest.raises(accounting.PrivacyMismatchError, match="no run"):
            ledger.begin(**SETTINGS, horizon=50, continued=0, change=True)

    def test_another_matrix_is_another_phase(self):
        ledger = self.ledger()
        ledger.record(40)
        for changes in ({"horizon": 50}, {"noise": _BANDED}):
            given = SETTINGS | {"horizon": 100} | changes
            with pytest.raises(accounting.PrivacyMismatchError, match="differs"):
                ledger.begin(**given)
        other = sampling.MinSeparation(1000, 25, relation="zero_out")
        with pytest.raises(accounting.PrivacyMismatchError, match="differs"):
            ledger.begin(**(SETTINGS | {"sampling": other}), horizon=100)

    def test_another_separation_at_the_same_rate_is_another_phase(self):
        given = SETTINGS | {"sampling": _CYCLIC, "noise": None}
        ledger = accounting.Ledger(delta=1e-5)
        ledger.begin(**given)
        other = sampling.CyclicPoisson(1000, rate=0.05, separation=5)
        with pytest.raises(accounting.PrivacyMismatchError, match="differs"):
            ledger.begin(**(given | {"sampling": other}))

    @pytest.mark.parametrize(
        "noise",
        [
            _BANDED,
            _BUFFERED,
            correlated.Tree(),
            correlated.Independent(),
            correlated.Toeplitz((1.0, 0.25)),
            correlated.InverseSquareRootToeplitz(4, 0.5),
            correlated.OptimizedToeplitz(
                4, 100, _FIXED, correlated.Workload(0.9, (1.0,) * 50 + (0.1,) * 50)
            ),
            correlated.OptimizedToeplitz(4, 100, correlated.SingleEpoch()),
            correlated.OptimizedToeplitz(4, 100, _CYCLIC),
        ],
        ids=repr,
    )
    def test_its_file_says_everything(self, noise, tmp_path):
        ledger = self.ledger(tmp_path / "ledger.json", noise=noise)
        ledger.record(40)
        again = accounting.Ledger.load(tmp_path / "ledger.json")
        assert again.phases[0].noise == noise
        assert again.phases[0].horizon == 100
        assert again.epsilon() == ledger.epsilon()
        assert json.dumps(again.to_dict()) == json.dumps(ledger.to_dict())

    def test_files_of_before_are_read(self, tmp_path):
        path = tmp_path / "ledger.json"
        ledger = accounting.Ledger(delta=1e-5, path=path)
        ledger.begin(noise_multiplier=1.0, sampling=_FIXED)
        ledger.record(3)
        content = ledger.to_dict()
        for phase in content["phases"]:
            del phase["noise"], phase["horizon"]
        _ledger_file.LedgerFile(path).write(content | {"format": 3})
        again = accounting.Ledger.load(path)
        assert again.epsilon() == ledger.epsilon()
        again.begin(noise_multiplier=1.0, sampling=_FIXED)
        assert len(again.phases) == 1

    def test_the_statement_names_matrix_and_participation(self):
        ledger = self.ledger()
        ledger.record(40)
        text = str(ledger.statement())
        assert "correlation:" in text
        assert "2 buffers" in text and "anew every 100 steps" in text
        assert "at most 5 times, with at least 20 steps" in text
        assert "replace one record by an all-zero one" in text

    def test_steps_nobody_saw_are_refused(self):
        ledger = self.ledger()
        with pytest.raises(accounting.PrivacyMismatchError, match="correlated noise"):
            ledger.add_unseen(3)

    def test_what_does_not_fit_is_refused_before_it_runs(self):
        ledger = accounting.Ledger(delta=1e-5)
        for changes, match in (
            ({"sampling": sampling.Poisson(0.1)}, "CyclicPoisson"),
            ({"sampling": _CYCLIC}, "amplified"),
            ({"horizon": None}, "horizon"),
            ({"noise": None}, "horizon"),
        ):
            with pytest.raises(ValueError, match=match):
                ledger.begin(**(SETTINGS | {"horizon": 100} | changes))
        assert ledger.phases == []

    def test_steps_left_go_on_with_further_matrices(self):
        ledger = self.ledger()
        one = accounting.epsilon(2.0, 100, _FIXED, 1e-5, matrix=_BUFFERED)
        left = ledger.steps_left(2 * one)
        assert ledger.epsilon(more=left) <= 2 * one < ledger.epsilon(more=left + 1)
        assert left > 100
