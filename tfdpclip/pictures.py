"""One look for all figures: readable in black and white and by all colour vision.

Figures have no global state, and matplotlib is imported when the first one is made.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from tfdpclip import files

#: Okabe and Ito's colours, which people with any colour vision can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: What lines differ by in black and white, too.
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vXP"
GREY = "#666666"
SEQUENTIAL = "viridis"
PRIVATE_NOTE = "measured without noise: not to be released if the data are private"


def empty(width: float, height: float) -> Any:
    """A figure without axes; sizes are inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(ax: Any, grid: str | None = "both") -> None:
    """Gives axes the common look.

    Args:
      ax: the axes.
      grid: which grid lines to draw, "both", "x" or "y"; None for none.
    """
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(which="both", labelsize=9)
    if grid is not None:
        ax.grid(True, axis=grid, color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)


def new(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    grid: str | None = "both",
    **options: Any,
) -> tuple[Any, Any]:
    """A figure and its axes, `[rows, columns]`.

    Args:
      width: of the figure, in inches.
      height: of the figure, in inches.
      rows: of axes.
      columns: of axes.
      grid: for `dress`.
      **options: for `matplotlib.figure.Figure.subplots`.
    """
    figure = empty(width, height)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        dress(ax, grid)
    return figure, axes


def style(index: int, marked: bool = True) -> dict[str, Any]:
    """Colour, dashes and perhaps marker number `index`, for `plot`.

    >>> style(1, marked=False)
    {'color': '#D55E00', 'linestyle': '--'}
    """
    look: dict[str, Any] = {
        "color": COLORS[index % len(COLORS)],
        "linestyle": STYLES[index % len(STYLES)],
    }
    if marked:
        look |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 4.5}
    return look


def note(figure: Any, text: str = PRIVATE_NOTE) -> None:
    """A line of small text under the picture."""
    figure.supxlabel(text, fontsize=7.5, color=GREY)


def save(figure: Any, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes a figure, in a directory that is made if need be; returns the path."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.save_figure(figure, path, dpi=130)
    return path


def finish(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Saves the figure if there is a path, and returns it."""
    if path is not None:
        save(figure, path)
    return figure
