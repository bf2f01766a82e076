"""Participation: how often, and how far apart, a record may take part in steps.

The privacy cost of a matrix depends on the participation. The sampling schemes of
`tfdpclip.sampling` state the participation that they enforce
(`scheme.participation(steps)`), and can be given in place of a participation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpclip import _arguments


@dataclasses.dataclass(frozen=True)
class MinSeparation:
    """At most k times, with at least b steps from a time to the next.

    Steps i < j of a record have j - i >= `separation`: 1 lets a record take part in
    every step. A fixed order of batches in every epoch has this property, with b the
    steps of an epoch, and so has a device with a minimum break (Choquette-Choo et al.
    2023, arXiv 2306.08153: "b-min-sep-participation").

    Attributes:
      separation: b, 1 or more.
      participations: k; None for as often as the separation allows.

    >>> MinSeparation(4).most(10), MinSeparation(4, 2).most(10)
    (3, 2)
    """

    separation: int
    participations: int | None = None

    def __post_init__(self):
        _arguments.set_field(self, "separation", _arguments.integer, 1)
        _arguments.set_field(self, "participations", _arguments.integer, 1)

    #: The rate of Poisson sampling in the accounting.
    amplified_rate = None

    def most(self, steps: int) -> int:
        """Returns the largest number of steps, out of `steps`, that a record is in."""
        fitting = -(-_arguments.integer("steps", steps, 1) // self.separation)
        if self.participations is None:
            return fitting
        return min(self.participations, fitting)

    def describe(self) -> str:
        """Returns the participation in words, for privacy statements."""
        if self.participations == 1:
            return "a record takes part once"
        times = "any number of times"
        if self.participations is not None:
            times = f"at most {self.participations} times"
        return (
            f"a record takes part {times}, with at least {self.separation} steps from "
            "one time to the next"
        )


@dataclasses.dataclass(frozen=True)
class SingleEpoch(MinSeparation):
    """Every record takes part once.

    >>> SingleEpoch().most(10)
    1
    """

    separation: int = dataclasses.field(default=1, init=False)
    participations: int | None = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class CyclicPoisson:
    """Groups of records take turns; in its turn, a record enters at random.

    Every record is in a group 0, ..., `separation` - 1, which may be public. A record
    of group t modulo `separation` enters step t with probability `rate` times
    `separation`, independently of everything else, and is in no further step.

    A matrix of at most b bands is then amplified (Choquette-Choo et al. 2023, arXiv
    2306.08153, Theorem 4; proved again in docs/guarantees.md): n steps are dominated by
    ceil(n / b) steps of the Poisson-sampled Gaussian at rate b q.

    Attributes:
      separation: b, the number of groups.
      rate: q, the average share of all records in a step; at most 1/b.

    >>> CyclicPoisson(separation=4, rate=0.05).amplified_rate
    0.2
    """

    separation: int
    rate: float

    def __post_init__(self):
        _arguments.set_field(self, "separation", _arguments.integer, 1)
        _arguments.set_field(self, "rate", _arguments.rate)
        check_cyclic_rate(self.rate, self.separation)

    @property
    def amplified_rate(self) -> float:
        """The rate at which a record enters in its turn: min(1, b q)."""
        return min(1.0, self.separation * self.rate)

    def most(self, steps: int) -> int:
        """Returns the largest number of steps, out of `steps`, that a record is in."""
        return -(-_arguments.integer("steps", steps, 1) // self.separation)

    def describe(self) -> str:
        """Returns the participation in words, for privacy statements."""
        return (
            f"records of {self.separation} groups take turns; in its turn, a record "
            f"enters with probability {self.amplified_rate:.6g}"
        )


def check_cyclic_rate(rate: float, groups: int) -> None:
    """Raises ValueError if a step needs more records than a group has."""
    if rate * groups > 1 + 1e-9:
        raise ValueError(
            f"rate must be at most 1 / separation = {1 / groups:.6g}, got {rate!r}: a "
            f"step takes from one of {groups} groups. Lower the rate, or have fewer "
            "groups and bands."
        )


def of(value: Any, steps: int) -> MinSeparation | CyclicPoisson:
    """Returns a participation: `value`, or the participation of a scheme of `steps`.

    Raises:
      ValueError: If `value` is neither, or the scheme keeps no steps apart.

    >>> of(SingleEpoch(), 10)
    SingleEpoch(separation=1, participations=1)
    """
    if isinstance(value, (MinSeparation, CyclicPoisson)):
        return value
    scheme = getattr(value, "scheme", value)
    if hasattr(scheme, "participation"):
        return scheme.participation(steps)
    raise ValueError(
        "participation must state how often a record takes part, such as "
        "SingleEpoch(), MinSeparation(separation=100, participations=5) or a scheme "
        f"with a participation; got {_arguments.shown(value)}."
    )
