"""Schemes that keep a record's steps apart, for correlated noise."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from typing import ClassVar

import dp_accounting
import numpy as np

from tfdpclip import _arguments, correlated
from tfdpclip.correlated.participation import check_cyclic_rate
from tfdpclip.sampling import events
from tfdpclip.sampling.base import (
    EqualSteps,
    NeighboringRelation,
    SamplingScheme,
    check_population,
)

# Probability per step that a draw exceeds a default capacity, and the largest
# probability allowed: a step without room for its draw has no record at all.
_DEFAULT_OVERFLOW = 1e-10
_MOST_OVERFLOW = 1e-3


@functools.lru_cache(maxsize=8)
def _fixed_order(population: int, order: int) -> np.ndarray:
    """A permutation of the records that is public, and the same in every process."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(order)))
    permutation = rng.permutation(population)
    permutation.flags.writeable = False
    return permutation


@dataclasses.dataclass(frozen=True)
class MinSeparation(EqualSteps):
    """Batches of `batch_size` in one fixed order, over and over.

    Every record comes again after floor(population / batch_size) steps at the earliest,
    which makes correlated noise cheapest without sampling. The order is a function of
    the settings, so that a run that continues in a new process keeps the order.

    *Formal guarantees*

    * Two steps of one record are at least `separation` apart, and m consecutive steps
      contain it at most ceil(m batch_size / population) times. (A record has the places
      i, i + N, i + 2N, ... of the sequence of all draws, N the population, and step t
      has the places t B to (t + 1) B - 1.)
    * Neighbours: replace one record, or, with `relation="zero_out"`, replace it by
      a null record. The order does not depend on the data; there is no amplification.
    * With `participations`, a step that would exceed a record's limit is refused.

    Attributes:
      population: Number of records (or clients), public.
      batch_size: Records per step.
      min_separation: Smallest number of steps from one step of a record to the next, 1
        or more; larger batch sizes are refused.
      participations: Largest number of steps of a record; None for no limit.
      relation: `"replace_one"` or `"zero_out"`.
      order: The number of the fixed order: any integer, public.

    >>> scheme = MinSeparation(1000, 50)
    >>> scheme.separation
    20
    >>> scheme.participation(45)
    MinSeparation(separation=20, participations=3)
    """

    amplified: ClassVar[bool] = False
    # A draw that is not used advances the order.
    independent_steps: ClassVar[bool] = False

    population: int
    batch_size: int
    min_separation: int = 1
    participations: int | None = None
    relation: str = "replace_one"
    order: int = 0

    def __post_init__(self):
        self._keep_counts(
            "population", "batch_size", "min_separation", "participations"
        )
        _arguments.choice("relation", self.relation, ("replace_one", "zero_out"))
        _arguments.set_field(self, "order", _arguments.integer)
        if self.batch_size * self.min_separation > self.population:
            most = self.population // self.min_separation
            raise ValueError(
                f"batch_size must be at most {most} for population = "
                f"{self.population} and min_separation = {self.min_separation}, got "
                f"{self.batch_size}."
            )

    @property
    def separation(self) -> int:
        """Smallest number of steps from one step of a record to the next."""
        return self.population // self.batch_size

    def participation(self, steps: int) -> correlated.MinSeparation:
        most = self._releases(_arguments.integer("steps", steps, 1))
        if self.participations is not None:
            most = min(most, self.participations)
        return correlated.MinSeparation(self.separation, most)

    def describe(self) -> str:
        return (
            f"a fixed order, {self.batch_size} of {self.population} per step, at least "
            f"{self.separation} steps between two of one record"
        )

    def assumptions(self) -> tuple[str, ...]:
        return ("no amplification by sampling: the order is fixed and may be known",)

    def at_worst(self) -> MinSeparation:
        return MinSeparation(self.population, self.population, relation=self.relation)

    def _releases(self, steps: int) -> int:
        return -(-steps * self.batch_size // self.population)

    def _draw(self, key, population, step):
        del key
        check_population(self.population, population)
        first, last = step * self.batch_size, (step + 1) * self.batch_size
        limit = self.participations
        if limit is not None and last > limit * population:
            raise ValueError(
                f"step {step} would have a record more than participations = {limit} "
                f"times: there are {limit * population // self.batch_size} steps."
            )
        places = np.arange(first, last) % population
        return _fixed_order(population, self.order)[places]


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(SamplingScheme):
    """Groups take turns; in each step, the records of one group enter at random.

    Banded matrices are amplified by this sampling (Choquette-Choo et al. 2023, arXiv
    2306.08153): a record belongs to one of `separation` groups, and enters step t with
    probability `rate * separation` if it is its group's turn, t modulo `separation`.
    With independent noise it is no better than `Poisson`, which draws from all records.

    *Formal guarantees*

    * Neighbours: replace one record by a null record. Groups are a function of the
      settings, and may be public; the draw within a group must be secret.
    * n steps are ceil(n / b) steps of the Poisson-sampled Gaussian at rate b q, for
      independent noise and for every matrix of at most b bands (docs/guarantees.md).
    * A draw larger than `capacity` is dropped as a whole, and the step is noise alone.
      Dropping costs no privacy, since a null record is drawn, and counted, as usual.
      Given the rest of the draw: if it has fewer records than the capacity, the record
      enters with probability b q and nothing else changes; if exactly as many, the step
      is dropped if the record enters; if more, the step is dropped in any case. All
      three hold for both neighbours.

    Attributes:
      population: Number of records (or clients), public.
      rate: q, the share of all records in a step on average; at most 1 / `separation`.
      separation: b, the number of groups.
      capacity: Largest number of records in a step; None for no limit.
      order: The number of the fixed order that deals records to groups; any integer.

    >>> scheme = CyclicPoisson(1000, rate=0.02, separation=4)
    >>> scheme.event(1.0, 10).count, scheme.event(1.0, 10).event.sampling_probability
    (3, 0.08)
    """

    independent_steps: ClassVar[bool] = False

    population: int
    rate: float
    separation: int
    capacity: int | None = None
    order: int = 0

    def __post_init__(self):
        self._keep_counts("population", "separation", "capacity")
        _arguments.set_field(self, "rate", _arguments.rate)
        check_cyclic_rate(self.rate, self.separation)
        if self.separation > self.population:
            raise ValueError(
                f"separation must be at most the population, got {self.separation} "
                f"groups of {self.population} records."
            )
        _arguments.set_field(self, "order", _arguments.integer)
        if self.capacity is None:
            return
        if self.overflow_probability > _MOST_OVERFLOW:
            raise ValueError(
                f"capacity must be at least {self._least_capacity(_MOST_OVERFLOW)}, "
                f"got {self.capacity}: with population = {self.population} in "
                f"separation = {self.separation} groups, about one step in "
                f"{1 / self.overflow_probability:.0f} would draw more, and have no "
                "record at all."
            )

    neighboring_relation = NeighboringRelation.REPLACE_SPECIAL

    @property
    def turn_rate(self) -> float:
        """The probability that a record enters in its group's turn."""
        return min(1.0, self.rate * self.separation)

    @property
    def overflow_probability(self) -> float:
        """A bound on the probability that a step is dropped for lack of room."""
        if self.capacity is None:
            return 0.0
        return events.overflow_probability(
            self._largest_group, self.turn_rate, self.capacity + 1
        )

    @property
    def _largest_group(self) -> int:
        return -(-self.population // self.separation)

    def participation(self, steps: int) -> correlated.CyclicPoisson:
        _arguments.integer("steps", steps, 1)
        return correlated.CyclicPoisson(self.separation, self.rate)

    def expected_batch_size(self, population: int) -> float:
        return self.rate * _arguments.count_of("population", population, 0)

    def steps_per_epoch(self, population: int) -> int:
        del population
        return math.ceil(1 / self.rate - 1e-9)

    def describe(self) -> str:
        return (
            f"cyclic Poisson, rate {self.rate:.6g}: {self.separation} groups take "
            f"turns, of each record with probability {self.turn_rate:.6g}"
        )

    def assumptions(self) -> tuple[str, ...]:
        if self.capacity is None:
            return ()
        return (
            f"a step that draws more than {self.capacity} records has none (with "
            f"probability {self.overflow_probability:.1g} per step)",
        )

    def accounts_for(self, drawn: SamplingScheme) -> bool:
        if self.capacity is None and isinstance(drawn, CyclicPoisson):
            return self == dataclasses.replace(drawn, capacity=None)
        return self == drawn

    def at_worst(self) -> MinSeparation:
        return MinSeparation(self.population, self.population, relation="zero_out")

    def _capacity(self, population: int) -> int:
        del population
        return self.capacity or self._least_capacity(_DEFAULT_OVERFLOW)

    def _least_capacity(self, overflow: float) -> int:
        group, rate = self._largest_group, self.turn_rate
        return 1 + bisect.bisect_left(
            range(1, group),
            True,
            key=lambda most: (
                events.overflow_probability(group, rate, most + 1) <= overflow
            ),
        )

    def _for_data(self, population: int, capacity: int) -> CyclicPoisson:
        check_population(self.population, population)
        if capacity >= self._largest_group:
            return dataclasses.replace(self, capacity=None)
        return dataclasses.replace(
            self, capacity=min(capacity, self.capacity or capacity)
        )

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.PoissonSampledDpEvent(self.turn_rate, gaussian)

    def _releases(self, steps: int) -> int:
        return -(-steps // self.separation)

    def _draw(self, key, population, step):
        check_population(self.population, population)
        turn = step % self.separation
        group = _fixed_order(population, self.order)[turn :: self.separation]
        rng = key.rng(step)
        size = int(rng.binomial(len(group), self.turn_rate))
        if self.capacity is not None and size > self.capacity:
            return group[:0]
        return rng.choice(group, size, replace=False)
