"""The picture of what batch sizes cost in noise."""

from __future__ import annotations

import numpy as np

from tfdpclip import pictures


def draw(advice, path):
    """Cumulative noise against batch size and against steps."""
    figure, axes = pictures.new(9.0, 4.0, 1, 2, sharey=True)
    for ax, key in zip(axes[0], ("batch_size", "steps"), strict=True):
        x = [getattr(c, key) for c in advice.candidates]
        y = [c.cumulative_noise for c in advice.candidates]
        ax.plot(x, y, color=pictures.GREY, linewidth=1, zorder=1)
        chosen = [c.batch_size == advice.batch_size for c in advice.candidates]
        good = [c.batch_size in advice.good for c in advice.candidates]
        few = [c.steps < advice.minimum_steps for c in advice.candidates]
        rest = [not (a or b or c) for a, b, c in zip(chosen, good, few, strict=True)]
        good = [a and not b for a, b in zip(good, chosen, strict=True)]
        few = [a and not b for a, b in zip(few, chosen, strict=True)]
        for mask, label, color, marker, size in (
            (rest, "more noise", pictures.COLORS[5], "o", 36),
            (few, "too few steps", pictures.COLORS[1], "X", 44),
            (good, "nearly the least noise", pictures.COLORS[0], "D", 36),
            (chosen, "recommended", pictures.COLORS[2], "*", 190),
        ):
            if any(mask):
                ax.scatter(
                    np.asarray(x)[mask],
                    np.asarray(y)[mask],
                    s=size,
                    color=color,
                    marker=marker,
                    label=label,
                    zorder=3,
                )
        ax.set_xscale("log", base=2 if key == "batch_size" else 10)
        ax.set_yscale("log")
        pictures.round_ticks(ax.yaxis, min(y), max(y))
    left, right = axes[0]
    left.set_xlabel("expected batch size (records)")
    left.set_ylabel("cumulative noise  z √T  (clip norms)")
    pictures.plain_ticks(
        left.xaxis, *(f([c.batch_size for c in advice.candidates]) for f in (min, max))
    )
    right.set_xlabel("steps T")
    pictures.round_ticks(
        right.xaxis, *(f([c.steps for c in advice.candidates]) for f in (min, max))
    )
    right.axvline(advice.minimum_steps, color=pictures.GREY, linestyle="--")
    right.annotate(
        f" {advice.minimum_steps} steps",
        (advice.minimum_steps, 0.98),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=8,
        color=pictures.GREY,
    )
    left.legend(fontsize=8, frameon=False)
    pictures.title(
        figure,
        f"Noise by batch size: {advice.population} records, {advice.epochs:g} epochs, "
        f"ε = {advice.epsilon:g}, δ = {advice.delta:g}",
        fontsize=11,
    )
    return pictures.finish(figure, path)
