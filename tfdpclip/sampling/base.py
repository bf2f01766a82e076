"""The interface of sampling schemes, and the key from which draws are derived."""

from __future__ import annotations

import abc
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, cast

import dp_accounting
import numpy as np

from tfdpclip import _arguments, correlated
from tfdpclip.sampling import events

NeighboringRelation: TypeAlias = dp_accounting.NeighboringRelation


@dataclasses.dataclass(frozen=True)
class DrawKey:
    """The root of a scheme's randomness, with one independent stream for each step.

    Attributes:
      entropy: A seed, or random bits that fill `words` words of 32 bits.
      words: Words of entropy in a stream. By default NumPy mixes all entropy into 4
        words; with 8 words, the size that the generator takes, two different
        entropies of 256 bits never share a stream.
      shard: The part of the records to draw from, where each of several machines
        draws from its own part; None for all records.
    """

    entropy: int
    words: int = 4
    shard: int | None = None
    # By name: the last arguments, and the array that was computed for them.
    _kept: dict = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def fresh(cls) -> DrawKey:
        """Returns a key of 256 bits of the operating system's entropy."""
        return cls(secrets.randbits(256), 8)

    def sequence(self, step: int, purpose: int | None = None) -> np.random.SeedSequence:
        """Returns the seed sequence of a step's generator."""
        place = (step,) if purpose is None else (step, purpose)
        if self.shard is not None:
            place = (step, purpose or 0, self.shard)
        return np.random.SeedSequence(
            self.entropy, spawn_key=place, pool_size=self.words
        )

    def rng(self, step: int, purpose: int | None = None) -> np.random.Generator:
        """Returns the generator of one step, or of one purpose within it."""
        return np.random.Generator(np.random.PCG64(self.sequence(step, purpose)))

    def order(self, epoch: int, population: int) -> np.ndarray:
        """All records in an epoch's random order, `[population]`.

        The last order is cached, 8 bytes for each record, since every step of an
        epoch reads its own part of the order.
        """
        return self.kept(
            "order",
            (epoch, population),
            lambda: self.rng(epoch).permutation(population),
        )

    def kept(
        self, name: str, asked: tuple, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Returns `make()`, cached until a call with other arguments, `asked`."""
        entry = self._kept.get(name)
        if entry is None or entry[0] != asked:
            entry = self._kept[name] = asked, make()
        return entry[1]


class SamplingScheme(abc.ABC):
    """A rule for drawing the records of each step, with its privacy event.

    *Formal guarantees*

    * `event(z, T)` dominates T steps whose records were drawn by this scheme and
      whose clipped sums got noise of standard deviation z times the clip norm, for
      neighbours under `neighboring_relation`.
    * Draws of different steps are independent of each other and of the data, except
      where a scheme says otherwise.
    """

    #: Whether a step that misses a record lowers the privacy cost of that record.
    amplified: ClassVar[bool] = True
    #: Whether draws of different steps are independent and identically distributed.
    independent_steps: ClassVar[bool] = True
    #: Whether the accounting covers whole epochs from their beginning, so that a run
    #: must begin a new epoch, with a new draw.
    begins_epochs: ClassVar[bool] = False

    # `tfdpclip.sampling` attaches both methods: the modules of schemes import neither
    # batches nor cohorts.
    batches: ClassVar[Callable[..., Any]]
    cohorts: ClassVar[Callable[..., Any]]

    @property
    @abc.abstractmethod
    def neighboring_relation(self) -> NeighboringRelation:
        """The neighbouring relation under which `event` holds."""

    def event(
        self,
        noise_multiplier: float,
        steps: int,
        *,
        unit: str = "example",
        sensitivity: float | None = None,
    ) -> dp_accounting.DpEvent:
        """Returns the privacy event of `steps` steps.

        Args:
          noise_multiplier: z: noise standard deviation over clip norm.
          steps: Number of steps (noise draws).
          unit: The object that is clipped; with the relation, the unit determines the
            sensitivity, see `tfdpclip.accounting.sensitivity_factor`.
          sensitivity: Replaces that sensitivity; in clip norms.

        Returns:
          A `dp_accounting` event. Its Gaussian has noise multiplier
          `noise_multiplier` divided by the sensitivity.

        Raises:
          ValueError: If an argument is out of range.
        """
        steps = _arguments.integer("steps", steps)
        inner = self._gaussian(noise_multiplier, unit, sensitivity)
        if isinstance(inner, dp_accounting.GaussianDpEvent):
            return self._of_steps(inner, steps)
        return events.repeated(inner, self._releases(steps))

    def _of_steps(
        self, gaussian: dp_accounting.DpEvent, steps: int
    ) -> dp_accounting.DpEvent:
        """Returns the event of `steps` steps, the first of which begins an epoch."""
        return events.repeated(self._sampled(gaussian), self._releases(steps))

    def participation(
        self, steps: int
    ) -> correlated.MinSeparation | correlated.CyclicPoisson:
        """Returns how often, and how far apart, a record enters consecutive steps.

        The privacy cost of correlated noise depends on it (`tfdpclip.correlated`).

        Raises:
          ValueError: If the scheme keeps no record's steps apart.

        >>> from tfdpclip import sampling
        >>> sampling.ShuffledEpochs(10, 100).participation(25)
        MinSeparation(separation=1, participations=4)
        """
        raise ValueError(
            f"{self.describe()}: a record may be in every step, and no proof covers "
            "amplification of correlated noise then. Draw by MinSeparation(population, "
            "batch_size), or by CyclicPoisson(population, rate, separation) with at "
            "most `separation` bands; or use independent noise."
        )

    @abc.abstractmethod
    def expected_batch_size(self, population: int) -> float:
        """Returns the expected number of records per step: the public divisor."""

    @abc.abstractmethod
    def steps_per_epoch(self, population: int) -> int:
        """Returns the number of steps that draw `population` records on average."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns the scheme in words, for privacy statements."""

    def assumptions(self) -> tuple[str, ...]:
        """Returns further conditions that a privacy statement must list."""
        return ()

    def accounts_for(self, drawn: SamplingScheme) -> bool:
        """Returns whether accounting for this scheme covers the draws of `drawn`."""
        return self == drawn

    @abc.abstractmethod
    def at_worst(self) -> SamplingScheme:
        """Returns the scheme to account for steps with arbitrary records.

        Under the same neighbours, every step may have used every record once.
        >>> from tfdpclip import sampling
        >>> sampling.Poisson(0.01).at_worst()
        FullBatch()
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON-ready values, with the class name."""
        return {"scheme": type(self).__name__, **dataclasses.asdict(cast(Any, self))}

    def _keep_counts(self, *names: str) -> None:
        """Checks fields that are counts, and sets them as plain integers.

        A field that is None by default may be None.
        """
        for name in names:
            _arguments.set_field(self, name, _arguments.count_of)

    @abc.abstractmethod
    def _capacity(self, population: int) -> int:
        """Returns the number of records that a step must have room for."""

    def _for_data(self, population: int, capacity: int) -> SamplingScheme:
        """Returns the scheme that describes draws from data of this size."""
        del population, capacity
        return self

    @abc.abstractmethod
    def _draw(self, key: DrawKey, population: int, step: int) -> np.ndarray:
        """Returns the indices of the records in one step."""

    def _drawn(self, key: DrawKey, population: int, step: int) -> np.ndarray:
        """Returns the indices of the records in one step, after a check.

        Raises:
          ValueError: If a scheme from outside the library draws an index without a
            record, or the same record twice.
        """
        indices = self._draw(key, population, step)
        if not _arguments.foreign(self, SamplingScheme):
            return indices
        indices, fault = np.asarray(indices), None
        if indices.shape == (0,):
            return indices.astype(np.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            fault = f"must be whole numbers, [rows], got {_arguments.shown(indices)}"
        elif indices.size and not 0 <= indices.min() <= indices.max() < population:
            fault = f"must be from 0 to {population - 1}"
        elif len(np.unique(indices)) < len(indices) and not getattr(
            self, "replacement", False
        ):
            fault = (
                "has a record twice, which moves the step twice as far; if the event "
                "allows for repeated records, set replacement = True"
            )
        if fault is not None:
            raise ValueError(f"The draw of {self!r} in step {step} {fault}.")
        return indices

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """Returns the event of one step with the noise `gaussian`.

        By default the step is accounted for as if it used every record, without
        amplification.
        """
        return gaussian

    def _releases(self, steps: int) -> int:
        """Returns how many events of `_sampled` make up the given number of steps."""
        return steps

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


class EqualSteps(SamplingScheme):
    """A scheme with steps of equal size.

    Subclasses are dataclasses with the fields `batch_size`, `population` (public) and,
    optionally, `relation`.
    """

    batch_size: int
    population: int
    relation: str = "replace_one"

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        if self.relation == "zero_out":
            return NeighboringRelation.REPLACE_SPECIAL
        return NeighboringRelation.REPLACE_ONE

    def expected_batch_size(self, population: int) -> float:
        del population
        return float(self.batch_size)

    def steps_per_epoch(self, population: int) -> int:
        return -(-_arguments.count_of("population", population, 0) // self.batch_size)

    def _capacity(self, population: int) -> int:
        return self.batch_size

    def _for_data(self, population: int, capacity: int) -> SamplingScheme:
        check_population(self.population, population)
        return self


def check_population(planned: int, actual: int) -> None:
    """Raises ValueError if the number of records differs from the planned number."""
    if planned != actual:
        raise ValueError(
            f"population = {planned} but there are {actual} records: the accounting "
            "would be about another data set."
        )
