"""Per-example gradients of a loss that was computed eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip.clipping import ClipRule
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.fallback import not_a_number
from tfdpclip.gradients.forms import sum_squares
from tfdpclip.gradients.loss import LossParts


class EagerIsolationWarning(UserWarning):
    """Eager code leaves no graph in which to test that examples are isolated."""


class EagerGradients:
    """The slow path for eager code: a vectorised Jacobian of the loss vector.

    Provides what `PerExampleGradients` provides. Without a graph a scalar loss cannot
    be taken apart and isolation cannot be tested.

    Args:
      loss: `[B]`, or `[B, ...]`, which is averaged over the trailing axes.
      variables: trainable variables.
      tape: the tape that recorded `loss`.

    Raises:
      LossStructureError: if the loss is a scalar or the tape is missing.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        tape: tf.GradientTape | None,
    ):
        if loss.shape.rank == 0:
            raise LossStructureError(
                "The loss is a scalar, and eager code has no graph in which to take "
                "it apart into one loss per example. Compile without "
                "run_eagerly=True, compute the loss inside a tf.function, or give one "
                "loss per example: loss=tf.keras.losses.MeanSquaredError("
                "reduction='none')."
            )
        if tape is None:
            raise LossStructureError(
                "Eager code needs the tape that recorded the loss: "
                "optimizer.minimize(loss, variables, tape=tape)."
            )
        warnings.warn(
            "Eager steps are slow (a Jacobian of the whole batch), and cannot test "
            "that examples are isolated. Run inside a tf.function, or test the model "
            "with dpc.keras.check_isolation(model, x, y).",
            EagerIsolationWarning,
            stacklevel=3,
        )
        self.variables = list(variables)
        if loss.shape.rank > 1:
            with tape:
                loss = tf.reduce_mean(tf.reshape(loss, [loss.shape[0], -1]), axis=1)
        found = tape.jacobian(loss, self.variables)
        self.connected = [g is not None for g in found]
        self._found = [
            tf.zeros([loss.shape[0], *v.shape], v.dtype)
            if g is None
            else tf.convert_to_tensor(g)
            for g, v in zip(found, self.variables, strict=True)
        ]
        self.parts = LossParts(loss, None, None, tf.shape(loss)[0])
        self.isolated = tf.constant(True)
        squares = [tf.cast(sum_squares(g), tf.float32) for g in self._found]
        self.norms = tf.sqrt(tf.add_n(squares))
        if bool(tf.reduce_any(tf.math.is_nan(self.norms))):
            raise ValueError(not_a_number(self.variables))

    @property
    def present(self) -> tf.Tensor:
        """Which examples are real: an example with loss 0 and gradient 0 is padding."""
        return tf.logical_or(self.norms != 0, self.parts.per_example != 0)

    def clipped_sum(self, rule: ClipRule, state: Any) -> list[tf.Tensor]:
        """The clipped gradients of all examples, summed, for each variable."""
        weights = rule.weights(self.norms, state)
        sums = []
        for gradient in self._found:
            shape = [-1] + [1] * (gradient.shape.rank - 1)
            kept = tf.reshape(tf.math.is_finite(self.norms), shape)
            finite = tf.where(kept, gradient, tf.zeros_like(gradient))
            sums.append(tf.tensordot(tf.cast(weights, gradient.dtype), finite, 1))
        return sums

    def shared_gradients(self) -> list[None]:
        """None: a loss per example has no shared terms that could be told apart."""
        return [None] * len(self.variables)
