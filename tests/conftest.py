"""What every test run needs."""

from __future__ import annotations

import os
import signal
import sys

# Both must be set before the import of TensorFlow and of matplotlib.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import psutil
import pytest

# TensorFlow Federated interrupts a worker that it no longer needs and waits for its
# end, for ever if interrupts are ignored, as they are in a shell's background jobs. A
# handler, unlike "ignore", is not inherited.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


@pytest.fixture(autouse=True)
def _same_seed_for_every_test():
    """Makes a test draw the same data whichever tests ran before it."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].keras.utils.set_random_seed(0)


def pytest_unconfigure() -> None:
    """Ends the workers that TensorFlow Federated started in this process.

    A worker outlives the Python that started it and keeps its standard output open,
    so that `make test | tee log` would never end.
    """
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name() == "worker_binary"
    ]
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers, timeout=5)
