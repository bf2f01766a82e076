"""Flows of contractions: an axis of examples must be in the output exactly once."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable

import tensorflow as tf

from tfdpclip.gradients.flows.flow import DATA, PUBLIC, Flow, common_layout
from tfdpclip.gradients.graph.known import CONSTANT_BY_PLACE, rows_alike


def labels_of(op: tf.Operation) -> tuple[list[str], str] | None:
    """A letter for each axis of each input, and of the output, of a contraction.

    Axes with the same letter are multiplied entry by entry, and summed if the letter is
    not in the output.

    Returns:
      None if the static ranks do not determine the labels.
    """
    if op.type == "Einsum":
        return _explicit_equation(op)
    if op.type in ("MatMul", "SparseMatMul"):
        flips, ranks = ("transpose_a", "transpose_b"), [2, 2]
    else:
        flips, ranks = ("adj_x", "adj_y"), [t.shape.rank for t in op.inputs]
    if None in ranks:
        return None
    lead = string.ascii_lowercase[11 : 11 + max(ranks) - 2]
    labels = []
    for rank, flip, pair in zip(ranks, flips, ("ak", "kb"), strict=True):
        ahead = lead[len(lead) - (rank - 2) :]
        labels.append(ahead + (pair[::-1] if op.get_attr(flip) else pair))
    return labels, lead + "ab"


def _contraction(op, output, inputs, batch_size) -> Flow:
    labels = labels_of(op)
    return Flow(DATA, None) if labels is None else _labelled(op, *labels, inputs)


def _sparse_matmul(op, output, inputs, batch_size) -> Flow:
    """The flow of a shared sparse matrix times a dense matrix of the batch."""
    if any(flow.kind == DATA for flow in inputs[:3]):
        return Flow(DATA, None)
    names = "bk" if op.get_attr("adjoint_b") else "kb"
    return _labelled(op, ["", "", "", names], "ab", inputs)


def _explicit_equation(op: tf.Operation) -> tuple[list[str], str] | None:
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
    **dict.fromkeys(
        "MatMul SparseMatMul BatchMatMulV2 BatchMatMulV3 Einsum".split(), _contraction
    ),
    "SparseTensorDenseMatMul": _sparse_matmul,
}
