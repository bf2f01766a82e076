"""The noise multipliers of a run whose noise may follow a schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError

# The accountant rounds a schedule down in steps of 5 %: a separate privacy loss
# distribution for every training step would cost more than it gains.
_RATIO = 0.05

_OPTIMIZER_ATTRIBUTES = (
    "noise_multiplier",
    "iterations",
    "expected_batch_size",
    "accumulation_steps",
    "clip",
)


class NoisePlan:
    """The noise multiplier that is accounted for each step of an optimizer.

    *Formal guarantees*: the number for a step is at most the noise multiplier that the
    optimizer uses in that step.

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

    def refuse_changed(self, step: int) -> None:
        """Raises if the schedule no longer gives the noise that the steps use.

        Args:
          step: the step to ask the schedule for.

        Raises:
          PrivacyMismatchError: if the schedule gives another number.
        """
        if not self.scheduled:
            return
        uses, gives = self._optimizer.noise_multiplier_at(step), self._schedule(step)
        if not abs(float(gives) - uses) <= 1e-4 * abs(uses):
            raise PrivacyMismatchError(
                f"The schedule of noise_multiplier gives {float(gives):g} for step "
                f"{step} now, but gave {uses:g} when the optimizer was made, and the "
                "steps still use that. Compile with a new optimizer, "
                "noise_multiplier=MySchedule(...) with the new numbers, and allow the "
                "change: PrivacyBudget(..., allow_change=True)."
                + see("schedules-that-read-more-than-the-step")
            )

    def refuse_less(self, history: Any, ledger: Any, ran: int, counted: float) -> None:
        """Raises if a step of an execution had less noise than is counted.

        Args:
          history: the optimizer's history.
          ledger: gets the steps with their true noise, before this raises.
          ran: the number of steps.
          counted: the counted noise multiplier.

        Raises:
          PrivacyMismatchError: if a step had less noise.
        """
        used = history.take_least_noise() if self.scheduled else math.inf
        if used < counted * (1 - 1e-6):
            ledger.add_unseen(ran, noise_multiplier=used, holder=history.identity)
            ledger.save()
            raise PrivacyMismatchError(
                f"A step ran with noise_multiplier {used:g}, but the schedule's "
                f"number, which is accounted, is {counted:g}: the training step set "
                "optimizer.iterations, on which the schedule depends. Do not set it. "
                "(The step is counted with its true noise.)"
                + see("schedules-that-read-more-than-the-step")
            )

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
        """The least noise multiplier of `steps` steps from `start` on."""
        if not self.scheduled:
            return self.at(start)
        return min(self.at(step) for step in range(start, start + steps))

    def segments(
        self, start: int, steps: int, width: int = 1
    ) -> Iterator[tuple[float, int]]:
        """Stretches of equal noise: (noise multiplier, number of steps).

        Args:
          start: the first step.
          steps: the number of steps.
          width: the number of steps in an execution. Each step counts with the least
            noise of all executions that could contain the step.
        """

        def widest(step):
            first = max(0, step - width + 1)
            return self.least(first, step + width - first)

        found = (widest(step) for step in range(start, start + steps))
        for z, group in itertools.groupby(found):
            yield z, len(list(group))


def private_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer if it has the attributes that accounting needs.

    Raises:
      ValueError: if an attribute is missing.
    """
    missing = [a for a in _OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, a)]
    if missing:
        raise ValueError(
            "PrivacyBudget needs a private optimizer, such as dpc.keras.DPSGD(...) or "
            "plan.optimizer(dpc.keras.DPAdam, learning_rate=1e-3) of a PrivacyPlan; "
            f"{type(optimizer).__name__} has no {', '.join(missing)}."
        )
    return optimizer
