"""General batch clipping: the update of a group's local steps is clipped.

Nguyen et al. (2023), section 3.1: the clipped vector may be any function of the group.
Here it is (w_start - w_end) / local rate after several steps of an inner method on the
group: SGD, for which it is the sum of the gradients, momentum or Adam; all of it, or
the part of one random layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_L = tf.keras.layers


class LocalUpdates(tf.keras.Sequential):
    """A network whose loss has, as its gradient, the update of local steps.

    For an optimizer of ``unit="batch"``: each physical batch is a group.

    *Formal guarantees*: the guarantees of ``unit="batch"`` hold unchanged. The loss of
    a physical batch is a function of that batch and of the weights at the start of the
    step: local weights are tensors of the batch's own graph, no variable is written,
    and nothing goes from group to group. The optimizer clips every update, so an
    example moves an update by at most twice the clip norm; and the optimizer checks
    this loss, as any loss, for state of earlier batches. `Batches` ensures that groups
    of a step have no example in common.

    Args:
      model: a sequential network of dense and convolutional layers, batch
        normalisation, and layers without weights.
      steps: the number of local steps.
      rate: the learning rate of local steps.
      method: one of `batch_settings.METHODS`, with a fresh state for every group.
      random_layer: whether a group's update is that of one layer, drawn at random,
        and 0 elsewhere. With one clip of the whole gradient, no layer's noise pays for
        the others.

    Raises:
      ValueError: if the model has a layer of a further kind.

    >>> model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    >>> LocalUpdates(model, steps=3, rate=0.1).count_params()
    3
    """

    def __init__(
        self,
        model: tf.keras.Sequential,
        steps: int,
        rate: float,
        method: str = "sgd",
        random_layer: bool = False,
    ):
        super().__init__([tf.keras.Input(model.input_shape[1:]), *model.layers])
        for layer in self.layers:
            known = isinstance(layer, (_L.Conv2D, _L.Dense, _L.BatchNormalization))
            if layer.weights and not known:
                raise ValueError(
                    f"model has a layer {layer.name} of {type(layer).__name__}, which "
                    "local steps do not know; Conv2D, Dense and BatchNormalization "
                    "they do."
                )
        self._local = (steps, rate, method)
        self._random_layer = random_layer
        self._in_step = False

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        """A step with the loss of local steps; outside a step the loss is unchanged."""
        self._in_step = True
        try:
            return super().train_step(*arguments, **options)
        finally:
            self._in_step = False

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        **options: Any,
    ) -> tf.Tensor:
        """In a step, the mean loss of local steps, whose gradient is their update."""
        if not self._in_step:
            return super().compute_loss(x, y, y_pred, sample_weight, **options)
        steps, rate, method = self._local
        start = [tf.convert_to_tensor(v) for v in self.trainable_variables]
        weights = start
        update = [tf.zeros_like(w) for w in weights]
        losses, state = [], [(tf.zeros_like(w), tf.zeros_like(w)) for w in weights]
        for step in range(1, steps + 1):
            predicted = forward(self.layers, weights, x)
            loss = super().compute_loss(x, y, predicted, sample_weight, **options)
            found = tf.gradients(loss, weights, unconnected_gradients="zero")
            moves = []
            for k, gradient in enumerate(found):
                move, state[k] = direction(method, gradient, state[k], step)
                moves.append(move)
            weights = [w - rate * m for w, m in zip(weights, moves, strict=True)]
            update = [u + m for u, m in zip(update, moves, strict=True)]
            losses.append(loss)
        if self._random_layer:
            update = self._one_layer(update)
        # Linear in the weights, so that the update is its gradient.
        linear = tf.add_n(
            [
                tf.reduce_sum(tf.stop_gradient(u) * w)
                for u, w in zip(update, start, strict=True)
            ]
        )
        value = tf.stop_gradient(tf.add_n(losses) / steps - linear)
        return value + linear

    def _one_layer(self, update: list[tf.Tensor]) -> list[tf.Tensor]:
        """The update of a layer that is drawn for the batch, and zeros."""
        counts = [len(layer.trainable_variables) for layer in self.layers]
        of = [k for k, count in enumerate(filter(None, counts)) for _ in range(count)]
        drawn = tf.random.uniform([], 0, 1 + max(of), tf.int32)
        return [
            u * tf.cast(tf.equal(drawn, place), u.dtype)
            for u, place in zip(update, of, strict=True)
        ]


def direction(
    method: str, gradient: tf.Tensor, state: tuple[tf.Tensor, tf.Tensor], step: int
) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
    """The move of a method over its rate, and its state after it.

    Args:
      method: one of `batch_settings.METHODS`.
      gradient: of the step.
      state: the means of gradients and of their squares so far; momentum has the first.
      step: the number of the step, from 1.
    """
    if method == "sgd":
        return gradient, state
    first, second = state
    if method == "momentum":
        first = 0.9 * first + gradient
        return first, (first, second)
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * tf.square(gradient)
    scale = (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    return scale * first / (tf.sqrt(second) + 1e-7), (first, second)


def forward(
    layers: Sequence[Any], weights: Sequence[tf.Tensor], x: tf.Tensor
) -> tf.Tensor:
    """The outputs of layers in training mode with given weights; writes nothing.

    Args:
      layers: of a `LocalUpdates`.
      weights: a tensor for each of their trainable variables.
      x: the batch.
    """
    left = list(weights)
    for layer in layers:
        count = len(layer.trainable_variables)
        mine, left = left[:count], left[count:]
        if isinstance(layer, _L.Conv2D):
            x = tf.nn.conv2d(x, mine[0], layer.strides, layer.padding.upper())
            x = layer.activation(x + mine[1] if layer.use_bias else x)
        elif isinstance(layer, _L.Dense):
            x = tf.matmul(x, mine[0])
            x = layer.activation(x + mine[1] if layer.use_bias else x)
        elif isinstance(layer, _L.BatchNormalization):
            mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
            gamma, beta = mine
            x = tf.nn.batch_normalization(x, mean, variance, beta, gamma, layer.epsilon)
        else:
            x = layer(x)
    return x
