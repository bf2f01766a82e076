"""Losses and metrics with documented masks."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tff_tasks.vocabulary import PAD


class SequenceCrossEntropy(tf.keras.losses.Loss):
    """Cross entropy of the next item, from logits `[B, T, V]`: a mean over positions.

    Args:
      mask_padding: whether positions whose target is padding are left out: the mean is
        then over the positions of text in the batch. The published models were, as far
        as can be inferred, trained on the mean over all positions.
    """

    def __init__(self, mask_padding: bool = True):
        # The mean is taken here; a scalar goes through any reduction unchanged.
        super().__init__(reduction=tf.keras.losses.Reduction.SUM)
        self.mask_padding = mask_padding

    def call(self, y_true, y_pred):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y_true, y_pred)
        if not self.mask_padding:
            return tf.reduce_mean(losses)
        weights = tf.cast(tf.not_equal(y_true, PAD), losses.dtype)
        return tf.math.divide_no_nan(
            tf.reduce_sum(losses * weights), tf.reduce_sum(weights)
        )

    def get_config(self):
        return {"mask_padding": self.mask_padding}


class AccuracyWithout(tf.keras.metrics.SparseCategoricalAccuracy):
    """Accuracy over the positions whose target is none of the excluded items.

    Args:
      excluded: items that do not count, such as padding.
      name: the metric's name.
    """

    def __init__(self, excluded: Sequence[int] = (PAD,), name="accuracy", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.excluded = [int(item) for item in excluded]

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(
            y_true, y_pred, _kept(y_true, self.excluded, sample_weight)
        )

    def get_config(self):
        return {**_base_config(self), "excluded": self.excluded}


class PositionCount(tf.keras.metrics.Sum):
    """The number of positions whose target is not padding."""

    def __init__(self, name="num_tokens", dtype=None):
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        del y_pred
        return super().update_state(_kept(y_true, [PAD], sample_weight))

    def get_config(self):
        return _base_config(self)


class RecallAt(tf.keras.metrics.Recall):
    """The share of all true labels that are among their example's `k` highest scores.

    Args:
      k: how many scores.
      name: the metric's name.
    """

    def __init__(self, k: int = 5, name="recall_at_5", dtype=None):
        super().__init__(top_k=k, name=name, dtype=dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        # Returns nothing: Keras compiles this in federated computations, where the
        # operation that the base class returns is not allowed.
        super().update_state(y_true, y_pred, sample_weight)

    def get_config(self):
        return {**_base_config(self), "k": self.top_k}


def _kept(y_true, excluded, sample_weight):
    weights = tf.ones(tf.shape(y_true), tf.float32)
    for item in excluded:
        weights *= tf.cast(tf.not_equal(y_true, item), tf.float32)
    return weights if sample_weight is None else weights * sample_weight


def _base_config(metric):
    return {"name": metric.name, "dtype": metric.dtype}
