"""What plans of Keras and TFF are told alike: checks, and what names stand for."""

from __future__ import annotations

from typing import Any

from tfdpclip import _arguments
from tfdpclip.accounting import accountants
from tfdpclip.correlated import (
    BufferedToeplitz,
    NoiseMatrix,
    SquareRootToeplitz,
    Tree,
    Workload,
)

#: Correlated noise, by name.
NOISE = ("independent", "buffered", "toeplitz", "tree")
#: Those that are made for the momentum of the optimizer.
MADE_FOR_MOMENTUM = ("buffered", "toeplitz")
# Buffers and bands of what is named so; docs/correlated_noise.md has what more bring.
_BUFFERS, _BANDS = 3, 16


def check_facts(epsilon: Any, delta: Any, name: str, population: Any) -> tuple:
    """The budget and the population, checked; a delta that says nothing is refused.

    Raises:
      ValueError: If an argument is out of range.
    """
    epsilon = _arguments.positive("epsilon", epsilon)
    delta = _arguments.delta(delta)
    population = _arguments.integer(name, population, 1)
    if delta * population >= 1:
        raise ValueError(
            f"delta must be below 1 / {name} ({1 / population:.2g}), got {delta:g}: a "
            "program that publishes a whole record at random would keep that promise. "
            f"For example delta={10 ** -(len(str(population)) + 1):g}."
        )
    return epsilon, delta, population


def check_accountant(accountant: Any) -> str:
    """An accountant that keeps budgets.

    Raises:
      ValueError: If it is another one.
    """
    allowed = tuple(a for a in accountants.ACCOUNTANTS if a != "gdp")
    return _arguments.choice("accountant", accountant, allowed)


def check_noise(noise: Any, momentum: Any) -> float:
    """Looks at what a plan is told of its noise; returns the momentum, checked.

    Args:
      noise: A name of `NOISE`, or a matrix.
      momentum: What a matrix that is named is made for.

    Raises:
      ValueError: If it is something else, or nothing is made for the momentum.
    """
    given = isinstance(noise, NoiseMatrix)
    if not given:
        _arguments.choice("noise", noise, NOISE)
    momentum = Workload(momentum).momentum
    if momentum and given:
        raise ValueError(
            f"momentum={momentum:g} is for matrices that the plan makes, and noise is "
            "one already. Make it for that momentum, as in BufferedToeplitz(3, steps, "
            f"scheme, Workload(momentum={momentum:g})), and leave momentum out; or say "
            'noise="buffered".'
        )
    if momentum and noise not in MADE_FOR_MOMENTUM:
        raise ValueError(
            f'momentum is what noise="buffered" and "toeplitz" are made for, and noise='
            f'"{noise}" is the same for every optimizer: leave it out.'
        )
    return momentum


def named_matrix(
    noise: str | NoiseMatrix, steps: int, scheme: Any, momentum: float = 0.0
) -> NoiseMatrix | None:
    """The matrix that an argument stands for; None for independent noise.

    Args:
      noise: One of `NOISE`, or a matrix.
      steps: For how many steps.
      scheme: What draws the records.
      momentum: Of what the releases go into; for matrices that are named.
    """
    if isinstance(noise, NoiseMatrix):
        return noise
    if noise == "buffered":
        return BufferedToeplitz(_BUFFERS, steps, scheme, Workload(momentum))
    if noise == "toeplitz":
        return SquareRootToeplitz(_BANDS, momentum)
    return Tree() if noise == "tree" else None
