"""A privacy plan: the public facts of a run, said once, and what follows from them.

`tfdpclip.keras.PrivacyPlan` and `tfdpclip.federated.PrivacyPlan` are the plans to use.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import itertools
import os
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

# What decides the cost of a phase's steps.
_DECISIVE = ("sampling", "noise_multiplier", "unit", "noise", "horizon")


class BudgetPlan(ShownAsText, abc.ABC):
    """What follows from a budget and the facts of a run. Not for use on its own.

    Args:
      settings: the arguments of the plan, for `replace`.
      epsilon: the budget.
      delta: the delta.
      population: the records there are.
      size: the records expected in a step: the public divisor.
      steps: how many steps (rounds) the run has.
      scheme: what draws them, as it is accounted for.
      unit: what is clipped.
      accountant: `"pld"` or `"rdp"`.
      ledger: a ledger, or the path of its file; None for one in memory.
      allow_change: whether the plan may come after other phases of the ledger.
      matrix: of correlated noise, for all the steps; None for independent noise.
    """

    #: How this plan calls records, what it draws at once, how often it goes through
    #: the data, and a step.
    _RECORDS, _SIZE, _LENGTH, _STEP = "records", "size", "length", "step"

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        epsilon: float,
        delta: float,
        population: int,
        size: float,
        steps: int,
        scheme: Any,
        unit: str,
        accountant: str,
        ledger: Ledger | str | os.PathLike[str] | None,
        allow_change: bool,
        matrix: NoiseMatrix | None = None,
    ):
        self._settings = settings
        #: The budget.
        self.epsilon = epsilon
        #: The delta of the budget.
        self.delta = delta
        #: The scheme that draws, as it is accounted for.
        self.scheme = scheme
        #: Steps (rounds) of the whole run.
        self.steps = steps
        #: The accountant.
        self.accountant = accountant
        self._population, self._size, self._unit = population, size, unit
        self._matrix = matrix
        self._clip = ""
        #: What has been spent, step by step.
        self.ledger = Ledger.open(ledger, delta, accountant)
        self._allow_change = _arguments.boolean("allow_change", allow_change)
        phases = copy.deepcopy(self.ledger.phases) if allow_change else []
        # Those of other plans. The last may be what an earlier process ran of this one.
        self._before = phases[:-1]
        #: z: the least noise with which the whole run stays within the budget.
        self.noise_multiplier = self._least_noise()
        if phases and not self._runs_in(phases[-1]):
            self._before = phases
            self.noise_multiplier = self._least_noise()

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
        """The whole run, as a phase of the ledger."""
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
        """Whether a phase of the ledger has steps as this plan draws and noises."""
        ours, found = self._planned().settings(), phase.settings()
        return all(ours[name] == found[name] for name in _DECISIVE)

    def _spent_before(self) -> dp_accounting.DpEvent | None:
        if not self._before:
            return None
        return dp_accounting.ComposedDpEvent([part.event() for part in self._before])

    @property
    def planned_epsilon(self) -> float:
        """What the whole run spends: the budget, or very little less.

        With `allow_change`, that of the other phases of the ledger is among it.
        """
        event = dp_accounting.ComposedDpEvent(
            [part.event() for part in (*self._before, self._planned())]
        )
        return event_epsilon(event, self.delta, self.accountant)

    def replace(self, **changes: Any) -> Any:
        """A new plan with other arguments, with a ledger of its own that is empty.

        No file of the plan is one of the new plan's, unless it is given again.

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
        """This plan and its neighbours, one dictionary each, for CSV files or pandas.

        Each has half, or twice, of one argument. No data are used.
        """
        found = [self._row("this plan", self)]
        names, factors = ("epsilon", self._SIZE, self._LENGTH), (0.5, 2)
        others = list(itertools.product(names, factors))
        for name, factor in _progress.bar(others, title="neighbours", unit="plan"):
            value = self._settings[name]
            if isinstance(value, str):
                value = self._size  # "auto"
            value *= factor
            if name != "epsilon":
                value = int(value)
                if value < 1 or (name == self._SIZE and value > self._population):
                    continue
            words = f"{'half' if factor < 1 else 'twice'} the {name.replace('_', ' ')}"
            with contextlib.suppress(BudgetSpentError):
                found.append(self._row(words, self._neighbour(name, value)))
        return found

    def _neighbour(self, name: str, value: Any) -> BudgetPlan:
        """A plan that comes after the same phases."""
        before = Ledger(self.delta, self.accountant)
        if self._before:
            # The last one stands for what the neighbour does in this plan's place.
            own = dataclasses.replace(self._planned(), runs=[0])
            before.phases = [*self._before, own]
        return self.replace(**{name: value}, ledger=before)

    def _row(self, change: str, plan: BudgetPlan) -> dict[str, Any]:
        return {
            "change": change,
            "epsilon": plan.epsilon,
            "delta": plan.delta,
            self._SIZE: plan._size,
            self._LENGTH: plan._settings[self._LENGTH],
            "steps": plan.steps,
            "momentum": plan._settings["momentum"],
            "noise_multiplier": plan.noise_multiplier,
            "noise_of_the_mean": plan.noise_multiplier / plan._size,
        }

    def table(self) -> str:
        """`rows` as text: what neighbouring choices would need in noise."""
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
        """What was spent, with everything that the number means nothing without.

        Args:
          format: None for a `PrivacyStatement`; `"text"`, `"markdown"` (a section of
            a model card) or `"json"` for that text.

        Raises:
          ValueError: If nothing ran yet, or the format is another one.
          PrivacyMismatchError: If steps ran that the plan did not see.
        """
        if format is not None:
            _arguments.choice("format", format, FORMATS)
        self._refuse_unseen()
        if not self.ledger.phases:
            raise ValueError(
                "Nothing ran yet, so there is nothing to state. print(plan) shows what "
                "is planned."
            )
        stated = self.ledger.statement()
        return stated if format is None else stated.render(format)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """What refuses a clip rule's counts in here says which batches have room."""
        try:
            yield
        except SmallBatchError as error:
            raise ValueError(self._size_for(error.rule)) from None

    def _check_counts(self, rule: Any) -> None:
        """Raises if what the clip rule counts is too precise for the noise.

        A rule with groups does not know yet how many; its mechanism looks then.
        """
        if not rule.has_groups:
            z = self.noise_multiplier
            split_noise_multiplier(z, count_stddevs(rule, float(self._size), z))

    def _size_for(self, rule: Any) -> str:
        """Says from which size on a batch hides what a rule counts, by its own noise.

        A larger batch has more noise, and less of it for each of its records.
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
        """What the plan's text says of correlated noise, and of the clip."""
        facts = []
        if self._matrix is not None:
            facts.append(("correlation", self._matrix.describe()))
        if self._clip:
            facts.append(("clip", self._clip))
        return facts

    @abc.abstractmethod
    def _refuse_unseen(self) -> None:
        """Raises if something ran that the ledger does not know of."""

    @abc.abstractmethod
    def _facts(self) -> list[tuple[str, str]]:
        """What the plan's text says, line by line."""

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
