"""Runs a part of the slow tests, chosen by the state of the tree, in a given time.

`make test-part`, or `python -m tests.slow_part --seconds=900`; to repeat a run's part:
`--number=609`. CI does this, so that every slow test runs now and then.

The number of the tree is a hash of CHANGELOG.md. A test is in the part if a hash of its
id equals this number modulo `PARTS`. So the part changes with each change that has an
entry in CHANGELOG.md, and stays the same while the change is corrected and merged. 20
parts leave out two tests in 5. Two groups always run, first and for at most half of the
time: the documentation's tests (`ALWAYS`) and the slow tests of the test files in the
last commit that changed tests, unless they are more than `MOST` files.

Tests without time left are listed, and are no failure. A test that was begun is ended;
tests with a time limit of their own are begun first.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import pathlib
import subprocess
import sys
import time
import zlib

import pytest

from driver_kit import command_line

PARTS = 23
MOST = 12
ALWAYS = {"tests/readme_test.py", "tests/notebooks_test.py"}
# In no part, as they take over five minutes: `make test-all` has them.
LONG = ("tests/keras/step_memory_test.py::test_the_estimate_holds_for_models[True-",)
ROOT = pathlib.Path(__file__).resolve().parents[1]
NOT_REACHED = "the time of the slow part is over"


def git(*arguments: str, root: pathlib.Path = ROOT) -> str:
    """The output of git without its last line end; "" if git fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def tree_number(root: pathlib.Path = ROOT) -> int:
    """A number of CHANGELOG.md in the last commit; today's without git."""
    found = git("rev-parse", "HEAD:CHANGELOG.md", root=root)
    return int(found, 16) if found else datetime.date.today().toordinal()


def changed_files(root: pathlib.Path = ROOT) -> set[str]:
    """`ALWAYS`, and test files of the last commit that changed any, if not too many."""
    last = git("log", "-1", "--format=%H", "--", "tests", root=root)
    both = (f"{last}~1", last)
    names = git("diff", "--name-only", "--relative", *both, "--", "tests", root=root)
    found = {name for name in names.splitlines() if name.endswith("_test.py")}
    return ALWAYS | (found if len(found) <= MOST else set())


def is_in_part(name: str, number: int) -> bool:
    """Whether the test of this id is in the part of the tree of this number."""
    return zlib.crc32(name.encode()) % PARTS == number % PARTS


class SlowPart:
    """The plugin of pytest that chooses, orders and stops.

    Args:
      number: The number of the tree.
      changed: Paths of test files, below the root of pytest, all of whose tests run.
      start: The start of the run, as `time.time()` gives it.
      seconds: The time after which no further test is begun.
    """

    def __init__(self, number: int, changed: set[str], start: float, seconds: float):
        self.number = number
        self.changed = changed
        self.start = start
        self.seconds = seconds

    def _order(self, item) -> tuple:
        """Sorts files in an order that depends on the tree.

        The order keeps the same file from being last every time. Tests that may take
        long come first, because a test that was begun may end late.
        """
        path = item.nodeid.split("::")[0]
        drawn = hashlib.sha256(f"{self.number} {path}".encode()).digest()
        long = item.get_closest_marker("timeout") is not None
        return not long, path not in self.changed, drawn

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items) -> None:
        chosen, others = [], []
        for item in items:
            path = item.nodeid.split("::")[0]
            wanted = path in self.changed or is_in_part(item.nodeid, self.number)
            wanted &= not item.nodeid.startswith(LONG)
            (chosen if wanted else others).append(item)
        items[:] = sorted(chosen, key=self._order)
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item) -> None:
        share = 1.0 if is_in_part(item.nodeid, self.number) else 0.5
        if time.time() > self.start + share * self.seconds:
            pytest.skip(NOT_REACHED)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        skipped = terminalreporter.stats.get("skipped", ())
        left = [r.nodeid for r in skipped if NOT_REACHED in str(r.longrepr)]
        if left:
            title = f"not reached in {self.seconds:.0f} s: {len(left)}"
            terminalreporter.section(title)
            for name in left:
                terminalreporter.line(name)


def pytest_addoption(parser) -> None:
    parser.addoption("--slow-number", type=int, help="the number of the tree")
    parser.addoption("--slow-changed", default="", help="test files, with commas")
    parser.addoption("--slow-start", type=float, help="seconds since 1970")
    parser.addoption("--slow-seconds", type=float, default=math.inf)


def pytest_configure(config) -> None:
    option = config.getoption
    changed = {name for name in option("--slow-changed").split(",") if name}
    times = option("--slow-start"), option("--slow-seconds")
    config.pluginmanager.register(SlowPart(option("--slow-number"), changed, *times))


def main(argv: list[str] | None = None) -> int:
    """Runs pytest on the part. Returns its status, 0 if no test is in the part.

    Unknown arguments go to pytest.
    """
    parser = command_line.argument_parser(__doc__, prog="python -m tests.slow_part")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for all; no limit by default"
    )
    parser.add_argument(
        "--number", type=int, help="which part; by default that of the tree"
    )
    settings, of_pytest = parser.parse_known_args(argv)
    start = time.time()
    number = tree_number() if settings.number is None else settings.number
    number %= PARTS
    changed = changed_files()
    print(
        f"Slow tests: part {number} of 0 to {PARTS - 1} (--number={number}), "
        f"and all of {len(changed)} files; {settings.seconds:g} s.",
        flush=True,
    )
    arguments = [
        *("-m", "slow", "-n", "2", "-p", "tests.slow_part", "--timeout=600"),
        *(f"--slow-number={number}", f"--slow-changed={','.join(sorted(changed))}"),
        *(f"--slow-start={start}", f"--slow-seconds={settings.seconds}"),
        *of_pytest,
    ]
    # In a process of its own: this file is a program here, and a plugin there.
    status = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
    nothing = status.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if nothing else status.returncode


if __name__ == "__main__":
    # TensorFlow 2.14 reports missing GPU libraries as errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    raise SystemExit(main())
