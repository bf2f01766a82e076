"""A federated plan: its aggregator, cohorts and rounds are the accounted ones."""

import itertools
import re

import pytest

import tfdpclip as dpc
from tfdpclip import accounting, correlated

IDS = [f"client {i}" for i in range(200)]


def plan_of(**changes):
    given = dict(
        epsilon=4, delta=1e-4, population=len(IDS), clients_per_round=40, rounds=6
    )
    return dpc.federated.PrivacyPlan(**{**given, **changes})


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.slow
def test_the_rounds_fit_the_budget_and_use_it(sampling, accountant):
    plan = plan_of(sampling=sampling, accountant=accountant)
    aggregator = plan.aggregator(secure=True)
    assert aggregator.noise_multiplier == plan.noise_multiplier
    assert aggregator.clients_per_round == 40
    budget = plan.budget(IDS)
    assert budget.rounds_left == 6
    seen = []
    while budget.rounds_left:
        with budget.round() as cohort:
            seen.append(len(cohort))
    assert len(seen) == 6 and set(seen) == (
        {40} if sampling == "fixed_size" else set(seen)
    )
    assert 3.99 < plan.statement().epsilon <= 4
    assert plan.statement().clips == (str(aggregator.clip),)
    assert plan.statement().epsilon == accounting.epsilon(
        plan.noise_multiplier,
        6,
        plan.scheme,
        1e-4,
        accountant,
        unit="client",
    )
    # The ledger is the plan's: a second budget of it has nothing left.
    with pytest.raises(accounting.BudgetExceededError):
        with plan.budget(IDS).round():
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 1.0}, "noise_multiplier follows"),
        ({"clients_per_round": 3}, "clients_per_round follows"),
        ({"noise": "distributed", "secure": True}, "distributed"),
        ({"seed": 1}, "seed"),
        ({"clip": None}, "clip must not be None"),
    ],
)
def test_what_would_void_the_plan_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_of().aggregator(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 1 / 200}, "delta must be below 1 / population"),
        ({"clients_per_round": 201}, "clients_per_round must be at most population"),
        ({"clients_per_round": 0}, "clients_per_round"),
        ({"rounds": 0}, "rounds"),
        ({"epsilon": -1}, "epsilon"),
        ({"sampling": "shuffled"}, "sampling"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**changes)


def test_other_clients_than_planned_are_refused():
    plan = plan_of()
    plan.aggregator()
    with pytest.raises(ValueError, match="client_ids has 199 clients, the plan is for"):
        plan.budget(IDS[:-1])


def test_rounds_of_another_aggregator_are_not_counted_as_planned():
    with pytest.raises(ValueError, match="make the aggregator first"):
        plan_of().budget(IDS)


def test_too_small_a_cohort_for_its_counts_is_refused():
    precise = dpc.QuantileClip(count_stddev=3 / 20)
    with pytest.raises(ValueError, match="too precise"):
        plan_of(clients_per_round=3).aggregator(clip=precise)
    assert plan_of(clients_per_round=3).aggregator(clip=1.0).private


def test_a_cohort_that_is_said_to_be_enough_is_enough():
    small = dict(clients_per_round=3, epsilon=0.05)
    with pytest.raises(ValueError, match="clients_per_round=3 is too small") as found:
        plan_of(**small).aggregator()
    enough = re.search(r"clients_per_round=(\d+) is enough", str(found.value))[1]
    assert plan_of(**{**small, "clients_per_round": int(enough)}).aggregator().private


def test_the_text_and_the_table():
    plan = plan_of()
    assert "40 clients expected in a round" in str(plan)
    assert [row["rounds"] for row in plan.rows()] == [6, 6, 6, 6, 6, 3, 12]
    assert plan.table().splitlines()[0].split() == [
        "epsilon", "clients", "per", "round", "rounds", "noise", "noise", "/", "clients"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Nothing ran yet"):
        plan.statement()


def test_the_matrix_is_made_for_the_servers_momentum():
    plan = plan_of(noise="toeplitz", momentum=0.9)
    assert plan.noise.matrix == correlated.SquareRootToeplitz(16, 0.9)
    assert "momentum 0.9" in str(plan)
    assert plan.replace(momentum=0).noise.matrix == correlated.SquareRootToeplitz(16)
    with pytest.raises(ValueError, match="leave momentum out"):
        plan_of(momentum=0.9)


@pytest.mark.parametrize("noise", ["buffered", "toeplitz", "tree", correlated.Tree()])
@pytest.mark.parametrize("sampling", [None, "available"])
def test_correlated_noise_in_one_argument(noise, sampling):
    available = {"separation": 3, "participations": 2} if sampling else {}
    plan = plan_of(noise=noise, sampling=sampling, **available)
    aggregator = plan.aggregator(clip=1.0)
    assert aggregator.noise is plan.noise and plan.noise.steps == 6
    assert plan.noise.sampling == plan.scheme
    assert "correlation:" in str(plan)
    one = accounting.epsilon(
        plan.noise_multiplier, 1, plan.scheme.at_worst(), 1e-4, unit="client"
    )
    # All rounds are one Gaussian, whatever the matrix.
    assert 3.99 < one <= 4.0
    assert aggregator.epsilon(1e-4, 6) == pytest.approx(one)
    clients = (lambda round_num: IDS) if sampling else IDS
    budget = plan.budget(clients)
    assert budget.rounds_left == 6 and budget.noise is plan.noise
    seen = {}
    for round_num in range(6):
        place = {"step": round_num, "ticket": (round_num, 1), "kept": 0}
        place.update(before=(round_num - 1, 1), run=plan.noise.digest)
        with budget.round({"correlated_noise": place}) as cohort:
            assert len(cohort) == 40
            for client in cohort:
                seen.setdefault(client, []).append(round_num)
    gaps = [b - a for came in seen.values() for a, b in itertools.pairwise(came)]
    assert min(gaps, default=9) >= (3 if sampling else 5)
    statement = plan.statement()
    words = f"at least {3 if sampling else 5} steps"
    assert words in str(statement) and statement.matrices
    assert statement.relation == "replace one record by an all-zero one"
    with pytest.raises(accounting.PrivacyMismatchError):
        with plan.budget(clients).round({"correlated_noise": place}):
            pytest.fail("a state of another matrix")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": "pink"}, "noise must be"),
        ({"noise": None}, "noise must be"),
        ({"noise": "tree", "sampling": "poisson"}, "Poisson"),
        ({"noise": "tree", "sampling": "fixed_size"}, "fixed size"),
        ({"noise": "tree", "sampling": "available"}, "separation must be given"),
        ({"separation": 3}, "are for sampling"),
        ({"noise": "tree", "participations": 3}, "are for sampling"),
        ({"sampling": "available", "separation": 0}, "separation"),
    ],
)
def test_correlated_noise_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**changes)


def test_available_clients_are_asked_for_by_round():
    plan = plan_of(sampling="available", separation=2)
    plan.aggregator()
    with pytest.raises(ValueError, match="client_ids must be"):
        plan.budget(IDS)
    # Independent noise of clients that are there: no state is needed.
    with plan.budget(lambda round_num: IDS[:50]).round() as cohort:
        assert set(cohort) <= set(IDS[:50])


def test_a_plan_after_other_rounds_is_within_one_budget_with_them():
    before = plan_of(epsilon=1)
    before.aggregator()
    with before.budget(range(before.population)).round():
        pass
    with pytest.raises(accounting.PrivacyMismatchError, match="give allow_change=True"):
        other = plan_of(ledger=before.ledger)
        other.aggregator()
        other.budget(range(other.population))
    plan = plan_of(ledger=before.ledger, allow_change=True)
    plan.aggregator()
    budget = plan.budget(range(plan.population))
    assert budget.rounds_left == plan.rounds
    for _ in range(plan.rounds):
        with budget.round():
            pass
    assert plan.statement().epsilon == plan.planned_epsilon <= plan.epsilon
