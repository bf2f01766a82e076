"""Flows of contractions: an axis of examples must be in the output exactly once."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, Flow, common_layout
from tfdpclip.gradients.graph.known import CONSTANT_BY_PLACE, rows_alike


def _matmul(op, output, inputs, batch_size) -> Flow:
    a, b = inputs
    ta, tb = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    letters_a, letters_b = ("ka" if ta else "ak"), ("bk" if tb else "kb")
    return _labelled(op, [letters_a, letters_b], "ab", inputs)


def _batch_matmul(op, output, inputs, batch_size) -> Flow:
    ta, tb = op.get_attr("adj_x"), op.get_attr("adj_y")
    ranks = [t.shape.rank for t in op.inputs]
    if None in ranks:
        return Flow(DATA, None)
    lead = [chr(ord("l") + i) for i in range(max(ranks) - 2)]
    labels = []
    for rank, flipped, pair in ((ranks[0], ta, "ak"), (ranks[1], tb, "kb")):
        pair = pair[::-1] if flipped else pair
        labels.append("".join(lead[len(lead) - (rank - 2) :]) + pair)
    return _labelled(op, labels, "".join(lead) + "ab", inputs)


def _einsum(op, output, inputs, batch_size) -> Flow:
    equation = explicit_equation(op)
    return Flow(DATA, None) if equation is None else _labelled(op, *equation, inputs)


def _sparse_matmul(op, output, inputs, batch_size) -> Flow:
    """The flow of a shared sparse matrix times a dense matrix of the batch."""
    if any(flow.kind == DATA for flow in inputs[:3]):
        return Flow(DATA, None)
    names = "bk" if op.get_attr("adjoint_b") else "kb"
    return _labelled(op, ["", "", "", names], "ab", inputs)


def explicit_equation(op: tf.Operation) -> tuple[list[str], str] | None:
    """The labels of an `Einsum` for each input and the output, without ellipses.

    Returns:
      None if the static ranks do not determine the labels.
    """
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "->" not in equation:
        return None
    left, right = equation.split("->")
    labels, wide = [], 0
    for names, tensor in zip(left.split(","), op.inputs, strict=True):
        if "..." in names:
            if tensor.shape.rank is None:
                return None
            wide = max(wide, tensor.shape.rank - len(names.replace("...", "")))
        labels.append(names)
    free = [c for c in string.ascii_letters if c not in equation][:wide]

    def expand(names, count):
        return names.replace("...", "".join(free[len(free) - count :]))

    expanded = [
        expand(names, (tensor.shape.rank or 0) - len(names.replace("...", "")))
        if "..." in names
        else names
        for names, tensor in zip(labels, op.inputs, strict=True)
    ]
    return expanded, expand(right, wide)


def _labelled(op, labels, out_labels, inputs) -> Flow:
    """The flow of a contraction from the labels of the axes.

    Args:
      op: the contraction.
      labels: a letter for each axis of each input. Axes with the same letter are
        multiplied entry by entry, and summed if the letter is not in `out_labels`.
      out_labels: a letter for each axis of the output.
      inputs: the flows of the inputs.
    """
    marked: dict[str, Flow] = {}
    open_axes: set[str] = set()
    coupled = None
    for names, tensor, flow in zip(labels, op.inputs, inputs, strict=True):
        for axis in flow.axes if flow.kind == DATA else ():
            if tensor.shape[axis] is None:
                open_axes.add(names[axis])
            if names[axis] not in out_labels:
                coupled = op
            other = marked.get(names[axis], flow)
            layout = common_layout([other, flow])
            if layout is None:
                # Rows of different examples may be multiplied.
                return Flow(DATA, None, coupled=coupled)
            marked[names[axis]] = other.laid_out(layout)
    believed = ""
    for tensor, names, flow in zip(op.inputs, labels, inputs, strict=True):
        for axis, name in enumerate(names):
            if name in marked and flow.kind == PUBLIC:
                # A batch of any size may have a single example, repeated for each row.
                several = name in open_axes and tensor.shape[axis] not in (None, 1)
                if several or not rows_alike(tensor, axis - len(names)):
                    believed = CONSTANT_BY_PLACE
            if name in marked and names.count(name) > 1 and flow.kind == DATA:
                # A diagonal: example i has the entry i of a further axis.
                if axis not in flow.axes:
                    believed = CONSTANT_BY_PLACE
    axes = tuple(i for i, name in enumerate(out_labels) if name in marked)
    lead = None
    if axes and (axes[0] == 0 or len(axes) == 1):
        lead = marked[out_labels[axes[0]]]
    result = Flow(DATA, axes) if lead is None else lead.on(axes)
    return dataclasses.replace(result, coupled=coupled, obstacle=believed)


RULES: dict[str, Callable] = {
    "MatMul": _matmul,
    "SparseMatMul": _matmul,
    "SparseTensorDenseMatMul": _sparse_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Einsum": _einsum,
}
