"""Arrays of .npz files, read with care: nothing is executed, sizes are checked."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import zipfile
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

# The largest expansion by deflate, and the largest size of the arrays of a file.
_DEFLATE_RATIO = 1032
_MOST_BYTES = 2**33


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
