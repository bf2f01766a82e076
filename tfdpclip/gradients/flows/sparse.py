"""Flows of sparse batches and of masks, with lists of entries that all examples share.

A `tf.SparseTensor` of a batch has a row for each example. Its entries, and the row
number of each entry, are in lists that all examples share. `tf.where(mask)` lists the
entries of a dense batch in the same way, and `tf.boolean_mask` takes these entries. An
op that computes each entry of a list from the same entry keeps the examples apart. So
does a sum by row number, or a scatter to rows, if the values and the row numbers still
list the same entries in the same order: `Entries.key` tells. The rules of this module
allow these kinds of ops. Any further op that depends on places in the lists combines
examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, SIZE, Entries, Flow
from tfdpclip.gradients.flows.sizes import rows_of_length
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.known import static_value

INDICES, VALUES, ROWS = "indices", "values", "rows"
# Positions of selected entries; the distinct values; the place of each entry's value
# among the distinct values.
CHOSEN, DISTINCT, PLACES = "chosen", "distinct", "places"
# Numbers of entries by example; the cumulative sums of these numbers; 0 and the sums.
LENGTHS, ENDS, SPLITS = "lengths", "ends", "splits"
#: The places of the entries on an axis; the number of rows of an example there follows.
AT = "at "

_FILLED = "filled by "
_SAME = frozenset("Identity Cast StopGradient".split())


@dataclasses.dataclass(frozen=True)
class SparseBatch:
    """The components of a sparse batch, `[B, ...]`."""

    indices: tf.Tensor
    values: tf.Tensor
    shape: tf.Tensor

    def is_whole(self) -> bool:
        """Whether types and ranks are the types and ranks of a `tf.SparseTensor`."""
        ranks = [t.shape.rank for t in (self.indices, self.values, self.shape)]
        integers = self.indices.dtype == self.shape.dtype == tf.int64
        return integers and ranks == [2, 1, 1]

    def is_given(self) -> bool:
        """Whether the graph computes nothing before the components.

        The components are arguments of the graph, or deserialised from a tensor that an
        iterator or an argument gives, as Keras does.
        """
        leaves = ops.ITERATORS | {"Placeholder"}
        return all(t.op.type in leaves for t in self.indices.op.inputs)

    def with_rows(self, rows: tf.Tensor, batch_size: tf.Tensor) -> list[tf.Tensor]:
        """The components of a batch with row `rows[i]` of this batch in row i."""
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
    """The sparse batches among a graph's arguments and the outputs of iterators."""
    batches = [
        SparseBatch(*op.outputs)
        for op in ops
        if op.type.startswith("DeserializeSparse")
    ]
    signature = getattr(graph, "structured_input_signature", None)
    inputs = getattr(graph, "inputs", ())
    position = 0
    for spec in tf.nest.flatten(signature) if signature is not None else ():
        if not isinstance(spec, (tf.TypeSpec, tf.Tensor)):
            continue  # A Python value, such as a number.
        width = len(tf.nest.flatten(spec, expand_composites=True))
        if isinstance(spec, tf.SparseTensorSpec) and position + 3 <= len(inputs):
            batches.append(SparseBatch(*inputs[position : position + 3]))
        position += width
    return [batch for batch in batches if batch.is_whole()]


def flows_of(batch: SparseBatch, rows: int) -> dict:
    """The flows of the components, by reference; each example has `rows` rows."""
    key = (rows, batch.indices.name)
    rank = batch.indices.shape[-1] or 2
    # The lengths after axis 0 may depend on the longest example.
    shape = Flow(SIZE, power=None, dims=(1, *[None] * (rank - 1)))
    return {
        batch.indices.ref(): _entries(key, INDICES),
        batch.values.ref(): _entries(key, VALUES),
        batch.shape.ref(): shape,
    }


def _entries(key: tuple, role: str) -> Flow:
    return Flow(DATA, None, entry=Entries(key, role))


def where(op: tf.Operation, flow_of: Callable[[tf.Tensor], Flow]) -> Flow | None:
    """The flow of `tf.where(mask)`, of a mask `[B, ...]`: each row's places, in order.

    Returns:
      None if it is not known how the rows of the mask belong to examples.
    """
    mask = op.inputs[0]
    flow = flow_of(mask)
    whole = mask
    while whole.op.type == "Identity" or _is_flattened(whole):
        whole = whole.op.inputs[0]
    rows = flow_of(whole)
    if not all(f.leads and f.regular and f.rows for f in (flow, rows)):
        return None
    # Masks with the same entries list the same entries in the same order.
    key = (rows.rows, whole.ref(), "where")
    role = f"{AT}{flow.rows}" if mask.shape.rank == 1 else INDICES
    return Flow(DATA, None, entry=Entries(key, role, op))


def _is_flattened(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "Reshape" and tensor.shape.rank == 1


def transfer(
    op: tf.Operation,
    output: tf.Tensor,
    inputs: list[Flow],
    by_rows: Callable | None,
    batch_size: int | None,
    flow_of: Callable[[tf.Tensor], Flow],
) -> Flow | None:
    """The flow of an op's output if an input lists entries of a batch.

    Args:
      op: the op.
      output: an output of `op`.
      inputs: the flows of the inputs of `op`.
      by_rows: the rule of the op's type for inputs with examples on axis 0, or None.
      batch_size: the static number of examples, or None.
      flow_of: the function from a tensor to its flow.

    Returns:
      None if no input lists entries.
    """
    entries = [flow.entry for flow in inputs]
    if not any(entries):
        return None
    source = next((e.source for e in entries if e is not None and e.source), None)
    rule = _RULES.get(op.type)
    if source is not None and op.type in _OF_SPARSE:
        rule = None
    flow = rule(op, output, entries, inputs) if rule is not None else None
    if flow is None:
        flow = _entrywise(op, output, entries, inputs, by_rows)
    elif flow.axes and (source is not None or op.type in _WRITES):
        if not _has_all_rows(op, output, flow, batch_size, flow_of):
            flow = None
    if flow is None:
        # An op that depends on places in the list may combine entries of two examples.
        # Writes to other places than the own rows combine them, whatever listed them.
        named = op if op.type in _WRITES else source or op
        return Flow(DATA, None, coupled=named)
    if flow.entry is not None and source is not None:
        entry = dataclasses.replace(flow.entry, source=source)
        flow = dataclasses.replace(flow, entry=entry)
    return flow


def _role(entry: Entries | None, role: str, key: tuple | None = None) -> bool:
    if entry is None or entry.role != role:
        return False
    return key is None or entry.key == key


def _rows_apart(key: tuple) -> Flow:
    return Flow(DATA, (0,), key[0])


def _entrywise(op, output, entries, inputs, by_rows):
    """The flow of an op that computes each entry from the same entry of its inputs.

    An op that keeps the rows on axis 0 apart does so for the rows of a list.
    """
    if op.type in _SAME:
        return _entries(entries[0].key, entries[0].role)
    lists = [entry for entry in entries if entry is not None]
    one = all(_role(entry, VALUES, lists[0].key) for entry in lists)
    beside = any(f.kind == DATA for f, e in zip(inputs, entries, strict=True) if not e)
    if by_rows is None or not one or beside or not output.shape.rank:
        return None
    if any(t.shape.rank is None for t in op.inputs):
        return None
    rows = [f if e is None else _LISTED for f, e in zip(inputs, entries, strict=True)]
    flow = by_rows(op, output, rows, None)
    apart = flow.leads and flow.layout == _LISTED.layout and not flow.coupled
    apart = apart and not flow.obstacle and not flow.placed
    return _entries(lists[0].key, VALUES) if apart else None


def _reshape(op, output, entries, inputs):
    entry = entries[0]
    if entry is None or not output.shape.rank or op.inputs[0].shape.rank is None:
        return None
    if op.type == "Squeeze" and 0 in (op.get_attr("squeeze_dims") or [0]):
        return None
    tails = [t.shape[1:].num_elements() for t in (op.inputs[0], output)]
    same = tails[0] == tails[1] is not None and tails[0] != 0
    return _entries(entry.key, entry.role) if same else None


def _strided_slice(op, output, entries, inputs):
    """The flow of `indices[:, c]` and `values[:, tf.newaxis]`."""
    entry = entries[0]
    if entry is None or any(entries[1:]) or op.get_attr("ellipsis_mask"):
        return None
    bounds = [tf.get_static_value(op.inputs[i]) for i in (1, 2, 3)]
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
    if any(b is None for b in bounds) or not whole or bounds[2][0] != 1:
        return None
    if (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1:
        return None
    places = entry.role.startswith(AT)
    if entry.role != INDICES and not places:
        new = entry.role in (VALUES, ROWS) and op.get_attr("new_axis_mask")
        return _entries(entry.key, entry.role) if new else None
    if op.get_attr("new_axis_mask") or op.get_attr("shrink_axis_mask") != 2:
        return None
    if places:
        return _entries(entry.key, ROWS if _names_rows(entry) else entry.role)
    return _entries(entry.key, ROWS if bounds[0][1] == 0 else VALUES)


def _gather(op, output, entries, inputs):
    params, indices = entries[0], entries[1]
    if op.get_attr("batch_dims") or indices is None:
        return None
    if op.type == "GatherV2":
        axis = tf.get_static_value(op.inputs[2])
        if axis is None or int(axis) != 0:
            return None
    if params is None and inputs[0].kind == DATA:
        rows = indices.key[0] if indices.role == ROWS else None
        if indices.role.startswith(AT):
            rows = int(indices.role.removeprefix(AT))
        return _own_entries(inputs[0], rows, indices)
    if params is None:
        if inputs[0].kind != PUBLIC:
            return None
        if indices.role in (VALUES, DISTINCT):
            return _entries(indices.key, indices.role)
        return None
    if indices.key != params.key:
        return None
    if indices.role == CHOSEN and params.role in (INDICES, VALUES):
        # Each entry's own value decides whether the entry is selected.
        return _entries((*params.key, op.inputs[1].name), params.role)
    if indices.role == PLACES and params.role == DISTINCT:
        return _entries(params.key, VALUES)
    return None


def _own_entries(flow: Flow, rows: int | None, entry: Entries) -> Flow | None:
    """The flow of what each entry takes from a row of its own example.

    Args:
      flow: the flow of the tensor `[B rows, ...]` that the entries are taken from.
      rows: the number of rows of an example for which the entries name their rows.
      entry: the list of entries.
    """
    apart = flow.leads and flow.regular and rows and flow.rows == rows
    return _entries(entry.key, VALUES) if apart else None


def _gather_nd(op, output, entries, inputs):
    if entries[0] is not None or not _names_rows(entries[1]):
        return None
    return _own_entries(inputs[0], entries[1].key[0], entries[1])


def _names_rows(entry: Entries | None) -> bool:
    """Whether indices begin with the row, on axis 0, of each entry."""
    return _role(entry, INDICES) or (
        entry is not None and _role(entry, f"{AT}{entry.key[0]}")
    )


def _scatter(op, output, entries, inputs):
    """The flow of entries that are written, each to its own row."""
    places, updates = (0, 1) if op.type == "ScatterNd" else (1, 2)
    entry = entries[places]
    alone = _role(entry, ROWS) and op.inputs[places].shape[1:] == [1]
    if not (alone or _names_rows(entry)):
        return None
    if not _role(entries[updates], VALUES, entry.key):
        return None
    return _rows_apart(entry.key)


def _has_all_rows(op, output, flow: Flow, batch_size: int | None, flow_of) -> bool:
    """Whether an output has on axis 0 the rows of all examples, and no more."""
    if op.type in ops.SCATTERS and op.type != "ScatterNd":
        base = flow_of(op.inputs[0])
        return base.leads and base.layout == flow.layout
    length = op.inputs[1 if op.type == "SparseToDense" else 2]
    if flow_of(length).kind == DATA or output.shape.rank is None:
        return False
    if batch_size is not None and output.shape[0] is not None:
        return output.shape[0] == batch_size * flow.rows
    like = rows_of_length(length, flow_of)
    return like is not None and like.layout == flow.layout


def _where(op, output, entries, inputs):
    if _role(entries[0], VALUES) and op.inputs[0].shape.rank == 1:
        return _entries(entries[0].key, CHOSEN)
    return None


def _unique(op, output, entries, inputs):
    if not _role(entries[0], VALUES) or op.inputs[0].shape.rank != 1:
        return None
    return _entries(entries[0].key, PLACES if output.value_index else DISTINCT)


def _sparse_reshape(op, output, entries, inputs):
    """The flow of a `SparseReshape` that keeps `[B, N]`, a batch of lists of ids."""
    if output.value_index:
        return Flow(SIZE, power=None, dims=(1, None))
    rank = op.inputs[0].shape[-1]
    parts = op.inputs[2].op
    if rank != 2 or output.shape[-1] != 2 or parts.type != "Pack":
        return None
    last = parts.inputs[1].op
    if last.type != "GatherV2" or last.inputs[0] is not op.inputs[1]:
        return None
    if tf.get_static_value(last.inputs[1]) != 1 or not _role(entries[0], INDICES):
        return None
    return _entries(entries[0].key, INDICES)


def _fill_empty_rows(op, output, entries, inputs):
    if not _role(entries[0], INDICES) or not _role(entries[1], VALUES, entries[0].key):
        return None
    key = (*entries[0].key, _FILLED + op.name)
    if output.value_index < 2:
        return _entries(key, (INDICES, VALUES)[output.value_index])
    return _rows_apart(key) if output.value_index == 2 else Flow(DATA, None)


def _reorder(op, output, entries, inputs):
    if not _role(entries[0], INDICES) or not _role(entries[1], VALUES, entries[0].key):
        return None
    return _entries((*entries[0].key, op.name), (INDICES, VALUES)[output.value_index])


def _filled(key: tuple) -> bool:
    """Whether every example has an entry.

    Without this, a sum by row number may have fewer rows than examples.
    """
    return key[-1].startswith(_FILLED)


def _segment_sum(op, output, entries, inputs):
    rows = entries[1]
    if _role(rows, ROWS) and _filled(rows.key) and _role(entries[0], VALUES, rows.key):
        return _rows_apart(rows.key)
    return None


def _looked_up_sum(op, output, entries, inputs):
    table, places, rows = entries[:3]
    if _role(table, DISTINCT) and _role(places, PLACES, table.key):
        by_row = _role(rows, ROWS, table.key) and _filled(table.key)
        return _rows_apart(table.key) if by_row else None
    return None


def _concat(op, output, entries, inputs):
    """The flow of indices that are joined from row numbers and further columns."""
    splits = _splits(op, entries)
    if splits is not None:
        return splits
    if output.shape.rank != 2 or tf.get_static_value(op.inputs[-1]) not in (1, -1):
        return None
    first, *rest = entries[:-1]
    if not _role(first, ROWS) or op.inputs[0].shape[1] != 1:
        return None
    same = all(_role(entry, VALUES, first.key) for entry in rest)
    return _entries(first.key, INDICES) if same else None


def _pack(op, output, entries, inputs):
    """The flow of indices that are stacked from row numbers and further columns."""
    first, *rest = entries
    if output.shape.rank != 2 or op.get_attr("axis") not in (1, -1):
        return None
    apart = _role(first, ROWS) and all(_role(e, VALUES, first.key) for e in rest)
    return _entries(first.key, INDICES) if apart else None


def accidental_hits(op, output, inputs, batch_size) -> Flow:
    """The flow of the sampled classes that equal an example's own label, in entries."""
    labels, sampled = inputs
    if (
        sampled.kind == PUBLIC
        and labels.leads
        and labels.rows == 1
        and not labels.minor
    ):
        return _entries((1, op.name), VALUES if output.value_index else ROWS)
    return Flow(DATA, None, coupled=op if sampled.kind == DATA else None)


def split_strings(op, output, inputs, batch_size) -> Flow:
    """The flow of the words of each row, in entries."""
    if not inputs[0].leads or inputs[0].rows != 1 or inputs[1].kind == DATA:
        return Flow(DATA, None)
    if output.value_index == 2:
        return Flow(SIZE, power=None, dims=(1, None))
    return _entries((1, op.name), (INDICES, VALUES)[output.value_index])


def _looked_up(op, output, entries, inputs):
    """The flow of entries that are looked up in a shared table."""
    shared = inputs[2].kind == PUBLIC and output.shape.rank == op.inputs[1].shape.rank
    apart = shared and _role(entries[1], VALUES)
    return _entries(entries[1].key, VALUES) if apart else None


def _lengths(op, output, entries, inputs):
    """The flow of the numbers of entries: `tf.math.bincount(rows, minlength=B)`."""
    counted = inputs[1].kind == SIZE and inputs[1].power == 1
    binary = op.type == "DenseBincount" and op.get_attr("binary_output")
    unweighted = inputs[2].kind == PUBLIC and op.inputs[2].shape.num_elements() == 0
    if not _role(entries[0], ROWS) or not counted or binary or not unweighted:
        return None
    return _entries(entries[0].key, LENGTHS)


def _ends(op, output, entries, inputs):
    backward = op.get_attr("exclusive") or op.get_attr("reverse")
    apart = _role(entries[0], LENGTHS) and not backward
    return _entries(entries[0].key, ENDS) if apart else None


def _splits(op, entries) -> Flow | None:
    """The flow of `tf.concat([[0], ends], 0)`."""
    if len(entries) != 3 or not _role(entries[1], ENDS):
        return None
    first = tf.get_static_value(op.inputs[0])
    zero = first is not None and first.tolist() == [0]
    return _entries(entries[1].key, SPLITS) if zero else None


def _counted(op, output, entries, inputs):
    """The flow of `RaggedBincount`: the counts of the values of each example."""
    apart = _role(entries[0], SPLITS) and _role(entries[1], VALUES, entries[0].key)
    public = all(flow.kind == PUBLIC for flow in inputs[2:])
    return _rows_apart(entries[0].key) if apart and public else None


def _grams(op, output, entries, inputs):
    """The flow of n-grams: neighbouring words of each row, in a new list."""
    if not _role(entries[1], SPLITS) or not _role(entries[0], VALUES, entries[1].key):
        return None
    return _entries((*entries[1].key, op.name), (VALUES, SPLITS)[output.value_index])


def _padded(op, output, entries, inputs):
    """The flow of rows padded to a length that is the same for every batch."""
    lengths = static_value(op.inputs[0])
    kinds = [kind.decode() for kind in op.get_attr("row_partition_types")]
    if kinds != ["FIRST_DIM_SIZE", "VALUE_ROWIDS"] or lengths is None:
        return None
    lengths = np.reshape(lengths, -1).tolist()
    if any(length is None or length < 0 for length in lengths[1:]):
        return None
    key = entries[4].key if entries[4] is not None else None
    apart = _role(entries[4], ROWS) and _role(entries[1], VALUES, key)
    counted = inputs[3].kind == SIZE and inputs[3].power == 1
    apart = apart and counted and inputs[2].kind == PUBLIC
    return _rows_apart(key) if apart else None


def cross(op, output, inputs, batch_size) -> Flow:
    """The flow of the crossed features of each row, in entries: `tf.sparse.cross`."""
    apart = all(f.kind != DATA or f.leads and f.rows == 1 for f in inputs)
    if not apart or not any(f.kind == DATA for f in inputs):
        return Flow(DATA, None)
    if output.value_index == 2:
        # With dense features alone, every example has the same number of crosses.
        dense = op.get_attr("N") == 0 and None not in [
            t.shape[-1]
            for t, f in zip(op.inputs, inputs, strict=True)
            if f.kind == DATA
        ]
        return Flow(SIZE, power=None, dims=(1, 0 if dense else None))
    return _entries((1, op.name), (INDICES, VALUES)[output.value_index])


def _matmul(op, output, entries, inputs):
    if not _role(entries[0], INDICES) or not _role(entries[1], VALUES, entries[0].key):
        return None
    apart = inputs[3].kind == PUBLIC and not op.get_attr("adjoint_a")
    return _rows_apart(entries[0].key) if apart else None


def _to_dense(op, output, entries, inputs):
    if not _role(entries[0], INDICES) or not _role(entries[2], VALUES, entries[0].key):
        return None
    if inputs[3].kind == DATA:
        return None
    return _rows_apart(entries[0].key) if output.shape.rank else None


def _ctc(op, output, entries, inputs):
    """The flow of a CTC loss: a loss for each row of labels; logits `[T, B, C]`."""
    labels = _role(entries[1], INDICES) and _role(entries[2], VALUES, entries[1].key)
    flow = ctc_of_dense_labels(output, inputs)
    return dataclasses.replace(flow, obstacle="") if labels and flow.axes else None


def ctc_of_dense_labels(op, output: tf.Tensor, inputs: list[Flow]) -> Flow:
    """The flow of a CTC loss with labels that were listed from an array of labels.

    The losses belong to the rows of the logits. It is not known that the labels do, so
    the losses are made one example at a time.
    """
    logits, lengths = inputs[0], inputs[3]
    apart = logits.axes == (1,) and logits.rows == 1 and not logits.minor
    if not apart or not lengths.leads or lengths.rows != 1:
        return Flow(DATA, None)
    axes = (1,) if output.value_index else (0,)
    return Flow(DATA, axes, 1, obstacle="which labels belong to which example")


_LISTED = Flow(DATA, (0,), 1)

#: Ops that write entries into rows; a sparse batch has as many rows as examples, but
#: these ops make as many as an input says.
_WRITES = ops.SCATTERS

#: Ops whose rules take the number of rows from a sparse batch.
_OF_SPARSE = ops.CTC | frozenset(
    """RaggedTensorToTensor RaggedBincount Bincount DenseBincount SparseReshape
    SparseFillEmptyRows""".split()
)

_RULES = {
    **dict.fromkeys(ops.SCATTERS, _scatter),
    **dict.fromkeys(ops.CTC, _ctc),
    "RaggedTensorToTensor": _padded,
    "RaggedBincount": _counted,
    "LookupTableFindV2": _looked_up,
    "StringNGrams": _grams,
    **dict.fromkeys(("Bincount", "DenseBincount"), _lengths),
    "Cumsum": _ends,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "ExpandDims": _reshape,
    "Pack": _pack,
    "StridedSlice": _strided_slice,
    "ConcatV2": _concat,
    "GatherV2": _gather,
    "ResourceGather": _gather,
    "GatherNd": _gather_nd,
    "Where": _where,
    "Unique": _unique,
    "SparseReshape": _sparse_reshape,
    "SparseFillEmptyRows": _fill_empty_rows,
    "SparseReorder": _reorder,
    "SparseTensorDenseMatMul": _matmul,
    "SparseToDense": _to_dense,
    "SegmentSum": _segment_sum,
    **dict.fromkeys(ops.SEGMENT_LOOKUPS, _looked_up_sum),
}
