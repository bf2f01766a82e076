"""The noise multipliers of a run whose noise may follow a schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError

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

    def refuse_changed(self, step: int) -> None:
        """Raises if the schedule no longer gives what the optimizer's steps use.

        Args:
          step: for which to ask.

        Raises:
          PrivacyMismatchError: if it does not.
        """
        if not self.scheduled:
            return
        uses, gives = self._optimizer.noise_multiplier_at(step), self._schedule(step)
        if not abs(float(gives) - uses) <= 1e-4 * abs(uses):
            raise PrivacyMismatchError(
                f"The schedule of noise_multiplier gives {float(gives):g} for step "
                f"{step} now, and gave {uses:g} when the optimizer was made of it, "
                "which is what its steps use: it was changed since. Compile with a new "
                "optimizer, noise_multiplier=MySchedule(...) of the new numbers, and "
                "say that they differ: PrivacyBudget(..., allow_change=True)."
                + see("schedules-that-read-more-than-the-step")
            )

    def refuse_less(self, history: Any, ledger: Any, ran: int, counted: float) -> None:
        """Raises if a step of an execution had less noise than is counted for it.

        Args:
          history: the optimizer's.
          ledger: gets the steps, with what they had, before this raises.
          ran: how many.
          counted: the noise multiplier.

        Raises:
          PrivacyMismatchError: if one had.
        """
        used = history.take_least_noise() if self.scheduled else math.inf
        if used < counted * (1 - 1e-6):
            ledger.add_unseen(ran, noise_multiplier=used, holder=history.identity)
            ledger.save()
            raise PrivacyMismatchError(
                f"A step ran with noise_multiplier {used:g}, and what the schedule has "
                f"for it, and is accounted, is {counted:g}: something set "
                "optimizer.iterations, by which the schedule goes, in the training "
                "step. Leave it alone. (The step is counted with what it had.)"
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
