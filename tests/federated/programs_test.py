"""Training programs under a privacy budget."""

import asyncio
import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tfdpclip import accounting, federated
from tfdpclip.sampling import FixedSize, Poisson

SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 2], tf.float32), y=tf.TensorSpec([None, 1], tf.float32)
)
CLIENTS = [f"client {i}" for i in range(12)]
AGGREGATOR = federated.clipped_mean(2.0, 4, 1.0)


def _data_of(client):
    number = float(client.split()[1])
    return tf.data.Dataset.from_tensors(
        collections.OrderedDict(x=np.float32([[number, 1]]), y=np.float32([[1]]))
    )


def _process():
    def model_fn():
        model = tf.keras.Sequential(
            [tf.keras.layers.InputLayer(2), tf.keras.layers.Dense(1)]
        )
        loss = tf.keras.losses.MeanSquaredError()
        return tff.learning.models.from_keras_model(model, loss=loss, input_spec=SPEC)

    return tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        tff.learning.optimizers.build_sgdm(0.01),
        federated.server_momentum(1.0),
        model_aggregator=AGGREGATOR,
    )


def _budget(path=None, scheme=None, epsilon=100.0):
    cohorts = (scheme or FixedSize(4, 12)).cohorts(CLIENTS)
    return accounting.RoundBudget(epsilon, 1e-3, cohorts, AGGREGATOR, ledger=path)


@pytest.fixture
def asynchronous():
    with federated.local_context(asynchronous=True):
        yield


@pytest.mark.slow
def test_a_training_program_runs_resumes_and_is_counted(asynchronous, tmp_path):
    ledger = tmp_path / "privacy.json"
    process = _process()

    def train(total_rounds):
        budget = _budget(ledger)
        source = federated.CohortDataSource(
            budget, _data_of, process.next.type_signature.parameter[1]
        )
        released = tff.program.MemoryReleaseManager()
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=source,
                train_per_round_clients=source.clients,
                train_total_rounds=total_rounds,
                program_state_manager=tff.program.FileProgramStateManager(
                    tmp_path / "state"
                ),
                model_output_manager=tff.program.MemoryReleaseManager(),
                train_metrics_manager=released,
                evaluation_manager=None,
                evaluation_periodicity=100,
            )
        )
        return budget, released

    budget, _ = train(2)
    assert budget.rounds == 2
    budget, released = train(3)
    # A third round, and only the third is counted.
    assert budget.rounds == 3
    assert list(released.values()) == [3]
    assert released.values()[3]["aggregator"]["round"] == 3


def _source(budget, **options):
    federated_type = tff.FederatedType(tff.SequenceType(np.float32), tff.CLIENTS)
    return federated.CohortDataSource(
        budget, lambda client: client, federated_type, **options
    )


def test_selections_are_rounds_of_the_budget():
    budget = _budget()
    source = _source(budget, name="one")
    first = source.iterator().select(4)
    assert len(set(first)) == 4 and set(first) <= set(CLIENTS)
    restored = type(source.iterator()).from_bytes(source.iterator().to_bytes())
    assert restored.federated_type == source.federated_type
    restored.select()
    assert budget.rounds == 2


def test_a_spent_budget_selects_nobody():
    once = accounting.epsilon(2.0, 1, FixedSize(4, 12), 1e-3, unit="client")
    budget = _budget(epsilon=once * 1.01)
    source = _source(budget)
    source.select()
    with pytest.raises(accounting.BudgetExceededError):
        source.select()
    assert budget.rounds == 1


def test_other_cohort_sizes_are_refused():
    for scheme in (None, Poisson(1 / 3)):
        budget = _budget(scheme=scheme)
        source = _source(budget)
        assert source.clients == 4
        with pytest.raises(ValueError, match="k must be 4"):
            source.select(5)
        assert budget.rounds == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match="budget"):
        _source("much")
    source = _source(_budget(), name="gone")
    iterator = source.iterator()
    buffer = iterator.to_bytes()
    assert type(iterator).from_bytes(buffer)
    with pytest.raises(ValueError, match="never made"):
        type(iterator).from_bytes(b"never made")
