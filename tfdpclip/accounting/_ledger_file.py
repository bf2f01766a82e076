"""The ledger's file: JSON with a checksum, so that damage is detected."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from tfdpclip import _sealed, files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 4
# Format 3 had no correlated noise. Format 2 did not record which optimizer ran the
# steps: the steps of a restored optimizer cannot be recognised, and count once more.
_READABLE = (2, 3, 4)
_MOST_BYTES = 2**28
_ADVICE = (
    "Restore it from a backup. A new ledger instead would forget what has been spent."
)


class LedgerFile:
    """A ledger's file, and its content as this process last saw it.

    *Formal guarantees*

    * The file is replaced atomically, and is on the disk when `write` returns.
    * A file that differs from the written content in any value does not load: the file
      carries a SHA-256 checksum of its content. (A checksum finds damage, not an
      adversary, who could compute a new checksum.)
    * `conflict` reports a file that a second process wrote, or that is missing. In the
      context of `alone` no second process writes, where the file system has locks.

    Args:
      path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self._seen: bytes | None = None
        self._writing: bytes | None = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context that one process at a time enters, for the files of a folder."""
        if fcntl is None or not self.path.parent.is_dir():
            yield
            return
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            # Some network file systems have no locks.
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def write(self, content: dict[str, Any]) -> None:
        """Writes a ledger's content, for `read` to return.

        Raises:
          OSError: If the file cannot be written.
        """
        text = _sealed.to_text(content).encode()
        if self._seen is None:
            files.prepare_directory(self.path.parent)
        # After an interruption, the file may hold the new or the old content.
        self._writing = text
        files.write_atomically(self.path, text)
        self._seen = text

    def read(self) -> dict[str, Any]:
        """Reads and checks the file.

        Raises:
          ValueError: If the file is not a ledger, or damaged.
          OSError: If the file cannot be read.
        """
        try:
            text = files.read_bytes(self.path, _MOST_BYTES)
            content = _sealed.from_text(text, _READABLE)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is not a privacy ledger, or damaged: {error} {_ADVICE}"
            ) from error
        self._seen = text
        return content

    def conflict(self) -> str | None:
        """The reason why the file must not be overwritten; None if it may be."""
        try:
            now = files.read_bytes(self.path, _MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            now = None
        except ValueError:
            now = b""  # Not a regular file.
        if now == self._seen or (now is not None and now == self._writing):
            return None
        change = "is gone" if now is None else "was written from outside"
        return (
            f"{self.path} {change} while this process kept it. Two runs must not share "
            "a ledger, and steps that ran must not be forgotten. Put the file back, or "
            "end the other run; then continue with Ledger.load."
        )
