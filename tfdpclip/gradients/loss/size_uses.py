"""Finds uses of a number that depends on how many examples there are.

As the length of an axis that counts examples the number is harmless, and as a part of
further numbers of this kind: `sizes.py` knows their power of the number of examples.
Every further use is reported: a factor, a branch, an index, the length of any further
axis, the end of a range, the number of steps of a loop.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tfdpclip._object_notes import note_on_new_ops, notes_of_op
from tfdpclip.gradients.flows.flow import DATA, SIZE, Flow
from tfdpclip.gradients.graph import known, ops
from tfdpclip.gradients.graph.slices import axes_cut
from tfdpclip.gradients.loss.loss_checks import keeps_order

#: The inputs that are shapes of list elements, or of sparse tensors.
_OTHER_SHAPES = {
    "TensorListReserve": (0, 1),
    "EmptyTensorList": (0, 1),
    "TensorListFromTensor": (1,),
    "TensorListStack": (1,),
    "TensorListPopBack": (1,),
    "SparseTensorDenseMatMul": (2,),
    "SparseReshape": (1, 2),
    "SparseFillEmptyRows": (2,),
    "SparseReorder": (2,),
    # The number of rows of the entries.
    "RaggedTensorToTensor": (3,),
}


def scaled_by_count() -> contextlib.AbstractContextManager[None]:
    """Marks the ops made inside, which make an example's loss of its share of a sum.

    Where no public number of examples was given, the losses of a sum are defined this
    way (`loss.take_apart`): the caller knows the factor.
    """
    return note_on_new_ops(by_count=True)


def is_harmful(op: tf.Operation, output: tf.Tensor, flows) -> bool:
    """Whether an output is computed with the number of examples, except as a length.

    Args:
      op: an op that runs no function that is analysed.
      output: an output of the op, of kind `DATA`.
      flows: the analysis around the op, of batches of any size.
    """
    if notes_of_op(op).by_count:
        return False
    flow = flows[output]
    for index, tensor in enumerate(op.inputs):
        size = flows[tensor]
        if size.kind == SIZE and not _is_length(op, index, output, flow, size, flows):
            return True
    return False


def _is_length(op, index, output, flow: Flow, size: Flow, flows) -> bool:
    if ops.SHAPE_INPUTS.get(op.type) == index:
        return _others_fixed(output, flow, size.dims)
    if index in _OTHER_SHAPES.get(op.type, ()):
        return True
    if op.type in ("Bincount", "DenseBincount"):
        # The number of rows with counted entries.
        return index == 1 and flow.entry is not None
    if op.type == "Range":
        return index == 1
    if op.type in ops.CUTS and index in ops.CUTS[op.type]:
        return _cuts_examples(op, size, flows)
    if op.type == "Transpose":
        return keeps_order(op)
    if op.type == "SelectV2" and index == 0:
        # The rows that `tf.vectorized_map` gathers.
        readers = [r for r in output.consumers() if r in flows]
        return all(r.type == "GatherV2" and known.takes_every_row(r) for r in readers)
    return False


def _others_fixed(output: tf.Tensor, flow: Flow, dims: tuple | None) -> bool:
    """Whether only axes of the examples are as long as there are examples."""
    if output.shape.rank is None or flow.axes is None:
        return False
    lengths = output.shape.as_list()
    known_dims = dims if dims is not None and len(dims) == len(lengths) else None
    return all(
        axis in flow.axes
        or length is not None
        or (known_dims is not None and known_dims[axis] == 0)
        for axis, length in enumerate(lengths)
    )


def _cuts_examples(op, size: Flow, flows) -> bool:
    """Whether the number of examples cuts along the axes of examples only."""
    flow = flows[op.inputs[0]]
    if flow.kind != DATA or flow.axes is None or size.dims is None:
        return False
    axes = axes_cut(op, len(size.dims))
    return all(
        power == 0 or axis in flow.axes
        for power, axis in zip(size.dims, axes, strict=True)
    )
