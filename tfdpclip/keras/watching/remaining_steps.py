"""The number of steps that a privacy budget still allows, and unseen earlier steps."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import dp_accounting

from tfdpclip._docs import see
from tfdpclip.accounting import accountants, search
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.keras.watching.noise_plan import NoisePlan
from tfdpclip.sampling.base import SamplingScheme

# Seconds after which an execution no longer runs Python, which would wait for another
# thread's Python.
_SOON = 0.004


class RemainingSteps:
    """Computes the steps that fit into a budget, on top of the ledger's steps.

    Args:
      ledger: the ledger of spent steps.
      noise: the optimizer's noise multiplier for each step.
      scheme: the sampling scheme of the coming steps.
      unit: the unit that the coming steps clip.
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
        self._ahead: threading.Timer | None = None

    def compute_ahead(self) -> None:
        """Begins `spent` of all reserved steps, beside the execution of these steps.

        The accountant remembers the result, for which an epoch would wait otherwise.
        The ledger is read here, since reading it reserves the draws of a loop.
        """
        if self._ledger.accountant == "pld":
            event = [self._ledger.event()]
            self._ahead = threading.Timer(_SOON, self._remember_bound, event)
            self._ahead.daemon = True
            self._ahead.start()

    def _remember_bound(self, event: dp_accounting.DpEvent) -> None:
        with contextlib.suppress(Exception):  # `spent` raises the same error.
            coarseness = accountants.quick_coarseness(event, "pld")
            accountants.epsilon(event, self._ledger.delta, "pld", coarseness)

    def spent(self, exactly: bool) -> float:
        """Epsilon so far, exactly or as an upper bound that is quick to compute.

        Args:
          exactly: whether to refuse a bound. A bound above the budget is never used.
        """
        if not exactly:
            if self._ahead is not None:
                self._ahead.cancel()  # If it has not begun.
                self._ahead.join()
            bound = self._ledger.epsilon(quick=True)
            if bound <= self._epsilon:
                return bound
        return self._ledger.epsilon()

    def steps(self, planned: int | None, start: int, width: int) -> float:
        """The number of further steps that fit.

        Args:
          planned: the planned number of steps, which ends the search; None if unknown.
          start: the optimizer's step counter.
          width: the largest number of steps that an execution ends.
        """

        def after(more: int, coarseness: float = 1.0) -> float:
            return self._epsilon_after(more, start, width, coarseness)

        if self._epsilon == math.inf:
            return math.inf
        if planned:
            quick = not self._noise.scheduled
            if (
                quick
                and self._ledger.epsilon(more=planned, quick=True) <= self._epsilon
            ):
                return planned
            if after(planned) <= self._epsilon:
                return planned
        if self._noise.scheduled:
            return search.most_steps(after, self._epsilon)
        return self._ledger.steps_left(self._epsilon)

    def _epsilon_after(self, more, start, width, coarseness):
        """Epsilon after `more` steps, each with the noise planned for it."""
        ledger = self._ledger
        if not self._noise.scheduled:
            return ledger.epsilon(more=more)
        # The first step of an execution is unknown, so its least noise counts.
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

    def refusal(
        self, left: float, wanted: int, unseen: int, z: float, by_plan: bool
    ) -> str:
        """The error message if not even the first execution fits.

        Args:
          left: the steps that fit.
          wanted: the steps of the first execution.
          unseen: the number of steps that ran outside the ledger's sight.
          z: the noise multiplier.
          by_plan: whether a plan made the optimizer, and so the noise multiplier.
        """
        made, more = "PrivacyBudget", f"raise noise_multiplier ({z:g})"
        if by_plan:
            made, more = "PrivacyPlan", "give the plan the epochs of all calls of fit"
        message = (
            f"The privacy budget epsilon = {self._epsilon:g} at delta = "
            f"{self._ledger.delta:g} leaves room for {left} steps, and the first "
            f"execution needs {wanted}. Spent so far: {self._ledger.epsilon():.4g} in "
            f"{self._ledger.steps} steps."
        )
        if unseen:
            message += (
                f" {unseen} of them ran without this ledger, and count as full "
                f"batches: keep one ledger for all calls of fit, {made}(..., "
                "ledger=path), and train with the callback only."
                + see("steps-that-are-not-counted")
            )
        if z == 0:
            return f"{message} noise_multiplier is 0, which is not private."
        if self._ledger.steps and not unseen:
            message += (
                " If this job was started again after its last epoch, the run is "
                "finished: load the model that it saved, and train only "
                "'if not plan.finished:'."
            )
        if left:
            return f"{message} To run the rest, lower steps_per_execution."
        message += f" For more steps, {more}, or give {made} a larger epsilon."
        return message + see("a-spent-budget")


def count_unseen(ledger: Ledger, history: Any, optimizer: Any, noise: NoisePlan) -> int:
    """Counts the steps behind an optimizer that a ledger does not know.

    Args:
      ledger: the ledger, to which the steps are added.
      history: the optimizer's history.
      optimizer: the optimizer.
      noise: the optimizer's noise multiplier for each step.

    Returns:
      The number of added steps.
    """
    total, counted = 0, ledger.counted
    for name, part in history.known_steps().items():
        unseen = part.steps - counted.get(name, 0)
        z = part.noise_multiplier
        if unseen > 0:
            if z is None:
                z = noise.least(0, max(1, int(optimizer.iterations.numpy())))
            ledger.add_unseen(unseen, noise_multiplier=z, unit=part.unit, holder=name)
            total += unseen
    own = history.identity
    if counted.get(own, 0) > history.releases:
        # Some reserved steps were counted and did not run. If the optimizer takes them
        # later, outside the ledger's sight, they count again.
        counted[own] = history.releases
    return total
