"""Records of a `tf.data` pipeline: single ones, each there once, by their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see

# Steps of a pipeline after which an element is still one record, and is there once.
_KEEPS_RECORDS = frozenset(
    """CacheDataset ConcatenateDataset MapDataset OptionsDataset ParallelMapDataset
    PrefetchDataset RangeDataset ShardDataset SkipDataset TakeDataset TensorDataset
    TensorSliceDataset ZipDataset""".split()
)
# Steps that regroup records, give them more than once, or in another order each time.
_REGROUPS = frozenset(
    """BatchDataset DenseToRaggedDataset DirectedInterleaveDataset GroupByReducerDataset
    GroupByWindowDataset PaddedBatchDataset ParallelBatchDataset RaggedBatchDataset
    RebatchDataset RepeatDataset ShuffleDataset SlidingWindowDataset UnbatchDataset
    WindowDataset""".split()
)


def checked(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A pipeline whose elements are records, of dense tensors.

    *Formal guarantees*: of a pipeline that passes, an element is one record as far as
    the steps show it: no step groups records, and none that a slice or a range gave is
    in two elements, through `zip`, `concatenate`, `skip`, `take` and `shard`. What a
    function of `map` reads besides its element is not looked at.

    Args:
      dataset: what the caller has.

    Returns:
      The data set, with sparse tensors made dense.

    Raises:
      ValueError: if elements need not be records, or cannot be had by number.
    """
    _refuse_steps(dataset, lambda kind: kind in _REGROUPS)
    _refuse_ragged(dataset)
    size = int(dataset.cardinality())
    if size < 0:
        raise ValueError(
            "data: the tf.data.Dataset must have a known, finite number of records. "
            "One that reads files, filters or interleaves has none: give arrays of all "
            "records (of a CSV file, by pandas.read_csv), or what docs/data.md has for "
            "your files."
        )
    if size < 1:
        raise ValueError("data must hold at least one record, got none.")
    try:
        tf.data.experimental.at(dataset, 0)
    except (tf.errors.OpError, NotImplementedError) as error:
        raise ValueError(
            "data: this tf.data.Dataset has no random access. Sampling needs it; "
            "build it from tensor slices (and maps of those), or give arrays."
        ) from error
    _refuse_steps(dataset, lambda kind: kind not in _KEEPS_RECORDS)
    _refuse_shared_rows(dataset, size)
    return _dense(dataset)


def has_one_shape(dataset: tf.data.Dataset) -> bool:
    """Whether all records have the same shapes, by the specs of the pipeline."""
    return all(
        spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec)
    )


def _refuse_steps(dataset, refused) -> None:
    pending = [dataset]
    while pending:
        current = pending.pop()
        kind = type(current).__name__.lstrip("_")
        if refused(kind):
            step = kind.removesuffix("Dataset").lower()
            raise ValueError(
                f"data: this tf.data.Dataset goes through {step!r}, so that an element "
                "need not be one record: a batch would be drawn, clipped and accounted "
                "for as if it were one, and a record that is repeated as if it were "
                "several. Take batch, shuffle and repeat out, which the scheme does; "
                "tf.keras.utils.*_dataset_from_directory take batch_size=None and "
                "shuffle=False." + see("rows-that-are-not-records")
            )
        pending.extend(_tf_private.inputs_of(current))


def _refuse_ragged(dataset) -> None:
    for place, spec in _specs(dataset.element_spec):
        if isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)):
            continue
        if isinstance(spec, tf.RaggedTensorSpec):
            raise ValueError(
                f"data: {place} of this tf.data.Dataset is ragged, and batches need "
                "records of one shape. Fill the tensor up before it is sliced, "
                "ragged.to_tensor(shape=[None, 50]), for example; what fills it has "
                "weight 0: (x, y, sample_weight)." + see("records-of-several-shapes")
            )
        raise ValueError(
            f"data: {place} of this tf.data.Dataset is a {type(spec).__name__}, and "
            "batches hold dense tensors: dataset.map(function) with a function that "
            "returns tensors." + see("records-of-several-shapes")
        )


def _specs(node: Any, place: str | None = None):
    """The specs of an element with their places, such as x['age'] or y."""
    if place is None:
        parts = node if isinstance(node, tuple) else (node,)
        for part, name in zip(parts, ("x", "y", "sample_weight"), strict=False):
            yield from _specs(part, name)
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _specs(value, f"{place}[{key!r}]")
    elif isinstance(node, tuple):
        for key, value in enumerate(node):
            yield from _specs(value, f"{place}[{key}]")
    else:
        yield place, node


def _refuse_shared_rows(dataset, size: int) -> None:
    """Refuses a pipeline in two records of which a row of the data is."""
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for start, records, rows in _tf_private.rows_behind(dataset, np.arange(size)):
        found.setdefault(id(start), []).append((records, rows))
    for uses in found.values():
        if len(uses) == 1:
            continue  # Each step gives other rows to other records.
        first = uses[0]
        if all(np.array_equal(first, other) for other in uses[1:]):
            continue
        pairs = np.unique(np.concatenate([np.stack(u, 1) for u in uses]), axis=0)
        rows, counts = np.unique(pairs[:, 1], return_counts=True)
        if counts.max() > 1:
            raise ValueError(
                f"data: row {rows[counts.argmax()]} of what this tf.data.Dataset "
                f"slices is in {counts.max()} of its records, by zip or concatenate "
                "with itself: whom it is about would be drawn and clipped as several. "
                "Give each row once; views=2 draws several views of a record."
                + see("rows-that-are-not-records")
            )


def _dense(dataset: tf.data.Dataset) -> tf.data.Dataset:
    specs = tf.nest.flatten(dataset.element_spec)
    if not any(isinstance(spec, tf.SparseTensorSpec) for spec in specs):
        return dataset
    given = dataset.element_spec

    def dense(*element):
        element = element if isinstance(given, tuple) else element[0]
        return tf.nest.map_structure(_as_dense, element, given)

    return dataset.map(tf.autograph.experimental.do_not_convert(dense))


def _as_dense(tensor, spec):
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.ensure_shape(tf.sparse.to_dense(tensor), spec.shape)
    return tensor
