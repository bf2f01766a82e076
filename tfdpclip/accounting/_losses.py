"""Distributions of the privacy loss on a grid, and the cost of their compositions.

The grid, the composition and the tails are as in `dp_accounting.pld`. An epsilon is
found by sums over arrays, where `dp_accounting` loops over a hundred thousand losses in
Python, which would make training wait after each epoch.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import fft, signal

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
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}.")
        if not self._known():
            return dataclasses.replace(self, infinite=math.inf)
        lower, upper = _range_of(self.masses, count)
        length = upper - lower + 1
        size = fft.next_fast_len(max(length, len(self.masses)), real=True)
        found = fft.irfft(_power(fft.rfft(self.masses, size), count), size)
        # Mass outside of the range wraps around into the range, which only adds loss.
        found = np.roll(found, -lower)[:length]
        infinite = _TAIL - math.expm1(count * _log_finite(self.infinite))
        return Losses(self.width, self.lowest * count + lower, found, infinite)

    def joined(self, other: Losses) -> Losses:
        """The sum of this loss and an independent loss on the same grid."""
        return Losses(
            self.width,
            self.lowest + other.lowest,
            signal.fftconvolve(self.masses, other.masses),
            self.infinite + other.infinite - self.infinite * other.infinite,
        )

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
        found = np.cumsum(np.concatenate([[self.infinite], masses]))
        with np.errstate(over="ignore", invalid="ignore"):
            wrong = np.nan_to_num(masses * np.exp(-losses), posinf=np.inf)
        wrong = np.cumsum(np.concatenate([[0.0], wrong]))
        # Between two losses, a randomized test takes a share of the mass.
        apart = np.concatenate([[True], wrong[1:] > wrong[:-1]])
        return np.minimum(1.0, np.interp(rates, wrong[apart], found[apart]))

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
        return BothOrders(tuple(losses.composed(count) for losses in self.orders))

    def joined(self, other: BothOrders) -> BothOrders:
        """The sum of these and independent losses, in each direction."""
        count = max(len(self.orders), len(other.orders))
        every = (part * (count // len(part)) for part in (self.orders, other.orders))
        pairs = zip(*every, strict=True)
        return BothOrders(tuple(one.joined(more) for one, more in pairs))

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


def _log_finite(infinite: float) -> float:
    return math.log1p(-infinite) if infinite < 1 else -math.inf


def _power(values: np.ndarray, count: int) -> np.ndarray:
    """`values` to the power of `count`, by squaring."""
    if count == 1:
        return values
    half = _power(values, count // 2)
    half = half * half
    return half * values if count % 2 else half


def _range_of(masses: np.ndarray, count: int) -> tuple[int, int]:
    """Bounds outside of which the sum of `count` losses has mass at most `_TAIL`.

    By Chernoff's bound, with X the index of one loss: P[S >= k] <= E[e^(tX)]^count
    e^(-tk). Several indices in a row count as the last of them, or as the first.
    """
    size = len(masses)
    lower, upper = 0, (size - 1) * count
    row = max(1, size // _ROWS)
    masses = np.add.reduceat(masses, np.arange(0, size, row))
    starts = np.arange(len(masses)) * row
    once_up, once_down = (np.exp(ends / size) for ends in (starts + row - 1, starts))
    up, down = masses, masses
    for order in range(1, _ORDERS + 1):
        up, down = up * once_up, down / once_down
        with np.errstate(divide="ignore"):
            logs = np.log([np.sum(up), np.sum(down)])
        ends = (count * logs + math.log(2 / _TAIL)) * (size / order)
        if np.all(np.isfinite(ends)):
            upper = min(upper, math.ceil(ends[0]))
            lower = max(lower, math.floor(-ends[1]))
    return lower, max(lower, upper)
