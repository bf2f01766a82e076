"""How symmetric a distribution is around 0, with a permutation test."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class SymmetryScore:
    """How far points are from being symmetric around 0.

    Attributes:
      energy_distance: between the points and their negatives; 0 if symmetric.
      score: the same relative to the points' mean distance from each other: a number
        without a unit, to compare by.
      p_value: how often random changes of sign are at least as asymmetric. Small where
        the asymmetry is more than chance; for points from which their own mean was
        subtracted, larger than it would have to be.
      skewness: the skewness of each coordinate.
      count: number of points.
    """

    energy_distance: float
    score: float
    p_value: float
    skewness: tuple[float, ...]
    count: int


def symmetry_score(
    points: Any, permutations: int = 999, *, most: int = 1000, seed: int = 0
) -> SymmetryScore:
    """Tests whether points are distributed symmetrically around 0.

    The energy distance between the points X and their negatives is
    2 (E|X + X'| - E|X - X'|) for independent X, X' (Szekely and Rizzo 2013; Baringhaus
    and Franz 2004). If X is symmetric, changing signs at random changes nothing, which
    gives the p-value.

    Args:
      points: `[n, k]`, or `[n]`.
      permutations: number of random changes of sign, 1 or above.
      most: use no more than this many points (a random choice): the cost grows with
        their square.
      seed: for the choice and the signs.

    Returns:
      The score.

    Raises:
      ValueError: if there are fewer than two points, or a point is not finite.

    >>> rng = np.random.default_rng(0)
    >>> symmetry_score(rng.exponential(size=300) - 1.0).p_value
    0.001
    >>> symmetry_score(rng.standard_normal((300, 2))).p_value > 0.05
    True
    """
    points = np.asarray(points, np.float64)
    points = points[:, None] if points.ndim == 1 else points
    # Squares of larger coordinates overflow.
    if points.ndim != 2 or len(points) < 2 or not np.all(np.abs(points) < 1e150):
        raise ValueError(
            "points must be [n, k] with n at least 2, and finite, got shape "
            f"{points.shape}."
        )
    rng = np.random.default_rng(seed)
    if len(points) > most:
        points = points[rng.choice(len(points), most, replace=False)]
    n = len(points)
    squares = np.einsum("ij,ij->i", points, points)
    inner = 2 * points @ points.T
    sums = squares[:, None] + squares[None]
    apart = np.sqrt(np.maximum(sums - inner, 0.0))
    against = np.sqrt(np.maximum(sums + inner, 0.0))
    # With signs s_i the statistic is the sum of s_i s_j (|x_i + x_j| - |x_i - x_j|).
    # Pairs of a point with itself do not change with the signs.
    kernel = against - apart
    np.fill_diagonal(kernel, 0.0)
    pairs = n * (n - 1)
    observed = float(kernel.sum())
    # Two values that differ by rounding only are equal.
    slack = 1e-12 * float(np.abs(kernel).sum())
    as_large = 0
    for start in range(0, permutations, 256):
        size = min(256, permutations - start)
        signs = rng.choice([-1.0, 1.0], size=(size, n))
        drawn = np.einsum("ij,ij->i", signs @ kernel, signs)
        as_large += int(np.sum(drawn >= observed - slack))
    spread = float(apart.sum()) / pairs
    distance = 2 * observed / pairs
    with np.errstate(invalid="ignore"):
        skewness = stats.skew(points, axis=0)
    return SymmetryScore(
        energy_distance=distance,
        score=distance / (2 * spread) if spread > 0 else 0.0,
        p_value=(1 + as_large) / (1 + permutations),
        skewness=tuple(float(s) for s in np.nan_to_num(skewness)),
        count=n,
    )
