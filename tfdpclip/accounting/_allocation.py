"""Privacy profiles of an epoch in which each record is in a random step of t.

*The worst case.* A record is in step i of t with probability 1/t. Given the earlier
steps, and the steps of all further records, step i is N(0, z^2 I) without the record,
and N(v_i, z^2 I) with the record in the step, |v_i| <= 1, in clip norms. So the release
of the whole epoch, with the record against without, has the likelihood ratio

    L = (A_1 + ... + A_t) / t,   A_i = exp(<v_i, Y_i> / z^2 - |v_i|^2 / (2 z^2)),

with Y_i ~ N(0, z^2 I) without the record. Both divergences are expectations of convex
functions of L without the record: E[max(L - e^eps, 0)] of with against without,
E[max(1 - e^eps L, 0)] of without against with. Given the earlier steps, A_i is
lognormal with mean 1, and its logarithm has a deviation of |v_i| / z, which is below
1/z in the convex order: A_i is the conditional mean of X_i = exp(N(-1/(2 z^2), 1/z^2)).
From the last step to the first, an independent X_i takes the place of A_i, by which no
expectation of a convex function becomes less. So the epoch is dominated by
L = (X_1 + ... + X_t) / t with independent X_i, the ratio of the mean of N(e_i, z^2 I)
over i against N(0, z^2 I) (Chua et al. 2024, arXiv 2412.16802; Feldman and Shenfeld
2025, arXiv 2502.08202), also where a step depends on earlier steps. Epochs compose,
because their draws are independent. If m of the t steps of an epoch ran, the v_i of the
remaining steps are 0: L = (X_1 + ... + X_m + t - m) / t.

*The bound.* Sums of convex functions' arguments keep the convex order: a change that
spreads some X_i, or a sum of X_i, and keeps the mean, makes both divergences larger.
So X is moved to the points of a grid: each value to the two points around the value,
with the same mean; and the sum is moved after each addition. A value above the last
point is moved to that point and, with the remaining mean, to infinity. The result is a
distribution on a grid whose divergences are sums, and an upper bound in both
directions. The error is of second order in the width of the grid. All masses are
positive, and no mass is a difference of much larger masses.

*The grid.* A grid is evenly spaced in stretches, and the spacing of each stretch is a
power of two that is no less than the spacing of the stretch before. A sum of two
values of such a grid is rounded, as above, to the coarser of both spacings. So the
distribution of a sum is one short convolution for each spacing, of masses with masses:
by products of positive numbers, not by Fourier transforms, which would round.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
from scipy import special

from tfdpclip.accounting import _profiles
from tfdpclip.accounting._profiles import Profile

#: Most distance of two points of a grid, in standard deviations of a normal variable
#: with as much mass to the left of it; and by what it is multiplied far to the left,
#: where nothing decides about an epsilon, and to the right, where deltas are.
SPACING = 0.04
_LEFT, _RIGHT = 1.5, 0.6
# Ends of the grid, in the same: beyond them is a mass of 7e-15.
_END = 7.7
_TAIL = 1e-14
# A grid's spacing is chosen for stretches of this length, in the same.
_STRETCH = 0.25
# For more successive sums, grids are finer.
_SUMS = 12
# Largest deviation of a logarithm: beyond, epsilons are in the tens, small ratios round
# to 0, and an epoch is taken for a Gaussian that is not sampled.
_MOST_SPREAD = 6.0
# Least: with more noise than that, differences of masses would round.
_LEAST_SPREAD = 1e-6


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Masses at consecutive multiples of a spacing.

    Attributes:
      spacing: a power of two.
      first: the number of the first multiple.
      masses: `[n]`.
    """

    spacing: float
    first: int
    masses: np.ndarray

    def distances(self) -> np.ndarray:
        """The multiples, `[n]`."""
        return (self.first + np.arange(len(self.masses))) * self.spacing


@dataclasses.dataclass(frozen=True)
class Ratios:
    """A sum of independent likelihood ratios, each less its mean of 1, on a grid.

    Attributes:
      least: minus the number of ratios, which no sum is below.
      least_mass: the mass there.
      base: where the grid begins.
      stretches: of the grid, from the base on, ascending.
      infinite: what is missing of the mean, 0: it is where the sum is infinite.
    """

    least: float
    least_mass: float
    base: float
    stretches: tuple[Stretch, ...]
    infinite: float

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """All places with a mass, ascending, and the masses."""
        distances, masses = _joined(self.stretches)
        places = np.concatenate([[self.least], self.base + distances])
        masses = np.concatenate([[self.least_mass], masses])
        # The smallest of a large deviation are the base, rounded.
        places, starts = np.unique(places, return_index=True)
        return places, np.add.reduceat(masses, starts)


def profiles(
    noise_multiplier: float, steps: int, of: int, spacing: float = SPACING
) -> tuple[Profile, Profile, float]:
    """Profiles of an epoch, with the record against without, and the reverse.

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
    # Each sum is moved to a grid once: of more sums, each has less to err by.
    sums = steps.bit_length() + steps.bit_count()
    found = _ratios(
        steps,
        max(mu, _LEAST_SPREAD),
        spacing * min(1.0, math.sqrt(_SUMS / sums)),
    )
    places, masses = found.points()
    gaps = np.diff(places)
    right = np.cumsum(masses[::-1])[::-1][1:]
    above = np.cumsum((right * gaps)[::-1])[::-1]
    above = np.concatenate([above, [0.0]]) + found.infinite
    left = np.cumsum(masses)[:-1]
    below = np.concatenate([[0.0], np.cumsum(left * gaps)])

    def remove(eps):
        return np.interp(of * np.expm1(np.minimum(eps, 700.0)), places, above) / of

    def add(eps):
        # The ratio of a step that did not run is 1: L is at least (t - m) / t.
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
def _ratios(
    count: int, deviation: float, spacing: float, of: int | None = None
) -> Ratios:
    """The sum of so many, doubled, and added to, by the bits of the number.

    Args:
      count: how many.
      deviation: of the logarithm of each.
      spacing: of the grid.
      of: how many the sum will be a part of; by default, of no more.
    """
    of = of or count
    if count == 1:
        return _one(deviation, spacing, of)
    half = _ratios(count // 2, deviation, spacing, of)
    whole = _added(half, half, spacing, _deepest(count, of))
    if count % 2 == 0:
        return whole
    return _added(whole, _one(deviation, spacing, of), spacing, _deepest(count, of))


def _deepest(count: int, of: int) -> float:
    """The score below which a grid needs not be finer.

    Where a sum of many ratios is small, its parts are that much less so.
    """
    return -1 - _END * math.sqrt(count / of)


@functools.lru_cache(maxsize=8)
def _one(deviation: float, spacing: float, of: int) -> Ratios:
    """A lognormal ratio."""
    scores = _scores(_END + deviation)
    quantiles = np.exp(deviation * scores - deviation**2 / 2)
    start = quantiles[0]
    grid = _grid(quantiles - start, scores, spacing, _deepest(1, of))
    distances = np.concatenate([nodes for _, nodes in grid])
    ends = np.log(start + distances) / deviation + deviation / 2
    ends = np.concatenate([[-np.inf], ends, [np.inf]])
    masses, means = _normal_masses(ends), _normal_masses(ends - deviation)
    # Mass below the base is moved to the base and to the least.
    share = min(float(means[0] / start), float(masses[0]))
    least_mass, masses, means = float(masses[0]) - share, masses[1:], means[1:]
    moments = means - (start + distances) * masses
    masses[0] += share
    return _split(grid, masses, moments, start - 1.0, least_mass, -1.0, 0.0)


def _scores(last: float) -> np.ndarray:
    """Ends of stretches, in scores, from the first end of the grid to the last."""
    return np.linspace(-_END, last, math.ceil((last + _END) / _STRETCH) + 1)


def _normal_masses(ends: np.ndarray) -> np.ndarray:
    low, high = ends[:-1], ends[1:]
    return np.where(
        low > 0,
        special.ndtr(-low) - special.ndtr(-high),
        special.ndtr(high) - special.ndtr(low),
    )


def _grid(
    distances: np.ndarray, scores: np.ndarray, spacing: float, deepest: float
) -> list[tuple[float, np.ndarray]]:
    """The spacings of a grid from 0 to the last distance, and the points of each.

    Any points give a bound; these, as close together as the scores ask, a close one.

    Args:
      distances: `[n]`, ascending and not negative: the quantiles of `scores`.
      scores: `[n]`, ascending.
      spacing: of the grid, in scores.
      deepest: the score below which the grid needs not be finer.
    """
    middles = (scores[1:] + scores[:-1]) / 2
    factors = np.where(middles < -1, _LEFT, np.where(middles > 1, _RIGHT, 1.0))
    widths = np.diff(distances) / np.diff(scores) * (spacing * factors)
    widths[middles < deepest] = np.inf
    known = widths > 0
    widths, ends = widths[known], distances[1:][known]
    # No stretch is finer than the stretches on its left. By powers of four, there are
    # few of them.
    widths = np.minimum.accumulate(widths[::-1])[::-1]
    powers = 2 * np.floor(np.log2(widths) / 2)
    grid, end = [], 0.0
    for power in np.unique(powers):
        width = 2.0**power
        first = math.ceil(end / width)
        last = max(first + 1, math.ceil(float(ends[powers == power][-1]) / width))
        grid.append((width, np.arange(first, last) * width))
        end = last * width
    # The grid ends where the last stretch does.
    width, nodes = grid[-1]
    grid[-1] = (width, np.concatenate([nodes, [end]]))
    return grid


def _split(grid, masses, moments, base, least_mass, least, infinite) -> Ratios:
    """Moves what is between two points to both, with the mean that it had.

    Args:
      grid: of `_grid`, n points in all.
      masses: `[n]`: from each point to the next, and from the last one on.
      moments: `[n]`: of these, the sums of masses times distances from that point.
      base: where the grid begins.
      least_mass: the mass at `least`.
      least: the least value.
      infinite: what is missing of the mean.
    """
    distances = np.concatenate([nodes for _, nodes in grid])
    shares = np.clip(moments[:-1] / np.diff(distances), 0.0, masses[:-1])
    found = masses.copy()
    found[:-1] -= shares
    found[1:] += shares
    infinite += max(0.0, float(moments[-1]))
    # The far tail, of hardly any mass, is at infinity, too.
    tail = np.cumsum((found * distances)[::-1])[::-1]
    kept = max(2, int(np.searchsorted(-tail, _TAIL * least)))
    infinite += float(found[kept:] @ (distances[kept:] - distances[kept - 1]))
    found[kept - 1] += found[kept:].sum()
    found = found[:kept]
    total = least_mass + found.sum()
    stretches, start = [], 0
    for width, nodes in grid:
        own = found[start : start + len(nodes)] / total
        start += len(nodes)
        if len(own):
            stretches.append(Stretch(width, round(nodes[0] / width), own))
    return Ratios(least, least_mass / total, base, tuple(stretches), infinite)


def _added(one: Ratios, other: Ratios, spacing: float, deepest: float) -> Ratios:
    """The sum of both, independent of each other."""
    base, least = one.base + other.base, one.least + other.least
    sums = _joined(tuple(_sums(one.stretches, other.stretches)))
    parts = [sums]
    for lone, rest in ((one, other), (other, one)):
        if lone.least_mass:
            distances, masses = _joined(rest.stretches)
            # Where either value is the least.
            moved = distances + (lone.least - lone.base)
            parts.append((moved, masses * lone.least_mass))
    distances = np.concatenate([part for part, _ in parts])
    masses = np.concatenate([part for _, part in parts])
    order = np.argsort(distances, kind="stable")
    distances, masses = distances[order], masses[order]
    least_mass = one.least_mass * other.least_mass

    left = least_mass + np.cumsum(masses)
    right = np.cumsum(masses[::-1])[::-1]
    # `_split` leaves nothing farther out on the grid.
    tail = np.cumsum((masses * distances)[::-1])[::-1]
    end = int(np.searchsorted(-tail, _TAIL * least)) - 1
    scores = _scores(max(1.0, -float(special.ndtri(right[end]))))
    low = np.searchsorted(left, special.ndtr(scores[scores <= 0]))
    high = np.searchsorted(-right, -special.ndtr(-scores[scores > 0]), "right") - 1
    quantiles = np.concatenate([low, np.maximum(high, low[-1])])
    quantiles = distances[np.minimum(quantiles, len(distances) - 1)]
    quantiles[-1] = distances[end]
    start = quantiles[0]
    grid = _grid(quantiles - start, scores, spacing, deepest)

    nodes = np.concatenate([points for _, points in grid])
    distances = distances - start
    below = int(np.searchsorted(distances, 0.0))
    # Between the least and the base.
    gap = base + start - least
    if below:
        shares = np.minimum(-distances[:below] / max(gap, 1e-300), 1.0)
        least_mass += float(shares @ masses[:below])
    cells = np.searchsorted(nodes, distances[below:], "right") - 1
    own = masses[below:]
    offsets = own * (distances[below:] - nodes[cells])
    found = np.bincount(cells, own, len(nodes))
    if below:
        found[0] += float((1 - shares) @ masses[:below])
    moments = np.bincount(cells, offsets, len(nodes))
    infinite = one.infinite + other.infinite
    return _split(grid, found, moments, base + start, least_mass, least, infinite)


def _joined(stretches) -> tuple[np.ndarray, np.ndarray]:
    """The distances of all stretches, and the masses."""
    distances = [stretch.distances() for stretch in stretches]
    return np.concatenate(distances), np.concatenate([s.masses for s in stretches])


def _sums(one: tuple[Stretch, ...], other: tuple[Stretch, ...]) -> Iterator[Stretch]:
    """The distances of sums, stretch by stretch, of which some overlap."""
    spacings = sorted({stretch.spacing for stretch in one + other})
    alike = one is other
    low, high = _Finer(one), _Finer(other)
    for spacing in spacings:
        finer, stretch = low.up_to(spacing)
        others, same = (finer, stretch) if alike else high.up_to(spacing)
        if stretch is not None:
            # Of a sum of two alike, each pair is there twice.
            weights = 2 * others if alike else others
            partner = _overlaid(weights, same)
            # Without a partner up to this spacing, all pairs are of coarser stretches.
            if len(partner):
                masses = np.convolve(stretch.masses, partner)
                yield Stretch(spacing, stretch.first, masses)
        if not alike and same is not None and len(finer):
            yield Stretch(spacing, same.first, np.convolve(same.masses, finer))


class _Finer:
    """All that is on finer stretches, moved to coarser and coarser spacings."""

    def __init__(self, stretches: tuple[Stretch, ...]):
        self._stretches = {stretch.spacing: stretch for stretch in stretches}
        self._masses = np.zeros(0)
        self._spacing = 0.0
        self._own: Stretch | None = None

    def up_to(self, spacing: float) -> tuple[np.ndarray, Stretch | None]:
        """Masses of all finer stretches at multiples of a spacing, and its stretch."""
        masses = _overlaid(self._masses, self._own)
        if len(masses):
            masses = _coarser(masses, round(spacing / self._spacing))
        self._own = self._stretches.get(spacing)
        self._masses, self._spacing = masses, spacing
        return masses, self._own


def _overlaid(masses: np.ndarray, stretch: Stretch | None) -> np.ndarray:
    """Masses at the multiples of a spacing from 0 on, and a stretch's among them."""
    if stretch is None:
        return masses
    end = stretch.first + len(stretch.masses)
    found = np.zeros(max(len(masses), end))
    found[: len(masses)] = masses
    found[stretch.first : end] += stretch.masses
    return found


def _coarser(masses: np.ndarray, times: int) -> np.ndarray:
    """Moves masses from multiples of a spacing to multiples of a larger; means stay."""
    if times == 1:
        return masses
    rows = -(-len(masses) // times)
    found = np.zeros(rows * times)
    found[: len(masses)] = masses
    found = found.reshape(rows, times)
    shares = np.arange(times) / times
    moved = np.zeros(rows + 1)
    moved[:-1] = found @ (1 - shares)
    moved[1:] += found @ shares
    return moved
