"""Where a model looks values of the records up in a table, and which values miss.

The graph of the model's call shows which part of x reaches which table, whatever the
layers between them do, so the values are computed as a step would compute them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip._variables import unwrapped
from tfdpclip.gradients.graph import origins
from tfdpclip.gradients.graph.walks import ancestors
from tfdpclip.keras import _compat
from tfdpclip.sampling.row_weights import names

# Stateful ops whose results depend on their inputs and on a public vocabulary.
_LOOKUPS = ("LookupTableFindV2", "LookupTableSizeV2")
_BRANCHES = ("If", "StatelessIf")
# Reads, with their inputs and functions, by the training function of a model.
Traced = MutableMapping[Any, list]
# Records that are tried at a time.
_RECORDS = 2**14


@dataclasses.dataclass(frozen=True)
class _Read:
    """A tensor that depends on records, and on which an op may fail.

    Attributes:
      op: the op.
      tensor: ids of the rows of a table, or whether an assertion holds.
      rows: the number of rows; None for an assertion.
      before: the ops that compute the tensor.
    """

    op: tf.Operation
    tensor: tf.Tensor
    rows: int | None
    before: dict[str, tf.Operation]

    def missed(self, values: np.ndarray) -> np.ndarray:
        """The values on which the op fails."""
        if self.rows is None:
            return values[~values]
        return values[(values < 0) | (values >= self.rows)]


def refuse_missing_rows(model: Any, x: Any, traced: Traced | None = None) -> None:
    """Raises ValueError if a table of the model lacks a value of a record.

    Values are checked where parts of x reach an op that looks up the rows of a table,
    or an assertion (as of a vocabulary without an entry for unlisted words), through
    ops that read no trained variable.

    Args:
      model: a compiled model.
      x: the inputs of all records: an array, or a dict or tuple of arrays.
      traced: the reads of earlier calls for inputs of the same names and shapes, by
        the training function of the model; None to trace the model.
    """
    arrays = names(x, "x")
    function = getattr(model, "train_function", None)
    if traced is None or function is None:
        traced, function = {}, model
    if function not in traced:
        traced[function] = list(_trace(model, x, arrays))
    for read, used, evaluate in traced[function]:
        for start in range(0, len(arrays[used[0]]), _RECORDS):
            rows = [arrays[name][start : start + _RECORDS] for name in used]
            try:
                missed = read.missed(evaluate(*map(tf.constant, rows)).numpy())
            except tf.errors.InvalidArgumentError:
                break  # An op of the model needs another number of records.
            if missed.size:
                _refuse(model, read, " and ".join(used), missed)


def _trace(
    model: Any, x: Any, arrays: dict[str, np.ndarray]
) -> Iterator[tuple[_Read, list[str], Callable]]:
    """The reads of the model's call, with the inputs and the function of each."""
    kinds = {getattr(getattr(a, "dtype", None), "kind", None) for a in arrays.values()}
    if None in kinds or not (kinds - {"f"} or _has_table(model)):
        return
    graph = _tf_private.new_function_graph("reads")
    with graph.as_default():
        parts = {name: _placeholder(array) for name, array in arrays.items()}
        try:
            packed = tf.nest.pack_sequence_as(x, list(parts.values()))
            _tf_private.converted_by_autograph(model.__call__)(packed, training=False)
        except Exception:  # Keras reports errors of the user's model better.
            return
    columns = {tensor.op.name: name for name, tensor in parts.items()}
    for read in _reads(graph, columns.keys()):
        used = [name for op, name in columns.items() if op in read.before]
        yield read, used, _pruned(graph, read, [parts[name] for name in used])


def _has_table(model: Any) -> bool:
    return any(
        isinstance(layer, (tf.keras.layers.Embedding, tf.keras.layers.CategoryEncoding))
        for layer in _compat.layers_of(model)
    )


def _placeholder(array: np.ndarray) -> tf.Tensor:
    dtype = tf.string if array.dtype.kind in "OUS" else tf.as_dtype(array.dtype)
    return tf.compat.v1.placeholder(dtype, [None, *array.shape[1:]])


def _reads(graph: tf.Graph, columns: Any) -> Iterator[_Read]:
    for op in graph.get_operations():
        tensor, rows = _looked_up(op, columns)
        if tensor is None:
            continue
        before = _ops_before(tensor)
        if before.keys() & columns and not any(
            _tf_private.is_stateful(b) and b.type not in _LOOKUPS
            for b in before.values()
        ):
            yield _Read(op, tensor, rows, before)


def _looked_up(op: tf.Operation, columns: Any) -> tuple[tf.Tensor | None, int | None]:
    """The tensor on which an op may fail, and the number of rows of a table."""
    if op.type == "ResourceGather":
        data = _tf_private.handle_data_of(origins.captured_from(op.inputs[0]))
        if data is not None and data.is_set and not op.get_attr("batch_dims"):
            return op.inputs[1], data.shape_and_type[0].shape.dim[0].size
    elif op.type == "GatherV2":
        table, indices, axis = op.inputs
        place = tf.get_static_value(axis)
        rows = None if table.shape.rank is None else table.shape[int(place or 0)]
        if place is not None and rows and not _ops_before(table).keys() & columns:
            return indices, rows
    elif op.type == "Assert" or (
        op.type in _BRANCHES and _asserts(op, 1) and not _asserts(op, 0)
    ):
        return op.inputs[0], None
    return None, None


def _asserts(op: tf.Operation, branch: int) -> bool:
    """Whether a branch of an op, 0 or 1, has an assertion."""
    functions = origins.definitions(op.graph, origins.functions_of(op)[branch])
    nodes = [node for one in functions if one is not None for node in one.node_def]
    return any(node.op == "Assert" for node in nodes)


def _ops_before(tensor: tf.Tensor) -> dict[str, tf.Operation]:
    return {op.name: op for op in ancestors([tensor])}


def _pruned(graph: Any, read: _Read, sources: list[tf.Tensor]) -> Any:
    """A function from parts of records to the tensor of a read."""
    content = graph.as_graph_def()
    content = tf.compat.v1.GraphDef(library=content.library, versions=content.versions)
    for op in read.before.values():
        node = content.node.add()
        node.CopyFrom(op.node_def)
        data = [source for source in node.input if not source.startswith("^")]
        node.ClearField("input")
        node.input.extend(data)
    captures = [pair for pair in graph.captures if pair[1].op.name in read.before]

    @tf.function(autograph=False)
    def evaluate(*parts):
        given = {inside.name: tf.identity(outside) for outside, inside in captures}
        given |= {source.name: p for source, p in zip(sources, parts, strict=True)}
        with tf.device("/cpu:0"):
            return tf.graph_util.import_graph_def(
                content, given, [read.tensor.name], name="read"
            )[0]

    return evaluate


def _refuse(model: Any, read: _Read, column: str, missed: np.ndarray) -> None:
    layer = _layer_of(model, read)
    if read.rows is None:
        raise ValueError(
            f"data: {column} holds a value without an entry, on which layer {layer!r} "
            "fails. A draw of this record would end training, and so reveal the "
            "record. Give unlisted values an entry: num_oov_indices=1 of a lookup, "
            "with one more row in the layer behind it; or a larger num_tokens."
            + see("numbers-out-of-range")
        )
    worst = missed.min() if missed.min() < 0 else missed.max()
    raise ValueError(
        f"data: {column} gives layer {layer!r} the id {worst}, and the layer has the "
        f"ids 0 to {read.rows - 1}. A draw of this record would end training, and so "
        "reveal the record. Give the layer room for all ids (input_dim), or number a "
        "public list of ids: tf.keras.layers.IntegerLookup(vocabulary=ids)."
        + see("numbers-out-of-range")
    )


def _layer_of(model: Any, read: _Read) -> str:
    """The name of the layer with the table of a read; of the op, if none has it."""
    # A lookup behind an assertion, or the table itself.
    before = read.before if read.rows is None else _ops_before(read.op.inputs[0])
    handles = {
        id(origins.captured_from(output))
        for op in before.values()
        for output in op.outputs
        if output.dtype == tf.resource
    }
    for layer in _compat.layers_of(model):
        tables = [unwrapped(v).handle for v in _compat.own_variables(layer)]
        table = getattr(layer, "lookup_table", None)
        tables.append(getattr(table, "resource_handle", None))
        if handles & set(map(id, tables)):
            return layer.name
    return read.op.name
