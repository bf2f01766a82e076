"""The pictures of the diagnostics."""

from __future__ import annotations

import math

import numpy as np

from tfdpclip import pictures


def violins(norms, path, clip_norms, xlabel, title, public):
    """One violin for each set of norms, on a logarithmic axis."""
    if not norms:
        raise ValueError("norms is empty: there is nothing to draw.")
    drawable = {k: v[np.isfinite(v) & (v > 0)] for k, v in norms.items()}
    if not any(v.size for v in drawable.values()):
        raise ValueError("norms has no norm above 0 that is finite.")
    left_out = sum(len(v) - len(drawable[k]) for k, v in norms.items())
    names = [_name(key) for key in norms]
    figure, axes = pictures.new(max(5.0, 1.6 + 0.62 * len(norms)), 4.2, grid="y")
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
    if clip_norms is not None:
        at = np.broadcast_to(np.asarray(clip_norms, np.float64), [len(names)])
        if np.any(~(at > 0)):
            raise ValueError("clip_norms must be above 0.")
        color = pictures.COLORS[1]
        for k, c in enumerate(np.log10(at)):
            ax.hlines(c, k - 0.46, k + 0.46, color=color, linestyle="--", linewidth=1.6)
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
    return pictures.finish(figure, path)


def class_weights(
    weights, path, order, differences, difference_label, xlabel, title, public
):
    """Relative weights by class; below, differences in accuracy."""
    rows = 2 if differences else 1
    count = len(order)
    figure, axes = pictures.new(
        max(5.5, 1.8 + min(0.35 * count, 9)),
        3.1 * rows + 0.5,
        rows,
        grid="y",
        sharex=True,
    )
    places = [weights.classes.tolist().index(label) for label in order]
    x = np.arange(count)
    ax = axes[0, 0]
    for k, c in enumerate(weights.clip_norms):
        look = pictures.style(k, marked=count <= 30)
        ax.plot(x, weights.relative[k, places], label=f"clip norm {c:g}", **look)
    ax.axhline(1.0, color=pictures.GREY, linewidth=0.8)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("relative retained weight")
    pictures.title(figure, title)
    ax.legend(fontsize=8, frameon=False)
    if differences:
        low = axes[1, 0]
        shown = [f"clip norm {c:g}" for c in weights.clip_norms]
        for k, (label, values) in enumerate(differences.items()):
            # The same clip norm looks the same in both panels.
            known = label in shown
            index = shown.index(label) if known else len(shown) + k
            look = pictures.style(index, marked=count <= 30)
            low.plot(x, np.asarray(values)[places], label=label, **look)
        low.axhline(0.0, color=pictures.GREY, linewidth=0.8)
        low.set_ylabel(difference_label)
        low.legend(fontsize=8, frameon=False)
    last = axes[-1, 0]
    step = max(1, math.ceil(count / 25))
    last.set_xticks(x[::step], [_name(label) for label in order[::step]])
    last.set_xlabel(xlabel)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)


def geometry(found, path, title, public):
    """Projected gradients in panels, and the cosines."""
    panels = len(found.projections) + 1
    columns = min(3 if panels <= 6 else 4, panels)
    rows = math.ceil(panels / columns)
    figure, axes = pictures.new(
        3.1 * columns, 3.1 * rows + 0.6, rows, columns, grid=None
    )
    cells = list(axes.flat)
    logarithmic = pictures.heavy_tailed(found.projections)
    for k, (points, mean) in enumerate(
        zip(found.projections, found.means, strict=True)
    ):
        ax = cells[k]
        place = pictures.plane(ax, points, logarithmic)
        look = {"s": 5, "alpha": 0.45, "color": pictures.COLORS[0], "linewidths": 0}
        ax.scatter(*place(points).T, **look)
        ax.axhline(0, color=pictures.GREY, linewidth=0.7, zorder=0)
        ax.axvline(0, color=pictures.GREY, linewidth=0.7, zorder=0)
        color = pictures.COLORS[1]
        ax.plot(
            *place(mean), "o", mfc="none", mec=color, mew=2, markersize=9, label="mean"
        )
        ax.set_title(f"random projection {k + 1}", fontsize=9)
        if k % columns == 0:
            scale = " (circles: log scale)" if logarithmic else ""
            ax.set_ylabel(f"loss per unit of weight{scale}", fontsize=9)
        if k == 0:
            ax.legend(fontsize=8, frameon=False)
    ax = cells[panels - 1]
    ax.hist(found.cosines, bins=np.linspace(-1, 1, 41), color=pictures.COLORS[5])
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_title("cosine with the mean gradient", fontsize=9)
    ax.set_ylabel("examples")
    ax.set_xlabel(f"{100 * np.mean(found.cosines < 0):.0f} % below 0", fontsize=9)
    for ax in cells[panels:]:
        ax.set_visible(False)
    pictures.title(figure, f"{title} ({len(found.norms)} examples)", fontsize=11)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)


def clip_history(rows, path, public):
    """The clip norm over training against the quantiles of the norms."""
    figure, axes = pictures.new(6.4, 4.2)
    ax = axes[0, 0]
    x = [row["step"] for row in rows]

    def column(name):
        return np.array([row[name] for row in rows], np.float64)

    ax.fill_between(
        x,
        column("norm_5%"),
        column("norm_95%"),
        color=pictures.COLORS[5],
        alpha=0.25,
        linewidth=0,
        label="norms, 5 to 95 %",
    )
    ax.fill_between(
        x,
        column("norm_25%"),
        column("norm_75%"),
        color=pictures.COLORS[5],
        alpha=0.45,
        linewidth=0,
        label="norms, 25 to 75 %",
    )
    ax.plot(x, column("norm_50%"), color="black", linewidth=1.5, label="median norm")
    if np.isfinite(column("norm_at_target")).any():
        ax.plot(
            x,
            column("norm_at_target"),
            label="norm at the target quantile",
            **pictures.style(2),
        )
    if np.isfinite(column("clip_norm")).any():
        look = {**pictures.style(1), "linestyle": "--"}
        ax.plot(x, column("clip_norm"), label="clip norm", **look)
    if np.nanmin(column("norm_5%")) > 0:
        ax.set_yscale("log")
    ax.set_xlabel("steps")
    ax.set_ylabel("gradient norm (loss per unit of weight)")
    pictures.title(figure, "Clip norm and gradient norms while training")
    ax.legend(fontsize=8, frameon=False)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)


def signal_history(rows, groups, path, public):
    """The signal-to-noise ratio of each group over training."""
    figure, axes = pictures.new(6.4, 4.2)
    ax = axes[0, 0]
    x = [row["step"] for row in rows]
    for k, name in enumerate(groups):
        ax.plot(
            x, [row[f"snr/{name}"] for row in rows], label=name, **pictures.style(k)
        )
    ax.axhline(1.0, color=pictures.GREY, linewidth=0.8)
    ax.set_yscale("log")
    ax.set_xlabel("steps")
    ax.set_ylabel("signal / noise of one step")
    pictures.title(figure, "Signal-to-noise ratio by layer")
    ax.legend(fontsize=8, frameon=False, ncols=1 + len(groups) // 12)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)


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


def _name(key) -> str:
    return f"{key:g}" if isinstance(key, (int, float)) else str(key)
