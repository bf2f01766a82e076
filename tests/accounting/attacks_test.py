"""No attack exceeds the statement's bounds, and some attacks meet them."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from tfdpclip import accounting, sampling
from tfdpclip.accounting import _pld
from tfdpclip.accounting.attacks import percent
from tfdpclip.sampling import events

_EVENTS = {
    "poisson": sampling.Poisson(0.05).event(1.0, 200),
    "allocation": sampling.RandomAllocation(20).event(1.0, 45),
    "fixed": sampling.FixedSize(10, 100).event(3.0, 50),
    "full": sampling.FullBatch().event(4.0, 9),
}
_RATES = (1e-4, 0.001, 0.01, 0.1, 0.5, 0.9)


def test_of_a_gaussian_bounds_are_those_of_the_best_test():
    found = accounting.attack_bounds(_EVENTS["full"], _RATES)
    mu = 3 / 4
    expected = stats.norm.sf(stats.norm.isf(_RATES) - mu)
    np.testing.assert_allclose(found.true_positive_rates, expected, rtol=1e-12)
    total_variation = 2 * stats.norm.cdf(mu / 2) - 1
    assert found.advantage == pytest.approx(total_variation, rel=1e-9)


@pytest.mark.parametrize("name", ["poisson", "allocation", "fixed"])
def test_bounds_are_the_least_of_those_of_every_epsilon(name):
    event = _EVENTS[name]
    found = accounting.attack_bounds(event, _RATES)
    composed = _pld._compose(events.leaves(event))
    grid = np.linspace(-2, 6, 65)
    deltas = np.array([[order.delta(eps) for eps in grid] for order in composed.orders])
    for rate, power in zip(_RATES[1:-1], found.true_positive_rates[1:-1], strict=True):
        # Of a few epsilons, the best is a little above the least of all.
        least = np.min(np.exp(grid) * rate + deltas, axis=1).max()
        assert rate < power <= least * 1.005
        assert power >= 0.98 * least
    assert found.advantage == pytest.approx(composed.delta(0.0), rel=0.005)


@pytest.mark.parametrize("name", list(_EVENTS))
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_bounds_are_below_those_of_one_epsilon(name, delta):
    event = _EVENTS[name]
    epsilon = accounting.event_epsilon(event, delta)
    ours = accounting.attack_bounds(event, _RATES)
    theirs = accounting.attack_bounds_of(epsilon, delta, _RATES)
    for one, other in zip(
        ours.true_positive_rates, theirs.true_positive_rates, strict=True
    ):
        assert one <= other * 1.005
    assert ours.advantage < theirs.advantage


def test_the_likelihood_test_finds_as_much_as_the_bounds_say():
    # 200,000 runs with the record, and as many without: rates are off by more than six
    # deviations in one of 10^8.
    rng, z, steps, runs = np.random.default_rng(1), 1.0, 20, 200_000

    def losses(moved):
        noise = rng.standard_normal((runs, steps))
        noise[:, 0] += moved / z
        return np.log(np.exp(noise / z - 0.5 / z**2).mean(axis=1))

    without, with_record = losses(0.0), losses(1.0)
    found = accounting.attack_bounds(sampling.RandomAllocation(20).event(z, 20))
    for rate, power in zip(
        found.false_positive_rates, found.true_positive_rates, strict=True
    ):
        limit = np.quantile(without, 1 - rate)
        seen = np.mean(with_record > limit)
        # The limit has an error, too: its rate is off by as much as a count's.
        slope = power / rate
        error = math.sqrt((power + slope**2 * rate) / runs)
        assert abs(seen - power) < 6 * error
    seen = np.mean(with_record > 0) - np.mean(without > 0)
    assert abs(seen - found.advantage) < 6 * math.sqrt(0.5 / runs) + 0.002


def test_nothing_ran_and_nothing_hidden():
    nothing = accounting.attack_bounds(dp_accounting.NoOpDpEvent())
    assert nothing.true_positive_rates == nothing.false_positive_rates
    assert nothing.advantage == 0
    everything = accounting.attack_bounds(sampling.FullBatch().event(0.0, 1))
    assert everything.true_positive_rates == (1.0, 1.0)
    assert everything == accounting.attack_bounds_of(math.inf, 0.5)
    assert accounting.attack_bounds_of(0.0, 0.0).advantage == 0
    tiny = accounting.attack_bounds(sampling.Poisson(0.5).event(1e-3, 1))
    assert all(0.49 < rate <= 1 for rate in tiny.true_positive_rates)


def test_a_statement_says_them_beside_those_of_its_epsilon():
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=sampling.RandomAllocation(20))
    ledger.record(45)
    statement = ledger.statement()
    assert statement.attacks == accounting.attack_bounds(_EVENTS["allocation"])
    numbers = statement.attacks.numbers()
    assert numbers in str(statement)
    alone = accounting.attack_bounds_of(statement.epsilon, 1e-5).numbers()
    assert f"{numbers} (by epsilon and delta alone, {alone})" in statement.render(
        "markdown"
    )
    content = json.loads(statement.render("json"))["attacks"]
    assert content["false_positive_rates"] == [0.001, 0.01]
    assert content["advantage"] == statement.attacks.advantage


def test_a_vocabulary_adds_its_delta_to_what_attacks_find():
    """The best test, if a value of the record is released with probability t."""
    z, delta = 2.0, 0.01
    t = -math.expm1(-delta)
    found = accounting.attack_bounds(
        sampling.ThresholdedCounts(delta).event(z, 1), _RATES
    )
    rates = np.array(_RATES)
    best = (1 - t) * stats.norm.sf(stats.norm.isf(rates) - 1 / z) + t
    assert np.all(found.true_positive_rates >= best)
    # The reverse: the test's result on the data without the record is mixed.
    reverse = stats.norm.sf(stats.norm.isf(np.minimum(1, rates / (1 - t))) - 1 / z)
    assert np.all(found.true_positive_rates >= reverse)
    slope = np.exp(stats.norm.isf(rates) / z)
    assert np.all(found.true_positive_rates <= best + delta * (1 + slope))
    total_variation = 2 * stats.norm.cdf(1 / (2 * z)) - 1
    assert found.advantage == pytest.approx(total_variation + delta, rel=1e-9)


def test_statistics_and_training_have_the_bounds_of_their_whole_privacy_loss():
    ledger = accounting.Ledger(delta=1e-6)
    ledger.begin(noise_multiplier=14.0, sampling=sampling.ThresholdedCounts(3e-8))
    ledger.record(2)
    ledger.begin(noise_multiplier=2.2, sampling=sampling.Poisson(0.05), change=True)
    ledger.record(300)
    found = ledger.statement()
    alone = accounting.attack_bounds_of(found.epsilon, 1e-6)
    assert found.attacks.advantage < alone.advantage / 3
    assert found.attacks.true_positive_rates[0] < alone.true_positive_rates[0]


def test_of_moments_a_statement_says_what_its_epsilon_implies():
    ledger = accounting.Ledger(delta=1e-5, accountant="rdp")
    ledger.begin(noise_multiplier=1.0, sampling=sampling.Poisson(0.01))
    ledger.record(45)
    found = ledger.statement()
    assert found.attacks == accounting.attack_bounds_of(found.epsilon, 1e-5)
    assert "by epsilon and delta alone" in found.render("markdown")


@pytest.mark.parametrize("noise, seed", [(0.0, None), (1.0, 3)])
def test_of_what_is_not_private_nothing_is_said(noise, seed):
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=noise, sampling=sampling.Poisson(0.1), seed=seed)
    ledger.record(1)
    statement = ledger.statement()
    assert statement.attacks is None
    assert "false alarms" not in str(statement) + statement.render("markdown")


def test_rates_in_words_are_never_less():
    for rate in np.concatenate([np.logspace(-9, 0, 200), [0.001, 0.01, 0.5, 1 / 3]]):
        said = float(percent(rate).removesuffix(" %")) / 100
        assert rate * (1 - 1e-8) <= said <= rate * 1.0101
    assert percent(0.0) == "0 %"


@pytest.mark.parametrize("rates", [(1.5,), (-0.1,), (math.nan,), "0.1", 0.1])
def test_hostile_rates(rates):
    with pytest.raises(ValueError, match="false_positive_rates"):
        accounting.attack_bounds(_EVENTS["full"], rates)
    with pytest.raises(ValueError, match="epsilon"):
        accounting.attack_bounds_of(-1.0, 0.1)
    with pytest.raises(ValueError, match="delta"):
        accounting.attack_bounds_of(1.0, 1.1)
    with pytest.raises(ValueError, match="event"):
        accounting.attack_bounds("full")


@pytest.mark.parametrize("name", ["poisson", "allocation"])
def test_the_curves_of_both_directions_mirror_each_other(name):
    """The bend of the worse curve, where both cross, is no error of the bounds."""
    one, other = _pld._compose(events.leaves(_EVENTS[name])).orders
    rates = np.linspace(0.001, 0.95, 40)
    mirrored = 1 - other.power(1 - one.power(rates))
    # Both are upper bounds, so the second bound is not larger.
    assert np.all(mirrored <= rates + 1e-9)
    np.testing.assert_allclose(mirrored, rates, atol=1e-3)
    cross = optimize.brentq(
        lambda rate: np.subtract(*(o.power(np.array([rate]))[0] for o in (one, other))),
        0.1,
        0.6,
    )
    assert one.power(np.array([cross]))[0] == pytest.approx(1 - cross, abs=1e-3)
