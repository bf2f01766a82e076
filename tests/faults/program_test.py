"""A federated program, killed at each call that changes its files in turn.

Training is replaced by arithmetic, so that hundreds of runs take seconds.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from driver_kit import reports
from tests.faults.disk_test import federated
from tests.faults.injection import Killed, faults
from tfdpclip.accounting import Ledger
from tff_tasks import program, records

ROUNDS = 4


class Engine:
    """Counts rounds; its only weight is their number."""

    ran = 0
    sum_multiplier = 1.0
    count_stddevs = ()

    def __init__(self, task, config, weights, spec, correlated):
        self._rounds = np.zeros((), np.int64)
        self.weights = []

    def run_round(self, clients, round_num):
        # The state is that of the round before.
        assert self._rounds == round_num - 1
        self._rounds = self._rounds + 1
        type(self).ran += 1
        return {"clip_norm": np.array([0.1 * round_num])}

    def state(self):
        return [self._rounds]

    def memory(self):
        return None  # the noise is independent

    def restore(self, arrays):
        (self._rounds,) = arrays


@pytest.fixture
def quick(monkeypatch):
    """Programs of which only the files are real."""
    task = program.task_class("digits")({"num_clients": 30}, synthetic=False)
    sources = task.load(None)
    model = task.build_model()
    monkeypatch.setattr(type(task), "load", lambda self, data_dir: sources)
    monkeypatch.setattr(type(task), "build_model", lambda self: model)
    monkeypatch.setattr(program, "_engine", lambda config: Engine)
    monkeypatch.setattr(program, "_batch_spec", lambda task, source: None)
    monkeypatch.setattr(program, "training_arrays", lambda *arguments: None)
    evaluate = {"accuracy": 0.5, "loss": 1.0}
    monkeypatch.setattr(
        program, "Evaluator", lambda task, model: lambda weights, data: evaluate
    )
    Engine.ran = 0


def settings(directory, every, seed=None):
    return federated(
        directory,
        rounds=ROUNDS,
        rounds_per_checkpoint=every,
        seed=seed,
        log_cohorts=seed is not None,
    )


def check_finished(directory):
    rows = records.Table(directory / records.METRICS).rows
    assert [row["round"] for row in rows] == list(range(ROUNDS + 1))
    assert [row["clip_norm"] for row in rows[1:]] == pytest.approx(
        [0.1 * number for number in range(1, ROUNDS + 1)]
    )
    config = json.loads((directory / reports.CONFIG).read_text())
    assert config["result"]["rounds"] == ROUNDS
    assert (directory / reports.REPORT).exists()
    return config


@pytest.mark.parametrize(
    "every, seed, stride",
    [
        (2, None, 11),
        (1, 3, 7),
        pytest.param(1, None, 3, marks=pytest.mark.slow),
        pytest.param(2, None, 1, marks=pytest.mark.slow),
        pytest.param(3, 3, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_call(quick, every, seed, stride, tmp_path):
    at, kills = 1, 0
    while True:
        directory = tmp_path / f"{at}"
        ledger = directory / "privacy.json"
        Engine.ran = 0
        try:
            with faults(at, within=tmp_path) as happened:
                program.run(settings(directory, every, seed))
        except Killed:
            kills += 1
        if seed is None and ledger.exists():
            steps = Ledger.load(ledger).steps
            assert Engine.ran <= steps <= Engine.ran + 1, at
        else:
            assert seed is not None or Engine.ran == 0
        result = program.run(settings(directory, every, seed))
        config = check_finished(directory)
        assert config["result"]["epsilon"] == result.epsilon
        if seed is None:
            steps = Ledger.load(ledger).steps
            assert max(ROUNDS, Engine.ran) <= steps <= Engine.ran + 1
            # Only rounds since the last checkpoint are run again.
            assert Engine.ran <= ROUNDS + every
        else:
            lines = (directory / "cohorts.jsonl").read_text().splitlines()
            assert [json.loads(x)["round"] for x in lines] == [1, 2, 3, 4]
        if not happened.happened:
            break
        at += stride
    assert kills * stride > 50
