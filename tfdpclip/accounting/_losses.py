"""Distributions of the privacy loss on a grid, and the cost of their compositions.

The grid, the composition and the tails are as in `dp_accounting.pld`. An epsilon is
found by sums over arrays, where `dp_accounting` loops over a hundred thousand losses in
Python, which would make training wait after each epoch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import fft

# The mass that a composition may cut off at its ends; it is counted as infinite loss.
_TAIL = 1e-15
# The number of orders tried in Chernoff's bound, in units of the number of losses.
_ORDERS = 20
# The number of rows, roughly, into which Chernoff's bound gathers the losses.
_ROWS = 10_000


@dataclasses.dataclass(frozen=True)
class Losses:
    """The masses at consecutive multiples of a cell's width, and at infinity.

    Attributes:
      width: the width of a cell.
      lowest: the index of the first mass, which has the loss `lowest * width`.
      masses: `[n]`.
      infinite: the mass at infinity.
    """

    width: float
    lowest: int
    masses: np.ndarray
    infinite: float

    def composed(self, count: int) -> Losses:
        """The sum of `count >= 1` independent losses; never below the exact loss."""
        return compose([(self, count)])

    def delta(self, epsilon: float) -> float:
        """The sum of (1 - e^(epsilon - loss)) over all losses above epsilon.

        1 if a mass is not finite.
        """
        if not self._known():
            return 1.0
        losses = self._losses()
        above = losses > epsilon
        shares = -np.expm1(epsilon - losses[above])
        return float(self.infinite + np.sum(shares * self.masses[above]))

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 that has at most the given delta.

        Infinite if there is none, or if a mass is not finite.
        """
        if self.infinite > delta or not self._known():
            return math.inf
        losses = self._losses()
        # Losses of 0 or less do not contribute to delta(epsilon) for epsilon >= 0.
        losses, masses = (part[losses > 0][::-1] for part in (losses, self.masses))
        scaled = np.exp(-losses) * masses
        # Sums over all losses above each loss, with an entry for the total: for an
        # epsilon between that loss and the next, delta is `upper` - e^epsilon `lower`.
        upper = np.cumsum(np.concatenate([[self.infinite], masses]))
        lower = np.cumsum(np.concatenate([[0.0], scaled]))
        # Losses so large that e^-loss rounds to 0.
        blind = (upper[1:] >= delta) & (lower[1:] == 0)
        with np.errstate(all="ignore"):
            reached = np.log((upper[:-1] - delta) / lower[:-1]) >= losses
        reached &= (upper[:-1] > delta) & (lower[:-1] > 0)
        stops = np.flatnonzero(reached | blind)
        place = int(stops[0]) if len(stops) else len(losses)
        if place < len(losses) and not reached[place]:
            return max(0.0, float(losses[place]))
        if not upper[place] > lower[place] + delta:
            return 0.0
        return math.log((upper[place] - delta) / lower[place])

    def power(self, rates: np.ndarray) -> np.ndarray:
        """The largest power of tests at the given false positive rates, `[n]`.

        By Neyman and Pearson, the best test takes the largest losses first. The power
        is also the least of e^epsilon rate + `delta(epsilon)`, over all epsilons.
        """
        if not self._known():
            return np.ones_like(rates)
        losses, masses = self._losses()[::-1], np.maximum(self.masses[::-1], 0.0)
        powers = np.cumsum(np.concatenate([[self.infinite], masses]))
        with np.errstate(over="ignore", invalid="ignore"):
            wrong = np.nan_to_num(masses * np.exp(-losses), posinf=np.inf)
        wrong = np.cumsum(np.concatenate([[0.0], wrong]))
        # Between two losses, a randomized test takes a share of the mass.
        apart = np.concatenate([[True], wrong[1:] > wrong[:-1]])
        return np.minimum(1.0, np.interp(rates, wrong[apart], powers[apart]))

    def _known(self) -> bool:
        return math.isfinite(self.infinite) and bool(np.all(np.isfinite(self.masses)))

    def _losses(self) -> np.ndarray:
        return (self.lowest + np.arange(len(self.masses))) * self.width


@dataclasses.dataclass(frozen=True)
class BothOrders:
    """The privacy losses of two neighbours, in both directions.

    Attributes:
      orders: the losses of both directions, or a single entry if they are equal.
    """

    orders: tuple[Losses, ...]

    def composed(self, count: int) -> BothOrders:
        """The sum of `count` independent losses, in each direction."""
        return compose_orders([(self, count)])

    def delta(self, epsilon: float) -> float:
        """The larger delta."""
        return max(losses.delta(epsilon) for losses in self.orders)

    def power(self, rates: np.ndarray) -> np.ndarray:
        """The larger power."""
        powers = [losses.power(rates) for losses in self.orders]
        return np.max(powers, axis=0)

    def epsilon(self, delta: float) -> float:
        """The larger epsilon."""
        return max(losses.epsilon(delta) for losses in self.orders)


def compose(parts: Sequence[tuple[Losses, int]]) -> Losses:
    """The sum of independent losses on one grid; never below the exact loss.

    Args:
      parts: losses, each with the number, 1 or more, of independent copies.
    """
    if any(count < 1 for _, count in parts):
        raise ValueError(f"count must be at least 1, got {[n for _, n in parts]}.")
    first = parts[0][0]
    if not all(losses._known() for losses, _ in parts):
        return dataclasses.replace(first, infinite=math.inf)
    lower, upper = _range_of([(losses.masses, count) for losses, count in parts])
    length = upper - lower + 1
    longest = max(len(losses.masses) for losses, _ in parts)
    size = fft.next_fast_len(max(length, longest), real=True)
    spectra = (_power(fft.rfft(part.masses, size), count) for part, count in parts)
    composed = fft.irfft(functools.reduce(np.multiply, spectra), size)
    # Mass outside of the range wraps around into the range, which only adds loss.
    composed = np.roll(composed, -lower)[:length]
    infinite = sum(count * _log_finite(part.infinite) for part, count in parts)
    lowest = sum(count * part.lowest for part, count in parts)
    return Losses(first.width, lowest + lower, composed, _TAIL - math.expm1(infinite))


def compose_orders(parts: Sequence[tuple[BothOrders, int]]) -> BothOrders:
    """The sum of independent losses, in each direction; see `compose`."""
    orders = max(len(part.orders) for part, _ in parts)
    return BothOrders(
        tuple(
            compose([(part.orders[i % len(part.orders)], n) for part, n in parts])
            for i in range(orders)
        )
    )


def _log_finite(infinite: float) -> float:
    return math.log1p(-infinite) if infinite < 1 else -math.inf


def _power(values: np.ndarray, count: int) -> np.ndarray:
    """`values` to the power of `count`, by squaring."""
    if count == 1:
        return values
    half = _power(values, count // 2)
    half = half * half
    return half * values if count % 2 else half


def _range_of(parts: Sequence[tuple[np.ndarray, int]]) -> tuple[int, int]:
    """Bounds outside of which a sum of losses has mass at most `_TAIL`.

    By Chernoff's bound, with X the index of one loss and n copies of every loss:
    P[S >= k] <= prod E[e^(tX)]^n e^(-tk). Several indices in a row count as the last of
    them, or as the first.

    Args:
      parts: masses, with the number of copies.
    """
    size = max(len(masses) for masses, _ in parts)
    lower, upper = 0, sum((len(masses) - 1) * count for masses, count in parts)
    row = max(1, size // _ROWS)
    logs = np.zeros([2, _ORDERS])
    orders = np.arange(1, _ORDERS + 1)
    for masses, count in parts:
        masses = np.add.reduceat(masses, np.arange(0, len(masses), row))
        starts = np.arange(len(masses)) * row
        up, down = np.exp((starts + row - 1) / size), np.exp(-starts / size)
        for side, factor in enumerate((up, down)):
            raised, moments = masses, []
            for _ in orders:
                raised = raised * factor
                moments.append(np.sum(raised))
            with np.errstate(divide="ignore"):
                logs[side] += count * np.log(moments)
    ends = (logs + math.log(2 / _TAIL)) * (size / orders)
    finite = ends[:, np.all(np.isfinite(ends), axis=0)]
    if finite.size:
        upper = min(upper, math.ceil(np.min(finite[0])))
        lower = max(lower, math.floor(-np.min(finite[1])))
    return lower, max(lower, upper)
