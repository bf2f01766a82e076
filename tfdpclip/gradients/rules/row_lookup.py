"""Rows of a table that the entries of a sparse batch look up, summed by example."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.graph.calls import gradient_function
from tfdpclip.gradients.graph.walks import before_identities


@dataclasses.dataclass(frozen=True)
class RowLookup:
    """A table's rows, looked up by the entries of a sparse batch and summed by example.

    Attributes:
      rows: the example of each entry, `[N]`, in order.
      ids: the row of the table, `[N]`.
      factors: the factor of each row, `[N]`; None for 1.
      combiner: "sum", "mean" or "sqrtn".
    """

    rows: tf.Tensor
    ids: tf.Tensor
    factors: tf.Tensor | None
    combiner: str

    def padded(self, batch_size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The ids and factors of each example, `[B, T]` both."""
        rows = tf.cast(self.rows, tf.int64)
        order = tf.argsort(rows, stable=True)
        rows = tf.gather(rows, order)
        factors = self.factors
        if factors is None:
            factors = tf.ones_like(rows, tf.float32)
        factors = tf.gather(tf.reshape(factors, [-1]), order)

        def by_example(entries):
            ragged = tf.RaggedTensor.from_value_rowids(
                entries, rows, nrows=tf.cast(batch_size, tf.int64), validate=False
            )
            return ragged.to_tensor()

        factors = by_example(factors)
        counts = tf.math.bincount(tf.cast(rows, tf.int32), minlength=batch_size)
        counts = tf.cast(tf.maximum(counts[:batch_size], 1), factors.dtype)[:, None]
        if self.combiner != "sum":
            factors /= counts if self.combiner == "mean" else tf.sqrt(counts)
        return by_example(tf.gather(self.ids, order)), factors


def sum_after(op: tf.Operation, flows) -> tf.Operation | None:
    """The sum by example, if it is the only use of a lookup in a sparse batch."""
    entry = flows[op.outputs[0]].entry
    if op.type not in ops.LOOKUPS or entry is None:
        return None
    while True:
        users = [user for user in op.outputs[0].consumers() if user in flows]
        if len(users) != 1:
            return None
        (op,) = users
        if op.type in ops.SEGMENT_LOOKUPS or op.type == "SegmentSum":
            return op if row_lookup(op) is not None else None
        if op.type not in ("Identity", "Mul", "GatherV2"):
            return None


def pooling_factors(rows: tf.Tensor, flows) -> tuple[tf.Tensor, bool] | None:
    """The factors by which looked-up rows enter a sum over all rows of their example.

    Args:
      rows: `[B, ..., D]`, the output of a lookup.
      flows: the analysis.

    Returns:
      The factors `[B, ..., 1]`, and whether the rows are added or averaged as they are,
      so that all factors are 1: the gradient at `rows` is the product of the factors
      and of one row for each example. None if the rows have another use, or none that
      this function knows.
    """
    flow, tensor, factors = flows[rows], rows, None
    if not (flow.leads and flow.rows == 1 and not flow.minor):
        return None
    while True:
        users = [user for user in tensor.consumers() if user in flows]
        if len(users) != 1 or gradient_function(users[0]) is not None:
            return None
        (user,) = users
        if user.type in ("Sum", "Mean"):
            axes = tf.get_static_value(user.inputs[1])
            if axes is None or user.inputs[0].ref() != tensor.ref():
                return None
            axes = sorted(axis % tensor.shape.rank for axis in axes.reshape([-1]))
            if axes != list(range(1, tensor.shape.rank - 1)):
                return None
            even = factors is None
            return (tf.ones_like(rows[..., :1]) if even else factors), even
        others = [t for t in user.inputs if t.ref() != tensor.ref()]
        if user.type == "Mul" and len(others) == 1:
            if others[0].shape.num_elements() != 1:
                if factors is not None or not _scales_rows(others[0], tensor):
                    return None
                factors = tf.broadcast_to(others[0], tf.shape(tensor[..., :1]))
        elif user.type == "RealDiv" and user.inputs[0].ref() == tensor.ref():
            if len(others) != 1 or others[0].shape.num_elements() != 1:
                return None
        elif user.type != "Identity":
            return None
        tensor = user.outputs[0]


def _scales_rows(factors: tf.Tensor, rows: tf.Tensor) -> bool:
    """Whether `factors` have an entry for each row, of static places in an example."""
    if factors.shape.rank != rows.shape.rank or factors.shape[-1] != 1:
        return False
    places = rows.shape[1:-1]
    return places.is_fully_defined() and factors.shape[1:-1] == places


def row_lookup(op: tf.Operation) -> RowLookup | None:
    """The rows of a table that an op sums by example, or None."""
    if op.type == "SparseTensorDenseMatMul":
        if op.get_attr("adjoint_b"):
            return None
        rows, ids = tf.unstack(op.inputs[0], num=2, axis=1)
        return RowLookup(rows, ids, op.inputs[1], "sum")
    if op.type in ops.SEGMENT_LOOKUPS:
        lookup = before_identities(op.inputs[0]).op
        if lookup.type not in ops.LOOKUPS:
            return None
        ids = tf.gather(lookup.inputs[1], op.inputs[1])
        combiner = op.type.removeprefix("SparseSegment").lower()
        return RowLookup(op.inputs[2], ids, None, combiner)
    if op.type != "SegmentSum":
        return None
    found, factors = before_identities(op.inputs[0]), None
    if found.op.type == "Mul":
        found, factors = found.op.inputs
        found = before_identities(found)
        if factors.shape.rank != found.shape.rank or factors.shape[1:] != [1]:
            return None
    ids = None
    if (
        found.op.type == "GatherV2"
        and before_identities(found.op.inputs[0]).op.type in ops.LOOKUPS
    ):
        ids = found.op.inputs[1]
        found = before_identities(found.op.inputs[0])
    if found.op.type not in ops.LOOKUPS:
        return None
    looked_up = found.op.inputs[1]
    ids = looked_up if ids is None else tf.gather(looked_up, ids)
    return RowLookup(op.inputs[1], ids, factors, "sum")
