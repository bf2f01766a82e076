"""The privacy cost of a search: known bounds, and draws of the right distribution."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tfdpclip import accounting, correlated
from tfdpclip.accounting import _rdp
from tfdpclip.sampling import (
    FixedSize,
    FullBatch,
    MinSeparation,
    Poisson,
    ThresholdedCounts,
)
from tfdpclip.tuning import RandomStopping, TrainingPlan, search_privacy

DELTA = 1e-5
PLAN = TrainingPlan(Poisson(0.01), 2.0, 1000)


@pytest.mark.parametrize("mean", [2.0, 20.0, 300.0])
def test_random_stopping_agrees_with_another_implementation(mean):
    accountant = dp_accounting.rdp.RdpAccountant(_rdp.ORDERS)
    accountant.compose(
        dp_accounting.dp_event.RepeatAndSelectDpEvent(PLAN.event, mean, 1)
    )
    found = search_privacy([PLAN], DELTA, RandomStopping(mean))
    assert found.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)
    assert found.epsilon > found.single_epsilon


def test_composition_is_that_of_all_runs():
    other = TrainingPlan(Poisson(0.02), 3.0, 500)
    found = search_privacy([PLAN, other, PLAN], DELTA)
    total = dp_accounting.ComposedDpEvent([PLAN.event, other.event, PLAN.event])
    assert found.epsilon == pytest.approx(accounting.event_epsilon(total, DELTA))
    assert found.single_epsilon < found.epsilon
    one = search_privacy([PLAN], DELTA)
    assert one.epsilon == pytest.approx(
        accounting.epsilon(2.0, 1000, Poisson(0.01), DELTA)
    )


def spent_before(scheme=None, **options):
    ledger = accounting.Ledger(1e-3, "gdp")
    ledger.begin(noise_multiplier=1.5, sampling=scheme or Poisson(0.02), **options)
    ledger.record(400)
    return ledger


def test_what_was_spent_before_composes_with_all_runs_once():
    spent = spent_before()
    found = search_privacy([PLAN, PLAN], DELTA, spent=spent)
    events = [Poisson(0.02).event(1.5, 400), PLAN.event, PLAN.event]
    total = dp_accounting.ComposedDpEvent(events)
    assert found.epsilon == pytest.approx(accounting.event_epsilon(total, DELTA))
    one = dp_accounting.ComposedDpEvent(events[:2])
    assert found.single_epsilon == pytest.approx(accounting.event_epsilon(one, DELTA))
    assert "before" in found.method


def test_what_was_spent_before_adds_to_random_stopping_at_every_order():
    search, spent = RandomStopping(20.0), spent_before()
    found = search_privacy([PLAN], DELTA, search, spent)
    accountant = dp_accounting.rdp.RdpAccountant(_rdp.ORDERS)
    accountant.compose(
        dp_accounting.dp_event.RepeatAndSelectDpEvent(PLAN.event, 20.0, 1)
    )
    accountant.compose(Poisson(0.02).event(1.5, 400))
    assert found.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def test_thresholds_of_earlier_vocabularies_use_delta_of_random_stopping():
    def after(*schemes, delta):
        ledger = accounting.Ledger(DELTA)
        for scheme in schemes:
            ledger.begin(noise_multiplier=9.0, sampling=scheme, change=True)
            ledger.record(1)
        search = RandomStopping(20.0)
        return search_privacy([full], delta, search, ledger).epsilon

    full = TrainingPlan(FullBatch(), 9.0, 1)
    thresholds = ThresholdedCounts(DELTA / 4)
    assert after(thresholds, thresholds, delta=DELTA) == pytest.approx(
        after(FullBatch(), FullBatch(), delta=DELTA / 2)
    )
    assert after(thresholds, delta=DELTA / 4) == math.inf


def test_faults_before_the_search_are_faults_of_it():
    for options, words in (
        ({"seed": 3}, "a seed was fixed"),
        ({"observed": False}, "not observed"),
    ):
        found = search_privacy([PLAN], DELTA, spent=spent_before(**options))
        assert words in str(found)
        assert bool(found.not_private) == ("seed" in options)
    with pytest.raises(ValueError, match="neighbouring relations"):
        search_privacy([PLAN], DELTA, spent=spent_before(FixedSize(2, 100)))
    with pytest.raises(ValueError, match="spent must be a Ledger or None.*load"):
        search_privacy([PLAN], DELTA, spent=2.0)
    nothing = search_privacy([PLAN], DELTA, spent=accounting.Ledger(1e-5))
    assert nothing == search_privacy([PLAN], DELTA)


def test_runs_that_were_made_are_counted_by_their_ledgers():
    scheme = MinSeparation(1000, 100)
    matrix = correlated.SquareRootToeplitz(4)
    ledger = accounting.Ledger(1e-3, "rdp")
    ledger.begin(noise_multiplier=3.0, sampling=scheme, noise=matrix, horizon=20)
    ledger.record(20)
    other = TrainingPlan(scheme, 5.0, 10)
    found = search_privacy([ledger, other, ledger], DELTA)
    total = dp_accounting.ComposedDpEvent([ledger.event(), ledger.event(), other.event])
    assert found.epsilon == pytest.approx(accounting.event_epsilon(total, DELTA))
    one = accounting.event_epsilon(ledger.event(), DELTA)
    assert found.single_epsilon == pytest.approx(one) and "3 runs" in found.method
    # This cost is of the choice; the statement names the assumptions of the runs.
    assert "is not counted" in str(ledger.statement())
    assert "is not counted" not in str(found)
    assert set(ledger.statement().assumptions) - set(found.assumptions) == {
        "a choice among several runs, or of settings, is not counted"
    }


def test_ledgers_that_do_not_say_what_ran_are_refused():
    seeded = search_privacy([spent_before(), spent_before(seed=3)], DELTA)
    assert seeded.not_private == (
        "in a run, a seed was fixed, so noise or draws can be repeated",
    )
    with pytest.raises(ValueError, match="a ledger has no phase.*if ledger.steps"):
        search_privacy([spent_before(), accounting.Ledger(DELTA)], DELTA)
    with pytest.raises(ValueError, match="could have been drawn"):
        search_privacy([spent_before()], DELTA, RandomStopping(5.0))
    with pytest.raises(ValueError, match="neighbouring relations"):
        search_privacy([PLAN, spent_before(FixedSize(2, 100))], DELTA)


def test_random_stopping_covers_the_worst_of_several_plans():
    other = TrainingPlan(Poisson(0.5), 20.0, 30)
    search = RandomStopping(10.0)
    alone = [search_privacy([p], DELTA, search).epsilon for p in (PLAN, other)]
    both = search_privacy([PLAN, other], DELTA, search).epsilon
    assert both >= max(alone)


def test_random_stopping_is_cheaper_than_many_runs():
    price = [
        search_privacy([PLAN], DELTA, RandomStopping(mean)).epsilon
        for mean in (10, 1000)
    ]
    assert price[1] < 2 * price[0]
    assert price[1] < search_privacy([PLAN] * 1000, DELTA).epsilon / 5


def test_draws_are_geometric():
    rng, p = np.random.default_rng(0), stats.geom(1 / 6).pmf(np.arange(1, 13))
    drawn = np.bincount([RandomStopping(6.0).draw(rng) for _ in range(20_000)])
    assert drawn[0] == 0
    bins = np.append(p, 1 - p.sum()) * 20_000
    seen = np.append(drawn[1:13], drawn[13:].sum())
    # Chi-squared with 12 degrees of freedom; false alarms 1e-7.
    assert np.sum((seen - bins) ** 2 / bins) < stats.chi2.ppf(1 - 1e-7, 12)


def test_draws_have_fresh_entropy():
    # 20 equal draws in a row have a probability below 1e-30 for this mean.
    assert len({RandomStopping(1000.0).draw() for _ in range(20)}) > 1


def test_text():
    text = str(search_privacy([PLAN] * 3, DELTA))
    assert "composition of 3 runs" in text and "add or remove one record" in text
    assert "public data" in text
    text = str(search_privacy([PLAN], DELTA, RandomStopping(5.0)))
    assert "nothing but the best run" in text and "geometric" in text


def test_runs_without_noise_are_not_private():
    bare = TrainingPlan(Poisson(0.01), 0.0, 10)
    for search in (None, RandomStopping(5.0)):
        found = search_privacy([PLAN, bare], DELTA, search)
        assert found.epsilon == math.inf
        assert "was not private: a run has no noise" in str(found)


def ledger_of(unit):
    ledger = accounting.Ledger(DELTA)
    ledger.begin(noise_multiplier=2.0, sampling=Poisson(0.01), unit=unit)
    ledger.record(10)
    return ledger


def test_people_and_examples_are_not_put_together():
    people, examples = ledger_of("person"), ledger_of("example")
    of_people = TrainingPlan(Poisson(0.01), 2.0, 10, unit="person")
    for plans, spent in (
        ([people, examples], None),
        ([PLAN], people),
        ([of_people, examples], None),
    ):
        with pytest.raises(ValueError, match="protect people"):
            search_privacy(plans, DELTA, spent=spent)
    told = search_privacy([people, of_people], DELTA)
    assert told.unit == "one person, whose examples are clipped together"
    assert told.unit in str(told)


def test_a_run_counts_with_its_unit():
    of_batches = TrainingPlan(Poisson(0.01), 2.0, 100, unit="batch")
    halved = TrainingPlan(Poisson(0.01), 1.0, 100)
    stopping = RandomStopping(3.0)
    for search in (None, stopping):
        told = [search_privacy([p], DELTA, search) for p in (of_batches, halved)]
        assert told[0].epsilon == pytest.approx(told[1].epsilon)
    with pytest.raises(ValueError, match="unit"):
        TrainingPlan(Poisson(0.01), 2.0, 100, unit="row")


def test_bad_arguments():
    for bad in (math.nan, -1.0, 0.0, 0.5, 1.0, True, "x"):
        with pytest.raises(ValueError, match="mean"):
            RandomStopping(bad)
    with pytest.raises(ValueError, match="plans must not be empty"):
        search_privacy([], DELTA)
    with pytest.raises(ValueError, match="delta"):
        search_privacy([PLAN], math.nan)
    with pytest.raises(ValueError, match="different neighbouring relations"):
        search_privacy([PLAN, TrainingPlan(FixedSize(10, 1000), 2.0, 10)], DELTA)
    with pytest.raises(ValueError, match="sampling"):
        TrainingPlan(0.01, 1.0, 10)
    with pytest.raises(ValueError, match="noise_multiplier"):
        TrainingPlan(Poisson(0.01), math.nan, 10)
    with pytest.raises(ValueError, match="steps"):
        TrainingPlan(Poisson(0.01), 1.0, 1.5)
