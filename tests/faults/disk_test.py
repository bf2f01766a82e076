"""Full disks, directories that cannot be written to, directories that vanish."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from unittest import mock

import pytest

from driver_kit import programs, reports, settings
from tests.faults.injection import faults, os_error
from tests.faults.write_test import (
    Checkpoint,
    Config,
    Raw,
    Rounds,
    Search,
)
from tfdpclip import files, sampling
from tfdpclip.accounting import Ledger, PrivacyMismatchError
from tfdpclip.accounting._ledger_file import LedgerFile
from tff_tasks import command, program, records
from tff_tasks.config import RunConfig
from tff_tasks.engine_local import LocalEngine

ROOT = pathlib.Path(__file__).resolve().parents[2]
DELTA = 1e-5
KINDS = pytest.mark.parametrize(
    "kind", [Raw, Rounds, Checkpoint, Search, Config], ids=lambda kind: kind.name
)
CODES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "make the directory writable",
    errno.EACCES: "make the directory writable",
    errno.EIO: "check the disk",
}


def everything(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.thinned(2)
@KINDS
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_an_error_at_any_call_keeps_what_was_there(kind, code, tmp_path):
    at = 0
    while True:
        at += 1
        directory = tmp_path / f"{at}"
        directory.mkdir()
        kind.write(directory, 0)
        kind.write(directory, 1)
        before = kind.read(directory)
        try:
            with faults(at, os_error(code), within=directory) as happened:
                kind.write(directory, 2)
        except OSError as error:
            assert str(directory) in str(error), error
            assert CODES[code] in str(error)
            assert error.errno == code
            assert error.strerror.startswith(os.strerror(code))
        assert not [path for path in everything(directory) if "tmp" in path.name]
        after = kind.read(directory)
        kind.write(directory, 2)
        assert after in (before, kind.read(directory))
        if not happened.happened:
            break


def ledger_in(directory, steps=3):
    ledger = Ledger(DELTA, "rdp", directory / "privacy.json")
    ledger.begin(noise_multiplier=1.0, sampling=sampling.Poisson(0.01))
    ledger.record(steps)
    return ledger


@pytest.mark.thinned(4)
@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_no_step_runs_that_the_ledger_cannot_hold(code, forever, tmp_path):
    at = 0
    while True:
        at += 1
        ledger, ran = ledger_in(tmp_path / f"{at}"), 0
        try:
            error = os_error(code)
            with faults(at, error, forever=forever, within=tmp_path) as happened:
                for _ in range(2):
                    with ledger.step():
                        ran += 1
        except OSError as error:
            assert "privacy.json" in str(error) and CODES[code] in str(error)
        assert Ledger.load(ledger.path).steps >= 3 + ran
        assert ledger.steps + ledger.reserved >= 3 + ran
        # The same process may go on once there is room.
        with ledger.step():
            pass
        again = Ledger.load(ledger.path)
        assert again.steps >= 4 + ran
        assert again.to_dict() == ledger.to_dict() or ledger.reserved
        if not happened.happened:
            break
    assert at > 8


def test_a_ledger_whose_directory_vanished_stops_the_run(tmp_path):
    """A disk that is not mounted any more must not get a ledger of its own."""
    ledger = ledger_in(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(PrivacyMismatchError, match="privacy.json is gone"):
        with ledger.step():
            pytest.fail("the step ran")
    assert not (tmp_path / "run").exists()


def test_two_runs_do_not_share_a_ledger(tmp_path):
    one = ledger_in(tmp_path)
    two = Ledger.load(one.path)
    with two.step():
        pass
    with pytest.raises(PrivacyMismatchError, match="written from outside"):
        with one.step():
            pytest.fail("the step ran")
    assert Ledger.load(one.path).steps == 4


def test_a_second_run_waits_between_check_and_write(tmp_path):
    one = ledger_in(tmp_path)
    two = Ledger.load(one.path)
    before, writing, go_on = LedgerFile.write, threading.Event(), threading.Event()

    def write(self, content):
        if not writing.is_set():  # The first run, between its check and its write.
            writing.set()
            assert go_on.wait(60)
        before(self, content)

    def step(ledger):
        with ledger.step():
            pass

    with mock.patch.object(LedgerFile, "write", write):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(step, one)
            assert writing.wait(60)
            second = pool.submit(step, two)
            with pytest.raises(concurrent.futures.TimeoutError):
                second.result(0.5)
            go_on.set()
            first.result(60)
            with pytest.raises(PrivacyMismatchError, match="written from outside"):
                second.result(60)
    assert Ledger.load(one.path).steps == 4


def test_a_copy_of_a_ledger_is_no_conflict(tmp_path):
    ledger = ledger_in(tmp_path)
    for _ in range(2):
        ledger.save(tmp_path / "copies" / "privacy.json")
        with ledger.step():
            pass
    assert Ledger.load(tmp_path / "copies" / "privacy.json").steps == 4
    assert Ledger.load(ledger.path).steps == ledger.steps == 5


_LIMITED = """
import resource, signal, sys
from tfdpclip import sampling
from tfdpclip.accounting import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
try:
    with ledger.step():
        print("the step ran")
except OSError as error:
    print(error)
"""


def test_a_file_that_cannot_grow(tmp_path):
    """A limit of the operating system, as real as a full disk."""
    path = ledger_in(tmp_path).path
    before = everything(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", _LIMITED, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the step ran" not in found.stdout
    assert str(path) in found.stdout and "ulimit -f" in found.stdout
    assert everything(tmp_path) == before


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_place_of_the_directory(below, tmp_path):
    taken = tmp_path / "runs"
    taken.write_text("a file")
    with pytest.raises(OSError, match=r"runs.*") as caught:
        files.prepare_directory(taken / below)
    assert "choose another" in str(caught.value)
    with pytest.raises(SystemExit, match="--output_dir=.*runs.*for example"):
        programs.launch("x", _Settings, _never, ["x", f"--output_dir={taken / below}"])
    assert taken.read_text() == "a file"


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Of a program that writes to a directory."""

    output_dir: str = settings.output_dir("mine")


def _never(used):
    pytest.fail("it ran although it cannot write")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_programs_find_out_before_they_run(code, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match="--output_dir=.*") as caught:
        with faults(1, os_error(code), forever=True, within=tmp_path):
            programs.launch(
                "x", _Settings, _never, ["x", f"--output_dir={tmp_path / 'run'}"]
            )
    assert os.strerror(code) in str(caught.value)


def test_a_program_whose_results_do_not_fit_says_so(tmp_path):
    made = programs.Outcome("Title", ["Found."], "none", tables={"t": [{"a": 1}]})
    done = []

    def run(used):
        done.append(True)
        return made

    arguments = ["x", f"--output_dir={tmp_path}"]
    programs.launch("x", _Settings, run, arguments)
    before = everything(tmp_path)
    at = len(done)
    # The probe of the directory is an open, a write, two fsyncs and a rename.
    for at in range(8, 14):
        try:
            with faults(at, os_error(errno.ENOSPC), within=tmp_path):
                programs.launch("x", _Settings, run, arguments)
        except SystemExit as error:
            assert re.search(r"free some space.*(config.json|t.csv|report)", str(error))
        found = everything(tmp_path)
        assert found.keys() == before.keys()
        json.loads(found[pathlib.Path("config.json")])
        assert found[pathlib.Path("report.txt")] == before[pathlib.Path("report.txt")]


def federated(directory, **changes):
    return RunConfig(
        "digits",
        str(directory),
        options={"num_clients": 30, "hidden_units": 8},
        **{
            "rounds": 4,
            "clients_per_round": 10,
            "rounds_per_eval": 2,
            "rounds_per_checkpoint": 1,
            "engine": "local",
            "quiet": True,
            "tensorboard": False,
            "sampling": "poisson",
            "accountant": "rdp",
            **changes,
        },
    )


def failing_in_round(number, what):
    run_round = LocalEngine.run_round

    def run(self, clients, round_num):
        if round_num == number:
            what()
        return run_round(self, clients, round_num)

    return mock.patch.object(LocalEngine, "run_round", run)


@pytest.mark.slow
def test_a_federated_run_continues_when_there_is_room_again(tmp_path):
    directory = tmp_path / "run"
    full = mock.patch.object(os, "fsync", side_effect=os_error(errno.ENOSPC))
    with failing_in_round(3, full.start):
        try:
            with pytest.raises(OSError, match="free some space") as caught:
                program.run(federated(directory))
        finally:
            full.stop()
    assert str(directory) in str(caught.value)
    # The files are whole: the first two rounds, and the third in the ledger.
    assert len(records.Table(directory / records.METRICS).rows) == 3
    assert Ledger.load(directory / "privacy.json").steps == 3
    result = program.run(federated(directory))
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3, 4]
    assert Ledger.load(directory / "privacy.json").steps == 5


@pytest.mark.slow
def test_a_federated_run_whose_directory_vanishes_stops(tmp_path):
    directory = tmp_path / "run"
    with failing_in_round(2, lambda: shutil.rmtree(directory)):
        with pytest.raises(PrivacyMismatchError, match="privacy.json is gone"):
            program.run(federated(directory))
    assert not directory.exists()


@pytest.mark.slow
def test_a_run_without_its_ledger_is_not_continued(tmp_path):
    program.run(federated(tmp_path, rounds=1))
    path = tmp_path / "privacy.json"
    older = path.read_bytes()
    program.run(federated(tmp_path, rounds=2))
    path.write_bytes(older)
    with pytest.raises(PrivacyMismatchError, match="counts 1 rounds.*of round 2"):
        program.run(federated(tmp_path, rounds=3))
    path.unlink()
    with pytest.raises(PrivacyMismatchError, match="privacy.json is missing"):
        program.run(federated(tmp_path, rounds=3))
    assert not path.exists()


@pytest.mark.slow
def test_a_run_without_its_settings_is_not_continued(tmp_path):
    program.run(federated(tmp_path, rounds=1, seed=1))
    (tmp_path / reports.CONFIG).unlink()
    with pytest.raises(records.RunMismatchError, match="metrics.csv but no config.js"):
        program.run(federated(tmp_path, rounds=1, seed=1))


def test_the_command_line_says_it_in_a_sentence(tmp_path, capsys):
    taken = tmp_path / "runs"
    taken.write_text("a file")
    arguments = ["--engine=local", "--rounds=1", f"--output_dir={taken}"]
    with pytest.raises(SystemExit, match="digits: .*choose another.*runs"):
        command.main("digits", arguments)
