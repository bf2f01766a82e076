"""The figures of report.md: lines over sizes, a panel for each model."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tfdpclip import pictures

_BLUE, _VERMILION, _GREEN, _PINK, _ORANGE, _SKY, _BLACK = pictures.COLORS
# The marker tells as much as the colour.
_STYLES = {
    "quantile": (_BLUE, "o", "-"),
    "fixed": (_SKY, "v", "-"),
    "layerwise": (_GREEN, "s", "-"),
    "layerwise_quantile": (_GREEN, "D", "--"),
    "automatic": (_PINK, "^", "-"),
    "normalized": (_PINK, "<", "--"),
    "batch": (_ORANGE, "P", "-"),
    "perturbation": (_VERMILION, "X", "-"),
    "quantile_no_noise": (_BLUE, ".", ":"),
    "tfp_vectorized": (_VERMILION, "x", "-"),
    "tfp_dpmodel": (_VERMILION, "+", "--"),
    "tfp_fast": (_VERMILION, "1", ":"),
    "opacus_hooks": (_PINK, "x", "-"),
    "opacus_ghost": (_PINK, "+", "--"),
    "jax_vmap": (_BLACK, "x", "-"),
    "jax_microbatch1": (_BLACK, "+", "--"),
    "plain": (_BLACK, "o", "-"),
}
_OTHER = (pictures.GREY, "o", "-")


def numbers(axis, which: str, values: Sequence[float]) -> None:
    """Plain numbers, not powers, at these places of a logarithmic axis."""
    own = getattr(axis, f"{which}axis")
    own.set_major_locator(FixedLocator(list(values)))
    own.set_minor_locator(NullLocator())
    own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def grid(count: int) -> tuple[Any, list[Any]]:
    """A figure of so many panels."""
    columns = min(count, 4)
    rows = -(-count // columns)
    figure, axes = pictures.new(
        3.4 * columns + 2.0, 2.8 * rows, rows, columns, grid=None
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat[:count]


def lines(axis, points: pd.DataFrame, variant: str, x: str, y: str, label: str):
    """The line of a variant, in its style."""
    colour, marker, line = _STYLES.get(variant, _OTHER)
    points = points.dropna(subset=[y]).sort_values(x)
    if len(points):
        axis.plot(
            points[x],
            points[y],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=5,
            linewidth=1.4,
            label=label,
        )


def legend(figure: Any, axes: Sequence[Any]) -> None:
    """A legend for all panels."""
    handles: dict[str, object] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", frameon=False
    )


def time_figure(table, variants: Sequence[str], path: pathlib.Path) -> None:
    """Ratios by batch size, a panel for each model."""
    models = list(table["model"].unique())
    figure, axes = grid(len(models))
    for axis, model in zip(axes, models, strict=True):
        part = table[(table["model"] == model) & (table["status"] == "ok")]
        for variant in variants:
            points = part[part["variant"] == variant]
            lines(axis, points, variant, "batch_size", "ratio", variant)
        axis.set(xscale="log", yscale="log", title=model)
        shown = part[part["variant"].isin(variants)]["ratio"]
        top = shown.max() if np.isfinite(shown.max()) else 2.0
        # A compiled private step can be much faster than the compiled plain step.
        least = shown.min() if np.isfinite(shown.min()) else 1.0
        ends = min(0.7, 0.7 * least), max(4.0, 1.3 * top)
        axis.set_ylim(*ends)
        numbers(axis, "x", sorted(part["batch_size"].unique()))
        marks = [0.1, 0.3, 1, 2, 4, 10, 30, 100, 300, 1000, 3000]
        numbers(axis, "y", [m for m in marks if ends[0] <= m <= ends[1]])
        axis.axhline(1.0, color=pictures.GREY, linewidth=1, zorder=0)
        pictures.dress(axis, grid="y")
    figure.supxlabel("batch size", fontsize="medium")
    figure.supylabel("time / same framework's plain step", fontsize="medium")
    legend(figure, axes)
    pictures.save(figure, path)
