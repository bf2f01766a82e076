"""The part of the slow tests that CI runs: none is left out for good, nor silently."""

import os
import subprocess
import sys

import pytest

from tests import slow_part
from tests.slow_part import ALWAYS, MOST, PARTS, SlowPart, changed_files, is_in_part
from tests.source_tree import ROOT

NAMES = [f"tests/{file}_test.py::test[{n}]" for file in "abc" for n in range(500)]


class Item:
    def __init__(self, name):
        self.nodeid = name

    def get_closest_marker(self, name):
        """Of some tests, a time limit of their own."""
        return name if self.nodeid.endswith("[99]") else None


class Config:
    """A pytest configuration that notes the deselected tests."""

    def __init__(self):
        self.hook = self

    def pytest_deselected(self, items):
        self.deselected = [item.nodeid for item in items]


def chosen(number, changed=(), names=NAMES):
    items, config = [Item(name) for name in names], Config()
    part = SlowPart(number, set(changed), 0.0, 0.0)
    part.pytest_collection_modifyitems(config, items)
    kept = [item.nodeid for item in items]
    assert sorted(kept + config.deselected) == sorted(names)
    return kept


@pytest.mark.parametrize("stride", [1, 5, 12, 120])
def test_every_test_is_in_a_part(stride):
    seen = [name for run in range(PARTS) for name in chosen(600 + stride * run)]
    assert sorted(seen) == sorted(NAMES)


def test_parts_are_of_like_size():
    sizes = [len(chosen(number)) for number in range(PARTS)]
    assert max(sizes) < 2 * min(sizes)


def is_long(name):
    return Item(name).get_closest_marker("timeout") is not None


def test_changed_files_come_first_and_whole():
    kept = chosen(3, changed=["tests/b_test.py"])
    kept = [name for name in kept if not is_long(name)]
    of_b = [n for n in NAMES if n.startswith("tests/b_") and not is_long(n)]
    assert kept[: len(of_b)] == of_b
    in_part = {n for n in NAMES if is_in_part(n, 3) and not is_long(n)}
    assert set(kept[len(of_b) :]) == in_part - set(of_b)


def test_what_may_take_long_comes_before_all():
    kept = chosen(3, changed=["tests/a_test.py", "tests/b_test.py"])
    assert [is_long(name) for name in kept] == sorted(map(is_long, kept), reverse=True)
    assert is_long(kept[0])


def test_no_file_is_the_last_in_every_tree():
    last = [chosen(number)[-1].split("::")[0] for number in range(20)]
    assert set(last) == {"tests/a_test.py", "tests/b_test.py", "tests/c_test.py"}


def git(root, *arguments):
    names = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    command = ["git", *names, *arguments]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def commit(root, names):
    for name in names:
        for end in ("_test.py", ".py"):
            (root / f"tests/{name}{end}").write_text("")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "one more")


def test_what_the_last_commit_changed(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "tests").mkdir()
    commit(tmp_path, ["before"])
    assert changed_files(tmp_path) == ALWAYS
    commit(tmp_path, ["a", "b"])
    # A commit to something else, as a merge is.
    commit(tmp_path, [])
    both = {"tests/a_test.py", "tests/b_test.py"}
    assert changed_files(tmp_path) == ALWAYS | both
    commit(tmp_path, range(MOST + 1))
    assert changed_files(tmp_path) == ALWAYS


def test_what_is_always_run_is_there():
    assert all((ROOT / path).exists() for path in ALWAYS)


def test_the_part_is_another_when_something_was_worth_a_word(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "tests").mkdir()
    numbers = []
    for text in ("first", "first", "second"):
        (tmp_path / "CHANGELOG.md").write_text(text)
        commit(tmp_path, [len(numbers)])
        numbers.append(slow_part.tree_number(tmp_path))
    assert numbers[0] == numbers[1] != numbers[2]


def test_without_git_the_day_decides(tmp_path):
    days = slow_part.datetime.date.today().toordinal()
    assert slow_part.tree_number(tmp_path) in (days, days + 1)
    assert changed_files(tmp_path) == ALWAYS


def run(tmp_path, seconds, *arguments):
    """Runs a file with a single slow test; returns the status and the output."""
    (tmp_path / "one_test.py").write_text("def test_one():\n    assert 1 + 1 == 3\n")
    number = next(n for n in range(PARTS) if is_in_part("one_test.py::test_one", n))
    command = [sys.executable, "-m", "pytest", "-p", "tests.slow_part", *arguments]
    options = {"number": number, "start": slow_part.time.time(), "seconds": seconds}
    command += [f"--slow-{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    command += [f"--rootdir={tmp_path}", "one_test.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_slow_test_that_fails_is_a_failure(tmp_path):
    status, said = run(tmp_path, 300.0)
    assert status == pytest.ExitCode.TESTS_FAILED, said


@pytest.mark.slow
@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one", "two"])
def test_what_was_not_reached_is_said_and_is_no_failure(tmp_path, processes):
    status, said = run(tmp_path, 0.0, *processes)
    assert status == pytest.ExitCode.OK, said
    assert "not reached in 0 s: 1" in said
    assert "\none_test.py::test_one\n" in said
