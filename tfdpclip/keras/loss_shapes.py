"""Checks that the weights of batches fit the losses of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.keras import _compat


def refuse_misfit(model: Any, specs: Iterable[Any]) -> None:
    """Raises ValueError where Keras could not multiply weights with losses.

    Only models with a single output of known shape are checked. For further models,
    Keras raises an error of its own before a step.

    Args:
      model: a compiled model.
      specs: the element specs (x, y, weights) that the batches may have.
    """
    errors = [_misfit(model, *spec) for spec in specs]
    if errors and all(errors):
        raise ValueError(errors[0] + see("labels-for-each-token"))


def _misfit(model: Any, x: Any, labels: Any, weights: Any) -> str | None:
    loss, outputs = _compat.compiled_loss_of(model), getattr(model, "outputs", None)
    if isinstance(weights, dict) and not _compat.takes_weights_by_name(model):
        y, w = (
            ", ".join(f"{part}[{name!r}]" for name in model.output_names)
            for part in ("y", "sample_weight")
        )
        return (
            "Keras 3 takes a dict of weights only for models with a dict of outputs, "
            "and this model has a list: give tuples, in the order of the outputs, "
            f"plan.batches((x, ({y}), ({w})))."
        )
    if not loss or not outputs or len(outputs) > 1 or tf.nest.is_nested(loss):
        return None
    if not all(isinstance(spec, tf.TensorSpec) for spec in (labels, weights)):
        return None
    try:
        function = tf.keras.losses.get(loss)
        # Only the shapes matter: the graph is never run.
        with tf.Graph().as_default():
            predictions = tf.zeros([2, *outputs[0].shape[1:]])
            found = getattr(function, "call", function)(
                tf.zeros([2, *labels.shape[1:]], labels.dtype), predictions
            )
            losses = tf.convert_to_tensor(found).shape
    except Exception:  # Keras reports errors of the user's loss better.
        return None
    if losses.rank in (None, 0) or _fits(weights.shape[1:], losses[1:]):
        return None
    name = getattr(function, "name", getattr(function, "__name__", "the loss"))
    return (
        f"The weights of the batches, {_shown(weights)}, do not fit the losses that "
        f"{name} makes from labels y of shape {_shown(labels)} and type "
        f"{labels.dtype.name}: {_shown(losses)}. Give a weight for each loss, or for "
        "each record: plan.batches((x, y, sample_weight)) with sample_weight of shape "
        f"{_shown(losses)} or [n, 1]. Give a class for each token as integers, "
        "y.astype('int32')."
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
