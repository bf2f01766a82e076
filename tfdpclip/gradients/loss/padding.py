"""Which examples of a batch are padding, as told by the weights of a loss."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import ops


def weights_mask(
    tensor: tf.Tensor, flows: Dataflow, batch_size: tf.Tensor
) -> Mask | None:
    """Which examples have a weight other than 0, if the term is weighted.

    Where Keras is given no weights, it weights a term by the constant 1, or by nothing
    (Keras 3): all examples of the term are real. A term that never has weights (an
    activity regulariser) tells nothing.
    """
    while True:
        op = tensor.op
        if op.type in ops.SAME_ENTRIES or op.type == "Neg":
            if not flows[op.inputs[0]].leads:
                return None
            tensor = op.inputs[0]
            continue
        if op.type != "Mul":
            return _unweighted(op, batch_size)
        a, b = op.inputs
        if flows[a].trained:
            a, b = b, a
        if flows[a].trained:
            return _unweighted(op, batch_size)
        if flows[a].kind != DATA:
            if a.op.type == "Const" and a.shape.rank == 0 and _is_one(a):
                return Mask(tf.ones([batch_size], tf.bool), True)
            tensor = b
            continue
        if not flows[a].leads or flows[a].minor:
            return None
        nonzero = tf.reshape(tf.not_equal(a, tf.zeros([], a.dtype)), [batch_size, -1])
        scopes = (_keras_marks.WEIGHTED_LOSS, _keras_marks.COMPILED_LOSS)
        from_keras = any(scope in op.name for scope in scopes)
        return Mask(tf.reduce_any(nonzero, axis=1), from_keras)


@dataclasses.dataclass
class Mask:
    """Which examples have a weight in a term, and whether Keras made the weights."""

    present: tf.Tensor
    from_keras: bool


def _unweighted(op: tf.Operation, batch_size: tf.Tensor) -> Mask | None:
    """The mask of an unweighted term: all examples if Keras compiled it, else None."""
    if _keras_marks.COMPILED_LOSS not in op.name:
        return None
    return Mask(tf.ones([batch_size], tf.bool), True)


def _is_one(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and float(value) == 1.0


def any_present(masks: list[Mask | None]) -> tf.Tensor | None:
    """Which examples have a weight in some term; None if no weights are known.

    Keras's weights tell padding from examples for every term, also for an activity
    regulariser, which has no weights. Any further factor of a loss (a label, say) is a
    weight only if every term has a factor of this kind.
    """
    found = [mask for mask in masks if mask is not None]
    if len(found) < len(masks):
        found = [mask for mask in found if mask.from_keras]
    if not found:
        return None
    present = found[0].present
    for mask in found[1:]:
        present = tf.logical_or(present, mask.present)
    return present
