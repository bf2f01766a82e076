"""Privacy profiles of an epoch in which each record is in one step of t, at random.

*The worst case.* A record is in step i of t with probability 1/t. Given what came
before, and the steps of all others, step i is N(0, z^2 I) without the record, and
N(v_i, z^2 I) with it where it is there, |v_i| <= 1, in clip norms. So what the whole
epoch releases, with the record against without it, has the likelihood ratio

    L = (A_1 + ... + A_t) / t,   A_i = exp(<v_i, Y_i> / z^2 - |v_i|^2 / (2 z^2)),

with Y_i ~ N(0, z^2 I) where the record is not there. Both divergences are expectations
of convex functions of L without the record: E[max(L - e^eps, 0)] of with against
without, E[max(1 - e^eps L, 0)] of without against with. Given what came before, A_i is
lognormal with mean 1 and a deviation |v_i| / z of its logarithm, which is below 1/z in
the convex order: it is the conditional mean of X_i = exp(N(-1/(2 z^2), 1/z^2)). From
the last step to the first, each A_i is replaced by an X_i that is independent of all
else, by which no expectation of a convex function becomes less. So the epoch is
dominated by L = (X_1 + ... + X_t) / t with independent X_i, the ratio of the mean of
N(e_i, z^2 I) over i against N(0, z^2 I) (Chua et al. 2024, arXiv 2412.16802; Feldman
and Shenfeld 2025, arXiv 2502.08202), whatever the steps make of one another. Epochs
compose: each has draws of its own. Of an epoch of which m of t steps ran, the v_i of
all others are 0: L = (X_1 + ... + X_m + t - m) / t.

*The bound.* Sums of convex functions' arguments keep the convex order: whatever
spreads some X_i, or a sum of them, with the same mean, makes both divergences larger.
So X is moved to the points of a grid, each value to the two points around it with the
mean that it had; so is, as often as terms are added, the sum. A value above the last
point is moved to that point and, with what is left of its mean, to infinity. What
remains is a distribution on a grid whose divergences are sums, and an upper bound in
both directions. Its error is of second order in the width of the grid. All masses are
positive, and none is a difference of others that are much larger.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import special

from tfdpclip.accounting import _profiles
from tfdpclip.accounting._profiles import Profile

#: Distance of two points of a grid, in standard deviations of a normal variable with as
#: much mass to the left of it; and by what it is multiplied far to the left, where
#: nothing decides about an epsilon, and to the right, where deltas are.
SPACING = 0.02
_LEFT, _RIGHT = 1.5, 0.6
# Ends of the grid, in the same: beyond them is a mass of 7e-15.
_END = 7.7
_TAIL = 1e-14
# Largest deviation of a logarithm: beyond, epsilons are in the tens, small ratios round
# to 0, and an epoch is taken for a Gaussian that is not sampled.
_MOST_SPREAD = 6.0
# Least: with more noise than that, differences of masses would round.
_LEAST_SPREAD = 1e-6
# Rows of pairs that are added up at a time: as many as stay in a processor's cache.
_ROWS = 48
# A table finds the place of a sum in the grid by the leading bits of its distance from
# the grid's first point: 11 of the exponent, and as many of the fraction as here.
_BITS = 11
_SHIFT = np.int64(52 - _BITS)


@dataclasses.dataclass(frozen=True)
class Ratios:
    """A sum of independent likelihood ratios, each less its mean of 1, on a grid.

    Attributes:
      places: `[n]`, ascending; from minus the number of ratios on.
      masses: `[n]`, with sum 1.
      infinite: what is missing of the mean, 0: it is where the sum is infinite.
    """

    places: np.ndarray
    masses: np.ndarray
    infinite: float

    def scores(self) -> np.ndarray:
        """Where a standard normal variable has as much mass on the left, `[n]`."""
        half = self.masses / 2
        left = np.cumsum(self.masses) - half
        right = np.cumsum(self.masses[::-1])[::-1] - half
        left, right = np.maximum(left, 1e-300), np.maximum(right, 1e-300)
        return np.where(left < right, special.ndtri(left), -special.ndtri(right))


def profiles(
    noise_multiplier: float, steps: int, of: int, spacing: float = SPACING
) -> tuple[Profile, Profile, float]:
    """Profiles of an epoch, with the record against without it, and the reverse.

    Args:
      noise_multiplier: z.
      steps: m: how many steps of the epoch ran.
      of: t: in one of how many a record is.
      spacing: of the grid.

    Returns:
      Both, and about the largest loss.
    """
    mu = 1 / noise_multiplier
    if mu > _MOST_SPREAD:
        # The mean of some is below each of them in the convex order.
        unsampled = functools.partial(_profiles.gaussian, mu)
        return unsampled, unsampled, mu * mu / 2 + 10 * mu
    found = _ratios(steps, max(mu, _LEAST_SPREAD), spacing)
    places, masses = found.places, found.masses
    gaps = np.diff(places)
    right = np.cumsum(masses[::-1])[::-1][1:]
    above = np.cumsum((right * gaps)[::-1])[::-1]
    above = np.concatenate([above, [0.0]]) + found.infinite
    left = np.cumsum(masses)[:-1]
    below = np.concatenate([[0.0], np.cumsum(left * gaps)])

    def remove(eps):
        return np.interp(of * np.expm1(np.minimum(eps, 700.0)), places, above) / of

    def add(eps):
        # Of the steps that did not run, the ratio is 1: it is never below (t - m) / t.
        found = np.interp(of * np.expm1(-eps), places, below, left=0.0)
        return np.exp(np.minimum(eps, 700.0)) * found / of

    return remove, add, math.log1p(places[-1] / of)


def spread(noise_multiplier: float, steps: int, of: int) -> tuple[float, float]:
    """Returns about the deviation of the loss of an epoch, and its largest loss."""
    x = min(1 / noise_multiplier**2, 600.0)
    largest = 0.5 * x + 10 * math.sqrt(x)
    deviation = math.sqrt(steps * math.expm1(x)) / of
    return (
        min(1 / noise_multiplier, deviation),
        float(np.logaddexp(math.log1p(-1 / of), largest - math.log(of))),
    )


@functools.lru_cache(maxsize=64)
def _ratios(count: int, deviation: float, spacing: float) -> Ratios:
    """The sum of so many, doubled, and added to, by the bits of the number."""
    if count == 1:
        return _one(deviation, spacing)
    half = _ratios(count // 2, deviation, spacing)
    whole = _added(half, half, spacing)
    if count % 2 == 0:
        return whole
    # What one more adds to a sum of many needs no finer a grid than the sum.
    coarse = spacing * 2 ** min(4, int(math.log2(count)) // 2)
    return _added(whole, _one(deviation, coarse), spacing)


def _one(deviation: float, spacing: float) -> Ratios:
    """One lognormal ratio."""
    scores = _scores(_END + deviation, spacing)
    places = np.expm1(deviation * scores - deviation**2 / 2)
    # The smallest of a large deviation round to 0.
    places, apart = np.unique(places, return_index=True)
    scores, places = scores[apart][places > -1], places[places > -1]
    places = np.concatenate([[-1.0], places])
    ends = np.concatenate([[-np.inf], scores, [np.inf]])
    masses = _normal_masses(ends)
    moments = _normal_masses(ends - deviation) - masses
    return _split(places, masses, moments, 0.0)


def _scores(last: float, spacing: float) -> np.ndarray:
    """Scores from one end to the last, as far from each other as a grid needs it."""
    ends = np.array([-_END, -1.0, 1.0, max(last, 1.0 + spacing)])
    widths = spacing * np.array([_LEFT, 1.0, _RIGHT])
    counts = np.concatenate([[0.0], np.cumsum(np.diff(ends) / widths)])
    return np.interp(
        np.linspace(0, counts[-1], math.ceil(counts[-1]) + 1), counts, ends
    )


def _normal_masses(ends: np.ndarray) -> np.ndarray:
    low, high = ends[:-1], ends[1:]
    return np.where(
        low > 0,
        special.ndtr(-low) - special.ndtr(-high),
        special.ndtr(high) - special.ndtr(low),
    )


def _split(places, masses, moments, infinite: float) -> Ratios:
    """Moves what is between two points to both, with the mean that it had.

    Args:
      places: `[n]`.
      masses: `[n]`: from each point to the next, and from the last one on.
      moments: `[n]`: of these, the sums of masses times values.
      infinite: what is missing of the mean.
    """
    shares = (moments[:-1] - places[:-1] * masses[:-1]) / np.diff(places)
    shares = np.clip(shares, 0.0, masses[:-1])
    found = masses.copy()
    found[:-1] -= shares
    found[1:] += shares
    infinite += max(0.0, float(moments[-1] - places[-1] * masses[-1]))
    # What is so far out that hardly anything is there is at infinity, too.
    tail = np.cumsum((found * (places - places[0]))[::-1])[::-1]
    kept = max(2, int(np.searchsorted(-tail, _TAIL * places[0])))
    infinite += float(found[kept:] @ (places[kept:] - places[kept - 1]))
    found[kept - 1] += found[kept:].sum()
    return Ratios(places[:kept], found[:kept] / found[:kept].sum(), infinite)


def _added(one: Ratios, other: Ratios, spacing: float) -> Ratios:
    """The sum of both, independent of each other."""
    places = _grid(one, other, spacing)
    first, last = places[1], one.places[-1] + other.places[-1]
    nearest = np.float64(np.diff(places[1:]).min() / 2)
    base = nearest.view(np.int64) >> _SHIFT
    top = (np.float64(last - first).view(np.int64) >> _SHIFT) - base + 1
    # The points are where the leading bits change.
    bits = np.maximum(places[1:] - first, nearest).view(np.int64) >> _SHIFT
    bits = np.unique(bits)[1:]
    # From the first of the grid on, where what is near is told apart.
    places = np.concatenate(
        [[places[0] - first, nearest], (bits << _SHIFT).view(np.float64)]
    )
    table = np.zeros(top + 1, np.int32)
    table[bits - base] = 1
    table = np.cumsum(table, dtype=np.int32) + 1
    size = len(places)
    masses, moments = np.zeros(size), np.zeros(size)
    shifted = one.places - first
    for start in range(0, len(other.places), _ROWS):
        rows = slice(start, start + _ROWS)
        # Of a sum of two alike, each pair is there twice.
        columns = slice(start, None) if one is other else slice(None)
        sums = np.add.outer(other.places[rows], shifted[columns])
        weights = np.multiply.outer(other.masses[rows], one.masses[columns])
        if one is other:
            weights[:, sums.shape[0] :] *= 2
        near = sums < nearest
        found = np.maximum(sums, nearest).view(np.int64) >> _SHIFT
        found = table[found - base]
        found[near] = 0
        found, weights = found.ravel(), weights.ravel()
        masses += np.bincount(found, weights, size)
        moments += np.bincount(found, weights * sums.ravel(), size)
    infinite = one.infinite + other.infinite
    total = _split(places, masses, moments, infinite)
    return dataclasses.replace(total, places=total.places + first)


def _grid(one: Ratios, other: Ratios, spacing: float) -> np.ndarray:
    """Points for the sum of both, near the quantiles of evenly spaced scores.

    Any points give a bound; these, which are right for normal variables, and where one
    of them has a tail in which a single ratio is larger than all others, a close one.
    """
    parts = [(part.scores(), part.places) for part in (one, other)]
    variances = [float(part.masses @ part.places**2) for part in (one, other)]
    last = max(scores[-1] for scores, _ in parts)
    wanted = _scores(last, spacing)
    shares = np.sqrt(np.array(variances) / sum(variances))
    found = np.zeros(len(wanted))
    for share, part in zip(shares, parts, strict=True):
        found += np.interp(share * wanted, *part)
    # Far to the right one of them is larger than the other ever is.
    middles = [np.interp(0.0, *part) for part in parts]
    for part, middle in zip(parts, middles[::-1], strict=True):
        alone = np.interp(wanted, *part) + middle
        found = np.where(wanted > 0, np.maximum(found, alone), found)
    least = one.places[0] + other.places[0]
    return np.concatenate([[least], np.unique(found[found > least])])
