"""Epsilon, delta, noise and steps agree with each other and refuse nonsense."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpclip import accounting, sampling
from tfdpclip.accounting import _rdp, search
from tfdpclip.clipping import QuantileClip

_DELTA = 1e-5
_SCHEMES = [
    sampling.Poisson(0.01),
    sampling.Poisson(0.01, 30, 1000),
    sampling.FixedSize(10, 1000),
    # Its divergence is a sum over how often a record is drawn: seconds each.
    pytest.param(
        sampling.FixedSize(10, 1000, replacement=True), marks=pytest.mark.slow
    ),
    sampling.ShuffledEpochs(10, 1000),
    sampling.FullBatch(),
]


@pytest.mark.parametrize("scheme", _SCHEMES, ids=repr)
class TestRoundTrips:
    @pytest.mark.thinned(2)
    def test_noise(self, scheme):
        for target in (0.5, 4.0):
            z = accounting.noise_multiplier(target, _DELTA, 200, scheme)
            spent = accounting.epsilon(z, 200, scheme, _DELTA)
            assert target * (1 - 1e-4) <= spent <= target

    def test_steps(self, scheme):
        target = 2.0
        steps = accounting.steps_for(target, _DELTA, 3.0, scheme)
        if steps:
            assert accounting.epsilon(3.0, steps, scheme, _DELTA) <= target
        assert accounting.epsilon(3.0, steps + 1, scheme, _DELTA) > target

    def test_delta(self, scheme):
        epsilon = accounting.epsilon(2.0, 50, scheme, _DELTA)
        assert accounting.delta(2.0, 50, scheme, epsilon) == pytest.approx(
            _DELTA, rel=1e-3
        )

    def test_epsilon_grows_with_the_steps(self, scheme):
        steps = [0, 1, 10, 100]
        spent = [accounting.epsilon(2.0, t, scheme, _DELTA) for t in steps]
        assert np.all(np.diff(spent) >= 0)

    def test_batch_clipping_needs_twice_the_noise_or_is_replace_one(self, scheme):
        alone = accounting.noise_multiplier(1.0, _DELTA, 50, scheme)
        batch = accounting.noise_multiplier(1.0, _DELTA, 50, scheme, unit="batch")
        factor = accounting.sensitivity_factor(scheme.neighboring_relation)
        # The cost of a tight capacity does not scale with the noise.
        assert batch == pytest.approx(alone * 2 / factor, rel=0.01)


@pytest.mark.parametrize("past", [0.0, 0.5])
def test_the_least_noise_is_where_epsilon_jumps(past):
    tried = []

    def spent(z, coarseness=1.0):
        tried.append(z)
        return past if z >= 1e-3 * coarseness else 1e8 / z

    z = search.least_noise(spent, 1.0, True)
    assert 1e-3 <= z <= 1e-3 * (1 + 1e-6)
    assert len(tried) < 100


def test_renyi_round_trips():
    scheme = sampling.Poisson(0.01)
    z = accounting.noise_multiplier(1.0, _DELTA, 500, scheme, "rdp")
    spent = accounting.epsilon(z, 500, scheme, _DELTA, "rdp")
    assert 0.9999 <= spent <= 1.0
    steps = accounting.steps_for(1.0, _DELTA, z, scheme, "rdp")
    assert 500 <= steps <= 502
    delta = accounting.delta(z, 500, scheme, spent, "rdp")
    assert delta == pytest.approx(_DELTA, rel=0.01)
    assert accounting.epsilon(z, 500, scheme, _DELTA) < spent


def test_gdp_approximates_sampling_and_is_exact_without():
    full = sampling.FullBatch()
    assert accounting.epsilon(2.0, 7, full, _DELTA, "gdp") == accounting.epsilon(
        2.0, 7, full, _DELTA
    )
    scheme = sampling.Poisson(0.01)
    exact = accounting.epsilon(2.0, 10_000, scheme, _DELTA)
    assert accounting.epsilon(2.0, 10_000, scheme, _DELTA, "gdp") == pytest.approx(
        exact, rel=0.02
    )
    z = accounting.noise_multiplier(1.0, _DELTA, 10_000, scheme, "gdp")
    assert accounting.epsilon(z, 10_000, scheme, _DELTA, "gdp") <= 1.0
    assert 0 < accounting.delta(2.0, 100, scheme, 1.0, "gdp") < 1


def test_batches_can_be_given_for_their_scheme():
    batches = sampling.Poisson(0.1).batches(np.zeros((100, 1)))
    assert accounting.epsilon(1.0, 10, batches, _DELTA) == accounting.epsilon(
        1.0, 10, batches.scheme, _DELTA
    )


def test_steps_already_spent_are_taken_off():
    scheme = sampling.Poisson(0.01)
    whole = accounting.steps_for(1.0, _DELTA, 2.0, scheme)
    rest = accounting.steps_for(
        1.0, _DELTA, 2.0, scheme, spent=scheme.event(2.0, whole - 7)
    )
    assert rest == 7
    spent = scheme.event(2.0, whole)
    assert accounting.steps_for(1.0, _DELTA, 2.0, scheme, spent=spent) == 0


class TestExtremes:
    def test_no_budget_limit(self):
        scheme = sampling.Poisson(0.01)
        assert accounting.noise_multiplier(math.inf, _DELTA, 10, scheme) == 0.0
        assert accounting.noise_multiplier(1.0, _DELTA, 0, scheme) == 0.0
        assert accounting.steps_for(math.inf, _DELTA, 1.0, scheme) == 10**12
        assert accounting.steps_for(1.0, _DELTA, 0.0, scheme) == 0

    def test_no_noise(self):
        scheme = sampling.Poisson(0.01)
        for accountant in accounting.accountants.ACCOUNTANTS:
            assert accounting.epsilon(0, 10, scheme, _DELTA, accountant) == math.inf
            assert accounting.delta(0, 10, scheme, 1.0, accountant) == 1.0

    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    def test_hardly_any_noise(self, accountant):
        spent = accounting.epsilon(0.01, 3, sampling.Poisson(0.01), _DELTA, accountant)
        assert spent > 1000

    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    def test_a_great_deal_of_noise(self, accountant):
        scheme = sampling.Poisson(0.01)
        spent = accounting.epsilon(1e6, 1000, scheme, _DELTA, accountant)
        # RDP cannot say less than log(1 / delta) / (the largest order - 1), about.
        assert 0 <= spent < (1e-3 if accountant == "pld" else 4e-3)

    @pytest.mark.slow
    def test_huge_numbers_of_steps(self):
        scheme = sampling.Poisson(0.001)
        spent = accounting.epsilon(1.0, 10**8, scheme, _DELTA)
        mu = accounting.subsampled_gdp_mu(1.0, 0.001, 10**8)
        assert spent == pytest.approx(accounting.gdp_epsilon(mu, _DELTA), rel=0.2)
        full = accounting.epsilon(1e6, 10**12, sampling.FullBatch(), _DELTA)
        assert full == pytest.approx(accounting.gdp_epsilon(1.0, _DELTA))

    def test_tiny_deltas(self):
        scheme = sampling.Poisson(0.01)
        values = [
            accounting.epsilon(1.0, 100, scheme, delta)
            for delta in (1e-3, 1e-6, 1e-10, 1e-15, 1e-30, 1e-100)
        ]
        assert all(map(math.isfinite, values))
        assert values == sorted(values)

    def test_small_budgets_need_much_noise(self):
        z = accounting.noise_multiplier(1e-3, 1e-9, 1, sampling.Poisson(0.01))
        assert accounting.epsilon(z, 1, sampling.Poisson(0.01), 1e-9) <= 1e-3

    def test_a_single_record(self):
        assert accounting.epsilon(1.0, 1, sampling.FixedSize(1, 1), _DELTA) > 0
        assert accounting.epsilon(1.0, 1, sampling.FixedSize(1, 1, True), _DELTA) > 0


_BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, "1", None, [1.0]]


class TestHostileArguments:
    @pytest.mark.parametrize("value", _BAD_NUMBERS)
    def test_noise_multiplier(self, value):
        scheme = sampling.Poisson(0.1)
        for call in (
            lambda: accounting.epsilon(value, 1, scheme, _DELTA),
            lambda: accounting.delta(value, 1, scheme, 1.0),
            lambda: accounting.steps_for(1.0, _DELTA, value, scheme),
        ):
            with pytest.raises(ValueError, match="noise_multiplier"):
                call()

    @pytest.mark.parametrize("value", [*_BAD_NUMBERS, 0.0, 1.0, 1.5])
    def test_delta(self, value):
        scheme = sampling.Poisson(0.1)
        for call in (
            lambda: accounting.epsilon(1.0, 1, scheme, value),
            lambda: accounting.noise_multiplier(1.0, value, 1, scheme),
            lambda: accounting.steps_for(1.0, value, 1.0, scheme),
            lambda: accounting.gdp_epsilon(1.0, value),
            lambda: accounting.gdp_mu(1.0, value),
            lambda: accounting.Ledger(value),
            lambda: accounting.cohort_for(1.0, value, 1000, 1, 0.5, 100),
        ):
            with pytest.raises(ValueError, match="delta"):
                call()

    @pytest.mark.parametrize("value", [math.nan, -math.inf, -1.0, 0.0, "1", None])
    def test_epsilon(self, value):
        scheme = sampling.Poisson(0.1)
        for call in (
            lambda: accounting.noise_multiplier(value, _DELTA, 1, scheme),
            lambda: accounting.steps_for(value, _DELTA, 1.0, scheme),
            lambda: accounting.cohort_for(value, _DELTA, 1000, 1, 0.5, 100),
        ):
            with pytest.raises(ValueError, match="epsilon"):
                call()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1, 1.5, "1", None])
    def test_steps(self, value):
        scheme = sampling.Poisson(0.1)
        for call in (
            lambda: accounting.epsilon(1.0, value, scheme, _DELTA),
            lambda: accounting.delta(1.0, value, scheme, 1.0),
            lambda: accounting.noise_multiplier(1.0, _DELTA, value, scheme),
        ):
            with pytest.raises(ValueError, match="steps"):
                call()

    @pytest.mark.parametrize("value", [0.1, None, "poisson", object()])
    def test_sampling(self, value):
        with pytest.raises(ValueError, match="sampling must be a scheme"):
            accounting.epsilon(1.0, 1, value, _DELTA)

    def test_names(self):
        scheme = sampling.Poisson(0.1)
        with pytest.raises(ValueError, match="accountant must be one of"):
            accounting.epsilon(1.0, 1, scheme, _DELTA, "prv")
        with pytest.raises(ValueError, match="unit must be one of"):
            accounting.epsilon(1.0, 1, scheme, _DELTA, unit="layer")
        with pytest.raises(ValueError, match="sensitivity"):
            accounting.epsilon(1.0, 1, scheme, _DELTA, sensitivity=0.0)


class TestCohort:
    def test_scales_everything_by_the_same_factor(self):
        plan = accounting.cohort_for(2.0, 1e-6, 10**6, 1000, 0.1, 100)
        assert plan.epsilon <= 2.0
        assert plan.noise_multiplier == pytest.approx(0.1 * plan.scale)
        assert plan.clients_per_round == math.ceil(100 * plan.scale)
        assert plan.count_stddev == plan.clients_per_round / 20
        assert plan.gradient_noise_multiplier == accounting.split_noise_multiplier(
            plan.noise_multiplier, [plan.count_stddev]
        )
        assert plan.sampling == sampling.Poisson(plan.clients_per_round / 10**6)
        # Nothing noticeably smaller is enough.
        smaller = 0.99 * plan.scale
        assert (
            accounting.epsilon(
                0.1 * smaller, 1000, sampling.Poisson(100 * smaller / 10**6), 1e-6
            )
            > 2.0
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["pld", "rdp"])
    @pytest.mark.parametrize("how_drawn", ["poisson", "fixed_size"])
    def test_never_shrinks_a_trial(self, how, how_drawn):
        # At 0.8 of this trial the target would be met as well, which says nothing
        # of the utility of so small a cohort.
        plan = accounting.cohort_for(
            8.0, 1e-5, 10**5, 200, 1.5, 50, accountant=how, sampling=how_drawn
        )
        assert (plan.scale, plan.clients_per_round) == (1.0, 50)
        assert plan.noise_multiplier == 1.5 and plan.count_stddev == 2.5
        spent = accounting.epsilon(1.5, 200, plan.sampling, 1e-5, how)
        assert plan.epsilon == spent < 8
        less = sampling.FixedSize(40, 10**5)
        if how_drawn == "poisson":
            less = sampling.Poisson(40 / 10**5)
        assert accounting.epsilon(1.2, 200, less, 1e-5, how) < 8

    @pytest.mark.slow
    def test_a_trial_of_the_whole_population(self):
        plan = accounting.cohort_for(50.0, 1e-3, 100, 1, 2.0, 100)
        assert plan.scale == 1.0 and plan.clients_per_round == 100
        with pytest.raises(ValueError, match="too small.*population of about"):
            accounting.cohort_for(0.5, 1e-3, 100, 10, 2.0, 100, accountant="rdp")

    @pytest.mark.slow
    def test_table_1_comes_from_this_recipe(self):
        # EMNIST-CR: m = 513, z = 0.513 after a trial with m = 100, z = 0.1.
        delta = 1e6**-1.1
        plan = accounting.cohort_for(
            5.0, delta, 10**6, 1500, 0.1, 100, accountant="rdp",
            sampling="fixed_size", sensitivity=1.0,
        )  # fmt: skip
        assert plan.clients_per_round == pytest.approx(513, abs=2)
        assert plan.noise_multiplier == pytest.approx(0.513, abs=2e-3)

    @pytest.mark.slow
    def test_a_population_too_small_says_what_would_do(self):
        with pytest.raises(ValueError, match="too small.*population of about") as info:
            accounting.cohort_for(1.0, 1e-6, 5000, 200, 0.1, 50, accountant="rdp")
        enough = float(str(info.value).split("about ")[-1].split()[0])
        plan = accounting.cohort_for(
            1.0, 1e-6, int(enough), 200, 0.1, 50, accountant="rdp"
        )
        assert plan.epsilon <= 1.0

    def test_the_count_of_a_small_trial_has_the_noise_of_the_clip_rule(self):
        plan = accounting.cohort_for(100.0, 1e-6, 1000, 10, 1.0, 10)
        assert (plan.clients_per_round, plan.scale) == (10, 1.0)
        stddevs = accounting.count_stddevs(QuantileClip(), 10, 1.0)
        assert (plan.count_stddev,) == stddevs
        z_g = accounting.split_noise_multiplier(1.0, stddevs)
        assert plan.gradient_noise_multiplier == z_g

    def test_an_infeasible_trial(self):
        with pytest.raises(ValueError, match="no clip norm can follow"):
            accounting.cohort_for(1.0, 1e-6, 1000, 10, 1.0, 1)
        with pytest.raises(ValueError, match="clients_per_round"):
            accounting.cohort_for(1.0, 1e-6, 50, 10, 0.1, 100)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("rate, steps", [(1e-3, 1), (0.02, 1000), (0.5, 30)])
@pytest.mark.parametrize("noise", [0.4, 1.0, 6.0])
def test_no_order_that_was_left_out_bounds_closer(noise, rate, steps, delta):
    """The search over a few orders finds the epsilon of the search over all orders."""
    gaussian = dp_accounting.GaussianDpEvent(noise)
    leaves = {
        dp_accounting.PoissonSampledDpEvent(rate, gaussian): steps,
        gaussian: 1,
    }
    curve = _rdp.curve(leaves)
    expected, _ = rdp_privacy_accountant.compute_epsilon(_rdp.ORDERS, curve, delta)
    assert _rdp.epsilon(leaves, delta) == expected


def test_noise_is_found_beside_what_has_been_spent():
    """The least noise with which past and future steps together fit the budget."""
    before = sampling.Poisson(0.05).event(1.5, 40)
    scheme = sampling.Poisson(0.1)
    for accountant in ("pld", "rdp"):
        spent = accounting.event_epsilon(before, _DELTA, accountant)
        z = accounting.noise_multiplier(
            2 * spent, _DELTA, 30, scheme, accountant, spent=before
        )
        parts = dp_accounting.ComposedDpEvent([before, scheme.event(z, 30)])
        both = accounting.event_epsilon(parts, _DELTA, accountant)
        assert 2 * spent * (1 - 1e-4) <= both <= 2 * spent
        alone = accounting.noise_multiplier(2 * spent, _DELTA, 30, scheme, accountant)
        assert z > alone
        with pytest.raises(ValueError, match="is spent: the steps that ran took"):
            accounting.noise_multiplier(
                spent, _DELTA, 30, scheme, accountant, spent=before
            )
