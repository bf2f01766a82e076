"""Banded Toeplitz matrices of least error."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from scipy import special

from tfdpclip import _arguments
from tfdpclip.correlated import optimization, toeplitz
from tfdpclip.correlated import participation as participations
from tfdpclip.correlated.matrices import ToeplitzMatrix, count, root_of_workload
from tfdpclip.correlated.workload import Workload, check_workload


@dataclasses.dataclass(frozen=True)
class OptimizedToeplitz(ToeplitzMatrix):
    """The banded Toeplitz matrix with the least error for given steps.

    Found by L-BFGS among non-negative, non-increasing coefficients, for which the
    sensitivity is exact (Choquette-Choo et al. 2023, arXiv 2306.08153; McKenna 2024,
    arXiv 2405.15913). It is found once, and is part of the settings from then on:
    another machine may end at numbers that differ in their last digits, which would be
    another matrix.

    Attributes:
      bands: How many: with `CyclicPoisson` at most its `separation`.
      steps: The steps that it is best for; it may run for others.
      participation: How often a record takes part, or a scheme that keeps it.
      workload: What the noise is to be small in.
      error: `"mean"` over the steps, or that after the `"last"`.
      column: The coefficients; found where they are None.

    >>> from tfdpclip.correlated import SingleEpoch
    >>> OptimizedToeplitz(3, 100, SingleEpoch()).coefficients(4).round(2)
    array([1.  , 0.74, 0.62, 0.  ])
    """

    bands: int
    steps: int
    participation: Any
    workload: Workload = Workload()
    error: str = "mean"
    column: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        keep = functools.partial(object.__setattr__, self)
        keep("steps", count(self.steps))
        keep("bands", _arguments.integer("bands", self.bands, 1))
        if self.bands > self.steps:
            raise ValueError(
                f"bands must be at most steps = {self.steps}, got {self.bands}."
            )
        keep("participation", participations.of(self.participation, self.steps))
        check_workload(self.workload)
        _arguments.choice("error", self.error, optimization.OBJECTIVES)
        amplified = self.participation.amplified_rate is not None
        if amplified and self.bands > self.participation.separation:
            raise ValueError(
                f"bands must be at most separation = {self.participation.separation} "
                f"for {self.participation.describe()}, got {self.bands}."
            )
        if self.column is None:
            optimization.check_steps(self.steps)
            keep(
                "column",
                _best_column(
                    self.bands,
                    self.steps,
                    self.participation,
                    self.workload,
                    self.error,
                ),
            )
            return
        found = toeplitz.column("column", self.column)
        if len(found) != self.bands or not toeplitz.never_rises(found):
            raise ValueError(
                f"column must have bands = {self.bands} non-negative, non-increasing "
                "coefficients; leave it out to have them found."
            )
        keep("column", tuple(map(float, found)))

    @property
    def bandwidth(self) -> int | None:
        return self.bands

    def coefficients(self, steps: int) -> np.ndarray:
        return toeplitz.padded(np.array(self.column), count(steps))

    def describe(self) -> str:
        return self.workload.named(
            f"noise correlated by an optimised Toeplitz matrix of {self.bands} bands "
            f"for {self.steps} steps"
        )


@functools.lru_cache(maxsize=32)
def _best_column(bands, steps, participation, workload, error):
    if bands == 1:
        return (1.0,)
    objective = optimization.Objective(steps, participation, workload, error)

    def column_of(logits):
        # Each coefficient is a share of the one before: none rises, none is below 0.
        return np.cumprod(np.concatenate([[1.0], special.expit(logits)]))

    def value(logits):
        column = toeplitz.padded(column_of(logits), steps)
        inverse = toeplitz.inverse(column[:bands], steps)
        result, gradient = objective(column, inverse)
        weighed = (gradient * column)[1:bands]
        below = np.cumsum(weighed[::-1])[::-1]
        return result, below * special.expit(-logits)

    root = root_of_workload(bands, workload.momentum)
    shares = np.clip(root[1:] / root[:-1], 0.05, 0.999)
    starts = [special.logit(shares), np.zeros(bands - 1)]
    best = optimization.least(value, starts, (-30.0, 30.0))
    return tuple(map(float, column_of(best)))
