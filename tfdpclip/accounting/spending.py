"""What steps cost, in phases: epsilon, how many more fit a budget, the statement."""

from __future__ import annotations

import math

import dp_accounting

from tfdpclip import _arguments
from tfdpclip.accounting import accountants, search
from tfdpclip.accounting.phases import Phase
from tfdpclip.accounting.statement import PrivacyStatement
from tfdpclip.sampling import events
from tfdpclip.sampling.poisson import CappedPoisson

#: What the statement of a run assumes, and that of a search does not.
CHOICE = "a choice among several runs, or of settings, is not counted"


class Spending:
    """Phases, and what they cost together.

    Args:
      delta: In (0, 1).
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
    """

    def __init__(self, delta: float, accountant: str = "pld"):
        self.delta = _arguments.delta(delta)
        self.accountant = _arguments.choice(
            "accountant", accountant, accountants.ACCOUNTANTS
        )
        self.phases: list[Phase] = []
        self.notes: list[str] = []
        self.reserved = 0

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return sum(phase.steps for phase in self.phases)

    def event(self, more: int = 0) -> dp_accounting.DpEvent:
        """Returns everything that ran or is reserved, and `more` steps."""
        more = _arguments.integer("more", more)
        parts = [phase.event() for phase in self.phases[:-1]]
        if self.phases:
            parts.append(self.phases[-1].event(self.reserved + more))
        return dp_accounting.ComposedDpEvent(parts)

    def epsilon(
        self, delta: float | None = None, *, more: int = 0, quick: bool = False
    ) -> float:
        """Returns what was spent, or would be after `more` steps.

        Args:
          delta: Another delta than the ledger's.
          more: Further steps under the current settings.
          quick: Whether a bound will do that is a thousandth larger or so, and takes
            some hundredths of a second, not tenths.
        """
        delta = _arguments.delta(self.delta if delta is None else delta)
        event, coarseness = self.event(more), 1.0
        if quick:
            coarseness = accountants.quick_coarseness(event, self.accountant)
        return accountants.epsilon(event, delta, self.accountant, coarseness)

    def steps_left(self, epsilon: float) -> int:
        """Returns how many further steps a budget allows under current settings."""
        epsilon = _arguments.target_epsilon(epsilon)
        if epsilon == math.inf:
            return search.MAX_STEPS

        def total(more: int, coarseness: float = 1.0) -> float:
            return accountants.epsilon(
                self.event(more), self.delta, self.accountant, coarseness
            )

        return search.most_steps(total, epsilon)

    def statement(self) -> PrivacyStatement:
        """Returns the privacy statement of what ran.

        Raises:
          ValueError: If nothing was begun.
        """
        if not self.phases:
            raise ValueError("Nothing to state: no phase was begun.")
        not_private, assumptions = [], []
        if any(phase.noise_multiplier == 0 for phase in self.phases):
            not_private.append("noise_multiplier is 0")
        if any(phase.seeded for phase in self.phases):
            not_private.append("a seed was fixed, so noise or draws can be repeated")
        if self.accountant == "gdp" and any(p.sampling.amplified for p in self.phases):
            assumptions.append(
                "a central limit approximation of sampling, which is not a bound"
            )
        for phase in self.phases:
            assumptions += phase.sampling.assumptions()
            if phase.noise is not None:
                found = phase.sampling.participation(phase.horizon)
                assumptions.append(found.describe())
        if not all(phase.observed for phase in self.phases):
            assumptions.append(
                "records were drawn as declared; the draws were not observed"
            )
        if any(phase.unit == "group" and not phase.observed for phase in self.phases):
            assumptions.append(
                "the other records keep their groups when one record comes or goes"
            )
        assumptions += self.notes
        if self.reserved:
            assumptions.append(
                f"{self.reserved} steps that were begun but not finished are counted"
            )
        assumptions.append(CHOICE)
        first = self.phases[0]
        return PrivacyStatement(
            epsilon=self.epsilon(),
            delta=self.delta,
            relation=events.RELATION_NAMES[first.sampling.neighboring_relation],
            unit=" then ".join(_unique(_unit_words(p) for p in self.phases)),
            steps=self.steps + self.reserved,
            noise_multipliers=_unique(p.noise_multiplier for p in self.phases),
            sampling=_unique(p.sampling.describe() for p in self.phases),
            accountant=self.accountant,
            clips=_unique(p.clip for p in self.phases if p.clip),
            matrices=_unique(
                f"{p.noise.describe()}, anew every {p.horizon} steps"
                for p in self.phases
                if p.noise is not None
            ),
            assumptions=_unique(assumptions),
            not_private=tuple(not_private),
        )


def _unit_words(phase) -> str:
    if isinstance(phase.sampling, CappedPoisson):
        return "one person, whose examples are drawn and clipped one by one"
    return {
        "example": "one example, clipped on its own",
        "person": "one person, whose examples are clipped together",
        "client": "one client, its update clipped as a whole",
        "batch": "one example, clipped in the mean of its batch",
        "group": "one example, clipped together with its group",
    }[phase.unit]


def _unique(values) -> tuple:
    return tuple(dict.fromkeys(values))
