"""Draws into which every record enters on its own, and the room that they need."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, cast

from tfdpclip import _arguments
from tfdpclip.sampling.base import NeighboringRelation, SamplingScheme

# Probability per step that a default capacity is exceeded. What an overflow costs is
# accounted for; this makes it too small to see.
_DEFAULT_OVERFLOW = 1e-10


class PoissonDraws(SamplingScheme):
    """What schemes have in common that let every record enter with one probability.

    Dataclasses with the fields `rate`, `capacity` and `population`.
    """

    rate: float
    capacity: int | None
    population: int | None

    def _check_draws(self) -> None:
        self._keep("rate", _arguments.rate("rate", self.rate))
        if self.capacity is not None:
            self._keep_counts("capacity")
            if self.population is None:
                raise ValueError(
                    "population must be given with capacity: how often a draw "
                    "overflows depends on it."
                )
        if self.population is not None:
            self._keep_counts("population")

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        return NeighboringRelation.ADD_OR_REMOVE_ONE

    def expected_batch_size(self, population: int) -> float:
        return self.rate * _arguments.count_of("population", population, 0)

    def steps_per_epoch(self, population: int) -> int:
        del population
        return math.ceil(1 / self.rate - 1e-9)

    @abc.abstractmethod
    def _overflow(self, population: int, capacity: int) -> float:
        """The probability that a neighbour's more would not fit."""

    def assumptions(self) -> tuple[str, ...]:
        if self.capacity is None:
            return ()
        overflow = self._overflow(cast(int, self.population), self.capacity)
        return (
            f"a step holds at most {self.capacity} records (exceeded with probability "
            f"{overflow:.1g} per step, which is accounted for)",
        )

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
        low, high = 0, population + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._overflow(population, middle) <= _DEFAULT_OVERFLOW:
                high = middle
            else:
                low = middle
        return min(high, population)

    def _capacity(self, population: int) -> int:
        return self.capacity or self.default_capacity(population)

    def _for_data(self, population: int, capacity: int) -> SamplingScheme:
        known = self.population
        if known is not None and self.capacity is not None and known < population:
            raise ValueError(
                f"population = {known} is less than the {population} records given."
            )
        if capacity >= population:
            return self._with_room(None, None)
        return self._with_room(
            min(capacity, self.capacity or capacity),
            max(population, known or population),
        )

    def _with_room(self, capacity: int | None, population: int | None) -> Any:
        """The same scheme with another capacity, of another population."""
        own = cast(Any, self)
        return dataclasses.replace(own, capacity=capacity, population=population)

    def _draw(self, key, population, step):
        # Given how many enter, every subset of that size is equally likely; so is
        # what is left of it by a uniformly random cut.
        rng = key.rng(step)
        size = int(rng.binomial(population, self.rate))
        if self.capacity is not None:
            size = min(size, self.capacity)
        return rng.choice(population, size, replace=False)
