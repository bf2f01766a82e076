"""Connections to workers on remote machines, and the waiting times for them."""

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

# Waiting times for calls besides rounds: a probe of a worker, and requests to forget.
_PROBE_SECONDS = 3.0
_FORGET_SECONDS = 2.0
_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
_MESSAGE_BYTES = 2 * 1000 * 1000 * 1000  # As in TensorFlow Federated.
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    # A worker that is back is found at once; by default, gRPC may wait two minutes
    # between attempts.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A separate connection: the state of a shared connection says nothing about it.
    ("grpc.use_local_subchannel_pool", 1),
    # Clients' updates go directly to the named workers, through no proxy.
    ("grpc.enable_http_proxy", 0),
]
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})"
)

# The time by which the computation of this thread, or task, must be over.
_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "_deadline", default=None
)


class RoundTooLongError(Exception):
    """The deadline of a computation has passed."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Computations inside must be over after `seconds`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float:
    """The time until the deadline, at least 0; infinity without a deadline."""
    at = _deadline.get()
    return float("inf") if at is None else max(0.0, at - time.monotonic())


def in_thread(function: Callable[[], Any]) -> concurrent.futures.Future:
    """Calls `function` in a thread that does not keep Python from ending."""
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
    """Returns the addresses in the form of gRPC.

    Raises:
      ValueError: if there are none, or an address is malformed or repeated.
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
    """The channel interface that a stub needs; calls end at the deadline.

    Args:
      channel: the channel of the calls.
      ready_seconds: how long a call may wait for the connection.
    """

    def __init__(self, channel: grpc.Channel, ready_seconds: float):
        self._channel = channel
        self._ready_seconds = ready_seconds

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable:
        """Returns a function that calls a method."""
        call = self._channel.unary_unary(method, *args, **kwargs)
        # The worker answered a moment ago; this connection may still have to be made.
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
        """Does nothing: gRPC's thread for a subscription logs an error at the end."""


class Worker(_tff.AsyncContext):
    """One worker, with computations in a thread of its own.

    TensorFlow Federated's calls block their event loop, so that several workers in one
    loop would take turns.

    Args:
      address: "host:port".
      compiler: the compiler of computations.
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
            f"workers: {self.address} did not answer for "
            f"ready_seconds={self._ready_seconds:g} s. Start it (again), at the same "
            "address, or continue from the last state in a new "
            "dpc.federated.remote_context with the workers that are left."
        )

    def try_out(self) -> None:
        """Runs an empty computation on the worker.

        Raises:
          TimeoutError: if the worker does not answer.
          ValueError: if a different program answers at the address.
        """
        try:
            self._context.try_out()
        except grpc.RpcError as error:
            if error.code() in (_LATE, grpc.StatusCode.UNAVAILABLE):
                raise TimeoutError from error
            raise ValueError(
                f"workers: the program at {self.address} is not a worker of TensorFlow "
                "Federated 0.87 as started by python -m tfdpclip.federated.worker: "
                f"{error.code().name}."
            ) from error

    async def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation, up to the caller's deadline."""
        # If several workers fail, only the first error is read.
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
            # Calls of the worker end by the deadline; waits between attempts do not.
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
        """Whether the worker answers within `seconds`, on a new connection.

        The kernel answers for a process that is frozen, but not in gRPC's protocol.
        """
        # Not closed: on closing, gRPC's thread for the channel logs an error.
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
        """Has the worker forget all values from here, and ends the connection."""
        if self._context.has_given() and not self._silent and self.answers():
            self._context.forget()
        self._channel.close()


def all_at_once(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns all results, or raises the first error, after all have ended."""
    futures = [in_thread(function) for function in functions]
    concurrent.futures.wait(futures)
    return [future.result() for future in futures]
