"""Connections to workers on other machines, and how long to wait for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from tfdpclip._arguments import shown
from tfdpclip.federated import _tff

# What a worker is asked besides rounds: whether it is there, and to forget things.
_PROBE_SECONDS = 3.0
_FORGET_SECONDS = 2.0
_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
_MESSAGE_BYTES = 2 * 1000 * 1000 * 1000  # As in TensorFlow Federated.
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    # A worker that is back is found at once, not after the two minutes that gRPC may
    # take between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection of one's own: others to the same address say nothing of it.
    ("grpc.use_local_subchannel_pool", 1),
    # Updates of clients are for the workers that were named.
    ("grpc.enable_http_proxy", 0),
]
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})"
)

# When the computation that this thread, or task, works for must be over.
_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "_deadline", default=None
)


class RoundTooLongError(Exception):
    """The deadline of a computation has passed."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """What is computed inside must be over after so many seconds."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float:
    """Until the deadline, at least 0; infinity where there is none."""
    at = _deadline.get()
    return float("inf") if at is None else max(0.0, at - time.monotonic())


def in_thread(function: Callable[[], Any]) -> concurrent.futures.Future:
    """Calls it in a thread that does not keep Python from ending."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    context = contextvars.copy_context()

    def run():
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001 (raised by the future)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="tfdpclip worker").start()
    return future


def checked_addresses(workers: Sequence[str]) -> list[str]:
    """The addresses, as gRPC takes them.

    Raises:
      ValueError: if there are none, or one is malformed or there twice.
    """
    example = 'workers=["10.0.0.1:10000", "10.0.0.2:10000"]'
    if isinstance(workers, (str, bytes)) or not isinstance(workers, Sequence):
        raise ValueError(
            f"workers must be a list of addresses, such as {example}, got "
            f"{shown(workers)}."
        )
    if not workers:
        raise ValueError(f"workers must not be empty: for example {example}.")
    addresses = []
    for worker in workers:
        match = _ADDRESS.fullmatch(worker) if isinstance(worker, str) else None
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ValueError(
                "workers must be addresses of the form host:port, such as "
                f"{example}, got {shown(worker)}."
            )
        addresses.append(f"{match['host'].lower()}:{int(match['port'])}")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise ValueError(
            f"workers must be different, got {', '.join(twice)} more than once. To "
            "give one worker several parts of a round, use subrounds."
        )
    return addresses


class _TimedCalls:
    """What a stub needs of a channel. Calls end by the deadline, answered or not.

    Args:
      channel: what the calls go through.
      ready_seconds: how long a call may wait for the connection.
    """

    def __init__(self, channel: grpc.Channel, ready_seconds: float):
        self._channel = channel
        self._ready_seconds = ready_seconds

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable:
        """The call of a method."""
        call = self._channel.unary_unary(method, *args, **kwargs)
        # The worker was there a moment ago; this connection may have to be made.
        first = method.endswith("/GetExecutor")
        longest = self._ready_seconds if first else float("inf")
        if "/Dispose" in method:
            return lambda request: call(request, timeout=_FORGET_SECONDS)

        def timed(request):
            timeout = min(longest, seconds_left())
            return call(
                request,
                timeout=None if timeout == float("inf") else timeout,
                wait_for_ready=first,
            )

        return timed

    def subscribe(self, callback: Callable, try_to_connect: bool) -> None:
        """Not followed: gRPC's thread for it fails loudly when the channel ends."""


class Worker(_tff.AsyncContext):
    """One worker, which computes in a thread of its own.

    TensorFlow Federated's calls block the event loop that they are made in, so that
    several workers in one loop would take turns.

    Args:
      address: "host:port".
      compiler: what computations are compiled by.
      ready_seconds: how long to wait for a worker that does not answer.
    """

    def __init__(self, address: str, compiler: Any, ready_seconds: float):
        self.address = address
        self._ready_seconds = ready_seconds
        self._silent = False
        self._channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._stub = _tff.WorkerStub(_TimedCalls(self._channel, ready_seconds))
        self._context = _tff.WorkerContext(self._when_ready, compiler)

    def _when_ready(self):
        left = seconds_left()
        if left <= 0:
            raise RoundTooLongError
        self._silent = not self.answers(min(self._ready_seconds, left))
        if self._silent:
            raise self._lost()
        return self._stub

    def _lost(self):
        if seconds_left() <= 0:
            return RoundTooLongError()
        return TimeoutError(
            f"workers: {self.address} does not answer, and was waited for "
            f"ready_seconds={self._ready_seconds:g} s. Start it (again), at the "
            "same address, or continue from the last state in a new "
            "dpc.federated.remote_context with the workers that are left."
        )

    def try_out(self) -> None:
        """Computes nothing on it.

        Raises:
          TimeoutError: if it does not answer.
          ValueError: if what answers there is no worker.
        """
        try:
            self._context.try_out()
        except grpc.RpcError as error:
            if error.code() in (_LATE, grpc.StatusCode.UNAVAILABLE):
                raise TimeoutError from error
            raise ValueError(
                f"workers: what answers at {self.address} is not a worker of "
                "TensorFlow Federated 0.87 as "
                f"python -m tfdpclip.federated.worker starts it: {error.code().name}."
            ) from error

    async def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation; the deadline is that of whoever calls."""
        # Of several workers that fail, only the first one's error is looked at.
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.wrap_future(
            in_thread(lambda: asyncio.run(self.in_time(comp, arg)))
        )

    async def in_time(self, comp: Any, arg: Any) -> Any:
        """Runs a computation in this thread's event loop, or raises in time."""
        left = seconds_left()
        try:
            # Calls of the worker end by themselves; waits between attempts do not.
            return await asyncio.wait_for(
                self._context.invoke(comp, arg), None if left == float("inf") else left
            )
        except asyncio.TimeoutError as error:
            if seconds_left() <= 0:
                raise RoundTooLongError from error
            raise
        except grpc.RpcError as error:
            if error.code() == _LATE:
                raise self._lost() from error
            raise

    def answers(self, seconds: float = _PROBE_SECONDS) -> bool:
        """Whether it does, within so many seconds, on a new connection.

        The kernel answers for a process that is frozen, but not in gRPC's words.
        """
        # Not closed: gRPC's thread that follows it fails loudly if it is, and ends.
        ready = grpc.channel_ready_future(
            grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        )
        try:
            ready.result(timeout=seconds)
        except grpc.FutureTimeoutError:
            ready.cancel()
            return False
        return True

    def close(self) -> None:
        """Has the worker forget what it was given, and ends the connection."""
        if self._context.has_given() and not self._silent and self.answers():
            self._context.forget()
        self._channel.close()


def all_at_once(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return, or the first error, when all of them have ended."""
    futures = [in_thread(function) for function in functions]
    concurrent.futures.wait(futures)
    return [future.result() for future in futures]
