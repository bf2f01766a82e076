"""Runs killed at random moments lose the step in flight, and count it all the same."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pytest
import tensorflow as tf

from driver_kit import npz_files, reports
from tests.faults import correlated_run, federated_run, keras_run, stream_run
from tests.stack import KERAS_3
from tfdpclip.accounting import Ledger
from tff_tasks import records

ROOT = pathlib.Path(__file__).resolve().parents[2]
# No run takes that long; a child that hangs fails the test instead of blocking it.
_PATIENCE = 120.0


class Zygote:
    """Starts runs, each in a process of its own, and kills them."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout.readline() == "ready\n"

    def run(self, kind, directory: pathlib.Path, steps=None, delay=0.0) -> bool:
        """Runs some steps and a delay, then kills; returns whether the run ended.

        Args:
          kind: of run.
          directory: the run's.
          steps: how many; None for all.
          delay: until the kill, in seconds.
        """
        until = None if steps is None else kind.ran(directory) + steps
        self._process.stdin.write(f"{kind.module}\t{directory}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        ended = threading.Event()

        def kill():
            begun = time.monotonic()
            while not ended.wait(0.001) and time.monotonic() - begun < _PATIENCE:
                if until is not None and kind.ran(directory) >= until:
                    break
            if not ended.wait(delay):
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        status = int(self._process.stdout.readline())
        ended.set()
        killer.join()
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        log = pathlib.Path(f"{directory}.log")
        assert killed or status == 0, log.read_text()[-3000:]
        assert steps is not None or not killed, "the run hangs"
        return not killed

    def close(self):
        self._process.stdin.close()
        self._process.wait(_PATIENCE)


@pytest.fixture(scope="module")
def zygote():
    started = Zygote()
    yield started
    started.close()


def count(path: pathlib.Path) -> int:
    """Steps that certainly ran, by the bytes that they left."""
    return path.stat().st_size if path.exists() else 0


class Backup:
    """The backup of Keras 3: a file of weights, and a second file with the epoch."""

    def __init__(self, directory: pathlib.Path):
        self._weights = directory / "latest.weights.h5"
        self._epoch = directory / "training_metadata.json"

    def mend(self) -> None:
        """Restores the previous files where a kill left incomplete files.

        The files were written in place; Keras goes back only if HDF5 raises OSError.
        """
        if self._weights.exists() and self.steps() is None:
            self._go_back(self._weights)
            self._go_back(self._epoch)
        elif self._epoch.exists() and not self._epoch.read_bytes():
            self._go_back(self._epoch)

    @staticmethod
    def _go_back(path: pathlib.Path):
        before = path.with_name(f"{path.name}.bkp")
        if before.exists():
            shutil.copyfile(before, path)
        else:
            path.unlink(missing_ok=True)

    def steps(self) -> int | None:
        """Steps behind the weights; None unless the whole file can be read."""

        def read(name, part):
            if isinstance(part, h5py.Dataset):
                part[()]

        try:
            with h5py.File(self._weights) as file:
                file.visititems(read)
                return int(file["optimizer/vars/0"][()])
        except FileNotFoundError:
            return 0
        except (OSError, RuntimeError, KeyError):
            return None

    def epoch(self) -> int:
        """The epoch that is next."""
        if not self._epoch.exists():
            return 0
        return json.loads(self._epoch.read_text())["epoch"]


class KerasRun:
    """The conditions on the Keras run's files."""

    module = "keras_run"
    wanted = keras_run.EPOCHS * keras_run.STEPS_PER_EPOCH
    ahead = keras_run.AHEAD

    @staticmethod
    def ran(directory):
        return count(directory / "steps")

    @staticmethod
    def restored(directory):
        """Steps in the checkpoint that the next process continues from."""
        if KERAS_3:
            return KerasRun._restored_by_keras3(directory)
        latest = tf.train.latest_checkpoint(directory / "backup" / "chief")
        if latest is None:
            return 0
        # Optimizer, weights and epoch must all be there.
        reader = tf.train.load_checkpoint(latest)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
        name = "model/optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"
        return int(reader.get_tensor(name))

    @staticmethod
    def _restored_by_keras3(directory):
        backup = Backup(directory / "backup")
        backup.mend()
        steps = backup.epoch() * keras_run.STEPS_PER_EPOCH
        # After a kill between the two files, an epoch runs again on its own weights.
        assert steps <= backup.steps() <= KerasRun.ran(directory)
        assert backup.steps() % keras_run.STEPS_PER_EPOCH == 0
        return steps

    @staticmethod
    def table(directory):
        path = directory / "history.csv"
        rows = records.read_rows(path, "epoch") if path.exists() else []
        assert [int(row["epoch"]) for row in rows] == list(range(len(rows)))
        epsilons = [float(row["epsilon"]) for row in rows]
        # A kill while an epoch runs again leaves that epoch's rows and no later rows.
        assert epsilons == sorted(epsilons)
        return len(rows) * keras_run.STEPS_PER_EPOCH

    @staticmethod
    def check_end(directory):
        assert KerasRun.restored(directory) == KerasRun.wanted
        assert KerasRun.table(directory) == KerasRun.wanted


class CorrelatedRun(KerasRun):
    """The conditions of the Keras run, and those on the secret of its noise."""

    module = "correlated_run"

    @staticmethod
    def restored(directory):
        for path in directory.glob(f"*{correlated_run.SECRET}*"):
            assert path.stat().st_mode & 0o777 == 0o600
        return KerasRun.restored(directory)

    @staticmethod
    def check_end(directory):
        KerasRun.check_end(directory)
        (phase,) = Ledger.load(directory / "privacy.json").phases
        # No step is missing from the matrix, which later processes continued.
        assert max(phase.runs) >= KerasRun.wanted // 2


class StreamRun(KerasRun):
    """The same, and no record is left in the directory of the stream's copies."""

    module = "stream_run"

    @staticmethod
    def restored(directory):
        assert not list(directory.glob(f"{stream_run.FOLDER}/*"))
        return KerasRun.restored(directory)

    @staticmethod
    def check_end(directory):
        KerasRun.check_end(directory)
        (phase,) = Ledger.load(directory / "privacy.json").phases
        # Each process begins an epoch, with an allocation of its own.
        assert phase.sampling.steps == keras_run.STEPS_PER_EPOCH
        assert 1 <= len(phase.runs)


class ReadingRun(StreamRun):
    """Killed after a number of reads instead of steps."""

    @staticmethod
    def ran(directory):
        return count(directory / stream_run.READ)


class FederatedRun:
    """The conditions on the federated run's files."""

    module = "federated_run"
    wanted = federated_run.ROUNDS
    ahead = 1

    @staticmethod
    def ran(directory):
        return count(pathlib.Path(f"{directory}.steps"))

    @staticmethod
    def restored(directory):
        checkpoints = records.Checkpoints(directory / "checkpoints")
        rounds = checkpoints.rounds()
        for one in rounds:
            found = npz_files.read_npz(
                directory / "checkpoints" / f"round_{one:06d}.npz"
            )
            assert all(np.all(np.isfinite(part)) for part in found.values())
        return rounds[-1] if rounds else 0

    @staticmethod
    def table(directory):
        path = directory / records.METRICS
        rows = records.Table(path).rows if path.exists() else []
        return max(len(rows) - 1, 0)

    @staticmethod
    def check_end(directory):
        assert FederatedRun.restored(directory) == FederatedRun.wanted
        assert FederatedRun.table(directory) == FederatedRun.wanted
        config = json.loads((directory / reports.CONFIG).read_text())
        assert config["result"]["rounds"] == FederatedRun.wanted
        ledger = Ledger.load(directory / "privacy.json")
        assert config["result"]["epsilon"] == ledger.epsilon()
        assert "differential privacy" in (directory / reports.REPORT).read_text()


def check_books(kind, directory, kills: int) -> None:
    """The ledger counts all steps that ran, and at most the steps that kills cost."""
    path = directory / "privacy.json"
    ran, restored = kind.ran(directory), kind.restored(directory)
    if not path.exists():
        assert ran == restored == 0
        return
    steps = Ledger.load(path).steps
    assert steps >= ran >= restored
    assert steps <= ran + kills * kind.ahead
    assert kind.table(directory) >= restored


def check_killed_runs(zygote, kind, root: pathlib.Path, kills: int, seed: int) -> None:
    """Kills runs until there were so many kills; every run comes to its end."""
    rng = random.Random(seed)
    killed, number = 0, 0
    while killed < kills:
        number += 1
        directory, here = root / f"run{number}", 0
        while killed < kills:
            # 0 steps: while the run starts or resumes. Otherwise in a step, or in the
            # writes after it; how long that takes depends on the machine.
            steps = rng.choice([0, rng.randrange(1, kind.wanted // 3)])
            delay = rng.uniform(0, 1.0) if not steps else rng.uniform(0, 0.03)
            if zygote.run(kind, directory, steps, delay):
                break
            killed += 1
            here += 1
            if directory.exists():
                check_books(kind, directory, here)
        else:
            assert zygote.run(kind, directory)
        check_books(kind, directory, here)
        kind.check_end(directory)


KINDS = pytest.mark.parametrize(
    "kind", [KerasRun, CorrelatedRun, StreamRun, FederatedRun]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        KerasRun,
        pytest.param(CorrelatedRun, marks=pytest.mark.slow),
        pytest.param(StreamRun, marks=pytest.mark.slow),
        pytest.param(FederatedRun, marks=pytest.mark.slow),
    ],
)
def test_killed_runs_resume(zygote, kind, tmp_path):
    check_killed_runs(zygote, kind, tmp_path, kills=2, seed=1)


@pytest.mark.slow
@KINDS
def test_runs_killed_twenty_times_resume(zygote, kind, tmp_path):
    check_killed_runs(zygote, kind, tmp_path, kills=20, seed=2)


@pytest.mark.slow
def test_a_kill_while_a_stream_is_read_leaves_no_record_and_costs_no_epoch(
    zygote, tmp_path
):
    directory, each = tmp_path / "run", 200 // stream_run.EVERY
    directory.mkdir()
    (directory / stream_run.SLOW).touch()
    # In the middle of the first, and of the fourth, pass.
    for reads, steps in ((3, 0), (3 * each + 3, 3 * keras_run.STEPS_PER_EPOCH)):
        before = StreamRun.ran(directory)
        assert not zygote.run(ReadingRun, directory, reads)
        assert StreamRun.ran(directory) - before == steps
        assert not list(directory.glob(f"{stream_run.FOLDER}/*"))
    check_books(StreamRun, directory, 2)
    (directory / stream_run.SLOW).unlink()
    assert zygote.run(StreamRun, directory)
    check_books(StreamRun, directory, 2)
    StreamRun.check_end(directory)
