"""Banded Toeplitz matrices of least error, and the search that finds them.

The objective is log(error^2 s(C)^2): the noise in the weights at a given epsilon. The
search space, here and in `buffered.py`, is parametrised so that every matrix has
non-negative, non-increasing coefficients, with exact sensitivity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import optimize, signal, special

from tfdpclip import _arguments, _progress
from tfdpclip.correlated import participation as participations
from tfdpclip.correlated import toeplitz
from tfdpclip.correlated.matrices import ToeplitzMatrix, count, root_of_workload
from tfdpclip.correlated.workload import Workload, check_workload

#: The error to minimize: over all steps, or after the last step.
OBJECTIVES = ("mean", "last")
# For more steps, the best matrix hardly changes, and the search takes minutes.
_MOST_STEPS = 100_000


def check_steps(steps: int) -> None:
    """Refuses to search for a matrix of very many steps."""
    if steps > _MOST_STEPS:
        raise ValueError(
            f"steps must be at most {_MOST_STEPS} for a matrix to be found, got "
            f"{steps}: find it for fewer steps, and run it for more."
        )


class Objective:
    """log(error^2 s(C)^2) of first columns, and its gradient.

    Args:
      steps: n.
      participation: How often a record takes part.
      workload: The workload in which the noise should be small.
      error: One of `OBJECTIVES`: the mean of the squared error over the steps, or the
        error after the last step, the largest without learning rates.
    """

    def __init__(self, steps: int, participation: Any, workload: Workload, error: str):
        self.steps = steps
        self._workload = workload
        found = participations.of(participation, steps)
        self._separation = found.separation
        # With amplification by sampling, the longest column counts.
        self._most = 1 if found.amplified_rate is not None else found.most(steps)
        self._weights = np.full(steps, 1.0 / steps)
        if error == "last":
            self._weights = np.zeros(steps)
            self._weights[-1] = 1.0
        self._rates = workload.rates(steps)
        if self._rates is not None:
            toeplitz.check_dense(steps)

    def __call__(self, column: np.ndarray, inverse: np.ndarray):
        """Returns the objective at C, and its gradient by the coefficients of C.

        Args:
          column: c_0, ..., c_(n-1).
          inverse: The first column of C^-1.
        """
        error, by_inverse = self._error(inverse)
        squared, by_column = self._sensitivity(column)
        # C^-1 moves by -C^-1 dC C^-1.
        twice = signal.convolve(inverse, inverse)[: len(inverse)]
        gradient = by_column / squared - _correlated(by_inverse, twice) / error
        return float(np.log(error) + np.log(squared)), gradient

    def _error(self, inverse):
        if self._rates is None:
            rows = self._workload.applied(inverse)
            # Entry k of the product is in the rows k, k + 1, ...
            weights = np.cumsum(self._weights[::-1])[::-1]
            # Each square counts once for each row that contains it.
            value = float(weights @ rows**2)
            by_rows = 2 * weights * rows
            return value, self._workload.applied_transposed(by_rows)
        weighed = self._rates[:, np.newaxis] * toeplitz.dense(inverse, self.steps)
        product = self._workload.applied(weighed)
        value = float(self._weights @ np.sum(product**2, axis=1))
        by_product = 2 * self._weights[:, np.newaxis] * product
        by_matrix = self._workload.applied_transposed(by_product)
        by_matrix *= self._rates[:, np.newaxis]
        return value, np.array([np.trace(by_matrix, -k) for k in range(self.steps)])

    def _sensitivity(self, column):
        starts = range(0, self._most * self._separation, self._separation)
        response = np.zeros(self.steps)
        for start in starts:
            response[start:] += column[: self.steps - start]
        gradient = np.zeros(self.steps)
        for start in starts:
            gradient[: self.steps - start] += 2 * response[start:]
        return float(response @ response), gradient


def least(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    starts: Sequence[np.ndarray],
    bounds: tuple[float, float],
) -> np.ndarray:
    """Returns the best result of L-BFGS from several starts."""
    with _progress.calls(objective, title="matrix of least error", unit="try") as value:
        found = [
            optimize.minimize(
                value,
                start,
                jac=True,
                method="L-BFGS-B",
                bounds=[bounds] * len(start),
                options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-12, "gtol": 1e-8},
            )
            for start in starts
        ]
    return min(found, key=lambda result: result.fun).x


def _correlated(outer: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """sum_k outer_k kernel_(k-m) for every m."""
    return signal.convolve(outer[::-1], kernel)[: len(outer)][::-1]


@dataclasses.dataclass(frozen=True)
class OptimizedToeplitz(ToeplitzMatrix):
    """The banded Toeplitz matrix with the least error for given steps.

    Found by L-BFGS among non-negative, non-increasing coefficients, with exact
    sensitivity (Choquette-Choo et al. 2023, arXiv 2306.08153; McKenna 2024,
    arXiv 2405.15913). The search runs once, and its result becomes part of the
    settings: on a different machine, a search may end with different last digits, and
    so with a different matrix.

    Attributes:
      bands: The number of bands: with `CyclicPoisson` at most its `separation`.
      steps: The number of steps to optimize for; the matrix may run for any number.
      participation: How often a record takes part, or a scheme with a participation.
      workload: The workload in which the noise should be small.
      error: `"mean"` over the steps, or the error after the `"last"` step.
      column: The coefficients; None to search for them.

    >>> from tfdpclip.correlated import SingleEpoch
    >>> OptimizedToeplitz(3, 100, SingleEpoch()).coefficients(4).round(2)
    array([1.  , 0.74, 0.62, 0.  ])
    """

    bands: int
    steps: int
    participation: Any
    workload: Workload = Workload()
    error: str = "mean"
    column: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        keep = functools.partial(object.__setattr__, self)
        keep("steps", count(self.steps))
        keep("bands", _arguments.integer("bands", self.bands, 1))
        if self.bands > self.steps:
            raise ValueError(
                f"bands must be at most steps = {self.steps}, got {self.bands}."
            )
        keep("participation", participations.of(self.participation, self.steps))
        check_workload(self.workload)
        _arguments.choice("error", self.error, OBJECTIVES)
        amplified = self.participation.amplified_rate is not None
        if amplified and self.bands > self.participation.separation:
            raise ValueError(
                f"bands must be at most separation = {self.participation.separation} "
                f"for {self.participation.describe()}, got {self.bands}."
            )
        if self.column is None:
            check_steps(self.steps)
            keep(
                "column",
                _best_column(
                    self.bands,
                    self.steps,
                    self.participation,
                    self.workload,
                    self.error,
                ),
            )
            return
        found = toeplitz.column("column", self.column)
        if len(found) != self.bands or not toeplitz.never_rises(found):
            raise ValueError(
                f"column must have bands = {self.bands} non-negative, non-increasing "
                "coefficients; leave column out to search for them."
            )
        keep("column", tuple(map(float, found)))

    @property
    def bandwidth(self) -> int | None:
        return self.bands

    def coefficients(self, steps: int) -> np.ndarray:
        return toeplitz.padded(np.array(self.column), count(steps))

    def describe(self) -> str:
        return self.workload.named(
            f"noise correlated by an optimised Toeplitz matrix of {self.bands} bands "
            f"for {self.steps} steps"
        )


@functools.lru_cache(maxsize=32)
def _best_column(bands, steps, participation, workload, error):
    if bands == 1:
        return (1.0,)
    objective = Objective(steps, participation, workload, error)

    def column_of(logits):
        # Each coefficient is a share of the one before, so it never rises or turns < 0.
        return np.cumprod(np.concatenate([[1.0], special.expit(logits)]))

    def value(logits):
        column = toeplitz.padded(column_of(logits), steps)
        inverse = toeplitz.inverse(column[:bands], steps)
        result, gradient = objective(column, inverse)
        weighed = (gradient * column)[1:bands]
        below = np.cumsum(weighed[::-1])[::-1]
        return result, below * special.expit(-logits)

    root = root_of_workload(bands, workload.momentum)
    shares = np.clip(root[1:] / root[:-1], 0.05, 0.999)
    starts = [special.logit(shares), np.zeros(bands - 1)]
    best = least(value, starts, (-30.0, 30.0))
    return tuple(map(float, column_of(best)))
