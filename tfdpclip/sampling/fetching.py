"""Fetching many records at once, and fetching elements ahead in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private

#: Largest number of elements, and of bytes, that are fetched ahead.
ELEMENTS = 2
BYTES = 2**30


class ElementFetcher:
    """Fetches elements in threads, beginning with the requested element.

    An element that is fetched ahead does not count as drawn: the records of a step do
    not depend on who requests the step, or when. Elements that are never requested are
    dropped.

    Args:
      source: the source of the records.
      rows: the largest number of rows of an element.
      pieces: elements of a step.

    Attributes:
      elements: how many elements are fetched ahead: the number of the source's
        threads, or fewer if the elements would hold more than `BYTES`.
    """

    def __init__(self, source: Any, rows: int, pieces: int):
        self._source = source
        self._rows = rows
        self._pieces = pieces
        self.elements = min(source.threads, BYTES // max(1, rows * source.row_bytes))
        self._pool: ThreadPoolExecutor | None = None
        # By step: the draws of the current step and of some later steps.
        self._drawn: dict[int, list[np.ndarray]] = {}
        # By place and number of rows: the fetches under way.
        self._begun: dict[tuple[int, int], Future] = {}

    def element(
        self,
        place: int,
        lengths: Sequence[int] | None,
        draw: Callable[[int], list[np.ndarray]],
    ) -> tuple[np.ndarray, int, Any]:
        """The records of an element: their indices, number of rows, and arrays.

        Args:
          place: the number of the element, counted over all steps.
          lengths: the lengths that the element may have, ascending; empty for the
            number of drawn rows, None for all rows.
          draw: returns the indices of the records of each element of a step.

        Raises:
          Exception: the source's error. The next call asks the source again.
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
            # An empty draw is one row of weight 0.
            rows = self._rows if lengths is None else max(1, len(indices))
            rows = next((n for n in lengths or () if n >= rows), rows)
            wanted[later, rows] = indices
        (_, rows), indices = next(iter(wanted.items()))
        return indices, rows, self._fetched(wanted)

    def _fetched(self, wanted: dict[tuple[int, int], np.ndarray]) -> Any:
        """Returns the records of the first element; begins to fetch the rest."""
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
        """Drops all fetches under way, after the order of the steps has changed."""
        self._drawn.clear()
        for key in list(self._begun):
            self._begun.pop(key).cancel()


def fetch_many(dataset: tf.data.Dataset) -> Callable[[np.ndarray], Any] | None:
    """Returns a function that fetches records of a pipeline, stacked, by indices.

    One op runs the pipeline's maps on as many records at a time as TensorFlow has
    threads. TensorFlow prepares the op's function once; with a new data set for every
    element, TensorFlow would prepare the function for each element.

    Returns:
      None if the pipeline has steps whose records have no index, or maps that cannot
      run on several records at a time.
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

    # On a GPU, every record would be copied.
    with tf.device("/cpu:0"):
        stacked = tf.function(
            records, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False
        ).get_concrete_function()

    def fetch(indices):
        with tf.device("/cpu:0"):
            found = stacked(tf.constant(indices, tf.int64))
        return tf.nest.map_structure(np.asarray, found)

    return fetch
