"""Random access to whatever holds the records.

It is long because every kind of data that `batches` takes is opened and checked here.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.sampling import fetching
from tfdpclip.sampling.row_weights import check_values, names

Structure = Any

#: What the parts of data are called in messages.
PARTS = ("x", "y", "sample_weight")

#: Of records that are fetched one by one, so many tell whether they are the same.
LOOKED_AT = 100
#: So many records in arrays, and numbers of each, tell whether somebody moved them.
MARKS = 16


class Source(abc.ABC):
    """Records that can be gathered into arrays of a fixed number of rows."""

    #: How many records there are.
    size: int
    #: One `(row_shape, dtype)` per part, in the structure (x,), (x, y) or (x, y, w).
    row_spec: tuple[Structure, ...]
    #: How many calls of `take` at a time are worth a thread each, before anybody asks
    #: for them; 0 where records are there at once, or must be asked for in turn.
    threads = 0
    #: How many rows a record has.
    rows_each = 1
    #: Whether those are drawn anew in every step, by `rows_of`.
    draws_rows = False
    #: Whether some of them have weight 0.
    leaves_over = False
    #: Whether it was told whose the examples are, so that neighbours differ in people.
    of_people = False

    @property
    def row_bytes(self) -> int:
        """How many bytes a record has, of a text those of where it is."""
        specs = [spec for part in self.row_spec for spec in _specs(part)]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)

    def kept(self) -> Source:
        """The same records, in their order, whatever the caller does to the arrays.

        What the caller fetches one by one cannot be kept.
        """
        return self

    def digest(self) -> str:
        """A hash of the records in their order: of all, or of `LOOKED_AT`."""
        count = min(self.size, LOOKED_AT)
        places = np.linspace(0, self.size - 1, count).astype(np.int64)
        return _digest(self.size, self.take(places, count))

    def marks(self) -> str | None:
        """A hash of a few records at once, by which to see that they have moved.

        None where to look at them takes a fetch.
        """
        return None

    @abc.abstractmethod
    def take(self, indices: np.ndarray, rows: int) -> tuple[Structure, ...]:
        """Returns the given records, followed by zero rows up to `rows`."""

    def rows_of(self, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """What `take` gets for some records, where that is drawn."""
        raise NotImplementedError

    def weights(
        self, parts: tuple[Structure, ...], indices: np.ndarray, rows: int
    ) -> Structure:
        """The weights of what `take` gave: 0 for rows that are no record's."""
        return [*parts[2:], np.arange(rows) < len(indices)][0]


def open_source(data: Any, workers: int | None = None) -> Source:
    """Returns a source for arrays, nests of arrays, sequences or `tf.data`.

    Args:
      data: `x`, `(x, y)` or `(x, y, sample_weight)` of arrays (each may be a dict or
        tuple of arrays); a dict of arrays, taken as x; a random-access
        `tf.data.Dataset` of unbatched records; or any object with `__len__` and
        `__getitem__` whose items are records (with `__getitems__`, several).
      workers: how many threads may call that object at a time. 1 by default: a file
        that two threads seek in gives one the record of the other, and no error.

    Returns:
      The source.

    Raises:
      ValueError: If the data are empty, of unequal lengths, or not random access, or
        workers are for something else.
    """
    source = _opened(data, 1 if workers is None else workers)
    called = type(source) is Records and not hasattr(data, "element_spec")
    if workers is not None and not called:
        raise ValueError(
            "workers is for objects with __getitem__: arrays need none, and a tf.data "
            "pipeline says it itself, map(..., num_parallel_calls=tf.data.AUTOTUNE)."
        )
    return source


def _opened(data: Any, workers: int) -> Source:
    if isinstance(data, tuple):
        if not 1 <= len(data) <= 3:
            raise ValueError(
                "data must be x, (x, y) or (x, y, sample_weight), got a tuple of "
                f"{len(data)}."
            )
        return Columns(data)
    if isinstance(data, dict) or _is_array(data):
        return Columns((data,))
    if hasattr(data, "element_spec"):
        return _dataset_source(data)
    if hasattr(data, "on_epoch_end"):
        raise ValueError(
            "data must give single records by index; a Keras Sequence gives batches."
        )
    text = isinstance(data, (str, bytes, bytearray))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not text:
        several = hasattr(type(data), "__getitems__")
        fetch_many = data.__getitems__ if several else None
        return Records(len(data), data.__getitem__, fetch_many, workers)
    raise ValueError(
        "data must be arrays, a dict or tuple of arrays, a random-access "
        "tf.data.Dataset, or an object with __len__ and __getitem__; got "
        f"{type(data).__name__}. An iterator cannot be sampled from: drawing records "
        "independently needs access by index."
    )


class Columns(Source):
    """Arrays whose first axis runs over records; a view of what the caller has."""

    def __init__(self, parts: tuple[Structure, ...]):
        self._parts = tuple(
            _map(lambda value, name=name: _as_column(value, name), part)
            for part, name in zip(parts, PARTS, strict=False)
        )
        columns: dict[str, np.ndarray] = {}
        for part, name in zip(self._parts, PARTS, strict=False):
            columns |= names(part, name)
        lengths = {len(column) for column in columns.values()}
        if len(lengths) != 1:
            shapes = ", ".join(f"{n} of shape {c.shape}" for n, c in columns.items())
            raise ValueError(
                f"data must have as many records in every array, got {shapes}: the "
                "first axis runs over records. A list is read as one array: give the "
                "arrays of several inputs or outputs as a tuple or a dict."
            )
        self.size = lengths.pop()
        _check_size(self.size)
        for weights in self._parts[2:]:
            check_values(weights)
        self.row_spec = _row_spec(self._parts)

    def kept(self) -> Columns:
        copied = object.__new__(Columns)
        copied.__dict__.update(vars(self))
        copied._parts = tuple(_map(np.copy, part) for part in self._parts)
        return copied

    def digest(self) -> str:
        return _digest(self.size, self._parts)

    def marks(self) -> str:
        places = np.linspace(0, self.size - 1, min(self.size, MARKS)).astype(np.int64)

        def some(column):
            return np.stack([np.ravel(column[place])[:MARKS] for place in places])

        return _digest(self.size, tuple(_map(some, part) for part in self._parts))

    def take(self, indices, rows):
        def gather(column):
            if rows == len(indices):
                return column.take(indices, axis=0)
            out = _blank(rows, column.shape[1:], column.dtype)
            out[: len(indices)] = column[indices]
            return out

        return tuple(_map(gather, part) for part in self._parts)


class Records(Source):
    """Records fetched one by one, or by whoever can fetch several."""

    def __init__(
        self,
        size: int,
        fetch: Callable[[int], Structure],
        fetch_many: Callable[[list[int]], Iterable[Structure]] | None = None,
        workers: int = 1,
    ):
        _check_size(size)
        self.size = size
        self._fetch = fetch
        self._fetch_many = fetch_many
        self._pool = ThreadPoolExecutor(workers, "records") if workers > 1 else None
        self.threads = 0 if self._pool is None else fetching.ELEMENTS
        self.row_spec = tuple(
            _map(lambda row: (row.shape, row.dtype), part) for part in self._row(0)
        )

    def take(self, indices, rows):
        out = tuple(
            _map(lambda spec: _blank(rows, *spec), part, is_leaf=_is_spec)
            for part in self.row_spec
        )
        rows_read = self._all([int(index) for index in indices])
        for place, (index, row) in enumerate(zip(indices, rows_read, strict=True)):
            columns = [c for part in out for c in _flatten(part)]
            values = [v for part in row for v in _flatten(part)]
            if len(columns) != len(values):
                raise ValueError(f"data: record {index} is structured unlike record 0.")
            for column, value in zip(columns, values, strict=True):
                if value.shape != column.shape[1:]:
                    raise ValueError(
                        f"data: record {index} has shape {value.shape}, record 0 had "
                        f"{column.shape[1:]}; batches need records of one shape."
                    )
                column[place] = value
        for weights in out[2:]:
            check_values(weights)
        return out

    def _all(self, indices: list[int]) -> Iterable[tuple[Structure, ...]]:
        if self._fetch_many is not None and indices:
            try:
                found = list(self._fetch_many(indices))
            except Exception:  # One by one, they say which of them it is.
                return map(self._read, indices)
            if len(found) != len(indices):
                raise ValueError(
                    f"data: __getitems__ gave {len(found)} records for {len(indices)} "
                    "indices."
                )
            return map(self._row_of, found)
        if self._pool is None:
            return map(self._read, indices)
        return self._pool.map(self._read, indices)

    def _read(self, index):
        try:
            return self._row(index)
        except Exception as error:
            raise RuntimeError(
                f"data: record {index} could not be read: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _row(self, index):
        return self._row_of(self._fetch(index))

    def _row_of(self, record):
        parts = record if isinstance(record, tuple) else (record,)
        if not 1 <= len(parts) <= 3:
            raise ValueError(
                "data: a record must be x, (x, y) or (x, y, sample_weight), got "
                f"{len(parts)} parts."
            )
        return tuple(
            _map(lambda value, name=name: _as_array(value, name), part)
            for part, name in zip(parts, PARTS, strict=False)
        )


class StackedRecords(Records):
    """Records that are fetched together, each array with all of them."""

    def __init__(
        self,
        size: int,
        fetch: Callable[[int], Structure],
        fetch_all: Callable[[np.ndarray], Structure],
    ):
        super().__init__(size, fetch)
        self._fetch_all = fetch_all
        self.threads = fetching.ELEMENTS

    def take(self, indices, rows):
        if not len(indices):
            return super().take(indices, rows)
        try:
            found = self._fetch_all(indices)
        except Exception:  # One by one, they say which of them it is.
            return super().take(indices, rows)
        parts = found if isinstance(found, tuple) else (found,)
        parts = tuple(
            _map(lambda value, name=name: _as_column(value, name), part)
            for part, name in zip(parts, PARTS, strict=False)
        )
        lengths = {len(column) for part in parts for column in _flatten(part)}
        if _row_spec(parts) != self.row_spec or lengths != {len(indices)}:
            return super().take(indices, rows)
        for weights in parts[2:]:
            check_values(weights)

        def filled(column):
            if rows == len(column):
                return column
            out = _blank(rows, column.shape[1:], column.dtype)
            out[: len(column)] = column
            return out

        return tuple(_map(filled, part) for part in parts)


def _dataset_source(dataset) -> Records:
    size = int(dataset.cardinality())
    if size < 0:
        raise ValueError(
            "data: the tf.data.Dataset must have a known, finite number of records. "
            "One that reads files or repeats has none: give arrays of all records (of "
            "a CSV file, by pandas.read_csv), or what docs/data.md has for your files."
        )
    _check_size(size)

    def fetch(index):
        record = tf.data.experimental.at(dataset, index)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), record)

    try:
        fetch(0)
    except (tf.errors.OpError, NotImplementedError) as error:
        raise ValueError(
            "data: this tf.data.Dataset has no random access. Sampling needs it; "
            "build it from tensor slices (and maps of those), or give arrays."
        ) from error
    _check_gives_records(dataset)
    fetch_all = fetching.fetch_many(dataset)
    if fetch_all is None:
        return Records(size, fetch)
    return StackedRecords(size, fetch, fetch_all)


# Steps of a pipeline after which an element is still one record, and is there once.
_KEEPS_RECORDS = frozenset(
    """CacheDataset ConcatenateDataset MapDataset OptionsDataset ParallelMapDataset
    PrefetchDataset RangeDataset ShardDataset SkipDataset TakeDataset TensorDataset
    TensorSliceDataset ZipDataset""".split()
)


def _check_gives_records(dataset) -> None:
    """Refuses a pipeline whose elements may be batches, or the same record twice."""
    pending = [dataset]
    while pending:
        current = pending.pop()
        kind = type(current).__name__.lstrip("_")
        if kind not in _KEEPS_RECORDS:
            step = kind.removesuffix("Dataset").lower()
            raise ValueError(
                f"data: this tf.data.Dataset goes through {step!r}, so that an element "
                "need not be one record: a batch would be drawn, clipped and accounted "
                "for as if it were one, and a record that is repeated as if it were "
                "several. Take batch, shuffle and repeat out, which the scheme does; "
                "tf.keras.utils.*_dataset_from_directory take batch_size=None and "
                "shuffle=False." + see("rows-that-are-not-records")
            )
        pending.extend(current._inputs())


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError("data must hold at least one record, got none.")


def _digest(size: int, parts: tuple[Structure, ...]) -> str:
    found = hashlib.blake2b(str(size).encode(), digest_size=32)
    for column in (column for part in parts for column in _flatten(part)):
        found.update(f"{column.shape} {column.dtype}".encode())
        if column.dtype.kind == "O":
            found.update(repr(column.tolist()).encode())
        else:
            found.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _row_spec(parts: tuple[Structure, ...]) -> tuple[Structure, ...]:
    return tuple(
        _map(lambda column: (column.shape[1:], column.dtype), part) for part in parts
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") or hasattr(value, "iloc")


def _as_column(value: Any, name: str) -> np.ndarray:
    column = _as_array(value, name)
    if column.ndim == 0:
        raise ValueError(
            f"data: {name} must be arrays with one row per record, got a scalar."
        )
    return column


def _as_array(value: Any, name: str) -> np.ndarray:
    try:
        return _canonical(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"data: {name} must be rectangular arrays of numbers or strings: {error}. "
            "Records of several lengths are filled up to one, as by "
            "tf.keras.utils.pad_sequences(labels, padding='post'), and what fills them "
            "has weight 0: scheme.batches((x, y, sample_weight)), with sample_weight "
            "of the shape of y."
        ) from error


def _canonical(array: np.ndarray) -> np.ndarray:
    """Converts what Keras would convert when given an array."""
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.kind in "US":
        return array.astype(object)
    if array.dtype.kind == "O" and array.size:
        first = array.reshape(-1)[0]
        if not isinstance(first, (str, bytes)):
            raise ValueError(f"got objects such as {type(first).__name__}")
    return array


def _blank(rows: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "O":
        return np.full((rows, *shape), b"", dtype=object)
    return np.zeros((rows, *shape), dtype)


def _is_spec(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], np.dtype)


def _specs(node) -> list:
    found: list = []
    _map(found.append, node, is_leaf=_is_spec)
    return found


def _map(function, node, is_leaf=lambda _: False):
    """Applies a function to the leaves of dicts and tuples."""
    if not is_leaf(node):
        if isinstance(node, dict):
            return {k: _map(function, v, is_leaf) for k, v in node.items()}
        if isinstance(node, tuple):
            return tuple(_map(function, v, is_leaf) for v in node)
    return function(node)


def _flatten(node) -> list:
    return list(names(node).values())
