"""The common look of figures: readable in black and white and by all colour vision.

Figures have no global state, and matplotlib is imported with the first figure.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

from tfdpclip import files

#: Okabe and Ito's colours, which people with any colour vision can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Line styles, which tell lines apart in black and white, too.
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


def title(figure: Any, text: str, fontsize: float = 11) -> None:
    """A title over the whole picture, with line breaks that fit its width."""
    # A character is some 0.6 times as wide as the font is high; 72 points an inch.
    most = int(72 * figure.get_figwidth() / (0.6 * fontsize))
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, most)]
    figure.suptitle("\n".join(lines), fontsize=fontsize)


def note(figure: Any, text: str = PRIVATE_NOTE) -> None:
    """A line of small text under the picture."""
    figure.supxlabel(text, fontsize=7.5, color=GREY)


def round_ticks(axis: Any, low: float, high: float) -> None:
    """Plain round numbers on a logarithmic axis that spans few powers of ten."""
    from matplotlib import ticker

    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 7) if high < 20 * low else (1, 2, 5)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**k for k in powers for step in steps]
    if high < 2 * low:  # So short an axis is nearly linear.
        values = list(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high))
    axis.set_major_locator(
        ticker.FixedLocator([v for v in values if 0.8 * low <= v <= 1.25 * high])
    )
    axis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def save(figure: Any, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes a figure in the format of the path's ending; returns the path."""
    path, content = pathlib.Path(path), io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(content, format=path.suffix[1:] or None, dpi=130)
    files.write_atomically(path, content.getvalue())
    return path


def finish(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Saves the figure if there is a path, and returns it."""
    if path is not None:
        save(figure, path)
    return figure


def draw_history(history: dict[str, Sequence[float]]) -> Any:
    """A figure of the logs of a private run, a panel for each kind of number.

    Args:
      history: lists by name, as in Keras's `History.history`.
    """
    panels: dict[str, list[str]] = {}
    for name in history:
        kind = name.removeprefix("val_").split("/")[0]
        if kind not in ("noise_stddev", "lr", "learning_rate"):
            panels.setdefault(kind, []).append(name)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new(3 * columns, 2.4 * rows, rows, columns)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, (kind, names) in zip(axes.flat, panels.items(), strict=False):
        for index, name in enumerate(names):
            numbers = history[name]
            epochs = range(1, len(numbers) + 1)
            marked = len(numbers) < 12
            ax.plot(epochs, numbers, label=name, **style(index, marked))
        ax.set(title=kind, xlabel="epoch")
        if kind == "epsilon":
            ax.set_ylim(bottom=0)
        if len(names) > 1:
            ax.legend(fontsize=8)
    return figure
