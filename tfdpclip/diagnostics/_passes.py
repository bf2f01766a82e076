"""Passes of a model over data, batch by batch, that leave its metrics as they were."""

from __future__ import annotations

import itertools

import tensorflow as tf

from tfdpclip import _arguments, _progress
from tfdpclip._data import as_batches, check_data


def batches(data, batch_size, max_examples):
    """(x, y, sample_weight) for each batch."""
    check_data("data", data, "(x, y)")
    size = _arguments.integer("batch_size", batch_size, 1)
    limit = None
    if max_examples is not None:
        limit = _arguments.integer("max_examples", max_examples, 1)
    if isinstance(data, list):
        data = tuple(data)
    start = 0
    elements = as_batches("data", data, size)
    total = int(elements.cardinality())
    if limit is not None:  # batches of a data set may be of any size
        total = -1 if elements is data else min(total, -(-limit // size))
    total = None if total < 0 else total
    for element in _progress.bar(elements, title="pass", unit="batch", total=total):
        x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(element)
        if y is None:
            raise ValueError("data has no targets: give (x, y).")
        count = int(tf.nest.flatten(x)[0].shape[0])
        if limit is not None and start + count > limit:
            left = limit - start
            x, y, weight = tf.nest.map_structure(
                lambda t, left=left: t if t is None else t[:left], (x, y, weight)
            )
            count = left
        if count:
            yield x, y, weight
        start += count
        if limit is not None and start >= limit:
            return


def run(graph, x, y, weight, *others):
    """Calls a graph that is traced once for all sizes of batches."""

    def any_size(value):
        if value is None:
            return None
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    batch = tf.nest.map_structure(any_size, (x, y, weight))
    graph.get_concrete_function(*batch, *others)
    return graph(x, y, weight, *others)


class untouched_metrics:
    """Computing the compiled loss adds to the model's metrics: puts them back."""

    def __init__(self, model):
        self._model = model

    def __enter__(self):
        self._before = {
            id(v): v.numpy() for m in self._model.metrics for v in m.variables
        }

    def __exit__(self, *error):
        for variable in itertools.chain.from_iterable(
            m.variables for m in self._model.metrics
        ):
            before = self._before.get(id(variable))
            variable.assign(tf.zeros_like(variable) if before is None else before)
