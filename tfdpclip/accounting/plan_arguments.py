"""Arguments that the plans of Keras and TFF share: checks, and named noise matrices."""

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
#: The noise that is optimized for the momentum of the optimizer.
MADE_FOR_MOMENTUM = ("buffered", "toeplitz")
# Buffers and bands of named matrices; docs/correlated_noise.md compares larger numbers.
_BUFFERS, _BANDS = 3, 16


def check_facts(epsilon: Any, delta: Any, name: str, population: Any) -> tuple:
    """Returns the budget and the population, checked; refuses a meaningless delta.

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
    """Returns an accountant that is a bound, so that it can keep a budget.

    Raises:
      ValueError: If the accountant is unknown, or an approximation.
    """
    allowed = tuple(a for a in accountants.ACCOUNTANTS if a != "gdp")
    return _arguments.choice("accountant", accountant, allowed)


def check_noise(noise: Any, momentum: Any) -> float:
    """Checks the noise and the momentum of a plan; returns the momentum.

    Args:
      noise: A name of `NOISE`, or a matrix.
      momentum: The momentum that a named matrix is optimized for.

    Raises:
      ValueError: If `noise` is neither, or the momentum does not apply to it.
    """
    given = isinstance(noise, NoiseMatrix)
    if not given:
        _arguments.choice("noise", noise, NOISE)
    momentum = Workload(momentum).momentum
    if momentum and given:
        raise ValueError(
            f"momentum={momentum:g} is for matrices that the plan makes, and noise is "
            "a matrix already. Make the matrix for that momentum, as in "
            f"BufferedToeplitz(3, steps, scheme, Workload(momentum={momentum:g})), and "
            'leave momentum out; or write noise="buffered".'
        )
    if momentum and noise not in MADE_FOR_MOMENTUM:
        raise ValueError(
            f'momentum applies to noise="buffered" and "toeplitz", and noise="{noise}" '
            "is the same for every optimizer: leave momentum out."
        )
    return momentum


def named_matrix(
    noise: str | NoiseMatrix, steps: int, scheme: Any, momentum: float = 0.0
) -> NoiseMatrix | None:
    """Returns the matrix for an argument `noise`; None for independent noise.

    Args:
      noise: A name of `NOISE`, or a matrix.
      steps: The number of steps of the matrix.
      scheme: The scheme that draws the records.
      momentum: The optimizer's momentum; for named matrices.
    """
    if isinstance(noise, NoiseMatrix):
        return noise
    if noise == "buffered":
        return BufferedToeplitz(_BUFFERS, steps, scheme, Workload(momentum))
    if noise == "toeplitz":
        return SquareRootToeplitz(_BANDS, momentum)
    return Tree() if noise == "tree" else None
