"""Figures of searches: scores by clip norm, batch size and epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import lines, ticker

from tfdpclip import pictures

Rows = Sequence[Mapping[str, Any]]
# Points below the best that heat maps tell apart.
_WORST = 10.0
_AXES = {
    "clip_norm": "clip norm",
    "batch_size": "expected batch size (examples)",
}


def of_epochs(rows: Rows) -> dict[float, list[Mapping[str, Any]]]:
    """Rows by epochs, ascending."""
    return {
        epochs: [row for row in rows if row["epochs"] == epochs]
        for epochs in sorted({row["epochs"] for row in rows})
    }


def panels(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by epochs, with a title for each."""
    return {f"{epochs:g} epochs": part for epochs, part in of_epochs(rows).items()}


def curves(parts: Mapping[str, Rows], x: str, title: str) -> Any:
    """Scores less the best, by `x` and epsilon, in a panel for each part.

    As Figure 2 of Rehn et al. (2025), with bands from the least to the greatest repeat.

    Args:
      parts: rows of `grid_results`, by the title of their panel.
      x: "clip_norm" or "batch_size"; a value that is not a number is a dotted line.
      title: of the figure.
    """
    count = max(1, len(parts))
    picture, axes = pictures.new(
        2.2 + 4.0 * count, 4.2, 1, count, sharey=True, sharex=True
    )
    epsilons = sorted({row["epsilon"] for rows in parts.values() for row in rows})
    dotted = False
    for ax, (name, rows) in zip(axes[0], parts.items(), strict=False):
        for k, epsilon in enumerate(epsilons):
            mine = [r for r in rows if r["epsilon"] == epsilon]
            if mine and _curve(ax, mine, x, f"ε = {epsilon:g}", pictures.style(k)):
                dotted = True
        ax.set(xlabel=_AXES[x])
        ax.set_xscale("log", base=2 if x == "batch_size" else 10)
        if len(parts) > 1:
            ax.set_title(name, fontsize=10)
    low = axes[0, 0].get_ylim()[0]
    if low < -25:  # A failed setting would flatten the rest.
        axes[0, 0].set_ylim(-25, 1)
    axes[0, 0].set_ylabel("macro accuracy less the best (points)")
    handles, _ = axes[0, 0].get_legend_handles_labels()
    if dotted:
        grey = {"color": pictures.GREY, "lw": 0.9, "ls": ":"}
        handles.append(lines.Line2D([], [], label="AUTO-S", **grey))
    axes[0, 0].legend(handles=handles, fontsize=8.5)
    pictures.title(picture, title, fontsize=10.5)
    return picture


def _curve(ax, rows, x, label, look):
    best = max(row["mean"] for row in rows)
    points = sorted(
        ((row[x], row) for row in rows if not isinstance(row[x], str)),
        key=lambda point: point[0],
    )
    places = [place for place, _ in points]

    def points_of(key):
        return [100 * (row[key] - best) for _, row in points]

    ax.plot(places, points_of("mean"), label=label, **look)
    band = {"color": look["color"], "alpha": 0.15, "lw": 0}
    ax.fill_between(places, points_of("min"), points_of("max"), **band)
    dotted = False
    for row in rows:
        if isinstance(row[x], str):
            ax.axhline(
                100 * (row["mean"] - best),
                color=look["color"],
                lw=0.9,
                ls=":",
            )
            dotted = True
    return dotted


def heat_maps(
    parts: Mapping[str, Mapping[tuple[float, int], float]], title: str
) -> Any:
    """Scores less the best by clip norm and batch size, as Figure 1 of Rehn et al.

    Args:
      parts: scores by clip norm and batch size, by the title of their panel.
      title: of the figure.
    """
    count = max(1, len(parts))
    picture, axes = pictures.new(1.6 + 3.9 * count, 4.3, 1, count, grid=None)
    for ax, (name, cells) in zip(axes[0], parts.items(), strict=False):
        clips, sizes = (sorted({place[i] for place in cells}) for i in (0, 1))
        best = max(cells.values())
        values = np.full([len(sizes), len(clips)], np.nan)
        for (clip, size), score in cells.items():
            values[sizes.index(size), clips.index(clip)] = 100 * (score - best)
        image = ax.imshow(
            values,
            origin="lower",
            aspect="auto",
            cmap=pictures.SEQUENTIAL,
            vmin=-_WORST,
            vmax=0,
        )
        for (i, j), value in np.ndenumerate(values):
            look = {"ha": "center", "va": "center", "fontsize": 8}
            dark = value < -_WORST / 2
            bold = "bold" if value == 0 else "normal"
            color = "white" if dark else "black"
            text = f"{value:.1f}".replace("-0.0", "0.0")
            ax.text(j, i, text, color=color, fontweight=bold, **look)
        ax.set_xticks(range(len(clips)), [f"{clip:g}" for clip in clips])
        ax.set_yticks(range(len(sizes)), [str(size) for size in sizes])
        ax.set(xlabel=_AXES["clip_norm"])
        ax.set_title(f"{name}\nbest {best:.1%}", fontsize=10)
    axes[0, 0].set_ylabel(_AXES["batch_size"])
    picture.colorbar(image, ax=axes[0, -1], label="less the best (points)")
    pictures.title(picture, title, fontsize=10.5)
    return picture


def by_epochs(rows: Rows, title: str) -> Any:
    """The best score and the best batch size by epochs, as Figure A10."""
    picture, axes = pictures.new(9.2, 4.0, 1, 2)
    left, right = axes[0]
    for k, epsilon in enumerate(sorted({row["epsilon"] for row in rows})):
        parts = of_epochs([row for row in rows if row["epsilon"] == epsilon])
        best = [max(part, key=lambda row: row["mean"]) for part in parts.values()]
        look = pictures.style(k)
        left.plot(list(parts), [100 * row["mean"] for row in best], **look)
        left.fill_between(
            list(parts),
            [100 * row["min"] for row in best],
            [100 * row["max"] for row in best],
            color=look["color"],
            alpha=0.15,
            lw=0,
        )
        right.plot(
            list(parts),
            [row["batch_size"] for row in best],
            label=f"ε = {epsilon:g}",
            **look,
        )
    left.set(xlabel="epochs", ylabel="macro accuracy (%), all else tuned")
    right.set(xlabel="epochs", ylabel="best expected batch size")
    right.set_yscale("log", base=2)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    right.legend(fontsize=8.5)
    pictures.title(picture, title, fontsize=10.5)
    return picture


def best_clip_norms(parts: Mapping[str, Rows], title: str) -> Any:
    """The best clip norm by epsilon, with the norms not told apart from it."""
    picture, axes = pictures.new(6.2, 4.2)
    ax = axes[0, 0]
    for k, (name, rows) in enumerate(parts.items()):
        epsilons = sorted({row["epsilon"] for row in rows})
        found = [
            close_to_best([r for r in rows if r["epsilon"] == e], "clip_norm")
            for e in epsilons
        ]
        # Lines of several parts would hide each other.
        x = [e * 1.04 ** (k - (len(parts) - 1) / 2) for e in epsilons]
        look = pictures.style(k)
        best = [one for one, _ in found]
        ax.plot(x, best, label=name, **look)
        ax.vlines(
            x,
            [min(close) for _, close in found],
            [max(close) for _, close in found],
            color=look["color"],
            alpha=0.35,
            lw=4,
        )
    ax.set(xlabel="ε", ylabel="best clip norm", xscale="log", yscale="log")
    ticks = sorted({row["epsilon"] for rows in parts.values() for row in rows})
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.legend(fontsize=8.5)
    pictures.title(picture, title, fontsize=10.5)
    return picture


def order(first: Sequence[float], second: Sequence[float]) -> str:
    """The evidence of two sets of equally good settings for first > second.

    >>> order([10, 42], [1]), order([1], [0.1, 1])
    ('evidence', 'not told apart, so no evidence')
    """
    if min(first) > max(second):
        return "evidence"
    if max(first) < min(second):
        return "evidence against it, not"
    return "not told apart, so no evidence"


def close_to_best(rows: Rows, name: str) -> tuple[Any, list[Any]]:
    """The best number, and all whose greatest repeat reaches the best's least.

    >>> rows = [{"c": 1, "mean": 0.5, "min": 0.4, "max": 0.6},
    ...         {"c": 10, "mean": 0.4, "min": 0.3, "max": 0.45},
    ...         {"c": 42, "mean": 0.2, "min": 0.1, "max": 0.3}]
    >>> close_to_best(rows, "c")
    (1, [1, 10])
    """
    numbers = [row for row in rows if not isinstance(row[name], str)]
    numbers = [row for row in numbers if not math.isnan(row["mean"])]
    best = max(numbers, key=lambda row: row["mean"])
    close = [row[name] for row in numbers if row["max"] >= best["min"]]
    return best[name], sorted(close)
