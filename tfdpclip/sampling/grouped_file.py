"""Records on the disk, by group, in a file without a name."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdpclip import files
from tfdpclip.sampling import sources

_STATE = "no step has read the copy of the stream there"


class GroupedFile:
    """Records that are written in any order, and read by group.

    *Formal guarantees*

    * The file has no name: other users and later processes cannot open the file. The
      operating system removes the file when the process ends, also when the process is
      killed or the machine stops.
    * `read` returns all records that were written to a group, with their numbers.

    The file has the bytes of NumPy's arrays. A text is preceded by its length. All
    records of a group that one call of `write` gets are consecutive.

    Args:
      folder: the directory of the file.
      row_spec: one `(row_shape, dtype)` per array of a record, see `Source`.

    Raises:
      OSError: if the file cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], row_spec: tuple[Any, ...]):
        self._folder = folder
        self._row_spec = row_spec
        # By group: the places in the file, and the numbers, of consecutive records.
        self._runs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        with self._explaining():
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=2**16)

    def write(
        self, groups: np.ndarray, numbers: np.ndarray, columns: list[np.ndarray]
    ) -> None:
        """Writes some records.

        Args:
          groups: the group of each record, `[rows]`.
          numbers: the number of each record, `[rows]`.
          columns: the arrays of the records, in the order of `sources.names`, each
            `[rows, ...]`.

        Raises:
          OSError: if the disk is full. Names the directory and the remedy.
        """
        order = np.argsort(groups, kind="stable")
        found, starts = np.unique(groups[order], return_index=True)
        with self._explaining():
            for group, rows in zip(found, np.split(order, starts[1:]), strict=True):
                self._runs[int(group)].append((self._file.tell(), len(rows)))
                for column in (numbers, *columns):
                    self._write_column(column[rows])

    def read(self, group: int) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Returns the numbers of a group's records, `[rows]`, and their arrays.

        Raises:
          OSError: if the file cannot be read.
        """
        runs = self._runs.get(group, [])
        rows = sum(count for _, count in runs)
        numbers = np.empty(rows, np.int64)
        parts = sources.blank_parts(self._row_spec, rows)
        columns = [numbers, *sources.flatten(parts)]
        first = 0
        with self._explaining():
            for place, count in runs:
                self._file.seek(place)
                for column in columns:
                    self._read_column(column[first : first + count])
                first += count
        return numbers, parts

    def groups(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """All records: the numbers and the arrays of one group after the other."""
        for group in list(self._runs):
            numbers, parts = self.read(group)
            yield numbers, sources.flatten(parts)

    def close(self) -> None:
        """Removes the file."""
        self._file.close()

    def _write_column(self, column: np.ndarray) -> None:
        if column.dtype.kind != "O":
            self._file.write(_bytes_of(column))
            return
        texts = [t.encode() if isinstance(t, str) else t for t in column.ravel()]
        self._file.write(_bytes_of(np.array([len(text) for text in texts], np.int64)))
        self._file.write(b"".join(texts))

    def _read_column(self, column: np.ndarray) -> None:
        """Fills a column, `[rows, ...]`, from the place of the file."""
        if column.dtype.kind != "O":
            self._read_into(column)
            return
        ends = np.zeros(column.size + 1, np.int64)
        self._read_into(ends[1:])
        np.cumsum(ends, out=ends)
        joined = np.empty(ends[-1], np.uint8)
        self._read_into(joined)
        texts = joined.tobytes()
        flat = column.reshape(-1)  # A view: the rows are consecutive.
        for i, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            flat[i] = texts[start:end]

    def _read_into(self, array: np.ndarray) -> None:
        wanted = _bytes_of(array)
        if self._file.readinto(wanted) != len(wanted):
            raise OSError(errno.EIO, "the file ends too early")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise files.explained(error, self._folder, _STATE) from error


def _bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array with consecutive rows; no copy."""
    return array.reshape(-1).view(np.uint8).data
