"""A privacy budget for federated rounds."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.statement import PrivacyStatement

if TYPE_CHECKING:
    from tfdpclip.sampling import Cohorts


class BudgetExceededError(RuntimeError):
    """The next round would exceed the privacy budget."""


class RoundBudget:
    """Draws the cohorts of federated rounds and stops before a budget is exceeded.

        cohorts = Poisson(0.01).cohorts(client_ids)
        budget = RoundBudget(2.0, 1e-6, cohorts, noise_multiplier=1.0)
        while budget.rounds_left:
            with budget.round() as cohort:
                state = process.next(state, [data[c] for c in cohort]).state
        print(budget.statement)

    *Formal guarantees*

    * The cohort that a round gets is drawn by the scheme that is accounted.
    * A round enters the ledger before it runs, and counts however it ends.
    * The cohort is a function of the number of rounds that were begun, not of a round
      number of the caller's: a round that is run again, after a crash say, has a fresh
      cohort. (Noise drawn twice for one cohort would cost more than two rounds.)
    * Without a ledger file, what an earlier process spent is not known.

    Args:
      epsilon: The budget. Infinity only reports.
      delta: In (0, 1).
      cohorts: `scheme.cohorts(client_ids)`.
      noise_multiplier: z, the number the accountant gets.
      unit: What is clipped; "client".
      clip: The clip rule, in words.
      accountant: `"pld"` or `"rdp"`.
      ledger: A `Ledger`, or the path of its file (continued if it exists).
      allow_change: Whether settings may differ from the ledger's last phase.

    Attributes:
      cohorts: What draws the cohorts.

    Raises:
      ValueError: If an argument is out of range.
      PrivacyMismatchError: If the ledger was kept under other settings.

    >>> from tfdpclip.sampling import Poisson
    >>> cohorts = Poisson(0.5).cohorts(list(range(100)))
    >>> budget = RoundBudget(5.0, 1e-5, cohorts, noise_multiplier=4.0)
    >>> with budget.round() as cohort:
    ...     0 < len(cohort) < 100
    True
    >>> budget.rounds
    1
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        cohorts: Cohorts,
        noise_multiplier: float,
        *,
        unit: str = "client",
        clip: object = "",
        accountant: str = "pld",
        ledger: Ledger | str | os.PathLike[str] | None = None,
        allow_change: bool = False,
    ):
        self.epsilon_budget = _arguments.target_epsilon(epsilon)
        if not callable(cohorts) or not hasattr(cohorts, "scheme"):
            raise ValueError(
                "cohorts must come from a sampling scheme, such as "
                f"Poisson(0.01).cohorts(client_ids); got {_arguments.shown(cohorts)}."
            )
        _arguments.boolean("allow_change", allow_change)
        self.cohorts = cohorts
        self.ledger = Ledger.open(ledger, delta, accountant)
        self.ledger.begin(
            noise_multiplier=noise_multiplier,
            sampling=cohorts,
            unit=unit,
            clip=str(clip),
            change=allow_change,
        )

    @property
    def rounds(self) -> int:
        """Rounds begun so far."""
        return self.ledger.steps + self.ledger.reserved

    @property
    def rounds_left(self) -> int:
        """How many further rounds the budget allows."""
        return self.ledger.steps_left(self.epsilon_budget)

    @property
    def epsilon(self) -> float:
        """What has been spent."""
        return self.ledger.epsilon()

    @property
    def statement(self) -> PrivacyStatement:
        """What was spent, with everything the number means nothing without."""
        return self.ledger.statement()

    @contextlib.contextmanager
    def round(self) -> Iterator[list[Any]]:
        """One round: gives its cohort, the ids drawn, and counts the round.

        Raises:
          BudgetExceededError: If the round would exceed the budget; nothing is drawn.
        """
        limited = self.epsilon_budget != math.inf
        if limited and self.ledger.epsilon(more=1) > self.epsilon_budget:
            raise BudgetExceededError(
                f"Another round would exceed epsilon = {self.epsilon_budget:g} at "
                f"delta = {self.ledger.delta:g} ({self.rounds} rounds cost "
                f"{self.epsilon:.4g}). Raise the budget or the noise multiplier."
                + see("a-spent-budget")
            )
        number = self.rounds
        with self.ledger.step():
            yield self.cohorts(number)
