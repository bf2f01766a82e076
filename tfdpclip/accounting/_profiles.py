"""Privacy profiles, delta as a function of epsilon, of the parts of a step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

#: Probabilities and profile values below this are treated as 0.
TAIL = 1e-20

Profile = Callable[[np.ndarray], np.ndarray]

# Losses per evaluation; memory grows with losses times parts of a mixture.
_AT_ONCE = 50_000
# Newton's method takes less than ten steps.
_MOST_NEWTON_STEPS = 100


def gaussian(mu: float | np.ndarray, eps: np.ndarray) -> np.ndarray:
    """Returns delta(eps) of N(mu, 1) against N(0, 1)."""
    log_upper = special.log_ndtr(-eps / mu + mu / 2)
    gap = eps + special.log_ndtr(-eps / mu - mu / 2) - log_upper
    return np.exp(log_upper) * -np.expm1(np.minimum(gap, 0.0))


def laplace(most: float, eps: np.ndarray) -> np.ndarray:
    """Returns delta(eps) of Laplace noise of scale 1 / `most`, around 0 and around 1.

    The loss at y is `most` (|y - 1| - |y|), in [-most, most]. Where eps is within, the
    loss exceeds eps for y < (1 - eps / most) / 2, which has the probabilities
    1 - e^((eps - most) / 2) / 2 and e^(-(eps + most) / 2) / 2.
    """
    return np.maximum(0.0, -np.expm1(np.minimum(eps, (eps - most) / 2)))


def mixture(mu: float, rate: float, most: int) -> tuple[Profile, Profile, float]:
    """Profiles of N(j mu, 1), j ~ Binomial(most, rate), against N(0, 1), and reverse.

    The density of the mixture against N(0, 1), L(y) = sum_j p_j exp(j mu y - j^2 mu^2 /
    2), grows with y. So the first profile integrates L(t) - e^eps above the y with
    L(y) = e^eps, and each part of that is a Gaussian profile: with D_m the profile of
    N(m, 1) against N(0, 1), and e_j = j mu y - j^2 mu^2 / 2,

        remove(eps) = sum_j p_j D_{j mu}(e_j).

    The second profile integrates 1 - e^eps L(t) below the y with L(y) = e^-eps, and is

        add(eps) = sum_j p_j exp(eps + e_j) D_{j mu}(-e_j),

    or 0 where L is larger everywhere. All parts are positive, so that nothing cancels.

    Args:
      mu: The shift by one example, over the standard deviation of the noise.
      rate: The probability that an example enters.
      most: The number of examples.

    Returns:
      Both profiles, and about the largest loss. The event that more examples enter than
      `TAIL` allows for is taken to reveal everything.
    """
    counts, log_weights, beyond = _binomial(rate, most)
    shifts = counts * mu
    log_none = most * math.log1p(-rate) if rate < 1 else -math.inf

    def parts(eps, direction):
        # log(e^(+-eps) - p_0): the rest, for the parts with a shift.
        found = np.minimum(log_none - direction * eps, 0.0)
        with np.errstate(divide="ignore"):
            rest = direction * eps + np.log(-np.expm1(found))
        safe = np.where(np.isfinite(rest), rest, 0.0)
        y = _reaches(safe, shifts, log_weights)
        return np.isfinite(rest), shifts[:, np.newaxis] * (
            y - shifts[:, np.newaxis] / 2
        )

    def remove(eps):
        _, losses = parts(eps, 1)
        own = np.exp(log_weights)[:, np.newaxis]
        return (own * gaussian(shifts[:, np.newaxis], losses)).sum(axis=0) + beyond

    def add(eps):
        some, losses = parts(eps, -1)
        own = np.exp(np.minimum(log_weights[:, np.newaxis] + losses + eps, 0.0))
        found = (own * gaussian(shifts[:, np.newaxis], -losses)).sum(axis=0)
        return np.where(some, found, 0.0)

    return _piecewise(remove), _piecewise(add), _largest(shifts, log_weights, log_none)


def mixture_spread(mu: float, rate: float, most: int) -> tuple[float, float]:
    """Returns about the deviation of the loss of a mixture, and its largest loss."""
    counts, log_weights, _ = _binomial(rate, most)
    log_none = most * math.log1p(-rate) if rate < 1 else -math.inf
    largest = _largest(counts * mu, log_weights, log_none)
    # The variance of L under N(0, 1) is sum_ij p_i p_j (exp(i j mu^2) - 1).
    products = np.outer(counts, counts) * mu**2
    unsampled = most * mu
    if products.max() > 600:
        return unsampled, largest
    weights = np.exp(log_weights)
    variance = float(weights @ np.expm1(products) @ weights)
    return min(unsampled, math.sqrt(variance)), largest


def _binomial(rate: float, most: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts above 0, logarithms of their probabilities, and the mass beyond."""
    binomial = stats.binom(most, rate)
    last = 1 + bisect.bisect_left(
        range(1, most), True, key=lambda count: binomial.sf(count) <= TAIL
    )
    counts = np.arange(1, last + 1)
    log_weights = binomial.logpmf(counts)
    known = np.isfinite(log_weights)
    return counts[known].astype(float), log_weights[known], float(binomial.sf(last))


def _largest(shifts, log_weights, log_none) -> float:
    """The loss where a Gaussian at the last of the shifts has ended."""
    losses = shifts * (shifts[-1] + 10 - shifts / 2)
    return float(np.logaddexp(log_none, special.logsumexp(log_weights + losses)))


def _reaches(levels, shifts, log_weights) -> np.ndarray:
    """The y with log sum_j exp(log_weights_j + m_j y - m_j^2 / 2) = level.

    The left side is convex in y, and grows at least as fast as the least shift: from
    a y that is too large, Newton's method descends to the solution.
    """
    rounding = 1e-14 * shifts[-1] / shifts[0]
    shifts, log_weights = shifts[:, np.newaxis], log_weights[:, np.newaxis]
    # Where a single term reaches the level, the sum does.
    y = ((levels - log_weights) / shifts + shifts / 2).min(axis=0)
    for _ in range(_MOST_NEWTON_STEPS):
        parts = log_weights + shifts * (y - shifts / 2)
        top = parts.max(axis=0)
        own = np.exp(parts - top)
        total = own.sum(axis=0)
        gap = top + np.log(total) - levels
        step = gap * total / (own * shifts).sum(axis=0)
        y = y - step
        if np.all(np.abs(step) <= rounding * (1 + np.abs(y))):
            break
    return y


def _piecewise(profile: Profile) -> Profile:
    """Evaluates the profile in pieces that fit into memory."""

    def pieces(eps):
        eps = np.asarray(eps, float)
        starts = range(0, max(1, eps.size), _AT_ONCE)
        return np.concatenate([profile(eps[i : i + _AT_ONCE]) for i in starts])

    return pieces
