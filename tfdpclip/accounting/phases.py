"""Phases: steps under a single privacy configuration; and the sums of phases."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import pickle
from typing import Any

import dp_accounting
import numpy as np

from tfdpclip import _arguments, correlated
from tfdpclip._docs import TracedError, see
from tfdpclip.accounting.matrix_events import correlated_event
from tfdpclip.accounting.noise_place import StateHistory
from tfdpclip.sampling import events, schemes
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.thresholded import LaplaceRelease

# Settings that follow from the data and from the room for a draw.
_ROOM = ("capacity", "population")
_MEANT = (
    "If you mean this change, give allow_change=True to the PrivacyPlan, PrivacyBudget "
    "or RoundBudget (to your own ledger, ledger.begin(..., change=True)): both "
    "phases are then counted." + see("changed-settings")
)

# The error message for correlated noise, with the number of steps.
SKIPPED = (
    "{} steps were drawn from the batches and not trained on, so that two steps of a "
    "record came closer to each other than the correlated noise allows. Train on each "
    "element before the loop takes the next; for evaluation, or to look at the data, "
    "make separate batches."
)


#: The end of messages about a second step on a draw.
TWO_NETWORKS = (
    " For a GAN, train both networks in one train_step: "
    "docs/train_step.md#two-networks-gans."
)


class PrivacyMismatchError(TracedError):
    """The run differs from the settings of its accounting."""


def clip_assumptions(clip: Any) -> list[str]:
    """Returns a statement's assumptions about a clip rule.

    They are about public numbers, and about rules from outside of the library.

    Args:
      clip: a clip rule, or its settings in words or numbers, with no assumptions.
    """
    if clip is None or isinstance(clip, (str, int, float)):
        return []
    from tfdpclip.clipping import ClipRule  # Imports TensorFlow; most callers do not.

    if not isinstance(clip, ClipRule):
        return []
    texts = [
        f"{type(rule).__name__}, which is no clip rule of this library, weighs each "
        "record by its own norm and public numbers alone"
        for rule in _arguments.foreign(clip, ClipRule)
    ]
    if clip.takes_public_norms:
        name = type(clip).__name__
        texts.append(
            f"the numbers that {name} takes for public do not come from the "
            "private records"
        )
    return texts


@dataclasses.dataclass
class Phase:
    """Steps that ran under a single privacy configuration.

    Attributes:
      sampling: The scheme that drew the records.
      noise_multiplier: z.
      unit: The object that was clipped: `"example"`, `"client"`, `"batch"` or
        `"group"`.
      clip: The clip rule, in words; empty without one.
      release: What each step released, in words, if the steps train nothing: a
        statistic, for example. Empty for steps of training.
      seeded: Whether noise or draws came from a fixed seed.
      observed: Whether the draws were seen, not merely declared.
      runs: Steps of each uninterrupted stretch. One entry unless the scheme's steps,
        or the noise of several steps, depend on each other.
      noise: The matrix of correlated noise; None for independent noise.
      horizon: The number of steps of a noise matrix; None without a matrix.
      trail: The states from which rounds with correlated noise continued.
      idle: Steps in `runs` that did not run: they were drawn for a different purpose,
        or stand for the rest of an epoch. Idle steps cost as much as steps that ran.
    """

    sampling: Any
    noise_multiplier: float
    unit: str = "example"
    clip: str = ""
    seeded: bool = False
    observed: bool = True
    runs: list[int] = dataclasses.field(default_factory=list)
    noise: correlated.NoiseMatrix | None = None
    horizon: int | None = None
    trail: StateHistory = dataclasses.field(default_factory=StateHistory)
    idle: int = 0
    release: str = ""

    @property
    def steps(self) -> int:
        """Number of steps that ran."""
        return sum(self.runs) - self.idle

    def begin_partial_epoch(self) -> None:
        """Counts an additional epoch: the current run begins within an epoch."""
        self.runs.insert(-1, 1)
        self.idle += 1

    def undo_partial_epoch(self) -> None:
        """Reverts `begin_partial_epoch`, because no step ran."""
        del self.runs[-2]
        self.idle -= 1

    def add_idle_steps(self, steps: int) -> None:
        """Counts steps of the current run that were drawn for a different purpose."""
        self.runs[-1] += steps
        self.idle += steps

    def foreign(self) -> list[Any]:
        """Parts from outside the library: a scheme, a matrix, or a part of either."""
        foreigners = _arguments.foreign(self.sampling, SamplingScheme)
        if self.noise is not None:
            foreigners += _arguments.foreign(self.noise, correlated.NoiseMatrix)
        return foreigners

    def refuse_unreadable(self, path: str | os.PathLike[str] | None) -> None:
        """Raises if the ledger has a file that could not be read again."""
        others = self.foreign()
        if others and path is not None:
            raise ValueError(
                f"ledger={str(path)!r} could not be read again: "
                f"{type(others[0]).__name__} is not of this library, and reading works "
                "only for the library's own schemes and matrices. Leave ledger= out, "
                "and keep the statement of the run."
            )

    def __post_init__(self):
        if self.foreign():
            # The caller may change these objects later; the copy does not change.
            with contextlib.suppress(Exception):  # Without a copy, the object is kept.
                self.sampling, self.noise = copy.deepcopy((self.sampling, self.noise))
        _arguments.non_negative("noise_multiplier", self.noise_multiplier)
        _arguments.choice("unit", self.unit, events.UNITS)
        _arguments.text("clip", self.clip)
        _arguments.text("release", self.release)
        _arguments.boolean("seeded", self.seeded)
        _arguments.boolean("observed", self.observed)
        self.runs = [
            _arguments.integer("runs", n) for n in _arguments.items("runs", self.runs)
        ]
        _arguments.integer("idle", self.idle, 0, sum(self.runs))
        wanted = "a scheme of tfdpclip.sampling, such as Poisson(rate)"
        _arguments.instance("sampling", self.sampling, SamplingScheme, wanted)
        if isinstance(self.sampling, LaplaceRelease) and not self.release:
            raise ValueError(
                "LaplaceRelease() states an earlier release, and draws no records for "
                "training. For a release, name it: ledger.begin(noise_multiplier=b / "
                'sensitivity, sampling=dpc.sampling.LaplaceRelease(), release="mean '
                'of the ages"). For training: sampling=dpc.sampling.Poisson(rate).'
            )
        if self.noise is None and self.horizon is None:
            return
        if self.noise is None:
            raise ValueError("horizon must be None without correlated noise.")
        # Validates the remaining fields, and that the matrix fits the scheme.
        self._run(0)

    def settings(self) -> dict[str, Any]:
        """Returns everything but the steps, comparable and JSON-ready."""
        return {
            "sampling": self.sampling.to_dict(),
            "noise_multiplier": self.noise_multiplier,
            "unit": self.unit,
            "clip": self.clip,
            "release": self.release,
            "seeded": self.seeded,
            "observed": self.observed,
            "noise": None if self.noise is None else self.noise.to_dict(),
            "horizon": self.horizon,
        }

    def continues(self, other: Phase) -> bool:
        """Whether all settings and foreign parts, but not the steps, are equal."""
        return self.settings() == other.settings() and self._alike(other)

    def _alike(self, other: Phase) -> bool:
        """Whether the foreign parts of both phases are the same.

        Names and settings do not determine a foreign part's behaviour: a different
        class of the same name may behave differently, and so may a changed attribute.
        """
        pairs = list(itertools.zip_longest(self.foreign(), other.foreign()))
        return all(type(a) is type(b) and _attributes_equal(a, b) for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, JSON-ready."""
        content = {**self.settings(), "runs": self.runs}
        if found := self.foreign():
            content["foreign"] = [type(one).__name__ for one in found]
        if self.noise is not None:
            content["trail"] = dataclasses.asdict(self.trail)
        if self.idle:
            content["idle"] = self.idle
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Phase:
        """Returns the phase with the content that `to_dict()` returned."""
        content = dict(content)
        if names := content.pop("foreign", ()):
            raise ValueError(
                f"{names[0]} was not of this library, so its privacy is unknown."
            )
        noise = content.pop("noise", None)
        return cls(
            # Old files have no trail, and no state continues without a trail.
            trail=StateHistory(**content.pop("trail", {})),
            noise=None if noise is None else correlated.from_dict(noise),
            # Settings that decide the cost have no default.
            sampling=schemes.from_dict(content.pop("sampling")),
            noise_multiplier=content.pop("noise_multiplier"),
            unit=content.pop("unit"),
            runs=content.pop("runs"),
            **content,
        )

    def event(self, more: int = 0) -> dp_accounting.DpEvent:
        """Returns the phase's privacy event, with `more` steps in its last run."""
        runs = [*self.runs[:-1], (self.runs[-1] if self.runs else 0) + more]
        return dp_accounting.ComposedDpEvent([self._run(steps) for steps in runs])

    def unseen(
        self, steps: int, noise_multiplier: float | None, unit: str | None
    ) -> Phase:
        """Returns a phase of unobserved steps; each may have used every record.

        Args:
          steps: How many steps.
          noise_multiplier: The noise multiplier of the steps, or None for this phase's.
          unit: The object that the steps clipped, or None for this phase's unit.

        Raises:
          PrivacyMismatchError: Under correlated noise.
        """
        if self.noise is not None:
            raise PrivacyMismatchError(
                f"{steps} steps ran that were not recorded, under correlated noise: "
                "no proof bounds them together with steps that share their noise. "
                "Begin with a new optimizer, and keep one ledger from its first step."
            )
        z = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        return dataclasses.replace(
            self,
            sampling=self.sampling.at_worst(),
            noise_multiplier=_arguments.non_negative("noise_multiplier", z),
            unit=self.unit if unit is None else unit,
            runs=[steps],
            idle=0,
            release="",
        )

    def _described(self) -> str:
        kinds = [type(one) for one in self.foreign()]
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
        return ", ".join(names) or "classes of this library"

    def _run(self, steps: int) -> dp_accounting.DpEvent:
        if self.noise is None:
            return self.sampling.event(self.noise_multiplier, steps, unit=self.unit)
        return correlated_event(
            self.noise,
            self.noise_multiplier,
            steps,
            self.sampling,
            horizon=_arguments.integer("horizon", self.horizon, 1),
            unit=self.unit,
        )

    def check_continued(self, new: Phase, change: bool) -> None:
        """Refuses a following phase, unless the two phases may add up.

        Args:
          new: The phase that is to follow.
          change: Whether the caller means the settings to change. Training after a
            release needs no consent.

        Raises:
          PrivacyMismatchError: If the settings differ without consent, or if the
            neighbouring relations differ, or only one of them is about people.
        """
        relations = [p.sampling.neighboring_relation for p in (self, new)]
        if relations[0] is not relations[1]:
            raise PrivacyMismatchError(
                "Steps under different neighbouring relations do not add up: "
                f"{events.RELATION_NAMES[relations[0]]} before, "
                f"{events.RELATION_NAMES[relations[1]]} now."
            )
        if (self.unit == "person") != (new.unit == "person"):
            raise PrivacyMismatchError(
                "Steps with a person as the unit do not add up with steps of a "
                f"different unit: unit={self.unit!r} before, {new.unit!r} now. "
                "Statistics and a plan are both for people, PrivateStatistics(..., "
                "people=ids) and PrivacyPlan(..., per_person=8), or both for examples."
            )
        before, now = self.settings(), new.settings()
        differing = [name for name in before if before[name] != now[name]]
        # A new physical batch size changes only the capacity, which needs no consent.
        if "sampling" in differing and _same_rate(self.sampling, new.sampling):
            differing.remove("sampling")
        # Training after a release always differs from the release, by intention.
        change = change or bool(self.release and not new.release)
        if differing and not change:
            changes = "; ".join(
                f"{name} was {before[name]!r}, now {now[name]!r}" for name in differing
            )
            raise PrivacyMismatchError(
                f"The privacy configuration differs from what has run: {changes}. "
                + _MEANT
            )
        if not change and not self._alike(new):
            kinds = (self._described(), new._described())
            again = " (made again, as by a cell run twice, or with changed attributes)"
            raise PrivacyMismatchError(
                "The object that draws records or correlates noise has changed: "
                f"{kinds[0]} before, {kinds[1]} now{again * (kinds[0] == kinds[1])}. "
                + _MEANT
            )


def begin_run(
    phases: list[Phase], phase: Phase, change: bool, continued: int | None
) -> None:
    """Begins a run of a phase, or continues the last run if the two add up.

    Args:
      phases: The phases until now; `phase` is added unless it is the last of them.
      phase: The phase.
      change: Whether the caller means the settings to change.
      continued: For restored correlated noise: the number of steps it has made. None
        if a new matrix begins.

    Raises:
      PrivacyMismatchError: If the phases do not add up, or the noise was restored to
        a step before the last step that ran: it would be used twice.
    """
    if phases:
        phases[-1].check_continued(phase, change)
    same = bool(phases) and phases[-1].continues(phase)
    if continued is not None:
        continued = _arguments.integer("continued", continued)
        ran = phases[-1].runs[-1] if same and phases[-1].runs else None
        if phase.noise is None or ran != continued:
            raise PrivacyMismatchError(
                f"Noise was restored that has made {continued} steps, and the ledger "
                f"has {'no run' if ran is None else f'a run of {ran}'} that the noise "
                "could continue: released noise is never used again. Begin with fresh "
                "noise, continued=None."
            )
    if not same:
        phases.append(phase)
    # A new matrix, or a new order, is a new run: a bound holds within one run.
    whole = phase.noise is None and phase.sampling.independent_steps
    if not phases[-1].runs or not (whole or continued is not None):
        phases[-1].runs.append(0)
        phases[-1].trail.begin()


def refuse_other_use(ledger: Any, place: tuple, other: str, fix: str) -> None:
    """Raises if the ledger counted further steps since `place` was read.

    Args:
      ledger: The ledger.
      place: The value of `ledger.place` after the caller's last step.
      other: The possible cause, in words.
      fix: The remedy, in words.

    Raises:
      PrivacyMismatchError: If `ledger.place` has changed.
    """
    if ledger.place != place:
        raise PrivacyMismatchError(
            f"{other}: the rest of the budget, and the owner of each noise, are not "
            f"known any more. {fix}" + see("steps-that-are-not-counted")
        )


def are_other_people(ids: np.ndarray, before: np.ndarray) -> bool:
    """Whether ids of as many rows tell people apart in a different way.

    The same ids in another order are ids of the same people. Of another number of rows
    nothing is known.
    """
    if ids is before or len(ids) != len(before):
        return False
    if np.array_equal(np.sort(ids), np.sort(before)):
        return False
    owners = [np.unique(each, return_inverse=True)[1] for each in (ids, before)]
    pairs = np.unique(np.stack([np.reshape(each, -1) for each in owners]), axis=1)
    # In the same way: each owner of the first numbering is an owner of the second.
    return any(pairs.shape[1] != len(np.unique(each)) for each in owners)


def _attributes_equal(one: Any, other: Any) -> bool:
    """Whether two objects of a class have equal attributes; False if unknown."""
    if one is other:  # The object could not be copied.
        return True
    before, now = (
        {
            name: value
            for name, value in getattr(each, "__dict__", {}).items()
            if name not in _ROOM
            and not isinstance(
                getattr(type(each), name, None), functools.cached_property
            )
        }
        for each in (one, other)
    )
    with contextlib.suppress(Exception):  # Comparing arrays raises.
        if before == now:
            return True
    with contextlib.suppress(Exception):
        return pickle.dumps(before) == pickle.dumps(now)
    return False


def _same_rate(old: Any, new: Any) -> bool:
    if not hasattr(old, "rate"):
        return False
    before, now = (
        {k: v for k, v in scheme.to_dict().items() if k not in _ROOM}
        for scheme in (old, new)
    )
    return before == now
