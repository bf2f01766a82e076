"""Examples that are drawn one by one, of data in which a person has few of them."""

from __future__ import annotations

import dataclasses

import dp_accounting

from tfdpclip import _arguments
from tfdpclip.sampling import events
from tfdpclip.sampling.poisson_draws import PoissonDraws


@dataclasses.dataclass(frozen=True)
class CappedPoisson(PoissonDraws):
    """Every example enters on its own; people have at most `per_person` of them.

    User-level privacy by example-level sampling (Charles et al. 2024, arXiv 2407.07737;
    Chua et al. 2024, arXiv 2406.14322): the data are cut once to so many examples of
    each person, then drawn as by `Poisson`, and each example is clipped on its own. The
    other way draws people, `Poisson(rate).batches(data, people=ids, per_person=k)`, and
    clips what a person has in a step as one.

    *Formal guarantees*

    * Neighbours: add or remove one person, with all of up to `per_person` examples.
    * Without `capacity`, a step moves the sum by j clip norms with the probability that
      j of `per_person` enter: the mixture of Gaussians that is the worst case (Ganesh
      2024, arXiv 2401.10294). `tfdpclip.accounting.CappedPoissonSampledDpEvent` has the
      bound and its proof, with `capacity`, too.
    * With `per_person=1` it costs what `Poisson` costs.
    * `batches(data, people=ids)` cuts the data, so that the guarantee is for whoever
      `ids` tell apart.

    Attributes:
      rate: Probability with which an example enters a step, in (0, 1].
      per_person: Most examples of a person in the data, and so in a step.
      capacity: Most examples that a step can hold; None for no limit.
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
        """Returns what `steps` steps do to privacy.

        Args:
          noise_multiplier: z: noise standard deviation over the clip norm of an
            example.
          steps: Number of steps (noise draws).
          unit: `"person"`.
          sensitivity: By how many clip norms one example moves the sum, instead of 1.

        Raises:
          ValueError: If an argument is out of range, or the unit is another one.
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
            "a record that neighbours differ in is a person, with all of at most "
            f"{self.per_person} examples, by the ids that were given with the data",
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
