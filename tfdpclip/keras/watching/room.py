"""How many steps a privacy budget has room for, and which it has not seen."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting

from tfdpclip._docs import see
from tfdpclip.accounting import accountants, search
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.keras.watching.noise_plan import NoisePlan
from tfdpclip.sampling.base import SamplingScheme


class Room:
    """Counts the steps that fit into a budget, as the ledger stands.

    Args:
      ledger: what is spent.
      noise: the optimizer's noise by its steps.
      scheme: what draws the steps to come.
      unit: what they clip.
      epsilon: the budget.
    """

    def __init__(
        self,
        ledger: Ledger,
        noise: NoisePlan,
        scheme: SamplingScheme,
        unit: str,
        epsilon: float,
    ):
        self._ledger = ledger
        self._noise = noise
        self._scheme = scheme
        self._unit = unit
        self._epsilon = epsilon

    def spent(self, exactly: bool) -> float:
        """Epsilon so far, as the ledger says, or a bound that nobody waits for.

        Args:
          exactly: whether a bound will not do. One above the budget never does.
        """
        if not exactly:
            bound = self._ledger.epsilon(quick=True)
            if bound <= self._epsilon:
                return bound
        return self._ledger.epsilon()

    def steps(self, planned: int | None, start: int, width: int) -> float:
        """How many more steps fit.

        Args:
          planned: as many as are wanted, if that is known: no more are looked for.
          start: the optimizer's step counter.
          width: the most steps that an execution ends.
        """

        def after(more: int, coarseness: float = 1.0) -> float:
            return self._epsilon_after(more, start, width, coarseness)

        if self._epsilon == math.inf:
            return math.inf
        if planned and after(planned) <= self._epsilon:
            return planned
        if self._noise.scheduled:
            return search.most_steps(after, self._epsilon)
        return self._ledger.steps_left(self._epsilon)

    def _epsilon_after(self, more, start, width, coarseness):
        """Epsilon after `more` steps, each with the noise planned for it."""
        ledger = self._ledger
        if not self._noise.scheduled:
            return ledger.epsilon(more=more)
        # Where an execution begins is not known; its least noise is what counts.
        event = dp_accounting.ComposedDpEvent(
            [
                ledger.event(),
                *(
                    self._scheme.event(z, steps, unit=self._unit)
                    for z, steps in self._noise.segments(start, more, width)
                ),
            ]
        )
        return accountants.epsilon(event, ledger.delta, ledger.accountant, coarseness)

    def refusal(self, left: float, wanted: int, unseen: int, z: float) -> str:
        """What to say if not even the first execution fits.

        Args:
          left: the steps that fit.
          wanted: those of the first execution.
          unseen: how many ran where the ledger did not see them.
          z: the noise multiplier.
        """
        message = (
            f"The privacy budget epsilon = {self._epsilon:g} at delta = "
            f"{self._ledger.delta:g} leaves room for {left} steps, and the first "
            f"execution needs {wanted}. Spent so far: {self._ledger.epsilon():.4g} in "
            f"{self._ledger.steps} steps."
        )
        if unseen:
            message += (
                f" {unseen} of them ran where the ledger did not see them, and "
                "count as full batches: keep one ledger for all calls of fit, "
                "PrivacyBudget(..., ledger=path), and train with the callback only."
                + see("steps-that-are-not-counted")
            )
        if z == 0:
            return f"{message} noise_multiplier is 0, which is not private."
        if left:
            return f"{message} Lower steps_per_execution."
        return (
            f"{message} Raise noise_multiplier ({z:g}) or the budget: to a "
            "PrivacyPlan, say the epochs of all calls of fit, or a larger epsilon."
            + see("a-spent-budget")
        )


def count_unseen(ledger: Ledger, history: Any, optimizer: Any, noise: NoisePlan) -> int:
    """Counts the steps behind an optimizer that a ledger does not know.

    Args:
      ledger: what counts them.
      history: the optimizer's.
      optimizer: the optimizer.
      noise: its noise by its steps.

    Returns:
      How many there were.
    """
    total, counted = 0, ledger.counted
    for name, part in history.known().items():
        unseen = part.steps - counted.get(name, 0)
        z = part.noise_multiplier
        if unseen > 0:
            if z is None:
                z = noise.least(0, max(1, int(optimizer.iterations.numpy())))
            ledger.add_unseen(unseen, noise_multiplier=z, unit=part.unit, holder=name)
            total += unseen
    own = history.identity
    if counted.get(own, 0) > history.releases:
        # Reserved steps that did not run after all, and were counted: if they run now,
        # where nobody looks, they count again.
        counted[own] = history.releases
    return total
