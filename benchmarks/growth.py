"""Exponents of growth of private and of plain steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# The number of points of the fit: smaller sizes show the constant cost of a step.
FIT_POINTS = 3
# Exponents of three points, of medians that scatter by some percent each, differ by
# this much without a reason.
TOLERANCE = 0.15


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the last points on a log-log scale; NaN with fewer than two.

    >>> exponent([1, 2, 4, 8], [7.0, 4.0, 16.0, 64.0])
    2.0
    """
    pairs = [
        (size, value)
        for size, value in zip(sizes, values, strict=True)
        if math.isfinite(value) and value > 0
    ][-FIT_POINTS:]
    if len(pairs) < 2:
        return math.nan
    return float(round(np.polyfit(*np.log(np.array(pairs).T), 1)[0], 6))


def exponents(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """For each axis, model, variant and quantity the exponents and their difference."""

    def group(row):
        return row["axis"], row["model"]

    found = []
    for (axis, model), part in itertools.groupby(sorted(rows, key=group), group):
        part = list(part)
        for quantity in ("median_ms", "step_mib"):
            slopes, largest = {}, {}
            for variant in dict.fromkeys(row["variant"] for row in part):
                points = sorted(
                    (int(row["value"]), float(row[quantity]))
                    for row in part
                    if row["variant"] == variant and row[quantity]
                )
                slopes[variant] = (
                    exponent(*zip(*points, strict=True)) if points else math.nan
                )
                largest[variant] = points[-1] if points else (0, math.nan)
            plain = slopes.pop("plain", math.nan)
            end, plain_value = largest.get("plain", (0, math.nan))
            for variant, slope in slopes.items():
                difference = slope - plain
                verdict = "?" if math.isnan(difference) else "no"
                if difference > TOLERANCE:
                    verdict = "FASTER"
                found.append(
                    {
                        "axis": axis,
                        "model": model,
                        "variant": variant,
                        "quantity": quantity,
                        "plain_exponent": plain,
                        "exponent": slope,
                        "difference": difference,
                        "grows_faster": verdict,
                        "last_ratio": (
                            largest[variant][1] / plain_value
                            if largest[variant][0] == end and plain_value > 0
                            else math.nan
                        ),
                    }
                )
    return found
