"""Distributions of the privacy loss on a grid, and what compositions of them cost.

As `dp_accounting.pld` has them, with the same grid, composition and tails; but an
epsilon is found by sums over arrays, where that goes through a hundred thousand losses
in Python, and whoever trains would wait for it after each epoch.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import fft, signal

# The mass that a composition may lose at its ends; it counts as lost for good.
_TAIL = 1e-15
# The orders of Chernoff's bound, over how many losses there are.
_ORDERS = 20
# Losses are counted together for it, in about so many rows.
_ROWS = 10_000


@dataclasses.dataclass(frozen=True)
class Losses:
    """The masses at consecutive multiples of a cell's width, and at infinity.

    Attributes:
      width: of a cell.
      lowest: the number of the first, which is of loss `lowest * width`.
      masses: `[n]`.
      infinite: the mass at infinity.
    """

    width: float
    lowest: int
    masses: np.ndarray
    infinite: float

    def composed(self, count: int) -> Losses:
        """Of so many independent losses, at least one, added up; never better."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}.")
        if not self._known():
            return dataclasses.replace(self, infinite=math.inf)
        lower, upper = _range_of(self.masses, count)
        length = upper - lower + 1
        size = fft.next_fast_len(max(length, len(self.masses)), real=True)
        found = fft.irfft(_power(fft.rfft(self.masses, size), count), size)
        # What is outside of the range is in it again, as sums wrap around.
        found = np.roll(found, -lower)[:length]
        infinite = _TAIL - math.expm1(count * _log_finite(self.infinite))
        return Losses(self.width, self.lowest * count + lower, found, infinite)

    def joined(self, other: Losses) -> Losses:
        """Of this loss and an independent one, on a grid of the same cells."""
        return Losses(
            self.width,
            self.lowest + other.lowest,
            signal.fftconvolve(self.masses, other.masses),
            self.infinite + other.infinite - self.infinite * other.infinite,
        )

    def delta(self, epsilon: float) -> float:
        """The sum of (1 - e^(epsilon - loss)) over all losses above epsilon.

        1 if a mass is no number.
        """
        if not self._known():
            return 1.0
        losses = self._losses()
        above = losses > epsilon
        shares = -np.expm1(epsilon - losses[above])
        return float(self.infinite + np.sum(shares * self.masses[above]))

    def epsilon(self, delta: float) -> float:
        """The least epsilon, at least 0, whose `delta` is no more than this one.

        Infinite if there is none, or if a mass is no number.
        """
        if self.infinite > delta or not self._known():
            return math.inf
        losses = self._losses()
        # Those that are not positive tell nothing of an epsilon that is at least 0.
        losses, masses = (part[losses > 0][::-1] for part in (losses, self.masses))
        scaled = np.exp(-losses) * masses
        # Of all losses above each, one more for all: delta is the first less e^epsilon
        # times the second, for an epsilon between that loss and the next.
        upper = np.cumsum(np.concatenate([[self.infinite], masses]))
        lower = np.cumsum(np.concatenate([[0.0], scaled]))
        # Losses so large that e to minus them is 0.
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
        """Of tests with such rates of false positives, the most that one finds, `[n]`.

        By Neyman and Pearson, the test takes the largest losses first. It is also the
        least of e^epsilon rate + `delta(epsilon)`, over all epsilons.
        """
        if not self._known():
            return np.ones_like(rates)
        losses, masses = self._losses()[::-1], np.maximum(self.masses[::-1], 0.0)
        found = np.cumsum(np.concatenate([[self.infinite], masses]))
        with np.errstate(over="ignore", invalid="ignore"):
            wrong = np.nan_to_num(masses * np.exp(-losses), posinf=np.inf)
        wrong = np.cumsum(np.concatenate([[0.0], wrong]))
        # From one loss to the next, a test takes a share of its mass.
        apart = np.concatenate([[True], wrong[1:] > wrong[:-1]])
        return np.minimum(1.0, np.interp(rates, wrong[apart], found[apart]))

    def _known(self) -> bool:
        return math.isfinite(self.infinite) and bool(np.all(np.isfinite(self.masses)))

    def _losses(self) -> np.ndarray:
        return (self.lowest + np.arange(len(self.masses))) * self.width


@dataclasses.dataclass(frozen=True)
class BothOrders:
    """The losses of two neighbours, of one against the other and the reverse.

    Attributes:
      orders: both; one alone where it is the same.
    """

    orders: tuple[Losses, ...]

    def composed(self, count: int) -> BothOrders:
        """Of so many independent ones."""
        return BothOrders(tuple(losses.composed(count) for losses in self.orders))

    def joined(self, other: BothOrders) -> BothOrders:
        """Of these and independent ones."""
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
    """Outside of which numbers the sum of `count` ones has a mass of `_TAIL` at most.

    By Chernoff's bound: of X, the number of one, P[S >= k] <= E[e^(tX)]^count e^(-tk).
    Of several numbers in a row, all are taken for the last one, or for the first.
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
