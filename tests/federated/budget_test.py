"""A budget counts the noise of the aggregator, and nothing else that was said."""

import math

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED
from tfdpclip import accounting, correlated, federated, sampling
from tfdpclip.accounting import PrivacyMismatchError, RoundBudget

IDS = [f"client {i}" for i in range(200)]
DELTA = 1e-6
SCHEMES = {
    "poisson": sampling.Poisson(0.1),
    "fixed size": sampling.FixedSize(20, 200),
    "cyclic": sampling.CyclicPoisson(200, 0.1, 4),
    "fixed order": sampling.MinSeparation(200, 20, relation="zero_out"),
}
AVAILABLE = sampling.AvailableClients(20, separation=2, participations=3)
NOISE = dpc.CorrelatedNoise(correlated.Tree(), 6, AVAILABLE)


def distributed(z=2.0, minimum=10):
    return federated.clipped_mean(
        z, 20, 1.0, secure=True, noise="distributed", minimum_clients=minimum
    )


def after(budget, rounds):
    for _ in range(rounds):
        with budget.round():
            pass
    return budget


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "options",
    [{}, {"secure": True}, {"weight_cap": 5}, {"clip": 0.5}],
    ids=["plain", "secure", "weighted", "fixed"],
)
@pytest.mark.thinned(4)
def test_central_noise_is_counted_with_the_scheme_that_draws(scheme, options):
    scheme = SCHEMES[scheme]
    factory = federated.clipped_mean(1.5, 20, **options)
    budget = RoundBudget(math.inf, DELTA, scheme.cohorts(IDS), aggregator=factory)
    after(budget, 3)
    expected = accounting.epsilon(1.5, 3, scheme, DELTA, unit="client")
    assert budget.epsilon == pytest.approx(expected, rel=1e-6)
    statement = budget.statement()
    assert statement.noise_multipliers == (1.5,) and statement.accountant == "pld"
    assert statement.clips == (str(factory.clip),)


@pytest.mark.parametrize("scheme", ["poisson", "fixed size", "cyclic"])
def test_distributed_noise_is_counted_for_a_server_that_knows_the_cohorts(scheme):
    factory = distributed()
    cohorts = SCHEMES[scheme].cohorts(IDS)
    budget = after(RoundBudget(math.inf, DELTA, cohorts, aggregator=factory), 5)
    assert budget.epsilon == pytest.approx(factory.epsilon(DELTA, 5), rel=1e-3)
    amplified = accounting.epsilon(2.0, 5, cohorts.scheme, DELTA, unit="client")
    assert budget.epsilon > 1.2 * amplified
    statement = budget.statement()
    assert statement.relation == "replace one record by an all-zero one"
    assert statement.accountant == "rdp"
    text = str(statement)
    for words in (
        "sampling does not lower the cost",
        "at least 10 honest clients",
        "no amplification",
    ):
        assert words in text


def test_a_budget_ends_rounds_with_distributed_noise():
    factory = distributed(4.0)
    allowed = 7
    limit = factory.epsilon(DELTA, allowed) * 1.001
    cohorts = SCHEMES["poisson"].cohorts(IDS)
    budget = RoundBudget(limit, DELTA, cohorts, aggregator=factory)
    assert budget.rounds_left == allowed
    after(budget, allowed)
    with pytest.raises(accounting.BudgetExceededError), budget.round():
        pytest.fail("a round beyond the budget")


def test_clients_that_come_seldom_pay_for_the_rounds_that_they_are_in():
    factory = distributed()
    cohorts = sampling.AvailableCohorts(AVAILABLE, lambda round_num: IDS)
    budget = after(RoundBudget(math.inf, DELTA, cohorts, aggregator=factory), 8)
    assert budget.epsilon == pytest.approx(factory.epsilon(DELTA, 3), rel=1e-3)
    assert "sampling does not lower the cost" not in str(budget.statement())


def test_only_renyi_accounting_bounds_distributed_noise(tmp_path):
    cohorts = SCHEMES["poisson"].cohorts(IDS)
    for accountant in ("pld", "gdp"):
        with pytest.raises(ValueError, match="accountant must be 'rdp'"):
            RoundBudget(
                9.0, DELTA, cohorts, aggregator=distributed(), accountant=accountant
            )
    path = tmp_path / "ledger.json"
    after(
        RoundBudget(
            math.inf, DELTA, cohorts, federated.clipped_mean(1.0, 20), ledger=path
        ),
        1,
    )
    with pytest.raises(PrivacyMismatchError, match="accountant"):
        RoundBudget(9.0, DELTA, cohorts, aggregator=distributed(), ledger=path)


def test_a_budget_goes_on_with_its_aggregator_from_a_file(tmp_path):
    path, cohorts = tmp_path / "ledger.json", SCHEMES["poisson"].cohorts(IDS)

    def budget(factory):
        return RoundBudget(
            math.inf, DELTA, cohorts, aggregator=factory, ledger=path
        )  # fmt: skip

    after(budget(distributed()), 2)
    again = after(budget(distributed()), 1)
    assert again.rounds == 3
    assert again.epsilon == pytest.approx(distributed().epsilon(DELTA, 3), rel=1e-3)
    assert str(again.statement()).count("sampling does not lower the cost") == 1
    with pytest.raises(PrivacyMismatchError, match="noise_multiplier was 2"):
        budget(distributed(3.0))


def test_correlated_noise_is_the_aggregators():
    factory = federated.clipped_mean(1.0, 20, 1.0, noise=NOISE)
    cohorts = sampling.AvailableCohorts(AVAILABLE, lambda round_num: IDS)
    budget = RoundBudget(math.inf, DELTA, cohorts, aggregator=factory)
    assert budget.noise is factory.correlated
    with pytest.raises(ValueError, match="state must be given"), budget.round():
        pytest.fail("nobody knows which noise this round has")
    with budget.round({"correlated_noise": state_of(0, NOISE)}):
        pass
    assert budget.epsilon == pytest.approx(factory.epsilon(DELTA, 1), rel=1e-6)
    with pytest.raises(PrivacyMismatchError, match="made for"):
        RoundBudget(9.0, DELTA, SCHEMES["poisson"].cohorts(IDS), aggregator=factory)


def state_of(step, noise):
    return dict(step=step, ticket=(1, 2), before=(0, 0), run=noise.digest, kept=[0.0])


def test_what_is_no_aggregator_is_refused_with_the_line():
    cohorts = SCHEMES["poisson"].cohorts(IDS)
    factory = federated.clipped_mean(2.0, 20)
    for wrong in (2.0, factory.create(NESTED), "clipped_mean", tff.aggregators):
        with pytest.raises(
            ValueError, match="aggregator must be the result of dpc.federated"
        ):
            RoundBudget(9.0, DELTA, cohorts, aggregator=wrong)
    with pytest.raises(TypeError, match="aggregator"):
        RoundBudget(9.0, DELTA, cohorts)


def test_a_run_that_is_not_private_is_said_to_be_none():
    cohorts = SCHEMES["poisson"].cohorts(IDS)
    seeded = federated.clipped_mean(2.0, 20, seed=1)
    budget = after(RoundBudget(math.inf, DELTA, cohorts, aggregator=seeded), 1)
    assert "a seed was fixed" in str(budget.statement())
    drawn = SCHEMES["poisson"].cohorts(IDS, seed=3)
    plain = federated.clipped_mean(2.0, 20)
    budget = after(RoundBudget(math.inf, DELTA, drawn, aggregator=plain), 1)
    assert "a seed was fixed" in str(budget.statement())
    baseline = federated.clipped_mean(0.0, 20, None)
    budget = after(RoundBudget(math.inf, DELTA, cohorts, aggregator=baseline), 1)
    assert budget.epsilon == math.inf


MADE = {
    "another multiplier": lambda: federated.clipped_mean(0.5, 20, 1.0),
    "distributed": lambda: distributed(),
    "a seed": lambda: federated.clipped_mean(2.0, 20, 1.0, seed=1),
    "correlated": lambda: federated.clipped_mean(2.0, 20, 1.0, noise=NOISE),
    "none": lambda: federated.clipped_mean(0.0, 20, 1.0),
}


@pytest.mark.parametrize("name", MADE)
def test_an_aggregator_that_made_no_process_is_not_counted(name):
    aggregator = federated.clipped_mean(2.0, 20, 1.0)
    cohorts = SCHEMES["poisson"].cohorts(IDS)
    budget = RoundBudget(9.0, DELTA, cohorts, aggregator=aggregator)
    factory = MADE[name]()
    factory.create(NESTED)
    message = "no process was made of an aggregator with this noise"
    with pytest.raises(PrivacyMismatchError, match=message) as info, budget.round():
        pytest.fail("a round whose noise is not what is counted")
    assert str(factory.round_noise) in str(info.value)
    assert budget.rounds == 0
    aggregator.create(NESTED)
    after(budget, 1)


@pytest.mark.parametrize("name", ["noise_multiplier", "seed", "clip"])
def test_settings_of_an_aggregator_do_not_change(name):
    aggregator = federated.clipped_mean(2.0, 20, 1.0)
    with pytest.raises(AttributeError, match=f"Make a new one.*{name}="):
        setattr(aggregator, name, 0.5)
    assert aggregator.noise_multiplier == 2.0 and aggregator.private


def test_the_noise_of_a_matrix_has_one_multiplier():
    federated.clipped_mean(0.5, 20, 1.0, noise=NOISE).create(NESTED)
    cohorts = sampling.AvailableCohorts(AVAILABLE, lambda round_num: IDS)
    aggregator = federated.clipped_mean(2.0, 20, 1.0, noise=NOISE)
    budget = RoundBudget(9.0, DELTA, cohorts, aggregator)
    with pytest.raises(PrivacyMismatchError, match="multiplier 0.5, correlated"):
        with budget.round({"correlated_noise": state_of(0, NOISE)}):
            pytest.fail("a round whose noise is not what is counted")


def test_a_state_of_another_multiplier_is_refused():
    made = [federated.clipped_mean(z, 20, 1.0, noise=NOISE) for z in (4.0, 0.5)]
    ours, other = (one.create(NESTED) for one in made)

    def budget_of(aggregator):
        cohorts = sampling.AvailableCohorts(AVAILABLE, lambda round_num: IDS)
        return RoundBudget(math.inf, DELTA, cohorts, aggregator=aggregator)

    state = other.initialize()
    budget = budget_of(made[0])
    with pytest.raises(PrivacyMismatchError, match="noise_multiplier"):
        with budget.round(state):
            pytest.fail("a round with less noise than is counted")
    assert not budget.rounds
    with budget.round(ours.initialize()):
        pass
    # A new matrix may have another multiplier; the memory fits where it was taken.
    begun, memory = federated.split_noise(state)
    for aggregator in made:
        with budget_of(aggregator).round(federated.split_noise(begun)[0]):
            pass
    again = federated.join_noise(begun, memory)
    with budget_of(made[1]).round(again):
        pass


def test_a_plans_budget_has_the_plans_aggregator():
    plan = federated.PrivacyPlan(4, 1e-4, 200, clients_per_round=40, rounds=6)
    made = plan.aggregator(weight_cap=3)
    made.create(NESTED, tff.TensorType(np.float32))
    distributed(0.1).create(NESTED)
    budget = after(plan.budget(IDS), 1)
    assert budget.aggregator is made and plan.statement().epsilon > 0
