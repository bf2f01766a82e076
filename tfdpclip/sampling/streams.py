"""Data that can only be read in order: each epoch's copy on the disk, by step."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, _progress, files
from tfdpclip._docs import see
from tfdpclip.sampling import columns, pipelines, sources
from tfdpclip.sampling.grouped_file import GroupedFile
from tfdpclip.sampling.row_weights import check_values, refuse_third_input
from tfdpclip.sampling.sources import Source

# The largest number of records that are checked, and stacked, together.
_BLOCK = 1024
# The bytes of Python's object for a text, beside the bytes of the text.
_TEXT_BYTES = 64
# Records wait for a write in a quarter of `memory`. Their arrays are joined there, so
# that half is in use. The records of a group take the second half.
_WAITING, _GROUP = 4, 2

_ONE_PASS = (
    "every pass over the stream gives each record once, and an element of the stream "
    "is one record"
)


class Stream:
    """Records that can only be read in order: a generator, or a pipeline over files.

        def read():
            for line in open("data.csv"):
                *features, label = map(float, line.split(","))
                yield np.array(features, "float32"), int(label)

        plan = dpc.keras.PrivacyPlan(
            epsilon=3, delta=1e-8, examples=50_000_000, batch_size=4096, epochs=2,
            sampling="random_allocation")
        stream = dpc.sampling.Stream(read, plan.examples, folder="/scratch")
        model.fit(plan.batches(stream), epochs=plan.epochs, callbacks=plan.callbacks)

    Before the first step of each epoch, the stream is read once, from its beginning
    to its end. `RandomAllocation` puts each record into a random step, and the record
    is written to a file in `folder`, beside the records of the same step. The steps are
    then read from this file, in order.

    *Formal guarantees*

    * A step has the records that `RandomAllocation` draws for data with access by
      index, with the same key: record i is element i of the stream.
    * The number of records, and the shape and type of each record, are checked before
      the first step of the epoch.
    * **Memory**: `memory` bytes of records, and up to 20 bytes for each of the
      `examples` (the random order), beside the batches of the training loop. A group
      of steps is in memory at a time; a single step with more than `memory` / 2 bytes
      is in memory whole.
    * **Disk**: one copy of the records, as NumPy's arrays hold them, and 8 bytes for
      each record; two copies while an iterator's copy is dealt again. The free
      space is checked before most of the copy is written.
    * The file has no name. Other users cannot open the file, and nothing is left
      when the process ends, also when the process is killed. Python's `tempfile` makes
      the file, readable by its owner alone.

    | situation | what happens |
    | --- | --- |
    | a function, a pipeline, an iterable | is read again for each epoch |
    | an iterator or generator, which ends | is read once; its copy is dealt again |
    | more or fewer records than `examples` | an error, before the epoch's first step |
    | a record unlike the first | an error that names the record and the array |
    | a new call of `fit` | begins an epoch: the stream is read from its beginning |
    | a process that was killed | the next process begins an epoch |

    Args:
      data: A function without arguments that returns an iterable of records, or a
        `tf.data.Dataset` of records without `batch` and `repeat`, or an iterable of
        records. A record is x, (x, y) or (x, y, sample_weight), of numbers, texts,
        arrays, or dicts or tuples of arrays.
      examples: The number of records in a pass: a public number.
      folder: A directory on a local disk with room for the copy.
      memory: The bytes of records in memory.

    Raises:
      ValueError: If an argument is out of range, the data have access by index, or
        the pipeline's elements may not be records.
      OSError: If the directory cannot be written to.

    >>> import tempfile
    >>> from tfdpclip import sampling
    >>> def read():
    ...     return ((np.float32([i, 1]), i % 2) for i in range(1000))
    >>> stream = Stream(read, 1000, folder=tempfile.gettempdir())
    >>> batches = sampling.RandomAllocation(10).batches(stream)
    >>> int(sum(tf.reduce_sum(weights) for _, _, weights in batches))
    1000
    """

    def __init__(
        self,
        data: Any,
        examples: int,
        folder: str | os.PathLike[str],
        *,
        memory: int = 2**28,
    ):
        self.examples = _arguments.count_of("examples", examples)
        self.memory = _arguments.integer("memory", memory, 2**20)
        self._open, self._again = _opened(data)
        if not isinstance(folder, (str, os.PathLike)) or "\0" in str(folder):
            raise ValueError(
                "folder must be a directory on a local disk, got "
                f"{_arguments.shown(folder)}."
            )
        self.folder = files.prepare_directory(folder)
        self.assumptions: tuple[str, ...] = (_ONE_PASS,)
        if hasattr(data, "element_spec"):
            self._checked(data)
        self._spec: tuple[Any, ...] | None = None
        self._specs: dict[str, Any] = {}
        # The pass of an iterator, whose first records showed the spec.
        self._unread: Iterator[list[np.ndarray]] | None = None

    def __repr__(self) -> str:
        return f"<Stream of {self.examples} records, by way of {self.folder}>"

    def _row_spec(self) -> tuple[Any, ...]:
        """The shape and the type of each array of a record; see `Source`.

        Raises:
          ValueError: If there is no record, or the first record is not valid.
        """
        if self._spec is None:
            blocks = self._new_blocks()
            first = next(blocks, None)
            if first is None:
                raise self._another_number(0)
            if self._again:
                blocks.close()
            else:
                self._unread = itertools.chain([first], blocks)
        return cast(tuple, self._spec)

    def _blocks(self) -> Iterator[list[np.ndarray]]:
        """All records in order, some at a time.

        Yields:
          The arrays of some records, each `[rows, ...]`, in the order of their names.

        Raises:
          ValueError: If a record is unlike the first, or the number of records is not
            `examples`, or an iterator was read before.
        """
        self._row_spec()
        blocks, self._unread = self._unread, None
        if self._again:
            blocks = self._new_blocks()
        elif blocks is None:
            raise ValueError(
                "data: this iterator was read before, and cannot be read again. Give "
                "a function that returns a new iterator, Stream(read, ...); or make a "
                "new Stream for new batches."
            )
        count = 0
        for block in cast(Iterator, blocks):
            count += len(block[0])
            if count > self.examples:
                raise self._another_number(None)
            yield block
        if count < self.examples:
            raise self._another_number(count)

    def _another_number(self, found: int | None) -> ValueError:
        said = "goes on after" if found is None else f"ended after {found} of"
        return ValueError(
            f"data: the stream {said} {self.examples} records, the public number "
            "of the accounting, examples. Give the number of records in one pass, in "
            "the plan too; a function that returns a new iterator in each call; and no "
            "repeat() or batch()."
        )

    def _checked(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Refuses pipelines whose elements may not be records; see `pipelines`."""
        dense, assumed = pipelines.checked_stream(dataset)
        size = int(dataset.cardinality())
        if size == tf.data.INFINITE_CARDINALITY:
            raise self._another_number(None)
        if size >= 0 and size != self.examples:
            raise self._another_number(size if size < self.examples else None)
        self.assumptions = (_ONE_PASS, *assumed)
        return dense

    def _new_blocks(self) -> Generator[list[np.ndarray], None, None]:
        found = self._open()
        if not hasattr(found, "element_spec"):
            return self._stacked_records(found)
        dataset = self._checked(found)
        if pipelines.has_one_shape(dataset):
            return self._batched_records(dataset)
        return self._stacked_records(dataset.as_numpy_iterator())

    def _batched_records(
        self, dataset: tf.data.Dataset
    ) -> Generator[list[np.ndarray], None, None]:
        """Blocks of a pipeline whose specs give all records the same shape."""
        specs = tf.nest.flatten(dataset.element_spec)
        width = sum(
            spec.dtype.size * (spec.shape.num_elements() or 1)
            if spec.dtype != tf.string
            else self.memory // 2**10
            for spec in specs
        )
        rows = int(np.clip(self.memory // 16 // max(1, width), 1, _BLOCK))
        count = 0
        for element in dataset.batch(rows).as_numpy_iterator():
            parts = element if isinstance(element, tuple) else (element,)
            parts = sources.map_named(columns.as_column, parts)
            first = tuple(sources.map_leaves(lambda c: c[0], part) for part in parts)
            self._values_of(first, count)
            for weights in parts[2:]:
                check_values(weights)
            yield self._typed(sources.flatten(parts))
            count += rows

    def _stacked_records(
        self, records: Iterable[Any]
    ) -> Generator[list[np.ndarray], None, None]:
        """Blocks of records that are read, and checked, one by one."""
        rows: list[list[np.ndarray]] = []
        size = 0
        for number, record in enumerate(records):
            # The next record may be written to the same arrays.
            rows.append([np.array(v) for v in self._values_of(record, number)])
            size += sum(map(_bytes_of, rows[-1]))
            # The first record alone shows the spec.
            if not number or len(rows) == _BLOCK or size * 16 >= self.memory:
                yield self._typed(map(np.stack, zip(*rows, strict=True)))
                rows, size = [], 0
        if rows:
            yield self._typed(map(np.stack, zip(*rows, strict=True)))

    def _values_of(self, record: Any, number: int) -> list[np.ndarray]:
        """The arrays of a record, which is like the first record of the first pass."""
        if self._spec is None:
            self._spec = tuple(
                sources.map_leaves(lambda row: (row.shape, row.dtype), part)
                for part in sources.row_of(record)
            )
            refuse_third_input(self._spec)
            self._specs = sources.named_specs(self._spec)
        try:
            return sources.values_like(record, self._specs)
        except ValueError as error:
            raise ValueError(
                f"data: record {number} of the stream is unlike the first: {error} "
                f"{sources.ONE_SHAPE}" + see("records-of-several-shapes")
            ) from None

    def _typed(self, values: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Columns in the types of the first record."""
        dtypes = [dtype for _, dtype in self._specs.values()]
        return [
            column.astype(dtype, copy=False)
            for column, dtype in zip(values, dtypes, strict=True)
        ]


class StreamSource(Source):
    """The records of a stream, of which a group of steps is in memory.

    `prepare` reads the stream at the first step of an epoch, and the records of a
    group of steps at the first step of the group; `take` returns records of this group.

    Args:
      stream: the stream.
    """

    by_index = False

    def __init__(self, stream: Stream):
        self._stream = stream
        self.size = stream.examples
        self.row_spec = stream._row_spec()
        self.assumptions = stream.assumptions
        # The epoch in the file, the steps of a group, and the group in memory.
        self._file: GroupedFile | None = None
        self._epoch: tuple[Any, int] | None = None
        self._together = 1
        self._group: int | None = None
        self._numbers, self._order = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._parts: tuple[Any, ...] = ()

    def prepare(self, scheme, key, step):
        steps = scheme.steps_per_epoch(self.size)
        epoch, place = divmod(step, steps)
        if self._epoch != (key, epoch):
            self._epoch, self._group, self._parts = None, None, ()
            drawn = (
                scheme._drawn(key, self.size, epoch * steps + i) for i in range(steps)
            )
            self._copy_epoch(drawn, steps)
            self._epoch = (key, epoch)
        group = place // self._together
        if group != self._group:
            self._group, self._parts = None, ()  # Room for the next group.
            self._numbers, self._parts = cast(GroupedFile, self._file).read(group)
            self._order = np.argsort(self._numbers)
            self._group = group

    def take(self, indices, rows):
        places = np.searchsorted(self._numbers, indices, sorter=self._order)
        places = self._order[np.minimum(places, len(self._order) - 1)]
        if not np.array_equal(self._numbers[places], indices):
            raise RuntimeError(
                "The copy of the stream lacks records of this step. This is an error "
                "of tfdpclip: please report it."
            )
        return sources.take_rows(self._parts, places, rows)

    def _copy_epoch(self, drawn: Iterable[np.ndarray], steps: int) -> None:
        """Writes all records to a new file, by group of steps.

        Args:
          drawn: the records of each step of the epoch.
          steps: the number of steps.
        """
        # Records that a full step leaves out keep the number after the last step.
        step_of = np.full(self.size, steps, np.int32)
        for step, indices in enumerate(drawn):
            step_of[indices] = step
        before, self._file = self._file, None
        if before is not None and self._stream._again:
            before.close()
            before = None
        try:
            self._file = self._copied(step_of, steps, before)
        except BaseException:
            self._file = before
            raise
        if before is not None:
            before.close()

    def _copied(
        self, step_of: np.ndarray, steps: int, before: GroupedFile | None
    ) -> GroupedFile:
        """Returns a file of all records, of the stream or of the file `before`."""
        made = GroupedFile(self._stream.folder, self.row_spec)
        blocks = self._numbered_blocks() if before is None else before.groups()
        together = 0
        try:
            with _progress.bar(
                title="reading the stream", unit="record", total=self.size
            ) as shown:
                for numbers, values in self._joined(blocks):
                    if not together:
                        together = self._steps_together(values, steps)
                    made.write(step_of[numbers] // together, numbers, values)
                    shown.update(len(numbers))
        except BaseException:
            made.close()
            raise
        self._together = together
        return made

    def _numbered_blocks(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        count = 0
        for block in self._stream._blocks():
            yield np.arange(count, count + len(block[0])), block
            count += len(block[0])

    def _joined(
        self, blocks: Iterable[tuple[np.ndarray, list[np.ndarray]]]
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Joins blocks until they have a quarter of the memory."""
        waiting: list[list[np.ndarray]] = []
        size = 0
        for numbers, values in blocks:
            waiting.append([numbers, *values])
            size += sum(map(_bytes_of, waiting[-1]))
            if size * _WAITING >= self._stream.memory:
                yield _concatenated(waiting)
                waiting, size = [], 0
        if waiting:
            yield _concatenated(waiting)

    def _steps_together(self, values: list[np.ndarray], steps: int) -> int:
        """Returns the number of steps in a group, after a check of the disk.

        Args:
          values: the arrays of the first records.
          steps: the number of steps of an epoch.

        Raises:
          OSError: if the copy does not fit on the disk.
        """
        stored = 8 + sum(_bytes_of(v, text=8) for v in values) / len(values[0])
        needed, folder = int(stored * self.size), self._stream.folder
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"the copy of the stream needs about {needed / 2**30:.3g} GiB, and "
                f"{free / 2**30:.3g} GiB are free: free some space, or choose another "
                "directory, Stream(..., folder=...)",
                os.fspath(folder),
            )
        # A number and a place in the order of the numbers beside each record.
        held = 16 + sum(map(_bytes_of, values)) / len(values[0])
        return int(max(1, self._stream.memory * steps // (_GROUP * held * self.size)))


def _opened(data: Any) -> tuple[Callable[[], Any], bool]:
    """A function that begins a pass over data, and whether more passes can follow."""
    if hasattr(data, "element_spec"):
        return lambda: data, True
    if isinstance(data, (tuple, list, dict, str, bytes)) or columns.is_array(data):
        raise ValueError(
            f"data: a {type(data).__name__} has access by index: give it to "
            "batches(data), without a Stream."
        )
    if hasattr(data, "on_epoch_end"):
        raise ValueError(
            "data must give single records; a Keras Sequence gives batches: give a "
            "function that yields the records of each batch in turn."
        )
    if hasattr(data, "__iter__"):
        again = iter(data) is not data
        return (lambda: data), again
    if callable(data):
        return data, True
    raise ValueError(
        "data must be a function that returns an iterable of records, a "
        f"tf.data.Dataset or an iterable, got {_arguments.shown(data)}."
    )


def _concatenated(
    blocks: list[list[np.ndarray]],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The numbers and the arrays of several blocks of records."""
    if len(blocks) == 1:
        numbers, *values = blocks[0]
    else:
        numbers, *values = map(np.concatenate, zip(*blocks, strict=True))
    return numbers, values


def _bytes_of(column: np.ndarray, text: int = _TEXT_BYTES) -> int:
    """The bytes of a column, with `text` bytes beside the bytes of each text."""
    if column.dtype.kind != "O":
        return column.nbytes
    return text * column.size + sum(map(len, column.ravel()))
