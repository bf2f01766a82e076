"""Sampling schemes: how a step's records are chosen, with the privacy event.

A scheme is a frozen dataclass of public settings; private data is an argument of
`batches` and `cohorts`. The same object draws and is accounted for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import dp_accounting

from tfdpclip import _arguments, correlated
from tfdpclip.sampling.base import EqualSteps, SamplingScheme


@dataclasses.dataclass(frozen=True)
class FixedSize(EqualSteps):
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
        self._keep_counts("batch_size", "population")
        _arguments.boolean("replacement", self.replacement)
        if not self.replacement:
            _check_room(self, " without replacement")

    def describe(self) -> str:
        how = "with" if self.replacement else "without"
        return (
            f"fixed size, {self.batch_size} of {self.population} {how} replacement, "
            "independently in every step"
        )

    def at_worst(self) -> ShuffledEpochs:
        return ShuffledEpochs(self.population, self.population)

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        if self.replacement:
            kind = dp_accounting.SampledWithReplacementDpEvent
        elif self.batch_size == self.population:
            return gaussian
        else:
            kind = dp_accounting.SampledWithoutReplacementDpEvent
        return kind(self.population, self.batch_size, gaussian)

    def _draw(self, key, population, step):
        return key.rng(step).choice(
            population, self.batch_size, replace=self.replacement
        )


@dataclasses.dataclass(frozen=True)
class ShuffledEpochs(EqualSteps):
    """Every epoch goes through all records once, in a fresh random order.

    The order in which `fit` reads arrays. Its randomness is *not* counted: bounds for
    shuffling are much weaker than bounds for Poisson sampling, and using the latter
    for shuffled batches understates epsilon.

    *Formal guarantees*

    * Neighbours: replace one record. The order does not depend on the data, so the
      record sits in one step of each epoch, at the same place for both neighbours;
      all remaining steps are the same function of earlier steps. T steps compose like
      as many unsampled Gaussians as epochs were begun (a record's epochs are
      adaptive, the remaining steps post-processing).
    * `relation="zero_out"` compares with a null record instead: sensitivity C instead
      of 2 C. Adding or removing a record would shift the places of later records, which
      this scheme does not cover.

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
        self._keep_counts("batch_size", "population")
        _arguments.choice("relation", self.relation, ("replace_one", "zero_out"))
        _check_room(self)

    def describe(self) -> str:
        return f"shuffled epochs, {self.batch_size} of {self.population} per step"

    def assumptions(self) -> tuple[str, ...]:
        return (
            "no amplification by sampling: the order of a shuffle is not accounted "
            "for, and every epoch counts as one release per record",
        )

    def at_worst(self) -> ShuffledEpochs:
        return ShuffledEpochs(self.population, self.population, self.relation)

    def participation(self, steps: int) -> correlated.MinSeparation:
        # A record may be last in an epoch and first in the next, and a noise matrix may
        # begin in the middle of an epoch.
        epoch = self.steps_per_epoch(self.population)
        steps = _arguments.integer("steps", steps, 1)
        return correlated.MinSeparation(1, 1 + (steps + epoch - 2) // epoch)

    def _releases(self, steps: int) -> int:
        return -(-steps // self.steps_per_epoch(self.population))

    def _draw(self, key, population, step):
        epoch, place = divmod(step, self.steps_per_epoch(population))
        order = key.order(epoch, population)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


def _check_room(scheme: FixedSize | ShuffledEpochs, how: str = "") -> None:
    if scheme.batch_size > scheme.population:
        raise ValueError(
            f"batch_size must be at most the population{how}, got "
            f"{scheme.batch_size} of {scheme.population}."
        )


def from_dict(settings: dict[str, Any]) -> SamplingScheme:
    """Returns the scheme that `SamplingScheme.to_dict` described.

    >>> from_dict(FixedSize(5, 100).to_dict())
    FixedSize(batch_size=5, population=100, replacement=False)
    """
    settings = dict(_arguments.instance("settings", settings, Mapping, "a dictionary"))
    name = settings.pop("scheme", None)
    kinds = _arguments.kinds_of(SamplingScheme)
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"Unknown sampling scheme {_arguments.shown(name)} in settings; known: "
            f"{', '.join(sorted(kinds))}."
        )
    try:
        return kinds[name](**settings)
    except TypeError as error:
        raise ValueError(f"settings do not fit {name}: {error}.") from error
