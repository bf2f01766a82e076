"""The gradient of a physical batch as a single record, for batch clipping."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._docs import TracedError
from tfdpclip._variables import all_unwrapped
from tfdpclip.gradients.forms.base_form import Budget
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.gradients.forms.records import RecordGradients, column_of
from tfdpclip.gradients.graph.walks import ancestors
from tfdpclip.gradients.loss.state import refuse_foreign_state


class WholeGradient(RecordGradients):
    """The gradient of the whole loss as a single record, for any loss.

    No gradient of an example is computed. Nguyen et al. (2023), section 3.1: any
    function of a batch may be clipped, so batch normalisation is allowed.

    *Formal guarantees*: after clipping, the record is in the ball of radius
    ``rule.sensitivity(state)``. An example moves the record from anywhere in the ball
    to anywhere in the ball, so the sensitivity is twice the radius.

    Args:
      loss: a scalar of a graph, or a tensor that is averaged.
      variables: trainable variables.
      perturbation: k and a seed `[2]`, or None.

    Raises:
      ValueError: if the loss depends on none of the variables.
      ExampleIsolationError: if the loss may depend on data that earlier batches left in
        Python, in a queue or in a file.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        perturbation: tuple[float, tf.Tensor] | None = None,
    ):
        self.variables = all_unwrapped(variables)
        self.checks_passed = tf.constant(True)
        found = self._differentiate(loss)
        _refuse_what_others_left(loss, found)
        self._connected = [g is not None for g in found]
        if not any(self._connected):
            raise TracedError(
                "The loss does not depend on any of the variables: "
                f"{', '.join(v.name for v in self.variables[:5])}."
            )
        self._found = [
            None if g is None else _dense(g, v)
            for g, v in zip(found, self.variables, strict=True)
        ]
        if perturbation is not None:
            self._perturb(*perturbation)

    def _differentiate(self, loss):
        if loss.shape.rank != 0:
            loss = tf.reduce_mean(loss)
        handles = [loss.graph.capture(v.handle) for v in self.variables]
        return tf.gradients(loss, handles)

    def _perturb(self, scale: float, seed: tf.Tensor) -> None:
        shapes = [
            v.shape if c else None
            for v, c in zip(self.variables, self._connected, strict=True)
        ]
        noise = Perturbation(scale, seed, shapes, Budget(2**62, 1))
        added = noise.weighted_sum([tf.ones([1])] * len(self.variables))
        self._found = [
            None if g is None else g + tf.cast(part, g.dtype)
            for g, part in zip(self._found, added, strict=True)
        ]

    @property
    def present(self) -> tf.Tensor:
        return tf.ones([1], tf.bool)

    @property
    def connected(self) -> list[bool]:
        return list(self._connected)

    def _batch_size(self) -> tf.Tensor:
        return tf.constant(1)

    def _plain_squares(self) -> list[tf.Tensor]:
        return [
            tf.zeros([1])
            if g is None
            else tf.reshape(tf.cast(2.0 * tf.nn.l2_loss(g), tf.float32), [1])
            for g in self._found
        ]

    def weighted_sum(
        self, weights: tf.Tensor, assignment: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        sums = []
        for i, (gradient, v) in enumerate(
            zip(self._found, self.variables, strict=True)
        ):
            if gradient is None:
                sums.append(tf.zeros(v.shape, v.dtype))
                continue
            weight = tf.cast(column_of(weights, assignment, i)[0], gradient.dtype)
            # A gradient that is not finite has weight 0 and must become 0.
            sums.append(tf.math.multiply_no_nan(gradient, weight))
        return sums


def _dense(gradient, variable: tf.Variable) -> tf.Tensor:
    """A tensor of the variable's shape, in float32 at least."""
    gradient = tf.reshape(tf.convert_to_tensor(gradient), variable.shape)
    return gradient if gradient.dtype.size >= 4 else tf.cast(gradient, tf.float32)


def _refuse_what_others_left(loss: tf.Tensor, gradients: Sequence) -> None:
    # A custom gradient (`tf.custom_gradient`) may depend on more ops than the loss.
    parts = [t for g in gradients if g is not None for t in _tensors_of(g)]
    refuse_foreign_state(ancestors([loss, *parts]), of_examples=False)


def _tensors_of(gradient) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]
