"""Random access to the records of every kind of data that `batches` takes."""

from __future__ import annotations

import abc
import hashlib
import math
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.sampling import columns, fetching, pipelines
from tfdpclip.sampling.columns import as_array, as_column, blank
from tfdpclip.sampling.row_weights import (
    PARTS,
    check_values,
    is_spec,
    map_leaves,
    named_specs,
    names,
    names_of_parts,
    refuse_third_input,
)

Structure = Any


#: How many records a digest covers if records are fetched one by one.
LOOKED_AT = 100
#: How many records, and numbers of each record, are hashed to notice moved arrays.
MARKS = 16
#: How many seconds, and how many records, the check for one shape may take before the
#: first draw, if records are fetched one by one.
LOOK_SECONDS = 2.0
LOOK_RECORDS = 100_000


class Source(abc.ABC):
    """Records that can be gathered into arrays of a fixed number of rows."""

    #: How many records there are.
    size: int
    #: One `(row_shape, dtype)` per part, in the structure (x,), (x, y) or (x, y, w).
    row_spec: tuple[Structure, ...]
    #: How many concurrent calls of `take`, ahead of their use, are worth threads;
    #: 0 if records are in memory, or must be fetched in turn.
    threads = 0
    #: How many rows a record has.
    rows_each = 1
    #: Whether the rows of a record are drawn anew in every step, by `rows_of`.
    draws_rows = False
    #: Whether some rows of a record have weight 0.
    leaves_over = False
    #: Whether the caller gave each example's person, so that neighbours differ in
    #: people.
    of_people = False
    #: Whether any records can be taken at any time.
    by_index = True
    #: Conditions on these records that a privacy statement must list.
    assumptions: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """How many bytes a record has; a text counts as its pointer."""
        specs = named_specs(self.row_spec).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)

    @property
    def arrays(self) -> tuple[Structure, ...] | None:
        """The parts of all examples, or None if they are not in memory."""
        return None

    @property
    def given(self) -> list[np.ndarray]:
        """The arrays that the caller gave, as far as they are in memory."""
        return [column for part in self.arrays or () for column in flatten(part)]

    def kept(self) -> Source:
        """The same records in their order, unaffected by changes of the arrays.

        Records that are fetched one by one cannot be copied.
        """
        return self

    def digest(self) -> str:
        """A hash of the records in their order: of all, or of `LOOKED_AT` records."""
        count = min(self.size, LOOKED_AT)
        places = np.linspace(0, self.size - 1, count).astype(np.int64)
        return _digest(self.size, self.take(places, count))

    def marks(self) -> str | None:
        """A quick hash of a few records, by which to notice moved records.

        None if a look at the records takes a fetch.
        """
        return None

    def prepare(self, scheme: Any, key: Any, step: int) -> None:
        """Makes the records of a step ready for `take`.

        Args:
          scheme: the scheme that draws the steps.
          key: the key of the draws.
          step: the number of the step since the first step of the key.
        """
        del scheme, key, step

    @abc.abstractmethod
    def take(self, indices: np.ndarray, rows: int) -> tuple[Structure, ...]:
        """Returns the given records, followed by zero rows up to `rows`."""

    def rows_of(self, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draws the indices that `take` gets for some records, if rows are drawn."""
        raise NotImplementedError

    def weights(
        self, parts: tuple[Structure, ...], indices: np.ndarray, rows: int
    ) -> Structure:
        """The weights of the rows from `take`: 0 for rows without a record."""
        given = np.arange(rows) < len(indices)
        return [*parts[2:], given & ~left_out(parts, rows)][0]


class Fetched(tuple):
    """The result of `take`, with a mark on records of a deviating shape.

    Attributes:
      left_out: marks the rows of such records, `[rows]`: the rows hold copies of
        a good row, and must have weight 0.
    """

    left_out: np.ndarray


def left_out(parts: tuple[Structure, ...], rows: int) -> np.ndarray:
    """Which rows from `take`, `[rows]`, belong to records of a deviating shape."""
    return getattr(parts, "left_out", np.zeros(rows, bool))


def open_source(data: Any, workers: int | None = None) -> Source:
    """Returns a source for arrays, nests of arrays, sequences or `tf.data`.

    Args:
      data: `x`, `(x, y)` or `(x, y, sample_weight)` of arrays (each may be a dict or
        tuple of arrays); a dict of arrays, taken as x; a list of records that are
        tuples, dicts, numbers or texts; a random-access `tf.data.Dataset` of unbatched
        records; or any object with `__len__` and `__getitem__` whose items are records
        (with `__getitems__`, several).
      workers: how many threads may call that object at a time. 1 by default: if two
        threads seek in one file, each may read the wrong record without an error.

    Returns:
      The source.

    Raises:
      ValueError: If the data are empty, of unequal lengths, neither numbers nor texts,
        of several shapes, or not random access, or workers are given for data that
        cannot use them.
    """
    source = _opened(data, 1 if workers is None else workers)
    called = type(source) is Records and not hasattr(data, "element_spec")
    if workers is not None and not called:
        raise ValueError(
            "workers is for objects with __getitem__. Arrays need no workers; for a "
            "tf.data pipeline, write map(..., num_parallel_calls=tf.data.AUTOTUNE)."
        )
    return source


def _opened(data: Any, workers: int) -> Source:
    if isinstance(data, tuple):
        if not 1 <= len(data) <= 3:
            raise ValueError(
                "data must be x, (x, y) or (x, y, sample_weight), got a tuple of "
                f"{len(data)}."
            )
        return Columns(columns.split_lists(data))
    if isinstance(data, dict) or columns.is_array(data):
        return Columns((data,))
    if isinstance(data, list):
        columns.refuse_list_of_arrays(data)
        if data and isinstance(data[0], (dict, tuple)):
            return _stacked(data)
        return Columns((data,))
    if hasattr(data, "element_spec"):
        return _dataset_source(data)
    if hasattr(data, "on_epoch_end"):
        raise ValueError(
            "data must give single records by index; a Keras Sequence gives batches. "
            "Give its records: x, y = map(np.concatenate, zip(*(data[i] for i in "
            "range(len(data))))), and then (x, y)."
        )
    text = isinstance(data, (str, bytes, bytearray))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not text:
        several = hasattr(type(data), "__getitems__")
        fetch_many = data.__getitems__ if several else None
        return Records(len(data), data.__getitem__, fetch_many, workers)
    raise ValueError(
        "data must be arrays, a dict or tuple of arrays, a random-access "
        "tf.data.Dataset, or an object with __len__ and __getitem__; got "
        f"{type(data).__name__}. Records that can only be read in order: "
        "batches(dpc.sampling.Stream(data, examples=..., folder=...)), with "
        'sampling="random_allocation" of a plan, or RandomAllocation.'
    )


class Columns(Source):
    """Arrays with records along the first axis; views of the caller's arrays."""

    #: For copies: functions that find the arrays that were copied, if they are alive.
    _before: list[Callable[[], np.ndarray | None]] | None = None

    def __init__(self, parts: tuple[Structure, ...]):
        self._hold(map_named(as_column, parts))
        if any(map(columns.rows_overlap, flatten(parts[0]))):
            self.assumptions = (_OVERLAP,)

    def _hold(self, parts: tuple[Structure, ...]) -> None:
        self._parts = parts
        found = names_of_parts(parts)
        lengths = {len(column) for column in found.values()}
        if len(lengths) != 1:
            shapes = ", ".join(f"{n} of shape {c.shape}" for n, c in found.items())
            raise ValueError(
                f"data must have as many records in every array, got {shapes}: the "
                "first axis runs over records. A list is read as one array: give the "
                "arrays of several inputs or outputs as a tuple or a dict."
            )
        self.size = lengths.pop()
        _check_size(self.size)
        self.row_spec = row_spec_of(self._parts)
        refuse_third_input(self.row_spec)
        for weights in self._parts[2:]:
            check_values(weights)

    @property
    def arrays(self):
        return self._parts

    @property
    def given(self):
        if self._before is None:
            return super().given
        return [column for find in self._before if (column := find()) is not None]

    def kept(self) -> Columns:
        copied = object.__new__(Columns)
        copied.__dict__.update(vars(self))
        copied._parts = tuple(map_leaves(np.copy, part) for part in self._parts)
        copied._before = [_reference(column) for column in self.given]
        return copied

    def digest(self) -> str:
        return _digest(self.size, self._parts)

    def marks(self) -> str:
        places = np.linspace(0, self.size - 1, min(self.size, MARKS)).astype(np.int64)

        def some(column):
            return np.stack([np.ravel(column[place])[:MARKS] for place in places])

        return _digest(self.size, tuple(map_leaves(some, part) for part in self._parts))

    def take(self, indices, rows):
        return take_rows(self._parts, indices, rows)


def _reference(column: np.ndarray) -> Callable[[], np.ndarray | None]:
    """A function that returns the array; an array of its own may end before."""
    if column.base is None:
        return weakref.ref(column)
    return lambda: column


def take_rows(parts: tuple[Structure, ...], indices: np.ndarray, rows: int) -> tuple:
    """Returns rows of arrays, followed by zero rows up to `rows`."""

    def gather(column):
        if rows == len(indices):
            return column.take(indices, axis=0)
        out = blank(rows, column.shape[1:], column.dtype)
        out[: len(indices)] = column[indices]
        return out

    return tuple(map_leaves(gather, part) for part in parts)


class Records(Source):
    """Records that are fetched one by one, or several at a time.

    *Formal guarantees*: a record with a shape unlike the first record's is an error
    before the first draw, if the check reaches the record within `look` seconds. If
    the check does not reach the record, a draw gives it weight 0, and no message
    reports the record: the message would reveal who was drawn.

    Args:
      size: how many records there are.
      fetch: returns the record of an index.
      fetch_many: returns the records of several indices; optional.
      workers: how many threads may fetch at a time.
      look: how many seconds the check may take; 0 if all shapes are known.
      reading: the line of code that reads all records, for errors.
    """

    def __init__(
        self,
        size: int,
        fetch: Callable[[int], Structure],
        fetch_many: Callable[[list[int]], Iterable[Structure]] | None = None,
        workers: int = 1,
        look: float | None = None,
        reading: str = "for i in range(len(data)): data[i]",
    ):
        _check_size(size)
        self.size = size
        self._fetch = fetch
        self._fetch_many = fetch_many
        self._reading = reading
        self._pool = ThreadPoolExecutor(workers, "records") if workers > 1 else None
        self.threads = 0 if self._pool is None else fetching.ELEMENTS
        first = row_of(self._fetch(0))
        self.row_spec = tuple(
            map_leaves(lambda row: (row.shape, row.dtype), part) for part in first
        )
        refuse_third_input(self.row_spec)
        self._specs = named_specs(self.row_spec)
        kept = [np.array(value) for value in flatten(first)]
        self._look_at(LOOK_SECONDS if look is None else look)
        if fetch_many is not None or workers > 1:
            _refuse_one_array(flatten(first), kept)

    def take(self, indices, rows):
        out = blank_parts(self.row_spec, rows)
        found = [column for part in out for column in flatten(part)]
        odd = np.zeros(rows, bool)
        for place, record in enumerate(
            self._read_all([int(index) for index in indices])
        ):
            try:
                values = values_like(record, self._specs)
            except Exception:  # An error would tell that the record was drawn.
                odd[place] = True
                continue
            for column, value in zip(found, values, strict=True):
                column[place] = value[()]
        if not odd[: len(indices)].all():
            # Functions of records get a good row, since they may fail on an empty row.
            for column in (column for part in out[:2] for column in flatten(part)):
                column[odd] = column[np.argmin(odd)]
        if not odd.any():
            return out
        fetched = Fetched(out)
        fetched.left_out = odd
        return fetched

    def _look_at(self, seconds: float) -> None:
        """Raises for records unlike the first; checks all records, or a sample."""
        if seconds <= 0:
            return
        places = np.arange(self.size)
        if self.size > LOOK_RECORDS and seconds < math.inf:
            rng = np.random.default_rng(0)
            places = rng.choice(self.size, LOOK_RECORDS, replace=False)
        elif seconds < math.inf:
            places = np.random.default_rng(0).permutation(self.size)
        begun, count = 0, 1
        end = time.monotonic() + seconds
        while begun < len(places) and time.monotonic() < end:
            some = [int(place) for place in sorted(places[begun : begun + count])]
            for index, record in zip(
                some, self._read_all(some, name_index=True), strict=True
            ):
                try:
                    values_like(record, self._specs)
                except Exception as error:
                    raise ValueError(
                        f"data: record {index} is unlike record 0: {error} "
                        f"{ONE_SHAPE}" + see("records-of-several-shapes")
                    ) from None
            begun, count = begun + count, min(2 * count, 1000)
        if begun < self.size:
            self.assumptions = (_SOME_LOOKED_AT,)

    def _read_all(
        self, indices: list[int], name_index: bool = False
    ) -> Iterable[Structure]:
        read = self._read_naming_index if name_index else self._read
        if self._fetch_many is not None and indices:
            try:
                found = list(self._fetch_many(indices))
            except Exception:  # Some records can still be read one by one.
                return map(read, indices)
            if len(found) == len(indices):
                return found
            if name_index:
                raise ValueError(
                    f"data: __getitems__ gave {len(found)} records for {len(indices)} "
                    "indices, and must give one for each index."
                )
            return map(read, indices)  # An error would tell of a drawn record.
        if self._pool is None:
            return map(read, indices)
        return self._pool.map(read, indices)

    def _read_naming_index(self, index):
        """Reads a record before the first draw, so that errors may name the index."""
        try:
            return self._fetch(index)
        except Exception as error:
            raise RuntimeError(
                f"data: record {index} could not be read: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _read(self, index):
        try:
            return self._fetch(index)
        except Exception as error:
            # A reader of the log must not learn which record was drawn.
            raise RuntimeError(
                f"data: a record could not be read ({type(error).__name__}). The "
                "message hides the index, because the index would tell who was drawn. "
                f"To find the record apart from training, read all: {self._reading}"
            ) from None


def _refuse_one_array(first: list[np.ndarray], kept: list[np.ndarray]) -> None:
    """Raises if later records were written to the arrays of the first record.

    Args:
      first: the arrays of the first record, after more records were read.
      kept: copies of these arrays, made before.
    """
    if any(
        now.tobytes() != then.tobytes() for now, then in zip(first, kept, strict=True)
    ):
        raise ValueError(
            "data: __getitem__ writes every record to the same arrays, so that records "
            "that are read together (by workers or __getitems__) become copies of one "
            "record. Return new arrays: np.array(x)." + see("rows-that-are-not-records")
        )


_OVERLAP = (
    "rows of x that share numbers in memory, such as windows of a series or copies of "
    "a row, are protected one by one: a person's data, or a number of the series, "
    "that is in several rows is not protected as a whole (people=ids would do so)"
)
ONE_SHAPE = (
    "Batches need records of one shape: pad or cut the records when you make them, and "
    "give padding weight 0."
)
_SOME_LOOKED_AT = (
    "records are fetched one by one, and as many as time allowed were checked before "
    "the first draw; any further record of a deviating shape counts for nothing"
)


def row_of(record: Structure) -> tuple[Structure, ...]:
    parts = record if isinstance(record, tuple) else (record,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            "data: a record must be x, (x, y) or (x, y, sample_weight), got "
            f"{len(parts)} parts."
        )
    return map_named(as_array, parts)


def values_like(record: Structure, specs: dict[str, Any]) -> list[np.ndarray]:
    """Returns the arrays of a record, in the order of their names.

    Args:
      record: x, (x, y) or (x, y, sample_weight).
      specs: the shape and the type of each array of the first record, by name.

    Raises:
      ValueError: if the record is unlike the first record.
    """
    row = row_of(record)
    values = names_of_parts(row)
    if list(values) != list(specs):
        raise ValueError(f"the record has {', '.join(values)}, not {', '.join(specs)}.")
    for name, value in values.items():
        shape, dtype = specs[name]
        if value.shape != shape:
            raise ValueError(f"{name} has the shape {value.shape}, not {shape}.")
        if value.dtype != dtype and not _may_become(value.dtype, dtype):
            raise ValueError(
                f"{name} holds {_type_name(value.dtype)}, not {_type_name(dtype)}."
            )
    for weights in row[2:]:
        check_values(map_leaves(lambda weight: weight[np.newaxis], weights))
    return list(values.values())


def _may_become(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether numbers of type `given` can be stored as `wanted` without a loss."""
    if "O" in (given.kind, wanted.kind):
        return False
    return np.can_cast(given, wanted, "same_kind")


def _type_name(dtype: np.dtype) -> str:
    return "texts" if dtype.kind == "O" else dtype.name


def _stacked(data: list) -> Columns:
    """Arrays of the records of a list, after a check of every record."""
    records = Records(len(data), data.__getitem__, look=math.inf)
    stacked = Columns.__new__(Columns)
    stacked._hold(tuple(records.take(np.arange(records.size), records.size)))
    parts = [record[0] if isinstance(record, tuple) else record for record in data]
    rows = zip(*map(flatten, parts), strict=True)
    if any(columns.rows_overlap(list(row)) for row in rows):
        stacked.assumptions = (_OVERLAP,)
    return stacked


class StackedRecords(Records):
    """Records that are fetched together, as stacked arrays."""

    def __init__(
        self,
        size: int,
        fetch: Callable[[int], Structure],
        fetch_all: Callable[[np.ndarray], Structure],
        look: float | None = None,
        reading: str = "",
    ):
        super().__init__(size, fetch, look=look, reading=reading)
        self._fetch_all = fetch_all
        self.threads = fetching.ELEMENTS

    def take(self, indices, rows):
        if not len(indices):
            return super().take(indices, rows)
        try:
            found = self._fetch_all(indices)
            parts = found if isinstance(found, tuple) else (found,)
            parts = map_named(as_column, parts)
            for weights in parts[2:]:
                check_values(weights)
        except Exception:  # Read one by one, the good records count.
            return super().take(indices, rows)
        lengths = {len(column) for part in parts for column in flatten(part)}
        if row_spec_of(parts) != self.row_spec or lengths != {len(indices)}:
            return super().take(indices, rows)

        def filled(column):
            if rows == len(column):
                return column
            out = blank(rows, column.shape[1:], column.dtype)
            out[: len(column)] = column
            return out

        return tuple(map_leaves(filled, part) for part in parts)


def _dataset_source(dataset) -> Records:
    dataset = pipelines.checked(dataset)
    size = int(dataset.cardinality())

    def fetch(index):
        record = tf.data.experimental.at(dataset, index)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), record)

    look = 0.0 if pipelines.has_one_shape(dataset) else None
    reading = "for record in data: pass"
    fetch_all = fetching.fetch_many(dataset)
    if fetch_all is None:
        source = Records(size, fetch, look=look, reading=reading)
    else:
        source = StackedRecords(size, fetch, fetch_all, look, reading)
    source.assumptions += pipelines.assumptions_about(dataset)
    return source


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError("data must hold at least one record, got none.")


def _digest(size: int, parts: tuple[Structure, ...]) -> str:
    found = hashlib.blake2b(str(size).encode(), digest_size=32)
    for column in (column for part in parts for column in flatten(part)):
        found.update(f"{column.shape} {column.dtype}".encode())
        if column.dtype.kind == "O":
            found.update(repr(column.tolist()).encode())
        else:
            found.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def blank_parts(row_spec: tuple[Structure, ...], rows: int) -> tuple[Structure, ...]:
    """Arrays without a record."""
    return tuple(
        map_leaves(lambda spec: blank(rows, *spec), part, is_leaf=is_spec)
        for part in row_spec
    )


def row_spec_of(parts: tuple[Structure, ...]) -> tuple[Structure, ...]:
    return tuple(
        map_leaves(lambda column: (column.shape[1:], column.dtype), part)
        for part in parts
    )


def map_named(function, parts: tuple) -> tuple:
    """Applies `function(array, name)` to all arrays of the parts of data."""

    def mapped(node, name):
        if isinstance(node, dict):
            return {k: mapped(v, f"{name}[{k!r}]") for k, v in node.items()}
        if isinstance(node, tuple):
            return tuple(mapped(v, f"{name}[{k}]") for k, v in enumerate(node))
        return function(node, name)

    return tuple(map(mapped, parts, PARTS))


def flatten(node) -> list:
    return list(names(node).values())
