"""What every sampling scheme states about itself, and how it is asked for a draw."""

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
    """Where randomness comes from: one entropy, one independent stream per step.

    Attributes:
      entropy: A seed, or as many random bits as `words` of 32 hold.
      words: How many words of entropy a stream is made from. NumPy mixes whatever it
        is given into 4 of them unless told otherwise; with the 8 that the generator
        takes, no two entropies of 256 bits are taken for one.
      shard: Which part of the records is drawn from, where several machines draw from
        a part each; None for all records.
    """

    entropy: int
    words: int = 4
    shard: int | None = None
    # By name, the last that was asked for: of which epoch and what else, and it.
    _kept: dict = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def fresh(cls) -> DrawKey:
        """Returns a key of 256 bits of the operating system's entropy."""
        return cls(secrets.randbits(256), 8)

    def sequence(self, step: int, purpose: int | None = None) -> np.random.SeedSequence:
        """Returns what that generator is made of."""
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

        The last one is kept, 8 bytes a record: every step of an epoch takes its part.
        """
        return self.kept(
            "order",
            (epoch, population),
            lambda: self.rng(epoch).permutation(population),
        )

    def kept(
        self, name: str, asked: tuple, make: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """What `make` returns, made once for all calls on end that ask the same."""
        found = self._kept.get(name)
        if found is None or found[0] != asked:
            found = self._kept[name] = asked, make()
        return found[1]


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
    #: Whether a run is accounted for from the beginning of an epoch on, so that it must
    #: begin one, with draws of its own.
    begins_epochs: ClassVar[bool] = False

    # `tfdpclip.sampling` gives them to every scheme: a scheme knows nothing of what
    # draws by it, not even by name.
    batches: ClassVar[Callable[..., Any]]
    cohorts: ClassVar[Callable[..., Any]]

    @property
    @abc.abstractmethod
    def neighboring_relation(self) -> NeighboringRelation:
        """The relation under which `event` is meant."""

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
        releases = self._releases(_arguments.integer("steps", steps))
        inner = self._gaussian(noise_multiplier, unit, sensitivity)
        if isinstance(inner, dp_accounting.GaussianDpEvent):
            inner = self._sampled(inner)
        return events.repeated(inner, releases)

    def participation(
        self, steps: int
    ) -> correlated.MinSeparation | correlated.CyclicPoisson:
        """Returns how often, and how far apart, a record is in any steps on end.

        What correlated noise costs depends on it (`tfdpclip.correlated`).

        Raises:
          ValueError: If the scheme keeps no record's steps apart.

        >>> from tfdpclip import sampling
        >>> sampling.ShuffledEpochs(10, 100).participation(25)
        MinSeparation(separation=1, participations=4)
        """
        raise ValueError(
            f"{self.describe()}: a record may be in every step, and nothing is known "
            "that amplifies correlated noise then. Draw by MinSeparation(population, "
            "batch_size), or by CyclicPoisson(population, rate, separation) with at "
            "most that many bands; or use independent noise."
        )

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

    def accounts_for(self, drawn: SamplingScheme) -> bool:
        """Returns whether accounting for this scheme is about what `drawn` draws."""
        return self == drawn

    @abc.abstractmethod
    def at_worst(self) -> SamplingScheme:
        """Returns the scheme to account for steps that used whatever records.

        Under the same neighbours, every step may have used every record, once.

        >>> from tfdpclip import sampling
        >>> sampling.Poisson(0.01).at_worst()
        FullBatch()
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON-ready values, with the class name."""
        return {"scheme": type(self).__name__, **dataclasses.asdict(cast(Any, self))}

    def _keep(self, name: str, value: Any) -> None:
        """Sets a field: whatever type a number came in, it is kept as a plain one."""
        object.__setattr__(self, name, value)

    def _keep_counts(self, *names: str) -> None:
        """Keeps fields that count something; raises ValueError for what is no count."""
        for name in names:
            self._keep(name, _arguments.count_of(name, getattr(self, name)))

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

    def _drawn(self, key: DrawKey, population: int, step: int) -> np.ndarray:
        """Returns the indices of the records in one step, if they can be that.

        Raises:
          ValueError: If a scheme that is not of the library draws what is no record,
            or one twice.
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
                "says so, set replacement = True"
            )
        if fault is not None:
            raise ValueError(f"What {self!r} draws in step {step} {fault}.")
        return indices

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """Returns the event of one step whose noise is `gaussian`.

        By default that of a step that every record was in: nothing is amplified.
        """
        return gaussian

    def _releases(self, steps: int) -> int:
        """Returns how many of those events the steps are."""
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
    """What schemes have in common whose steps are of one size.

    Dataclasses with the fields `batch_size` and `population`, which is public, and
    perhaps `relation`.
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


def check_population(planned: int, found: int) -> None:
    """Raises ValueError if there are other records than a scheme is for."""
    if planned != found:
        raise ValueError(
            f"population = {planned} but there are {found} records: the accounting "
            "would be about another data set."
        )
