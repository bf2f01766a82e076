"""Losses that are averaged within each example, never over a batch's entries."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._arguments import positive, shown
from tfdpclip._docs import TracedError
from tfdpclip.gradients.loss.misplaced_weights import ONE_NUMBER
from tfdpclip.keras import _compat


@_compat.saving.register_keras_serializable("tfdpclip")
class PerExampleLoss(tf.keras.losses.Loss):
    """Averages a loss over each example's own entries, and then over the batch.

    Keras divides the loss of masked sequences by the number of unmasked entries in the
    whole batch, so that the length of one example changes the gradients of all
    examples. This loss divides by each example's own number of entries, or by a public
    number. Masked entries, entries of weight 0, and entries with the `ignore_class` of
    `loss` as label do not count. A weight for each example, as
    `tfdpclip.sampling.Batches` gives, also works with a loss for each token or pixel.

    *Formal guarantees*: the loss is 1/B sum_i l_i, where l_i depends on example i
    alone, if `loss` is one number for each entry: the divisor of l_i depends on the
    mask, weights and labels of example i only. So l_i has one gradient, which is
    clipped to C whatever the number of entries, and an example more or less moves the
    sum of a step by at most C. An example without counting entries has gradient 0.

    Args:
      loss: a loss as in `compile` of a Keras model: a name, a function or a
        `tf.keras.losses.Loss`. The reduction of the loss is ignored.
      length: a public number of entries to divide by. By default, each example's own
        number of counting entries.
      name: the loss's name.

    Raises:
      ValueError: if `loss` is no loss, or `length` is not above 0.

    >>> loss = PerExampleLoss("mse")
    >>> y = tf.zeros([2, 3, 1])
    >>> prediction = tf.constant([[[1.0], [3.0], [9.0]], [[2.0], [9.0], [9.0]]])
    >>> weights = tf.constant([[1.0, 1, 0], [1, 0, 0]])
    >>> float(loss(y, prediction, weights))  # (1 + 9) / 2 and 4, on average
    4.5

    A language model:

    >>> tokens = tf.keras.losses.SparseCategoricalCrossentropy(
    ...     from_logits=True, ignore_class=-1
    ... )
    >>> y = tf.constant([[0, 1, -1], [1, -1, -1]])
    >>> f"{PerExampleLoss(tokens)(y, tf.zeros([2, 3, 2])):.4f}"  # log 2, for each
    '0.6931'
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
            raise TracedError(f"name must be a string, got {shown(name)}.")
        found = loss if callable(loss) else None
        if isinstance(loss, str) and loss:
            try:
                found = tf.keras.losses.get(loss)
            except ValueError:
                found = None
        if found is None:
            raise TracedError(
                "loss must be the name of a Keras loss, such as "
                "'sparse_categorical_crossentropy', a function or a Loss, got "
                f"{shown(loss)}."
            )
        own = getattr(found, "name", None) or getattr(found, "__name__", "loss")
        super().__init__(name=name or f"per_example_{own}")
        self._loss, self._length = found, length
        self._each, self._ignored = found, None
        if isinstance(found, tf.keras.losses.Loss):
            config = found.get_config()
            self._ignored = config.get("ignore_class")
            if self._ignored is not None:
                # Keras 2 would drop the ignored labels, and so change the batch axis.
                self._each = found.from_config({**config, "ignore_class": None})

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """One loss for each entry; for labels that do not count, any number."""
        if self._ignored is not None:
            y_true = tf.where(self._counts(y_true), y_true, tf.zeros_like(y_true))
        if isinstance(self._each, tf.keras.losses.Loss):
            return self._each.call(y_true, y_pred)
        return self._each(y_true, y_pred)

    def _counts(self, y_true):
        """Which labels are not of the ignored class; None without an ignored class."""
        if self._ignored is None:
            return None
        y_true = tf.convert_to_tensor(y_true)
        return tf.not_equal(y_true, tf.cast(self._ignored, y_true.dtype))

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> tf.Tensor:
        """The mean over the batch.

        Args:
          y_true: the labels.
          y_pred: the predictions. Their Keras mask, if there is one, counts.
          sample_weight: one weight for each example or for each entry, or None.
        """
        with tf.name_scope(_keras_marks.WEIGHTED_LOSS):
            losses = tf.convert_to_tensor(self.call(y_true, y_pred))
            masks = [_compat.mask_of(tensor) for tensor in (y_pred, losses)]
            masks.append(self._counts(y_true))
            if losses.shape.rank is None or losses.shape.rank < 1:
                raise TracedError(
                    f"{self.name} needs one loss for each entry, [batch, ...], but "
                    f"the loss is one number. {ONE_NUMBER}"
                )
            weights = _by_entry(sample_weight, losses, "sample_weight")
            for mask in masks:
                mask = _by_entry(mask, losses, "The mask")
                if weights is None or mask is None:
                    weights = mask if weights is None else weights
                else:
                    weights = weights * mask
            if losses.shape.rank == 1:
                losses = losses if weights is None else losses * weights
            else:
                losses = self._averaged(losses, weights)
            return _compat.share_of_replica(tf.reduce_mean(losses))

    def _averaged(self, losses, weights):
        """One loss for each example."""
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
        # Padding rows have no counting entry, and get loss 0.
        present = tf.reduce_any(weights != 0, axes)
        return tf.cast(present, means.dtype) * means

    def get_config(self) -> dict[str, Any]:
        """The settings; ``from_config`` makes an equal loss from them."""
        loss = self._loss
        if not isinstance(loss, tf.keras.losses.Loss):
            kept = tf.keras.losses.serialize(loss)
        else:
            kept = _compat.saving.serialize_keras_object(loss)
        return {"loss": kept, "length": self._length, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PerExampleLoss:
        """Makes a loss from the result of `get_config`."""
        config = dict(config)
        if isinstance(config["loss"], dict):
            config["loss"] = _compat.saving.deserialize_keras_object(config["loss"])
        return cls(**config)


def _by_entry(weights: Any, losses: tf.Tensor, what: str) -> tf.Tensor | None:
    """Reshapes `weights`, `[B]`, `[B, 1]` or as `losses`, to multiply with losses."""
    if weights is None:
        return None
    weights = tf.cast(tf.convert_to_tensor(weights), losses.dtype)
    rank = losses.shape.rank
    if weights.shape.rank == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    if weights.shape.rank is None or weights.shape.rank > rank:
        raise TracedError(
            f"{what} has shape {weights.shape}, which does not fit losses of shape "
            f"{losses.shape}: give one number for each example, or for each entry."
        )
    # Missing axes come after the batch axis, not before it.
    for _ in range(rank - weights.shape.rank):
        weights = weights[..., tf.newaxis]
    return weights
