"""Many records of a `tf.data` pipeline at once, by `tf.data` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private


def fetch_many(dataset: tf.data.Dataset) -> tuple[Callable, bool] | None:
    """What fetches records of a pipeline by their indices.

    Maps run as many records at a time as `tf.data` finds good, in the order of the
    indices; a map that was given no `num_parallel_calls` runs one at a time where its
    function has state or calls Python.

    Returns:
      A function from indices to the records, stacked; and whether it may be called in
      several threads at a time. None if single records are all that the pipeline has.
    """
    if not _tf_private.has_records_by_index(dataset):
        return None
    parallel = not _tf_private.runs_in_order(dataset)
    how = (
        {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
        if parallel
        else {}
    )

    def record(index):
        parts = _tf_private.record_at(dataset, index)
        return tf.nest.pack_sequence_as(dataset.element_spec, parts)

    def records(indices):
        found = tf.data.Dataset.from_tensor_slices(indices).map(record, **how)
        return found.batch(tf.size(indices, tf.int64)).get_single_element()

    # A GPU would copy every record.
    with tf.device("/cpu:0"):
        stacked = tf.function(
            records, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False
        ).get_concrete_function()

    def fetch(indices: np.ndarray) -> Any:
        with tf.device("/cpu:0"):
            found = stacked(tf.constant(indices, tf.int64))
        return tf.nest.map_structure(np.asarray, found)

    return fetch, parallel
