"""A privacy budget for federated rounds."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._notes import NOTES
from tfdpclip.accounting import round_noise
from tfdpclip.accounting.accountants import ACCOUNTANTS
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.noise_place import NoisePlace, place_of
from tfdpclip.accounting.phases import PrivacyMismatchError, refuse_other_use
from tfdpclip.accounting.statement import PrivacyStatement

if TYPE_CHECKING:
    from tfdpclip.sampling import Cohorts


class _Block:
    """A block of `RoundBudget.round`: its cohort's size, and the rounds that ran."""

    def __init__(self, clients: int):
        self.clients, self.executions = clients, 0
        # Whether a context that counts was there.
        self.counted = bool(NOTES.counting_contexts)


_UNCOUNTED = (
    "each block of round() ran one round, with its cohort: the context that ran the "
    "rounds is not of this library, and does not count"
)


@contextlib.contextmanager
def counts_executions() -> Iterator[None]:
    """Declares that a context inside calls `execution` for each computation."""
    NOTES.counting_contexts.append(None)
    for block in NOTES.round_blocks:
        block.counted = True
    try:
        yield
    finally:
        NOTES.counting_contexts.pop()


@contextlib.contextmanager
def execution(clients: int | None) -> Iterator[None]:
    """Counts the run of a computation on clients' data, in the block around it.

    Args:
      clients: The number of clients; None if the computation has no clients' data.

    Raises:
      PrivacyMismatchError: If a computation ran in this block, or the clients are more
        than the cohort. Nothing has run then.
    """
    if not NOTES.round_blocks or clients is None:
        yield
        return
    block, problem = NOTES.round_blocks[-1], ""
    if block.executions:
        problem = "A second computation on clients' data would run in one round."
    elif clients > block.clients:
        problem = f"{clients} clients would take part in a round whose cohort has "
        problem += f"{block.clients}."
    if problem:
        raise PrivacyMismatchError(
            f"{problem} A block of RoundBudget.round() counts one round of its cohort. "
            "Write: with budget.round() as cohort: state = process.next(state, "
            "[data[c] for c in cohort]).state, and evaluate outside of the block."
            + see("two-numbers-for-one-noise")
        )
    block.executions += 1
    try:
        yield
    except BaseException:
        # Nothing was released, and the computation may be called again.
        block.executions -= 1
        raise


class BudgetExceededError(RuntimeError):
    """The next round would exceed the privacy budget."""


class RoundBudget:
    """Draws the cohorts of federated rounds and stops before a budget is exceeded.

        aggregator = dpc.federated.clipped_mean(1.0, clients_per_round=100)
        cohorts = Poisson(0.01).cohorts(client_ids)
        budget = RoundBudget(2.0, 1e-6, cohorts, aggregator=aggregator)
        while budget.rounds_left:
            with budget.round() as cohort:
                state = process.next(state, [data[c] for c in cohort]).state
        print(budget.statement())

    *Formal guarantees*

    * A round's cohort is drawn by the scheme of the accounting.
    * The accounting uses the noise of `aggregator`, of any kind. With distributed
      noise the server knows the cohorts, so that sampling does not lower the cost:
      neighbours differ in the contribution of one client.
    * A round enters the ledger before it runs, and counts however it ends.
    * In `dpc.federated.local_context` and `remote_context`, a second computation on
      clients' data in the block of a round is refused, and so are more clients than
      the cohort. With another context the statement says that this was not seen.
    * The cohort is a function of the number of rounds that were begun, not of a round
      number of the caller's: a round that is run again, after a crash say, has a fresh
      cohort. (Noise drawn twice for one cohort would cost more than two rounds.)
    * Without a ledger file, the cost of earlier processes is not included.
    * With correlated noise, a round gets the state to continue from, and runs only if
      the round before made that state: each state is used once, in order, with the
      noise of the accounting. The ledger keeps the states' names, so that this holds
      across processes. A state with new noise (`process.initialize()`,
      `dpc.federated.split_noise`) begins a new matrix, once, which is counted as a
      new matrix. (If a round is run twice after this check, the second run is not seen.
      It has fresh draws, and costs at most one more matrix.)
    * Rounds count with the settings of this budget, even if a second budget, or
      `PrivateStatistics`, has counted in the ledger since the last round. If rounds
      depend on each other, by their noise or their cohorts, no second budget may count
      in the ledger between them; and noise continues only with the same clients in the
      same order.
    * Two budgets with the same cohorts have independent draws, unless seeded.

    Args:
      epsilon: The budget. Infinity only reports.
      delta: In (0, 1).
      cohorts: `scheme.cohorts(client_ids)`.
      aggregator: The result of `dpc.federated.clipped_mean`, which adds the noise.
      accountant: `"pld"` or `"rdp"`. By default `"pld"`; with distributed noise
        `"rdp"`, the only accountant with a bound.
      ledger: A `Ledger`, or the path of its file (continued if it exists).
      allow_change: Whether settings may differ from the ledger's last phase.
      continued: For restored correlated noise: the number of rounds it has made
        (`NoiseMemory.steps`). None if a new matrix begins.

    Attributes:
      cohorts: The cohorts, with the draws of this budget.

    Raises:
      ValueError: If an argument is out of range.
      PrivacyMismatchError: If the ledger was kept under other settings, the noise is
        made for a different scheme, or restored noise is not at the ledger's position.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        cohorts: Cohorts,
        aggregator: Any,
        *,
        accountant: str | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        allow_change: bool = False,
        continued: int | None = None,
    ):
        self.epsilon_budget = _arguments.target_epsilon(epsilon)
        if not callable(cohorts) or not hasattr(cohorts, "scheme"):
            raise ValueError(
                "cohorts must come from a sampling scheme, such as "
                f"Poisson(0.01).cohorts(client_ids); got {_arguments.shown(cohorts)}."
            )
        _arguments.boolean("allow_change", allow_change)
        if hasattr(cohorts, "_for_one_run"):
            cohorts = cohorts._for_one_run()
        self.cohorts = cohorts
        noise = round_noise.noise_of_aggregator(aggregator)
        #: The aggregator that adds the noise.
        self.aggregator = aggregator
        self._noise, needed = aggregator.round_noise, aggregator.accountant
        settings, assumed = aggregator.of_a_phase(cohorts)
        _arguments.optional(_arguments.choice, "accountant", accountant, ACCOUNTANTS)
        if needed is not None and accountant not in (None, needed):
            raise ValueError(
                f"accountant must be {needed!r} with noise='distributed', got "
                f"{_arguments.shown(accountant)}: for sums of discrete noise, only "
                "Renyi divergences are bounded. Leave accountant out."
            )
        self.ledger = Ledger.open(ledger, delta, accountant or needed or "pld")
        of_noise = round_noise.settings_of_noise(noise, cohorts.scheme)
        self._phase = dict(settings, unit="client", **of_noise)
        #: The correlated noise of the accounting; None for independent noise.
        self.noise = noise
        self._horizon = self._phase.get("horizon")
        # A digest of the clients of one matrix, in their order.
        self._order = None if noise is None else getattr(cohorts, "order", None)
        if continued is not None:
            self._refuse_other_order()
        self.ledger.begin(change=allow_change, continued=continued, **self._phase)
        if hasattr(cohorts, "_begin_run"):
            cohorts._begin_run(self.rounds)
        self._counted_in = self.ledger.phases[-1]
        for text in assumed:
            self.ledger.assume(text)
        #: The ledger's position after this budget's last round.
        self._place = self.ledger.place

    @property
    def rounds(self) -> int:
        """Rounds begun so far."""
        return self.ledger.steps + self.ledger.reserved

    @property
    def rounds_left(self) -> int:
        """How many further rounds the budget allows."""
        self._return_to_phase()
        return self.ledger.steps_left(self.epsilon_budget)

    @property
    def epsilon(self) -> float:
        """The epsilon of all rounds begun so far."""
        return self.ledger.epsilon()

    def statement(self) -> PrivacyStatement:
        """Returns the privacy spent, with all facts that a privacy claim needs."""
        return self.ledger.statement()

    @contextlib.contextmanager
    def round(self, state: Any = None) -> Iterator[list[Any]]:
        """Counts one round, and yields its cohort: the ids of the drawn clients.

        Args:
          state: With correlated noise, the server's state that the round starts from.

        Raises:
          BudgetExceededError: If the round would exceed the budget; no cohort is drawn.
          PrivacyMismatchError: If the state's noise is not the noise of this round, or
            processes were made here, and none has the noise of `aggregator`.
          ValueError: If correlated noise has no state.
        """
        self._refuse_other_aggregators()
        self._return_to_phase()
        place = self._follow(state)
        limited = self.epsilon_budget != math.inf
        if limited and self.ledger.epsilon(more=1) > self.epsilon_budget:
            raise BudgetExceededError(
                f"Another round would exceed epsilon = {self.epsilon_budget:g} at "
                f"delta = {self.ledger.delta:g} ({self.rounds} rounds cost "
                f"{self.epsilon:.4g}). Raise the budget or the noise multiplier."
                + see("a-spent-budget")
            )
        number = self.rounds
        if place is not None:
            self.ledger.phases[-1].trail.use(place, self._order)
        self.ledger.reserve()
        try:
            cohort = self.cohorts(number)
            with self._block(len(cohort)):
                yield cohort
        finally:
            alone = self.ledger.place == self._place
            self.ledger.record()
            if alone:
                self._place = self.ledger.place

    @contextlib.contextmanager
    def _block(self, clients: int) -> Iterator[None]:
        """Counts the computations of a block, where a context of the library runs."""
        block = _Block(clients)
        NOTES.round_blocks.append(block)
        try:
            yield
        finally:
            NOTES.round_blocks.remove(block)
            if not block.counted:
                self.ledger.assume(_UNCOUNTED)

    def _return_to_phase(self) -> None:
        """Makes the next round count with this budget's settings.

        Raises:
          PrivacyMismatchError: If rounds depend on each other, and the ledger has new
            entries.
        """
        if self._horizon is not None or not self.cohorts.scheme.independent_steps:
            refuse_other_use(
                self.ledger,
                self._place,
                "This ledger has new entries since the last round of this budget, for "
                "example of a second budget",
                "Use one budget for rounds that depend on each other.",
            )
        elif self.ledger.phases[-1] is not self._counted_in:
            # Not a change of settings: both have been in the ledger before.
            self.ledger.begin(change=True, **self._phase)
            self._counted_in = self.ledger.phases[-1]

    def _refuse_other_aggregators(self) -> None:
        """Raises if processes were made here, and none of an aggregator like this."""
        if not NOTES.round_noises or self._noise in NOTES.round_noises:
            return
        raise PrivacyMismatchError(
            f"aggregator: this budget counts {self._noise}, and no process was made of "
            "an aggregator with this noise. The processes that were made here have "
            f"{'; '.join(map(str, NOTES.round_noises))}. Give both one aggregator: "
            "aggregator = clipped_mean(...); process = build_...(model_aggregator="
            "aggregator); RoundBudget(..., aggregator=aggregator)."
            + see("two-numbers-for-one-noise")
        )

    def _follow(self, state: Any) -> NoisePlace | None:
        """Returns the position of a state's noise, after checking order and reuse."""
        place = place_of(state)
        if self._horizon is None:
            if place is not None:
                raise PrivacyMismatchError(
                    "The state has correlated noise, and this budget's aggregator has "
                    "none: give the process and the budget one aggregator."
                )
            return None
        if place is None:
            raise ValueError(
                "state must be given: the server's state, with correlated noise. Write "
                "with budget.round(state) as cohort. Each state is used for one round."
            )
        if not place.is_of(self.noise, self._noise.noise_multiplier):
            raise PrivacyMismatchError(
                "The state comes from an aggregator whose correlated noise (matrix, "
                "rounds, scheme or noise_multiplier) differs from this budget's: give "
                "the process and the budget one aggregator. To go on with another "
                "noise_multiplier, in a new matrix: state, _ = "
                "dpc.federated.split_noise(state)."
            )
        phase = self.ledger.phases[-1]
        made = phase.runs[-1] + self.ledger.reserved
        ours = place.step == made % self._horizon
        wrong = None
        if place.step == 0:
            if any(phase.trail.began_with(place) for phase in self.ledger.phases):
                wrong = "has begun a matrix before"
        elif not ours:
            wrong = f"this budget is at {made % self._horizon} of its matrix"
        elif not phase.trail.follows(place):
            wrong = "does not come from the round before"
        if wrong:
            raise PrivacyMismatchError(
                f"The state's noise has made {place.step} rounds and {wrong}: a state "
                "is used for one round, and the next round continues from its result. "
                "To begin a new matrix, which is counted: state, _ = "
                "dpc.federated.split_noise(state). To continue restored noise: "
                "RoundBudget(..., continued=memory.steps), before the first round."
            )
        if not ours:
            # A new matrix, with new noise.
            self.ledger.begin(**self._phase)
            self._place = self.ledger.place
        return place

    def _refuse_other_order(self) -> None:
        """Raises if the cohorts may not know the clients of earlier rounds."""
        last = self.ledger.phases[-1] if self.ledger.phases else None
        if last is None or not (last.runs and last.runs[-1] + self.ledger.reserved):
            return  # No client took part; `begin` refuses to continue without a run.
        state = getattr(self.cohorts, "state", None)
        if state is not None and state["next"] != self.rounds:
            raise PrivacyMismatchError(
                f"continued: the ledger has {self.rounds} rounds, but the cohorts know "
                f"only {state['next']}, so a client could come again too early. "
                "Give AvailableCohorts their last state, or begin a new matrix, "
                "continued=None."
            )
        if self._order is None or last.trail.order != self._order:
            raise PrivacyMismatchError(
                "continued: the ledger has rounds of different clients, or of the same "
                "clients in a different order, so a client could come again too early. "
                "Give the ids (text or numbers) as before, AvailableCohorts their last "
                "state; or begin a new matrix, continued=None."
            )
