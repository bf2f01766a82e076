"""A block of `RoundBudget.round` is one round of its cohort, as the context counts."""

import asyncio

import numpy as np
import pytest
import tensorflow_federated as tff

from tfdpclip import accounting, federated, sampling
from tfdpclip._notes import NOTES
from tfdpclip.accounting import PrivacyMismatchError, rounds

IDS = list(range(40))
UPDATE = np.ones(2, np.float32)
FACTORY = federated.clipped_mean(1.0, 10, 1.0)


@pytest.fixture(scope="module")
def process():
    return FACTORY.create(tff.TensorType(np.float32, [2]))


def budget(scheme=None):
    scheme = sampling.FixedSize(10, 40) if scheme is None else scheme
    cohorts = scheme.cohorts(IDS)
    return accounting.RoundBudget(100.0, 1e-4, cohorts, aggregator=FACTORY)


def run(process, clients, state=None):
    state = process.initialize() if state is None else state
    return process.next(state, [UPDATE] * clients)


def test_one_round_of_the_cohort_is_what_counts(process):
    counted = budget()
    state = process.initialize()
    for _ in range(2):
        with counted.round() as cohort:
            state = run(process, len(cohort), state).state
    assert counted.rounds == 2
    assert "each block of round()" not in str(counted.statement())


@pytest.mark.parametrize(
    "clients, message",
    [(20, "20 clients would take part"), (40, "40 clients"), (11, "11 clients")],
)
def test_more_clients_than_the_cohort_are_refused(process, clients, message):
    """Every client passed twice, or all clients in the place of the cohort."""
    counted = budget()
    with pytest.raises(PrivacyMismatchError, match=message), counted.round():
        run(process, clients)
    assert counted.rounds == 1


def test_a_second_run_in_a_block_is_refused(process):
    counted = budget()
    with counted.round() as cohort:
        state = run(process, len(cohort)).state
        for _ in range(2):
            with pytest.raises(PrivacyMismatchError, match="A second computation"):
                run(process, len(cohort), state)
        with pytest.raises(PrivacyMismatchError, match="A second computation"):
            run(process, 3)
    with counted.round() as cohort:
        run(process, len(cohort), state)


def test_an_empty_cohort_has_a_round_too(process):
    counted = budget(sampling.Poisson(1e-9))
    with counted.round() as cohort:
        assert len(cohort) == 0
        with pytest.raises(PrivacyMismatchError, match="1 clients would take part"):
            run(process, 1)
        run(process, 0)


def test_computations_without_clients_do_not_count(process):
    counted = budget()
    with counted.round() as cohort:
        state = process.initialize()
        run(process, len(cohort), state)
        process.initialize()
        tff.tensorflow.computation(lambda: 1)()
    assert counted.rounds == 1


def test_a_run_outside_of_the_block_is_as_before(process):
    counted = budget()
    for _ in range(2):
        assert run(process, 40).result.shape == (2,)
        with counted.round():
            pass
    assert counted.rounds == 2


def test_a_run_that_failed_may_be_called_again(process):
    with budget().round() as cohort:
        with pytest.raises(TypeError):
            process.next(process.initialize(), ["no update"] * len(cohort))
        run(process, len(cohort))
    with budget().round():
        with pytest.raises(ZeroDivisionError), rounds.execution(10):
            raise ZeroDivisionError
        with rounds.execution(10):
            pass


@pytest.mark.parametrize("secure", [False, True])
def test_asynchronous_contexts_count_as_well(process, secure):
    with federated.local_context(simulate_secure_sums=secure, asynchronous=True):

        async def begin_and_run(clients):
            state = await tff.program.materialize_value(process.initialize())
            with budget().round():
                for number in clients:
                    result = process.next(state, [UPDATE] * number)
                    await tff.program.materialize_value(result.result)

        asyncio.run(begin_and_run([10]))
        with pytest.raises(PrivacyMismatchError, match="11 clients would take part"):
            asyncio.run(begin_and_run([11]))
        with pytest.raises(PrivacyMismatchError, match="A second computation"):
            asyncio.run(begin_and_run([10, 10]))


def test_a_context_that_does_not_count_is_stated(process, monkeypatch):
    monkeypatch.setattr(NOTES, "counting_contexts", [])
    counted = budget()
    with counted.round():
        pass
    assert "each block of round() ran one round" in str(counted.statement())
