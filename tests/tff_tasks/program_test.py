"""Runs: their files, their resumption, and the agreement of both engines."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from driver_kit import reports
from tff_tasks import client_data, program, records, registry, streams
from tff_tasks.config import RunConfig
from tff_tasks.engine_local import LocalEngine

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {"num_clients": 30, "hidden_units": 8}


def digits(directory, **settings):
    settings = {
        "rounds": 4,
        "clients_per_round": 10,
        "rounds_per_eval": 2,
        "rounds_per_checkpoint": 2,
        "engine": "local",
        "quiet": True,
        "tensorboard": False,
        # The fastest to account for.
        "sampling": "poisson",
        "accountant": "rdp",
        **settings,
    }
    return RunConfig("digits", str(directory), options=SMALL, **settings)


def rows_of(directory):
    with open(directory / records.METRICS, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    directory = tmp_path_factory.mktemp("private")
    settings = {"sampling": "fixed", "accountant": "pld", "tensorboard": True}
    return program.run(digits(directory, **settings))


@pytest.mark.slow
def test_table_has_a_row_for_every_round(private):
    rows = rows_of(private.directory)
    assert [int(row["round"]) for row in rows] == [0, 1, 2, 3, 4]
    evaluated = [int(row["round"]) for row in rows if row["eval_accuracy"]]
    assert evaluated == [0, 2, 4]
    epsilon = [float(row["epsilon"]) for row in rows if row["epsilon"]]
    assert epsilon[0] == 0 and epsilon == sorted(epsilon) and epsilon[-1] > 0
    assert epsilon[-1] == private.epsilon
    norms = [float(row["clip_norm"]) for row in rows[1:]]
    after = [float(row["next_clip_norm"]) for row in rows[1:]]
    assert norms[0] == pytest.approx(0.1) and norms[1:] == after[:-1]


@pytest.mark.slow
def test_nothing_unprotected_is_written(private):
    columns = set(rows_of(private.directory)[0])
    assert columns == {
        "round",
        "clip_norm",
        "next_clip_norm",
        "unclipped_fraction",
        "sum_noise_stddev",
        "data_seconds",
        "round_seconds",
        "epsilon",
        "eval_accuracy",
        "eval_loss",
    }
    assert not (private.directory / "cohorts.jsonl").exists()


def test_config_has_settings_derived_ones_and_versions(private):
    content = json.loads((private.directory / reports.CONFIG).read_text())
    assert content["settings"]["noise_multiplier"] == 0.1
    assert content["settings"]["options"]["num_clients"] == 30
    derived = content["derived"]
    assert derived["count_stddevs"] == [0.5]
    assert derived["sum_noise_multiplier"] == pytest.approx(0.100504, rel=1e-5)
    assert derived["population"] == 30
    assert derived["delta"] == pytest.approx(30**-1.1)
    assert content["result"]["epsilon"] == private.epsilon
    assert content["result"]["private"] is True
    assert content["versions"]["tensorflow"].startswith("2.")


def test_report_states_privacy_for_both_populations(private):
    words = " ".join(private.report.split())
    for expected in (
        "with the 30 clients that there are",
        f"({private.epsilon:.4g}, {30**-1.1:.4g})-differential privacy",
        "replace one record",
        "If there were 1000000 clients",
        "as Table 1 of Andrew et al. (2021) has it",
        "This is no claim about this run.",
        "average over the last 1 rounds",
    ):
        assert expected in words, expected
    assert "not private" not in words.lower()
    assert (private.directory / reports.REPORT).read_text() == private.report


def test_tensorboard_has_the_metrics(private):
    files = list((private.directory / "tensorboard").iterdir())
    assert len(files) == 1
    tags = set()
    for event in tf.compat.v1.train.summary_iterator(str(files[0])):
        tags |= {value.tag for value in event.summary.value}
    assert {"eval_accuracy", "clip_norm", "epsilon"} <= tags


@pytest.mark.slow
def test_seed_repeats_the_run_and_forfeits_privacy(tmp_path):
    one, two, other = (
        program.run(digits(tmp_path / name, seed=seed))
        for name, seed in (("one", 3), ("two", 3), ("other", 4))
    )
    for a, b in zip(one.weights, two.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not np.allclose(one.weights[0], other.weights[0], atol=1e-3)
    assert not one.private and "NOT private" in one.report
    assert "a seed was fixed" in one.report


def without_times(rows):
    return [
        {k: float(v) for k, v in row.items() if "seconds" not in k and v}
        for row in rows
    ]


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.slow
def test_stopped_run_continues_exactly(tmp_path, monkeypatch, stop):
    settings = {"seed": 5, "log_cohorts": True, "rounds": 5}
    whole = program.run(digits(tmp_path / "whole", **settings))

    rounds = LocalEngine.run_round

    def failing(self, clients, round_num):
        if round_num == stop + 1:
            raise KeyboardInterrupt
        return rounds(self, clients, round_num)

    monkeypatch.setattr(LocalEngine, "run_round", failing)
    with pytest.raises(KeyboardInterrupt):
        program.run(digits(tmp_path / "cut", **settings))
    monkeypatch.setattr(LocalEngine, "run_round", rounds)
    program.run(digits(tmp_path / "cut", **settings))

    one, two = (rows_of(tmp_path / name) for name in ("whole", "cut"))
    assert [row["round"] for row in two] == [row["round"] for row in one]
    for a, b in zip(without_times(one), without_times(two), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    cohorts = [(tmp_path / n / "cohorts.jsonl").read_text() for n in ("whole", "cut")]
    assert cohorts[0] == cohorts[1] and len(cohorts[0].splitlines()) == 5
    assert whole.rows[-1]["round"] == 5


@pytest.mark.slow
def test_unseeded_run_counts_rounds_that_were_lost(tmp_path, monkeypatch):
    rounds = LocalEngine.run_round

    def failing(self, clients, round_num):
        if round_num == 4:
            raise KeyboardInterrupt
        return rounds(self, clients, round_num)

    monkeypatch.setattr(LocalEngine, "run_round", failing)
    with pytest.raises(KeyboardInterrupt):
        program.run(digits(tmp_path))
    monkeypatch.setattr(LocalEngine, "run_round", rounds)
    result = program.run(digits(tmp_path))
    # Rounds 3 and 4 ran twice, as far as anyone can know.
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3, 4]
    ledger = json.loads((tmp_path / "privacy.json").read_text())
    assert sum(ledger["phases"][0]["runs"]) == 6


@pytest.mark.slow
def test_finished_run_can_be_prolonged_and_not_changed(tmp_path):
    program.run(digits(tmp_path, seed=1, rounds=2))
    longer = program.run(digits(tmp_path, seed=1, rounds=3))
    assert [row["round"] for row in longer.rows] == [0, 1, 2, 3]
    with pytest.raises(records.RunMismatchError, match="server_learning_rate=0.32"):
        program.run(digits(tmp_path, seed=1, server_learning_rate=0.1))


@pytest.mark.slow
def test_budget_ends_the_run(tmp_path):
    config = digits(tmp_path, noise_multiplier=0.9, rounds=50, epsilon_budget=6.0)
    result = program.run(config)
    assert 0 < result.rows[-1]["round"] < 50
    assert result.epsilon <= 6


@pytest.mark.slow
def test_poisson_cohorts_vary_in_size(tmp_path):
    config = digits(tmp_path, seed=2, log_cohorts=True, rounds=8)
    program.run(config)
    lines = (tmp_path / "cohorts.jsonl").read_text().splitlines()
    sizes = [len(json.loads(line)["clients"]) for line in lines]
    assert len(set(sizes)) > 1 and len(sizes) == 8


@pytest.mark.slow
def test_train_metrics_only_on_demand_and_named_so(tmp_path):
    config = digits(tmp_path, engine="tff", rounds=1, train_metrics=True)
    result = program.run(config)
    assert result.rows[1]["unprotected_train_loss"] > 0
    assert "WITHOUT noise" in " ".join(result.report.split())


@pytest.mark.parametrize("split", ["test", "validation"])
def test_evaluation_splits(tmp_path, split):
    config = digits(tmp_path, rounds=1, eval_split=split, noise_multiplier=0.0)
    result = program.run(config)
    examples = result.derived["eval_examples"]
    assert examples == (360 if split == "test" else 180)
    same = result.final["loss"] == pytest.approx(result.rows[-1]["eval_loss"])
    assert same == (split == "test")


def test_halves_of_the_test_clients_are_fixed_and_apart():
    names = [str(i) for i in range(9)]
    one, two = (client_data.select_clients(names, x) for x in ("validation", "rest"))
    assert sorted(one + two) == names and len(one) == 5
    assert one == client_data.select_clients(names, "validation")


def test_evaluation_stops_at_so_many_examples():
    task = registry.TASKS["digits"](SMALL)
    source = task.load(None)["test"]
    data = client_data.EvaluationData(task, source, source.client_ids, 50)
    assert data.num_examples == 50 == sum(len(arrays[1]) for arrays in data)


def test_streams_are_functions_of_their_names():
    draw = {
        place: streams.stream(1, *place).random()
        for place in [("a", 1), ("a", 2), ("b", 1), ("a", "1", 2), ("a", 12)]
    }
    assert len(set(draw.values())) == len(draw)
    assert streams.stream(1, "a", 1).random() == draw["a", 1]
    assert streams.stream(2, "a", 1).random() != draw["a", 1]
    assert streams.stream(None, "a").random() != streams.stream(None, "a").random()


@pytest.mark.slow
def test_engines_agree(tmp_path):
    """Without noise, both do the same arithmetic: adaptive and layerwise."""
    for layerwise in (False, True):
        results = [
            program.run(
                digits(
                    tmp_path / f"{engine}-{layerwise}",
                    engine=engine,
                    seed=7,
                    noise_multiplier=0.0,
                    layerwise=layerwise,
                )
            )
            for engine in ("local", "tff")
        ]
        for a, b in zip(results[0].weights, results[1].weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6)
        for a, b in zip(results[0].rows, results[1].rows, strict=True):
            for name in a:
                if "seconds" not in name:
                    assert a[name] == pytest.approx(b[name], rel=1e-4, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "tff"])
def test_noise_has_the_stated_deviation(tmp_path, engine):
    """A server rate of 1, no momentum and tiny steps leave the noise alone."""
    config = digits(
        tmp_path,
        engine=engine,
        rounds=1,
        noise_multiplier=0.9,
        client_learning_rate=1e-9,
        server_learning_rate=1.0,
        server_momentum=0.0,
        seed=1,
    )
    task = registry.TASKS["digits"](SMALL)
    tf.keras.utils.set_random_seed(streams.stream_seed(1, "initial"))
    initial = [v.numpy() for v in task.build_model().trainable_variables]
    result = program.run(config)
    moved = np.concatenate(
        [np.ravel(a - b) for a, b in zip(result.weights, initial, strict=True)]
    )
    stddev = result.rows[1]["sum_noise_stddev"]
    assert stddev == pytest.approx(0.1 * result.derived["sum_noise_multiplier"])
    # 610 numbers: their deviation is within 15 % but for 2e-7.
    assert np.std(moved) * 10 == pytest.approx(stddev, rel=0.15)


@pytest.mark.slow
def test_secure_and_distributed_runs(tmp_path):
    secure = program.run(
        digits(tmp_path / "secure", engine="tff", rounds=2, secure=True)
    )
    assert "Secure aggregation is simulated" in secure.report
    shared = program.run(
        digits(
            tmp_path / "shared",
            engine="tff",
            rounds=2,
            secure=True,
            noise="distributed",
            # A Poisson cohort has fewer than minimum_clients once in six rounds.
            sampling="fixed",
            minimum_clients=8,
            noise_multiplier=0.5,
        )
    )
    assert "knows who takes part" in shared.report
    # Sampling does not help: the cost is that of every client in every round.
    assert shared.epsilon > 5 and shared.private


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
def test_killed_process_resumes(tmp_path):
    """A program killed in the middle of a round equals an uninterrupted program."""
    arguments = [
        "--num_clients=30",
        "--hidden_units=8",
        "--clients_per_round=10",
        "--sampling=poisson",
        "--accountant=rdp",
        "--rounds=6",
        "--rounds_per_checkpoint=2",
        "--rounds_per_eval=3",
        "--seed=3",
        "--log_cohorts",
    ]

    def start(name):
        log = open(tmp_path / f"{name}.log", "w")
        return subprocess.Popen(
            [sys.executable, "-m", "tff_tasks.digits", *arguments]
            + [f"--output_dir={tmp_path / name}"],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )

    process = start("cut")
    deadline = time.monotonic() + 200
    table = tmp_path / "cut" / records.METRICS
    while time.monotonic() < deadline and process.poll() is None:
        if table.exists() and len(table.read_text().splitlines()) >= 5:
            break
        time.sleep(0.01)
    workers = children(process.pid)
    process.kill()
    process.wait()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    done = len(table.read_text().splitlines()) - 2
    assert 3 <= done < 6, (tmp_path / "cut.log").read_text()

    for name in ("cut", "whole"):
        process = start(name)
        assert process.wait(timeout=250) == 0, (tmp_path / f"{name}.log").read_text()
    one, two = (rows_of(tmp_path / name) for name in ("whole", "cut"))
    assert [int(row["round"]) for row in two] == list(range(7))
    for a, b in zip(without_times(one), without_times(two), strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    cohorts = [(tmp_path / n / "cohorts.jsonl").read_text() for n in ("whole", "cut")]
    assert cohorts[0] == cohorts[1]
