"""Several processes train a model: the same guarantee, and an end if one is lost.

The workers are processes on this machine, with real collectives between them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests import source_tree
from tests.replicas import worker
from tests.stack import keras2_only
from tfdpclip.keras import workers

pytestmark = keras2_only("its fit fails on several workers")


def ports(count):
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found


class Run:
    """Workers, and their reports."""

    def __init__(self, directory, settings, count=2):
        self.files = [directory / f"{time.time_ns()}_{i}.log" for i in range(count)]
        addresses = [f"127.0.0.1:{port}" for port in ports(count)]
        self.processes = []
        for i, path in enumerate(self.files):
            task = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": i},
            }
            with path.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.replicas.worker"]
                        + [json.dumps(settings)],
                        cwd=source_tree.ROOT,
                        env=dict(os.environ, TF_CONFIG=json.dumps(task)),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def ended(self, of=None, within=240):
        """The exit codes, or those of some; fails if a worker runs on."""
        chosen = range(len(self.processes)) if of is None else of
        end = time.monotonic() + within
        codes = {}
        for i in chosen:
            try:
                codes[i] = self.processes[i].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"worker {i} did not end: {self.text(i)[-5000:]}")
        return codes

    def text(self, i):
        return self.files[i].read_text()

    def said(self, i):
        """The last thing that a worker reported."""
        lines = [line for line in self.text(i).splitlines() if line.startswith("{")]
        assert lines, self.text(i)[-5000:]
        return json.loads(lines[-1])


def finished(directory, settings, count=2):
    with Run(directory, settings, count) as run:
        codes = run.ended()
        assert set(codes.values()) == {0}, [run.text(i)[-3000:] for i in codes]
        return [run.said(i) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_workers_train_what_one_device_does(tmp_path, accumulation):
    steps = 4 * accumulation
    settings = {"accumulation": accumulation, "steps": steps}
    said = finished(tmp_path, settings | {"weights": str(tmp_path / "w")})
    assert said[0]["digest"] == said[1]["digest"] and said[0]["iterations"] == 4
    model = worker.compiled(settings)
    model.fit(worker.batches_of(settings).repeat(), steps_per_epoch=steps, verbose=0)
    with np.load(tmp_path / "w_0.npz") as file:
        for name, expected in zip(file.files, model.get_weights(), strict=True):
            np.testing.assert_allclose(file[name], expected, rtol=0, atol=1e-6)
    assert said[0]["clip"] == pytest.approx(float(model.optimizer.clip_norm), rel=1e-6)
    assert said[0]["clip"] == said[1]["clip"]


@pytest.mark.slow
def test_three_workers_with_an_empty_share_and_accumulation(tmp_path):
    settings = {
        "accumulation": 2,
        "steps": 8,
        "sampling": 0.01,
        "z": 2.0,
        "fixed": True,
    }
    settings |= {"epsilon": 50.0, "ledger": str(tmp_path / "ledger.json")}
    said = finished(tmp_path, settings, 3)
    assert len({one["digest"] for one in said}) == 1
    assert len({tuple(one["epsilon"]) for one in said}) == 1
    assert dpc.accounting.Ledger.load(tmp_path / "ledger.json").steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 7])
def test_the_noise_of_two_workers_is_that_of_one(tmp_path, seed):
    settings = {"z": 40.0, "rate": 1.0, "steps": 1, "width": 6000, "seed": seed}
    settings |= {"fixed": True}
    settings |= {"epsilon": 50.0, "weights": str(tmp_path / "w")}
    said = finished(tmp_path, settings)
    assert said[0]["digest"] == said[1]["digest"]
    before = worker.compiled(settings | {"z": 0.0}).get_weights()
    with np.load(tmp_path / "w_0.npz") as file:
        parts = [(file[n] - b).ravel() for n, b in zip(file.files, before, strict=True)]
    # The regulariser's gradient and the clipped sum are less than a hundredth of it.
    noise = np.concatenate(parts) / (40.0 * 0.3 / 61)
    # 60,000 numbers: within 5.2 / sqrt(120,000) but for 2e-7, and the rest.
    assert np.std(noise) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_all_workers_stop_together_at_the_chiefs_budget(tmp_path):
    settings = {"z": 1.0, "sampling": 0.2, "epsilon": 3.0, "steps": 40}
    settings |= {"ledger": str(tmp_path / "ledger.json")}
    said = finished(tmp_path, settings)
    ledger = dpc.accounting.Ledger.load(tmp_path / "ledger.json")
    assert said[0]["iterations"] == said[1]["iterations"] == ledger.steps < 40
    assert said[0]["epsilon"] == said[1]["epsilon"] == [ledger.epsilon()]
    assert 2.5 < ledger.epsilon() <= 3.0
    # A spent budget stays spent: both refuse, and only the chief knows why.
    with Run(tmp_path, settings) as run:
        run.ended()
        kinds = [run.said(i)["error"] for i in range(2)]
    assert "leaves room for 0 steps" in kinds[0][1]
    assert kinds[1][0] == "PrivacyMismatchError" and "Another worker" in kinds[1][1]


# Faults: the messages of the remaining workers, and the delay on a busy machine.

FAULTS = {
    "SIGKILL": 30.0,  # Noticed at once.
    "SIGSTOP": 60.0,  # By the timeout, or the missing heartbeat.
    "raise": 30.0,
}


@pytest.mark.parametrize(
    "what, place",
    [
        pytest.param("SIGKILL", 1, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 0, marks=pytest.mark.slow),
        pytest.param("SIGSTOP", 1, marks=pytest.mark.slow),
        pytest.param("SIGSTOP", 0, marks=pytest.mark.slow),
        pytest.param("raise", 1, marks=pytest.mark.slow),
        pytest.param("raise", 0, marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_ends_the_others_and_no_step_is_forgotten(tmp_path, what, place):
    path = tmp_path / "ledger.json"
    settings = {"z": 1.0, "sampling": 0.2, "epsilon": 50.0, "steps": 5, "epochs": 3}
    settings |= {"ledger": str(path), "backup": str(tmp_path / "backup")}
    settings |= {"save_freq": 4, "timeout_seconds": 8}
    broken = settings | {"fault": [place, what, 8], "linger": 120}
    other = 1 - place
    with Run(tmp_path, broken) as run:
        if what == "SIGKILL":
            run.ended([place])
        began = time.monotonic()
        end = began + 200
        while '"error"' not in run.text(other) and time.monotonic() < end:
            time.sleep(0.2)
        kind, text = run.said(other)["error"]
        assert kind == "WorkerLostError" and "Another worker" in text, text
        if what == "SIGKILL":
            assert time.monotonic() - began < FAULTS[what]
        elif what == "raise":
            kind, _ = run.said(place)["error"]
            assert kind == "ArithmeticError"
            assert run.said(other)["at"] - run.said(place)["at"] < FAULTS[what]
        if what == "SIGSTOP":
            os.kill(run.processes[place].pid, signal.SIGKILL)
    # Seven steps were released; the eighth was reserved, or was under way.
    assert dpc.accounting.Ledger.load(path).steps in (7, 8)
    said = finished(tmp_path, settings)
    assert said[0]["digest"] == said[1]["digest"]
    assert said[0]["iterations"] == 15
    # From the backup at step 4 (or 5, an epoch's end): eleven steps more.
    ledger = dpc.accounting.Ledger.load(path)
    assert ledger.steps >= 7 + 15 - 5
    assert said[0]["epsilon"][-1] == pytest.approx(ledger.epsilon())


# Data.


@pytest.mark.slow
def test_the_union_of_the_parts_is_poisson_sampling():
    """Rates and pairs of records, over the parts of two machines.

    4000 draws of 101 records: a rate's deviation is sqrt(.2 * .8 / 4000) = 0.0063, and
    that of a correlation 1 / sqrt(4000). Of 101 rates and 2550 pairs across the parts
    none is 6.5 deviations away but for 2.2e-7.
    """
    from tfdpclip.sampling import distributed

    draws, count = 4000, 101
    seen = np.zeros((draws, count), bool)
    for part in range(2):
        batches = dpc.sampling.Poisson(0.2).batches(np.arange(count)[:, None])
        drawer = distributed._drawer_of_part(batches, part, 2)
        for step in range(draws):
            seen[step, drawn_by(drawer)] = True
        with pytest.raises(ValueError, match="distributed over several machines"):
            batches._drawer.next_element()
    rates = seen.mean(axis=0)
    assert np.abs(rates - 0.2).max() < 6.5 * np.sqrt(0.16 / draws)
    correlations = np.corrcoef(seen.T)
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 6.5 / np.sqrt(draws)
    sizes = seen.sum(axis=1)
    # The variance of a binomial's: 4000 of them, of kurtosis about 3.
    expected = count * 0.16
    assert abs(sizes.var() / expected - 1) < 6 * np.sqrt(2 / draws)


def drawn_by(drawer):
    rows, weight = drawer.next_element()
    return rows[weight > 0].ravel()


def test_parts_of_one_seed_draw_differently_and_share_no_record():
    from tfdpclip.sampling import distributed

    firsts = []
    for part in range(2):
        batches = dpc.sampling.Poisson(0.5).batches(np.arange(100)[:, None], seed=3)
        drawer = distributed._drawer_of_part(batches, part, 2)
        assert drawer.source.size == 50 and drawer.population == 100
        assert drawer.scheme.population in (None, 50)
        firsts.append(drawn_by(drawer))
    assert {int(r) % 2 for r in firsts[0]} == {0}
    assert {int(r) % 2 for r in firsts[1]} == {1}
    assert sorted(firsts[0] // 2) != sorted(firsts[1] // 2)


def test_schemes_whose_parts_depend_on_each_other_are_refused():
    from tfdpclip.sampling import distributed

    batches = dpc.sampling.FixedSize(10, 90).batches(np.zeros((90, 1)))
    with pytest.raises(ValueError, match="draw together"):
        distributed._drawer_of_part(batches, 0, 2)


@pytest.mark.slow
def test_workers_that_have_the_records_in_another_order_are_refused(tmp_path):
    settings = {"z": 1.0, "sampling": 0.2, "epsilon": 50.0, "other_order": True}
    with Run(tmp_path, settings) as run:
        run.ended()
        said = [run.said(i)["error"] for i in range(2)]
    assert {kind for kind, _ in said} == {"PrivacyMismatchError"}
    assert "Another worker" in said[0][1] and "in another order" in said[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "elsewhere, named",
    [
        ({"z": 0.1}, "differ in noise_multiplier"),
        pytest.param({"norm": 9.0}, "differ in clip", marks=pytest.mark.slow),
        pytest.param(
            {"sampling": 0.5}, "differ in the sampling", marks=pytest.mark.slow
        ),
        pytest.param({"draws": 3}, "differ in the sampling", marks=pytest.mark.slow),
        pytest.param({"seed": 4}, "differ in the optimizer", marks=pytest.mark.slow),
        pytest.param({"steps": 7}, "differ in fit", marks=pytest.mark.slow),
        pytest.param(
            {"epsilon": 9.0}, "differ in PrivacyBudget", marks=pytest.mark.slow
        ),
        pytest.param(
            {"moved": True}, "differ from the chief's", marks=pytest.mark.slow
        ),
    ],
)
def test_workers_that_were_told_something_else_are_refused(tmp_path, elsewhere, named):
    """The chief's statement would be true of the chief alone."""
    settings = {"z": 1.0, "sampling": 0.2, "epsilon": 50.0, "elsewhere": elsewhere}
    with Run(tmp_path, settings | {"ledger": str(tmp_path / "l.json")}) as run:
        run.ended()
        said = [run.said(i)["error"] for i in range(2)]
    assert {kind for kind, _ in said} == {"PrivacyMismatchError"}, said
    assert "Another worker" in said[0][1] and named in said[1][1]
    assert dpc.accounting.Ledger.load(tmp_path / "l.json").steps == 0


@pytest.mark.slow
def test_weights_that_come_apart_end_all_workers(tmp_path):
    settings = {"z": 1.0, "sampling": 0.2, "epsilon": 50.0, "epochs": 3, "rates": True}
    with Run(tmp_path, settings) as run:
        run.ended()
        said = [run.said(i)["error"] for i in range(2)]
    assert {kind for kind, _ in said} == {"PrivacyMismatchError"}, said
    assert "Another worker" in said[0][1] and "differ from the chief's" in said[1][1]


# Only the chief keeps the ledger.


def test_only_the_chief_opens_the_ledger(monkeypatch, tmp_path):
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}

    def made(index):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        scheme = dpc.sampling.Poisson(0.1)
        return dpc.keras.PrivacyBudget(1.0, 1e-5, scheme, ledger=tmp_path / "l.json")

    assert made(0).ledger.steps == 0
    other = made(1)
    with pytest.raises(ValueError, match="not the chief"):
        _ = other.ledger
    with pytest.raises(ValueError, match="not the chief"):
        _ = other.statement()
    # With TF_CONFIG, and a model that trains alone: no process would keep the budget.
    model = worker.compiled({"z": 1.0})
    with pytest.raises(ValueError, match="TF_CONFIG"):
        model.fit(worker.batches_of({}), verbose=0, callbacks=[other])


@pytest.mark.parametrize(
    "config",
    [
        "{cluster",
        "7",
        '{"cluster": 3}',
        '{"cluster": {"worker": "host1:1"}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"'
        ', "index": 2}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"'
        ', "index": "x"}}',
    ],
)
def test_a_budget_of_unreadable_tf_config_is_refused(config, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match="cannot read TF_CONFIG.* For example"):
        dpc.keras.PrivacyBudget(1.0, 1e-5, dpc.sampling.Poisson(0.1))


def test_a_step_that_is_only_called_cancelled_says_how_that_comes():
    error = tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")
    with (
        pytest.raises(RuntimeError, match="One of 2 .*RecvAsync.* train on one device"),
        workers.explain_cancelled_replicas(2),
    ):
        raise error
    with (
        pytest.raises(tf.errors.CancelledError),
        workers.explain_cancelled_replicas(1),
    ):
        raise error


def test_a_strategy_without_a_timeout_is_not_what_is_made():
    with pytest.raises(ValueError, match="timeout_seconds"):
        dpc.keras.multi_worker_strategy(timeout_seconds=0)
    with pytest.raises(ValueError, match="communication_options"):
        dpc.keras.multi_worker_strategy(communication_options=None)
    assert issubclass(dpc.keras.WorkerLostError, RuntimeError)
    assert tf.distribute.get_strategy().num_replicas_in_sync == 1
