"""How one noise multiplier is shared by the sums and the counts of a step.

A step that releases a clipped sum and K noised counts is one joint Gaussian. The
accountant is given its noise multiplier z; the sum and the counts get more noise than
z, so that together they reveal no more than z allows (Andrew et al. 2021, Theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The share of z^-2 that default counts may take, out of the rest after chosen counts.
DEFAULT_SHARE = 0.5


def remaining_multiplier(z: float, stddevs: Sequence[float]) -> float:
    """Returns z_g, the noise multiplier left for the sum beside noised counts.

    *Formal guarantees*: noise of stddev z_g C on a sum of sensitivity C, and of s_k on
    the k-th sum of indicators in [-1/2, 1/2], where z_g^-2 = z^-2 - sum_k (2 s_k)^-2,
    is one Gaussian mechanism of noise multiplier z for adding or removing a record:
    divided by its noise, the joint vector of a record has norm at most 1/z.

    Args:
      z: as given to the accountant, 0 or above. 0 means no noise anywhere.
      stddevs: the noise on each count.

    Returns:
      z_g; NaN if the counts alone reveal as much as z allows.

    >>> round(remaining_multiplier(1.0, [5.0]), 6), remaining_multiplier(1.0, [0.5])
    (1.005038, nan)
    """
    if z == 0:
        return 0.0
    remaining = 1 - math.fsum(count_share(z, s) for s in stddevs)
    return z / math.sqrt(remaining) if remaining > 0 else math.nan


def count_share(z: float, stddev: float) -> float:
    """The share of z^-2 that a count takes; 4 stands for more than all of z^-2."""
    return min(z / (2 * stddev), 2.0) ** 2 if stddev else 4.0


def enlarged_stddevs(
    stddevs: Sequence[float], free: Sequence[bool], z: float
) -> tuple[float, ...]:
    """The noise on counts, enlarged where it is free, so that the sum has enough of z.

    Free counts take at most half of the z^-2 that the chosen counts leave.

    Args:
      stddevs: `[K]`, the noise on each count.
      free: `[K]`, whether each count has default noise, which may grow.
      z: as given to the accountant.
    """
    chosen, others = count_precisions(stddevs, free)
    room = DEFAULT_SHARE * (1 - (z * chosen) * (z * chosen))
    # If the chosen counts reveal too much, nothing is left for the sum.
    if not room > 0 or z * others <= math.sqrt(room):
        return tuple(stddevs)
    factor = z * others / math.sqrt(room)
    pairs = zip(stddevs, free, strict=True)
    return tuple(factor * s if is_free else s for s, is_free in pairs)


def count_precisions(
    stddevs: Sequence[float], free: Sequence[bool]
) -> tuple[float, float]:
    """Returns precisions p with (p z)^2 the share of z^-2 that counts take.

    Args:
      stddevs: `[K]`, the noise on each count.
      free: `[K]`, whether each count has default noise.

    Returns:
      The precision of the chosen counts, and the precision of the free counts. An exact
      count, of stddev 0, has infinite precision, and counts as chosen.
    """
    parts: tuple[list[float], list[float]] = ([], [])
    for stddev, is_free in zip(stddevs, free, strict=True):
        parts[is_free and stddev > 0].append(0.5 / stddev if stddev else math.inf)
    return math.hypot(*parts[0]), math.hypot(*parts[1])
