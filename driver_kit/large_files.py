"""Files that are written in pieces, and take their names in one step at the end."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from tfdpclip import files


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary file, which replaces `path` in one step at the end.

    For content that is too large for `files.write_atomically`, with the same
    guarantees: until the block ends `path` holds its earlier content, and keeps it if
    the block raises. If the process is killed, `files.prepare_directory` deletes the
    temporary file later.

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
    temporary = files.temporary_beside(target)
    try:
        yield temporary
        try:
            mode = files.mode_of(target)
            if mode is not None:
                os.chmod(temporary, mode)
            handle = os.open(temporary, os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(temporary, target)
            files.synchronise(target.parent)
        except OSError as error:
            raise files.explained(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
