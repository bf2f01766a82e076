"""A process that dies within a write leaves the whole old or the whole new file."""

from __future__ import annotations

import csv
import json
import os
import shutil

import numpy as np
import pytest

from driver_kit import large_files, reports
from tests.faults.injection import Killed, faults
from tests.stand_in_aggregator import Aggregator
from tfdpclip import files, sampling
from tfdpclip.accounting import Ledger, RoundBudget
from tfdpclip.tuning import Grid, RandomStopping, TrainingPlan, _table, run_grid
from tff_tasks import records

DELTA = 1e-5
_GRID_COLUMNS = ["clip_norm", "seed"]


def raw(path):
    return path.read_bytes() if path.exists() else None


class Raw:
    """A file that is written whole."""

    name = "raw"

    @staticmethod
    def write(directory, number):
        files.write_atomically(directory / "file", f"content {number} " * 100)

    @staticmethod
    def read(directory):
        return raw(directory / "file")


class Large:
    """A large file that is written in pieces before it takes its name."""

    name = "large"

    @staticmethod
    def write(directory, number):
        with large_files.replacing(directory / "file") as temporary:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666)
            with os.fdopen(handle, "wb") as file:
                for piece in range(3):
                    file.write(f"piece {piece} of {number} ".encode() * 50)

    @staticmethod
    def read(directory):
        return raw(directory / "file")


class Rounds:
    """The table of rounds."""

    name = "rounds"

    @staticmethod
    def write(directory, number):
        table = records.Table(directory / "metrics.csv")
        while len(table.rows) <= number:
            table.add({"round": len(table.rows), "loss": 0.1 * len(table.rows)})

    @staticmethod
    def read(directory):
        return records.Table(directory / "metrics.csv").rows


class Checkpoint:
    """Checkpoints, of which all but two are deleted."""

    name = "checkpoint"

    @staticmethod
    def arrays(number):
        return [np.full([3, 4], number, np.float32), np.array(number)]

    @staticmethod
    def write(directory, number):
        checkpoints = records.Checkpoints(directory / "checkpoints")
        checkpoints.save(number, Checkpoint.arrays(number))

    @staticmethod
    def read(directory):
        checkpoints = records.Checkpoints(directory / "checkpoints")
        found = checkpoints.rounds()
        for number in found:
            wanted = Checkpoint.arrays(number)
            loaded = checkpoints.load(number, wanted)
            assert all(
                np.array_equal(a, b) for a, b in zip(loaded, wanted, strict=True)
            )
        return found[-1:]


class Search:
    """The table of a search."""

    name = "grid"

    @staticmethod
    def write(directory, number):
        table = _table.Table(directory / "grid.csv", _GRID_COLUMNS, "accuracy")
        for seed in range(number + 1):
            settings = {"clip_norm": 0.1, "seed": seed}
            if not table.has(settings):
                table.add(settings, {"accuracy": 0.5}, "", 1.0)

    @staticmethod
    def read(directory):
        path = directory / "grid.csv"
        table = _table.Table(path, _GRID_COLUMNS, "accuracy")
        rows = table.matching([{"clip_norm": 0.1, "seed": s} for s in range(9)])
        if path.exists():
            with open(path, newline="") as file:
                # The heading alone is there for a moment before the first row.
                assert len(list(csv.DictReader(file))) == len(rows)
        return rows


class Config:
    """JSON."""

    name = "config"

    @staticmethod
    def write(directory, number):
        text = reports.to_json({"settings": {"rounds": number}})
        records.write_atomically(directory / reports.CONFIG, text)

    @staticmethod
    def read(directory):
        path = directory / reports.CONFIG
        return json.loads(path.read_text()) if path.exists() else None


KINDS = pytest.mark.parametrize(
    "kind", [Raw, Large, Rounds, Checkpoint, Search, Config], ids=lambda kind: kind.name
)


@KINDS
def test_a_kill_at_any_call_leaves_the_old_or_the_new(kind, tmp_path):
    """Also of the first write, when nothing was there."""
    for first in (0, 2):
        at, seen = 0, set()
        while True:
            at += 1
            directory = tmp_path / f"{first}-{at}"
            directory.mkdir()
            for number in range(first):
                kind.write(directory, number)
            before = kind.read(directory)
            try:
                with faults(at, within=tmp_path) as happened:
                    kind.write(directory, first)
            except Killed:
                pass
            after = kind.read(directory)
            seen.add(after == before)
            # The leftovers do not disturb the next write.
            kind.write(directory, first)
            done = kind.read(directory)
            assert done != before and after in (before, done), at
            if not happened.happened:
                break
        # The write has a beginning and an end, and was hit before and after.
        assert at > 4 and seen == {True, False}


class Books:
    """A ledger, and how many steps ran."""

    def __init__(self, path):
        self.path = path
        self.ran = 0

    def plain(self):
        """As in a training loop."""
        ledger = Ledger.open(self.path, DELTA, "rdp")
        ledger.begin(noise_multiplier=1.0, sampling=sampling.Poisson(0.01))
        for _ in range(3):
            with ledger.step():
                self.ran += 1

    def ahead(self):
        """As in `PrivacyBudget`: several steps reserved, recorded in memory only."""
        ledger = Ledger.open(self.path, DELTA, "rdp")
        ledger.begin(noise_multiplier=1.0, sampling=sampling.Poisson(0.01))
        for _ in range(2):
            ledger.reserve(3)
            for _ in range(3):
                self.ran += 1
                ledger.record(1, save=False)
        ledger.release()

    def rounds(self):
        """As in federated training."""
        cohorts = sampling.Poisson(0.5).cohorts(list(range(20)))
        budget = RoundBudget(
            9.0,
            DELTA,
            cohorts,
            Aggregator(3.0),
            accountant="rdp",
            ledger=self.path,
        )
        for _ in range(2):
            with budget.round():
                self.ran += 1

    def shuffled(self):
        """Steps of an epoch, which depend on each other."""
        ledger = Ledger.open(self.path, DELTA, "rdp")
        scheme = sampling.ShuffledEpochs(5, 50, "zero_out")
        ledger.begin(noise_multiplier=5.0, sampling=scheme)
        for _ in range(2):
            with ledger.step():
                self.ran += 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop", ["plain", "ahead", "rounds", "shuffled"])
def test_a_ledger_killed_at_any_call_counts_what_ran(loop, tmp_path):
    at = 0
    while True:
        at += 1
        books = Books(tmp_path / f"{at}" / "privacy.json")
        happened = False
        # The second process resumes the first, and is killed as well.
        for _ in range(2):
            try:
                with faults(at, within=tmp_path) as found:
                    getattr(books, loop)()
            except Killed:
                happened = True
            if found.happened and books.path.exists():
                assert Ledger.load(books.path).steps >= books.ran, at
        getattr(books, loop)()
        ledger = Ledger.load(books.path)
        assert ledger.steps >= books.ran > 0
        assert ledger.epsilon() > 0
        if not happened:
            assert ledger.steps == books.ran
            break
    assert at > 15


def test_draws_of_a_search_are_whole_or_not_there(tmp_path):
    """To draw again after a run began would not be the search accounted for."""
    points = Grid([0.1, 1.0], [64], [0.01, 0.1])
    at = 0
    while True:
        at += 1
        path, runs = tmp_path / f"{at}.csv", []

        def search():
            return run_grid(
                points,
                lambda point: runs.append(point) or 0.5,  # noqa: B023
                path=path,  # noqa: B023
                plan=lambda _: TrainingPlan(sampling.Poisson(0.01), 2.0, 100),
                delta=DELTA,
                search=RandomStopping(4.0),
            )

        try:
            with faults(at, within=tmp_path) as happened:
                search()
        except Killed:
            pass
        drawn = raw(path.with_name(f"{path.name}.draws.json"))
        assert drawn is not None or not runs
        begun = len(runs)
        search()
        assert begun <= len(runs)
        if drawn is not None:
            assert raw(path.with_name(f"{path.name}.draws.json")) == drawn
            # At most the run in flight is repeated.
            assert len(runs) <= len(json.loads(drawn)["draws"]) + 1
        if not happened.happened:
            break
    assert at > 10


def test_leftovers_of_killed_processes_are_deleted_when_old(tmp_path):
    with pytest.raises(Killed), faults(4, within=tmp_path):
        files.write_atomically(tmp_path / "a", "a" * 1000)
    (left,) = tmp_path.iterdir()
    files.prepare_directory(tmp_path)
    assert left.exists()  # A running process may be writing it.
    os.utime(left, (0, 0))
    kept = tmp_path / ".bashrc.tmp"
    kept.write_text("somebody else's")
    os.utime(kept, (0, 0))
    files.prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def _write_at_once(path, text):
    files.write_atomically(path, text)


def _write_in_pieces(path, text):
    with large_files.replacing(path) as temporary:
        temporary.write_text(text)


@pytest.mark.parametrize("write", [_write_at_once, _write_in_pieces])
def test_links_and_permissions_stay(write, tmp_path):
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "privacy.json"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "privacy.json"
    link.symlink_to(target)
    write(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    shutil.rmtree(tmp_path / "far")
    with pytest.raises(FileNotFoundError, match="privacy.json"):
        Ledger.open(link, DELTA)


def test_a_block_that_raises_replaces_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), large_files.replacing(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_take_its_name_is_named(tmp_path):
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(OSError, match="a directory has this name.*file"):
        with large_files.replacing(path) as temporary:
            temporary.write_text("new")
    assert list(tmp_path.iterdir()) == [path]
