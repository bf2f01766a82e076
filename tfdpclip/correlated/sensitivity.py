"""The sensitivity s(C): how far one record can move C x, by its participation.

C may have more rows than steps (a tree has a row for every node). The record's
contributions are vectors of norm at most 1, each chosen after all earlier releases.

*Formal guarantees*

* No function here returns less than the sensitivity of the given matrix in exact
  arithmetic: results are raised by their own rounding error (`toeplitz.upward`).
* Exact results are exact up to that rounding; upper bounds are documented as bounds.

*Why.* For contributions g_i u_i with norms at most 1, in the steps of a pattern, the
squared norm of sum_i C_i u_i^T is sum_ij G_ij <u_i, u_j> with G = C^T C. It is at most
sum_ij |G_ij|, with equality at u_i = u where no G_ij is negative.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfdpclip import _arguments
from tfdpclip.correlated import participation as participations
from tfdpclip.correlated import toeplitz


def of_matrix(strategy: Any, participation: Any) -> float:
    """Returns the sensitivity of a matrix, or an upper bound of it.

    *Formal guarantees*

    * Exact for one participation (the longest column), and if columns at least
      `separation` apart are orthogonal, as for a matrix with at most that many bands:
      then the best columns by their lengths (Choquette-Choo et al. 2023, arXiv
      2306.08153, Algorithm 3).
    * Otherwise an upper bound: for every step the worst further steps by |C^T C|, and
      then the worst of these sums (their Algorithm 4).
    * For `CyclicPoisson`: the longest column, of a matrix in which every column ends
      before the column `separation` later begins, as with at most that many bands;
      other matrices are refused.

    Args:
      strategy: C, `[rows, steps]`.
      participation: A participation, or a scheme with a participation.

    Raises:
      ValueError: If the matrix has non-finite entries, or does not fit.

    >>> of_matrix([[1, 0], [0.5, 1]], participations.SingleEpoch()) ** 2
    1.25...
    """
    matrix = _arguments.floats("strategy", strategy)
    if matrix.ndim != 2 or not matrix.size or not np.all(np.isfinite(matrix)):
        raise ValueError(
            "strategy must be a matrix [rows, steps] of finite numbers, got shape "
            f"{matrix.shape}."
        )
    rows, steps = matrix.shape
    toeplitz.check_dense(steps)
    found = participations.of(participation, steps)
    lengths = np.sum(matrix**2, axis=0)
    most = found.most(steps)
    gram = np.abs(matrix).T @ np.abs(matrix)
    apart = np.abs(np.subtract.outer(range(steps), range(steps))) >= found.separation
    # Computed from absolute values, so that rounding cannot fake orthogonality.
    orthogonal = not np.any(gram[apart])
    amplified = found.amplified_rate is not None
    if amplified and not _ends_in_time(matrix, found.separation):
        raise ValueError(
            f"strategy must have at most separation = {found.separation} bands to be "
            "amplified: a record's effect in one turn must end before its next turn."
        )
    if amplified or most == 1:
        squared = float(lengths.max())
    elif orthogonal:
        squared = _best_sum(lengths, found.separation, most)
    else:
        entries = np.abs(matrix.T @ matrix)
        # If terms cancel, the rounding error is relative to the terms, not the sum.
        entries = np.minimum(entries + 4 * (rows + 8) * 2.0**-53 * gram, gram)
        worst = _best_sums(entries, found.separation, most)
        squared = _best_sum(worst, found.separation, most)
    return toeplitz.upward(math.sqrt(squared), rows + steps + 2 * most)


def of_toeplitz(
    coefficients: np.ndarray, steps: int, participation: Any, terms: int = 1
) -> float:
    """Returns the sensitivity of a lower-triangular Toeplitz matrix, or a bound.

    *Formal guarantees*

    * Exact if the coefficients are non-negative and non-increasing: the columns 0, b,
      2b, ... attain it (Kalinin and Lampert 2024, arXiv 2405.13763, Theorem 2).
    * Otherwise as `of_matrix`, for the written-out matrix.

    *Why.* For columns i < j of such a matrix, G_ij is the sum of c_(s+j-i) c_s over s
    from 0 to n-1-j: not negative, and it does not grow with j - i or with j. The m-th
    column of a pattern is not before column m b, nor is it closer to the l-th than
    (m-l) b, so that no entry of its Gram matrix exceeds the entry for 0, b, 2b, ...

    Args:
      coefficients: The first column of C, without trailing zeros.
      steps: n.
      participation: A participation, or a scheme with a participation.
      terms: The number of products in the rounded sum of each coefficient; 1 if
        coefficients are exact settings of the matrix.

    >>> of_toeplitz(np.array([1.0, 0.5]), 10, participations.MinSeparation(2, 3)) ** 2
    3.75...
    """
    steps = _arguments.integer("steps", steps, 1)
    found = participations.of(participation, steps)
    column = toeplitz.column("coefficients", coefficients)[:steps]
    bands = int(np.flatnonzero(column)[-1]) + 1
    if found.amplified_rate is not None:
        if bands > found.separation:
            raise ValueError(
                f"the matrix has {bands} bands, and records come again after "
                f"separation = {found.separation} steps, so privacy is not amplified. "
                f"Have at most {found.separation} bands, or as many groups as bands."
            )
        most = 1
    else:
        most = found.most(steps)
    if most > 1 and not toeplitz.never_rises(column):
        matrix = toeplitz.dense(column, steps)
        return toeplitz.upward(of_matrix(matrix, found), steps * terms)
    column = column[:bands]
    if bands == most == 1:
        return toeplitz.upward(column[0], 0) if terms > 1 else float(column[0])
    response = np.zeros(steps)
    for start in range(0, most * found.separation, found.separation):
        length = min(bands, steps - start)
        response[start : start + length] += column[:length]
    squared = float(response @ response)
    return toeplitz.upward(math.sqrt(squared), steps * terms + 2 * most)


def _ends_in_time(matrix: np.ndarray, separation: int) -> bool:
    """Whether each column ends before the column `separation` later begins."""
    rows = len(matrix)
    seen = matrix != 0
    used = seen.any(axis=0)
    first = np.where(used, np.argmax(seen, axis=0), rows)
    last = np.where(used, rows - 1 - np.argmax(seen[::-1], axis=0), -1)
    latest = np.maximum.accumulate(last)[:-separation]
    return bool(np.all(latest < first[separation:]))


def _best_sum(values: np.ndarray, separation: int, most: int) -> float:
    return float(_best_sums(values[np.newaxis], separation, most)[0])


def _best_sums(values: np.ndarray, separation: int, most: int) -> np.ndarray:
    """The largest sum of at most `most` entries of a row, `separation` apart.

    By dynamic programming: the best sum from every entry on, for one more entry each.
    """
    rows, steps = values.shape
    best = np.zeros((rows, steps + separation))
    for _ in range(most):
        taken = values + best[:, separation:]
        best[:, :steps] = np.maximum.accumulate(taken[:, ::-1], axis=1)[:, ::-1]
    return best[:, 0]
