"""Per-example gradients of a loss that was computed eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._docs import see
from tfdpclip._variables import all_unwrapped
from tfdpclip.gradients.errors import GradientMismatchError, LossStructureError
from tfdpclip.gradients.forms.base_form import Budget, sum_squares
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.gradients.forms.records import LOST_SQUARE, RecordGradients, column_of
from tfdpclip.gradients.loss import drawn_rows
from tfdpclip.gradients.loss.loss_parts import LossParts
from tfdpclip.gradients.proof.fallback import not_a_number
from tfdpclip.kernel import certificate


class EagerIsolationWarning(UserWarning):
    """Eager code leaves no graph in which to test that examples are isolated."""


class EagerGradients(RecordGradients):
    """The slow path for eager code: a vectorised Jacobian of the loss vector.

    Has the methods of `PerExampleGradients`. Without a graph a scalar loss cannot be
    taken apart, and isolation cannot be tested.

    Args:
      loss: `[B]`, or `[B, ...]`, which is averaged over the trailing axes.
      variables: trainable variables.
      tape: the tape that recorded `loss`.
      perturbation: as for `PerExampleGradients`.

    Raises:
      LossStructureError: if the loss is a scalar or the tape is missing.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        tape: tf.GradientTape | None,
        perturbation: tuple[float, tf.Tensor] | None = None,
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
            "that examples are isolated, nor, unless the tape is persistent, that "
            "gradients are right. Run inside a tf.function, or test the model "
            "with dpc.keras.check_isolation(model, x, y).",
            EagerIsolationWarning,
            stacklevel=3,
        )
        self.variables = all_unwrapped(variables)
        with tape:
            if loss.shape.rank > 1:
                loss = tf.reduce_mean(tf.reshape(loss, [loss.shape[0], -1]), axis=1)
            powers = _random_powers(tf.shape(loss)[0])
            weighted = tf.reduce_sum(loss * tf.cast(powers, loss.dtype))
        found = tape.jacobian(loss, self.variables)
        self._connected = [g is not None for g in found]
        self._found = [
            tf.zeros([loss.shape[0], *v.shape], v.dtype)
            if g is None
            else tf.convert_to_tensor(g)
            for g, v in zip(found, self.variables, strict=True)
        ]
        drawn = drawn_rows.present_in_eager(int(loss.shape[0]))
        self.parts = LossParts(loss, drawn, None, tf.shape(loss)[0])
        self.checks_passed = tf.constant(True)
        self.norms = tf.sqrt(tf.add_n(self._plain_squares()))
        if bool(tf.reduce_any(tf.math.is_nan(self.norms))):
            raise ValueError(not_a_number(self.variables))
        # A tape that is not persistent can be read only once.
        if _tf_private.is_persistent(tape) and bool(
            tf.reduce_all(tf.math.is_finite(self.norms))
        ):
            self._verify(powers, tape.gradient(weighted, self.variables))
        if perturbation is not None:
            shapes = [
                v.shape if connected else None
                for v, connected in zip(self.variables, self._connected, strict=True)
            ]
            # The gradients are in memory already, so the budget has no limit.
            self.perturbation = Perturbation(*perturbation, shapes, Budget(2**62, 1))

    def _verify(self, weights, truth) -> None:
        """Compares the weighted sum with that of an ordinary backward pass."""
        own = [tf.reshape(part, [-1]) for part in self.weighted_sum(weights)]
        coarse = any(part.dtype.size < 4 for part in own)
        tolerance = certificate.COARSE if coarse else certificate.FINE
        hidden = [[LOST_SQUARE * tf.size(part).numpy()] for part in own]
        squares = tf.stack(self._plain_squares()) + hidden
        truth = [
            tf.zeros_like(a) if b is None else tf.reshape(b, [-1])
            for a, b in zip(own, truth, strict=True)
        ]
        errors, _ = certificate.sum_errors(
            [tf.cast(part, tf.float32) for part in own],
            [tf.cast(part, tf.float32) for part in truth],
            weights,
            certificate.Norms(squares, squares, self.norms[:, tf.newaxis]),
            tolerance,
        )
        for variable, error in zip(self.variables, errors.numpy(), strict=True):
            if not error <= tolerance.sums:
                raise GradientMismatchError(
                    f"The sum of the examples' gradients of {variable.name!r} is not "
                    "the sum of an ordinary backward pass: TensorFlow's own Jacobian "
                    "of an op behind the variable is wrong. Run inside a tf.function, "
                    "where most ops have a rule." + see("a-wrong-gradient")
                )

    def _batch_size(self) -> tf.Tensor:
        return self.parts.batch_size

    @property
    def connected(self) -> list[bool]:
        return list(self._connected)

    def mask(self, values: tf.Tensor) -> tf.Tensor:
        """`values` with 0 for padding."""
        kept = self.present
        if self.perturbation is None:
            # Otherwise padding that has no gradient would be clipped noise.
            kept = self.parts.present
        if kept is None:
            return values
        kept = kept if values.shape.rank == 1 else kept[:, tf.newaxis]
        return tf.where(kept, values, tf.zeros_like(values))

    @property
    def present(self) -> tf.Tensor:
        """Which examples are real: drawn, and not of loss 0 and gradient 0."""
        seen = tf.logical_or(self.norms != 0, self.parts.per_example != 0)
        drawn = self.parts.present
        return seen if drawn is None else tf.logical_and(seen, drawn)

    def _plain_squares(self) -> list[tf.Tensor]:
        return [tf.cast(sum_squares(g), tf.float32) for g in self._found]

    def _squares(self) -> list[tf.Tensor]:
        if self.perturbation is None:
            return self._plain_squares()
        squares = self.perturbation.squared_norms(
            lambda start, size: self._found, self.parts.batch_size
        )
        return tf.unstack(squares, axis=1)

    def weighted_sum(
        self, weights: tf.Tensor, assignment: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        """As `PerExampleGradients.weighted_sum`."""
        finite = tf.math.is_finite(self.norms)
        columns, sums = [], []
        for i, gradient in enumerate(self._found):
            column = column_of(weights, assignment, i)
            columns.append(tf.where(finite, column, tf.zeros_like(column)))
            kept = tf.reshape(finite, [-1] + [1] * (gradient.shape.rank - 1))
            kept = tf.where(kept, gradient, tf.zeros_like(gradient))
            sums.append(tf.tensordot(tf.cast(columns[i], gradient.dtype), kept, 1))
        if self.perturbation is None:
            return sums
        added = self.perturbation.weighted_sum(columns)
        return [
            total + tf.cast(part, total.dtype) if connected else total
            for total, part, connected in zip(sums, added, self._connected, strict=True)
        ]


def _random_powers(batch_size: tf.Tensor) -> tf.Tensor:
    """A power of two from 1 to 128 for each example, `[B]`: scaling by it is exact."""
    powers = certificate.shuffled(tf.range(batch_size)) % 8
    return tf.cast(tf.bitwise.left_shift(tf.ones_like(powers), powers), tf.float32)
