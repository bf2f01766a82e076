"""The noise multipliers of a run whose noise may follow a schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# A schedule that moves at every step is accounted in steps of 5 %, rounded down: a
# privacy loss distribution for every step would cost more than it tells.
_RATIO = 0.05

_OPTIMIZER_ATTRIBUTES = (
    "noise_multiplier",
    "iterations",
    "expected_batch_size",
    "accumulation_steps",
    "clip",
)


class NoisePlan:
    """What to account for each step of an optimizer.

    *Formal guarantees*: the number for a step is at most the noise multiplier that the
    optimizer uses in it.

    Args:
      optimizer: a private optimizer.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._schedule = getattr(optimizer, "noise_schedule", None)
        self._known: dict[int, float] = {}

    @property
    def scheduled(self) -> bool:
        """Whether the noise multiplier follows a schedule."""
        return self._schedule is not None

    def at(self, step: int) -> float:
        """The noise multiplier to account for step `step`, counted from 0."""
        if not self.scheduled:
            return float(self._optimizer.noise_multiplier)
        if step not in self._known:
            self._known[step] = self._rounded(self._optimizer.noise_multiplier_at(step))
        return self._known[step]

    def _rounded(self, z: float) -> float:
        if not (math.isfinite(z) and z >= 0):
            raise ValueError(
                f"The schedule of noise_multiplier gives {z}; it must stay finite and "
                "0 or above."
            )
        exact = tf.keras.optimizers.schedules.PiecewiseConstantDecay
        if z == 0 or isinstance(self._schedule, exact):
            return z
        return min(z, math.exp(math.floor(math.log(z) / _RATIO) * _RATIO))

    def least(self, start: int, steps: int) -> float:
        """The least over `steps` steps from `start` on."""
        if not self.scheduled:
            return self.at(start)
        return min(self.at(step) for step in range(start, start + steps))

    def segments(
        self, start: int, steps: int, width: int = 1
    ) -> Iterator[tuple[float, int]]:
        """Stretches of equal noise: (noise multiplier, number of steps).

        Args:
          start: the first step.
          steps: how many.
          width: each step counts with the least of all executions of this many steps
            that it may be part of.
        """

        def widest(step):
            first = max(0, step - width + 1)
            return self.least(first, step + width - first)

        found = (widest(step) for step in range(start, start + steps))
        for z, group in itertools.groupby(found):
            yield z, len(list(group))


def private_optimizer(optimizer: Any) -> Any:
    """The optimizer, if it says of itself what accounting must know.

    Raises:
      ValueError: if it does not.
    """
    missing = [a for a in _OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, a)]
    if missing:
        raise ValueError(
            "PrivacyBudget needs a private optimizer, such as dpc.keras.DPSGD(...) or, "
            "of a PrivacyPlan, plan.optimizer(dpc.keras.DPAdam, learning_rate=1e-3); "
            f"{type(optimizer).__name__} has no {', '.join(missing)}."
        )
    return optimizer
