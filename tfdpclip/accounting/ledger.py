"""The ledger: records steps before they run, and computes the cost."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import dp_accounting

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._notes import NOTES
from tfdpclip.accounting._ledger_file import FORMAT, LedgerFile
from tfdpclip.accounting.phases import (
    SKIPPED,
    Phase,
    PrivacyMismatchError,
    are_other_people,
    begin_run,
    clip_assumptions,
)
from tfdpclip.accounting.statement import PrivacyStatement, Spending
from tfdpclip.accounting.step_audit import StepAudit
from tfdpclip.correlated import NoiseMatrix
from tfdpclip.sampling import events

# The ids may be of different people: folds of a cross-validation in a ledger.
_OTHER_PEOPLE = (
    "the ids of some phases (statistics, or another plan) tell people apart in another "
    "way than those of the first: who is one person in one phase, and several in "
    "another, is not covered as a whole"
)


def _assumptions_of(sampling: Any) -> tuple[str, ...]:
    """The assumptions about drawn data, beyond the assumptions of the scheme."""
    assumptions = getattr(sampling, "assumptions", ())
    return assumptions if isinstance(assumptions, tuple) else ()


class Ledger(Spending):
    """Records the steps that ran, in phases, and states their cost.

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
        self._audit = StepAudit(self)
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
            # A dangling link is a ledger on a missing disk: `load` refuses the link.
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
        """The ledger's file, or None."""
        return None if self._file is None else self._file.path

    @property
    def place(self) -> tuple[Any, ...]:
        """The position of the ledger, which changes with every entry."""
        runs = tuple(len(phase.runs) for phase in self.phases)
        return self.steps, runs, self._holder

    @property
    def holder(self) -> str | None:
        """Identity of the optimizer of the steps that are recorded now, or None."""
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
          seed: A fixed seed of noise or draws, or None.
          observed: Whether the draws are seen, not merely declared.
          change: Whether the settings are meant to change.
          holder: Identity of the optimizer that runs the steps, or None.
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
        _arguments.optional(_arguments.integer, "seed", seed)
        _arguments.boolean("change", change)
        _arguments.optional(_arguments.text, "holder", holder)
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
        usable = self._audit.pass_on_draws()
        self._forfeit_reserved()
        begin_run(self.phases, phase, change, continued)
        if phase.noise is None and hasattr(sampling, "_begin_run"):
            sampling._begin_run(self.steps)
        for text in (*clip_assumptions(clip), *_assumptions_of(sampling)):
            self.assume(text)
        self._holder, self._open = holder, True
        self._audit = StepAudit(self, sampling, usable)
        self.save()

    def note_people(self, ids: Any) -> None:
        """Notes the person of each row; the statement says if ids name other people.

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
        phase.runs[-1] += steps
        self._credit(steps)
        self.reserved = max(0, self.reserved - steps)
        skipped = self._audit.note_recorded(steps)
        if save:
            self.save()
        if skipped and phase.noise is not None:
            raise PrivacyMismatchError(SKIPPED.format(skipped))

    def release(self) -> None:
        """Drops reservations of steps that certainly did not run."""
        self.reserved = self._audit.waiting = 0
        self.save()

    @contextlib.contextmanager
    def step(self, steps: int = 1) -> Iterator[None]:
        """Reserves steps, and records them at the end of the block, errors included.

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
        self._audit.reserve_draws()
        # A draw has reserved its step.
        self.reserve(max(0, steps - self._audit.waiting))
        with self._audit.block(steps):
            try:
                yield
            finally:
                self.record(steps)

    def event(self, more: int = 0) -> dp_accounting.DpEvent:
        """Returns the event of all recorded and reserved steps, and of `more` steps.

        Args:
          more: Further steps under the current settings.
        """
        self._audit.reserve_draws()
        return super().event(more)

    def statement(self) -> PrivacyStatement:
        """Returns the privacy statement of the recorded steps.

        Raises:
          ValueError: If no phase was begun.
        """
        self._audit.note_assumptions()
        notes = self.notes
        self.notes = [*notes, *self._audit.open_ends()]
        try:
            return super().statement()
        finally:
            self.notes = notes

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
        # Before the current phase, which stays the last.
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
        """Reads a ledger, to continue the ledger.

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
            value = getattr(ledger, name)
            if expected is not None and expected != value:
                raise PrivacyMismatchError(
                    f"{path} was kept for {name} = {value!r}, not {expected!r}."
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
                holder = content["holder"]
                ledger._holder = _arguments.optional(_arguments.text, "holder", holder)
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
        """Counts steps of the ledger as the steps of a single optimizer."""
        self.counted[holder] = self.counted.get(holder, 0) + steps
        NOTES.note_counted(holder, steps)
