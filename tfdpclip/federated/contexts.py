"""Where federated computations run, and the end of what was started for them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from tfdpclip._arguments import boolean
from tfdpclip.federated import _tff


@contextlib.contextmanager
def local_context(
    *, simulate_secure_sums: bool = False, asynchronous: bool = False
) -> Iterator[Any]:
    """Runs federated computations on this machine, and leaves no process behind.

        with dpc.federated.local_context(simulate_secure_sums=True):
            process = tff.learning.algorithms.build_unweighted_fed_avg(...)
            state = process.initialize()
            ...

    TensorFlow Federated runs computations in a worker, a process of its own that it
    starts when the first one is called. The worker outlives the Python that started it
    and keeps the output that it inherited open: ``python train.py | tee log`` never
    ends. On the way out of this context, exceptions included, its worker is ended, by
    its id, and no other process.

    It applies to the thread that enters it; what was computed in it stays. Everything
    federated belongs inside: a computation that is called before or after runs in
    TensorFlow Federated's own default context, which has a worker too. A process that
    is killed ends nothing.

    Args:
      simulate_secure_sums: whether secure sums are computed as well, without the
        cryptography, as `secure=True` needs on one machine. Otherwise they fail.
      asynchronous: whether computations return what is to be awaited, as
        `tff.learning.programs.train_model` needs.

    Yields:
      The execution context.

    Raises:
      ValueError: if an argument is not a bool.
      RuntimeError: if another release of TensorFlow Federated hides its worker.

    >>> with local_context() as context:
    ...     type(context).__name__
    'SyncExecutionContext'
    """
    boolean("simulate_secure_sums", simulate_secure_sums)
    boolean("asynchronous", asynchronous)
    context, end_worker = _tff.new_local_context(simulate_secure_sums, asynchronous)
    with _interruptible():
        try:
            with _tff.install(context):
                yield context
        finally:
            end_worker()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes sure that workers end when TensorFlow Federated interrupts them.

    Where it replaces a worker it waits for the old one's end, for ever if that ignores
    interrupts, as a shell's background jobs do and what they start. A handler, unlike
    "ignore", is not inherited.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
