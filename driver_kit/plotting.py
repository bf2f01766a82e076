"""What figures of programs share, beside the look of `tfdpclip.pictures`."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Sequence
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


def heavy_tailed(panels: Sequence[np.ndarray]) -> bool:
    """Whether on linear axes for all points, most points would be a single blot.

    >>> heavy_tailed([np.array([[1.0, 2.0], [3.0, -2.0]])])
    False
    >>> heavy_tailed([np.array([[1e-4, 0.0], [0.0, 1e-4], [3.0, -2.0]])])
    True
    """
    return any(
        np.median(np.linalg.norm(points, axis=1)) < 0.05 * np.abs(points).max()
        for points in panels
    )


def plane(
    ax: Any, points: np.ndarray, logarithmic: bool
) -> Callable[[np.ndarray], np.ndarray]:
    """Sets axes around zero that show all of `points`.

    Args:
      ax: the axes.
      points: `[n, 2]`.
      logarithmic: whether distances from zero, some marked by circles, are on
        a logarithmic scale. Directions stay, so symmetry about zero stays visible.

    Returns:
      A function from points, `[..., 2]`, to their places in the axes.
    """
    lengths = np.linalg.norm(points, axis=1)
    far = float(lengths.max()) or 1.0
    ax.set_box_aspect(1)
    if not logarithmic:
        reach = 1.08 * float(np.abs(points).max()) or 1.0
        ax.set(xlim=(-reach, reach), ylim=(-reach, reach))
        ax.locator_params(nbins=5)
        return lambda given: np.asarray(given)
    near = max(float(np.quantile(lengths[lengths > 0], 0.1)), 1e-4 * far)
    near = 10.0 ** math.floor(math.log10(near))

    def radius(length):
        return np.log10(1 + length / near)

    decades = round(math.log10(10.0 ** math.ceil(math.log10(far)) / near))
    step = math.ceil(decades / 3)
    for k in range(decades, -1, -step):
        size = near * 10.0**k
        angles = np.linspace(0, 2 * np.pi, 181)
        rim = radius(size) * np.array([np.cos(angles), np.sin(angles)])
        ax.plot(*rim, color="#bbbbbb", lw=0.7, zorder=0)
        ax.annotate(
            f"{size:g}",
            (0, radius(size)),
            fontsize=7.5,
            color=pictures.GREY,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
        )
    reach = 1.08 * radius(near * 10.0**decades)
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)

    def place(given):
        given = np.asarray(given)
        length = np.linalg.norm(given, axis=-1, keepdims=True)
        return given * radius(length) / np.maximum(length, 1e-300)

    return place
