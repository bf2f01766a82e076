"""The terms of a loss that belong to no example; their gradients are not clipped."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import op_copies, ops, origins
from tfdpclip.gradients.graph.walks import ancestors


def check_public(tensor: tf.Tensor, flows: Dataflow) -> None:
    """Refuses a term of a loss that may depend on private data in any way.

    The gradient of such a term is added after the clip, without noise. So it may depend
    on trained variables, on variables that were declared to be public, on numbers and
    on randomness, and on nothing else: any further constant or variable may hold data.

    Raises:
      LossStructureError: naming the op or variable that the term depends on.
    """
    seen: set[tf.Operation] = set()
    pending = [tensor.op]
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        if any(flows[t].kind == DATA for t in op.outputs):
            _refuse(tensor, f"{op.name!r} (a {op.type}), which may bring data")
        _check_op(tensor, op, flows)
        if op.type not in ops.SIZES:
            pending.extend(t.op for t in op.inputs)


def check_public_gradients(
    term: tf.Tensor, gradients: Sequence[tf.Tensor], flows: Dataflow
) -> None:
    """Refuses a term with a gradient function that takes data the term does not take.

    Raises:
      LossStructureError: naming the op or variable that the gradient depends on.
    """
    sized = [op for op in ancestors(gradients) if op.type in ops.SIZES]
    for op in ancestors(gradients, stop=sized):
        if flows.passed_in(op) or op_copies.calls_python(op):
            _refuse(term, f"{op.name!r} (a {op.type}), by its gradient")
        for index, handle in enumerate(op.inputs):
            if handle.dtype != tf.resource:
                continue
            root = origins.first_handle(handle)
            users = set(origins.handle_users(op, index))
            if not (flows.is_public(root) or users <= ops.RANDOM):
                name = f"the variable behind {root.name!r}"
                _refuse(term, f"{name}, by its gradient")


def _check_op(tensor, op, flows):
    if op.type in ("Placeholder", "Const", "VarHandleOp"):
        (output,) = op.outputs
        if output.dtype == tf.resource:
            return
        if not origins.is_number(op):
            _refuse(
                tensor,
                f"{op.name!r}, a constant with {output.shape.num_elements()} entries",
            )
    for name in origins.functions_of(op):
        found = origins.large_constant(op.graph, name)
        if found is not None:
            _refuse(tensor, f"{found!r}, a constant in {op.name!r}")
    for index, handle in enumerate(op.inputs):
        if handle.dtype != tf.resource or flows.is_public(handle):
            continue
        if set(origins.handle_users(op, index)) <= ops.RANDOM:
            continue
        _refuse(tensor, f"the variable behind {handle.name!r}, read by {op.name!r}")


def _refuse(tensor, what):
    raise LossStructureError(
        f"The loss has a term, {tensor.name!r}, that is no example's own: its gradient "
        f"is added after the clip, without noise. But it depends on {what}. If it "
        "belongs to examples, make it a part of each example's loss, of shape [batch]. "
        "If it is public, keep it in a variable: anchor = tf.Variable(value, "
        "trainable=False, name='anchor') and "
        "dpc.keras.DPSGD(..., public_variables=['anchor'])."
        + see("terms-that-are-nobodys")
    )
