"""What fetches many records at once, and those of elements before anybody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private

#: Most elements that are fetched ahead, and most bytes of them.
ELEMENTS = 2
BYTES = 2**30


class Ahead:
    """Fetches elements in threads of their own, the one that is asked for first.

    Nothing counts as drawn because of it: what a step has is the same whoever asks, and
    when. What nobody asks for in the end is dropped.

    Args:
      source: has the records.
      rows: the most that an element has.
      pieces: elements of a step.

    Attributes:
      elements: how many are fetched ahead: as many as the source has threads for, if
        they hold no more than `BYTES`.
    """

    def __init__(self, source: Any, rows: int, pieces: int):
        self._source = source
        self._rows = rows
        self._pieces = pieces
        self.elements = min(source.threads, BYTES // max(1, rows * source.row_bytes))
        self._pool: ThreadPoolExecutor | None = None
        # By step, of the one that is asked for and of some to come.
        self._drawn: dict[int, list[np.ndarray]] = {}
        # By place, and how many rows it has.
        self._begun: dict[tuple[int, int], Future] = {}

    def element(
        self,
        place: int,
        lengths: Sequence[int] | None,
        draw: Callable[[int], list[np.ndarray]],
    ) -> tuple[np.ndarray, int, Any]:
        """The records of an element: which, in how many rows, and what.

        Args:
          place: of the element, among those of all steps.
          lengths: that it may have, ascending, none if as many as were drawn; None for
            all rows.
          draw: gives which records the elements of a step have.

        Raises:
          Exception: what the source raised. Whoever asks again, asks the source again.
        """
        step, last = (p // self._pieces for p in (place, place + self.elements))
        self._drawn = {s: self._drawn[s] for s in self._drawn if step <= s <= last}
        wanted = {}
        for later in range(place, place + self.elements + 1):
            step, piece = divmod(later, self._pieces)
            try:
                if step not in self._drawn:
                    self._drawn[step] = draw(step)
            except ValueError:  # After the last step of an order that ends.
                if later == place:
                    raise
                break
            indices = self._drawn[step][piece]
            # One row, of weight 0, where nobody was drawn.
            rows = self._rows if lengths is None else max(1, len(indices))
            rows = next((n for n in lengths or () if n >= rows), rows)
            wanted[later, rows] = indices
        (_, rows), indices = next(iter(wanted.items()))
        return indices, rows, self._fetched(wanted)

    def _fetched(self, wanted: dict[tuple[int, int], np.ndarray]) -> Any:
        """What the source has for the first of them; fetches the others."""
        first = next(iter(wanted))
        if not self.elements:
            return self._source.take(wanted[first], first[1])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.elements, "records")
        for key in self._begun.keys() - wanted.keys():
            self._begun.pop(key).cancel()
        for key, indices in wanted.items():
            if key not in self._begun:
                self._begun[key] = self._pool.submit(self._source.take, indices, key[1])
        return self._begun.pop(first).result()

    def forget(self) -> None:
        """Drops what was begun: steps have other records than they had."""
        self._drawn.clear()
        for key in list(self._begun):
            self._begun.pop(key).cancel()


def fetch_many(dataset: tf.data.Dataset) -> Callable[[np.ndarray], Any] | None:
    """What fetches records of a pipeline by their indices, stacked in that order.

    The pipeline's maps run on as many records at a time as TensorFlow has threads, by
    one op, whose function is made ready once; a data set for every element would make
    it ready for each.

    Returns:
      None if the pipeline has steps whose records are not known by their indices, or
      maps that must not, or cannot, run on several records at a time.
    """
    known = _tf_private.has_records_by_index(dataset)
    if not (known and _tf_private.may_overlap(dataset)):
        return None
    specs = tf.nest.flatten(dataset.element_spec)

    def record(*slices):
        return tuple(_tf_private.record_of(dataset, iter(slices)))

    def records(indices):
        slices = _tf_private.slices_at(dataset, indices)
        function = tf.function(record, autograph=False).get_concrete_function(
            *(tf.TensorSpec(part.shape[1:], part.dtype) for part in slices)
        )
        found = tf.raw_ops.MapDefun(
            arguments=slices,
            captured_inputs=function.captured_inputs,
            output_types=[spec.dtype for spec in specs],
            output_shapes=[spec.shape for spec in specs],
            f=function,
        )
        return tf.nest.pack_sequence_as(dataset.element_spec, found)

    # A GPU would copy every record.
    with tf.device("/cpu:0"):
        stacked = tf.function(
            records, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False
        ).get_concrete_function()

    def fetch(indices):
        with tf.device("/cpu:0"):
            found = stacked(tf.constant(indices, tf.int64))
        return tf.nest.map_structure(np.asarray, found)

    return fetch
