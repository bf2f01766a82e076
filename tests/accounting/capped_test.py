"""Examples of a person, drawn independently: profiles against integrals of densities.

Densities and compositions are computed here, on separate grids.
"""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import integrate, signal, stats

from tfdpclip import accounting
from tfdpclip.accounting import _pld, _profiles
from tfdpclip.sampling import CappedPoisson, FullBatch, Poisson, events

_CASES = [
    (k, rate, z)
    for k in (1, 2, 8)
    for rate, z in ((0.01, 0.7), (0.01, 4.0), (0.2, 1.0), (0.7, 3.0), (1.0, 5.0))
]


def _mixture(grid, k, rate, z, shift=1.0):
    """The density of noise z, and as many shifts as enter of k."""
    weights = stats.binom.pmf(np.arange(k + 1), k, rate)
    return sum(w * stats.norm.pdf(grid, shift * j, z) for j, w in enumerate(weights))


def _grid(k, z, shift=1.0):
    return np.linspace(-14 * z, shift * k + 14 * z, 200_001)


def _hockey_stick(p, q, epsilon, grid):
    return integrate.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0.0), grid)


def _integrated(k, rate, z, epsilon, tau=0.0):
    """Both divergences of a step that is cut with probability tau: remove, add."""
    found = np.zeros(2)
    for weight, shift in ((1 - tau, 1.0), (tau, 2.0)):
        if weight:
            grid = _grid(k, z, shift)
            p, q = _mixture(grid, k, rate, z, shift), stats.norm.pdf(grid, 0, z)
            both = [_hockey_stick(a, b, epsilon, grid) for a, b in ((p, q), (q, p))]
            found += weight * np.array(both)
    return found


def _delta(scheme, z, steps, epsilon):
    return accounting.delta(z, steps, scheme, epsilon, unit="person")


def _epsilon(scheme, z, steps, delta=1e-6, **options):
    return accounting.epsilon(z, steps, scheme, delta, unit="person", **options)


class TestOneStep:
    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("k, rate, z", _CASES)
    def test_profiles_are_the_integrals(self, k, rate, z):
        remove, add, _ = _profiles.mixture(1 / z, rate, k)
        epsilons = np.array([0.0, 0.01, 0.3, 1.0, 3.0])
        found = np.array([remove(epsilons), add(epsilons)]).T
        expected = [_integrated(k, rate, z, epsilon) for epsilon in epsilons]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-13)

    @pytest.mark.thinned(14)
    @pytest.mark.parametrize("capacity", [None, 10, 14, 25])
    @pytest.mark.parametrize("k, rate, z", _CASES)
    def test_epsilon_is_at_most_a_percent_above(self, k, rate, z, capacity):
        population = None if capacity is None else 20
        scheme = CappedPoisson(rate, k, capacity, population)
        tau = 0.0
        if capacity is not None:
            drawn = stats.binom.pmf(np.arange(21), 20, rate)
            tau = float(drawn[max(0, capacity - k + 1) :].sum())
        for delta in (1e-2, 1e-5):
            spent = _epsilon(scheme, z, 1, delta)
            assert _integrated(k, rate, z, spent, tau).max() <= delta * (1 + 1e-6)
            less = _integrated(k, rate, z, spent * 0.99, tau).max()
            assert less >= delta or spent < 1e-3

    def test_both_directions_count(self):
        # The neighbours go in both directions; half of the time the second is larger.
        remove, add, _ = _profiles.mixture(1.0, 0.9, 4)
        epsilons = np.array([0.1, 4.0])
        assert (remove(epsilons) != add(epsilons)).all()
        event = CappedPoisson(0.9, 4).event(1.0, 1)
        (leaf,) = events.leaves(event)
        pld = _pld._single(leaf, 1e-3)
        both = np.maximum(remove(epsilons), add(epsilons))
        found = np.array([pld.delta(epsilon) for epsilon in epsilons])
        assert np.all(found >= both * (1 - 1e-9))
        np.testing.assert_allclose(found, both, rtol=1e-3)

    @pytest.mark.parametrize("directions", [(0.0, 0.0), (0.0, 2.0), (1.0, 2.5)])
    def test_no_other_gradients_are_told_better(self, directions):
        # Two examples of norms 1, as vectors of the plane, and the same with 0.6.
        rate, z = 0.3, 0.8
        remove, add, _ = _profiles.mixture(1 / z, rate, 2)
        axis = np.linspace(-8, 9, 801)
        x, y = np.meshgrid(axis, axis, indexing="ij")

        def density(shift):
            return stats.norm.pdf(x, shift[0], z) * stats.norm.pdf(y, shift[1], z)

        for norms in ((1.0, 1.0), (1.0, 0.6)):
            one, other = (
                norm * np.array([math.cos(angle), math.sin(angle)])
                for norm, angle in zip(norms, directions, strict=True)
            )
            q = density((0.0, 0.0))
            p = (1 - rate) ** 2 * q + rate**2 * density(one + other)
            p = p + rate * (1 - rate) * (density(one) + density(other))
            for epsilon in (0.0, 0.5, 1.5):
                cell = (axis[1] - axis[0]) ** 2
                for bound, a, b in ((remove, p, q), (add, q, p)):
                    exact = np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell
                    assert exact <= bound(np.array([epsilon]))[0] * (1 + 1e-4)


def _composed(k, rate, z, steps, width=5e-4):
    """Losses of a composition and their probabilities, for both directions.

    Probabilities of losses are put at the nearest multiples of `width`.
    """
    grid = np.linspace(-12 * z, k + 12 * z, 2_000_001)
    p, q = _mixture(grid, k, rate, z), stats.norm.pdf(grid, 0, z)
    losses = np.log(p) - np.log(q)
    cell = grid[1] - grid[0]
    for sign, mass in ((1, p), (-1, q)):
        places = np.round(sign * losses / width).astype(int)
        first = places.min()
        pmf = np.bincount(places - first, mass * cell)
        total, start = pmf, first
        for _ in range(steps - 1):
            total, start = signal.fftconvolve(total, pmf), start + first
        yield (np.arange(len(total)) + start) * width, np.maximum(total, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize(
    "k, rate, z", [(1, 0.1, 1.0), (2, 0.02, 0.9), (8, 0.05, 2.0), (8, 0.4, 6.0)]
)
def test_a_few_steps_are_composed(k, rate, z, steps):
    composed = list(_composed(k, rate, z, steps))
    spent = _epsilon(CappedPoisson(rate, k), z, steps, 1e-4)

    def delta_at(epsilon):
        return max(
            (mass * np.maximum(-np.expm1(epsilon - losses), 0)).sum()
            for losses, mass in composed
        )

    assert delta_at(spent) <= 1e-4 * (1 + 2e-3)  # Of rounding to the nearest.
    assert delta_at(spent * 0.99) >= 1e-4


class TestAgainstOthers:
    @pytest.mark.parametrize("room", [(None, None), (30, 100), (12, 100)])
    def test_one_example_each_is_poisson(self, room):
        for z, steps in ((0.6, 1), (1.0, 50), (5.0, 1000)):
            one = _epsilon(CappedPoisson(0.1, 1, *room), z, steps)
            assert one == _epsilon(Poisson(0.1, *room), z, steps)

    def test_one_example_each_by_the_mixture_is_poisson(self):
        # The general way, which `leaves` goes around for k = 1.
        event = CappedPoisson(0.05, 1).event(1.0, 1).event
        mixed = _pld._single(event, 1e-3).composed(20)
        plain = _pld._single(
            dp_accounting.PoissonSampledDpEvent(0.05, event.event), 1e-3
        ).composed(20)
        epsilons = list(np.linspace(0, 4, 9))
        np.testing.assert_allclose(
            [mixed.delta(epsilon) for epsilon in epsilons],
            [plain.delta(epsilon) for epsilon in epsilons],
            rtol=1e-9,
            atol=1e-14,  # Of the Fourier transforms.
        )

    def test_a_certain_draw_is_a_gaussian(self):
        certain = _epsilon(CappedPoisson(1.0, 4), 8.0, 5)
        assert certain == accounting.epsilon(2.0, 5, FullBatch(), 1e-6)
        nearly = _epsilon(CappedPoisson(1 - 1e-9, 4), 8.0, 5)
        assert nearly == pytest.approx(certain, rel=1e-3)

    @pytest.mark.slow
    def test_more_examples_of_a_person_cost_more(self):
        spent = [_epsilon(CappedPoisson(0.01, k), 1.5, 100) for k in (1, 2, 3, 8, 30)]
        assert spent == sorted(spent)
        assert len(set(spent)) == len(spent)
        # The cost is at most that of entering with all examples whenever any enters.
        any_of_8 = Poisson(1 - 0.99**8)
        assert spent[3] < accounting.epsilon(1.5 / 8, 100, any_of_8, 1e-6)

    @pytest.mark.slow
    def test_less_room_costs_more(self):
        spent = [
            _epsilon(CappedPoisson(0.1, 4, c, 100), 2.0, 20)
            for c in (103, 40, 25, 20, 15, 10, 1)
        ]
        assert np.all(np.diff(spent) >= -1e-8)
        # Room for all of a neighbour, too.
        roomy = _epsilon(CappedPoisson(0.1, 4, 104, 100), 2.0, 20)
        assert roomy == _epsilon(CappedPoisson(0.1, 4), 2.0, 20)
        assert spent[0] == pytest.approx(roomy, rel=1e-6)
        always = _epsilon(CappedPoisson(0.1, 4), 1.0, 20)
        assert spent[-1] == pytest.approx(always, rel=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("k", [20, 300])
    def test_many_examples_of_a_person(self, k):
        # Numbers of entering examples that are very unlikely are cut off, on the safe
        # side.
        rate, z = 2 / k, 3.0
        for epsilon in (0.5, 2.0):
            exact = _integrated(k, rate, z, epsilon).max()
            found = _delta(CappedPoisson(rate, k), z, 1, epsilon)
            assert exact * (1 - 1e-6) <= found <= exact * 1.01


def test_the_cut_is_bounded_in_full():
    """Every draw of a tiny data set, cut in every way, against the bound."""
    rate, z, capacity, grid = 0.8, 1.2, 2, np.linspace(-14, 14, 8001)

    def density(records):
        sums: dict[float, float] = {}
        for chosen in itertools.product([0, 1], repeat=len(records)):
            picked = [r for r, c in zip(records, chosen, strict=True) if c]
            weight = rate ** len(picked) * (1 - rate) ** (len(records) - len(picked))
            kept = list(itertools.combinations(picked, min(capacity, len(picked))))
            for subset in kept:
                sums[sum(subset)] = sums.get(sum(subset), 0) + weight / len(kept)
        return sum(w * stats.norm.pdf(grid, total, z) for total, w in sums.items())

    scheme = CappedPoisson(rate, 2, capacity, 6)
    (leaf,) = events.leaves(scheme.event(z, 1))
    epsilons = np.array([0.0, 0.3, 1.0, 2.0, 4.0])
    single = _pld._single(leaf, 1e-3)
    bounds = [single.delta(epsilon) for epsilon in epsilons]
    uncut = np.maximum(*(f(epsilons) for f in _profiles.mixture(1 / z, rate, 2)[:2]))
    exceeded = 0.0
    for others in ((-1, -1), (-1, -1, -1, -1), (-1, 0, 0, 1)):
        for own in ((1, 1), (1,), (1, -1), (-1, -1)):
            p, q = density([*others, *own]), density(others)
            for epsilon, bound, ideal in zip(epsilons, bounds, uncut, strict=True):
                for a, b in ((p, q), (q, p)):
                    exact = _hockey_stick(a, b, epsilon, grid)
                    assert exact <= bound + 1e-6
                    exceeded = max(exceeded, exact / ideal)
    assert exceeded > 1.5, "ignoring the cut would be as good"


class TestOverflow:
    def test_its_probability(self):
        gaussian = dp_accounting.GaussianDpEvent(1.0)
        event = accounting.CappedPoissonSampledDpEvent(3, 0.5, gaussian, 10, 6)
        exact = sum(math.comb(10, j) for j in range(4, 11)) / 2**10
        assert event.overflow_probability == pytest.approx(exact)
        never = accounting.CappedPoissonSampledDpEvent(3, 0.5, gaussian, 10, 13)
        assert never.overflow_probability == 0
        tight = accounting.CappedPoissonSampledDpEvent(3, 0.5, gaussian, 10, 2)
        assert tight.overflow_probability == 1

    def test_room_needs_a_population(self):
        with pytest.raises(ValueError, match="source_dataset_size"):
            accounting.CappedPoissonSampledDpEvent(
                3, 0.5, dp_accounting.GaussianDpEvent(1.0), capacity=4
            )


class TestOtherAccountants:
    @pytest.mark.parametrize("room", [(None, None), (5, 100)])
    @pytest.mark.parametrize("accountant", ["rdp", "gdp"])
    def test_are_refused(self, accountant, room):
        scheme = CappedPoisson(0.1, 4, *room)
        with pytest.raises(dp_accounting.UnsupportedEventError, match="pld"):
            _epsilon(scheme, 1.0, 10, accountant=accountant)

    def test_deltas_below_the_rounding_have_no_bound(self):
        assert _epsilon(CappedPoisson(0.1, 4), 2.0, 10**4, 1e-15) == math.inf
        assert 0 < _delta(CappedPoisson(0.1, 4), 2.0, 10, 40.0) < 1e-9

    def test_one_of_each_has_them(self):
        one = _epsilon(CappedPoisson(0.1, 1), 1.0, 10, accountant="rdp")
        assert one == accounting.epsilon(1.0, 10, Poisson(0.1), 1e-6, "rdp")


def test_noise_is_found_for_a_budget():
    scheme = CappedPoisson(0.01, 8)
    z = accounting.noise_multiplier(3.0, 1e-6, 100, scheme, unit="person")
    assert 2.9 < _epsilon(scheme, z, 100) <= 3.0


@pytest.mark.parametrize("z", [1e-300, 0.5, 1e3, 1e9, 1e155])
def test_extremes_are_numbers(z):
    for scheme in (CappedPoisson(1e-12, 5), CappedPoisson(0.3, 5, 9, 30)):
        assert _epsilon(scheme, z, 10) >= 0
        assert 0 <= _delta(scheme, z, 10, 1.0) <= 1
