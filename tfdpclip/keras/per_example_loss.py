"""Losses that are averaged within each example, never over a batch's entries."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._arguments import positive, shown
from tfdpclip.keras import _compat


@_compat.saving.register_keras_serializable("tfdpclip")
class PerExampleLoss(tf.keras.losses.Loss):
    """Averages a loss over each example's own entries, and then over the batch.

    Keras divides the loss of masked sequences by the number of unmasked entries of the
    whole batch, so that how long one example is changes everybody's gradient. This
    divides by each example's own number, or by a public one. Entries that are masked,
    or have weight 0, do not count. It also lets a weight for each example, as
    `tfdpclip.sampling.Batches` gives it, meet a loss for each pixel.

    *Formal guarantees*: the loss is a mean over the batch of numbers that depend on one
    example each, if `loss` is one number for each entry.

    Args:
      loss: what a Keras model is compiled with: a name, a function or a
        `tf.keras.losses.Loss`, of which the reduction does not matter.
      length: a public number of entries to divide by. By default, each example's own
        number of entries that count.
      name: the loss's name.

    Raises:
      ValueError: if `loss` is no loss, or `length` is not above 0.

    >>> loss = PerExampleLoss("mse")
    >>> y = tf.zeros([2, 3, 1])
    >>> prediction = tf.constant([[[1.0], [3.0], [9.0]], [[2.0], [9.0], [9.0]]])
    >>> weights = tf.constant([[1.0, 1, 0], [1, 0, 0]])
    >>> float(loss(y, prediction, weights))  # (1 + 9) / 2 and 4, on average
    4.5
    """

    def __init__(
        self,
        loss: Any,
        length: float | None = None,
        name: str | None = None,
    ):
        if length is not None:
            length = positive("length", length)
        if name is not None and not isinstance(name, str):
            raise ValueError(f"name must be a string, got {shown(name)}.")
        found = loss if callable(loss) else None
        if isinstance(loss, str) and loss:
            try:
                found = tf.keras.losses.get(loss)
            except ValueError:
                found = None
        if found is None:
            raise ValueError(
                "loss must be the name of a Keras loss, such as "
                "'sparse_categorical_crossentropy', a function or a Loss, got "
                f"{shown(loss)}."
            )
        own = getattr(found, "name", None) or getattr(found, "__name__", "loss")
        super().__init__(name=name or f"per_example_{own}")
        self._loss, self._length = found, length

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """One loss for each entry."""
        if isinstance(self._loss, tf.keras.losses.Loss):
            return self._loss.call(y_true, y_pred)
        return self._loss(y_true, y_pred)

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> tf.Tensor:
        """The mean over the batch.

        Args:
          y_true: the labels.
          y_pred: the predictions. Their Keras mask, if they have one, counts.
          sample_weight: one weight for each example or for each entry, or None.
        """
        with tf.name_scope(_keras_marks.WEIGHTED_LOSS):
            losses = tf.convert_to_tensor(self.call(y_true, y_pred))
            mask = _compat.mask_of(y_pred)
            if losses.shape.rank is None or losses.shape.rank < 1:
                raise ValueError(
                    f"{self.name} needs one loss for each entry, [batch, ...], but "
                    "the loss is a number. Use one that does not reduce over the batch."
                )
            weights = _by_entry(sample_weight, losses, "sample_weight")
            mask = _by_entry(mask, losses, "The mask")
            if weights is None or mask is None:
                weights = mask if weights is None else weights
            else:
                weights = weights * mask
            if losses.shape.rank == 1:
                return tf.reduce_mean(losses if weights is None else losses * weights)
            return self._averaged(losses, weights)

    def _averaged(self, losses, weights):
        axes = list(range(1, losses.shape.rank))
        if weights is None:
            weights = tf.ones_like(losses)
        weights = tf.broadcast_to(weights, tf.shape(losses))
        totals = tf.reduce_sum(tf.math.multiply_no_nan(losses, weights), axes)
        if self._length is not None:
            means = totals / tf.cast(self._length, totals.dtype)
        else:
            count = tf.reduce_sum(tf.cast(weights != 0, totals.dtype), axes)
            means = totals / tf.maximum(count, 1)
        # Padding has no entry that counts.
        present = tf.reduce_any(weights != 0, axes)
        return tf.reduce_mean(tf.cast(present, means.dtype) * means)

    def get_config(self) -> dict[str, Any]:
        """The settings, such that ``from_config`` makes the same loss."""
        loss = self._loss
        if not isinstance(loss, tf.keras.losses.Loss):
            kept = tf.keras.losses.serialize(loss)
        else:
            kept = _compat.saving.serialize_keras_object(loss)
        return {"loss": kept, "length": self._length, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PerExampleLoss:
        """Makes a loss of what `get_config` gave."""
        config = dict(config)
        if isinstance(config["loss"], dict):
            config["loss"] = _compat.saving.deserialize_keras_object(config["loss"])
        return cls(**config)


def _by_entry(weights: Any, losses: tf.Tensor, what: str) -> tf.Tensor | None:
    """`weights`, `[B]`, `[B, 1]` or as `losses`, in the shape to multiply with them."""
    if weights is None:
        return None
    weights = tf.cast(tf.convert_to_tensor(weights), losses.dtype)
    rank = losses.shape.rank
    if weights.shape.rank == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    if weights.shape.rank is None or weights.shape.rank > rank:
        raise ValueError(
            f"{what} has shape {weights.shape}, which does not fit losses of shape "
            f"{losses.shape}: give one number for each example, or for each entry."
        )
    # What is missing comes after the batch, not before it.
    for _ in range(rank - weights.shape.rank):
        weights = weights[..., tf.newaxis]
    return weights
