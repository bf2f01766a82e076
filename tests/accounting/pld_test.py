"""The privacy profiles against mechanisms small enough to work out in full.

Every case enumerates all draws of a tiny data set, adds up the exact density of the
released sum for two neighbours, integrates the hockey-stick divergence, and compares.
"""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import integrate, stats

from tfdpclip import accounting, sampling
from tfdpclip.accounting import _losses, _pld
from tfdpclip.sampling import events

_Z = 1.2  # Noise standard deviation; records are in [-1, 1].
_GRID = np.linspace(-14, 14, 8_001)
_EPSILONS = (0.0, 0.05, 0.3, 1.0, 2.0)


def _density(weighted_sums):
    """The density of noise added to a random sum, on the grid."""
    total = np.zeros_like(_GRID)
    for value, probability in weighted_sums:
        total += probability * stats.norm.pdf(_GRID, value, _Z)
    return total


def _hockey_stick(p, q, epsilon):
    return integrate.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), _GRID)


def _poisson_sums(records, rate, capacity):
    for chosen in itertools.product([0, 1], repeat=len(records)):
        picked = [r for r, c in zip(records, chosen, strict=True) if c]
        probability = rate ** len(picked) * (1 - rate) ** (len(records) - len(picked))
        kept = list(itertools.combinations(picked, min(capacity, len(picked))))
        for subset in kept:
            yield sum(subset), probability / len(kept)


def _without_replacement_sums(records, size):
    draws = list(itertools.combinations(records, size))
    return [(sum(draw), 1 / len(draws)) for draw in draws]


def _with_replacement_sums(records, size):
    draws = list(itertools.product(records, repeat=size))
    return [(sum(draw), 1 / len(draws)) for draw in draws]


def _one_step(scheme, unit_sensitivity=None):
    (leaf,) = events.leaves(scheme.event(_Z, 1, sensitivity=unit_sensitivity))
    return _pld._single(leaf, 1e-3)


def _assert_bounds(distribution, pairs):
    """The distribution bounds every pair both ways; returns the tightest ratios."""
    tightest = {}
    bounds = [distribution.delta(epsilon) for epsilon in _EPSILONS]
    for p, q in pairs:
        for epsilon, bound in zip(_EPSILONS, bounds, strict=True):
            for one, other in ((p, q), (q, p)):
                exact = _hockey_stick(one, other, epsilon)
                assert exact <= bound + 1e-6  # Of integration.
                ratio = exact / bound if bound else 1.0
                tightest[epsilon] = max(ratio, tightest.get(epsilon, 0))
    return tightest


_NEIGHBOURS = [[*rest, x] for rest in ((-1,) * 3, (-1, 0, 1)) for x in (-1, 0.5, 1)]


class TestTruncatedPoisson:
    @pytest.mark.parametrize("rate", [0.2, 0.6, 1.0])
    @pytest.mark.parametrize("capacity", [1, 2, 3])
    def test_bounds_the_exact_divergence(self, rate, capacity):
        scheme = sampling.Poisson(rate, capacity, population=4)
        pairs = [
            (
                _density(_poisson_sums(records, rate, capacity)),
                _density(_poisson_sums(records[:-1], rate, capacity)),
            )
            for records in _NEIGHBOURS
        ]
        _assert_bounds(_one_step(scheme), pairs)

    def test_ignoring_the_cut_would_be_wrong(self):
        # Three records are -1 and the newcomer +1: in a full batch, it displaces a
        # record.
        p = _density(_poisson_sums([-1, -1, -1, 1], 0.6, 2))
        q = _density(_poisson_sums([-1, -1, -1], 0.6, 2))
        ideal = _one_step(sampling.Poisson(0.6))
        exact = max(_hockey_stick(p, q, 1.0), _hockey_stick(q, p, 1.0))
        assert exact > 1.05 * ideal.delta(1.0)

    def test_is_exact_without_overflow(self):
        p = _density(_poisson_sums([0, 0, 0, 1], 0.3, 4))
        q = _density(_poisson_sums([0, 0, 0], 0.3, 4))
        scheme = sampling.Poisson(0.3, 5, population=4)
        tightest = _assert_bounds(_one_step(scheme), [(p, q)])
        assert min(tightest.values()) > 0.999

    def test_lies_between_no_overflow_and_always(self):
        arguments = (1.0, 50)
        spent = [
            accounting.epsilon(*arguments, sampling.Poisson(0.1, c, 100), 1e-5)
            for c in (100, 40, 25, 20, 15, 10, 1)
        ]
        assert spent[0] == pytest.approx(
            accounting.epsilon(*arguments, sampling.Poisson(0.1), 1e-5), rel=1e-9
        )
        # The discretisation rounds: the last digits depend on the processor.
        for less, more in itertools.pairwise(spent):
            assert less <= more * (1 + 1e-9)
        always = accounting.epsilon(0.5, 50, sampling.Poisson(0.1), 1e-5)
        assert spent[-1] <= always * (1 + 1e-6)

    def test_renyi_bound_is_above(self):
        scheme = sampling.Poisson(0.1, 22, 100)
        pld = accounting.epsilon(1.0, 50, scheme, 1e-5)
        rdp = accounting.epsilon(1.0, 50, scheme, 1e-5, "rdp")
        assert pld < rdp < 2 * pld

    def test_overflow_probability(self):
        event = events.TruncatedPoissonSampledDpEvent(
            10, 0.5, 3, dp_accounting.GaussianDpEvent(1.0)
        )
        exact = sum(math.comb(10, k) for k in range(3, 11)) / 2**10
        assert event.overflow_probability == pytest.approx(exact)


class TestFixedSize:
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_without_replacement(self, size):
        pairs = [
            (
                _density(_without_replacement_sums([*rest, x], size)),
                _density(_without_replacement_sums([*rest, y], size)),
            )
            for rest in ((-1, -1, -1), (-1, 0, 1), (1, 1, 1), (0, 0, 0))
            for x, y in ((1, -1), (0.5, -1))
        ]
        scheme = sampling.FixedSize(size, 4)
        if size == 4:
            assert scheme.event(_Z, 1).event == dp_accounting.GaussianDpEvent(_Z / 2)
        else:
            tightest = _assert_bounds(_one_step(scheme), pairs)
            assert tightest[0.0] > 0.8

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_with_replacement(self, size):
        pairs = [
            (
                _density(_with_replacement_sums([*rest, x], size)),
                _density(_with_replacement_sums([*rest, y], size)),
            )
            for rest in ((-1, -1), (-1, 1), (1, 1), (0, 0))
            for x, y in ((1, -1), (0.5, -1))
        ]
        scheme = sampling.FixedSize(size, 3, replacement=True)
        tightest = _assert_bounds(_one_step(scheme), pairs)
        if size == 1:  # The same as without replacement, and then tight.
            assert min(tightest.values()) > 0.9

    def test_one_draw_is_the_same_with_and_without(self):
        with_, without = (
            accounting.epsilon(2.0, 100, sampling.FixedSize(1, 50, r), 1e-5)
            for r in (True, False)
        )
        assert with_ == pytest.approx(without, rel=1e-9)

    def test_halving_the_noise_can_be_undone_by_name_only(self):
        scheme = sampling.FixedSize(10, 1000)
        strict = accounting.epsilon(2.0, 100, scheme, 1e-5)
        assert strict == accounting.epsilon(2.0, 100, scheme, 1e-5, sensitivity=2.0)
        assert strict == accounting.epsilon(1.0, 100, scheme, 1e-5, sensitivity=1.0)

    def test_renyi_bound_is_above(self):
        scheme = sampling.FixedSize(10, 1000)
        pld = accounting.epsilon(2.0, 500, scheme, 1e-5)
        rdp = accounting.epsilon(2.0, 500, scheme, 1e-5, "rdp")
        assert pld < rdp
        with pytest.raises(dp_accounting.UnsupportedEventError, match="pld"):
            accounting.epsilon(
                2.0, 500, sampling.FixedSize(10, 1000, replacement=True), 1e-5, "rdp"
            )


class TestPoisson:
    @pytest.mark.thinned(4)
    @pytest.mark.parametrize(
        "z, rate, cell",
        [(1.3, 0.005, 1e-4), (0.5, 0.3, 1e-3), (5.0, 0.01, 1e-5), (0.3, 0.9, 1e-3)],
    )
    def test_agrees_with_dp_accounting(self, z, rate, cell):
        event = dp_accounting.PoissonSampledDpEvent(
            rate, dp_accounting.GaussianDpEvent(z)
        )
        ours = _pld._single(event, cell).composed(30)
        theirs = pld_lib.from_gaussian_mechanism(
            z, sampling_prob=rate, value_discretization_interval=cell
        ).self_compose(30)
        epsilons = np.linspace(0, theirs.get_epsilon_for_delta(1e-10), 20)
        np.testing.assert_allclose(
            [ours.delta(epsilon) for epsilon in epsilons],
            theirs.get_delta_for_epsilon(epsilons),
            rtol=1e-5,
            atol=1e-14,
        )

    def test_small_steps_are_not_overstated(self):
        # Cells of 1e-4 would give 0.0065 here: each step's loss is about 1e-5.
        spent = accounting.epsilon(10.0, 10_000, sampling.Poisson(1e-4), 1e-5)
        assert spent < 0.002
        mu = accounting.subsampled_gdp_mu(10.0, 1e-4, 10_000)
        assert spent == pytest.approx(accounting.gdp_epsilon(mu, 1e-5), rel=0.05)

    @pytest.mark.parametrize("z, relative", [(0.1, 1e-5), (0.3, 1e-6)])
    def test_large_steps_are_told_as_well_by_wide_cells(self, monkeypatch, z, relative):
        event = sampling.FixedSize(20, 600).event(z, 30, unit="client")
        spent = accounting.event_epsilon(event, 1e-3)
        widths = []
        single = _pld._single

        def narrow(event, cell, *spacing):
            widths.append(cell)
            return single(event, cell, *spacing)

        monkeypatch.setattr(_pld, "_single", narrow)
        _pld._epsilon.cache_clear()
        accounting.event_epsilon(event, 1e-3)
        monkeypatch.setattr(_pld, "_MOST_CELLS_PER_DEVIATION", math.inf)
        _pld._epsilon.cache_clear()
        assert accounting.event_epsilon(event, 1e-3) == pytest.approx(
            spent, rel=relative
        )
        assert widths[0] > 2 * widths[1]

    def test_a_certain_rate_is_no_sampling(self):
        sampled = accounting.epsilon(2.0, 5, sampling.Poisson(1.0), 1e-5)
        assert sampled == accounting.epsilon(2.0, 5, sampling.FullBatch(), 1e-5)
        nearly = accounting.epsilon(2.0, 5, sampling.Poisson(1 - 1e-9), 1e-5)
        assert nearly == pytest.approx(sampled, rel=1e-4)


class TestLosses:
    """For arbitrary masses, compared with `dp_accounting`."""

    CASES = {
        "usual": (1e-3, -300, 900, 1e-9),
        "none below 0": (1e-2, 3, 50, 0.0),
        "none above 0": (1e-2, -50, 40, 0.0),
        "so large that e to minus them is 0": (5.0, 100, 300, 0.0),
        "infinite ones": (1e-3, -100, 200, 0.2),
        "one alone": (1e-3, 5, 1, 0.1),
    }

    @staticmethod
    def both(width, lowest, count, infinite, seed=0):
        masses = np.random.default_rng(seed).exponential(size=count) ** 3
        masses *= (1 - infinite) / masses.sum()
        ours = _losses.Losses(width, lowest, masses, infinite)
        return ours, pld_pmf.DensePLDPmf(width, lowest, masses, infinite, True)

    @pytest.mark.parametrize("count", [1, 2, 37])
    @pytest.mark.parametrize("name", CASES)
    def test_agree_with_dp_accounting(self, name, count):
        width, lowest, *_ = case = self.CASES[name]
        ours, theirs = self.both(*case)
        more = self.both(width, lowest, 20, 0.0, seed=1)
        for one, other in (
            (ours, theirs),
            (ours.composed(count), theirs.self_compose(count)),
            (
                _losses.compose([(ours, count), (more[0], 1)]),
                theirs.self_compose(count).compose(more[1]),
            ),
        ):
            for epsilon in (0.0, 0.03, 0.4, 5.0, 600.0):
                expected = other.get_delta_for_epsilon(epsilon)
                assert one.delta(epsilon) == pytest.approx(
                    expected, rel=1e-9, abs=1e-14
                )
            for delta in (1e-10, 1e-5, 0.1, 0.25, 0.9):
                expected = other.get_epsilon_for_delta(delta)
                assert one.epsilon(delta) == pytest.approx(expected, rel=1e-6)

    def test_epsilon_is_the_least_of_its_delta(self):
        ours, _ = self.both(*self.CASES["usual"])
        for delta in (1e-6, 1e-3, 0.1):
            epsilon = ours.epsilon(delta)
            assert ours.delta(epsilon) == pytest.approx(delta, rel=1e-9)
            assert ours.delta(epsilon * (1 - 1e-6)) > delta

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("place", [0, 1, -1])
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_masses_that_are_no_numbers_are_no_privacy(self, bad, place):
        masses = np.full(4, 0.25)
        masses[place] = bad
        for lowest in (-20, 1):  # Of losses below and above 0.
            one = _losses.Losses(0.1, lowest, masses, 0.0)
            for losses in (one, one.composed(3), _losses.compose([(one, 1), (one, 2)])):
                assert losses.epsilon(0.1) == math.inf
                assert losses.delta(0.0) == 1.0
        unknown = _losses.Losses(0.1, 1, np.full(4, 0.25), bad)
        assert unknown.epsilon(0.1) == math.inf
        assert unknown.delta(0.0) == 1.0

    @pytest.mark.parametrize("count", [0, -1])
    def test_of_nothing_there_is_no_composition(self, count):
        ours, _ = self.both(*self.CASES["usual"])
        with pytest.raises(ValueError, match="count must be at least 1"):
            ours.composed(count)


class TestRounding:
    """Unsampled Gaussians, composed numerically, against the closed form."""

    @pytest.mark.parametrize("steps, z", [(10, 5), (1000, 50), (10**5, 300)])
    @pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9, 1e-10])
    def test_never_below_the_truth(self, steps, z, delta):
        gaussian = dp_accounting.GaussianDpEvent(float(z))
        # A certain Poisson draw, in a form that is not recognised as certain.
        event = dp_accounting.PoissonSampledDpEvent(1 - 1e-15, gaussian)
        truth = accounting.gdp_epsilon(math.sqrt(steps) / z, delta)
        numerical = _pld.epsilon({event: steps}, delta)
        if numerical != math.inf:
            assert truth * (1 - 1e-9) <= numerical <= truth * 1.05
        # 0.102 % at 1e-9 on processors with vectors of 512 bits.
        assert delta < 1e-9 or numerical <= truth * 1.002

    def test_deltas_below_it_are_left_to_renyi(self):
        scheme = sampling.Poisson(0.01)
        tiny = accounting.epsilon(1.0, 1000, scheme, 1e-14)
        assert tiny == accounting.epsilon(1.0, 1000, scheme, 1e-14, "rdp")
        far = accounting.delta(1.0, 1000, scheme, 30.0)
        assert 0 < far < 1e-20


@pytest.mark.slow
def test_mixed_events_compose():
    gaussian = dp_accounting.GaussianDpEvent(4.0)
    mixed = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(gaussian, 3),
            sampling.Poisson(0.1).event(1.0, 20),
            sampling.Poisson(0.2).event(2.0, 20),
        ]
    )
    ours = accounting.event_epsilon(mixed, 1e-5)
    reference = dp_accounting.pld.PLDAccountant().compose(mixed).get_epsilon(1e-5)
    assert ours == pytest.approx(reference, rel=1e-3)
    renyi = accounting.event_epsilon(mixed, 1e-5, "rdp")
    reference = dp_accounting.rdp.RdpAccountant().compose(mixed).get_epsilon(1e-5)
    assert renyi == pytest.approx(reference, rel=1e-12)


def laplace_delta(z, epsilon):
    """The integral of max(0, p - e^epsilon q), for noise of scale z around 0 and 1."""
    y = np.linspace(-40 * z, 1 + 40 * z, 4_000_001)
    p, q = np.exp(-np.abs(y) / z) / (2 * z), np.exp(-np.abs(y - 1) / z) / (2 * z)
    return np.sum(np.maximum(0.0, p - math.exp(epsilon) * q)) * (y[1] - y[0])


@pytest.mark.parametrize("z", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_laplace_noise_has_the_delta_of_its_densities(z, share):
    event, epsilon = dp_accounting.LaplaceDpEvent(z), share / z
    found = _pld.delta({event: 1}, epsilon)
    assert found == pytest.approx(laplace_delta(z, epsilon), rel=1e-3, abs=1e-6)
    assert accounting.event_epsilon(event, 1e-12) == pytest.approx(1 / z, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_laplace_noise_composes_with_steps_as_in_dp_accounting(accountant):
    laplace = dp_accounting.LaplaceDpEvent(2.0)
    steps = sampling.Poisson(0.1).event(1.0, 20)
    event = dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(laplace, 3), steps]
    )
    ours = accounting.event_epsilon(event, 1e-5, accountant)
    theirs = {
        "pld": dp_accounting.pld.PLDAccountant,
        "rdp": dp_accounting.rdp.RdpAccountant,
    }[accountant]().compose(event)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)


def test_events_without_a_known_loss_are_refused():
    sampled = dp_accounting.PoissonSampledDpEvent(
        0.1, dp_accounting.LaplaceDpEvent(1.0)
    )
    unknown = dp_accounting.UnsupportedDpEvent()
    for event in (sampled, unknown):
        for accountant in ("pld", "rdp", "gdp"):
            with pytest.raises(dp_accounting.UnsupportedEventError):
                accounting.event_epsilon(event, 1e-5, accountant)
