"""The estimated cost of a run, and that the estimate changes and spends nothing."""

import csv

import numpy as np
import pytest

from tfdpclip import accounting
from tff_tasks import cost, program, records
from tff_tasks.client_data import EvaluationData, training_arrays
from tff_tasks.config import RunConfig
from tff_tasks.engine_local import LocalEngine
from tff_tasks.evaluation import Evaluator
from tff_tasks.privacy import LEDGER


def digits(directory, **settings):
    settings = {
        "rounds": 4,
        "clients_per_round": 10,
        "rounds_per_eval": 2,
        "engine": "local",
        "quiet": True,
        "tensorboard": False,
        "sampling": "poisson",
        "accountant": "rdp",
        **settings,
    }
    options = {"num_clients": 30, "hidden_units": 8}
    return RunConfig("digits", str(directory), options=options, **settings)


@pytest.mark.parametrize(
    ("settings", "cap", "batches"),
    [
        ({}, "before", (1 + 1 + 3) / 3),
        ({"client_epochs": 2}, "before", (1 + 2 + 5) / 3),
        ({"max_elements": 4}, "before", 1.0),
        ({"max_elements": 4, "client_epochs": 2}, "before", (1 + 2 + 2) / 3),
        ({"max_elements": 4, "client_epochs": 2}, "after", 1.0),
    ],
)
def test_batches_of_a_mean_client(settings, cap, batches):
    config = RunConfig("digits", client_batch_size=5, **settings)
    counts = {"a": 1, "b": 5, "c": 12}
    assert cost.mean_batches(config, counts, 1.0, cap) == pytest.approx(batches)
    assert cost.mean_batches(RunConfig("digits"), {"a": 5}, 3.0, cap) == 3


def test_the_total_is_of_rounds_evaluations_and_accounting():
    expected = cost.Cost(100, 2.0, 10, 5.0, 3.0)
    assert expected.seconds == 100 * 2 + 10 * (5 + 3)
    assert expected.lines() == [
        "About 5 min: 100 rounds of 2 s, 10 evaluations of 5 s, each with 3 s for its "
        "epsilon."
    ]


def test_the_total_includes_the_preparation_of_graphs():
    expected = cost.Cost(100, 2.0, 0, 0.0, preparation_seconds=40.0)
    assert expected.seconds == 240
    assert expected.lines() == [
        "About 4 min: 100 rounds of 2 s, 0 evaluations of 0 s, 40 s to prepare graphs."
    ]


def test_the_sizes_of_poisson_cohorts_are_those_of_draws():
    """Over 400 repeats, within 6 standard errors: chance fails below 1e-8."""
    rng = np.random.default_rng(0)
    sizes = [len(set(rng.poisson(20, 50))) for _ in range(400)]
    error = np.std(sizes) / np.sqrt(400)
    assert abs(np.mean(sizes) - cost.cohort_sizes(20, 50)) < 6 * error


def test_only_evaluation_beyond_training_is_a_notice():
    assert len(cost.Cost(100, 1.0, 10, 10.0).lines()) == 1
    text = " ".join(cost.Cost(100, 1.0, 10, 10.1).lines())
    assert "Evaluation takes longer than training: use --rounds_per_eval=11" in text


@pytest.mark.slow
def test_the_estimate_is_told_before_the_first_round(tmp_path, monkeypatch, capsys):
    rounds = []
    run_round = LocalEngine.run_round

    def counted(*arguments):
        rounds.append(1)
        return run_round(*arguments)

    monkeypatch.setattr(LocalEngine, "run_round", counted)
    told = []
    config = digits(tmp_path)
    program.run(config, lambda expected: told.append((expected, len(rounds))))
    ((expected, before),) = told
    assert before == 0 and len(rounds) == 4
    assert (expected.rounds, expected.evaluations) == (4, 2)
    assert expected.round_seconds > 0 and expected.evaluation_seconds > 0
    # Tracing takes longer than a round of ten small clients.
    assert expected.preparation_seconds > expected.round_seconds
    assert capsys.readouterr().out == ""
    # A run that is done takes nothing.
    program.run(config, lambda expected: told.append(expected))
    assert len(told) == 1


@pytest.mark.slow
def test_a_run_that_is_not_quiet_prints_the_estimate_first(tmp_path, capsys):
    program.run(digits(tmp_path, quiet=False, seed=1))
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("About ") and "4 rounds of" in first


@pytest.mark.slow
def test_the_estimate_spends_nothing_and_changes_nothing(tmp_path):
    told = []
    with_estimate = program.run(digits(tmp_path / "a", seed=3), told.append)
    without = program.run(digits(tmp_path / "b", seed=3))
    assert len(told) == 1
    for a, b in zip(with_estimate.weights, without.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    program.run(digits(tmp_path / "c"), told.append)
    ledger = accounting.Ledger.load(tmp_path / "c" / LEDGER)
    assert ledger.steps == 4 and ledger.reserved == 0


def test_what_is_timed_is_of_test_clients(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        LocalEngine, "round_seconds", lambda self, arrays, m: seen.append(arrays) or 1.0
    )
    training = program._Training(digits(tmp_path))
    training.cost(4)
    tests, _ = training.eval_data.first_chunk()
    ((pixels, labels),) = seen
    assert len(pixels)
    np.testing.assert_array_equal(pixels, tests[0][: len(pixels)])
    np.testing.assert_array_equal(labels, tests[1][: len(labels)])


@pytest.mark.slow
def test_clients_of_all_sizes_and_batches_are_traced_once(tmp_path):
    training = program._Training(digits(tmp_path, seed=1))
    engine, source = training.engine, training.train
    clients = [
        training_arrays(training.task, training.config, source, client, 1)
        for client in source.client_ids
    ]
    sizes = [tuple(part[:n] for part in clients[0]) for n in (1, 3, 7)]
    for number, size in enumerate(sizes, 1):
        engine.run_round([size, *clients], number)
    for lane in engine._lanes:
        assert lane.train.experimental_get_tracing_count() == 1
    training.evaluator(engine.weights, training.eval_data)
    arrays, _ = training.eval_data.first_chunk()
    assert training.evaluator.batch_seconds(tuple(a[:5] for a in arrays)) > 0
    assert training.evaluator._step.experimental_get_tracing_count() == 1


@pytest.mark.slow
def test_no_example_is_evaluated_twice_at_the_end(tmp_path, monkeypatch):
    calls = []
    evaluate = Evaluator.__call__

    def counted(self, weights, data):
        calls.append(data)
        return evaluate(self, weights, data)

    monkeypatch.setattr(Evaluator, "__call__", counted)
    one = program.run(digits(tmp_path / "one", seed=1, eval_split="test"))
    assert len(calls) == 3  # Rounds 0, 2 and 4.
    assert one.final["accuracy"] == one.rows[-1]["eval_accuracy"]
    assert set(one.final) == {"accuracy", "loss"}
    calls.clear()
    program.run(digits(tmp_path / "two", seed=1, eval_split="validation"))
    assert len(calls) == 4
    assert not calls[-1].same_as(calls[0])


def test_data_are_the_same_only_if_their_examples_are(tmp_path):
    training = program._Training(digits(tmp_path))
    task, source = training.task, training.sources["test"]
    names = source.client_ids
    whole, again, part, other = (
        EvaluationData(task, source, names, None),
        EvaluationData(task, source, names, None),
        EvaluationData(task, source, names, 5),
        EvaluationData(task, training.train, names, 0),
    )
    assert whole.same_as(again)
    assert not whole.same_as(part) and not part.same_as(other)


@pytest.mark.slow
def test_with_a_seed_epsilon_is_told_once(tmp_path):
    result = program.run(digits(tmp_path, seed=1))
    with open(tmp_path / records.METRICS, newline="") as file:
        told = [row["round"] for row in csv.DictReader(file) if row["epsilon"]]
    assert told == ["0", "4"]
    assert result.rows[-1]["epsilon"] == result.epsilon > 0


@pytest.mark.slow
def test_the_federated_engine_forgets_what_it_timed(tmp_path):
    config = digits(tmp_path, engine="tff", seed=1)
    with program._context(config):
        training = program._Training(config)
        before = training.engine.state()
        arrays, _ = training.eval_data.first_chunk()
        assert training.engine.round_seconds(arrays, 4) > 0
        for a, b in zip(before, training.engine.state(), strict=True):
            np.testing.assert_array_equal(a, b)
