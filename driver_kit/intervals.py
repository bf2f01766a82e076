"""Means of fresh runs with intervals, and whether two of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats


def of_mean(scores: Sequence[float], metric: str) -> dict[str, Any]:
    """The mean of runs, and a 95 % interval (t), as part of a row.

    Args:
      scores: of two runs or more.
      metric: what the mean is called.

    >>> found = of_mean([0.5, 0.7], "accuracy")
    >>> found["runs"], found["worst"], round(found["high"] - found["accuracy"], 3)
    (2, 0.5, 1.271)
    """
    array = np.array(scores)
    deviation = array.std(ddof=1) / math.sqrt(len(array))
    half = stats.t.ppf(0.975, len(array) - 1) * deviation
    return {
        metric: float(array.mean()),
        "low": float(array.mean() - half),
        "high": float(array.mean() + half),
        "worst": float(array.min()),
        "runs": len(array),
        "standard_error": float(deviation),
    }


def difference(
    one: Mapping[str, Any], other: Mapping[str, Any], metric: str
) -> dict[str, Any]:
    """One mean less another, as a row that has its error, for `verdict`.

    Args:
      one: a row with `metric`, "standard_error" and "runs".
      other: another one, of other runs.
      metric: what the mean is called.
    """
    return {
        metric: one[metric] - other[metric],
        "standard_error": math.hypot(one["standard_error"], other["standard_error"]),
        "runs": min(one["runs"], other["runs"]),
    }


def verdict(
    one: Mapping[str, Any], other: Mapping[str, Any], metric: str
) -> tuple[float, float, str]:
    """How much better `one` is: difference, half a 95 % interval (Welch), in words.

    Args:
      one: a row with `metric`, "standard_error" and "runs".
      other: another one, of other runs.
      metric: what the mean is called; more of it is better.
    """
    gap = one[metric] - other[metric]
    parts = [r["standard_error"] ** 2 for r in (one, other)]
    freedom = sum(parts) ** 2 / max(
        sum(p**2 / (r["runs"] - 1) for p, r in zip(parts, (one, other), strict=True)),
        1e-300,
    )
    half = float(stats.t.ppf(0.975, max(freedom, 1.0)) * math.sqrt(sum(parts)))
    if gap > half:
        return gap, half, "better"
    if gap < -half:
        return gap, half, "worse"
    return gap, half, "not told apart"
