"""Many records of a `tf.data` pipeline at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private


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
