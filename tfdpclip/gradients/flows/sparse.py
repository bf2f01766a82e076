"""Sparse batches: which entry belongs to which example.

A `tf.SparseTensor` of a batch has one row for each example, and its entries, with the
numbers of their rows, in lists that all examples share. What is computed entry by entry
keeps them apart, and so do sums by row number, if nothing has come between an entry and
its number. Only that is let through here; everything else that depends on places in
those lists combines examples.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, SIZE, Entries, Flow
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.known import known_value

INDICES, VALUES, ROWS = "indices", "values", "rows"
# Positions of some of the entries; the distinct values; where each entry's value is
# among them.
CHOSEN, DISTINCT, PLACES = "chosen", "distinct", "places"
# How many entries each example has; where each example's end; 0 and where they end.
LENGTHS, ENDS, SPLITS = "lengths", "ends", "splits"

_FILLED = "filled by "
_SAME = frozenset("Identity Cast StopGradient".split())


@dataclasses.dataclass(frozen=True)
class SparseBatch:
    """The components of a sparse batch, `[B, ...]`."""

    indices: tf.Tensor
    values: tf.Tensor
    shape: tf.Tensor

    def is_whole(self) -> bool:
        """Whether these are the components of one batch, as far as types tell."""
        ranks = [t.shape.rank for t in (self.indices, self.values, self.shape)]
        integers = self.indices.dtype == self.shape.dtype == tf.int64
        return integers and ranks == [2, 1, 1]

    def with_rows(self, rows: tf.Tensor, batch_size: tf.Tensor) -> list[tf.Tensor]:
        """The components of the batch with row `rows[i]` of this one in row i."""
        owners = self.indices[:, 0]
        order = tf.argsort(owners, stable=True)
        entries = tf.RaggedTensor.from_value_rowids(
            order,
            tf.gather(owners, order),
            nrows=tf.cast(batch_size, owners.dtype),
            validate=False,
        )
        taken = tf.gather(entries, rows)
        column = tf.cast(taken.value_rowids(), self.indices.dtype)[:, tf.newaxis]
        rest = tf.gather(self.indices[:, 1:], taken.flat_values)
        values = tf.gather(self.values, taken.flat_values)
        return [tf.concat([column, rest], axis=1), values, self.shape]


def find_batches(graph: tf.Graph, ops: list[tf.Operation]) -> list[SparseBatch]:
    """The sparse batches that `ops` start from: arguments, and from iterators."""
    found = [
        SparseBatch(*op.outputs)
        for op in ops
        if op.type.startswith("DeserializeSparse")
    ]
    signature = getattr(graph, "structured_input_signature", None)
    inputs = getattr(graph, "inputs", ())
    position = 0
    for spec in tf.nest.flatten(signature) if signature is not None else ():
        if not isinstance(spec, (tf.TypeSpec, tf.Tensor)):
            continue  # No tensor: a number, say.
        width = len(tf.nest.flatten(spec, expand_composites=True))
        if isinstance(spec, tf.SparseTensorSpec) and position + 3 <= len(inputs):
            found.append(SparseBatch(*inputs[position : position + 3]))
        position += width
    return [batch for batch in found if batch.is_whole()]


def flows_of(batch: SparseBatch) -> dict:
    """The flows of the components, by reference."""
    key = (batch.indices.name,)
    rank = batch.indices.shape[-1] or 2
    # Its length in other directions may be that of the longest example.
    shape = Flow(SIZE, power=None, dims=(1, *[None] * (rank - 1)))
    return {
        batch.indices.ref(): _entries(key, INDICES),
        batch.values.ref(): _entries(key, VALUES),
        batch.shape.ref(): shape,
    }


def _entries(key: tuple, role: str) -> Flow:
    return Flow(DATA, None, entry=Entries(key, role))


def transfer(
    op: tf.Operation, output: tf.Tensor, inputs: list[Flow], elementwise: bool
) -> Flow | None:
    """The flow of an output of an op on sparse batches; None for other ops."""
    found = [flow.entry for flow in inputs]
    if not any(found):
        return None
    if op.type in _RULES:
        flow = _RULES[op.type](op, output, found, inputs)
    elif op.type in ops.REDUCTIONS:
        flow = _reduction(op, found, inputs)
    else:
        flow = _entrywise(op, output, found, inputs, elementwise)
    # By its place in the list an entry may meet those of any other example.
    return Flow(DATA, None, coupled=op) if flow is None else flow


def _role(entry: Entries | None, role: str, key: tuple | None = None) -> bool:
    if entry is None or entry.role != role:
        return False
    return key is None or entry.key == key


def _rows_apart() -> Flow:
    return Flow(DATA, (0,), 1)


def _reduction(op, found, inputs):
    axes = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if axes is None or not rank or 0 in {int(a) % rank for a in np.reshape(axes, -1)}:
        return None
    return _entries(found[0].key, VALUES) if _role(found[0], VALUES) else None


def _entrywise(op, output, found, inputs, elementwise):
    """Ops that compute each entry of the list from the same entry of others."""
    if op.type in _SAME:
        return _entries(found[0].key, found[0].role)
    if not elementwise or not output.shape.rank:
        return None
    keys = set()
    for tensor, entry, flow in zip(op.inputs, found, inputs, strict=True):
        if entry is not None and entry.role == VALUES:
            if tensor.shape.rank != output.shape.rank:
                return None
            keys.add(entry.key)
        elif entry is not None or flow.kind == DATA:
            return None
        elif tensor.shape.rank == output.shape.rank and tensor.shape[0] != 1:
            return None  # By the place in the list.
    return _entries(keys.pop(), VALUES) if len(keys) == 1 else None


def _reshape(op, output, found, inputs):
    entry = found[0]
    if entry is None or not output.shape.rank or op.inputs[0].shape.rank is None:
        return None
    tails = [t.shape[1:].num_elements() for t in (op.inputs[0], output)]
    same = tails[0] == tails[1] is not None and tails[0] != 0
    return _entries(entry.key, entry.role) if same else None


def _strided_slice(op, output, found, inputs):
    """`indices[:, c]` and `values[:, tf.newaxis]`."""
    entry = found[0]
    if entry is None or any(found[1:]) or op.get_attr("ellipsis_mask"):
        return None
    bounds = [tf.get_static_value(op.inputs[i]) for i in (1, 2, 3)]
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
    if any(b is None for b in bounds) or not whole or bounds[2][0] != 1:
        return None
    if (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1:
        return None
    if entry.role != INDICES:
        new = entry.role == VALUES and op.get_attr("new_axis_mask")
        return _entries(entry.key, VALUES) if new else None
    if op.get_attr("new_axis_mask") or op.get_attr("shrink_axis_mask") != 2:
        return None
    return _entries(entry.key, ROWS if bounds[0][1] == 0 else VALUES)


def _gather(op, output, found, inputs):
    params, indices = found[0], found[1]
    if op.get_attr("batch_dims") or indices is None:
        return None
    if op.type == "GatherV2":
        axis = tf.get_static_value(op.inputs[2])
        if axis is None or int(axis) != 0:
            return None
    if params is None:
        if inputs[0].kind != PUBLIC:
            return None
        if indices.role in (VALUES, DISTINCT):
            return _entries(indices.key, indices.role)
        return None
    if indices.key != params.key:
        return None
    if indices.role == CHOSEN and params.role in (INDICES, VALUES):
        # What is chosen is told by each entry itself.
        return _entries((*params.key, op.inputs[1].name), params.role)
    if indices.role == PLACES and params.role == DISTINCT:
        return _entries(params.key, VALUES)
    return None


def _where(op, output, found, inputs):
    if _role(found[0], VALUES) and op.inputs[0].shape.rank == 1:
        return _entries(found[0].key, CHOSEN)
    return None


def _unique(op, output, found, inputs):
    if not _role(found[0], VALUES) or op.inputs[0].shape.rank != 1:
        return None
    return _entries(found[0].key, PLACES if output.value_index else DISTINCT)


def _sparse_reshape(op, output, found, inputs):
    """A batch of lists of ids, of which the examples are kept apart: `[B, N]`."""
    if output.value_index:
        return Flow(SIZE, power=None, dims=(1, None))
    rank = op.inputs[0].shape[-1]
    parts = op.inputs[2].op
    if rank != 2 or output.shape[-1] != 2 or parts.type != "Pack":
        return None
    last = parts.inputs[1].op
    if last.type != "GatherV2" or last.inputs[0] is not op.inputs[1]:
        return None
    if tf.get_static_value(last.inputs[1]) != 1 or not _role(found[0], INDICES):
        return None
    return _entries(found[0].key, INDICES)


def _fill_empty_rows(op, output, found, inputs):
    if not _role(found[0], INDICES) or not _role(found[1], VALUES, found[0].key):
        return None
    key = (*found[0].key, _FILLED + op.name)
    if output.value_index < 2:
        return _entries(key, (INDICES, VALUES)[output.value_index])
    return _rows_apart() if output.value_index == 2 else Flow(DATA, None)


def _reorder(op, output, found, inputs):
    if not _role(found[0], INDICES) or not _role(found[1], VALUES, found[0].key):
        return None
    return _entries((*found[0].key, op.name), (INDICES, VALUES)[output.value_index])


def _filled(key: tuple) -> bool:
    """Whether every example has an entry: or else a sum by row may have fewer rows."""
    return key[-1].startswith(_FILLED)


def _softmax(op, output, found, inputs):
    """Over the last axis."""
    if not _role(found[0], INDICES) or not _role(found[1], VALUES, found[0].key):
        return None
    return _entries(found[0].key, VALUES)


def _segment_sum(op, output, found, inputs):
    rows = found[1]
    if _role(rows, ROWS) and _filled(rows.key) and _role(found[0], VALUES, rows.key):
        return _rows_apart()
    return None


def _looked_up_sum(op, output, found, inputs):
    table, places, rows = found[:3]
    if _role(table, DISTINCT) and _role(places, PLACES, table.key):
        by_row = _role(rows, ROWS, table.key) and _filled(table.key)
        return _rows_apart() if by_row else None
    return None


def _concat(op, output, found, inputs):
    """Indices, of the numbers of rows and what the entries have for other axes."""
    splits = _splits(op, found)
    if splits is not None:
        return splits
    if output.shape.rank != 2 or tf.get_static_value(op.inputs[-1]) not in (1, -1):
        return None
    first, *rest = found[:-1]
    if not _role(first, ROWS) or op.inputs[0].shape[1] != 1:
        return None
    same = all(_role(entry, VALUES, first.key) for entry in rest)
    return _entries(first.key, INDICES) if same else None


def accidental_hits(op, output, inputs, batch_size) -> Flow:
    """Which of the sampled classes are an example's own label: a list of entries."""
    labels, sampled = inputs
    if (
        sampled.kind == PUBLIC
        and labels.leads
        and labels.rows == 1
        and not labels.minor
    ):
        return _entries((op.name,), VALUES if output.value_index else ROWS)
    return Flow(DATA, None, coupled=op if sampled.kind == DATA else None)


def split_strings(op, output, inputs, batch_size) -> Flow:
    """The words of each row, in entries."""
    if not inputs[0].leads or inputs[0].rows != 1 or inputs[1].kind == DATA:
        return Flow(DATA, None)
    if output.value_index == 2:
        return Flow(SIZE, power=None, dims=(1, None))
    return _entries((op.name,), (INDICES, VALUES)[output.value_index])


def _looked_up(op, output, found, inputs):
    """Each entry by itself, in a lookup table."""
    shared = inputs[2].kind == PUBLIC and output.shape.rank == op.inputs[1].shape.rank
    apart = shared and _role(found[1], VALUES)
    return _entries(found[1].key, VALUES) if apart else None


def _lengths(op, output, found, inputs):
    """How many entries each row has: `tf.math.bincount(rows, minlength=B)`."""
    counted = inputs[1].kind == SIZE and inputs[1].power == 1
    binary = op.type == "DenseBincount" and op.get_attr("binary_output")
    unweighted = inputs[2].kind == PUBLIC and op.inputs[2].shape.num_elements() == 0
    if not _role(found[0], ROWS) or not counted or binary or not unweighted:
        return None
    return _entries(found[0].key, LENGTHS)


def _ends(op, output, found, inputs):
    plain = not (op.get_attr("exclusive") or op.get_attr("reverse"))
    return _entries(found[0].key, ENDS) if plain and _role(found[0], LENGTHS) else None


def _splits(op, found) -> Flow | None:
    """`tf.concat([[0], ends], 0)`."""
    if len(found) != 3 or not _role(found[1], ENDS):
        return None
    first = tf.get_static_value(op.inputs[0])
    zero = first is not None and first.tolist() == [0]
    return _entries(found[1].key, SPLITS) if zero else None


def _counted(op, output, found, inputs):
    """How often each example has each value: `RaggedBincount`."""
    apart = _role(found[0], SPLITS) and _role(found[1], VALUES, found[0].key)
    public = all(flow.kind == PUBLIC for flow in inputs[2:])
    return _rows_apart() if apart and public else None


def _grams(op, output, found, inputs):
    """Neighbouring words of each row, in a list of their own."""
    if not _role(found[1], SPLITS) or not _role(found[0], VALUES, found[1].key):
        return None
    return _entries((*found[1].key, op.name), (VALUES, SPLITS)[output.value_index])


def _padded(op, output, found, inputs):
    """Each row's entries, in a row of a length that is the same for every batch."""
    lengths = known_value(op.inputs[0])
    kinds = [kind.decode() for kind in op.get_attr("row_partition_types")]
    if kinds != ["FIRST_DIM_SIZE", "VALUE_ROWIDS"] or lengths is None:
        return None
    lengths = np.reshape(lengths, -1).tolist()
    if any(length is None or length < 0 for length in lengths[1:]):
        return None
    key = found[4].key if found[4] is not None else None
    apart = _role(found[4], ROWS) and _role(found[1], VALUES, key)
    counted = inputs[3].kind == SIZE and inputs[3].power == 1
    return _rows_apart() if apart and counted and inputs[2].kind == PUBLIC else None


def cross(op, output, inputs, batch_size) -> Flow:
    """The crossed features of each row, in entries: `tf.sparse.cross`."""
    apart = all(f.kind != DATA or f.leads and f.rows == 1 for f in inputs)
    if not apart or not any(f.kind == DATA for f in inputs):
        return Flow(DATA, None)
    if output.value_index == 2:
        # Of dense features, each example has as many crosses.
        dense = op.get_attr("N") == 0 and None not in [
            t.shape[-1]
            for t, f in zip(op.inputs, inputs, strict=True)
            if f.kind == DATA
        ]
        return Flow(SIZE, power=None, dims=(1, 0 if dense else None))
    return _entries((op.name,), (INDICES, VALUES)[output.value_index])


def _matmul(op, output, found, inputs):
    if not _role(found[0], INDICES) or not _role(found[1], VALUES, found[0].key):
        return None
    apart = inputs[3].kind == PUBLIC and not op.get_attr("adjoint_a")
    return _rows_apart() if apart else None


def _to_dense(op, output, found, inputs):
    if not _role(found[0], INDICES) or not _role(found[2], VALUES, found[0].key):
        return None
    if inputs[3].kind == DATA:
        return None
    return _rows_apart() if output.shape.rank else None


def _ctc(op, output, found, inputs):
    """A loss for each row of the labels; time is the first axis of the logits."""
    logits, lengths = inputs[0], inputs[3]
    labels = _role(found[1], INDICES) and _role(found[2], VALUES, found[1].key)
    apart = logits.axes == (1,) and logits.rows == 1 and not logits.minor
    apart = apart and lengths.leads and lengths.rows == 1
    if not labels or not apart:
        return None
    return Flow(DATA, (1,), 1) if output.value_index else _rows_apart()


_RULES = {
    **dict.fromkeys(("CTCLoss", "CTCLossV2"), _ctc),
    "RaggedTensorToTensor": _padded,
    "RaggedBincount": _counted,
    **dict.fromkeys(("LookupTableFind", "LookupTableFindV2"), _looked_up),
    "StringNGrams": _grams,
    **dict.fromkeys(("Bincount", "DenseBincount"), _lengths),
    "Cumsum": _ends,
    "Reshape": _reshape,
    "StridedSlice": _strided_slice,
    "ConcatV2": _concat,
    "GatherV2": _gather,
    "ResourceGather": _gather,
    "Where": _where,
    "Unique": _unique,
    "SparseReshape": _sparse_reshape,
    "SparseFillEmptyRows": _fill_empty_rows,
    "SparseReorder": _reorder,
    "SparseSoftmax": _softmax,
    "SparseTensorDenseMatMul": _matmul,
    "SparseToDense": _to_dense,
    **dict.fromkeys(ops.SEGMENT_SUMS, _segment_sum),
    **dict.fromkeys(ops.SEGMENT_LOOKUPS, _looked_up_sum),
}
