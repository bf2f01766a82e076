"""A heat map of a search: the score by clip norm and batch size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfdpclip import pictures
from tfdpclip.tuning import GridResult


def draw_heat_map(result: GridResult, label: str, title: str) -> Any:
    """Draws the score over clip norm and batch size, at the best learning rate.

    As Figure 1 of Rehn et al. (2025). All further settings must have one value.

    Args:
      result: the result of a grid with one run or more.
      label: the name of the score in the picture, with its unit.
      title: a title.
    """
    rows = result.best_at(("clip_norm", "batch_size"))
    clips = _ordered({row["clip_norm"] for row in rows})
    sizes = _ordered({row["batch_size"] for row in rows})
    values = np.full([len(sizes), len(clips)], np.nan)
    for row in rows:
        place = sizes.index(row["batch_size"]), clips.index(row["clip_norm"])
        values[place] = row["mean"]
    figure, axes = pictures.new(
        2.6 + 0.8 * len(clips), 1.9 + 0.5 * len(sizes), grid=None
    )
    ax = axes[0, 0]
    image = ax.imshow(values, origin="lower", aspect="auto", cmap=pictures.SEQUENTIAL)
    finite = values[np.isfinite(values)]
    middle = (finite.min() + finite.max()) / 2 if finite.size else 0.0
    best = finite.max() if result.maximize else finite.min()
    digits = _digits(finite)
    for (i, j), value in np.ndenumerate(values):
        text = "–" if math.isnan(value) else f"{value:.{digits}f}"
        ax.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=8.5,
            fontweight="bold" if value == best else "normal",
            color="black" if value > middle or math.isnan(value) else "white",
        )
    ax.set_xticks(range(len(clips)), [_shown(c) for c in clips])
    ax.set_yticks(range(len(sizes)), [_shown(s) for s in sizes])
    ax.set_xlabel("clip norm")
    ax.set_ylabel("expected batch size (records)")
    figure.colorbar(image, ax=ax, label=_sentence(f"{label}, mean of repeats"))
    pictures.title(figure, title)
    if result.only_best:
        pictures.note(figure, "not to be released: the search's privacy needs that")
    return figure


def _ordered(values) -> list:
    """Numbers by size, then names ("full" is larger than any size)."""
    return sorted(values, key=lambda v: (isinstance(v, str), v))


def _shown(value) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _digits(values) -> int:
    """The number of digits that tells scores apart, three at most for scores near 1."""
    if not len(values):
        return 3
    size = float(np.max(np.abs(values)))
    return 3 if size <= 2 else max(0, 3 - math.ceil(math.log10(size)))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
