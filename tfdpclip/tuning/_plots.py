"""Pictures of grids."""

from __future__ import annotations

import math

import numpy as np

from tfdpclip import pictures

_NAMES = {
    "clip_norm": "clip norm",
    "batch_size": "expected batch size",
    "learning_rate": "learning rate",
}


def heatmap(result, path, metric, label, title):
    """The score over clip norm and batch size, at the best learning rate."""
    rows = result.best_at(("clip_norm", "batch_size"), metric)
    if not rows:
        raise ValueError("There is nothing to draw: no run has ended yet.")
    extra = [
        name
        for name in result.settings
        if name not in _NAMES and len({row[name] for row in result.rows}) > 1
    ]
    if extra:
        raise ValueError(
            f"heatmap: {extra[0]!r} has several values; draw a grid with one of them, "
            f"or curves(by={extra[0]!r})."
        )
    clips = _ordered({row["clip_norm"] for row in rows})
    sizes = _ordered({row["batch_size"] for row in rows})
    values = np.full([len(sizes), len(clips)], np.nan)
    for row in rows:
        values[sizes.index(row["batch_size"]), clips.index(row["clip_norm"])] = row[
            "mean"
        ]
    figure, axes = pictures.new(
        2.6 + 0.8 * len(clips), 1.9 + 0.5 * len(sizes), grid=None
    )
    ax = axes[0, 0]
    image = ax.imshow(values, origin="lower", aspect="auto", cmap=pictures.SEQUENTIAL)
    finite = values[np.isfinite(values)]
    middle = (finite.min() + finite.max()) / 2 if finite.size else 0.0
    best = finite.max() if result.maximize else finite.min()
    digits = _digits(finite)
    for (i, j), value in np.ndenumerate(values):
        text = "–" if math.isnan(value) else f"{value:.{digits}f}"
        ax.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=8.5,
            fontweight="bold" if value == best else "normal",
            color="black" if value > middle or math.isnan(value) else "white",
        )
    ax.set_xticks(range(len(clips)), [_shown(c) for c in clips])
    ax.set_yticks(range(len(sizes)), [_shown(s) for s in sizes])
    ax.set_xlabel("clip norm")
    ax.set_ylabel("expected batch size (records)")
    name = metric if label is None else label
    figure.colorbar(image, ax=ax, label=_sentence(f"{name}, mean of repeats"))
    pictures.title(figure, title or _sentence(f"{name} at the best learning rate"))
    if result.only_best:
        pictures.note(figure, "not to be released: the search's privacy needs that")
    return pictures.finish(figure, path)


def curves(result, path, x, by, metric, difference_to_best, label, title):
    """Mean scores with bands from the least to the greatest repeat."""
    rows = result.best_at((x,) if by is None else (x, by), metric)
    if not rows:
        raise ValueError("There is nothing to draw: no run has ended yet.")
    figure, axes = pictures.new(6.0, 4.0)
    ax = axes[0, 0]
    groups = [None] if by is None else _ordered({row[by] for row in rows})
    places = _ordered({row[x] for row in rows})
    named = any(isinstance(place, str) for place in places)
    for k, group in enumerate(groups):
        mine = [row for row in rows if by is None or row[by] == group]
        mine.sort(key=lambda row: places.index(row[x]))
        means = np.array([row["mean"] for row in mine])
        best = 0.0
        if difference_to_best:
            best = np.nanmax(means) if result.maximize else np.nanmin(means)
        at = [places.index(row[x]) if named else row[x] for row in mine]
        look = pictures.style(k)
        text = None if by is None else f"{_NAMES.get(by, by)} {_shown(group)}"
        ax.plot(at, means - best, label=text, **look)
        ax.fill_between(
            at,
            [row["min"] - best for row in mine],
            [row["max"] - best for row in mine],
            color=look["color"],
            alpha=0.18,
            linewidth=0,
        )
    if named:
        ax.set_xticks(range(len(places)), [_shown(p) for p in places])
    elif len(places) > 1 and min(places) > 0:
        ax.set_xscale("log", base=2 if x == "batch_size" else 10)
        if x == "batch_size":
            pictures.plain_ticks(ax.xaxis, min(places), max(places))
    unit = " (records)" if x == "batch_size" else ""
    ax.set_xlabel(f"{_NAMES.get(x, x)}{unit}")
    name = metric if label is None else label
    ax.set_ylabel(
        _sentence(f"{name}, difference to the best" if difference_to_best else name)
    )
    if by is not None:
        ax.legend(fontsize=8, frameon=False)
    repeats = max(row["runs"] for row in rows)
    bands = f"; bands: least to greatest of {repeats} runs" if repeats > 1 else ""
    pictures.title(figure, title or _sentence(f"{name} by {_NAMES.get(x, x)}"))
    others = [n for n in result.settings if n not in (x, by)]
    several = [n for n in others if len({row[n] for row in result.rows}) > 1]
    tuned = ", ".join(_NAMES.get(n, n) for n in several)
    text = f"best {tuned} at every point{bands}" if tuned else bands[2:]
    if result.only_best:
        text = "not to be released: the search's privacy needs that. " + text
    if text:
        pictures.note(figure, text)
    return pictures.finish(figure, path)


def _ordered(values) -> list:
    """Numbers by size, then names ("full" is larger than any size)."""
    return sorted(values, key=lambda v: (isinstance(v, str), v))


def _shown(value) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _digits(values) -> int:
    """As many digits as tell the scores apart, three at most for scores near 1."""
    if not len(values):
        return 3
    size = float(np.max(np.abs(values)))
    return 3 if size <= 2 else max(0, 3 - math.ceil(math.log10(size)))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
