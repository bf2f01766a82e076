"""What all pictures share. The only place that imports matplotlib."""

from __future__ import annotations

import pathlib
from typing import Any

from tfdpclip import files

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
# Lines that differ in black and white, too.
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vXP"
GREY = "#666666"
SEQUENTIAL = "viridis"
PRIVATE_NOTE = "measured without noise: not to be released if the data are private"


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """A figure and its axes, `[rows, columns]`, without any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=9)
    return figure, axes


def style(index: int) -> dict[str, Any]:
    """Colour, line and marker number `index`."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": STYLES[index % len(STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4.5,
    }


def note(figure, text: str = PRIVATE_NOTE) -> None:
    """A line of small text under the picture."""
    figure.supxlabel(text, fontsize=7.5, color=GREY)


def finish(figure, path: Any):
    """Saves the figure if there is a path, and returns it."""
    if path is not None:
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save_figure(figure, path, dpi=130)
    return figure
