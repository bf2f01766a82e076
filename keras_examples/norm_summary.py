"""Distributions of gradient norms, and the effect of a clip norm on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclasses.dataclass(frozen=True)
class NormSummary:
    """A distribution of gradient norms in a few numbers.

    Attributes:
      count: number of finite norms.
      dropped: number of norms that are not finite.
      mean: the mean of the finite norms.
      quantiles: by level: 5, 25, 50, 75 and 95 %.
      clip_norm: the clip norm, if given.
      fraction_clipped: the fraction above the clip norm; NaN without a clip norm.
      target: the norm at the target quantile of an adaptive clip norm, which should be
        near it; NaN without a target.
    """

    count: int
    dropped: int
    mean: float
    quantiles: dict[float, float]
    clip_norm: float
    fraction_clipped: float
    target: float

    def row(self) -> dict[str, float]:
        """The summary as columns of a table."""
        levels = {f"norm_{100 * q:g}%": v for q, v in self.quantiles.items()}
        return {
            "count": self.count,
            "dropped": self.dropped,
            "norm_mean": self.mean,
            **levels,
            "clip_norm": self.clip_norm,
            "fraction_clipped": self.fraction_clipped,
            "norm_at_target": self.target,
        }


def summarize_norms(
    norms: Any, clip_norm: float | None = None, target_quantile: float | None = None
) -> NormSummary:
    """Summarises gradient norms.

    Args:
      norms: `[n]`, 0 or above. Norms that are not finite are counted and left out.
      clip_norm: the clip norm, to see how many norms are clipped.
      target_quantile: the quantile that an adaptive clip norm follows, in [0, 1].

    Returns:
      The summary.

    Raises:
      ValueError: if there are no norms.

    >>> summary = summarize_norms([0.5, 1.0, 2.0, 4.0], clip_norm=1.0)
    >>> summary.fraction_clipped, summary.quantiles[0.5]
    (0.5, 1.5)
    """
    norms = np.asarray(norms, np.float64)
    finite = norms[np.isfinite(norms)]
    if not finite.size:
        raise ValueError("norms has no finite entry to summarise.")
    clipped = target = np.nan
    if clip_norm is not None:
        clipped = float(np.mean(finite > clip_norm))
    if target_quantile is not None:
        target = float(np.quantile(finite, target_quantile))
    return NormSummary(
        count=int(finite.size),
        dropped=int(norms.size - finite.size),
        # The mean may be finite although the sum overflows.
        mean=float(np.sum(finite / finite.size)),
        quantiles={q: float(np.quantile(finite, q)) for q in LEVELS},
        clip_norm=np.nan if clip_norm is None else clip_norm,
        fraction_clipped=clipped,
        target=target,
    )
