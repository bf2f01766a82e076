"""A privacy plan: the public facts of a run, and the noise that they require.

`tfdpclip.keras.PrivacyPlan` and `tfdpclip.federated.PrivacyPlan` are the plans to use.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import dp_accounting

from tfdpclip import _arguments, _progress
from tfdpclip._docs import see
from tfdpclip._notebook import ShownAsText, aligned
from tfdpclip.accounting.calibration import (
    BudgetSpentError,
    event_epsilon,
    noise_multiplier,
)
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.noise_split import (
    SmallBatchError,
    count_stddevs,
    split_noise_multiplier,
)
from tfdpclip.accounting.phases import Phase, PrivacyMismatchError
from tfdpclip.accounting.statement import FORMATS, PrivacyStatement
from tfdpclip.correlated import NoiseMatrix

# What `locals()` of a plan's `__init__` has beside its settings.
_NO_SETTINGS = ("self", "others", "__class__")
# The settings that decide the cost of a phase's steps.
_DECISIVE = ("sampling", "noise_multiplier", "unit", "noise", "horizon")


class BudgetPlan(ShownAsText, abc.ABC):
    """Base of privacy plans: derives the noise from a budget and the facts of a run.

    Args:
      arguments: `locals()` of the plan's `__init__`: its arguments, for `replace`; of
        them `ledger`, `accountant` and `allow_change` are read here.
      epsilon: the budget.
      delta: the delta.
      population: the number of records.
      size: the expected number of records in a step: the public divisor.
      steps: how many steps (rounds) the run has.
      scheme: the scheme that draws the records, as in the accounting.
      unit: the object that is clipped.
      matrix: of correlated noise, for all the steps; None for independent noise.
    """

    #: The plan's words for records, the number of records in a step, passes through
    #: the data, and a step.
    _RECORDS, _SIZE, _LENGTH, _STEP = "records", "size", "length", "step"

    def __init__(
        self,
        arguments: dict[str, Any],
        *,
        epsilon: float,
        delta: float,
        population: int,
        size: float,
        steps: int,
        scheme: Any,
        unit: str,
        matrix: NoiseMatrix | None = None,
    ):
        self._settings = {
            name: value for name, value in arguments.items() if name not in _NO_SETTINGS
        }
        #: The budget.
        self.epsilon = epsilon
        #: The delta of the budget.
        self.delta = delta
        #: The scheme that draws the records, as in the accounting.
        self.scheme = scheme
        #: Steps (rounds) of the whole run.
        self.steps = steps
        #: The accountant.
        self.accountant = accountant = arguments["accountant"]
        self._population, self._size, self._unit = population, size, unit
        self._matrix = matrix
        self._clip = ""
        #: The ledger of the steps that ran.
        self.ledger = Ledger.open(arguments["ledger"], delta, accountant)
        allow_change = _arguments.boolean("allow_change", arguments["allow_change"])
        self._allow_change = allow_change
        released = any(phase.release for phase in self.ledger.phases)
        counted = self.ledger.phases if allow_change or released else []
        phases = copy.deepcopy(counted)
        # Phases of earlier plans. The last may be this run's, of an earlier process.
        self._before = phases[:-1]
        #: z: the least noise with which the whole run stays within the budget.
        self.noise_multiplier = self._least_noise()
        if phases and not self._runs_in(phases[-1]):
            self._before = phases
            self.noise_multiplier = self._least_noise()
        if not (allow_change or any(map(self._runs_in, self.ledger.phases))):
            self._refuse_other_phases()
        self._complete = True

    def _refuse_other_phases(self) -> None:
        """Raises if `fit` would refuse this plan after the ledger's last phase."""
        for last in self.ledger.phases[-1:]:
            # The plan does not know the clip, the seed and the place of the draws.
            told = {
                name: getattr(last, name) for name in ("clip", "seeded", "observed")
            }
            planned = dataclasses.replace(self._planned(), **told)
            last.check_continued(planned, self._allow_change)

    @property
    def _at_a_time(self) -> int:
        """The number of steps that run at a time."""
        return 1

    @property
    def finished(self) -> bool:
        """Whether all planned steps have run, as the ledger counts them.

        A run that was killed may end a few steps before, fewer than run at a time. A
        job that may be started again after its end loads the model that it saved, and
        trains `if not plan.finished`.
        """
        before = sum(phase.steps for phase in self._before)
        return self.ledger.steps - before > self.steps - self._at_a_time

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_complete") and name[0] != "_" and name in vars(self):
            raise AttributeError(
                f"{name} of a plan cannot be set: the noise, the draws and the ledger "
                "follow from its arguments. Make another plan, for example "
                "plan = plan.replace(epsilon=8)."
            )
        super().__setattr__(name, value)

    def _least_noise(self) -> float:
        return noise_multiplier(
            self.epsilon,
            self.delta,
            self.steps,
            self.scheme,
            self.accountant,
            unit=self._unit,
            matrix=self._matrix,
            spent=self._spent_before(),
        )

    def _planned(self) -> Phase:
        """The planned run, as a phase of the ledger."""
        horizon = None if self._matrix is None else self.steps
        return Phase(
            self.scheme,
            self.noise_multiplier,
            self._unit,
            runs=[self.steps],
            noise=self._matrix,
            horizon=horizon,
        )

    def _runs_in(self, phase: Phase) -> bool:
        """Whether a phase of the ledger has the draws and the noise of this plan."""
        ours, found = self._planned().settings(), phase.settings()
        return all(ours[name] == found[name] for name in _DECISIVE)

    def _spent_before(self) -> dp_accounting.DpEvent | None:
        if not self._before:
            return None
        return dp_accounting.ComposedDpEvent([part.event() for part in self._before])

    @property
    def planned_epsilon(self) -> float:
        """The epsilon of the planned run: the budget, or very little less.

        It includes releases before the run in the ledger and, with `allow_change`,
        all earlier phases.
        """
        event = dp_accounting.ComposedDpEvent(
            [part.event() for part in (*self._before, self._planned())]
        )
        return event_epsilon(event, self.delta, self.accountant)

    def replace(self, **changes: Any) -> Any:
        """Returns a plan with changed arguments, and an empty ledger of its own.

        The new plan does not use the files of this plan unless they are given again.

        Args:
          **changes: arguments of the plan.
        """
        unknown = set(changes) - set(self._settings)
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no argument {sorted(unknown)[0]!r}: it has "
                f"{', '.join(self._settings)}."
            )
        fresh = {name: None for name in ("ledger", "secret") if name in self._settings}
        return type(self)(**{**self._settings, **fresh, **changes})

    def rows(self) -> list[dict[str, Any]]:
        """This plan and its neighbours, as dictionaries for CSV files or pandas.

        Each neighbour has half, or twice, of one argument. No data are used.
        """
        found = [self._row("this plan", self)]
        names, factors = ("epsilon", self._SIZE, self._LENGTH), (0.5, 2)
        others = list(itertools.product(names, factors))
        for name, factor in _progress.bar(others, title="neighbours", unit="plan"):
            value = getattr(self, name) * factor
            if name != "epsilon":
                value = int(value)
                if value < 1 or (name == self._SIZE and value > self._population):
                    continue
            words = f"{'half' if factor < 1 else 'twice'} the {name.replace('_', ' ')}"
            with contextlib.suppress(BudgetSpentError):
                found.append(self._row(words, self._neighbour(name, value)))
        return found

    def _neighbour(self, name: str, value: Any) -> BudgetPlan:
        """Returns a plan with a changed argument, after the same earlier phases."""
        before = Ledger(self.delta, self.accountant)
        if self._before:
            # The last phase stands for the neighbour's run in place of this plan's.
            own = dataclasses.replace(self._planned(), runs=[0])
            before.phases = [*self._before, own]
        sizes = {part: getattr(self, part) for part in (self._SIZE, self._LENGTH)}
        return self.replace(**{**sizes, name: value}, ledger=before)

    def _row(self, change: str, plan: BudgetPlan) -> dict[str, Any]:
        return {
            "change": change,
            "epsilon": plan.epsilon,
            "delta": plan.delta,
            self._SIZE: plan._size,
            self._LENGTH: getattr(plan, self._LENGTH),
            "steps": plan.steps,
            "momentum": plan._settings["momentum"],
            "noise_multiplier": plan.noise_multiplier,
            "noise_of_the_mean": plan.noise_multiplier / plan._size,
        }

    def table(self) -> str:
        """`rows` as text: the noise that neighbouring choices would need."""
        titles = {
            "change": "",
            "epsilon": "epsilon",
            self._SIZE: self._SIZE.replace("_", " "),
            self._LENGTH: self._LENGTH,
            "steps": f"{self._STEP}s",
            "momentum": "momentum",
            "noise_multiplier": "noise",
            "noise_of_the_mean": "noise / " + self._SIZE.split("_")[0],
        }
        if self._LENGTH == f"{self._STEP}s":
            del titles["steps"]
        if not self._settings["momentum"]:
            del titles["momentum"]
        lines = [list(titles.values())]
        for row in self.rows():
            lines.append([_cell(row[key]) for key in titles])
        return aligned(lines, left=(0,))

    def statement(self, format: str | None = None) -> PrivacyStatement | str:
        """The privacy spent, with all facts that a privacy claim needs.

        Args:
          format: None for a `PrivacyStatement`; `"text"`, `"markdown"` (a section of
            a model card) or `"json"` for that text.

        Raises:
          ValueError: If no step ran yet, or the format is unknown.
          PrivacyMismatchError: If steps ran that the plan did not see.
        """
        _arguments.optional(_arguments.choice, "format", format, FORMATS)
        self._refuse_unseen()
        if not self.ledger.phases:
            raise ValueError(
                "Nothing ran yet, so there is nothing to state. print(plan) shows the "
                "planned run."
            )
        stated = self.ledger.statement()
        return stated if format is None else stated.render(format)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Turns a refusal of a clip rule's counts into advice on the batch size."""
        try:
            yield
        except SmallBatchError as error:
            raise ValueError(self._size_for(error.rule)) from None

    def _check_counts(self, rule: Any) -> None:
        """Raises if the clip rule's counts are too precise for the noise.

        The number of groups of a rule with groups is not known yet; its mechanism
        checks the counts later.
        """
        if not rule.has_groups:
            z = self.noise_multiplier
            split_noise_multiplier(z, count_stddevs(rule, float(self._size), z))

    def _size_for(self, rule: Any) -> str:
        """Returns advice on the smallest batch size that hides the counts of a rule.

        A larger batch has more noise, but less noise for each of its records.
        """

        def enough(size: int) -> bool:
            try:
                self._neighbour(self._SIZE, size)._check_counts(rule)
            except ValueError:
                return False
            return True

        low, high = int(self._size), self._population
        with _progress.calls(enough, title="batch size", unit="plan") as counted:
            found = counted(high)
            while found and high - low > max(1, low // 20):
                size = (low + high) // 2
                low, high = (low, size) if counted(size) else (size, high)
        fits = f"Even all {high} {self._RECORDS} are too few. Take"
        if found:
            fits = f"{self._SIZE}={high} is enough. Or take"
        return (
            f"{self._SIZE}={self._size} is too small for {rule}: it counts the records "
            "below its clip norm, and the noise that hides the count would be over "
            f"half of the batch. {fits} a clip that counts nothing: "
            "clip=dpc.AutomaticClip(), or a clip norm that you choose, as in clip=1.0."
            + see("counts-that-cost-privacy")
        )

    def _facts_of_release(self) -> list[tuple[str, str]]:
        """The lines of the plan's text about correlated noise and the clip rule."""
        facts = []
        if self._matrix is not None:
            facts.append(("correlation", self._matrix.describe()))
        if self._clip:
            facts.append(("clip", self._clip))
        return facts

    @abc.abstractmethod
    def _refuse_unseen(self) -> None:
        """Raises if steps ran that the ledger does not have."""

    @abc.abstractmethod
    def _facts(self) -> list[tuple[str, str]]:
        """The lines of the plan's text: names and texts."""

    def __str__(self) -> str:
        lines = [
            f"Plan for ({self.epsilon:g}, {self.delta:g})-differential privacy of "
            f"{self._population:,} {self._RECORDS}.",
            *(f"  {name + ':':<12} {text}" for name, text in self._facts()),
            f"  {'will spend:':<12} epsilon {self.planned_epsilon:.4g} at delta "
            f"{self.delta:g}, by {self.accountant}{self._with_what()}",
        ]
        try:
            self._refuse_unseen()
        except PrivacyMismatchError as error:
            lines += ["", f"So far: not known. {error}"]
        else:
            if self.ledger.phases:
                lines += ["", "So far, as it was counted:", str(self.statement())]
        return "\n".join(lines)

    def _with_what(self) -> str:
        steps = sum(phase.steps for phase in self._before)
        return f", with {steps:,} {self._STEP}s of the ledger" if steps else ""

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name}={value!r}"
            for name, value in self._settings.items()
            if value is not None
        )
        return f"{type(self).__name__}({given})"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1e6 else f"{value:,.0f}"
    return str(value)
