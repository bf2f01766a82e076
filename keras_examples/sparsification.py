"""Weights that only wander as noise moves them are frozen.

Nguyen et al. (2023), section 3.4, an idea that the paper does not test. What is frozen
follows from released weights and from public numbers, and so costs no privacy; a frozen
weight takes no further noise.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf


class Frozen:
    """A Keras constraint that keeps frozen entries of a weight at their value."""

    def __call__(self, weight: tf.Tensor) -> tf.Tensor:
        return tf.where(self.mask, self.value, weight)

    def attach(self, variable: tf.Variable) -> None:
        """Begins with no frozen entry of a variable."""
        self.variable = variable
        self.mask = tf.Variable(tf.zeros(variable.shape, tf.bool), trainable=False)
        self.value = tf.Variable(tf.zeros(variable.shape), trainable=False)

    def freeze(self, entries: np.ndarray) -> None:
        """Freezes further entries at their present value."""
        self.value.assign(np.asarray(self.variable))
        self.mask.assign(np.asarray(self.mask) | entries)


def freezable(model: tf.keras.Model) -> tuple[tf.keras.Model, list[Frozen]]:
    """A copy of a network whose weights can be frozen, with weights of its own.

    Args:
      model: a network that is not trained.

    Returns:
      The copy, and a constraint for each of its trainable variables, in their order.
    """

    def copy(layer):
        config = layer.get_config()
        kept = [key for key in config if key.endswith("_constraint")]
        return type(layer).from_config(config | {key: Frozen() for key in kept})

    made = tf.keras.models.clone_model(model, clone_function=copy)
    found = {}
    for layer in made.layers:
        for name in ("kernel", "bias", "gamma", "beta"):
            constraint = getattr(layer, f"{name}_constraint", None)
            variable = getattr(layer, name, None)
            if constraint is not None and variable is not None:
                constraint.attach(variable)
                found[id(variable)] = constraint
    return made, [found[id(variable)] for variable in made.trainable_variables]


class Sparsifier(tf.keras.callbacks.Callback):
    """Freezes weights at the end of an epoch that moved as noise alone moves them.

    A weight is frozen that moved by at most `level` stddevs of the walk of the noise
    since the beginning of the epoch: rate * noise * sqrt(steps).

    Args:
      frozen: a constraint for each trainable variable, of `freezable`.
      level: how many stddevs.
      divisor: of the noise: the groups or examples whose mean is taken.

    Attributes:
      share: the share of frozen weights.
    """

    def __init__(self, frozen: list[Frozen], level: float, divisor: int):
        super().__init__()
        self._frozen, self._level, self._divisor = frozen, level, divisor
        self.share = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        del epoch, logs
        optimizer = self.model.optimizer
        self._start = [np.array(f.variable) for f in self._frozen]
        self._step = int(optimizer.iterations)
        self._rate = float(np.asarray(optimizer.learning_rate))
        scales = np.reshape(optimizer.clip.noise_scales(optimizer.clip_state), [-1])
        places = optimizer.clip.assignment or [0] * len(self._frozen)
        z = float(optimizer.gradient_noise_multiplier) / self._divisor
        self._stddevs = [z * scales[place] for place in places]

    def on_epoch_end(self, epoch, logs=None):
        del epoch, logs
        steps = int(self.model.optimizer.iterations) - self._step
        walk = self._level * self._rate * math.sqrt(steps)
        count = 0
        for one, start, stddev in zip(
            self._frozen, self._start, self._stddevs, strict=True
        ):
            moved = np.abs(np.asarray(one.variable) - start)
            one.freeze(moved <= walk * stddev)
            count += int(np.sum(one.mask))
        self.share = count / sum(start.size for start in self._start)
