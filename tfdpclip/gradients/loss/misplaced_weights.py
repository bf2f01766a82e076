"""Refuses weights that multiply losses along different axes."""

from __future__ import annotations

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA

ONE_NUMBER = (
    "Keep one loss for each example: axis=-1 in the loss's own mean or sum, as in "
    "tf.reduce_mean(tf.square(y - y_pred), axis=-1). Of images, add up each one's own "
    "entries: axis=(1, 2, 3), as in Dice(axis=(1, 2, 3)), Tversky(axis=(1, 2, 3))."
)
_FIX = (
    "Weights multiply losses before any average: give them as sample_weight to a loss "
    "that averages each example's own entries, loss = dpc.keras.PerExampleLoss(loss), "
    "in fit(...) or as loss(y, y_pred, sample_weight=weights)."
)


def refuse_weights(op: tf.Operation, flows: Dataflow) -> None:
    """Raises if an op multiplies losses by weights that have different axes.

    Weights `[batch]` multiply losses `[batch, T]` along T if T equals the batch size;
    and every weight multiplies a mean over the batch.
    """
    if op.type != "Mul":
        return
    losses, weights = sorted(op.inputs, key=lambda t: not flows[t].trained)
    if flows[weights].trained or flows[weights].kind != DATA:
        return
    if losses.shape.rank == weights.shape.rank:
        return
    if losses.shape.rank == 0:
        raise LossStructureError(
            f"{op.name!r} multiplies one loss of the whole batch by the weights of its "
            f"examples. {ONE_NUMBER}" + see("labels-for-each-token")
        )
    raise LossStructureError(
        f"{op.name!r} multiplies losses of shape {_shown(losses)} by weights of shape "
        f"{_shown(weights)}, which have different axes. {_FIX}"
        + see("labels-for-each-token")
    )


def _shown(tensor: tf.Tensor) -> str:
    if tensor.shape.rank is None:
        return "[...]"
    return "[" + ", ".join("?" if n is None else str(n) for n in tensor.shape) + "]"
