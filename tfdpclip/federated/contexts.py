"""Execution contexts for federated computations, which end their own processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tfdpclip._arguments import boolean, count_of, positive
from tfdpclip.accounting import rounds
from tfdpclip.federated import _tff, _workers

# Far larger values overflow the clocks of the operating system and of gRPC.
_LONGEST_SECONDS = 1e6


@contextlib.contextmanager
def local_context(
    *, simulate_secure_sums: bool = False, asynchronous: bool = False
) -> Iterator[Any]:
    """Runs federated computations on this machine, and leaves no process behind.

        with dpc.federated.local_context(simulate_secure_sums=True):
            process = tff.learning.algorithms.build_unweighted_fed_avg(...)
            state = process.initialize()
            ...

    TensorFlow Federated runs computations in a worker, a separate process that starts
    with the first computation. The worker outlives the Python process that started it
    and keeps the inherited output open: ``python train.py | tee log`` never
    ends. At the end of this context, also by an exception, the context's worker is
    ended, by its id, and no other process.

    The context applies to the thread that enters it; results stay available after it.
    Call all federated computations inside: a call before or after the context runs in
    TensorFlow Federated's own default context, which has a worker too. A process that
    is killed ends nothing.

    Args:
      simulate_secure_sums: whether secure sums are computed as well, without the
        cryptography, as `secure=True` needs on one machine. Otherwise they fail.
      asynchronous: whether computations return awaitables, as
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
    context, end_worker = _tff.new_local_context(
        simulate_secure_sums, asynchronous, rounds.execution
    )
    with _interruptible():
        try:
            with _tff.install(context), rounds.counts_executions():
                yield context
        finally:
            end_worker()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes sure that workers end when TensorFlow Federated interrupts them.

    When TensorFlow Federated replaces a worker, it interrupts the old worker and waits
    for its end, for ever if the worker ignores interrupts. A shell's background jobs
    ignore interrupts, and their child processes inherit this. A signal handler,
    unlike "ignore", is not inherited.
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


@contextlib.contextmanager
def remote_context(
    workers: Sequence[str],
    *,
    simulate_secure_sums: bool = False,
    asynchronous: bool = False,
    ready_seconds: float = 60.0,
    round_seconds: float = 3600.0,
    subrounds: int | None = None,
) -> Iterator[Any]:
    """Runs federated computations on workers of this and further machines.

        workers = ["10.0.0.1:10000", "10.0.0.2:10000"]
        with dpc.federated.remote_context(workers):
            process = tff.learning.algorithms.build_unweighted_fed_avg(...)
            state = process.initialize()
            ...

    Start workers by hand, one on each machine, by
    ``python -m tfdpclip.federated.worker --port=10000``. The workers keep running after
    the context, but forget all values of the context. The clients of a round are
    divided among the workers, their sums are merged, and later steps run once, on one
    of the workers.

    *Formal guarantees*

    * A round has the same release as in `local_context`: the merged sum is the sum over
      all clients, and noise is drawn once. (A sum of float32 has rounding errors in a
      different order, about 1e-8 of it; secure sums are equal to the bit.) Computations
      with a result that would draw noise for each part are refused.
    * If a worker is lost, its part is computed again when it is back, for as long as
      `ready_seconds`; after that, or after `round_seconds`, the computation raises
      and releases nothing. With distributed noise a part that is computed again has
      fresh shares of noise; no lost share was merged.

    Workers and this process are trusted: workers get clients' *data*, see single
    clients' updates, and the merging worker sees the sum without noise. gRPC is used
    without encryption or authentication; use a private network or tunnels. So
    simulated secure sums hide nothing from a worker. docs/federated.md lists who sees
    which data.

    The context applies to the thread that enters it.

    Args:
      workers: addresses, "host:port", each once.
      simulate_secure_sums: whether secure sums are computed as well, without the
        cryptography, as `secure=True` needs. Otherwise they fail.
      asynchronous: whether computations return awaitables, as
        `tff.learning.programs.train_model` needs.
      ready_seconds: how long to wait for a worker that does not answer.
      round_seconds: how long one call of a computation (such as `process.next`) may
        take. A frozen worker keeps its connection, and only this limit ends the call.
      subrounds: the number of parts that the clients of a computation are divided
        into; by default the number of workers. More parts are computed in sequence,
        with smaller messages and less memory, and less is repeated if a worker is lost.

    Yields:
      The execution context.

    Raises:
      ValueError: if an argument is out of range, or an address has no worker.
      TimeoutError: if workers do not answer, or a computation takes too long; names
        the workers. The computation can be called again.

    >>> with remote_context(["10.0.0.1"]):
    ...     pass
    Traceback (most recent call last):
        ...
    ValueError: workers must be addresses of the form host:port, such as ...
    """
    addresses = _workers.checked_addresses(workers)
    boolean("simulate_secure_sums", simulate_secure_sums)
    boolean("asynchronous", asynchronous)
    ready_seconds = _seconds("ready_seconds", ready_seconds)
    round_seconds = _seconds("round_seconds", round_seconds)
    if subrounds is None:
        subrounds = len(addresses)
    subrounds = count_of("subrounds", subrounds)
    compiler = _tff.worker_compiler(simulate_secure_sums)
    connected = [_workers.Worker(a, compiler, ready_seconds) for a in addresses]
    try:
        _try_out(connected, ready_seconds)
        context: Any = RemoteContext(
            connected, simulate_secure_sums, subrounds, round_seconds
        )
        if asynchronous:
            context = _tff.ProgramContext(_Awaited(context))
        with _tff.install(context), rounds.counts_executions():
            yield context
    finally:
        _workers.all_at_once([worker.close for worker in connected])


def _seconds(name, value):
    seconds = positive(name, value)
    if seconds > _LONGEST_SECONDS:
        raise ValueError(
            f"{name} must be at most {_LONGEST_SECONDS:g} (11 days), got {seconds:g}."
        )
    return seconds


def _try_out(connected, ready_seconds):
    """Raises if any worker does not answer, or is not a worker."""

    def failure(worker):
        try:
            worker.try_out()
        except (TimeoutError, _workers.RoundTooLongError):
            return worker.address
        return None

    with _workers.deadline(2 * ready_seconds):
        found = _workers.all_at_once([lambda w=w: failure(w) for w in connected])
    silent = [address for address in found if address is not None]
    if silent:
        raise TimeoutError(
            f"workers: no answer from {', '.join(silent)} within "
            f"ready_seconds={ready_seconds:g} s. Start a worker on each of these "
            "machines, by python -m tfdpclip.federated.worker --port=..., and let "
            "this machine reach its port."
        )


class RemoteContext(_tff.MergingContext):
    """The context of `remote_context`.

    Args:
      connected: the workers.
      simulate_secure_sums: whether secure sums are computed without cryptography.
      subrounds: the number of parts that clients are divided into.
      round_seconds: how long a computation may take.
    """

    def __init__(
        self,
        connected: list[_workers.Worker],
        simulate_secure_sums: bool,
        subrounds: int,
        round_seconds: float,
    ):
        super().__init__(connected, simulate_secure_sums, subrounds)
        self._connected = connected
        self._round_seconds = round_seconds

    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Runs a computation.

        Raises:
          TimeoutError: if it takes longer than the deadline, or a worker is lost.
        """
        try:
            with (
                rounds.execution(_tff.count_clients(comp, arg)),
                _workers.deadline(self._round_seconds),
            ):
                return super().invoke(comp, arg)
        except _workers.RoundTooLongError as error:
            raise TimeoutError(self._too_long()) from error

    def _too_long(self):
        answers = _workers.all_at_once([w.answers for w in self._connected])
        pairs = zip(self._connected, answers, strict=True)
        silent = [worker.address for worker, answer in pairs if not answer]
        begin = (
            "workers: the computation was not over after "
            f"round_seconds={self._round_seconds:g} s, and nothing was released. "
        )
        if not silent:
            return begin + (
                "All workers answer: they need more time, fewer clients, or were "
                "restarted over and over."
            )
        return begin + (
            f"No answer from {', '.join(silent)}. Start it (again), or continue from "
            "the last state with the workers that are left."
        )


class _Awaited(_tff.AsyncContext):
    """The asynchronous form of a `RemoteContext`."""

    def __init__(self, context: RemoteContext):
        self._context = context

    async def invoke(self, comp: Any, arg: Any) -> Any:
        if inspect.isawaitable(arg):
            arg = await arg
        return await asyncio.wrap_future(
            _workers.in_thread(lambda: self._context.invoke(comp, arg))
        )
