"""Sampling schemes: how a step's records are chosen, and what that does to privacy.

A scheme is a frozen dataclass of public settings; private data is an argument of
`batches` and `cohorts`. The object that draws is the object that is accounted.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import dp_accounting
import numpy as np

from tfdpclip import _arguments
from tfdpclip.sampling import events

if TYPE_CHECKING:
    from tfdpclip.sampling.batches import Batches
    from tfdpclip.sampling.cohorts import Cohorts

NeighboringRelation: TypeAlias = dp_accounting.NeighboringRelation

# Probability per step that a default capacity is exceeded. What an overflow costs is
# accounted for; this makes it too small to see.
_DEFAULT_OVERFLOW = 1e-10


def _drawing(module: str) -> Any:
    """The module that draws, which imports this one, and which may need TensorFlow."""
    return importlib.import_module(f"tfdpclip.sampling.{module}")


class SamplingScheme(abc.ABC):
    """What every sampling scheme states about itself.

    *Formal guarantees*

    * `event(z, T)` dominates T steps whose records were drawn by this scheme and
      whose clipped sums got noise of standard deviation z times the clip norm, for
      neighbours under `neighboring_relation`.
    * Draws of different steps are independent of each other and of the data, except
      where a scheme says otherwise.
    """

    #: Whether steps that miss a record are counted in its favour.
    amplified: ClassVar[bool] = True
    #: Whether draws of different steps are independent and identically distributed.
    independent_steps: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def neighboring_relation(self) -> NeighboringRelation:
        """The relation under which `event` is meant."""

    @abc.abstractmethod
    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "example",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        """Returns what `steps` steps do to privacy.

        Args:
          noise_multiplier: z: noise standard deviation over clip norm.
          steps: Number of steps (noise draws).
          unit: What is clipped; with the relation it sets the sensitivity, see
            `tfdpclip.accounting.sensitivity_factor`.
          sensitivity: Overrides that sensitivity, in clip norms.

        Returns:
          A `dp_accounting` event. Its Gaussian has noise multiplier
          `noise_multiplier` divided by the sensitivity.

        Raises:
          ValueError: If an argument is out of range.
        """

    @abc.abstractmethod
    def expected_batch_size(self, population: int) -> float:
        """Returns the expected number of records per step: the public divisor."""

    @abc.abstractmethod
    def steps_per_epoch(self, population: int) -> int:
        """Returns how many steps touch as many records as there are, on average."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns the scheme in words, for privacy statements."""

    def assumptions(self) -> tuple[str, ...]:
        """Returns what a privacy statement must say beside `describe`."""
        return ()

    def batches(self, data: Any, **options: Any) -> Batches:
        """Draws training batches of `data`, ready for `model.fit`.

        See `tfdpclip.sampling.Batches` for the options and guarantees.
        """
        return _drawing("batches").Batches(self, data, **options)

    def cohorts(self, client_ids: Any, *, seed: int | None = None) -> Cohorts:
        """Draws the clients of each federated round.

        See `tfdpclip.sampling.Cohorts`.
        """
        return _drawing("cohorts").Cohorts(self, client_ids, seed=seed)

    def accounts_for(self, drawn: SamplingScheme) -> bool:
        """Returns whether accounting for this scheme is about what `drawn` draws."""
        return self == drawn

    def at_worst(self) -> SamplingScheme:
        """Returns the scheme to account for steps that used whatever records.

        Under the same neighbours, every step may have used every record, once.

        >>> Poisson(0.01).at_worst()
        FullBatch()
        """
        if self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return FullBatch()
        replaced = self.neighboring_relation is NeighboringRelation.REPLACE_ONE
        size = max(1, int(getattr(self, "population", None) or 1))
        return ShuffledEpochs(size, size, "replace_one" if replaced else "zero_out")

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON-ready values, with the class name."""
        return {"scheme": type(self).__name__, **dataclasses.asdict(cast(Any, self))}

    def _keep(self, name: str, value: Any) -> None:
        """Sets a field: whatever type a number came in, it is kept as a plain one."""
        object.__setattr__(self, name, value)

    @abc.abstractmethod
    def _capacity(self, population: int) -> int:
        """Returns how many records a step must have room for."""

    def _for_data(self, population: int, capacity: int) -> SamplingScheme:
        """Returns the scheme that describes draws from data of this size."""
        del population, capacity
        return self

    @abc.abstractmethod
    def _draw(self, key: DrawKey, population: int, step: int) -> np.ndarray:
        """Returns the indices of the records in one step."""

    def _gaussian(self, noise_multiplier, unit, sensitivity):
        z = _arguments.non_negative("noise_multiplier", noise_multiplier)
        if sensitivity is None:
            sensitivity = events.sensitivity_factor(self.neighboring_relation, unit)
        else:
            _arguments.choice("unit", unit, events.UNITS)
            sensitivity = _arguments.positive("sensitivity", sensitivity)
        if z == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(z / sensitivity)

    def _repeated(self, noise_multiplier, steps, unit, sensitivity, sampled):
        """Composes a sampled Gaussian, leaving out what changes nothing."""
        steps = _arguments.integer("steps", steps)
        inner = self._gaussian(noise_multiplier, unit, sensitivity)
        if isinstance(inner, dp_accounting.GaussianDpEvent):
            inner = sampled(inner)
        return events.repeated(inner, steps)


@dataclasses.dataclass(frozen=True)
class DrawKey:
    """Where randomness comes from: one entropy, one independent stream per step.

    Attributes:
      entropy: A seed, or as many random bits as `words` of 32 hold.
      words: How many words of entropy a stream is made from. NumPy mixes whatever it
        is given into 4 of them unless told otherwise; with the 8 that the generator
        takes, no two entropies of 256 bits are taken for one.
    """

    entropy: int
    words: int = 4

    @classmethod
    def fresh(cls) -> DrawKey:
        """Returns a key of 256 bits of the operating system's entropy."""
        return cls(secrets.randbits(256), 8)

    def sequence(self, step: int, purpose: int | None = None) -> np.random.SeedSequence:
        """Returns what that generator is made of."""
        place = (step,) if purpose is None else (step, purpose)
        return np.random.SeedSequence(
            self.entropy, spawn_key=place, pool_size=self.words
        )

    def rng(self, step: int, purpose: int | None = None) -> np.random.Generator:
        """Returns the generator of one step, or of one purpose within it."""
        return np.random.Generator(np.random.PCG64(self.sequence(step, purpose)))


@dataclasses.dataclass(frozen=True)
class Poisson(SamplingScheme):
    """Every record enters every step independently with probability `rate`.

    The default scheme: the one that privacy accounting is sharpest for.

    *Formal guarantees*

    * Neighbours: add or remove one record.
    * Without `capacity`, steps are the Poisson-sampled Gaussian of the literature.
    * With it, a draw larger than `capacity` is cut to a uniformly random subset, and
      `event` accounts for the cut
      (`tfdpclip.accounting.TruncatedPoissonSampledDpEvent` has the bound and its
      proof). Batches always have a capacity; the default one is exceeded less than
      once in 10^10 steps.

    Attributes:
      rate: Probability with which a record enters a step, in (0, 1].
      capacity: Most records a step can hold; None for no limit.
      population: Number of records, or an upper bound. Needed with `capacity`.

    >>> scheme = Poisson(0.01)
    >>> scheme.event(1.1, 10).event.sampling_probability
    0.01
    """

    rate: float
    capacity: int | None = None
    population: int | None = None

    def __post_init__(self):
        self._keep("rate", _arguments.rate("rate", self.rate))
        if self.capacity is not None:
            self._keep("capacity", _arguments.count_of("capacity", self.capacity))
            if self.population is None:
                raise ValueError(
                    "population must be given with capacity: how often a draw "
                    "overflows depends on it."
                )
        if self.population is not None:
            population = _arguments.count_of("population", self.population)
            self._keep("population", population)

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        return NeighboringRelation.ADD_OR_REMOVE_ONE

    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "example",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        def sampled(gaussian):
            if self.capacity is None:
                return dp_accounting.PoissonSampledDpEvent(self.rate, gaussian)
            return events.TruncatedPoissonSampledDpEvent(
                self.population, self.rate, self.capacity, gaussian
            )

        return self._repeated(noise_multiplier, steps, unit, sensitivity, sampled)

    def expected_batch_size(self, population: int) -> float:
        return self.rate * _arguments.count_of("population", population, 0)

    def steps_per_epoch(self, population: int) -> int:
        del population
        return math.ceil(1 / self.rate - 1e-9)

    def describe(self) -> str:
        return f"Poisson, rate {self.rate:.6g}"

    def assumptions(self) -> tuple[str, ...]:
        if self.capacity is None:
            return ()
        overflow = events.overflow_probability(
            self.population, self.rate, self.capacity
        )
        return (
            f"a step holds at most {self.capacity} records (exceeded with probability "
            f"{overflow:.1g} per step, which is accounted for)",
        )

    def accounts_for(self, drawn: SamplingScheme) -> bool:
        if self.capacity is None and isinstance(drawn, Poisson):
            return self.rate == drawn.rate
        return self == drawn

    def default_capacity(self, population: int) -> int:
        """Returns the least capacity exceeded less than once in 10^10 steps.

        >>> Poisson(0.01).default_capacity(10_000)
        170
        """
        population = _arguments.count_of("population", population)
        low, high = 0, population + 1
        while high - low > 1:
            middle = (low + high) // 2
            overflow = events.overflow_probability(population, self.rate, middle)
            if overflow <= _DEFAULT_OVERFLOW:
                high = middle
            else:
                low = middle
        return min(high, population)

    def _capacity(self, population: int) -> int:
        return self.capacity or self.default_capacity(population)

    def _for_data(self, population: int, capacity: int) -> Poisson:
        if self.capacity is not None and self.population < population:
            raise ValueError(
                f"population = {self.population} is less than the {population} records "
                "given."
            )
        if capacity >= population:
            return Poisson(self.rate)
        return Poisson(
            self.rate,
            min(capacity, self.capacity or capacity),
            max(population, self.population or population),
        )

    def _draw(self, key, population, step):
        # Given how many enter, every subset of that size is equally likely; so is
        # what is left of it by a uniformly random cut.
        rng = key.rng(step)
        size = int(rng.binomial(population, self.rate))
        if self.capacity is not None:
            size = min(size, self.capacity)
        return rng.choice(population, size, replace=False)


@dataclasses.dataclass(frozen=True)
class FixedSize(SamplingScheme):
    """Every step draws exactly `batch_size` of `population` records.

    *Formal guarantees*

    * Neighbours: replace one record, so a record clipped to C moves the sum by up to
      2 C and the accountant gets half the noise multiplier.
    * Without replacement: Balle et al. 2018 (arXiv 1807.01647), Theorem 9, composed
      exactly (PLD), or Wang et al. 2019 (arXiv 1808.00087), Theorem 27 (RDP).
    * With replacement: Balle et al. 2018, Theorem 10 (PLD only).

    Attributes:
      batch_size: Records (or clients) per step.
      population: Number of records (or clients), public.
      replacement: Whether a record can be drawn several times in a step.

    >>> FixedSize(100, 10_000).event(1.0, 5).event.event.noise_multiplier
    0.5
    """

    batch_size: int
    population: int
    replacement: bool = False

    def __post_init__(self):
        for name in ("batch_size", "population"):
            self._keep(name, _arguments.count_of(name, getattr(self, name)))
        _arguments.boolean("replacement", self.replacement)
        if not self.replacement and self.batch_size > self.population:
            raise ValueError(
                f"batch_size must be at most the population without replacement, got "
                f"{self.batch_size} of {self.population}."
            )

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        return NeighboringRelation.REPLACE_ONE

    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "example",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        def sampled(gaussian):
            if self.replacement:
                kind = dp_accounting.SampledWithReplacementDpEvent
            elif self.batch_size == self.population:
                return gaussian
            else:
                kind = dp_accounting.SampledWithoutReplacementDpEvent
            return kind(self.population, self.batch_size, gaussian)

        return self._repeated(noise_multiplier, steps, unit, sensitivity, sampled)

    def expected_batch_size(self, population: int) -> float:
        del population
        return float(self.batch_size)

    def steps_per_epoch(self, population: int) -> int:
        population = _arguments.count_of("population", population, 0)
        return math.ceil(population / self.batch_size)

    def describe(self) -> str:
        how = "with" if self.replacement else "without"
        return (
            f"fixed size, {self.batch_size} of {self.population} {how} replacement, "
            "independently in every step"
        )

    def _capacity(self, population: int) -> int:
        return self.batch_size

    def _for_data(self, population: int, capacity: int) -> FixedSize:
        _check_population(self.population, population)
        return self

    def _draw(self, key, population, step):
        return key.rng(step).choice(
            population, self.batch_size, replace=self.replacement
        )


@dataclasses.dataclass(frozen=True)
class ShuffledEpochs(SamplingScheme):
    """Every epoch goes through all records once, in a fresh random order.

    What `fit` does with arrays. Its randomness is *not* counted: bounds for
    shuffling are much weaker than those for Poisson sampling, and using the latter
    for shuffled batches understates epsilon.

    *Formal guarantees*

    * Neighbours: replace one record. The order does not depend on the data, so the
      record sits in one step of each epoch, at the same place for both neighbours;
      all other steps are the same function of what came before. T steps compose like
      as many unsampled Gaussians as epochs were begun (a record's epochs are
      adaptive, the other steps post-processing).
    * `relation="zero_out"` compares with a record that contributes nothing instead:
      sensitivity C instead of 2 C. Adding or removing a record for real would shift
      the places of the others, which this scheme does not cover.

    Attributes:
      batch_size: Records per step; the last step of an epoch may have fewer.
      population: Number of records, public.
      relation: `"replace_one"` or `"zero_out"`.

    >>> ShuffledEpochs(10, 100).event(2.0, 25).count
    3
    """

    batch_size: int
    population: int
    relation: str = "replace_one"

    amplified: ClassVar[bool] = False
    independent_steps: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("batch_size", "population"):
            self._keep(name, _arguments.count_of(name, getattr(self, name)))
        _arguments.choice("relation", self.relation, ("replace_one", "zero_out"))
        if self.batch_size > self.population:
            raise ValueError(
                f"batch_size must be at most the population, got {self.batch_size} of "
                f"{self.population}."
            )

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        if self.relation == "zero_out":
            return NeighboringRelation.REPLACE_SPECIAL
        return NeighboringRelation.REPLACE_ONE

    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "example",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        steps = _arguments.integer("steps", steps)
        epochs = -(-steps // self.steps_per_epoch(self.population))
        return self._repeated(
            noise_multiplier, epochs, unit, sensitivity, lambda gaussian: gaussian
        )

    def expected_batch_size(self, population: int) -> float:
        del population
        return float(self.batch_size)

    def steps_per_epoch(self, population: int) -> int:
        population = _arguments.count_of("population", population, 0)
        return math.ceil(population / self.batch_size)

    def describe(self) -> str:
        return f"shuffled epochs, {self.batch_size} of {self.population} per step"

    def assumptions(self) -> tuple[str, ...]:
        return (
            "no amplification by sampling: the order of a shuffle is not accounted "
            "for, and every epoch counts as one release per record",
        )

    def _capacity(self, population: int) -> int:
        return self.batch_size

    def _for_data(self, population: int, capacity: int) -> ShuffledEpochs:
        _check_population(self.population, population)
        return self

    def _draw(self, key, population, step):
        epoch, place = divmod(step, self.steps_per_epoch(population))
        order = key.rng(epoch).permutation(population)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


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

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        return NeighboringRelation.ADD_OR_REMOVE_ONE

    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "example",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        return self._repeated(
            noise_multiplier, steps, unit, sensitivity, lambda gaussian: gaussian
        )

    def expected_batch_size(self, population: int) -> float:
        return float(_arguments.count_of("population", population, 0))

    def steps_per_epoch(self, population: int) -> int:
        del population
        return 1

    def describe(self) -> str:
        return "full batch"

    def _capacity(self, population: int) -> int:
        return population

    def _draw(self, key, population, step):
        return np.arange(population)


def from_dict(settings: dict[str, Any]) -> SamplingScheme:
    """Returns the scheme that `SamplingScheme.to_dict` described.

    >>> from_dict(Poisson(0.5).to_dict())
    Poisson(rate=0.5, capacity=None, population=None)
    """
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"settings must be a dictionary, got {_arguments.shown(settings)}."
        )
    settings = dict(settings)
    name = settings.pop("scheme", None)
    kinds = {k.__name__: k for k in (Poisson, FixedSize, ShuffledEpochs, FullBatch)}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"Unknown sampling scheme {_arguments.shown(name)} in settings; known: "
            f"{', '.join(kinds)}."
        )
    try:
        return kinds[name](**settings)
    except TypeError as error:
        raise ValueError(f"settings do not fit {name}: {error}.") from error


def _check_population(stated: int, actual: int) -> None:
    if stated != actual:
        raise ValueError(
            f"population = {stated} but there are {actual} records: the accounting "
            "would be about another data set."
        )
