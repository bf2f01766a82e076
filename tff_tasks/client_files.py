"""SQLite files of federated data: one row for each example, asked for by client.

The public files of TensorFlow Federated's simulation datasets have two tables:

* ``examples(split_name, client_id, serialized_example_proto)``, by far the larger;
* ``client_metadata(client_id, split_name, num_examples)``.

Clients come from the second. The first is only ever asked for a single client, through
an index. ``python -m tff_tasks.federated_files FILE`` adds the index to a file without.
"""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections.abc import Iterator, Mapping

import numpy as np

from driver_kit.lazy import tf

_MAGIC = b"SQLite format 3\x00"
_COLUMNS = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}
_QUERY = (
    "SELECT serialized_example_proto FROM examples "
    "WHERE split_name = ? AND client_id = ?"
)
#: The index that `FederatedFile` needs.
INDEX = (
    "CREATE INDEX IF NOT EXISTS examples_by_client ON examples (split_name, client_id)"
)
_BUCKET = "https://storage.googleapis.com/tff-datasets-public"


class DataFileError(ValueError):
    """A data file is missing, or has the wrong contents."""


class FederatedFile:
    """A SQLite file with the splits of a federated dataset.

    Args:
      path: the file, decompressed.

    Raises:
      DataFileError: if it is missing, is no such file, or can only be read by scanning
        the table of examples.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self._check_file()
        try:
            self._connection = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=ro",
                uri=True,
                check_same_thread=False,
            )
            with self._errors():
                # A file from elsewhere must not run functions from its views, nor be
                # believed about its own structure.
                self._connection.execute("PRAGMA trusted_schema = OFF")
                self._connection.execute("PRAGMA cell_size_check = ON")
                self._connection.execute("PRAGMA query_only = ON")
                self._check_tables()
                self._check_index()
        except sqlite3.Error as error:
            raise DataFileError(f"{self.path} cannot be read: {error}.") from error

    def _check_file(self):
        if self.path.exists() and not self.path.is_file():
            raise DataFileError(f"{self.path} is no regular file.")
        if not self.path.exists():
            packed = self.path.with_name(self.path.name + ".lzma")
            if packed.exists():
                raise DataFileError(
                    f"{self.path} is missing, but {packed.name} is there. Decompress "
                    f"it: xz --format=lzma --decompress --keep {packed}"
                )
            raise DataFileError(
                f"{self.path} is missing. Get {_BUCKET}/{packed.name}, decompress it "
                "into the data directory (the HDF5 archives will do as well), make one "
                "from data of your own (python -m tff_tasks.convert), or run with "
                "--synthetic."
            )
        try:
            with open(self.path, "rb") as file:
                head = file.read(len(_MAGIC))
        except OSError as error:
            raise DataFileError(
                f"{self.path} cannot be read: {error.strerror}."
            ) from error
        if head != _MAGIC:
            raise DataFileError(
                f"{self.path} is not a SQLite database. Is it still compressed, or was "
                "its download cut short?"
            )

    def _check_tables(self):
        for table, wanted in _COLUMNS.items():
            rows = self._connection.execute(f"PRAGMA table_info({table})").fetchall()
            columns = {row[1] for row in rows}
            if not columns:
                raise DataFileError(f"{self.path} has no table {table!r}.")
            missing = sorted(wanted - columns)
            if missing:
                raise DataFileError(
                    f"{self.path}: table {table!r} has no column {missing[0]!r}; it "
                    f"has {', '.join(sorted(columns))}."
                )

    def _check_index(self):
        plan = self._connection.execute(f"EXPLAIN QUERY PLAN {_QUERY}", ("", ""))
        if any(row[-1].startswith("SCAN") for row in plan):
            raise DataFileError(
                f"{self.path} has no index to find one client's examples by; every "
                "round would read all of it. Add one, once: python -m "
                f"tff_tasks.federated_files {self.path}"
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            raise DataFileError(
                f"{self.path} is damaged: {error}. Get it again."
            ) from error

    def splits(self) -> list[str]:
        """The names of the splits."""
        with self._errors():
            rows = self._connection.execute(
                "SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name"
            )
            return [row[0] for row in rows]

    def clients(self, split: str) -> dict[str, int]:
        """The clients of a split in sorted order, with their numbers of examples.

        Raises:
          DataFileError: if there is no such split.
        """
        with self._errors():
            rows = self._connection.execute(
                "SELECT client_id, SUM(num_examples) FROM client_metadata "
                "WHERE split_name = ? GROUP BY client_id ORDER BY client_id",
                (split,),
            ).fetchall()
        if not rows:
            raise DataFileError(
                f"{self.path} has no split {split!r}; it has "
                f"{', '.join(map(repr, self.splits())) or 'none'}."
            )
        for client_id, count in rows:
            if not isinstance(client_id, str) or type(count) is not int or count < 1:
                raise DataFileError(
                    f"{self.path}: client_metadata says that client {client_id!r} of "
                    f"split {split!r} has {count!r} examples. Get the file again."
                )
        return dict(rows)

    def examples(self, split: str, client_id: str) -> list[bytes]:
        """The serialised examples of one client, in the order of the file.

        Raises:
          DataFileError: if there are none.
        """
        with self._errors():
            rows = self._connection.execute(_QUERY, (split, client_id)).fetchall()
        if not rows:
            raise DataFileError(
                f"{self.path}: client {client_id!r} of split {split!r} has no examples."
            )
        return [row[0] for row in rows]

    def read(
        self, split: str, client_id: str, features: Mapping[str, Feature]
    ) -> dict[str, np.ndarray]:
        """The examples of a client as arrays, one row each.

        Args:
          split: the split.
          client_id: the client.
          features: the features to read of each example.

        Raises:
          DataFileError: if there are none, or an example is malformed.
        """
        spec = {name: feature.spec() for name, feature in features.items()}
        try:
            parsed = tf.io.parse_example(self.examples(split, client_id), spec)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            raise DataFileError(
                f"{self.path}: client {client_id!r} of split {split!r} has a malformed "
                f"example: {str(error).splitlines()[0]}"
            ) from error
        return {name: value.numpy() for name, value in parsed.items()}

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()


class Feature:
    """A feature of an example.

    Args:
      dtype: "int", "float" or "bytes".
      shape: of one example's value.
    """

    _TYPES = {"int": "int64", "float": "float32", "bytes": "string"}

    def __init__(self, dtype: str, shape: tuple[int, ...] = ()):
        self.dtype = self._TYPES[dtype]
        self.shape = shape

    def spec(self) -> tf.io.FixedLenFeature:
        """The feature's specification for TensorFlow's parser."""
        return tf.io.FixedLenFeature(self.shape, tf.as_dtype(self.dtype))


def add_index(path: str | pathlib.Path) -> None:
    """Adds the index that `FederatedFile` needs. Reads the whole file once."""
    path = pathlib.Path(path)
    if not path.exists():
        raise DataFileError(f"{path} is missing.")
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(INDEX)
            connection.commit()
    except sqlite3.Error as error:
        raise DataFileError(f"{path}: {error}.") from error
