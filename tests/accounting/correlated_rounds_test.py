"""A budget with correlated noise: every state is used for one round, in order."""

import itertools
import math

import pytest

import tfdpclip as dpc
from tests.stand_in_aggregator import Aggregator
from tfdpclip import accounting, correlated
from tfdpclip.accounting import PrivacyMismatchError, RoundBudget
from tfdpclip.sampling import (
    AvailableClients,
    AvailableCohorts,
    CyclicPoisson,
    MinSeparation,
    Poisson,
)

IDS = [f"client {i}" for i in range(20)]
FIXED = MinSeparation(20, 5, relation="zero_out")
NOISE = dpc.CorrelatedNoise(correlated.SquareRootToeplitz(3), 6, FIXED)
_NAMES = itertools.count(1)


def state_of(step, before=(0, 0), run=NOISE):
    """The state after a round, in the form of `split_noise` and the aggregators."""
    noise = dict(step=step, ticket=(next(_NAMES), 0), before=before, kept=[[0.0]])
    noise["run"] = run.digest
    return {"own": {"round": 9}, "correlated_noise": noise}


def after(state, steps=6):
    noise = state["correlated_noise"]
    new = state_of((noise["step"] + 1) % steps, noise["ticket"])
    new["correlated_noise"]["run"] = noise["run"]
    return new


def budget_of(epsilon=math.inf, cohorts=None, noise=NOISE, **options):
    cohorts = cohorts or FIXED.cohorts(IDS)
    return RoundBudget(epsilon, 1e-5, cohorts, Aggregator(1.0, noise), **options)


def run(budget, state, rounds):
    cohorts = []
    for _ in range(rounds):
        with budget.round(state) as cohort:
            cohorts.append(cohort)
            state = after(state)
    return state, cohorts


def runs_of(budget):
    return budget.ledger.phases[-1].runs


def test_rounds_in_order_are_one_matrix_and_then_another():
    budget = budget_of()
    state, cohorts = run(budget, state_of(0), 4)
    # The cohorts are the scheme's: no client comes again within four rounds.
    assert len({c for cohort in cohorts for c in cohort}) == 20
    expected = accounting.correlated_event(
        NOISE.matrix, 1.0, 4, FIXED, horizon=6, unit="client"
    )
    assert budget.epsilon == pytest.approx(accounting.event_epsilon(expected, 1e-5))
    state, _ = run(budget, state, 2)
    one = budget.epsilon
    assert one == pytest.approx(accounting.epsilon(1.0, 1, FIXED, 1e-5, unit="client"))
    run(budget, state, 1)
    assert runs_of(budget) == [7] and budget.epsilon > one
    assert "anew every 6 steps" in str(budget.statement())
    assert "at least 4 steps" in str(budget.statement())


@pytest.mark.parametrize("which", ["same", "older", "of another run", "none"])
def test_a_state_that_is_not_next_is_refused(which):
    budget = budget_of()
    older, _ = run(budget, state_of(0), 1)
    used, _ = run(budget, older, 1)
    state, _ = run(budget, used, 1)
    wrong = {
        "same": used,
        "older": older,
        "of another run": state_of(3, before=(10**6, 1)),
        "none": None,
    }[which]
    error = ValueError if wrong is None else PrivacyMismatchError
    with pytest.raises(error, match="state"), budget.round(wrong):
        pytest.fail("the noise of a round was used twice")
    assert runs_of(budget) == [3]
    # The right state goes on.
    run(budget, state, 1)
    assert runs_of(budget) == [4]


def test_a_failed_round_is_not_run_again_with_its_noise():
    budget = budget_of()
    state, _ = run(budget, state_of(0), 2)
    with pytest.raises(KeyError), budget.round(state):
        raise KeyError("a client vanished")
    with pytest.raises(PrivacyMismatchError, match="split_noise"), budget.round(state):
        pytest.fail("the failed round may have released")
    run(budget, state_of(0), 2)
    assert runs_of(budget) == [3, 2]
    fewer = budget_of()
    run(fewer, state_of(0), 5)
    assert budget.epsilon > fewer.epsilon


def test_a_state_that_was_refused_for_want_of_budget_was_not_used():
    one = accounting.epsilon(1.0, 1, FIXED, 1e-5, unit="client")
    budget = budget_of(one * 1.0001)
    assert budget.rounds_left == 6
    state, _ = run(budget, state_of(0), 6)
    for _ in range(2):
        with pytest.raises(accounting.BudgetExceededError), budget.round(state):
            pytest.fail("a round ran beyond the budget")
    assert budget.rounds == 6


def test_restored_noise_goes_on_where_the_ledger_is(tmp_path):
    path = tmp_path / "ledger.json"
    state, _ = run(budget_of(ledger=path), state_of(0), 3)
    again = budget_of(ledger=path, continued=3)
    _, (cohort,) = run(again, state, 1)
    assert runs_of(again) == [4] and cohort == FIXED.cohorts(IDS)(3)
    for continued in (3, 5):
        with pytest.raises(PrivacyMismatchError, match="never used again"):
            budget_of(ledger=path, continued=continued)
    # Without `continued` a new matrix begins, and a state of the first is refused.
    fresh = budget_of(ledger=path)
    with pytest.raises(PrivacyMismatchError, match="continued"), fresh.round(state):
        pytest.fail("restored noise without its ledger")
    run(fresh, state_of(0), 1)
    assert runs_of(fresh) == [4, 1]


def test_noise_goes_on_only_with_cohorts_that_know_who_came():
    scheme = AvailableClients(5, separation=4)
    noise = dpc.CorrelatedNoise(correlated.Tree(), 6, scheme)
    cohorts = AvailableCohorts(scheme, lambda round_num: IDS)
    budget = budget_of(cohorts=cohorts, noise=noise)
    state, before = run(budget, state_of(0, run=noise), 3)
    options = dict(noise=noise, ledger=budget.ledger, continued=3)
    forgetful = AvailableCohorts(scheme, lambda round_num: IDS)
    with pytest.raises(PrivacyMismatchError, match="AvailableCohorts their last"):
        budget_of(cohorts=forgetful, **options)
    of_another = {**forgetful.state, "next": 3}
    invented = AvailableCohorts(scheme, lambda _: IDS, state=of_another)
    with pytest.raises(PrivacyMismatchError, match="different clients"):
        budget_of(cohorts=invented, **options)
    restored = AvailableCohorts(scheme, lambda _: IDS, state=cohorts.state)
    _, (last,) = run(budget_of(cohorts=restored, **options), state, 1)
    assert sorted([c for cohort in before for c in cohort] + last) == sorted(IDS)


@pytest.mark.parametrize(
    "scheme", [Poisson(0.25), MinSeparation(20, 5), CyclicPoisson(20, 0.1, 4)]
)
def test_noise_of_another_scheme_is_refused(scheme):
    with pytest.raises(PrivacyMismatchError, match="made for a fixed order"):
        budget_of(cohorts=scheme.cohorts(IDS))


def test_a_budget_that_counts_independent_noise_refuses_such_a_state():
    budget = budget_of(noise=None)
    with pytest.raises(PrivacyMismatchError, match="aggregator has none"):
        with budget.round(state_of(0)):
            pytest.fail("correlated noise was counted as independent")
    with budget.round({"round": 3, "clip": (1.0,)}):
        pass
    assert budget.rounds == 1


@pytest.mark.parametrize(
    "state",
    [
        {"a": state_of(0), "b": state_of(0)},
        [{"correlated_noise": {"step": 0}}],
        ({"correlated_noise": 3},),
    ],
)
def test_what_cannot_be_understood_is_refused(state):
    with pytest.raises(ValueError, match="state"), budget_of().round(state):
        pytest.fail("a state that nobody understands")


@pytest.mark.parametrize(
    "ids", [IDS[5:] + IDS[:5], IDS[1:] + ["another"], [*range(20)]]
)
def test_noise_goes_on_only_with_the_same_clients_in_the_same_order(tmp_path, ids):
    path = tmp_path / "ledger.json"
    run(budget_of(ledger=path), state_of(0), 3)
    with pytest.raises(PrivacyMismatchError, match="a different order"):
        budget_of(cohorts=FIXED.cohorts(ids), ledger=path, continued=3)
    # A new matrix may have different clients.
    again = budget_of(cohorts=FIXED.cohorts(ids), ledger=path)
    run(again, state_of(0), 1)
    assert runs_of(again) == [3, 1]


def test_a_first_state_begins_one_matrix_in_whichever_process(tmp_path):
    path = tmp_path / "ledger.json"
    budget, first = budget_of(ledger=path), state_of(0)
    child, _ = run(budget, first, 1)
    for again in (budget, budget_of(ledger=path)):
        with pytest.raises(PrivacyMismatchError, match="begun a matrix before"):
            with again.round(first):
                pytest.fail("a state began two matrices")
    run(again, state_of(0), 1)
    with pytest.raises(PrivacyMismatchError, match="round before"):
        with again.round(child):
            pytest.fail("an older chain went on in the run of another")
    assert runs_of(again) == [1, 1]


def test_two_budgets_of_one_ledger_do_not_take_turns():
    budget = budget_of()
    state, _ = run(budget, state_of(0), 1)
    other = budget_of(ledger=budget.ledger)
    run(other, state_of(0), 1)
    with pytest.raises(PrivacyMismatchError, match="a second budget"):
        with budget.round(state):
            pytest.fail("the rounds of one matrix were counted in the run of another")
    assert runs_of(other) == [1, 1]
    # A second budget within a round is refused as well.
    with other.round(state_of(0)):
        budget_of(ledger=budget.ledger)
    with pytest.raises(PrivacyMismatchError, match="a second budget"):
        with other.round(state_of(0)):
            pytest.fail("another budget began within a round")


def test_restored_noise_is_that_of_the_ledger(tmp_path):
    states = {}
    for name in ("a", "b"):
        states[name], _ = run(budget_of(ledger=tmp_path / name), state_of(0), 5)
    again = budget_of(ledger=tmp_path / "b", continued=5)
    with pytest.raises(PrivacyMismatchError, match="round before"):
        with again.round(states["a"]):
            pytest.fail("the noise of one run went on in the ledger of another")
    run(again, states["b"], 1)
    assert runs_of(again) == [6]


def test_a_ledger_that_knows_no_states_is_not_gone_on_from():
    budget = budget_of()
    state, _ = run(budget, state_of(0), 3)
    content = budget.ledger.to_dict()
    del content["phases"][0]["trail"]
    old = accounting.Ledger.from_dict(content)
    with pytest.raises(PrivacyMismatchError, match="a different order"):
        budget_of(ledger=old, continued=3)
    again = budget_of(ledger=old)
    run(again, state_of(0), 1)
    assert runs_of(again) == [3, 1]


def test_a_state_of_other_noise_than_is_counted_is_refused():
    other = dpc.CorrelatedNoise(
        NOISE.matrix, 6, MinSeparation(40, 5, relation="zero_out")
    )
    budget = budget_of()
    with pytest.raises(PrivacyMismatchError, match="whose correlated noise .* differs"):
        with budget.round(state_of(0, run=other)):
            pytest.fail("noise for clients that come less often")
    assert budget.rounds == 0


@pytest.mark.parametrize("ids", [set(IDS), frozenset(IDS)])
def test_a_set_has_no_order(ids):
    with pytest.raises(ValueError, match=r"sorted\(client_ids\)"):
        FIXED.cohorts(ids)
