"""The workload: the map from released gradients to the weights after every step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import signal

from tfdpclip import _arguments


@dataclasses.dataclass(frozen=True)
class Workload:
    """The map from gradients to weights: momentum, and learning rates by step.

    The weights after step t are a sum of the gradients released until then. In plain
    gradient descent all have the same factor (prefix sums). With momentum mu, as in
    Keras (v = mu v - eta_t g, w = w + v), step j weighs eta_j (1 + mu + ... + mu^(t-j))
    in the weights after step t.

    Attributes:
      momentum: mu, in [0, 1).
      learning_rates: eta of every step, for a schedule; None for a constant rate. Only
        the ratios matter.

    >>> Workload(momentum=0.5).applied(np.array([1.0, 0.0, 0.0, 0.0]))
    array([1.   , 1.5  , 1.75 , 1.875])
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self):
        momentum = _arguments.fraction("momentum", self.momentum)
        if momentum == 1:
            raise ValueError("momentum must be below 1, such as 0.9, got 1.")
        object.__setattr__(self, "momentum", momentum)
        if self.learning_rates is None:
            return
        rates = _arguments.floats("learning_rates", self.learning_rates)
        if rates.ndim != 1 or not rates.size or not np.all(np.isfinite(rates)):
            raise ValueError("learning_rates must be a list of finite numbers.")
        if not (np.all(rates >= 0) and rates.max() > 0):
            raise ValueError("learning_rates must be 0 or above, and not all 0.")
        object.__setattr__(self, "learning_rates", tuple(map(float, rates)))

    def rates(self, steps: int) -> np.ndarray | None:
        """The learning rates, with maximum 1; None if all are equal.

        Raises:
          ValueError: If there are fewer rates than steps.
        """
        if self.learning_rates is None:
            return None
        if len(self.learning_rates) < steps:
            raise ValueError(
                f"learning_rates must be given for each of the {steps} steps, got "
                f"{len(self.learning_rates)}."
            )
        rates = np.array(self.learning_rates[:steps])
        if not rates.max() > 0:
            raise ValueError(f"learning_rates of the first {steps} steps are all 0.")
        return None if np.ptp(rates) == 0 else rates / rates.max()

    def applied(self, stream: np.ndarray) -> np.ndarray:
        """A times a stream of steps along the first axis, without learning rates.

        >>> Workload().applied(np.ones(3))
        array([1., 2., 3.])
        """
        mu = self.momentum
        return signal.lfilter([1.0], [1.0, -(1.0 + mu), mu], stream, axis=0)

    def applied_transposed(self, stream: np.ndarray) -> np.ndarray:
        """A^T times a stream, without learning rates."""
        return self.applied(stream[::-1])[::-1]

    def describe(self) -> str:
        """Returns the workload in words."""
        parts = [f"momentum {self.momentum:g}"] if self.momentum else []
        if self.learning_rates is not None:
            parts.append("a learning rate schedule")
        return " and ".join(parts) or "prefix sums"

    def named(self, matrix: str) -> str:
        """Appends the workload to a matrix in words, unless it is prefix sums."""
        return matrix if self == Workload() else f"{matrix}, {self.describe()}"


def check_workload(workload: Any) -> Workload:
    """Returns a workload, prefix sums for None; ValueError for all other types."""
    if workload is None:
        return Workload()
    wanted = "a Workload, such as Workload(momentum=0.9)"
    return _arguments.instance("workload", workload, Workload, wanted)
