"""A line of the table: a model, its loss, and whether it keeps the examples apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model with its loss.

    Attributes:
      build: gives the model.
      inputs: the shape and type of an example's inputs, as the model takes them.
      labels: the same of its labels.
      loss: from labels and predictions to the loss, as Keras computes it.
      apart: whether the examples stay apart.
      keras: the Keras that has it, 2 or 3; None for both.
      advice: the remedy where the loss is not proven.
    """

    build: Callable[[], Callable]
    inputs: Any
    labels: Any = None
    loss: Callable | None = None
    apart: bool = True
    keras: int | None = None
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Of:
    """The shape and type of an example's tensor."""

    shape: tuple
    dtype: str = "float32"

    def batch(self, size: int | None) -> tf.TensorSpec:
        """The same of a batch."""
        return tf.TensorSpec([size, *self.shape], self.dtype)


#: A class for each example.
CLASS = Of((), "int32")


def classes(labels, logits):
    """The loss of classes, as Keras reduces it."""
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss(labels, logits)


def squares(labels, predictions):
    """The loss of numbers, as Keras reduces it."""
    return tf.keras.losses.MeanSquaredError()(labels, predictions)


def classified(features: tf.Tensor, count: int = 3):
    """Logits of classes."""
    flat = features if len(features.shape) == 2 else tf.keras.layers.Flatten()(features)
    return tf.keras.layers.Dense(count)(flat)
