"""The ledger: records each step before it runs, and computes the cost."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dp_accounting

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting._ledger_file import FORMAT, LedgerFile
from tfdpclip.accounting.phases import (
    SKIPPED,
    TWO_NETWORKS,
    Phase,
    PrivacyMismatchError,
    are_other_people,
    begin_run,
    clip_assumptions,
)
from tfdpclip.accounting.releases import (
    ReleaseSettings,
    note_counted,
    note_recorded,
    raise_failures,
    recorded_by_number,
    releases_since,
    releases_so_far,
    settings_since,
    uncounted_releases,
)
from tfdpclip.accounting.statement import PrivacyStatement, Spending
from tfdpclip.correlated import NoiseMatrix
from tfdpclip.sampling import events
from tfdpclip.sampling import uses as element_uses
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import FullBatch, Poisson

# Other people may be meant: folds of a cross-validation in one ledger, for example.
_OTHER_PEOPLE = (
    "the ids of some phases (statistics, or another plan) tell people apart in another "
    "way than those of the first: who is one person in one phase, and several in "
    "another, is not covered as a whole"
)

_LEFT_OUT = (
    "the {} draws that the loop took and made no step of were left out for public "
    "reasons, not by their records (each is counted as a step)"
)


def _noise_in_words(noise_multiplier: float, correlated: bool) -> str:
    kind = "correlated noise" if correlated else "noise"
    return f"{kind} of multiplier {noise_multiplier:g}"


def _covers(counted: Any, drawn: Any) -> bool:
    """Whether steps that one scheme drew cost at most the steps of the counted one."""
    if not isinstance(counted, SamplingScheme):
        return True
    if counted.accounts_for(drawn) or counted == drawn.at_worst():
        return True
    # Batches of another capacity cut other draws, which costs next to nothing.
    if isinstance(counted, Poisson) and isinstance(drawn, Poisson):
        return drawn.rate <= counted.rate * (1 + 1e-9)
    return False


def _assumptions_of(sampling: Any) -> tuple[str, ...]:
    """The assumptions about data that were drawn, beyond those of the scheme."""
    found = getattr(sampling, "assumptions", ())
    return found if isinstance(found, tuple) else ()


class Ledger(Spending):
    """Records the steps that ran, in phases, and states what they cost.

    A plain object for any training loop:

        ledger = Ledger(delta=1e-5, path="run/privacy.json")
        ledger.begin(noise_multiplier=1.1, sampling=scheme, clip=rule)
        for _ in range(rounds):
            with ledger.step():
                ...  # one clipped, noised release
        print(ledger.statement())

    *Formal guarantees*

    * `epsilon()` composes all recorded and reserved steps of all phases.
    * A step is reserved, in the file, before it runs. If the process dies before the
      step is recorded, the next `Ledger.load` counts it: the ledger can err only
      towards a larger epsilon. Restoring an older checkpoint does not lower it.
    * A draw that eager code takes of the batches of `begin`, or of a step's batches,
      reserves its step: the number of steps is at least the number of draws, also if
      the loop leaves draws out.
    * In a loop of `step()` blocks, a step of the loop's optimizer outside of the blocks
      raises in the next block and is counted, or is named by the statement. Without
      blocks, the statement names steps of private optimizers that are more than were
      recorded.
    * Steps belong to the optimizer that ran them (`holder`): two optimizers add up in
      one ledger, independently of their step counters. Unobserved steps count as
      full batches (`add_unseen`).
    * A phase with changed settings is refused unless `change=True`; a phase under
      a different neighbouring relation is always refused.
    * The file is replaced atomically, and has a checksum: a damaged file is refused.
    * If a second process writes the file, or removes it, the next step raises before it
      runs: two runs that share a ledger would forget each other's steps.

    Args:
      delta: In (0, 1).
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      path: The ledger's file, next to the checkpoints; None to keep it in memory.

    Raises:
      ValueError: If an argument is out of range.
      FileExistsError: If `path` exists: continue it with `Ledger.load`.

    >>> from tfdpclip import sampling
    >>> ledger = Ledger(delta=1e-5)
    >>> ledger.begin(noise_multiplier=5.0, sampling=sampling.FullBatch())
    >>> ledger.record(1)
    >>> ledger.steps, round(ledger.epsilon(), 3)
    (1, 0.726)
    """

    def __init__(
        self,
        delta: float,
        accountant: str = "pld",
        path: str | os.PathLike[str] | None = None,
    ):
        super().__init__(delta, accountant)
        self._file = None if path is None else LedgerFile(path)
        if path is not None and os.path.lexists(path):
            raise FileExistsError(
                f"{path} exists. Continue it with Ledger.load({str(path)!r}); "
                "starting anew would forget what has been spent."
                + see("a-spent-budget")
            )
        self.counted: dict[str, int] = {}
        self._holder: str | None = None
        # Whether steps may be added to the last phase.
        self._open = True
        # Steps of `step()` blocks since `begin`: declared, and counted by optimizers.
        self._compared = 0, 0
        # The private steps in blocks since `begin`; and of each object that draws, the
        # elements that these steps cannot have used.
        self._made = 0
        self._spent = element_uses.elements_spent()
        # The releases that no ledger had counted, of each optimizer at `begin`; and the
        # optimizers with steps in blocks since.
        self._uncounted: dict[str, int] = {}
        self._in_blocks: set[str] = set()
        # Whether a block is under way, and the steps recorded since `begin` elsewhere.
        self._in_block, self._recorded = False, 0
        # The steps that all ledgers had recorded by their number alone at `begin`.
        self._by_number = 0
        # How many steps the batches of this run drew, if their steps depend on each
        # other; the number before the run; and the steps that did not run.
        self._drawn: Callable[[], int] | None = None
        self._drawn_before, self._skipped = 0, 0
        # The drawer of the run's elements, where their steps depend on each other.
        self._order: Any = None
        # The objects that draw for the run's loop; how many elements each object had
        # drawn at `begin`; the steps recorded since; and the reservations of draws.
        self._loop_draws: set[element_uses.Draws] = set()
        self._drawn_at_begin = element_uses.elements_drawn()
        self._ran, self._by_draws = 0, 0
        self._assumed = element_uses.assumptions_noted()
        # The person of each row, as of the first phase of this process about people.
        self._people: Any = None

    @classmethod
    def open(
        cls,
        ledger: Ledger | str | os.PathLike[str] | None,
        delta: float,
        accountant: str = "pld",
    ) -> Ledger:
        """Returns the ledger of a `ledger=` argument: a ledger, a path, or None.

        Args:
          ledger: A ledger; the path of its file, continued if it exists; or None for
            a new ledger in memory.
          delta: The delta that the ledger must have.
          accountant: The accountant that the ledger must have.

        Raises:
          PrivacyMismatchError: If the ledger has a different delta or accountant.
          ValueError: If the file is not a ledger.
        """
        if ledger is None:
            return cls(delta, accountant)
        if not isinstance(ledger, Ledger):
            # A dangling link points to a ledger on a missing disk: `load` refuses it.
            if not os.path.lexists(ledger):
                return cls(delta, accountant, ledger)
            return cls.load(ledger, delta=delta, accountant=accountant)
        if (ledger.delta, ledger.accountant) != (delta, accountant):
            raise PrivacyMismatchError(
                f"The ledger is kept for delta = {ledger.delta:g} and accountant "
                f"{ledger.accountant!r}, not for {delta:g} and {accountant!r}."
            )
        return ledger

    @property
    def path(self) -> pathlib.Path | None:
        """The ledger's file, if it has one."""
        return None if self._file is None else self._file.path

    @property
    def place(self) -> tuple[Any, ...]:
        """The position of the ledger, which changes with every entry."""
        runs = tuple(len(phase.runs) for phase in self.phases)
        return self.steps, runs, self._holder

    @property
    def holder(self) -> str | None:
        """Identity of the optimizer whose steps are recorded now, if it has one."""
        return self._holder

    def begin(
        self,
        *,
        noise_multiplier: float,
        sampling: Any,
        unit: str = "example",
        clip: Any = "",
        seed: int | None = None,
        observed: bool = True,
        change: bool = False,
        holder: str | None = None,
        noise: NoiseMatrix | None = None,
        horizon: int | None = None,
        continued: int | None = None,
        release: str = "",
    ) -> None:
        """Opens a phase, or continues the last phase if no setting changed.

        Args:
          noise_multiplier: z.
          sampling: The scheme, or batches or cohorts drawn by a scheme.
          unit: The object that is clipped.
          clip: The clip rule, or its settings in words.
          seed: A fixed seed of noise or draws, if there is one.
          observed: Whether the draws are seen, not merely declared.
          change: Whether the settings are meant to change.
          holder: Identity of the optimizer that runs the steps, if it has one.
          noise: The matrix of correlated noise; None for independent noise.
          horizon: The number of steps of the matrix; needed with a matrix.
          continued: For restored correlated noise: the number of steps it has made.
            None if a new matrix begins, which is counted as a new matrix.
          release: What each step releases, in words, if the steps train nothing. The
            statement lists and counts such steps apart from the steps of training.

        Raises:
          PrivacyMismatchError: If the settings differ from the last phase's and
            `change` is False, or if the neighbouring relations differ.
          ValueError: If an argument is out of range.
        """
        if seed is not None:
            _arguments.integer("seed", seed)
        _arguments.boolean("change", change)
        if holder is not None:
            _arguments.text("holder", holder)
        seeded = seed is not None or getattr(sampling, "seed", None) is not None
        phase = Phase(
            getattr(sampling, "scheme", sampling),
            _arguments.non_negative("noise_multiplier", noise_multiplier),
            _arguments.choice("unit", unit, events.UNITS),
            str(clip),
            seeded,
            _arguments.boolean("observed", observed),
            noise=noise,
            horizon=horizon,
            release=release,
        )
        phase.event(1)  # Validates the remaining settings.
        phase.refuse_unreadable(self.path)
        self.note_people(getattr(sampling, "_people", None))
        usable = self._pass_on_draws()
        self._forfeit_reserved()
        begin_run(self.phases, phase, change, continued)
        if phase.noise is None and hasattr(sampling, "_begin_run"):
            sampling._begin_run(self.steps)
        self._drawn = getattr(sampling, "_steps_drawn", None)
        if self._drawn is not None:
            self._drawn_before = self._drawn() - self.phases[-1].runs[-1]
        self._order = getattr(sampling, "_order", None)
        self._begin_draws(sampling, holder, usable)
        for text in (*clip_assumptions(clip), *_assumptions_of(sampling)):
            self.assume(text)
        self._holder, self._compared, self._skipped = holder, (0, 0), 0
        self._made, self._spent = 0, element_uses.elements_spent()
        self._open = True
        self._uncounted, self._recorded = uncounted_releases(), 0
        self._by_number = recorded_by_number()
        self._in_blocks = set()
        self.save()

    def note_people(self, ids: Any) -> None:
        """Notes the person of each row; the statement says if ids are of other people.

        Args:
          ids: The ids, `[n]`; None if records are no people.
        """
        if ids is None:
            return
        if self._people is None:
            self._people = ids
        elif are_other_people(ids, self._people):
            self.assume(_OTHER_PEOPLE)

    def end(self) -> None:
        """Ends the phase: further steps need `begin`, and count with its settings."""
        self._open = False

    def note_seed(self) -> None:
        """Marks the current phase as seeded: its noise or draws can be repeated."""
        phase = self._current()
        if not phase.seeded:
            phase.seeded = True
            self.save()

    def reserve(self, steps: int = 1) -> None:
        """Counts steps that are about to run."""
        self._current()
        self.reserved += _arguments.integer("steps", steps)
        self.save()

    def record(self, steps: int = 1, *, save: bool = True) -> None:
        """Counts steps that ran, using up reservations."""
        phase = self._current()
        steps = _arguments.integer("steps", steps)
        skipped = self._skipped
        if not self._in_block:
            self._recorded += steps
            if self._holder is None:
                note_recorded(steps)
        phase.runs[-1] += steps
        self._ran += steps
        self._by_draws = max(0, self._by_draws - steps)
        self._credit(steps)
        self.reserved = max(0, self.reserved - steps)
        if self._drawn is not None:
            # How far the run came in its order. Elements that the loop holds were
            # skipped only for now.
            ran = phase.runs[-1] - skipped
            self._skipped = max(0, self._drawn() - self._drawn_before - ran)
            phase.add_idle_steps(self._skipped - skipped)
        if save:
            self.save()
        if self._skipped and phase.noise is not None:
            raise PrivacyMismatchError(SKIPPED.format(self._skipped))

    def release(self) -> None:
        """Drops reservations of steps that certainly did not run."""
        self.reserved = self._by_draws = 0
        self.save()

    @contextlib.contextmanager
    def step(self, steps: int = 1) -> Iterator[None]:
        """Reserves steps, and records them when the block ends, however it ends.

        Args:
          steps: How many private steps the block makes. Steps of the library's
            optimizers are checked against this number; further steps are trusted.

        Raises:
          PrivacyMismatchError: If optimizers made more or fewer steps than declared
            since `begin`, or more steps than were drawn, or steps of less noise, or of
            another unit, or steps outside of the blocks. Additional steps are counted,
            at their worst, and so are steps of less noise. Errors that a step found in
            code compiled by XLA, which cannot raise, are raised here as well.
        """
        self._reserve_draws()
        # A draw has reserved its step.
        self.reserve(max(0, steps - self._by_draws))
        before, uncounted = releases_so_far(), uncounted_releases()
        used = element_uses.elements_used()
        self._in_block = True
        try:
            yield
        finally:
            self.record(steps)
            self._in_block = False
        found = settings_since(before)
        for holder, made, _ in found:
            self._in_blocks.add(holder)
            if holder != self._holder:
                self._credit_to(holder, made)
        for _, made, settings in found:
            self._compare_settings(made, settings)
        made = releases_since(before)
        self._compare_steps(steps, made)
        uses = element_uses.used_since(used)
        self._compare_draws([use.scheme for use in uses])
        self._compare_orders(uses)
        self._compare_number(made)
        for holder, _, settings in found:
            self._compare_outside(holder, settings, uncounted)
        raise_failures([holder for holder, _, _ in found])

    def event(self, more: int = 0) -> dp_accounting.DpEvent:
        """Returns the event of all recorded and reserved steps, and of `more` steps.

        Args:
          more: Further steps under the current settings.
        """
        self._reserve_draws()
        return super().event(more)

    def _begin_draws(self, sampling: Any, holder: str | None, usable: Mapping) -> None:
        """Begins to count the draws of the loop whose phase begins."""
        self._drawn_at_begin = {
            draws: (taken - usable.get(draws, 0), drawn - usable.get(draws, 0))
            for draws, (taken, drawn) in element_uses.elements_drawn().items()
        }
        self._ran = self._by_draws = 0
        self._assumed = element_uses.assumptions_noted()
        self._loop_draws = set()
        if holder is None:
            self._note_draws(getattr(sampling, "_order", None))

    def _note_draws(self, order: Any) -> None:
        """Counts the draws of a drawer, given by a weak reference, from `begin` on."""
        drawer = None if order is None else order()
        if drawer is not None and drawer.scheme.independent_steps:
            self._loop_draws.add(drawer.draws)

    def _pass_on_draws(self) -> dict[element_uses.Draws, int]:
        """Drops the reservations of draws at hand, which a new phase may use.

        Returns:
          The number of elements of these draws.
        """
        self._reserve_draws()
        usable = {draws: draws.usable for draws in self._loop_draws}
        left_out = max(0, self._by_draws - sum(usable.values()))
        self.reserved -= self._by_draws
        if left_out:
            self.phases[-1].runs[-1] += left_out
            self.assume(_LEFT_OUT.format(left_out), once=False)
        return {draws: steps * draws.pieces for draws, steps in usable.items()}

    def _reserve_draws(self) -> None:
        """Reserves a step for each draw that the loop took and has not used."""
        none = 0, 0
        handed = sum(
            draws.handed_out(self._drawn_at_begin.get(draws, none))
            for draws in self._loop_draws
        )
        waiting = max(self._by_draws, handed - self._ran)
        self.reserved += waiting - self._by_draws
        self._by_draws = waiting

    def _compare_draws(self, schemes: list[Any]) -> None:
        """Raises if a step used an element that another scheme drew more often."""
        phase = self._current()
        others = [one for one in schemes if not _covers(phase.sampling, one)]
        if not others:
            return
        problem = (
            f"The ledger counts {phase.sampling.describe()}, and the step was of an "
            f"element drawn by {others[0].describe()}."
        )
        if phase.noise is not None:
            self.assume(f"something ran that is not counted: {problem}")
        else:
            self.add_unseen(len(others))
        self.save()
        raise PrivacyMismatchError(
            f"{problem} Begin with the batches of the loop: ledger.begin("
            "..., sampling=batches)." + see("batches-drawn-another-way")
        )

    def _compare_orders(self, uses: list[element_uses.Use]) -> None:
        """Counts steps of another order of the records as a run of their own.

        Raises if the noise of the steps is correlated: no run bounds both orders.
        """
        for use in uses:
            if self._holder is None:
                self._note_draws(use.order)
            if use.scheme.independent_steps or use.order is self._order:
                continue
            phase, another = self._current(), self._order is not None
            if another and phase.noise is not None:
                # A step of this block is counted already.
                if (phase.runs[-1] - 1) % (phase.horizon or 1):
                    raise self._order_broken()
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
            self.save()

    def _order_broken(self) -> PrivacyMismatchError:
        """The error for a second order of the records within one noise matrix."""
        problem = (
            "The steps of one matrix of correlated noise used elements of two objects "
            "that draw batches, so that two steps of a record came closer to each "
            "other than the noise allows."
        )
        self.assume(f"something ran that is not counted: {problem}")
        self.save()
        return PrivacyMismatchError(
            f"{problem} Make the batches once, before the loop over the epochs: "
            "batches = scheme.batches(data)." + see("two-steps-on-one-draw")
        )

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
        self._credit_to(holder, steps)
        problem = (
            f"The optimizer of this block made {steps} steps outside of ledger.step(), "
            "which were not counted."
        )
        if self._current().noise is not None:
            self.assume(f"something ran that is not counted: {problem}")
        else:
            z = settings.noise_multiplier
            self.add_unseen(
                steps,
                noise_multiplier=z if z >= 0 and not settings.correlated else 0.0,
                unit=settings.unit,
            )
        self.save()
        raise PrivacyMismatchError(
            f"{problem} Write with ledger.step(): around every private step, a step "
            "that only tries the function, too." + see("steps-that-are-not-counted")
        )

    def statement(self) -> PrivacyStatement:
        """Returns the privacy statement of the recorded steps.

        Raises:
          ValueError: If no phase was begun.
        """
        for text in element_uses.assumptions_since(self._assumed):
            self.assume(text)
        uncounted = uncounted_releases()
        outside = (self._outside(holder, uncounted) for holder in self._in_blocks)
        if not self._in_block and any(outside):
            self.assume(
                "something ran that is not counted: steps of the loop's optimizer "
                "outside of ledger.step()"
            )
        # Not for good: a step may be recorded after it ran.
        kept, missing = self.notes, self._unrecorded(uncounted)
        self._reserve_draws()
        if self._by_draws:
            self.notes = [*self.notes, _LEFT_OUT.format(self._by_draws)]
        if missing:
            problem = (
                f"something ran that is not counted: since ledger.begin(), {missing} "
                "steps of private optimizers were recorded by no ledger; "
                "ledger.record(n) takes their number, and ledger.step() compares it"
            )
            self.notes = [*self.notes, problem]
        try:
            return super().statement()
        finally:
            self.notes = kept

    def _unrecorded(self, uncounted: Mapping[str, int]) -> int:
        """How many steps since `begin` no ledger has, if this one has bare numbers."""
        by_number = self._recorded and self._holder is None and not self._in_blocks
        if not by_number or self.phases[-1].unit == "client":
            return 0
        made = sum(
            max(0, now - self._uncounted.get(name, 0))
            for name, now in uncounted.items()
        )
        return max(0, made - (recorded_by_number() - self._by_number))

    def _compare_settings(self, made: int, settings: ReleaseSettings) -> None:
        """Raises if the releases of an optimizer have other settings than are counted.

        The releases are counted again, at their worst.
        """
        phase = self._current()
        if settings.seeded:
            self.note_seed()
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
        if matrix:
            # Phases of correlated noise take no further steps.
            self.assume(f"something ran that is not counted: {problem}")
        else:
            known = z >= 0 and not correlated
            self.add_unseen(made, noise_multiplier=z if known else 0.0, unit=unit)
        self.save()
        raise PrivacyMismatchError(
            f"{problem} Begin with the settings of the optimizer: "
            "ledger.begin(..., noise_multiplier=optimizer.noise_multiplier, "
            "unit=optimizer.unit); for a schedule, with the number of every "
            "step, and change=True." + see("epsilon-that-means-something-else")
        )

    def _compare_steps(self, said: int, made: int) -> None:
        """Raises if declared steps differ from the steps that optimizers made."""
        self._compared = said, made = self._compared[0] + said, self._compared[1] + made
        if not made or said == made:
            return
        self._compared = 0, 0
        if made > said:
            self.add_unseen(made - said, holder=self._holder)
        raise PrivacyMismatchError(
            f"ledger.step() counted {said} steps, and private optimizers made {made}. "
            "Write with ledger.step(): around one step of one optimizer, for every "
            "draw. An empty draw is a step of pure noise as well; skipping the step "
            "(if tf.reduce_sum(w) > 0) reveals that the draw was empty."
            + see("two-steps-on-one-draw")
        )

    def _compare_number(self, made: int) -> None:
        """Raises if the steps of the blocks are more than were drawn for them.

        Steps on data that no scheme of this library drew are not compared.

        Args:
          made: The private steps of a block.
        """
        phase = self._current()
        self._made += made
        if not made or isinstance(phase.sampling, FullBatch):
            return  # Further steps of all records are steps like any other.
        covered = functools.partial(_covers, phase.sampling)
        drawn, others = element_uses.steps_drawn(self._spent, covered)
        again = self._made - drawn
        if again <= 0 or not (drawn or others):
            return
        problem = (
            f"Private optimizers made {self._made} steps, and {drawn} were drawn by "
            f"{phase.sampling.describe()}: {again} steps were made of "
        )
        if others:
            problem += f"elements drawn by {others[0].describe()}."
            advice = (
                "Begin with the batches of the loop: ledger.begin(..., "
                "sampling=batches)." + see("batches-drawn-another-way")
            )
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
        if phase.noise is not None:
            self.assume(f"something ran that is not counted: {problem}")
        else:
            # The steps, and those that used their draws before, as if of all records.
            self.add_unseen(2 * again)
        self.save()
        raise PrivacyMismatchError(f"{problem} {advice}")

    def add_unseen(
        self,
        steps: int,
        *,
        noise_multiplier: float | None = None,
        unit: str | None = None,
        holder: str | None = None,
    ) -> None:
        """Counts unobserved steps, at their worst.

        The draws of such steps are unknown: each step is taken to have used every
        record, without amplification, under the neighbouring relation in force.

        Args:
          steps: How many steps.
          noise_multiplier: Their noise multiplier; the current one by default.
          unit: The object that the steps clipped; the current unit by default.
          holder: Identity of the optimizer that ran the steps.
        """
        phase = self._current()
        steps = _arguments.integer("steps", steps)
        if steps == 0:
            return
        unseen = phase.unseen(steps, noise_multiplier, unit)
        # Before the current phase, which stays the last one.
        before = self.phases[-2] if len(self.phases) > 1 else None
        if before is not None and before.continues(unseen):
            before.runs[-1] += steps
        else:
            self.phases.insert(-1, unseen)
        if holder is not None:
            self._credit_to(holder, steps)
        self.assume(
            f"{steps} steps ran before they were recorded; each is counted as if it "
            "had used every record, with a clip rule that keeps its bound",
            once=False,
        )
        self.save()

    def assume(self, text: str, *, once: bool = True) -> None:
        """Adds an assumption to the privacy statement.

        Args:
          text: The assumption, in words.
          once: Whether to leave out an assumption that is there already.
        """
        _arguments.text("text", text)
        if not (once and text in self.notes):
            self.notes.append(text)

    def to_dict(self) -> dict[str, Any]:
        """Returns the ledger as JSON-ready values."""
        return {
            "format": FORMAT,
            "delta": self.delta,
            "accountant": self.accountant,
            "phases": [phase.to_dict() for phase in self.phases],
            "reserved": self.reserved,
            "notes": self.notes,
            "counted": self.counted,
            "holder": self._holder,
        }

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes a copy to `path`, or the ledger to its own file, if any.

        Raises:
          PrivacyMismatchError: If the ledger's own file was changed from outside.
          ValueError: If the file could not be read again, because a scheme or a matrix
            is not of this library.
          OSError: If the file cannot be written; its earlier content is kept.
        """
        if path is not None and pathlib.Path(path) != self.path:
            for phase in self.phases:
                phase.refuse_unreadable(path)
            LedgerFile(path).write(self.to_dict())
        elif self._file is not None:
            with self._file.alone():
                conflict = self._file.conflict()
                if conflict:
                    raise PrivacyMismatchError(conflict)
                self._file.write(self.to_dict())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        delta: float | None = None,
        accountant: str | None = None,
    ) -> Ledger:
        """Reads a ledger, to continue it.

        Steps that were reserved but never recorded count as run.

        Args:
          path: The file.
          delta: The delta expected, if any.
          accountant: The accountant expected, if any.

        Raises:
          PrivacyMismatchError: If the file has a different delta or accountant.
          ValueError: If the file is not a ledger, or damaged.
          OSError: If the file cannot be read.
        """
        file = LedgerFile(path)
        content = file.read()
        try:
            ledger = cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path} is not a privacy ledger: {error}") from error
        for name, expected in (("delta", delta), ("accountant", accountant)):
            found = getattr(ledger, name)
            if expected is not None and expected != found:
                raise PrivacyMismatchError(
                    f"{path} was kept for {name} = {found!r}, not {expected!r}."
                )
        ledger._file = file
        return ledger

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Ledger:
        """Returns the ledger, in memory, with the content that `to_dict()` returned.

        For callers that embed a ledger in a file of their own, and check that the file
        is complete. Steps that were reserved but never recorded count as run.

        Args:
          content: The result of `to_dict`.

        Raises:
          ValueError: If the content is not a ledger.

        >>> from tfdpclip import sampling
        >>> ledger = Ledger(delta=1e-5)
        >>> ledger.begin(noise_multiplier=5.0, sampling=sampling.FullBatch())
        >>> ledger.record(3)
        >>> Ledger.from_dict(ledger.to_dict()).steps
        3
        """
        try:
            ledger = cls(content["delta"], content["accountant"])
            ledger.phases = [Phase.from_dict(phase) for phase in content["phases"]]
            ledger.reserved = _arguments.integer("reserved", content["reserved"])
            ledger.notes = [str(note) for note in content["notes"]]
            if ledger.reserved:
                ledger._current()
            if content["format"] > 2:
                ledger.counted = {
                    _arguments.text("counted", holder): _arguments.integer("counted", n)
                    for holder, n in content["counted"].items()
                }
                if content["holder"] is not None:
                    ledger._holder = _arguments.text("holder", content["holder"])
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as e:
            raise ValueError(f"content is not that of a ledger: {e}") from e
        ledger._forfeit_reserved()
        return ledger

    def _current(self) -> Phase:
        if not self._open or not self.phases or not self.phases[-1].runs:
            raise ValueError(
                "Call ledger.begin(noise_multiplier=optimizer.noise_multiplier, "
                "sampling=batches) first, with the run's settings"
                + ("." if self._open else "; the last release had settings of its own.")
            )
        return self.phases[-1]

    def _forfeit_reserved(self) -> None:
        """Counts the reserved steps of a process that did not come back."""
        if not self.reserved:
            return
        self.notes.append(
            f"{self.reserved} steps were begun before an interruption and are counted, "
            "whether or not they finished"
        )
        self.phases[-1].runs[-1] += self.reserved
        self._credit(self.reserved)
        self.reserved = 0

    def _credit(self, steps: int) -> None:
        """Counts the steps for the optimizer that holds the ledger."""
        if self._holder is not None:
            self._credit_to(self._holder, steps)

    def _credit_to(self, holder: str, steps: int) -> None:
        """Counts steps of the ledger as those of one optimizer."""
        self.counted[holder] = self.counted.get(holder, 0) + steps
        note_counted(holder, steps)
