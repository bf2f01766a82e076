"""Pictures of norms and of retained weights: Figures 3 and 4 of Rehn et al. (2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_examples.class_weights import RetainedWeight
from tfdpclip import pictures


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


def draw_norms(
    norms: Mapping[str, np.ndarray],
    clip_norm: float,
    xlabel: str,
    title: str,
    public: bool,
) -> Any:
    """Draws one violin for each set of norms, with medians, on a logarithmic axis.

    Args:
      norms: for each label on the horizontal axis, `[n]` norms. Zeros and norms that
        are not finite are left out and counted.
      clip_norm: the clip norm.
      xlabel: the meaning of the labels.
      title: a title.
      public: whether the data are public; otherwise the picture says that it must not
        be released.
    """
    drawable = {k: v[np.isfinite(v) & (v > 0)] for k, v in norms.items()}
    left_out = sum(len(v) - len(drawable[k]) for k, v in norms.items())
    names = list(norms)
    figure, axes = pictures.new(max(5.0, 1.6 + 0.62 * len(names)), 4.2, grid="y")
    ax = axes[0, 0]
    for k, values in enumerate(drawable.values()):
        if not values.size:
            continue
        logs = np.log10(values)
        if np.ptp(logs) > 1e-9:
            parts = ax.violinplot([logs], [k], widths=0.8, showextrema=False)
            for body in parts["bodies"]:
                body.set(facecolor=pictures.COLORS[5], alpha=0.75, edgecolor="none")
        ax.vlines(
            k, *np.quantile(logs, [0.25, 0.75]), color=pictures.COLORS[0], linewidth=4
        )
        ax.hlines(np.median(logs), k - 0.22, k + 0.22, color="black", linewidth=2)
    handles = [
        _line("black", 2, "median"),
        _line(pictures.COLORS[0], 4, "middle half"),
    ]
    color, clip = pictures.COLORS[1], np.log10(clip_norm)
    for k in range(len(names)):
        ax.hlines(clip, k - 0.46, k + 0.46, color=color, linestyle="--", linewidth=1.6)
    handles.append(_line(color, 1.6, "clip norm", "--"))
    long = max(map(len, names)) > 8
    ax.set_xticks(
        range(len(names)),
        names,
        rotation=35 if long else 0,
        ha="right" if long else "center",
        rotation_mode="anchor" if long else "default",
    )
    ax.set_xlim(-0.6, len(names) - 0.4)
    _log_ticks(ax)
    ax.set_xlabel(xlabel)
    ax.set_ylabel("gradient norm (loss per unit of weight)")
    pictures.title(figure, title)
    ax.legend(handles=handles, fontsize=8, frameon=False, loc="best")
    notes = [] if public else [pictures.PRIVATE_NOTE]
    if left_out:
        notes.append(f"{left_out} norms that are 0 or not finite are left out")
    if notes:
        pictures.note(figure, "; ".join(notes))
    return figure


def _line(color, width, label, style="-"):
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linewidth=width, linestyle=style, label=label)


def _log_ticks(ax) -> None:
    """The axis shows base-10 logarithms; the ticks, numbers."""
    from matplotlib import ticker

    low, high = ax.get_ylim()
    steps = (1, 2, 5) if high - low < 3 else (1,)
    every = max(1, round((high - low) / 8))
    powers = range(math.floor(low), math.ceil(high) + 1, every)
    at = [k + math.log10(s) for k in powers for s in steps]
    ax.yaxis.set_major_locator(ticker.FixedLocator([t for t in at if low <= t <= high]))
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{10**v:.3g}"))
