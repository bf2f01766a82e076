"""The least error that a family of Toeplitz matrices has, by its gradient.

The objective is log(error^2 s(C)^2): the noise in the weights at a given epsilon. Both
matrices of the library are parametrised so that every one of them has non-negative,
non-increasing coefficients, whose sensitivity is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import optimize, signal

from tfdpclip import _progress
from tfdpclip.correlated import participation as participations
from tfdpclip.correlated import toeplitz
from tfdpclip.correlated.workload import Workload

#: Which error is to be least: over all steps, or after the last one.
OBJECTIVES = ("mean", "last")


# Beyond this, what is best hardly depends on it, and the search takes minutes.
_MOST_STEPS = 100_000


def check_steps(steps: int) -> None:
    """Refuses to search for a matrix of very many steps."""
    if steps > _MOST_STEPS:
        raise ValueError(
            f"steps must be at most {_MOST_STEPS} for a matrix to be found, got "
            f"{steps}: find it for fewer, and run it for more."
        )


class Objective:
    """log(error^2 s(C)^2) of first columns, and its gradient.

    Args:
      steps: n.
      participation: How often a record takes part.
      workload: What the noise is to be small in.
      error: One of `OBJECTIVES`: the mean of the squared error over the steps, or that
        after the last step, which without learning rates is the largest.
    """

    def __init__(self, steps: int, participation: Any, workload: Workload, error: str):
        self.steps = steps
        self._workload = workload
        found = participations.of(participation, steps)
        self._separation = found.separation
        # Where sampling amplifies, the longest column counts.
        self._most = 1 if found.amplified_rate is not None else found.most(steps)
        self._weights = np.full(steps, 1.0 / steps)
        if error == "last":
            self._weights = np.zeros(steps)
            self._weights[-1] = 1.0
        self._rates = workload.rates(steps)
        if self._rates is not None:
            toeplitz.check_dense(steps)

    def __call__(self, column: np.ndarray, inverse: np.ndarray):
        """Returns the value at C and its gradient by the entries of C.

        Args:
          column: c_0, ..., c_(n-1).
          inverse: The first column of C^-1.
        """
        error, by_inverse = self._error(inverse)
        squared, by_column = self._sensitivity(column)
        # C^-1 moves by -C^-1 dC C^-1.
        twice = _convolved(inverse, inverse)
        gradient = by_column / squared - _correlated(by_inverse, twice) / error
        return float(np.log(error) + np.log(squared)), gradient

    def _error(self, inverse):
        if self._rates is None:
            rows = self._workload.applied(inverse)
            # Entry k of the product is in the rows k, k + 1, ...
            weights = np.cumsum(self._weights[::-1])[::-1]
            # Squares are counted once for each row that is that long.
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
    """Returns the best of what L-BFGS finds from several starts."""
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


def _convolved(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return signal.convolve(left, right)[: len(left)]


def _correlated(outer: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """sum_k outer_k kernel_(k-m) for every m."""
    return signal.convolve(outer[::-1], kernel)[: len(outer)][::-1]
