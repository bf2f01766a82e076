"""Keras's `class_weight`: weights of the labels of drawn elements, by their class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip._docs import see

# How many records' labels are checked at a time.
_ROWS = 2**16


def is_class_weights(function: Callable) -> bool:
    """Whether `function` is Keras's own multiplication by `class_weight`."""
    named = getattr(function, "__qualname__", "") in _keras_marks.CLASS_WEIGHTS
    module = getattr(function, "__module__", "")
    return named and module.startswith(_keras_marks.MODULES)


def on_elements(function: Callable, labels: Any, given: tuple | None) -> Callable:
    """Returns a function of elements that multiplies weights by `class_weight`.

    *Formal guarantees*: a label that names no class of `class_weight` has weight 0
    when it is drawn. The rule reads this label alone, and no error tells that the
    label was drawn. Labels in memory that break the rule are an error before any draw.

    Args:
      function: Keras's multiplication by `class_weight`.
      labels: the spec of the labels.
      given: (x, y) or (x, y, sample_weight) of all records; None if the records are
        not in memory, or are changed after the draw.

    Raises:
      ValueError: if labels have no classes, if a label in memory has no weight, or if
        a weight is negative or not finite.
    """
    weights = np.asarray(
        inspect.getclosurevars(function).nonlocals[_keras_marks.CLASS_WEIGHT_TENSOR]
    )
    if np.any(wrong := ~(np.isfinite(weights) & (weights >= 0))):
        raise ValueError(
            f"class_weight holds {weights[wrong][0]} for class {np.argmax(wrong)}: a "
            "weight is a finite factor, 0 or more, of a loss."
        )
    if isinstance(labels, tf.TensorSpec):  # Keras refuses several labels.
        _check_labels(labels, len(weights))
        if given is not None:
            _check_values(len(weights), *given[1:])
    return weighted_by_class(function, len(weights))


def weighted_by_class(function: Callable, classes: int) -> Callable:
    """Keras's own multiplication by `class_weight`, for batches with weights.

    Args:
      function: Keras's multiplication, a function of x and y.
      classes: how many classes have weights.
    """

    @tf.autograph.experimental.do_not_convert
    def on_element(x, y, weight):
        # Keras's function fails on a label without a class, and takes no uint8.
        numbers = tf.cast(y, tf.int64) if y.dtype.is_integer else y
        known = _names_a_class(numbers, classes)
        numbers = tf.where(known, numbers, tf.zeros([], numbers.dtype))
        # Keras 3's function takes no sample weights.
        _, _, by_class = function(x, numbers)
        by_class *= tf.cast(tf.reshape(known, tf.shape(by_class)), by_class.dtype)
        rank = max(weight.shape.rank, by_class.shape.rank)
        weight, by_class = (
            tf.reshape(w, tf.concat([tf.shape(w), [1] * (rank - w.shape.rank)], 0))
            for w in (weight, by_class)
        )
        return x, y, weight * tf.cast(by_class, weight.dtype)

    return on_element


def _names_a_class(labels: Any, classes: int) -> tf.Tensor:
    """Whether Keras finds each label among `classes` classes, with a last axis of 1.

    Keras reads a last axis longer than 1 as one-hot, and rounds numbers. Labels `[B]`
    have no last axis, and get none.
    """
    if labels.shape.rank < 2 or labels.shape[-1] == 1:
        rounded = tf.round(labels)
        return (rounded >= 0) & (rounded < classes)
    one = tf.abs(tf.reduce_sum(labels, -1, keepdims=True) - 1) < 0.01
    return one & tf.reduce_all(labels >= 0, -1, keepdims=True)


def _check_labels(labels: tf.TensorSpec, classes: int) -> None:
    """Raises where labels have no class, or Keras would take a place for the class.

    Keras treats all labels with a last axis longer than 1 as one-hot. Labels with
    a class for each token have a long last axis too, and Keras does not know the loss.

    Args:
      labels: the spec of the labels.
      classes: how many classes have weights.
    """
    if not (labels.dtype.is_integer or labels.dtype.is_floating):
        line = "y.astype('int32')"
        if labels.dtype == tf.string:
            line = "names, y = np.unique(y, return_inverse=True)"
        raise ValueError(
            f"class_weight needs the number of each label's class, and y holds "
            f"{labels.dtype.name}: {line}."
        )
    if labels.shape.rank in (None, 0, 1) or labels.shape[-1] == 1:
        return
    if not labels.dtype.is_integer and labels.shape[-1] == classes:
        return
    shown = ", ".join(["n", *("?" if d is None else str(d) for d in labels.shape[1:])])
    raise ValueError(
        f"class_weight is for labels of one class each, and y are [{shown}] of type "
        f"{labels.dtype.name}, which Keras reads as one-hot. For a class for each "
        "token, give the weights with the data, (x, y, np.take(weights, y)), without "
        "class_weight. For one-hot labels of all classes, give y.astype('float32')."
        + see("labels-for-each-token")
    )


def _check_values(classes: int, labels: np.ndarray, weights: Any = 1.0) -> None:
    """Raises if a label in memory, of weight above 0, names no class.

    Args:
      classes: how many classes have weights.
      labels: the labels of all records.
      weights: the weights of all records, or of their labels.
    """
    weights = np.asarray(weights)
    while weights.ndim > 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    for start in range(0, len(labels), _ROWS):
        some = labels[start : start + _ROWS]
        numbers = some.astype(np.int64) if some.dtype.kind in "iu" else some
        with tf.device("/cpu:0"):
            known = _names_a_class(tf.constant(numbers), classes).numpy()
        own = weights[start : start + _ROWS] if weights.ndim else weights
        wrong = ~known & (own.reshape(own.shape + (1,) * (known.ndim - own.ndim)) != 0)
        if wrong.any():
            record = np.argwhere(wrong)[0][0]
            _refuse(start + record, some[record], classes)


def _refuse(record: int, label: np.ndarray, classes: int) -> None:
    if label.ndim and label.shape[-1] > 1:
        raise ValueError(
            "class_weight is for labels of one class each, and labels y with several "
            f"entries must be one-hot: not negative, of sum 1. Record {record} has "
            "another label. Where y is a class for each token, or marks several "
            "classes, give the weights with the data, (x, y, sample_weight), and no "
            "class_weight." + see("labels-for-each-token")
        )
    named = next(n for n in label.ravel() if not 0 <= np.round(n) < classes)
    raise ValueError(
        f"class_weight has weights for the classes 0 to {classes - 1}, and y of record "
        f"{record} is {named}. Give a weight for each class from 0; give labels that "
        "must not count weight 0, (x, y, sample_weight)." + see("labels-for-each-token")
    )
