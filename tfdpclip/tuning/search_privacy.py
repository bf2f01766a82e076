"""The privacy cost of a search over hyperparameters on private data."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from tfdpclip import _arguments
from tfdpclip.accounting import Ledger, _rdp, event_epsilon
from tfdpclip.accounting.accountants import without_thresholds
from tfdpclip.accounting.statement import CHOICE, unit_in_words
from tfdpclip.sampling import SamplingScheme, events

_MOST_RUNS = 10**6


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """One private training run, as in the accounting.

    Args:
      sampling: a scheme of `tfdpclip.sampling`.
      noise_multiplier: z.
      steps: number of steps.
      unit: the object that is clipped, as of the optimizer: `"example"`, `"person"`,
        `"client"`, `"batch"` or `"group"`.

    Raises:
      ValueError: if an argument is out of range.

    >>> from tfdpclip.sampling import Poisson
    >>> TrainingPlan(Poisson(0.01), 1.1, 1000).steps
    1000
    """

    sampling: SamplingScheme
    noise_multiplier: float
    steps: int
    unit: str = "example"

    def __post_init__(self):
        wanted = "a scheme of dpc.sampling, such as dpc.sampling.Poisson(rate=0.01)"
        _arguments.instance("sampling", self.sampling, SamplingScheme, wanted)
        _arguments.set_field(self, "noise_multiplier", _arguments.non_negative)
        _arguments.set_field(self, "steps", _arguments.integer)
        _arguments.choice("unit", self.unit, events.UNITS)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The run as a `dp_accounting` event."""
        return self.sampling.event(self.noise_multiplier, self.steps, unit=self.unit)


@dataclasses.dataclass(frozen=True)
class RandomStopping:
    """Draws settings at random, a random number of times; only the best is released.

    Papernot and Steinke (2022). The price hardly grows with the number of runs, as
    long as that number is random and only the best run is ever shown.

    Args:
      mean: the expected number of runs, above 1; the number is geometric.

    Raises:
      ValueError: if an argument is out of range.

    >>> 1 <= RandomStopping(10.0).draw() <= 10**6
    True
    """

    mean: float

    def __post_init__(self):
        mean = _arguments.finite("mean", self.mean)
        if mean <= 1:
            raise ValueError(f"mean must be above 1, got {mean!r}.")
        object.__setattr__(self, "mean", mean)

    def draw(self, rng: np.random.Generator | None = None) -> int:
        """Draws a number of runs, by default from the operating system's entropy."""
        rng = np.random.default_rng() if rng is None else rng
        _arguments.instance("rng", rng, np.random.Generator, "a numpy Generator")
        return min(int(rng.geometric(1 / self.mean)), _MOST_RUNS)

    def rdp(self, curve: np.ndarray) -> np.ndarray:
        """Bounds of the search at the accountant's orders, from the curve of one run.

        Papernot and Steinke (2022), Theorem 2 with eta = 1 and gamma = 1 / mean.
        """
        orders = np.asarray(_rdp.ORDERS)
        grown = curve + math.log(self.mean) / (orders - 1)
        price = np.min((1 - 1 / orders) * curve + math.log(self.mean) / orders)
        bound = grown + 2 * price
        # A Renyi divergence never decreases with its order.
        return np.minimum.accumulate(bound[::-1])[::-1]


@dataclasses.dataclass(frozen=True)
class SearchStatement:
    """An epsilon for a whole search. `str()` gives the text to print.

    Attributes:
      epsilon: the epsilon of the search, all runs together.
      delta: the delta of the claim.
      relation: the neighbouring relation, in words.
      method: the method of the bound, in words.
      single_epsilon: the largest epsilon of a single run; the search costs more.
      assumptions: the conditions of the claim.
      not_private: the reasons if the search is not private.
      unit: the unit of privacy, in words.
    """

    epsilon: float
    delta: float
    relation: str
    method: str
    single_epsilon: float
    assumptions: tuple[str, ...] = ()
    not_private: tuple[str, ...] = ()
    unit: str = ""

    def __str__(self) -> str:
        if self.not_private:
            lines = [f"the search was not private: {'; '.join(self.not_private)}."]
        else:
            lines = [
                f"the search, with all its runs, is ({self.epsilon:.4g}, "
                f"{self.delta:.4g})-differentially private."
            ]
        rows = [("neighbours", self.relation), ("unit", self.unit)]
        rows.append(("method", self.method))
        if math.isfinite(self.single_epsilon):
            rows.append(("one run", f"epsilon {self.single_epsilon:.4g} at the most"))
        lines += [f"  {name + ':':<12} {text}" for name, text in rows if text]
        lines += [f"  assuming     {text}" for text in self.assumptions]
        return "\n".join(lines)


def not_accounted() -> SearchStatement:
    """The statement for a search with unknown cost."""
    single = "the epsilon of a single run does not cover the choice among the runs"
    reason = "its runs were not accounted for together"
    return SearchStatement(math.inf, 0.0, "", "", math.inf, (single,), (reason,))


def search_privacy(
    plans: Iterable[TrainingPlan | Ledger],
    delta: float,
    search: RandomStopping | None = None,
    spent: Ledger | None = None,
) -> SearchStatement:
    """States the privacy cost of a search on private data.

    *Formal guarantees*

    * Without `search`, everything about all runs may be released: their composition
      (privacy loss distributions).
    * With `search`, the settings of each run were drawn uniformly and independently
      from `plans`, the number of runs was drawn from the distribution of `search`, and
      only the best run and its settings are released (Papernot and Steinke 2022). One
      draw with its run has at most the largest Renyi divergence of any of the plans, at
      every order.
    * `spent` was spent once, before the search, on the same records: it composes with
      all the runs, event by event. The runs may depend on its releases, such as
      features of a network that was trained then.

    Args:
      plans: without `search`, one for each run that was made, or the run's ledger
        (`plan.ledger`), which has the actual cost, also of a run that ended early.
        With `search`, one for each setting that could have been drawn.
      delta: in (0, 1).
      search: the random choice of the runs, if any.
      spent: the ledger of earlier training on the same records, if any.

    Returns:
      The statement.

    Raises:
      ValueError: if there are no plans, or they have different neighbouring relations,
        only some are about people, a ledger is empty or stands for a random run, or
        `delta` is out of range.

    >>> from tfdpclip.sampling import Poisson
    >>> plan = TrainingPlan(Poisson(0.01), 2.0, 1000)
    >>> all_runs = search_privacy([plan] * 20, 1e-5)
    >>> best_run = search_privacy([plan], 1e-5, RandomStopping(20))
    >>> best_run.epsilon < all_runs.epsilon
    True
    """
    plans = _arguments.items("plans", plans)
    ledgers = [plan for plan in plans if isinstance(plan, Ledger)]
    runs = [plan for plan in plans if not isinstance(plan, Ledger)]
    for run in runs:
        wanted = "TrainingPlans, or Ledgers of runs"
        _arguments.instance("plans", run, TrainingPlan, wanted)
    if any(not ledger.phases for ledger in ledgers):
        raise ValueError(
            "plans: a ledger has no phase, so its run is not known. A run that ended "
            "before its first step costs nothing: leave its ledger out, as by "
            "[ledger for ledger in ledgers if ledger.steps]."
        )
    if ledgers and search is not None:
        raise ValueError(
            "plans: a ledger records a run that was made. With search=, give every "
            "setting that could have been drawn, as TrainingPlan(sampling, z, steps)."
        )
    delta = _arguments.delta(delta)
    check_search(search)
    if not plans:
        raise ValueError("plans must not be empty: give one for each run.")
    check_spent(spent)
    before = spent.phases if spent is not None else []
    phases = [phase for ledger in ledgers for phase in ledger.phases]
    parts = [*runs, *phases, *before]
    relation = _common_relation(parts)
    distinct = list(dict.fromkeys(run.event for run in runs))
    made = [ledger.event() for ledger in ledgers]
    past = [spent.event()] if spent is not None and before else []
    assumptions, reasons = _conditions(runs, ledgers, spent if past else None)
    if search is None:
        method = f"composition of {len(plans)} runs (pld)"
        epsilon, single = _cost_of_all(runs, distinct, made, past, delta)
    else:
        method = (
            f"random stopping, number of runs geometric with mean {search.mean:g} "
            "(Renyi differential privacy)"
        )
        assumptions.insert(
            0,
            "nothing but the best run and its settings is released: no other result, "
            "no plot of all of them, not their number",
        )
        epsilon, single = _cost_of_best(distinct, past, search, delta)
    if past:
        method += ", after what was spent on the same records before"
    if not math.isfinite(epsilon) and not reasons:
        reasons = ("a run has no noise",)
    return SearchStatement(
        epsilon=epsilon,
        delta=delta,
        relation=events.RELATION_NAMES[relation],
        method=method,
        single_epsilon=single,
        assumptions=tuple(assumptions),
        not_private=reasons,
        unit=" then ".join(dict.fromkeys(unit_in_words(part) for part in parts)),
    )


def _common_relation(parts) -> dp_accounting.NeighboringRelation:
    """The neighbouring relation of all runs; raises ValueError if there are several."""
    if len({part.unit == "person" for part in parts}) > 1:
        raise ValueError(
            "plans: some of the runs, or of earlier training in spent, protect people "
            "with all their examples, and the rest single examples, which cannot be "
            "put together. Give all of them per_person, and TrainingPlan(..., "
            'unit="person").'
        )
    relations = {part.sampling.neighboring_relation for part in parts}
    if len(relations) > 1:
        raise ValueError(
            "plans: the runs, and earlier training in spent, have different "
            "neighbouring relations, which cannot be put together. Draw all batches by "
            "one kind of scheme."
        )
    return relations.pop()


def _conditions(
    runs: list[TrainingPlan], ledgers: list[Ledger], spent: Ledger | None
) -> tuple[list[str], tuple[str, ...]]:
    """The assumptions of the statement, and the reasons that it is not private."""
    statements = [ledger.statement() for ledger in ledgers]
    assumptions = [
        "the runs are compared on public data, or on data outside of the claim",
        "the settings that were tried were chosen without looking at the data",
        *dict.fromkeys(a for run in runs for a in run.sampling.assumptions()),
        *dict.fromkeys(a for told in statements for a in told.assumptions),
    ]
    if ledgers:
        assumptions.remove(CHOICE)
    reasons = tuple(
        dict.fromkeys(
            f"in a run, {why}" for told in statements for why in told.not_private
        )
    )
    if spent is not None:
        told = spent.statement()
        reasons += tuple(f"before the search, {why}" for why in told.not_private)
        assumptions += [f"before the search, {a}" for a in told.assumptions]
    return assumptions, reasons


def _cost_of_all(runs, distinct, made, past, delta: float) -> tuple[float, float]:
    """Epsilon of all runs, and the largest of a single run, with all released."""
    counted = collections.Counter(run.event for run in runs)
    total = dp_accounting.ComposedDpEvent(
        [
            *past,
            *made,
            *(dp_accounting.SelfComposedDpEvent(e, n) for e, n in counted.items()),
        ]
    )
    single = max(
        event_epsilon(dp_accounting.ComposedDpEvent([*past, event]), delta)
        for event in (*distinct, *made)
    )
    return event_epsilon(total, delta), single


def _cost_of_best(
    distinct, past, search: RandomStopping, delta: float
) -> tuple[float, float]:
    """Epsilon of the search, and of its worst run, with only the best run released."""
    curves = [_rdp.curve(events.leaves(event)) for event in distinct]
    worst = np.max(curves, axis=0)
    leaves, thresholds = without_thresholds(
        events.leaves(dp_accounting.ComposedDpEvent(past))
    )
    # The thresholds of vocabularies use up a part of delta.
    delta -= thresholds
    if delta <= 0:
        return math.inf, math.inf
    paid = _rdp.curve(leaves) if leaves else 0.0
    epsilon, single = (
        float(rdp_lib.compute_epsilon(_rdp.ORDERS, curve + paid, delta)[0])
        for curve in (search.rdp(worst), worst)
    )
    return epsilon, single


def check_search(search: RandomStopping | None) -> None:
    """Raises ValueError for anything but random stopping or None."""
    wanted = "a RandomStopping or None"
    _arguments.instance("search", search, (RandomStopping, type(None)), wanted)


def check_spent(spent: Ledger | None) -> None:
    """Raises ValueError for anything but a ledger or None."""
    wanted = 'a Ledger or None, such as dpc.accounting.Ledger.load("run/privacy.json")'
    _arguments.instance("spent", spent, (Ledger, type(None)), wanted)
