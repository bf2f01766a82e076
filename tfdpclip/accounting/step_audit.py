"""Compares the draws and the private steps of a loop with the ledger's count."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from tfdpclip._docs import see
from tfdpclip._notes import NOTES, Draws, ReleaseSettings, Use
from tfdpclip.accounting.phases import TWO_NETWORKS, PrivacyMismatchError
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import FullBatch, Poisson

_LEFT_OUT = (
    "the {} draws that the loop took and made no step of were left out for public "
    "reasons, not by their records (each is counted as a step)"
)

_OTHER_BATCHES = (
    "Begin with the batches of the loop: ledger.begin(..., sampling=batches)."
    + see("batches-drawn-another-way")
)
_TWO_ORDERS = (
    "The steps of one matrix of correlated noise used elements of two objects that "
    "draw batches, so that two steps of a record came closer to each other than the "
    "noise allows.",
    "Make the batches once, before the loop over the epochs: "
    "batches = scheme.batches(data)." + see("two-steps-on-one-draw"),
)


def _noise_in_words(noise_multiplier: float, correlated: bool) -> str:
    kind = "correlated noise" if correlated else "noise"
    return f"{kind} of multiplier {noise_multiplier:g}"


def _covers(counted: Any, drawn: Any) -> bool:
    """Whether steps of a scheme cost at most the steps of the counted scheme."""
    if not isinstance(counted, SamplingScheme):
        return True
    if counted.accounts_for(drawn) or counted == drawn.at_worst():
        return True
    # Batches of a different capacity cut different draws, at next to no cost.
    if isinstance(counted, Poisson) and isinstance(drawn, Poisson):
        return drawn.rate <= counted.rate * (1 + 1e-9)
    return False


class StepAudit:
    """The draws and the private steps since a phase began, beside the ledger's count.

    The ledger's count is the epsilon. The audit finds a count that is not true of the
    loop, raises, and has the ledger count what ran, at its worst.

    Args:
      ledger: the `Ledger`, after the phase began.
      sampling: the scheme, or the batches, of the phase; None before a phase.
      usable: of each object that draws, the elements at hand that an earlier phase did
        not use.

    Attributes:
      waiting: the reserved steps of draws that the loop took, and has made no step of.
    """

    def __init__(
        self,
        ledger: Any,
        sampling: Any = None,
        usable: Mapping[Draws, int] | None = None,
    ):
        self._ledger, usable = ledger, usable or {}
        # Steps of `step()` blocks: declared, and counted by optimizers.
        self._compared = 0, 0
        # The private steps in blocks; and of each object that draws, the elements that
        # these steps cannot have used.
        self._made, self._spent = 0, NOTES.elements_spent()
        # The releases of each optimizer that no ledger had counted at the beginning;
        # and the optimizers with steps in blocks.
        self._uncounted = {} if sampling is None else NOTES.uncounted_releases()
        self._in_blocks: set[str] = set()
        # Whether a block is under way, and the steps recorded elsewhere.
        self._in_block, self._recorded = False, 0
        # The steps that all ledgers had recorded by their number alone.
        self._by_number = NOTES.recorded_by_number
        # How many steps the batches of this run drew, if their steps depend on each
        # other; the number before the run; and the steps that did not run.
        self._drawn: Callable[[], int] | None = getattr(sampling, "_steps_drawn", None)
        self._drawn_before, self._skipped = 0, 0
        if self._drawn is not None:
            self._drawn_before = self._drawn() - ledger.phases[-1].runs[-1]
        # The drawer of the run's elements, where their steps depend on each other.
        self._order: Any = getattr(sampling, "_order", None)
        # The objects that draw for the run's loop; how many elements each object had
        # drawn; and the steps recorded since.
        self._loop_draws: set[Draws] = set()
        self._drawn_at_begin = {
            draws: (taken - usable.get(draws, 0), drawn - usable.get(draws, 0))
            for draws, (taken, drawn) in NOTES.elements_drawn().items()
        }
        self._ran = self.waiting = 0
        self._assumed = NOTES.assumptions_noted()
        if ledger.holder is None:
            self._note_draws(self._order)

    def note_recorded(self, steps: int) -> int:
        """Notes that the ledger recorded steps.

        Returns:
          How many steps of the run's order did not run, if draws depend on each other.
        """
        if not self._in_block:
            self._recorded += steps
            if self._ledger.holder is None:
                NOTES.recorded_by_number += steps
        self._ran += steps
        self.waiting = max(0, self.waiting - steps)
        if self._drawn is not None:
            # How far the run came in its order. Elements that the loop holds were
            # skipped only for now.
            phase, skipped = self._ledger.phases[-1], self._skipped
            ran = phase.runs[-1] - skipped
            self._skipped = max(0, self._drawn() - self._drawn_before - ran)
            phase.add_idle_steps(self._skipped - skipped)
        return self._skipped

    @contextlib.contextmanager
    def block(self, steps: int) -> Iterator[None]:
        """Compares the private steps of a block with the declared number of steps.

        Raises:
          PrivacyMismatchError: see `Ledger.step`.
        """
        before, uncounted = NOTES.releases_so_far(), NOTES.uncounted_releases()
        used = NOTES.elements_used
        self._in_block = True
        try:
            yield
        finally:
            self._in_block = False
        releases = NOTES.settings_since(before)
        for holder, made, _ in releases:
            self._in_blocks.add(holder)
            if holder != self._ledger.holder:
                self._ledger._credit_to(holder, made)
        for _, made, settings in releases:
            self._compare_settings(made, settings)
        made = NOTES.releases_since(before)
        self._compare_steps(steps, made)
        uses = NOTES.used_since(used)
        self._compare_draws([use.scheme for use in uses])
        self._compare_orders(uses)
        self._compare_number(made)
        for holder, _, settings in releases:
            self._compare_outside(holder, settings, uncounted)
        NOTES.raise_failures([holder for holder, _, _ in releases])

    def note_assumptions(self) -> None:
        """Has the ledger note the assumptions of the steps so far."""
        for text in NOTES.assumptions_since(self._assumed):
            self._ledger.assume(text)
        uncounted = NOTES.uncounted_releases()
        outside = (self._outside(holder, uncounted) for holder in self._in_blocks)
        if not self._in_block and any(outside):
            self._ledger.assume(
                "something ran that is not counted: steps of the loop's optimizer "
                "outside of ledger.step()"
            )

    def open_ends(self) -> list[str]:
        """The notes of a statement now; a step may be recorded after the run."""
        missing = self._unrecorded(NOTES.uncounted_releases())
        self.reserve_draws()
        notes = [_LEFT_OUT.format(self.waiting)] if self.waiting else []
        if missing:
            notes.append(
                f"something ran that is not counted: since ledger.begin(), {missing} "
                "steps of private optimizers were recorded by no ledger; "
                "ledger.record(n) takes their number, and ledger.step() compares it"
            )
        return notes

    def _note_draws(self, order: Any) -> None:
        """Counts the draws of a drawer, given by a weak reference, from `begin` on."""
        drawer = None if order is None else order()
        if drawer is not None and drawer.scheme.independent_steps:
            self._loop_draws.add(drawer.draws)

    def pass_on_draws(self) -> dict[Draws, int]:
        """Drops the reservations of draws at hand, which a new phase may use.

        Returns:
          The number of elements of these draws.
        """
        self.reserve_draws()
        usable = {draws: draws.usable for draws in self._loop_draws}
        left_out = max(0, self.waiting - sum(usable.values()))
        self._ledger.reserved -= self.waiting
        if left_out:
            self._ledger.phases[-1].runs[-1] += left_out
            self._ledger.assume(_LEFT_OUT.format(left_out), once=False)
        return {draws: steps * draws.pieces for draws, steps in usable.items()}

    def reserve_draws(self) -> None:
        """Reserves a step for each draw that the loop took and has not used."""
        none = 0, 0
        handed = sum(
            draws.handed_out(self._drawn_at_begin.get(draws, none))
            for draws in self._loop_draws
        )
        waiting = max(self.waiting, handed - self._ran)
        self._ledger.reserved += waiting - self.waiting
        self.waiting = waiting

    def _compare_draws(self, schemes: list[Any]) -> None:
        """Raises if a step used an element of a scheme that draws more often."""
        phase = self._ledger._current()
        uncovered = [one for one in schemes if not _covers(phase.sampling, one)]
        if not uncovered:
            return
        problem = (
            f"The ledger counts {phase.sampling.describe()}, and the step was of an "
            f"element drawn by {uncovered[0].describe()}."
        )
        self._refuse(problem, _OTHER_BATCHES, len(uncovered))

    def _compare_orders(self, uses: list[Use]) -> None:
        """Counts steps of a different order of the records as a separate run.

        Raises if the noise of the steps is correlated: no run bounds both orders.
        """
        for use in uses:
            if self._ledger.holder is None:
                self._note_draws(use.order)
            if use.scheme.independent_steps or use.order is self._order:
                continue
            phase, another = self._ledger._current(), self._order is not None
            if another and phase.noise is not None:
                # A step of this block is counted already.
                if (phase.runs[-1] - 1) % (phase.horizon or 1):
                    self._refuse(*_TWO_ORDERS)
            elif another:
                phase.runs[-1] -= 1
                phase.runs.append(1)
                phase.trail.begin()
            if phase.noise is None:
                phase.add_idle_steps(use.place)
            self._order, self._skipped, self._drawn = use.order, 0, None
            drawer = use.order()
            if use.step is not None and drawer is not None:
                self._drawn_before = use.step + 1 - phase.runs[-1]
                self._drawn = drawer.steps_drawn
            self._ledger.save()

    def _refuse(
        self,
        problem: str,
        advice: str,
        steps: int = 0,
        settings: ReleaseSettings | None = None,
    ) -> NoReturn:
        """Raises, after the ledger counted steps again, at their worst.

        Args:
          problem: the error; for steps of correlated noise, which no ledger can count
            at their worst, also an assumption.
          advice: says the lines to write.
          steps: the number of steps.
          settings: the settings of the steps; the phase's by default.
        """
        if self._ledger._current().noise is not None:
            self._ledger.assume(f"something ran that is not counted: {problem}")
        elif settings is None:
            self._ledger.add_unseen(steps)
        else:
            z = settings.noise_multiplier
            self._ledger.add_unseen(
                steps,
                noise_multiplier=z if z >= 0 and not settings.correlated else 0.0,
                unit=settings.unit,
            )
        self._ledger.save()
        raise PrivacyMismatchError(f"{problem} {advice}")

    def _outside(self, holder: str, uncounted: Mapping[str, int]) -> int:
        """How many steps an optimizer made since `begin` that nothing has counted."""
        made = uncounted.get(holder, 0) - self._uncounted.get(holder, 0)
        return max(0, made - self._recorded)

    def _compare_outside(
        self, holder: str, settings: ReleaseSettings, uncounted: Mapping[str, int]
    ) -> None:
        """Raises if the optimizer of a block had made steps outside of the blocks."""
        steps = self._outside(holder, uncounted)
        if not steps:
            return
        self._ledger._credit_to(holder, steps)
        problem = (
            f"The optimizer of this block made {steps} steps outside of ledger.step(), "
            "which were not counted."
        )
        advice = (
            "Write with ledger.step(): around every private step, a step that only "
            "tries the function, too." + see("steps-that-are-not-counted")
        )
        self._refuse(problem, advice, steps, settings)

    def _unrecorded(self, uncounted: Mapping[str, int]) -> int:
        """How many steps since `begin` no ledger has, if this one has bare numbers."""
        by_number = (
            self._recorded and self._ledger.holder is None and not self._in_blocks
        )
        if not by_number or self._ledger.phases[-1].unit == "client":
            return 0
        made = sum(
            max(0, now - self._uncounted.get(name, 0))
            for name, now in uncounted.items()
        )
        return max(0, made - (NOTES.recorded_by_number - self._by_number))

    def _compare_settings(self, made: int, settings: ReleaseSettings) -> None:
        """Raises if the releases of an optimizer have other settings than are counted.

        The releases are counted again, at their worst.
        """
        phase = self._ledger._current()
        if settings.seeded:
            self._ledger.note_seed()
        z, unit, correlated, _ = settings
        matrix = phase.noise is not None
        # In this form a NaN is less, too. A release trains nothing.
        less = not z >= phase.noise_multiplier * (1 - 1e-6) or bool(phase.release)
        wider = unit not in ("example", phase.unit)
        if not less and not wider and correlated == matrix:
            return
        problem = (
            f"The ledger counts {_noise_in_words(phase.noise_multiplier, matrix)} on "
            f"each clipped {phase.unit}, and the optimizer's step had "
            f"{_noise_in_words(z, correlated)} on each clipped {unit}."
        )
        advice = (
            "Begin with the settings of the optimizer: ledger.begin(..., "
            "noise_multiplier=optimizer.noise_multiplier, unit=optimizer.unit); for a "
            "schedule, with the number of every step, and change=True."
            + see("epsilon-that-means-something-else")
        )
        self._refuse(problem, advice, made, settings)

    def _compare_steps(self, declared: int, made: int) -> None:
        """Raises if declared steps differ from the steps that optimizers made."""
        before, made_before = self._compared
        declared, made = declared + before, made + made_before
        self._compared = declared, made
        if not made or declared == made:
            return
        self._compared = 0, 0
        if made > declared:
            self._ledger.add_unseen(made - declared, holder=self._ledger.holder)
        raise PrivacyMismatchError(
            f"ledger.step() counted {declared} steps, and private optimizers made "
            f"{made}. Write with ledger.step(): around one step of one optimizer, for "
            "every draw. An empty draw is a step of pure noise as well; skipping the "
            "step (if tf.reduce_sum(w) > 0) reveals that the draw was empty."
            + see("two-steps-on-one-draw")
        )

    def _compare_number(self, made: int) -> None:
        """Raises if the steps of the blocks are more than were drawn for them.

        Steps on data that no scheme of this library drew are not compared.

        Args:
          made: The private steps of a block.
        """
        phase = self._ledger._current()
        self._made += made
        if not made or isinstance(phase.sampling, FullBatch):
            return  # Further steps of all records are ordinary steps.
        covered = functools.partial(_covers, phase.sampling)
        drawn, uncovered = NOTES.steps_drawn(self._spent, covered)
        repeated = self._made - drawn
        if repeated <= 0 or not (drawn or uncovered):
            return
        problem = (
            f"Private optimizers made {self._made} steps, and {drawn} were drawn by "
            f"{phase.sampling.describe()}: {repeated} steps were made of "
        )
        if uncovered:
            problem += f"elements drawn by {uncovered[0].describe()}."
            advice = _OTHER_BATCHES
        else:
            problem += "draws that earlier steps had used."
            advice = (
                "Two steps of noise multiplier z on one draw are one step of z / "
                "sqrt(2). Take a new element for every step, and keep none for a "
                "second epoch: for x, y, w in batches."
                + TWO_NETWORKS
                + see("two-steps-on-one-draw")
            )
        self._made = drawn
        # The steps, and those that used their draws before, as if of all records.
        self._refuse(problem, advice, 2 * repeated)
