"""What every sampling scheme states about itself, and how it is asked for a draw."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import dp_accounting
import numpy as np

from tfdpclip import _arguments, correlated
from tfdpclip.sampling import events
from tfdpclip.sampling.draw_key import DrawKey

if TYPE_CHECKING:
    from tfdpclip.sampling.batches import Batches
    from tfdpclip.sampling.cohorts import Cohorts

NeighboringRelation: TypeAlias = dp_accounting.NeighboringRelation


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

    if TYPE_CHECKING:
        # `drawing` gives them to every scheme: a scheme knows nothing of what draws.
        batches: Callable[..., Batches]
        cohorts: Callable[..., Cohorts]

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
