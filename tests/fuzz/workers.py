"""Runs specs in separate processes.

TensorFlow never frees a traced function, and may crash: a process checks some models, a
line of JSON each, and is then replaced; a hang or crash costs a single model.
"""

from __future__ import annotations

import os
import pathlib
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tests.fuzz.outcome import CRASHED, IMPOSSIBLE, Outcome
from tests.fuzz.spec import Spec

_ROOT = pathlib.Path(__file__).parents[2]


class Worker:
    """A process that checks specs in turn.

    Args:
      models: how many it checks before it is replaced.
      seconds: the time allowed for a model.
      planted: the name of a bug to plant, see `planted.BUGS`.
    """

    def __init__(self, models: int = 25, seconds: float = 150, planted: str = ""):
        self._models = models
        self._seconds = seconds
        self._planted = planted
        self._process: subprocess.Popen | None = None
        self._left = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker", self._planted]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._left = self._models

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        self._process = None

    def __call__(self, spec: Spec) -> Outcome:
        """The outcome for `spec`; a crash of the process is an outcome."""
        if self._process is None or not self._left:
            self._stop()
            self._start()
        self._left -= 1
        process = self._process
        try:
            process.stdin.write(spec.to_json() + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._stop()
            return Outcome(CRASHED, "the process died before it began")
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(self._seconds)
        line = process.stdout.readline() if ready else ""
        if line:
            return Outcome.from_json(line)
        if not ready:
            self._stop()
            return Outcome(IMPOSSIBLE, "took too long")
        status = process.wait()
        self._stop()
        return Outcome(CRASHED, f"the process died with status {status}")


def run(
    specs: Iterable[Spec], check: Callable[[Spec], Outcome]
) -> Iterator[tuple[Spec, Outcome, float]]:
    """Checks specs in turn: each with its outcome and the seconds it took."""
    for spec in specs:
        start = time.monotonic()
        outcome = check(spec)
        yield spec, outcome, time.monotonic() - start
