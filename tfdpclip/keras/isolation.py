"""A test, on real data, that a Keras model keeps its examples apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.keras import _compat

# What TensorFlow gives as the global seed where none was set.
_NO_SEED = 87654321


def check_isolation(
    model: tf.keras.Model,
    x: Any,
    y: Any,
    *,
    loss: Callable | None = None,
    examples: int = 3,
    tolerance: float = 1e-4,
) -> None:
    """Raises if changing one example changes another example's loss.

    The optimizers test isolation by gradients, on their first step. Gradients cannot
    see a statistic of the batch behind `tf.stop_gradient`, or one that reaches the loss
    through integers. This test can: it replaces an example by another, with the same
    random numbers (dropout masks and the like), and compares everybody else's loss,
    with the model in training mode. Non-trainable state is put back afterwards.

    Args:
      model: a built or callable Keras model.
      x: a batch of inputs, two examples at least, batch axis first; or a nest of them.
      y: the labels.
      loss: ``loss(y, predictions)`` -> one loss per example. By default the compiled
        loss, unreduced.
      examples: how many examples to replace, one at a time.
      tolerance: the largest change of a loss, relative to its size, to put down to
        rounding; finite.

    Raises:
      ExampleIsolationError: if another example's loss changed.
      ValueError: if the batch is too small, or the loss is unknown.

    >>> model = tf.keras.Sequential([tf.keras.layers.BatchNormalization()])
    >>> x = np.arange(8.0).reshape(4, 2)
    >>> check_isolation(model, x, x, loss=tf.keras.losses.mse)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tfdpclip.gradients.errors.ExampleIsolationError: Replacing example 0 changed...
    """
    check_model(model)
    examples = _arguments.integer("examples", examples, 1)
    tolerance = _arguments.non_negative("tolerance", tolerance)
    if loss is not None and not isinstance(loss, (str, tf.keras.losses.Loss)):
        _arguments.function("loss", loss, 2)
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    y = tf.nest.map_structure(tf.convert_to_tensor, y)
    count = int(tf.nest.flatten(x)[0].shape[0])
    if count < 2:
        raise ValueError(f"x has {count} examples; the test needs two at least.")
    per_example = _loss_function(model, loss)
    model(x)  # builds the variables
    seed = int(np.random.default_rng().integers(2**31))
    state = [(v, tf.identity(v)) for v in model.non_trainable_variables]
    rng_state = [(v, tf.identity(v)) for v in _compat.random_states_of(model)]

    given_seed = tf.compat.v1.get_seed(0)[0]
    if given_seed == _NO_SEED:
        given_seed = None

    def losses(inputs, labels) -> np.ndarray:
        for variable, value in (*state, *rng_state):
            variable.assign(value)
        tf.random.set_seed(seed)
        found = per_example(labels, model(inputs, training=True))
        return np.reshape(np.asarray(found, np.float64), [count, -1]).mean(axis=1)

    try:
        before = losses(x, y)
        for replaced in range(min(examples, count)):
            other = (replaced + 1) % count
            order = np.arange(count)
            order[replaced] = other
            pick = lambda t, order=order: tf.gather(t, order)  # noqa: E731
            after = losses(
                tf.nest.map_structure(pick, x), tf.nest.map_structure(pick, y)
            )
            rest = np.arange(count) != replaced
            change = np.abs(after - before)[rest]
            size = np.maximum(np.abs(before[rest]), np.abs(before).mean())
            worst = int(np.argmax(change - tolerance * size))
            if not np.all(change <= tolerance * size + 1e-12):
                raise ExampleIsolationError(
                    f"Replacing example {replaced} changed the loss of example "
                    f"{np.flatnonzero(rest)[worst]} by {change[worst]:.3g}: the model "
                    "combines the examples of a batch, so clipping protects nobody. "
                    "Batch normalisation in training mode does this; use "
                    "GroupNormalization or LayerNormalization." + see("mixed-examples")
                )
    finally:
        for variable, value in (*state, *rng_state):
            variable.assign(value)
        tf.random.set_seed(given_seed)


def check_model(model: Any) -> tf.keras.Model:
    """Returns `model`, or raises ValueError unless it is a Keras model."""
    if not isinstance(model, tf.keras.Model):
        raise ValueError(f"model must be a Keras model, got {_arguments.shown(model)}.")
    return model


def _loss_function(model, loss) -> Callable:
    given = _compat.compiled_loss_of(model) if loss is None else loss
    if given is None:
        raise ValueError(
            "loss is missing and the model is not compiled: pass "
            "loss=lambda y, p: ..., giving one loss per example."
        )
    if isinstance(given, (dict, list, tuple)):
        raise ValueError(
            "loss: a model with several losses needs one function of all outputs, "
            "giving one loss per example."
        )
    if isinstance(given, tf.keras.losses.Loss):
        return given.call
    try:
        return tf.keras.losses.get(given)
    except ValueError as error:
        raise ValueError(f"loss names none that Keras knows: {error}") from error
