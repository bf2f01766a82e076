"""What figures of programs share, beside the look of `tfdpclip.pictures`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdpclip import pictures

#: What figures are written as.
FORMATS = ("png", "pdf", "svg")


def accuracy_axis(ax: Any, values: Any, *, most: float = 1.0) -> None:
    """Limits for accuracies: around the values, rather than from 0.

    Args:
      ax: the axes, whose vertical axis it is.
      values: what is to be seen. Leave out what may lie below, as before training.
      most: what all right is, 1 or 100.
    """
    found = np.asarray(values, np.float64)
    found = found[np.isfinite(found)]
    if not found.size:
        return
    low, high = float(found.min()), float(found.max())
    margin = max(0.08 * (high - low), 0.005 * most)
    ax.set_ylim(max(-0.02 * most, low - margin), min(1.01 * most, high + margin))


def guessing(ax: Any, share: float, *, most: float = 1.0) -> None:
    """A line at the accuracy of guessing, where the axes show it.

    Below them, the legend would name a line that nobody sees.

    Args:
      ax: the axes, with their limits.
      share: how many guesses are right, from 0 to 1.
      most: what all right is, 1 or 100.
    """
    if share * most >= ax.get_ylim()[0]:
        label = f"guessing: {share:.0%}"
        ax.axhline(share * most, color=pictures.GREY, linewidth=0.8, label=label)


def save_as(
    figure: Any, path: str | os.PathLike[str], formats: Sequence[str]
) -> list[pathlib.Path]:
    """Writes a figure in each of the formats; returns the paths.

    Args:
      figure: the figure.
      path: the file without its ending.
      formats: which of `FORMATS`.
    """
    path = pathlib.Path(path)
    # Not with_suffix: names may have points in them, as eps_0.25.
    return [
        pictures.save(figure, path.with_name(f"{path.name}.{kind}")) for kind in formats
    ]
