"""Random allocation: each record is in one random step of each epoch."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from tfdpclip import _arguments
from tfdpclip.sampling import events
from tfdpclip.sampling.base import DrawKey
from tfdpclip.sampling.poisson import FullBatch, IndependentRecords

# The purpose of the random stream of sizes, next to the stream of the order.
_SIZES = 4


@dataclasses.dataclass(frozen=True)
class RandomAllocation(IndependentRecords):
    """At the start of an epoch, each record is put into a random step of the epoch.

    Balls in bins (Chua et al. 2024, arXiv 2412.16802; Feldman and Shenfeld 2025, arXiv
    2502.08202): as in a shuffled epoch, every record comes once; as in Poisson
    sampling, the places of records are independent, which the accounting uses. For the
    same noise, this spends less than `Poisson(1 / steps)`: much less for few short
    epochs, and hardly less for many epochs.

    *Formal guarantees*

    * Neighbours: add or remove one record.
    * The event of an epoch is `tfdpclip.accounting.RandomAllocationDpEvent`, which has
      the bound, and its proof. If an epoch ends early, the steps that ran are counted.
    * A run (a call of `fit`, `ledger.begin`) begins an epoch, with a new draw: the rest
      of an epoch that an earlier run began is not used any more. The noise is the
      same in all steps of an epoch.
    * With `capacity`, a step with more records is cut to a uniformly random subset,
      which is accounted for. Batches always have a capacity; by default, it is
      exceeded less than once in 10^10 epochs.

    One epoch's order is kept in memory, 8 bytes a record; after the order is made,
    a step's cost grows only with the records in the step.

    Attributes:
      steps: t, the steps of an epoch.
      capacity: Largest number of records in a step; None for no limit.
      population: Number of records, or an upper bound. Needed with `capacity`.

    >>> scheme = RandomAllocation(100)
    >>> scheme.expected_batch_size(5000), scheme.steps_per_epoch(5000)
    (50.0, 100)
    >>> from tfdpclip import accounting, sampling
    >>> round(accounting.epsilon(0.8, 1000, scheme, 1e-5), 2)
    2.91
    >>> round(accounting.epsilon(0.8, 1000, sampling.Poisson(0.01), 1e-5), 2)
    3.14
    """

    steps: int
    capacity: int | None = None
    population: int | None = None

    # The steps of an epoch have disjoint records.
    independent_steps: ClassVar[bool] = False
    begins_epochs: ClassVar[bool] = True
    _overflows_in: ClassVar[str] = "epoch"

    def __post_init__(self):
        _arguments.set_field(self, "steps", _arguments.integer, 1)
        self._check_room()

    @property
    def rate(self) -> float:
        """The probability with which a record is in a given step."""
        return 1 / self.steps

    def expected_batch_size(self, population: int) -> float:
        return _arguments.count_of("population", population, 0) / self.steps

    def steps_per_epoch(self, population: int) -> int:
        del population
        return self.steps

    def _of_steps(
        self, gaussian: dp_accounting.DpEvent, steps: int
    ) -> dp_accounting.DpEvent:
        whole, rest = divmod(steps, self.steps)
        parts = [events.repeated(self._epoch(self.steps, gaussian), whole)] * (
            whole > 0 or not rest
        )
        if rest:
            parts.append(events.repeated(self._epoch(rest, gaussian), 1))
        return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)

    def _epoch(self, steps: int, gaussian: dp_accounting.DpEvent) -> Any:
        population = None if self.capacity is None else self.population
        return events.RandomAllocationDpEvent(
            self.steps, steps, gaussian, population, self.capacity
        )

    def participation(self, steps: int) -> Any:
        raise ValueError(
            f"{self.describe()}: no proof bounds correlated noise under random "
            "allocation. Draw by MinSeparation(population, batch_size), or by "
            "CyclicPoisson(population, rate, separation) with at most `separation` "
            "bands; or use independent noise."
        )

    def describe(self) -> str:
        return (
            "random allocation, each record in one random step of each epoch of "
            f"{self.steps}"
        )

    def at_worst(self) -> FullBatch:
        return FullBatch()

    def _overflow(self, population: int, capacity: int) -> float:
        one = events.overflow_probability(population, self.rate, capacity)
        return min(1.0, self.steps * one)

    def _draw(self, key, population, step):
        epoch, place = divmod(step, self.steps)
        # Given the number of records of each step, every allocation is equally likely;
        # a random order gives this distribution. A cut keeps a uniform subset.
        first, last = self._ends(key, epoch, population)[place : place + 2]
        if self.capacity is not None:
            last = min(last, first + self.capacity)
        return key.order(epoch, population)[first:last]

    def _ends(self, key: DrawKey, epoch: int, population: int) -> np.ndarray:
        """Where in an epoch's order the records of each step begin, `[steps + 1]`."""

        def make() -> np.ndarray:
            sizes = allocate(population, self.steps, key.rng(epoch, _SIZES))
            return np.concatenate([[0], np.cumsum(sizes)])

        return key.kept("ends", (epoch, population, self.steps), make)


def allocate(records: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the number of records of each step, `[steps]`, by random allocation.

    A group of steps is split into two halves, and its records binomially, until each
    step is alone: probabilities are ratios of integers, without accumulated rounding.

    >>> int(allocate(1000, 7, np.random.default_rng(1)).sum())
    1000
    """
    sizes, counts = np.array([steps]), np.array([records], np.int64)
    while sizes[0] > 1:
        halves = sizes // 2
        moved = rng.binomial(counts, halves / sizes)
        sizes = np.stack([sizes - halves, halves], axis=1).ravel()
        counts = np.stack([counts - moved, moved], axis=1).ravel()
        counts, sizes = counts[sizes > 0], sizes[sizes > 0]
    return counts
