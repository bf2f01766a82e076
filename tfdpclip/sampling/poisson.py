"""Schemes that draw every record independently, and the capacity that they need."""

from __future__ import annotations

import abc
import bisect
import dataclasses
import math
from typing import Any, ClassVar, cast

import dp_accounting
import numpy as np

from tfdpclip import _arguments, correlated
from tfdpclip.sampling import events
from tfdpclip.sampling.base import NeighboringRelation, SamplingScheme

# Probability per step that a draw exceeds a default capacity. The accounting covers
# overflows; with this probability, their cost is negligible.
_DEFAULT_OVERFLOW = 1e-10


class IndependentRecords(SamplingScheme):
    """Base of schemes that place every record independently.

    The number of records in a step is random, so that a step needs a capacity.
    Subclasses are dataclasses with the fields `capacity` and `population`, and an
    attribute `rate`.
    """

    capacity: int | None
    population: int | None

    def _check_room(self) -> None:
        self._keep_counts("capacity", "population")
        if self.capacity is not None and self.population is None:
            raise ValueError(
                "population must be given with capacity: the probability that a "
                "draw overflows depends on it."
            )

    neighboring_relation = NeighboringRelation.ADD_OR_REMOVE_ONE

    @abc.abstractmethod
    def _overflow(self, population: int, capacity: int) -> float:
        """The probability that the extra record of a neighbour would not fit."""

    def assumptions(self) -> tuple[str, ...]:
        if self.capacity is None:
            return ()
        overflow = self._overflow(cast(int, self.population), self.capacity)
        return (
            f"a step holds at most {self.capacity} records (exceeded with probability "
            f"{overflow:.1g} per {self._overflows_in}, which is accounted for)",
        )

    #: The period that the probability `_overflow` is for.
    _overflows_in: ClassVar[str] = "step"

    def accounts_for(self, drawn: SamplingScheme) -> bool:
        if self.capacity is None and isinstance(drawn, type(self)):
            return self._with_room(None, None) == drawn._with_room(None, None)
        return self == drawn

    def default_capacity(self, population: int) -> int:
        """Returns the least capacity exceeded less than once in 10^10 steps.

        >>> from tfdpclip import sampling
        >>> sampling.Poisson(0.01).default_capacity(10_000)
        170
        """
        population = _arguments.count_of("population", population)
        return 1 + bisect.bisect_left(
            range(1, population),
            True,
            key=lambda most: self._overflow(population, most) <= _DEFAULT_OVERFLOW,
        )

    def _capacity(self, population: int) -> int:
        return self.capacity or self.default_capacity(population)

    def _for_data(self, population: int, capacity: int) -> SamplingScheme:
        planned = self.population
        if planned is not None and self.capacity is not None and planned < population:
            raise ValueError(
                f"population = {planned} is less than the {population} records given."
            )
        if capacity >= population:
            return self._with_room(None, None)
        return self._with_room(
            min(capacity, self.capacity or capacity),
            max(population, planned or population),
        )

    def _with_room(self, capacity: int | None, population: int | None) -> Any:
        """The same scheme with the given capacity and population."""
        scheme = cast(Any, self)
        return dataclasses.replace(scheme, capacity=capacity, population=population)


class PoissonDraws(IndependentRecords):
    """Base of schemes that let every record enter with the same probability.

    Subclasses are dataclasses with the fields `rate`, `capacity` and `population`.
    """

    rate: float

    def expected_batch_size(self, population: int) -> float:
        return self.rate * _arguments.count_of("population", population, 0)

    def _check_draws(self) -> None:
        _arguments.set_field(self, "rate", _arguments.rate)
        self._check_room()

    def steps_per_epoch(self, population: int) -> int:
        del population
        return math.ceil(1 / self.rate - 1e-9)

    def _draw(self, key, population, step):
        # Given the number of drawn records, every subset of that size is equally
        # likely; a uniformly random cut keeps this true.
        rng = key.rng(step)
        size = int(rng.binomial(population, self.rate))
        if self.capacity is not None:
            size = min(size, self.capacity)
        return rng.choice(population, size, replace=False)


@dataclasses.dataclass(frozen=True)
class FullBatch(SamplingScheme):
    """Every step sees every record.

    *Formal guarantees*

    * Neighbours: add or remove one record. T steps are one Gaussian with noise
      multiplier z / sqrt(T), exactly.

    >>> FullBatch().event(2.0, 3).count
    3
    """

    amplified: ClassVar[bool] = False

    neighboring_relation = NeighboringRelation.ADD_OR_REMOVE_ONE

    def expected_batch_size(self, population: int) -> float:
        return float(_arguments.count_of("population", population, 0))

    def steps_per_epoch(self, population: int) -> int:
        del population
        return 1

    def participation(self, steps: int) -> correlated.MinSeparation:
        return correlated.MinSeparation(1, _arguments.integer("steps", steps, 1))

    def describe(self) -> str:
        return "full batch"

    def at_worst(self) -> FullBatch:
        return self

    def _capacity(self, population: int) -> int:
        return population

    def _draw(self, key, population, step):
        return np.arange(population)


@dataclasses.dataclass(frozen=True)
class Poisson(PoissonDraws):
    """Every record enters every step independently with probability `rate`.

    The default scheme: privacy accounting is sharpest for Poisson sampling.

    *Formal guarantees*

    * Neighbours: add or remove one record.
    * Without `capacity`, steps are the Poisson-sampled Gaussian of the literature.
    * With `capacity`, a larger draw is cut to a uniformly random subset, and
      `event` accounts for the cut
      (`tfdpclip.accounting.TruncatedPoissonSampledDpEvent` has the bound and its
      proof). Batches always have a capacity; the default one is exceeded less than
      once in 10^10 steps.

    Attributes:
      rate: Probability with which a record enters a step, in (0, 1].
      capacity: Largest number of records in a step; None for no limit.
      population: Number of records, or an upper bound. Needed with `capacity`.

    >>> scheme = Poisson(0.01)
    >>> scheme.event(1.1, 10).event.sampling_probability
    0.01
    """

    rate: float
    capacity: int | None = None
    population: int | None = None

    def __post_init__(self):
        self._check_draws()

    def describe(self) -> str:
        return f"Poisson, rate {self.rate:.6g}"

    def at_worst(self) -> FullBatch:
        return FullBatch()

    def _overflow(self, population: int, capacity: int) -> float:
        return events.overflow_probability(population, self.rate, capacity)

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        if self.capacity is None:
            return dp_accounting.PoissonSampledDpEvent(self.rate, gaussian)
        return events.TruncatedPoissonSampledDpEvent(
            cast(int, self.population), self.rate, self.capacity, gaussian
        )


@dataclasses.dataclass(frozen=True)
class CappedPoisson(PoissonDraws):
    """Draws examples independently; people have at most `per_person` examples.

    User-level privacy by example-level sampling (Charles et al. 2024, arXiv 2407.07737;
    Chua et al. 2024, arXiv 2406.14322): the data are cut once to `per_person` examples
    of each person, then drawn as by `Poisson`, and each example is clipped separately.
    The alternative, `Poisson(rate).batches(data, people=ids, per_person=k)`, draws
    people, and clips all of a person's examples in a step together.

    *Formal guarantees*

    * Neighbours: add or remove one person, with all of up to `per_person` examples.
    * Without `capacity`, the worst case of a step is a mixture of Gaussians: the sum
      moves by j clip norms with the probability that j of `per_person` examples enter
      (Ganesh 2024, arXiv 2401.10294). `tfdpclip.accounting.CappedPoissonSampledDpEvent`
      has the bound and its proof, with `capacity`, too.
    * With `per_person=1` the cost equals the cost of `Poisson`.
    * `batches(data, people=ids)` cuts the data; the guarantee is for the people that
      `ids` tell apart.

    Attributes:
      rate: Probability with which an example enters a step, in (0, 1].
      per_person: Largest number of examples of a person in the data, and in a step.
      capacity: Largest number of examples in a step; None for no limit.
      population: Number of examples after the cut, or an upper bound. Needed with
        `capacity`.

    >>> scheme = CappedPoisson(0.01, per_person=8)
    >>> scheme.event(1.1, 10).event.per_person
    8
    """

    rate: float
    per_person: int
    capacity: int | None = None
    population: int | None = None

    def __post_init__(self):
        self._keep_counts("per_person")
        self._check_draws()

    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "person",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        """Returns the privacy event of `steps` steps.

        Args:
          noise_multiplier: z: noise standard deviation over the clip norm of an
            example.
          steps: Number of steps (noise draws).
          unit: `"person"`.
          sensitivity: By how many clip norms one example moves the sum, instead of 1.

        Raises:
          ValueError: If an argument is out of range, or the unit is not `"person"`.
        """
        _arguments.choice("unit", unit, events.UNITS)
        if unit != "person":
            raise ValueError(
                f"unit must be 'person' with {type(self).__name__}, got {unit!r}: "
                "neighbours differ in all examples of a person. For one example, draw "
                "by Poisson(rate)."
            )
        return super().event(
            noise_multiplier, steps, unit=unit, sensitivity=sensitivity
        )

    def describe(self) -> str:
        return (
            f"Poisson of single examples, rate {self.rate:.6g}, at most "
            f"{self.per_person} of a person in the data"
        )

    def assumptions(self) -> tuple[str, ...]:
        return (
            "neighbours differ in a person, with all of at most "
            f"{self.per_person} examples, by the ids that came with the data",
            *super().assumptions(),
        )

    def at_worst(self) -> CappedPoisson:
        return CappedPoisson(1.0, self.per_person)

    def _overflow(self, population: int, capacity: int) -> float:
        return events.overflow_probability(
            population, self.rate, capacity - self.per_person + 1
        )

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return events.CappedPoissonSampledDpEvent(
            self.per_person, self.rate, gaussian, self.population, self.capacity
        )
