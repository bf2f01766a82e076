"""Whether weights of batches fit the losses that a model makes of their labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.keras import _compat


def refuse_misfit(model: Any, specs: Iterable[Any]) -> None:
    """Raises ValueError where Keras could not multiply weights with losses.

    Of models with one output whose shape is known; others Keras itself refuses, before
    a step, in its own words.

    Args:
      model: a compiled model.
      specs: what the elements of the batches that it may be given are.
    """
    errors = [_misfit(model, *spec) for spec in specs]
    if errors and all(errors):
        raise ValueError(errors[0] + see("labels-for-each-token"))


def _misfit(model: Any, x: Any, labels: Any, weights: Any) -> str | None:
    loss, outputs = _compat.compiled_loss_of(model), getattr(model, "outputs", None)
    if not loss or not outputs or len(outputs) > 1 or tf.nest.is_nested(loss):
        return None
    if not all(isinstance(spec, tf.TensorSpec) for spec in (labels, weights)):
        return None
    try:
        function = tf.keras.losses.get(loss)
        # Shapes alone: nothing is computed.
        with tf.Graph().as_default():
            predictions = tf.zeros([2, *outputs[0].shape[1:]])
            found = getattr(function, "call", function)(
                tf.zeros([2, *labels.shape[1:]], labels.dtype), predictions
            )
            losses = tf.convert_to_tensor(found).shape
    except Exception:  # Of the user's loss, which says more of it itself.
        return None
    if losses.rank in (None, 0) or _fits(weights.shape[1:], losses[1:]):
        return None
    name = getattr(function, "name", getattr(function, "__name__", "the loss"))
    return (
        f"The weights of the batches, {_shown(weights)}, do not fit the losses that "
        f"{name} makes of labels y of shape {_shown(labels)} and type "
        f"{labels.dtype.name}: {_shown(losses)}. Give a weight for each loss, or for "
        "each record, plan.batches((x, y, sample_weight)) with sample_weight of shape "
        f"{_shown(losses)} or [n, 1]; and labels that are a class for each token as "
        "integers, y.astype('int32')."
    )


def _fits(weights: tf.TensorShape, losses: tf.TensorShape) -> bool:
    if weights.rank == losses.rank + 1 and weights[-1] == 1:
        weights = weights[:-1]
    if _compat.SPREADS_WEIGHTS or losses == [1]:
        weights = weights.concatenate([1] * (losses.rank - weights.rank == 1))
    pairs = zip(weights, losses, strict=False)
    return weights.rank == losses.rank and all(w in (1, None, n) for w, n in pairs)


def _shown(spec: Any) -> str:
    shape = getattr(spec, "shape", spec)
    return "[" + ", ".join(["n", *map(str, shape[1:])]) + "]"
