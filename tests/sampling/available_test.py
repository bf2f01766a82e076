"""Clients that come and go keep their separation."""

import json

import numpy as np
import pytest
from scipy import stats

from tests.stand_in_aggregator import Aggregator
from tfdpclip import accounting, correlated, sampling

_SCHEME = sampling.AvailableClients(4, separation=3, participations=5)


def idle(rng, population=20):
    return lambda round_num: rng.permutation(population)[: rng.integers(21)].tolist()


def rounds_of(cohorts, rounds):
    found = {}
    for round_num in rounds:
        for client in cohorts(round_num):
            found.setdefault(client, []).append(round_num)
    return found


@pytest.mark.parametrize("limit", [None, 1, 5])
@pytest.mark.parametrize("separation", [1, 3, 10])
def test_rounds_of_a_client_are_apart_and_few(separation, limit):
    scheme = sampling.AvailableClients(4, separation, limit)
    cohorts = sampling.AvailableCohorts(scheme, idle(np.random.default_rng(0)))
    found = rounds_of(cohorts, range(100))
    assert min(np.diff(v).min(initial=10**9) for v in found.values()) >= separation
    assert max(map(len, found.values())) <= (limit or 100)
    assert max(map(len, found.values())) <= scheme.participation(100).most(100)


def test_everybody_who_may_is_taken_if_they_are_few():
    scheme = sampling.AvailableClients(4, 2)
    cohorts = sampling.AvailableCohorts(scheme, lambda t: range(5))
    assert len(cohorts(0)) == 4
    assert len(cohorts(1)) == 1
    assert len(cohorts(2)) == 4


def test_the_choice_is_uniform():
    # 20 clients at 1e-8 each: false alarms below 1e-6.
    scheme = sampling.AvailableClients(5, 1)
    cohorts = sampling.AvailableCohorts(scheme, lambda t: range(20))
    counts = np.bincount(np.concatenate([cohorts(t) for t in range(4000)]))
    low, high = stats.binom.ppf([5e-9, 1 - 5e-9], 4000, 0.25)
    assert np.all((low <= counts) & (counts <= high))


def test_a_restart_goes_on_with_its_state():
    rng = np.random.default_rng(1)
    cohorts = sampling.AvailableCohorts(_SCHEME, idle(rng))
    found = rounds_of(cohorts, range(20))
    state = json.loads(json.dumps(cohorts.state))
    again = sampling.AvailableCohorts(_SCHEME, idle(rng), state=state)
    for client, rounds in rounds_of(again, range(20, 60)).items():
        found.setdefault(client, []).extend(rounds)
    assert min(np.diff(v).min(initial=10**9) for v in found.values()) >= 3
    assert max(map(len, found.values())) <= 5


def test_a_round_is_not_drawn_twice():
    cohorts = sampling.AvailableCohorts(_SCHEME, lambda t: range(20))
    cohorts(3)
    for round_num in (3, 2):
        with pytest.raises(ValueError, match="round_num must be at least 4"):
            cohorts(round_num)


def test_what_it_costs():
    assert _SCHEME.event(2.0, 100).count == 5
    assert _SCHEME.event(2.0, 7).count == 3
    assert _SCHEME.event(2.0, 7).event.noise_multiplier == 2.0
    matrix = correlated.BufferedToeplitz(2, 100, _SCHEME)
    event = accounting.correlated_event(matrix, 2.0, 100, _SCHEME, unit="client")
    assert event.noise_multiplier == 2.0
    assert sampling.from_dict(_SCHEME.to_dict()) == _SCHEME
    assert _SCHEME.at_worst().event(2.0, 7).count == 7


def test_a_budget_counts_its_rounds():
    cohorts = sampling.AvailableCohorts(_SCHEME, lambda t: range(20))
    budget = accounting.RoundBudget(10.0, 1e-5, cohorts, Aggregator(4.0))
    for _ in range(7):
        with budget.round() as cohort:
            assert 0 < len(cohort) <= 4
    expected = accounting.epsilon(4.0, 7, _SCHEME, 1e-5, unit="client")
    assert budget.epsilon == pytest.approx(expected)
    assert "does not depend on their data" in str(budget.statement())


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: sampling.AvailableClients(0, 1), "cohort_size"),
        (lambda: sampling.AvailableClients(1, 0), "separation"),
        (lambda: sampling.AvailableClients(1, 1, 0), "participations"),
        (lambda: sampling.AvailableCohorts(sampling.Poisson(0.1), idle), "scheme"),
        (lambda: sampling.AvailableCohorts(_SCHEME, [1, 2]), "available"),
        (lambda: sampling.AvailableCohorts(_SCHEME, lambda t: [1, 1])(0), "repeat"),
        (lambda: sampling.AvailableCohorts(_SCHEME, lambda t: [1.5])(0), "ids"),
        (lambda: sampling.AvailableCohorts(_SCHEME, idle, state={}), "state"),
        (
            lambda: sampling.AvailableCohorts(
                _SCHEME, idle, state={"next": 3, "clients": [["a", 3, 1]]}
            ),
            "state",
        ),
        (lambda: _SCHEME.cohorts(range(9)), "AvailableCohorts"),
        (lambda: _SCHEME.batches(np.zeros((9, 1))), "AvailableCohorts"),
    ],
)
def test_hostile_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()
