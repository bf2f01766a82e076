"""Files that survive a crash, a full disk, and damage: written whole, read with care.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import pathlib
import secrets
import stat
import time
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

_SUFFIX = ".tfdpclip-tmp"
# Older temporary files were left by a killed process: no write takes this long.
_LEFT_SECONDS = 600.0
# The largest expansion by deflate, and the largest file that is read.
_DEFLATE_RATIO = 1032
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
    temporary = _temporary(target)
    try:
        mode = 0o600 if private else _mode(target)
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
        _synchronise(target.parent)
    except OSError as error:
        raise explained(error, path) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary file, which replaces `path` in one step at the end.

    For content that is too large for `write_atomically`, with the same guarantees:
    until the block ends `path` holds its earlier content, and keeps it if the block
    raises. If the process is killed, `prepare_directory` deletes the temporary file
    later.

    Args:
      path: The file.

    Yields:
      The path to write to, in the same directory. No file is there yet.

    Raises:
      OSError: If the file cannot be put in place. Names the file and the remedy.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "large"
    >>> with replacing(path) as temporary:
    ...     _ = temporary.write_text("all of it")
    ...     print(path.exists())
    False
    >>> path.read_text()
    'all of it'
    """
    target = pathlib.Path(os.path.realpath(path))
    temporary = _temporary(target)
    try:
        yield temporary
        try:
            mode = _mode(target)
            if mode is not None:
                os.chmod(temporary, mode)
            handle = os.open(temporary, os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(temporary, target)
            _synchronise(target.parent)
        except OSError as error:
            raise explained(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _temporary(target: pathlib.Path) -> pathlib.Path:
    # In the same directory: renaming is atomic within one file system only.
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{_SUFFIX}")


def _mode(target: pathlib.Path) -> int | None:
    try:
        return stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        return None


def _synchronise(directory: pathlib.Path) -> None:
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


def read_json(path: str | os.PathLike[str], most: int = 2**28) -> Any:
    """The content of a JSON file. NaN and Infinity are not allowed.

    Raises:
      ValueError: If it is not JSON in UTF-8. Names the file.
      OSError: If it is missing or cannot be read.
    """
    content = read_bytes(path, most)
    try:
        return json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if content else "it is empty"
        raise ValueError(
            f"{path} is cut or damaged, or not a JSON file: {reason}."
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def read_npz(
    source: str | os.PathLike[str] | BinaryIO,
    names: Sequence[str] | None = None,
    most: int = _MOST_BYTES,
) -> dict[str, np.ndarray]:
    """Arrays of a .npz file. Executes nothing from it; checks sizes before allocating.

    Args:
      source: The file, or a stream that can seek.
      names: The arrays wanted; all by default.
      most: The largest total size of the arrays in bytes.

    Returns:
      Arrays by name, in the order of the file.

    Raises:
      ValueError: If it is not a .npz file, is cut or damaged, lacks an array, or holds
        Python objects. Names the file, if there is a name.
      OSError: If it is missing or cannot be read.
    """
    path = getattr(source, "name", "the file") if hasattr(source, "read") else source
    with _stream(source) as stream:
        try:
            return _arrays(stream, names, most)
        except (OSError, MemoryError) as error:
            # EINVAL: a damaged archive makes zipfile seek to below 0.
            code = error.errno if isinstance(error, OSError) else None
            if code not in (None, errno.EINVAL):
                raise
            raise ValueError(f"{path} is cut or damaged: {error}.") from error
        except Exception as error:
            # Damaged archives raise a dozen kinds of errors, of zipfile, zlib, numpy.
            reason = error.args[0] if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path} is cut or damaged, or not a .npz file: {reason}."
            ) from error


def _stream(source: Any) -> contextlib.AbstractContextManager[BinaryIO]:
    """A stream of the source, closed at the end if it is opened here."""
    if hasattr(source, "read"):
        return contextlib.nullcontext(source)
    if not os.path.isfile(source):
        if os.path.exists(source):
            raise ValueError(f"{source} is not a regular file.")
        raise FileNotFoundError(errno.ENOENT, "No such file", str(source))
    return open(source, "rb")


def _arrays(stream, names, most) -> dict[str, np.ndarray]:
    size = stream.seek(0, os.SEEK_END) or stream.tell()
    stream.seek(0)
    found = {}
    with zipfile.ZipFile(stream) as archive:
        members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
        if len(members) != len(archive.infolist()):
            raise ValueError("it has two arrays of one name")
        missing = [name for name in names or () if name not in members]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        wanted = list(members) if names is None else list(names)
        declared = [members[name].file_size for name in wanted]
        packed = [members[name].compress_size for name in wanted]
        if max(packed, default=0) > size or sum(declared) > _DEFLATE_RATIO * size:
            raise ValueError("it declares more than it can hold")
        if sum(declared) > most:
            raise ValueError(f"its arrays have {sum(declared)} bytes, over {most}")
        for name in wanted:
            # Reading the whole member verifies its checksum.
            found[name] = _array(name, archive.read(members[name]))
    return found


def _array(name: str, content: bytes) -> np.ndarray:
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"{name} is of version {version}")
    shape, fortran, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which could run any code")
    start = stream.tell()
    if min(shape, default=0) < 0 or (
        math.prod(shape) * dtype.itemsize != len(content) - start
    ):
        raise ValueError(
            f"{name} is said to be {shape} of {dtype}, but has {len(content) - start} "
            "bytes"
        )
    if 0 in shape or dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(content, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran else "C").copy()
