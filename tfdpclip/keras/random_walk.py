"""Whether the weights moved otherwise than noise alone would move them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._keras_marks import MODULES
from tfdpclip._variables import all_unwrapped
from tfdpclip.keras import _compat
from tfdpclip.keras.private_optimizer import PrivateOptimizer

# Coordinates of a variable that are looked at, and coordinates of a simulation: so many
# that a step of the simulation takes a few hundredths of a millisecond.
_LOOKED_AT, _SIMULATED = 200_000, 4000


class RandomWalk:
    """The variance of every weight if its gradients were noise alone.

    SGD's variance is exact, Adam's is simulated: Adam divides by the noise. A walk that
    begins after some steps takes the velocities of noise alone along.

    *Formal guarantees*: a function of released weights and public settings.

    Args:
      optimizer: the built optimizer; `follows` is False for optimizers other than SGD
        and Adam, and for correlated noise.
      variables: the trained variables.
    """

    def __init__(self, optimizer: Any, variables: list[Any]):
        self.follows = (
            bool(variables)
            and isinstance(optimizer, PrivateOptimizer)
            and (_is_sgd(optimizer) or _is_adam(optimizer))
            and not optimizer.weight_decay
            and not optimizer.use_ema
            and optimizer.noise is None
            and min(optimizer.noise_stddevs.values()) > 0
            # An optimizer may be built for more variables than the model trains.
            and len(optimizer.clip.assignment or variables) == len(variables)
        )
        if not self.follows:
            return
        self._optimizer = optimizer
        self._variables = all_unwrapped(variables)
        self._first = [_part_of(v) for v in self._variables]
        self._steps = 0
        groups = len(optimizer.noise_stddevs)
        if _is_sgd(optimizer):
            # Variances of weight and velocity, and their covariance.
            self._moments = np.zeros([3, groups])
        else:
            shape = [3, groups, max(1000, _SIMULATED // groups)]
            self._moments = np.zeros(shape, np.float32)
        self._random = np.random.default_rng(0)
        self._last = self._stddevs()

    def begin(self) -> None:
        """Begins the walk at the present weights, with the velocities of noise."""
        self._advance()
        self._moments[:: 2 if _is_sgd(self._optimizer) else 3] = 0.0

    def _stddevs(self) -> np.ndarray:
        return np.array(list(self._optimizer.noise_stddevs.values()))

    def measure(self) -> tuple[float, float]:
        """The signal so far, and the evidence for it, in standard deviations.

        Returns:
          The share of the squared distance of the weights from their first values that
          noise does not explain, at least 0; and the largest deviation of a variable's
          distance from the distance of noise.
        """
        self._advance()
        groups = self._optimizer.clip.assignment or [0] * len(self._variables)
        variance, inexact = self._moments[0], 0.0
        if not _is_sgd(self._optimizer):  # Simulated, with a relative variance.
            inexact = 2 / variance[0].size
            variance = np.mean(np.square(variance), axis=1)
        total = expected = largest = 0.0
        for variable, first, group in zip(
            self._variables, self._first, groups, strict=True
        ):
            moved = _part_of(variable) - first
            distance = float(np.dot(moved, moved))
            by_noise = first.size * variance[group]
            if distance == 0 or by_noise == 0:
                continue  # No gradient reaches this variable.
            total, expected = total + distance, expected + by_noise
            spread = (2 / first.size + inexact) ** 0.5
            largest = max(largest, abs(distance / by_noise - 1) / spread)
        return max(0.0, 1 - expected / total) if total else 0.0, largest

    def _advance(self) -> None:
        """Follows the optimizer to its step counter."""
        made, now = self._optimizer, int(self._optimizer.iterations.numpy())
        noise, self._last = self._last, self._stddevs()
        # The clip norm moves by about the same factor in each step.
        factor = (self._last / noise) ** (1 / max(1, now - self._steps))
        advance = self._advance_sgd if _is_sgd(made) else self._advance_adam
        for step, rate in enumerate(_rates(made, self._steps, now), self._steps):
            advance(step, rate, noise)
            noise = noise * factor
        self._steps = now

    def _advance_sgd(self, step: int, rate: float, noise: np.ndarray) -> None:
        del step
        made, (weight, velocity, both) = self._optimizer, self._moments
        beta, new = float(made.momentum), np.square(rate * noise)
        velocity = beta**2 * velocity + new
        if made.nesterov:
            moved = beta**2 * velocity + (1 + 2 * beta) * new
            weight = weight + 2 * beta**2 * both + moved
            both = beta * both + beta * velocity + new
        else:
            weight = weight + 2 * beta * both + velocity
            both = beta * both + velocity
        self._moments = np.stack([weight, velocity, both])

    def _advance_adam(self, step: int, rate: float, noise: np.ndarray) -> None:
        made, (weight, mean, square) = self._optimizer, self._moments
        gradient = self._random.standard_normal(weight.shape, np.float32)
        gradient *= noise[:, None].astype(np.float32)
        mean += (1 - made.beta_1) * (gradient - mean)
        square += (1 - made.beta_2) * (np.square(gradient) - square)
        rate *= (1 - made.beta_2 ** (step + 1)) ** 0.5 / (1 - made.beta_1 ** (step + 1))
        weight -= np.float32(rate) * mean / (np.sqrt(square) + made.epsilon)


def _is_sgd(optimizer: Any) -> bool:
    return isinstance(optimizer, tf.keras.optimizers.SGD)


def _is_adam(optimizer: Any) -> bool:
    of_class = [k for k in type(optimizer).__mro__ if k.__module__.startswith(MODULES)]
    return of_class[:1] == [tf.keras.optimizers.Adam] and not optimizer.amsgrad


def _part_of(variable: tf.Variable) -> np.ndarray:
    """The first coordinates of a variable."""
    part = variable.numpy().reshape(-1)[:_LOOKED_AT]
    return part.astype(np.result_type(part, np.float32))


def _rates(optimizer: Any, first: int, end: int) -> np.ndarray:
    """The learning rates of the steps from `first` to before `end`."""
    rate, steps = _compat.own_rate(optimizer), np.arange(first, end, dtype=np.float32)
    if not callable(rate) or isinstance(rate, tf.Variable) or not len(steps):
        # Under a strategy the rate is a variable that no float takes.
        return np.full(len(steps), float(tf.convert_to_tensor(optimizer.learning_rate)))
    ends = [float(rate(step)) for step in (steps[0], steps[-1])]
    try:
        rates = np.asarray(rate(steps))
        if np.allclose([rates[0], rates[-1]], ends, rtol=1e-4):
            return rates.astype(float)
    except (TypeError, ValueError, IndexError, tf.errors.OpError):
        pass  # The schedule takes one step at a time.
    return np.array([float(rate(step)) for step in steps])
