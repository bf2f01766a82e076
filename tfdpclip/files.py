"""Files that survive a crash, a full disk, and damage: written whole, read with care.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import stat
import time
from typing import Any

_SUFFIX = ".tfdpclip-tmp"
# Older temporary files were left by a killed process: no write takes this long.
_LEFT_SECONDS = 600.0
# The largest file that is read.
_MOST_BYTES = 2**33

_ROOM = "free some space, then run again"
_ELSEWHERE = "make the directory writable, or choose another"
_IN_THE_WAY = "its directory is missing or no directory; choose another"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then run again",
    errno.EROFS: _ELSEWHERE,
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.ENOENT: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.EISDIR: "a directory has this name; remove it or choose another",
}


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes, private: bool = False
) -> None:
    """Replaces a file in one step: no reader sees it half written.

    *Guarantees*

    * Whenever the process or the machine stops, `path` holds either its complete
      earlier content or all of `content`; after this returned, `content`.
    * If this raises, `path` holds its earlier content (unless only the last step, the
      synchronisation of the directory, failed), and no temporary file is left.
    * A symbolic link stays a link: its target is replaced. Permissions stay.
    * A `private` file can never be read by other users, whatever its permissions were.

    Args:
      path: The file.
      content: Bytes, or text to be written as UTF-8.
      private: Whether only the owner may read the file, from its first byte on.

    Raises:
      OSError: If the file cannot be written. Names the file and the remedy.
    """
    content = content.encode() if isinstance(content, str) else content
    target = pathlib.Path(os.path.realpath(path))
    temporary = temporary_beside(target)
    try:
        mode = 0o600 if private else mode_of(target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        handle = os.open(temporary, flags, 0o600 if private else 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                if mode is not None:
                    os.chmod(temporary, mode)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        synchronise(target.parent)
    except OSError as error:
        raise explained(error, path) from error


def temporary_beside(target: pathlib.Path) -> pathlib.Path:
    """A new name for a file that will replace `target`."""
    # In the same directory: renaming is atomic within one file system only.
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{_SUFFIX}")


def mode_of(target: pathlib.Path) -> int | None:
    """The permissions of a file; None if it is missing."""
    try:
        return stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        return None


def synchronise(directory: pathlib.Path) -> None:
    """Makes a renaming in a directory survive a power failure."""
    if os.name == "nt":
        return  # Windows cannot open directories.
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems do not support this, and do not need it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def explained(
    error: OSError, path: Any, state: str = "the earlier content is kept"
) -> OSError:
    """Returns an error of the disk with the path, the state of the file, and a remedy.

    Args:
      error: The error of the operating system.
      path: The file or the directory.
      state: The state in which the error leaves the file.
    """
    code = error.errno or errno.EIO
    advice = _ADVICE.get(code, "check the disk, then run again")
    reason = error.strerror or str(error)
    return OSError(code, f"{reason}; {state}; {advice}", os.fspath(path))


def prepare_directory(path: str | os.PathLike[str]) -> pathlib.Path:
    """Makes a directory, checks that it can be written to, and tidies it.

    To be called before a long computation with results in that directory. Temporary
    files of killed processes are deleted.

    Args:
      path: The directory.

    Raises:
      OSError: If it cannot be made or written to. Names the directory and the remedy.
    """
    directory = pathlib.Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(error, path) from error
    probe = directory / f".writable{_SUFFIX}"
    try:
        write_atomically(probe, b"yes")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    remove_leftovers(directory)
    return directory


def remove_leftovers(directory: pathlib.Path) -> None:
    """Deletes unfinished files that killed processes left in a directory.

    Only old files are deleted: a second process may be writing.
    """
    now = time.time()
    for path in directory.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > _LEFT_SECONDS:
                path.unlink()


def read_bytes(path: str | os.PathLike[str], most: int = _MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
      ValueError: If it is a directory, a pipe or a device, or too large.
      OSError: If it is missing or cannot be read.
    """
    # Not blocking: opening a pipe without a writer would wait forever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if os.path.isdir(path):
        raise ValueError(f"{path} is a directory, not a file.")
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file.")
        if found.st_size > most:
            raise ValueError(
                f"{path} has {found.st_size} bytes, more than the limit of {most}."
            )
        return file.read()
