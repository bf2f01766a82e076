"""How figures look."""

from __future__ import annotations

import pathlib
from typing import Any

from matplotlib import figure
from matplotlib.backends import backend_agg

from tfdpclip import files

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")
GREY = "#666666"


def canvas(rows: int, columns: int, width: float, height: float) -> Any:
    """A figure and its axes, `[rows, columns]`.

    Args:
      rows: of axes.
      columns: of axes.
      width: of one, in inches.
      height: of one, in inches.
    """
    picture = figure.Figure(
        figsize=(width * columns, height * rows), layout="constrained"
    )
    backend_agg.FigureCanvasAgg(picture)
    axes = picture.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(True, color="#dddddd", linewidth=0.6)
        one.set_axisbelow(True)
    return picture, axes


def save(picture: figure.Figure, path: pathlib.Path) -> pathlib.Path:
    """Writes a figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.save_figure(picture, path, dpi=130)
    return path
