"""Correlated noise in runs: its secrets, the counts of resumed runs, the refusals."""

import json
import os

import numpy as np
import pytest

from tests.tff_tasks.program_test import digits, rows_of, without_times
from tff_tasks import program, records
from tff_tasks.config import RunConfig
from tff_tasks.engine_local import LocalEngine
from tff_tasks.privacy import Spending

TURNS = {"noise": "toeplitz", "sampling": "fixed_order", "clipping": "fixed"}


def stop_at(monkeypatch, owner, name, number):
    """Stops a run in its `number`-th call of a method."""
    own, calls = getattr(owner, name), []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return own(self, *arguments)

    monkeypatch.setattr(owner, name, failing)


def cut_and_continued(directory, monkeypatch, owner, name, number, **settings):
    config = digits(directory, **TURNS, **settings)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, owner, name, number)
        program.run(config)
    return program.run(config)


def runs_of(directory):
    ledger = json.loads((directory / "privacy.json").read_text())
    return [phase["runs"] for phase in ledger["phases"]]


@pytest.mark.slow
def test_a_run_that_lost_rounds_begins_another_matrix(tmp_path, monkeypatch):
    result = cut_and_continued(tmp_path, monkeypatch, LocalEngine, "run_round", 4)
    # The checkpoint is of round 2; rounds 3 and 4 may have been released.
    assert runs_of(tmp_path) == [[4, 2]] and len(rows_of(tmp_path)) == 5
    assert "correlated by a square root of 16 bands, momentum 0.9" in result.report
    assert "at least 3 steps from one time to the next" in result.report
    assert "anew every 4 steps" in result.report and result.private
    modes = {p.name: os.stat(p).st_mode & 0o777 for p in tmp_path.rglob("*.npz")}
    assert len(modes) == 4
    assert all((mode == 0o600) == ("secret" in name) for name, mode in modes.items())
    # No other file has the noise that later rounds subtract.
    kept = np.load(tmp_path / "checkpoints/secret_noise_000004.npz")["kept"]
    rest = np.load(tmp_path / "checkpoints/round_000004.npz")
    (same,) = [part for part in rest.values() if part.shape == kept.shape]
    assert np.any(kept) and not np.any(same)


@pytest.mark.slow
def test_a_run_that_lost_nothing_goes_on_with_its_noise(tmp_path, monkeypatch):
    result = cut_and_continued(tmp_path, monkeypatch, Spending, "cohort", 3)
    assert runs_of(tmp_path) == [[4]]
    whole = program.run(digits(tmp_path / "whole", **TURNS))
    assert result.epsilon == whole.epsilon
    config = digits(tmp_path, **{**TURNS, "rounds": 6})
    with pytest.raises(records.RunMismatchError, match="rounds=4, not 6"):
        program.run(config)


@pytest.mark.slow
def test_without_its_secret_a_run_begins_another_matrix(tmp_path, monkeypatch):
    config = digits(tmp_path, **TURNS)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, Spending, "cohort", 3)
        program.run(config)
    secret = tmp_path / "checkpoints/secret_noise_000002.npz"
    secret.chmod(0o644)
    with pytest.raises(records.RunFileError, match="another matrix"):
        program.run(config)
    secret.unlink()
    program.run(config)
    assert runs_of(tmp_path) == [[2, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "tff"])
@pytest.mark.parametrize("noise", ["tree", "buffered"])
def test_with_a_seed_a_stopped_run_continues_exactly(
    tmp_path, monkeypatch, engine, noise
):
    settings = {**TURNS, "noise": noise, "seed": 5, "engine": engine}
    program.run(digits(tmp_path / "whole", **settings))
    config = digits(tmp_path / "cut", **settings)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, Spending, "cohort", 4)
        program.run(config)
    program.run(config)
    rows = [without_times(rows_of(tmp_path / name)) for name in ("whole", "cut")]
    for one, two in zip(*rows, strict=True):
        assert one == pytest.approx(two, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": "tree"}, "noise=tree .* --sampling=fixed_order"),
        ({"noise": "tree", "sampling": "poisson"}, "--sampling=fixed_order"),
        ({"noise": "buffered", **{"minimum_clients": 3}}, "minimum_clients"),
        ({"noise": "pink"}, "noise"),
        (
            {"noise": "tree", "sampling": "fixed_order", "clipping": "none",
             "noise_multiplier": 1.0},
            "nothing would bound",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig("digits", **settings)


def test_the_matrix_knows_the_momentum_and_the_scheme():
    config = RunConfig(
        "digits",
        noise="buffered",
        sampling="fixed_order",
        rounds=8,
        server_momentum=0.5,
    )
    run = config.correlated(200)
    assert run.steps == 8 and run.sampling == config.scheme(200)
    assert run.matrix.workload.momentum == 0.5
    assert RunConfig("digits").correlated(200) is None
