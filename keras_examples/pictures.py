"""One look for all figures: readable in black and white and by all colour vision."""

from __future__ import annotations

from typing import Any

from matplotlib import figure
from matplotlib.backends import backend_agg

#: Okabe and Ito's colours.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vXP"
GREY = "#666666"


def new(rows: int, columns: int, width: float, height: float, **options: Any):
    """A figure and its axes `[rows, columns]`."""
    picture = figure.Figure(figsize=(width, height), layout="constrained")
    backend_agg.FigureCanvasAgg(picture)
    axes = picture.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
    return picture, axes


def line(index: int, marked: bool = False) -> dict[str, Any]:
    """Colour, dashes and perhaps marker number `index`."""
    look = {
        "color": COLORS[index % len(COLORS)],
        "linestyle": STYLES[index % len(STYLES)],
    }
    if marked:
        look |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 5}
    return look
