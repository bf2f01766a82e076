"""A picture of retained weights by class, as Figure 4 of Rehn et al. (2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdpclip import pictures
from tfdpclip.diagnostics import RetainedWeight


def draw_class_weights(
    weights: RetainedWeight,
    order: Sequence[Any],
    differences: Mapping[str, np.ndarray],
    title: str,
    public: bool,
) -> Any:
    """Draws relative retained weights by class; below, differences in accuracy.

    Args:
      weights: the result of `class_weights`.
      order: every class, from left to right, the easiest first.
      differences: for each label, `[S]` differences by class in the order of
        `weights.classes`. The label "clip norm 0.1" gets the look of that clip norm.
      title: a title.
      public: whether the data are public.
    """
    rows = 2 if differences else 1
    figure, axes = pictures.new(
        max(5.5, 1.8 + min(0.35 * len(order), 9)),
        3.1 * rows + 0.5,
        rows,
        grid="y",
        sharex=True,
    )
    classes = weights.classes.tolist()
    places = [classes.index(label) for label in order]
    lines = {f"clip norm {c:g}": k for k, c in enumerate(weights.clip_norms)}
    _draw_lines(
        axes[0, 0],
        {label: (k, weights.relative[k, places]) for label, k in lines.items()},
        base=1.0,
    )
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("relative retained weight")
    pictures.title(figure, title)
    if differences:
        looks = {
            label: lines.get(label, len(lines) + k)
            for k, label in enumerate(differences)
        }
        found = {
            label: (looks[label], np.asarray(values)[places])
            for label, values in differences.items()
        }
        _draw_lines(axes[1, 0], found, base=0.0)
        axes[1, 0].set_ylabel("accuracy less that at clip norm 1")
    step = max(1, math.ceil(len(order) / 25))
    axes[-1, 0].set_xticks(
        np.arange(len(order))[::step], [str(label) for label in order[::step]]
    )
    axes[-1, 0].set_xlabel(
        "class, the easiest on the left (by accuracy at clip norm 1)"
    )
    if not public:
        pictures.note(figure)
    return figure


def _draw_lines(
    ax: Any, lines: Mapping[str, tuple[int, np.ndarray]], base: float
) -> None:
    """Draws a line for each label, with the look of its number, and one at `base`."""
    for label, (index, values) in lines.items():
        look = pictures.style(index, marked=len(values) <= 30)
        ax.plot(np.arange(len(values)), values, label=label, **look)
    ax.axhline(base, color=pictures.GREY, linewidth=0.8)
    ax.legend(fontsize=8, frameon=False)
