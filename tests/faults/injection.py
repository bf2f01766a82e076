"""Faults at any call that changes the disk, in this process.

`os.open` (for writing), the writes to the opened files, `os.fsync`, `os.replace`,
`os.mkdir` and `os.unlink` are counted; the fault happens at a given count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Killed(BaseException):
    """The process is killed. Nothing that it does afterwards reaches the disk."""


class Faults:
    """Counts calls, and fails at a given call.

    Attributes:
      calls: the names of the calls so far.
    """

    def __init__(self, at: int | None, error: BaseException, forever: bool):
        self.calls: list[str] = []
        self._at, self._error, self._forever = at, error, forever
        self.happened = False

    def call(self, name: str, real: Callable, *arguments: Any, **options: Any) -> Any:
        """Calls, or fails."""
        self._count(name)
        return real(*arguments, **options)

    def _count(self, name: str, torn: Callable = lambda: None) -> None:
        self.calls.append(name)
        number = len(self.calls)
        dead = self._forever and self.happened
        if self._at is not None and (number == self._at or dead):
            if not self.happened:
                self.happened = True
                torn()
            raise self._error

    def write(self, file: Any, content: bytes) -> int:
        """Writes the content, or half of it if the fault is here."""
        self._count("write", lambda: file.write(content[: len(content) // 2]))
        return file.write(content)


class _File:
    """A file whose writes are counted, without a buffer."""

    def __init__(self, file: Any, faults: Faults):
        self._file, self._faults = file, faults

    def write(self, content):
        return self._faults.write(self._file, content)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@contextlib.contextmanager
def faults(
    at: int | None,
    error: BaseException | None = None,
    *,
    forever: bool | None = None,
    within: pathlib.Path | None = None,
) -> Iterator[Faults]:
    """Lets the `at`-th call that changes the disk fail.

    Args:
      at: counted from 1; None only counts.
      error: the error to raise; `Killed` by default.
      forever: whether all later calls fail too; true of `Killed`.
      within: counts only calls for files in this directory.
    """
    error = error or Killed()
    if forever is None:
        forever = isinstance(error, Killed)
    found = Faults(at, error, forever)
    real = {
        name: getattr(os, name)
        for name in ("open", "fdopen", "fsync", "replace", "mkdir", "unlink")
    }
    ours: set[int] = set()

    def counts(path) -> bool:
        return within is None or os.fspath(path).startswith(str(within))

    def opened(path, flags, *rest, **options):
        if not flags & (os.O_WRONLY | os.O_RDWR) or not counts(path):
            return real["open"](path, flags, *rest, **options)
        handle = found.call("open", real["open"], path, flags, *rest, **options)
        ours.add(handle)
        return handle

    def fdopened(handle, mode="r", *rest, **options):
        file = real["fdopen"](handle, mode, *rest, **options)
        if handle not in ours or "w" not in mode:
            return file
        ours.discard(handle)
        return _File(file, found)

    def patched(name):
        def call(path, *rest, **options):
            if name != "fsync" and not counts(path):
                return real[name](path, *rest, **options)
            return found.call(name, real[name], path, *rest, **options)

        return mock.patch.object(os, name, call)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "open", opened))
        stack.enter_context(mock.patch.object(os, "fdopen", fdopened))
        for name in ("fsync", "replace", "mkdir", "unlink"):
            stack.enter_context(patched(name))
        yield found


def os_error(code: int) -> OSError:
    """The operating system's error, without a file's name."""
    return OSError(code, os.strerror(code))


FULL = errno.ENOSPC


def points(operation: Callable[[], Any], prepare: Callable[[], Any], within) -> int:
    """How many calls of an operation change files in a directory."""
    prepare()
    with faults(None, within=within) as counted:
        operation()
    return len(counted.calls)
