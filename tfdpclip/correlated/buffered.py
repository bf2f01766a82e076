"""Buffered linear Toeplitz matrices: all bands, in a few buffers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
from scipy import optimize, signal, special

from tfdpclip import _arguments
from tfdpclip.correlated import optimized, streams
from tfdpclip.correlated import participation as participations
from tfdpclip.correlated.matrices import ToeplitzMatrix, count
from tfdpclip.correlated.workload import Workload, check_workload

_MOST_BUFFERS = 16
# A scale this small does not change the noise.
_LEAST_SCALE = 1e-13


@dataclasses.dataclass(frozen=True)
class BufferedToeplitz(ToeplitzMatrix):
    """c_0 = 1 and c_k = sum_i scale_i decay_i^(k-1): noise from a few buffers.

    Dvijotham et al. 2024 (arXiv 2404.16706) and, for several participations, McMahan
    et al. 2024 (arXiv 2408.08868). Each buffer is a vector as long as the model.

    The generating function of C is prod_i (1 - e_i x) / (1 - d_i x) with decays 1 > d_1
    > e_1 > d_2 > e_2 > ... > 0, found by L-BFGS. This order implies that all scales are
    positive and together at most 1, so that coefficients are non-negative and
    non-increasing and the sensitivity is exact; and that C^-1 has the same form, with
    the decays e_i and negative scales (`inverse`).

    Attributes:
      buffers: The number of buffers, up to 16.
      steps: The number of steps to optimize for; the matrix may run for any number.
      participation: How often a record takes part, or a scheme with a participation.
      workload: The workload in which the noise should be small.
      error: `"mean"` over the steps, or the error after the `"last"` step.
      decay: The decays, decreasing; None to search for them.
      scale: The scales; None to search for them.

    >>> from tfdpclip.correlated import SingleEpoch
    >>> matrix = BufferedToeplitz(2, 100, SingleEpoch())
    >>> matrix.coefficients(4).round(1)
    array([1. , 0.5, 0.4, 0.3])
    """

    buffers: int
    steps: int
    participation: Any
    workload: Workload = Workload()
    error: str = "mean"
    decay: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)
    scale: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        keep = functools.partial(object.__setattr__, self)
        keep("steps", count(self.steps))
        buffers = _arguments.integer("buffers", self.buffers, 1, _MOST_BUFFERS)
        keep("buffers", buffers)
        keep("participation", participations.of(self.participation, self.steps))
        check_workload(self.workload)
        _arguments.choice("error", self.error, optimized.OBJECTIVES)
        if self.decay is None and self.scale is None:
            optimized.check_steps(self.steps)
            found = _best_pair(
                buffers, self.steps, self.participation, self.workload, self.error
            )
            keep("decay", found[0])
            keep("scale", found[1])
        decay = _arguments.floats("decay", () if self.decay is None else self.decay)
        scale = _arguments.floats("scale", () if self.scale is None else self.scale)
        for name, values in (("decay", decay), ("scale", scale)):
            if values.shape != (buffers,):
                raise ValueError(
                    f"{name} must have buffers = {buffers} entries; leave decay and "
                    "scale out to search for them."
                )
        if not (np.all(decay > 0) and np.all(decay < 1) and np.all(np.diff(decay) < 0)):
            raise ValueError("decay must fall from below 1 to above 0, as (0.9, 0.5).")
        if not (np.all(scale > 0) and scale.sum() <= 1):
            raise ValueError(
                "scale must be positive and add up to 1 at most, so that coefficients "
                "do not rise."
            )
        keep("decay", tuple(map(float, decay)))
        keep("scale", tuple(map(float, scale)))

    bandwidth = None

    @property
    def _terms(self) -> int:  # type: ignore[override]
        # A power has an error of some units in the last place; then a sum over buffers.
        return self.buffers + 4

    @property
    def inverse(self) -> tuple[np.ndarray, np.ndarray]:
        """Decays and scales of C^-1: its entry k is sum_i scale_i decay_i^(k-1).

        The decays are the zeros of 1 + sum_i scale_i / (u - decay_i): one zero between
        each two decays of C, and one below the last decay (the theorem is in McMahan
        and Pillutla 2025, arXiv 2504.21413).
        """
        decay, scale = np.array(self.decay), np.array(self.scale)

        def secular(u):
            return np.prod(u - decay) + sum(
                s * np.prod(np.delete(u - decay, i)) for i, s in enumerate(scale)
            )

        # The last interval reaches the last zero: with one buffer, its lower end.
        ends = np.concatenate([decay, [decay[-1] - 1.001 * scale.sum()]])
        zeros = np.array(
            [
                optimize.brentq(secular, low, high, xtol=1e-16, rtol=1e-14)
                for high, low in itertools.pairwise(ends)
            ]
        )
        return zeros, _scales(zeros, decay)

    def coefficients(self, steps: int) -> np.ndarray:
        powers = np.power.outer(np.array(self.decay), np.arange(count(steps) - 1))
        # Sums of decreasing terms decrease, but rounding might raise the last digits.
        tail = np.minimum.accumulate(np.array(self.scale) @ powers)
        return np.concatenate([[1.0], np.minimum(tail, 1.0)])

    def inverse_coefficients(self, steps: int) -> np.ndarray:
        steps = count(steps)
        decay, scale = np.array(self.decay), np.array(self.scale)
        kept, column = np.zeros(self.buffers), np.zeros(steps)
        for step in range(steps):
            column[step] = (step == 0) - scale @ kept
            kept = decay * kept + column[step]
        return column

    def stream(self) -> streams.Stream:
        return streams.Buffered(np.array(self.decay), np.array(self.scale))

    def describe(self) -> str:
        return self.workload.named(
            f"noise correlated by a buffered Toeplitz matrix of {self.buffers} buffers "
            f"for {self.steps} steps"
        )


def _scales(decay: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The scales of prod_i (1 - zeros_i x) / (1 - decay_i x), by partial fractions."""
    return np.array(
        [
            np.prod(d - zeros) / np.prod(np.delete(d - decay, i))
            for i, d in enumerate(decay)
        ]
    )


def _decays_of(logits: np.ndarray) -> np.ndarray:
    """Maps any numbers to d_1, e_1, d_2, e_2, ..., decreasing in (0, 1)."""
    gaps = np.logaddexp(0.0, logits)
    return -np.expm1(-np.cumsum(gaps[::-1])[::-1])


@functools.lru_cache(maxsize=32)
def _best_pair(buffers, steps, participation, workload, error):
    objective = optimized.Objective(steps, participation, workload, error)

    def value(logits):
        points = _decays_of(logits)
        decay, zeros = points[::2], points[1::2]
        column = _series(zeros, decay, steps)
        result, gradient = objective(column, _series(decay, zeros, steps))
        slopes = np.array(
            [
                sign * (gradient @ _series((), (point,), steps, column, shift=True))
                for point, sign in zip(points, [1.0, -1.0] * buffers, strict=True)
            ]
        )
        by_gaps = np.cumsum(slopes * (1 - points))
        return result, by_gaps * special.expit(logits)

    count_of_points = 2 * buffers
    angles = np.arange(1, count_of_points + 1) * np.pi / (4 * buffers + 2)
    starts = [np.cos(angles) ** 2]
    # Time scales from one step to the whole run.
    for most in (steps, steps**0.5):
        scales = np.geomspace(1 / (2 * most + 2), 0.7, count_of_points)
        starts.append(1 - scales)
    logits = []
    for points in starts:
        logs = -np.log1p(-points)
        gaps = np.maximum(logs - np.concatenate([logs[1:], [0.0]]), 1e-4)
        logits.append(np.log(np.expm1(gaps)))
    best = optimized.least(value, logits, (-9.0, 20.0))
    points = _decays_of(best)
    decay, zeros = points[::2], points[1::2]
    scale = _scales(decay, zeros)
    # In short runs some buffers have no use: rounding can leave them a decay of 1, or
    # no scale.
    decay = np.minimum(decay, 1 - _LEAST_SCALE * np.arange(1, buffers + 1))
    scale = np.maximum(scale, _LEAST_SCALE)
    scale /= max(1.0, scale.sum() * (1 + 4 * buffers * np.finfo(float).eps))
    return tuple(map(float, decay)), tuple(map(float, scale))


def _series(zeros, decays, steps, start=None, shift=False):
    """Coefficients of start times prod (1 - zeros x) / prod (1 - decays x)."""
    result = np.zeros(steps)
    if start is None:
        result[0] = 1.0
    else:
        result[:] = start
    if shift:
        result = np.concatenate([[0.0], result[:-1]])
    pairs = max(len(zeros), len(decays))
    for i in range(pairs):
        above = [1.0, -zeros[i]] if i < len(zeros) else [1.0]
        below = [1.0, -decays[i]] if i < len(decays) else [1.0]
        result = signal.lfilter(above, below, result)
    return result
