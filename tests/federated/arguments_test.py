"""Bad arguments are refused by name; combinations without a guarantee too."""

import dp_accounting
import numpy as np
import pytest
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED
from tfdpclip import accounting, federated
from tfdpclip.sampling import Poisson

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "arguments,name",
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": NAN}, "noise_multiplier"),
        ({"noise_multiplier": INF}, "noise_multiplier"),
        ({"noise_multiplier": None}, "noise_multiplier"),
        ({"clients_per_round": 0}, "clients_per_round"),
        ({"clients_per_round": NAN}, "clients_per_round"),
        ({"clients_per_round": INF}, "clients_per_round"),
        ({"clip": 0.0}, "clip"),
        ({"clip": NAN}, "clip"),
        ({"clip": "median"}, "clip"),
        ({"clip": None}, "clip must not be None with noise"),
        ({"clip": None, "noise_multiplier": 0.0, "secure": True}, "clip must not"),
        ({"secure": 20}, "secure"),
        ({"secure": None}, "secure"),
        ({"noise": "local"}, "noise"),
        ({"noise": "distributed", "minimum_clients": 50}, "secure must be True"),
        ({"noise": "distributed", "secure": True}, "minimum_clients must be given"),
        ({"minimum_clients": 50}, "minimum_clients"),
        ({"seed": -1}, "seed"),
        ({"variable_names": "kernel"}, "variable_names"),
        ({"seed": 1.5}, "seed"),
        ({"inner": tff.aggregators.SecureSumFactory(10.0)}, "InnerSum"),
        ({"inner": tff.aggregators.MeanFactory()}, "inner"),
        (
            {
                "inner": tff.aggregators.UnweightedMeanFactory(
                    tff.aggregators.SecureSumFactory(10.0)
                )
            },
            "InnerSum",
        ),
        ({"inner": "sum"}, "inner"),
        ({"inner": tff.aggregators.SumFactory(), "secure": True}, "inner cannot"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, name):
    given = {"noise_multiplier": 1.0, "clients_per_round": 100, **arguments}
    with pytest.raises(ValueError, match=name):
        federated.clipped_mean(**given)


@pytest.mark.parametrize("minimum", [0, 101, 1.5, NAN])
def test_minimum_clients_out_of_range(minimum):
    with pytest.raises(ValueError, match="minimum_clients"):
        federated.clipped_mean(
            1.0, 100, secure=True, noise="distributed", minimum_clients=minimum
        )


@pytest.mark.parametrize("inflation", [0, -1, NAN, INF])
def test_inflation_out_of_range(inflation):
    with pytest.raises(ValueError, match="inflation"):
        federated.InnerSum(tff.aggregators.SumFactory(), inflation)


def test_an_inner_sum_must_be_a_factory():
    with pytest.raises(ValueError, match="factory"):
        federated.InnerSum("sum")


@pytest.mark.parametrize(
    "value_type,part",
    [
        (tff.to_type(np.int32), "floating-point"),
        (tff.to_type([np.float32, np.int64]), "floating-point"),
        (tff.TensorType(np.float32, [None]), "static"),
        (tff.to_type([]), "at least one tensor"),
        (tff.SequenceType(np.float32), "tensor or a structure"),
    ],
)
def test_types_without_a_norm_are_refused(value_type, part):
    with pytest.raises(ValueError, match=part):
        federated.clipped_mean(1.0, 100).create(value_type)


def test_variable_names_must_fit():
    factory = federated.clipped_mean(1.0, 100, variable_names=["a"])
    with pytest.raises(ValueError, match="variable_names has 1 entries.*3 tensors"):
        factory.create(NESTED)


def test_unknown_public_norms_are_refused():
    for rule in (dpc.clipping.PublicNormClip(1.0), dpc.clipping.ScaledClip()):
        with pytest.raises(ValueError, match="norms"):
            federated.clipped_mean(1.0, 100, rule).create(NESTED)


def test_too_precise_a_count_says_which_cohort_would_do():
    half = dpc.QuantileClip(count_stddev=0.5)
    with pytest.raises(
        ValueError, match="from 11 records per step .or clients per round"
    ):
        federated.clipped_mean(1.0, 10, half).create(NESTED)
    with pytest.raises(ValueError, match="at least 2 records"):
        federated.clipped_mean(1.0, 1).create(NESTED)
    federated.clipped_mean(1.0, 10).create(NESTED)
    exact = dpc.QuantileClip(count_stddev=0.0)
    with pytest.raises(ValueError, match="count_stddevs"):
        federated.clipped_mean(1.0, 100, exact).create(NESTED)


def test_integers_will_do():
    process = federated.clipped_mean(1, 20, 1).create(NESTED)
    floats = federated.clipped_mean(1.0, 20, 1.0).create(NESTED)
    assert process.next.type_signature == floats.next.type_signature


def test_labels():
    assert federated.clipped_mean(1.0, 100).private
    baseline = federated.clipped_mean(0.0, 100, None)
    assert not baseline.private and "not private" in repr(baseline)
    assert "clip=None" in repr(baseline)
    factory = federated.clipped_mean(1.5, 100, dpc.QuantileClip(0.9), secure=True)
    assert factory.noise_multiplier == 1.5 and factory.clients_per_round == 100
    assert factory.clip == dpc.QuantileClip(0.9)
    assert "target_quantile=0.9" in repr(factory) and "not private" not in repr(factory)


def test_event_is_one_gaussian_per_round():
    event = federated.clipped_mean(1.3, 100).event(7)
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(1.3), 7
    )
    found = accounting.event_epsilon(event, 1e-6)
    alone = accounting.event_epsilon(
        dp_accounting.GaussianDpEvent(1.3 / np.sqrt(7)), 1e-6
    )
    assert found == pytest.approx(alone, rel=1e-3)
    for factory in (
        federated.clipped_mean(0.0, 100),
        federated.clipped_mean(1.0, 100, seed=1),
    ):
        assert accounting.event_epsilon(factory.event(), 1e-6) == float("inf")


@pytest.mark.slow
def test_a_round_budget_runs_a_training_program(tmp_path):
    clients = list(range(200))
    cohorts = Poisson(0.1).cohorts(clients)
    factory = federated.clipped_mean(1.5, cohorts.expected_cohort_size)
    process = factory.create(tff.TensorType(np.float32, [3]))
    path = tmp_path / "privacy.json"

    def budget():
        return accounting.RoundBudget(3.0, 1e-5, cohorts, factory, ledger=path)

    running, state, rounds = budget(), process.initialize(), 0
    allowed = running.rounds_left
    assert allowed > 2
    while running.rounds_left and rounds < 2:
        with running.round() as cohort:
            data = [np.full(3, client, np.float32) for client in cohort]
            state = process.next(state, data).state
        rounds += 1
    continued = budget()
    assert continued.rounds == 2 and continued.rounds_left == allowed - 2
    assert continued.epsilon <= 3.0
    assert "client" in str(continued.statement())
