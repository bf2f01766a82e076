"""Checks that the elements of a `tf.data` pipeline are records, reachable by index."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip.sampling.record_proof import repeat_numbers
from tfdpclip.sampling.row_weights import names_of_parts

# Steps that keep every element a single record, which occurs once.
_KEEPS_RECORDS = frozenset(
    """CacheDataset ConcatenateDataset MapDataset OptionsDataset ParallelMapDataset
    PrefetchDataset RangeDataset ShardDataset SkipDataset TakeDataset TensorDataset
    TensorSliceDataset ZipDataset""".split()
)
# Steps that regroup, repeat or reorder records.
_REGROUPS = frozenset(
    """BatchDataset DenseToRaggedDataset DenseToSparseBatchDataset
    DirectedInterleaveDataset GroupByReducerDataset GroupByWindowDataset
    LegacyRebatchDataset MapAndBatchDataset PaddedBatchDataset ParallelBatchDataset
    RaggedBatchDataset RebatchDataset RepeatDataset ShuffleAndRepeatDataset
    ShuffleDataset SlidingWindowDataset UnbatchDataset WindowDataset""".split()
)

# Steps that change the order of records only, which a stream allows.
_REORDERS = frozenset(("DirectedInterleaveDataset", "ShuffleDataset"))
_REPEATS = frozenset(("RepeatDataset", "ShuffleAndRepeatDataset"))
# Steps that choose records: two such steps may divide the records of one data set.
_CHOOSES = frozenset(
    """FilterDataset ShardDataset SkipDataset TakeDataset TakeWhileDataset""".split()
)
# Steps whose function makes several elements of an element.
_EXPANDS = frozenset(
    """FlatMapDataset InterleaveDataset ParallelInterleaveDataset""".split()
)
# Ops that write to variables, tables and queues, by the beginnings of their types.
_WRITES = re.compile("Assign|ResourceScatter|LookupTable(Insert|Import)|Queue(En|De)q")
_INNER_BATCHES = (
    "a batch that is made inside of flat_map or interleave is a single record, or is "
    "taken apart"
)

_NUMBERED = (
    "the records that the pipeline makes of the numbers of a range, such as windows of "
    "a series, are protected one by one: what is in several of them is not protected "
    "as a whole"
)

UNBATCHED = "the functions before unbatch() keep the records of their batches apart"
_IN_ORDER = (
    "read the pipeline in order: dpc.sampling.Stream(dataset, examples=..., "
    'folder=...), with RandomAllocation or sampling="random_allocation". See '
    "docs/data.md."
)


def checked(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the pipeline with dense elements, after a check of its steps.

    *Formal guarantees*: in a pipeline that passes, an element is one record as far as
    the steps show: no step groups records, and no row of a slice or a range is in two
    elements, through `zip`, `concatenate`, `skip`, `take` and `shard`. Data that
    a function of `map` reads besides its element are not checked.

    Args:
      dataset: the caller's pipeline.

    Returns:
      The data set, with sparse tensors made dense.

    Raises:
      ValueError: if elements may not be records, or have no index.
    """
    _refuse_steps(dataset, lambda kind: kind in _REGROUPS)
    _refuse_writes(dataset)
    _refuse_ragged(dataset)
    size = int(dataset.cardinality())
    if size < 0:
        raise ValueError(
            "data: the tf.data.Dataset must have a known, finite number of records, "
            "which reading files, filtering or interleaving hides. Give arrays of all "
            "records (of a CSV file, by pandas.read_csv), or " + _IN_ORDER
        )
    if size < 1:
        raise ValueError("data must hold at least one record, got none.")
    try:
        tf.data.experimental.at(dataset, 0)
    except (tf.errors.OpError, NotImplementedError) as error:
        raise ValueError(
            "data: this tf.data.Dataset has no random access, which sampling needs. "
            "Build it from tensor slices (and maps of slices), give arrays, or "
            + _IN_ORDER
        ) from error
    _refuse_steps(dataset, lambda kind: kind not in _KEEPS_RECORDS)
    _refuse_shared_rows(dataset, size)
    return _dense(dataset)


def assumptions_about(dataset: tf.data.Dataset) -> tuple[str, ...]:
    """The assumptions about records that functions make of numbers alone.

    A function can make the records of two numbers of the same data.
    """
    for step in _steps(dataset):
        kinds = {_kind(source) for source in _steps(step) if not _record_inputs(source)}
        numbers = "MapDataset" in _kind(step) and kinds == {"RangeDataset"}
        if numbers or "RangeDataset" in _inner_kinds(step):
            return (_NUMBERED,)
    return ()


def checked_stream(
    dataset: tf.data.Dataset,
) -> tuple[tf.data.Dataset, tuple[str, ...]]:
    """Returns a pipeline that is read in order, with dense elements, after a check.

    *Formal guarantees*: after the last `unbatch`, no step of the pipeline groups
    records or gives state to later records. No step repeats records, also inside of
    the functions of `interleave` and `flat_map`, or reads a data set twice by
    `concatenate` or `zip`. The functions of `map`, and the files, are not checked.

    Args:
      dataset: the caller's pipeline.

    Returns:
      The data set, with sparse tensors made dense; and the assumptions of the check.

    Raises:
      ValueError: if elements may not be records, or repeat.
    """
    regroups = (_REGROUPS - _REORDERS) | {"ScanDataset"}
    unbatched = _refuse_steps(dataset, lambda kind: kind in regroups, in_order=True)
    inner = [kind for step in _steps(dataset) for kind in _inner_kinds(step)]
    for kind in inner:
        if kind in _REPEATS:
            raise _through(kind)
    for step in _steps(dataset):
        _refuse_read_twice(step)
    _refuse_writes(dataset)
    _refuse_ragged(dataset)
    assumed = (UNBATCHED,) * unbatched
    if regroups.intersection(inner):
        assumed += (_INNER_BATCHES,)
    return _dense(dataset), assumed + assumptions_about(dataset)


def _kind(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__.lstrip("_")


def _steps(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The steps of a pipeline, each once."""
    pending, found = [dataset], {}
    while pending:
        step = pending.pop()
        if id(step) not in found:
            found[id(step)] = step
            pending += _record_inputs(step)
    return list(found.values())


def _record_inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The input data sets of a step that give records."""
    inputs = _tf_private.inputs_of(dataset)
    # The first input gives the numbers of the data sets to read from.
    return inputs[1:] if _kind(dataset) == "DirectedInterleaveDataset" else inputs


def _inner_kinds(dataset: tf.data.Dataset) -> list[str]:
    """The kinds of the steps inside of the function of `interleave` or `flat_map`."""
    if _kind(dataset) not in _EXPANDS:
        return []
    found = _tf_private.ops_of_functions(dataset)
    return [re.sub(r"V\d+$", "", kind) for kind in found if "Dataset" in kind]


def _refuse_writes(dataset: tf.data.Dataset) -> None:
    """Refuses functions that keep something of a record for the next.

    A generator of random numbers may write the numbers that it keeps. Warns of numbers
    that repeat.
    """
    for step in _steps(dataset):
        bodies = _tf_private.bodies_of_functions(step)
        if any(repeat_numbers(nodes) for _, nodes in bodies):
            warnings.warn(
                f"data: a function of {_name(_kind(step))!r} of this tf.data.Dataset "
                "draws random numbers from a seed (of the op, or of "
                "tf.random.set_seed), and may draw the same numbers in every epoch. "
                "Transform the drawn batches: plan.batches(data).map(augment)."
                + see("batches-that-are-transformed"),
                stacklevel=2,
            )
        if (kind := next(filter(None, map(_written, bodies)), None)) is not None:
            raise ValueError(
                f"data: a function of {_name(_kind(step))!r} of this tf.data.Dataset "
                f"writes to a variable, a table or a queue (by {kind}), so records may "
                "depend on the records read before. Make every record of its own data "
                "alone: a mean of the data, for example, is computed before, by "
                "dpc.keras.PrivateStatistics." + see("rows-that-are-not-records")
            )


def _written(body: tuple[list[str], Any]) -> str | None:
    """The kind of an op in a function's body that writes values of its arguments."""
    arguments, nodes = body
    of_data, before = set(arguments), -1
    inputs = {
        node.name: [name.split(":")[0] for name in node.input if name[0] != "^"]
        for node in nodes
    }
    while len(of_data) > before:
        before = len(of_data)
        of_data |= {name for name, given in inputs.items() if of_data & set(given)}
    for node in nodes:
        if _WRITES.match(node.op) and of_data & set(inputs[node.name][1:]):
            return node.op
    return None


def _refuse_read_twice(dataset: tf.data.Dataset) -> None:
    """Refuses a step that joins several readings of one data set.

    Two readings may divide the records of the data set, each by a step of `_CHOOSES`.
    `zip` may join two readings in the same order.
    """
    inputs = [{id(s): _kind(s) for s in _steps(d)} for d in _record_inputs(dataset)]
    zips = _kind(dataset) == "ZipDataset"
    for one, other in itertools.combinations(inputs, 2):
        common = one.keys() & other.keys()
        if not common:
            continue
        ways = [{steps[s] for s in steps.keys() - common} for steps in (one, other)]
        if zips:
            moved = set.union(*ways) & (_CHOOSES | _REORDERS) - {"TakeDataset"}
            wrong = bool(moved or _REORDERS.intersection(one[s] for s in common))
        else:
            wrong = not all(_CHOOSES & way for way in ways)
        if wrong:
            raise ValueError(
                f"data: {_name(_kind(dataset))!r} of this tf.data.Dataset reads one "
                "data set twice, so a record is in several elements of the stream, and "
                "would be clipped as several records. Read the data set once, with one "
                "map for x and y; views=2 draws several views of a record."
                + see("rows-that-are-not-records")
            )


def _name(kind: str) -> str:
    if kind == "DirectedInterleaveDataset":
        return "sample_from_datasets, choose_from_datasets or rejection_resample"
    return kind.removesuffix("Dataset").lower()


_WINDOWS = (
    "In the place of tf.keras.utils.timeseries_dataset_from_array, make the windows: "
    "x = np.stack([series[i : i + length] for i in range(len(series) - length)])"
)
_BATCHES = (
    "Leave batch, shuffle and repeat to the scheme: give "
    "tf.keras.utils.*_dataset_from_directory batch_size=None and shuffle=False"
)
# What to write in the place of a step, by the beginning of its kind.
_INSTEAD = {
    "DirectedInterleave": (
        "Join the data sets, first.concatenate(second), and give rare classes a public "
        "weight: model.fit(plan.batches(data), class_weight={0: 1.0, 1: 10.0}, "
        "epochs=plan.epochs, callbacks=plan.callbacks)"
    ),
    "Repeat": f"Leave repeat to the scheme. {_WINDOWS}",
    "": f"{_BATCHES}; read a CSV file by pandas.read_csv. {_WINDOWS}",
}


def _through(kind: str) -> ValueError:
    instead = next(text for start, text in _INSTEAD.items() if kind.startswith(start))
    return ValueError(
        f"data: this tf.data.Dataset goes through {_name(kind)!r}, so an element may "
        "hold several records, or a record may repeat, and clipping and "
        f"accounting would be wrong. {instead}." + see("rows-that-are-not-records")
    )


def has_one_shape(dataset: tf.data.Dataset) -> bool:
    """Whether the pipeline's specs give all records the same shape."""
    return all(
        spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec)
    )


def _refuse_steps(
    dataset: tf.data.Dataset, refused: Callable[[str], bool], in_order: bool = False
) -> bool:
    """Raises if a step of the pipeline is refused.

    Args:
      dataset: the pipeline.
      refused: whether a kind of step is refused.
      in_order: whether the pipeline is read in order. Then `unbatch` is allowed, and
        all steps before `unbatch` except `repeat`.

    Returns:
      Whether the pipeline has `unbatch`.
    """
    pending, unbatched = [(dataset, refused)], False
    while pending:
        current, refused = pending.pop()
        kind = _kind(current)
        if in_order and kind == "UnbatchDataset":
            refused, unbatched = _REPEATS.__contains__, True
        if refused(kind):
            raise _through(kind)
        inputs = _record_inputs if in_order else _tf_private.inputs_of
        pending.extend((before, refused) for before in inputs(current))
    return unbatched


def _refuse_ragged(dataset) -> None:
    element = dataset.element_spec
    parts = element if isinstance(element, tuple) else (element,)
    for place, spec in names_of_parts(parts).items():
        if isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)):
            continue
        if isinstance(spec, tf.RaggedTensorSpec):
            raise ValueError(
                f"data: {place} of this tf.data.Dataset is ragged, and batches need "
                "records of one shape. Pad the tensor before slicing, for example by "
                "ragged.to_tensor(shape=[None, 50]), and give padding weight 0: "
                "(x, y, sample_weight)." + see("records-of-several-shapes")
            )
        raise ValueError(
            f"data: {place} of this tf.data.Dataset is a {type(spec).__name__}, and "
            "batches hold dense tensors: use dataset.map(function) with a function "
            "that returns tensors." + see("records-of-several-shapes")
        )


def _refuse_shared_rows(dataset, size: int) -> None:
    """Refuses a pipeline that has the same row of the data in two records."""
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for start, records, rows in _tf_private.rows_behind(dataset, np.arange(size)):
        found.setdefault(id(start), []).append((records, rows))
    for uses in found.values():
        if len(uses) == 1:
            continue  # Each step of the pipeline gives different rows.
        first = uses[0]
        if all(np.array_equal(first, other) for other in uses[1:]):
            continue
        pairs = np.unique(np.concatenate([np.stack(u, 1) for u in uses]), axis=0)
        rows, counts = np.unique(pairs[:, 1], return_counts=True)
        if counts.max() > 1:
            raise ValueError(
                f"data: row {rows[counts.argmax()]} of the slices of this "
                f"tf.data.Dataset is in {counts.max()} records, by zip or concatenate "
                "with itself: one person's row would be clipped as several records. "
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
