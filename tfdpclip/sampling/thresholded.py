"""Events of releases that train nothing: thresholded counts, and Laplace noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting

from tfdpclip import _arguments
from tfdpclip.sampling import events
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import FullBatch


@dataclasses.dataclass(frozen=True)
class ThresholdedCounts(FullBatch):
    """Every record is counted; values with a small noised count are left out.

    The release of `tfdpclip.keras.PrivateStatistics.vocabulary`, for ledgers.

    *Formal guarantees*

    * Neighbours: add or remove one record. Let D' be D with an additional record, which
      has at most k different values. The counts of all values move by at most sqrt(k)
      in the Euclidean norm, and z sqrt(k) is the stddev of the noise of each count: the
      noised counts of the values of D are one Gaussian of noise multiplier z.
    * At most k values are in D' but not in D, each with a count of 1, and p is the
      probability that the noise lifts a count of 1 over the threshold.
      t = 1 - (1 - p)^k bounds the probability that any of them is released.
    * Let delta = -log(1 - t) = -k log(1 - p). Then the release costs at most as much as
      the Gaussian and a (0, delta) mechanism together: in every composition,
      delta(epsilon) of the rest, plus delta.

    *Why.* Noise of different counts is independent. So the release M(D') is the mixture
    (1 - t') G' + t' B, t' <= t, where G' is the release of the values of D alone. Its
    noised counts and the noised counts of M(D) are the two sides of a Gaussian
    mechanism. Let g(epsilon) be the profile of that Gaussian composed with everything
    else, and compose the mixture in the same way (the noise is drawn once).
    The profile of M(D') over M(D) is at most (1 - t) g(epsilon) + t <= g(epsilon) +
    delta. For M(D) over M(D'), P[G' in S] <= P[M(D') in S] / (1 - t) for every S, so
    the profile is at most g(epsilon + log(1 - t)) = g(epsilon - delta). To the left,
    a profile rises by at most 1 - g(epsilon) for each unit, as
    -g'(u) = P[loss > u] - g(u): g(epsilon - delta) <= g(epsilon) + delta. For several
    releases, the deltas add. (Wilkins et al. 2024, "Exact privacy analysis of the
    Gaussian sparse histogram mechanism", has the smallest delta of one release alone.)

    Attributes:
      delta: -k log(1 - p) of each release, in (0, 1).

    >>> ThresholdedCounts(1e-7).event(2.0, 1).event.events[1]
    AdditiveDeltaDpEvent(delta=1e-07)
    """

    delta: float

    def __post_init__(self):
        object.__setattr__(self, "delta", _arguments.delta(self.delta))

    def describe(self) -> str:
        return f"full batch, counts below a threshold left out (delta {self.delta:.2g})"

    def at_worst(self) -> FullBatch:
        return FullBatch()

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        threshold = events.AdditiveDeltaDpEvent(self.delta)
        return dp_accounting.ComposedDpEvent([gaussian, threshold])

    def participation(self, steps: int) -> Any:
        # No proof covers noise that is shared with further steps.
        return SamplingScheme.participation(self, steps)


@dataclasses.dataclass(frozen=True)
class LaplaceRelease(FullBatch):
    """Every record, in numbers with Laplace noise: an earlier release, for a ledger.

    The noise multiplier is b / s: b the scale of the noise, s how far one record moves
    the released numbers, in the sum of the absolute differences.

    *Formal guarantees*: neighbours are data sets with and without one record. One
    release is s / b-differentially private; a ledger composes its privacy loss with
    the losses of all other steps.

    >>> from tfdpclip import accounting
    >>> ledger = accounting.Ledger(delta=1e-6)
    >>> ledger.begin(
    ...     noise_multiplier=2.0, sampling=LaplaceRelease(), release="mean of the ages"
    ... )
    >>> ledger.record(1)
    >>> round(ledger.epsilon(), 2)
    0.5
    """

    def describe(self) -> str:
        return "full batch, with Laplace noise"

    def at_worst(self) -> FullBatch:
        return FullBatch()

    def _sampled(self, gaussian: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.LaplaceDpEvent(gaussian.noise_multiplier)

    def participation(self, steps: int) -> Any:
        # No proof covers noise that is shared with further steps.
        return SamplingScheme.participation(self, steps)
