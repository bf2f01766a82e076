"""The number of steps of a loop, if its graph shows the number."""

from __future__ import annotations

import math

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.graph.known import static_number
from tfdpclip.gradients.graph.walks import before_identities


def counts_steps(op: tf.Operation) -> bool:
    """Whether the first loop variable counts the steps, as in `tf.while_loop`."""
    body = _tf_private.body_of_loop(op)
    if len(body.inputs) < 2 or len(body.outputs) != len(op.outputs):
        return False
    counter = body.inputs[0]
    return counter.shape.rank == 0 and _increment(body.outputs[0], counter) == 1


def _increment(after: tf.Tensor, before: tf.Tensor) -> float | None:
    """The number that each step adds to the scalar `before`; None if unknown."""
    after = before_identities(after)
    if after.op.type not in ("AddV2", "Add"):
        return None
    first, second = map(before_identities, after.op.inputs)
    if second is before:
        first, second = second, first
    return static_number(second) if first is before else None


def count_trips(op: tf.Operation, cond: tf.Graph, body: tf.Graph) -> int | None:
    """The number of steps of the loop `op`; None if the graph does not show it."""
    todo, bounds = [cond.outputs[0]], []
    place = {tensor.ref(): i for i, tensor in enumerate(cond.inputs)}
    while todo:
        test = before_identities(todo.pop())
        if test.op.type == "LogicalAnd":
            todo += test.op.inputs
            continue
        if test.op.type != "Less":
            return None
        left, right = map(before_identities, test.op.inputs)
        number = place.get(left.ref())
        if number is None:
            return None
        if right.ref() in place:
            limit_at = place[right.ref()]
            if before_identities(body.outputs[limit_at]) is not body.inputs[limit_at]:
                return None
            right = op.inputs[limit_at]
        limit, first = _number(right), _number(op.inputs[number])
        step = _increment(body.outputs[number], body.inputs[number])
        if None in (limit, first, step) or step <= 0:
            return None
        bounds.append(max(0, math.ceil((limit - first) / step)))
    return min(bounds)


def _number(tensor: tf.Tensor) -> float | None:
    if tensor.op.type in ("Max", "Min") and tensor.op.inputs[0].shape.rank == 0:
        tensor = tensor.op.inputs[0]
    return static_number(tensor)
