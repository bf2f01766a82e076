"""Federated rounds cannot exceed their budget or differ from the accounted sampling."""

import math

import numpy as np
import pytest

from tests.stand_in_aggregator import Aggregator
from tfdpclip import accounting
from tfdpclip.accounting import BudgetExceededError, PrivacyMismatchError, RoundBudget
from tfdpclip.keras import PrivateStatistics
from tfdpclip.sampling import FixedSize, Poisson, RandomAllocation

CLIENTS = [f"client {i}" for i in range(200)]


def budget_for(rounds, scheme=None, noise_multiplier=1.0, **options):
    scheme = scheme or Poisson(0.1)
    epsilon = accounting.epsilon(noise_multiplier, rounds, scheme, 1e-5, unit="client")
    aggregator = Aggregator(noise_multiplier)
    cohorts = scheme.cohorts(CLIENTS)
    return RoundBudget(epsilon * 1.0001, 1e-5, cohorts, aggregator, **options)


@pytest.mark.parametrize("scheme", [Poisson(0.1), FixedSize(20, len(CLIENTS))])
def test_exactly_the_affordable_rounds_run(scheme):
    budget = budget_for(7, scheme)
    assert budget.rounds_left == 7
    for done in range(7):
        with budget.round() as cohort:
            assert set(cohort) <= set(CLIENTS)
            assert budget.rounds == done + 1
    assert budget.rounds_left == 0
    with pytest.raises(BudgetExceededError, match="7 rounds cost"), budget.round():
        pytest.fail("a round ran beyond the budget")
    assert budget.rounds == 7
    assert budget.epsilon <= budget.epsilon_budget


def test_the_cohort_is_drawn_by_the_accounted_scheme_and_never_twice():
    cohorts = Poisson(0.1).cohorts(CLIENTS, seed=3)
    budget = RoundBudget(math.inf, 1e-5, cohorts, Aggregator(1.0))
    drawn = []
    for _ in range(4):
        with budget.round() as cohort:
            drawn.append(cohort)
    assert drawn == [cohorts(i) for i in range(4)]
    assert len({tuple(cohort) for cohort in drawn}) == 4


def test_a_round_that_fails_counts_and_is_drawn_afresh():
    budget = budget_for(5)
    with pytest.raises(KeyError), budget.round() as first:
        raise KeyError("a client vanished")
    assert budget.rounds == 1
    with budget.round() as second:
        assert second != first


def test_a_resumed_run_continues_the_count(tmp_path):
    path = tmp_path / "ledger.json"
    budget = budget_for(6, ledger=path)
    for _ in range(4):
        with budget.round():
            pass
    again = budget_for(6, ledger=path)
    assert (again.rounds, again.rounds_left) == (4, 2)


def test_a_crash_within_a_round_counts_it(tmp_path):
    path = tmp_path / "ledger.json"
    budget = budget_for(6, ledger=path)
    budget.round().__enter__()  # and the process dies
    assert budget_for(6, ledger=path).rounds == 1


def test_other_settings_are_refused(tmp_path):
    path = tmp_path / "ledger.json"
    with budget_for(6, ledger=path).round():
        pass
    with pytest.raises(PrivacyMismatchError):
        budget_for(6, noise_multiplier=2.0, ledger=path)
    with pytest.raises(PrivacyMismatchError):
        budget_for(6, scheme=Poisson(0.2), ledger=path)


def test_the_statement_names_everything():
    budget = budget_for(3)
    with budget.round():
        pass
    text = str(budget.statement())
    for word in ("client", "Poisson", "add", "pld", "1e-05"):
        assert word in text, text


@pytest.mark.parametrize("cohorts", [None, Poisson(0.1), CLIENTS])
def test_cohorts_of_no_scheme_are_refused(cohorts):
    with pytest.raises(ValueError, match="cohorts must come from a sampling scheme"):
        RoundBudget(1.0, 1e-5, cohorts, Aggregator(1.0))


def test_seeded_or_noiseless_rounds_are_not_private():
    scheme = Poisson(0.1)
    for cohorts, z in (
        (scheme.cohorts(CLIENTS, seed=1), 1.0),
        (scheme.cohorts(CLIENTS), 0.0),
    ):
        budget = RoundBudget(math.inf, 1e-5, cohorts, Aggregator(z))
        with budget.round():
            pass
        assert "not private" in str(budget.statement())


def test_rounds_of_two_budgets_of_one_ledger_count_with_their_own_settings():
    ledger = accounting.Ledger(1e-5)
    costly = budget_for(4, Poisson(0.5), 1.0, ledger=ledger)
    cohorts = Poisson(0.1).cohorts(CLIENTS)
    cheap = RoundBudget(
        10.0, 1e-5, cohorts, Aggregator(20.0), ledger=ledger, allow_change=True
    )
    assert costly.rounds_left == 4
    for budget in (costly, cheap, costly, costly):
        with budget.round():
            pass
    alone = accounting.epsilon(1.0, 3, Poisson(0.5), 1e-5, unit="client")
    assert ledger.epsilon() > alone
    noises = [phase.noise_multiplier for phase in ledger.phases if phase.steps]
    assert noises == [1.0, 20.0, 1.0]


def test_a_round_after_another_release_counts_with_the_settings_of_its_budget():
    ledger = accounting.Ledger(1e-5)
    budget = budget_for(100, Poisson(0.5), 1.0, ledger=ledger)
    statistics = PrivateStatistics(0.1, 1e-5, 200, releases=1, ledger=ledger)
    statistics.moments(np.zeros(200), low=0, high=1)
    with budget.round():
        pass
    alone = accounting.epsilon(1.0, 1, Poisson(0.5), 1e-5, unit="client")
    assert ledger.epsilon() > alone


@pytest.mark.parametrize("scheme", [Poisson(0.5), RandomAllocation(4)])
def test_two_budgets_do_not_share_the_draws_of_their_cohorts(scheme):
    cohorts = scheme.cohorts(CLIENTS)
    budgets = [RoundBudget(math.inf, 1e-5, cohorts, Aggregator(5.0)) for _ in range(2)]
    drawn = []
    for _ in range(4):
        for budget in budgets:
            with budget.round() as cohort:
                drawn.append(cohort)
    assert len({tuple(cohort) for cohort in drawn}) == 8
    if scheme.begins_epochs:
        for own in (drawn[::2], drawn[1::2]):
            assert sorted(client for cohort in own for client in cohort) == sorted(
                CLIENTS
            )


def test_two_ledgers_do_not_share_the_draws_of_one_object():
    cohorts, drawn = Poisson(0.5).cohorts(CLIENTS), []
    for _ in range(2):
        ledger = accounting.Ledger(1e-5)
        ledger.begin(noise_multiplier=1.0, sampling=cohorts, unit="client")
        drawn.append(cohorts(0))
        assert cohorts(0) == drawn[-1]
    assert drawn[0] != drawn[1]
