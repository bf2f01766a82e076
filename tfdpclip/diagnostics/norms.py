"""Distributions of gradient norms, and the effect of a clip norm on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpclip import _arguments, pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclasses.dataclass(frozen=True)
class NormSummary:
    """A distribution of gradient norms in a few numbers.

    Attributes:
      count: number of finite norms.
      dropped: number of norms that are not finite.
      mean: the mean of the finite norms.
      quantiles: by level: 5, 25, 50, 75 and 95 %.
      clip_norm: the clip norm, if given.
      fraction_clipped: the fraction above the clip norm; NaN without a clip norm.
      target: the norm at the target quantile of an adaptive clip norm, which should be
        near it; NaN without a target.
    """

    count: int
    dropped: int
    mean: float
    quantiles: dict[float, float]
    clip_norm: float
    fraction_clipped: float
    target: float

    def row(self) -> dict[str, float]:
        """The summary as columns of a table."""
        levels = {f"norm_{100 * q:g}%": v for q, v in self.quantiles.items()}
        return {
            "count": self.count,
            "dropped": self.dropped,
            "norm_mean": self.mean,
            **levels,
            "clip_norm": self.clip_norm,
            "fraction_clipped": self.fraction_clipped,
            "norm_at_target": self.target,
        }


def summarize_norms(
    norms: Any, clip_norm: float | None = None, target_quantile: float | None = None
) -> NormSummary:
    """Summarises gradient norms.

    Args:
      norms: `[n]`, 0 or above. Norms that are not finite are counted and left out.
      clip_norm: the clip norm, to see how many norms are clipped.
      target_quantile: the quantile that an adaptive clip norm follows, in [0, 1].

    Returns:
      The summary.

    Raises:
      ValueError: if there are no norms, or an argument is out of range.

    >>> summary = summarize_norms([0.5, 1.0, 2.0, 4.0], clip_norm=1.0)
    >>> summary.fraction_clipped, summary.quantiles[0.5]
    (0.5, 1.5)
    """
    norms = check_norms(norms)
    finite = norms[np.isfinite(norms)]
    if not finite.size:
        raise ValueError("norms has no finite entry to summarise.")
    clipped = target = np.nan
    if clip_norm is not None:
        clip_norm = _arguments.positive("clip_norm", clip_norm)
        clipped = float(np.mean(finite > clip_norm))
    if target_quantile is not None:
        level = _arguments.fraction("target_quantile", target_quantile)
        target = float(np.quantile(finite, level))
    return NormSummary(
        count=int(finite.size),
        dropped=int(norms.size - finite.size),
        # The mean may be finite although the sum overflows.
        mean=float(np.sum(finite / finite.size)),
        quantiles={q: float(np.quantile(finite, q)) for q in LEVELS},
        clip_norm=np.nan if clip_norm is None else clip_norm,
        fraction_clipped=clipped,
        target=target,
    )


def check_norms(norms: Any, name: str = "norms") -> np.ndarray:
    """`norms` as `[n]` in double precision, or an error; NaN and infinity pass."""
    norms = _arguments.floats(name, norms)
    if norms.ndim != 1 or np.any(norms < 0):
        raise ValueError(f"{name} must be [n], each 0 or above.")
    return norms


def check_labels(
    labels: Any, count: int, name: str = "labels", of: str = "norms"
) -> np.ndarray:
    """`labels` as an array `[count]`, or an error.

    Args:
      labels: numbers or text, one for each example.
      count: number of examples.
      name: the argument's name.
      of: the argument that determines the number of examples.
    """
    if labels is None:
        raise ValueError(f"{name} are missing: the targets are no classes.")
    try:
        labels = np.asarray(labels)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array, got {_arguments.shown(labels)}."
        ) from None
    if labels.shape != (count,):
        raise ValueError(
            f"{name} must be [{count}], one for each of {of}, got {labels.shape}."
        )
    words = labels.dtype.kind != "O" or all(isinstance(x, str) for x in labels)
    if not words or (labels.dtype.kind in "fc" and not np.isfinite(labels).all()):
        raise ValueError(f"{name} must be whole numbers or text, got {labels!r}.")
    return labels


def plot_norms(
    norms: Mapping[Any, Any],
    path: Any = None,
    *,
    clip_norms: float | Sequence[float] | None = None,
    xlabel: str = "",
    title: str = "Per-example gradient norms",
    public: bool = False,
) -> Figure:
    """Draws one violin for each set of norms, with medians, on a logarithmic axis.

    For norms over training give a mapping from epoch to norms; by class,
    ``{label: norms[labels == label] for label in np.unique(labels)}``; by layer,
    ``dict(zip(groups, by_group.T))``.

    Args:
      norms: for each label on the horizontal axis, `[n]` norms. Zeros and norms that
        are not finite are left out and counted.
      path: the file for the picture; None for not saving it.
      clip_norms: one clip norm, or one for each violin.
      xlabel: the meaning of the labels.
      title: a title.
      public: whether the data are public; otherwise the picture says that it must not
        be released.

    Returns:
      The figure. Needs matplotlib (the extra "plots").

    Raises:
      ValueError: if there is nothing to draw.
    """
    _arguments.boolean("public", public)
    if not isinstance(norms, Mapping):
        raise ValueError(
            "norms must be a mapping from labels to norms, got "
            f"{_arguments.shown(norms)}."
        )
    found = {key: check_norms(value) for key, value in norms.items()}
    if clip_norms is not None:
        clip_norms = _arguments.floats("clip_norms", clip_norms)
        if not np.all(np.isfinite(clip_norms) & (clip_norms > 0)) or (
            clip_norms.ndim and clip_norms.shape != (len(found),)
        ):
            raise ValueError(
                "clip_norms must be one number above 0, or one for each violin "
                f"({len(found)}), got {_arguments.shown(clip_norms)}."
            )
    if not found:
        raise ValueError("norms is empty: there is nothing to draw.")
    drawable = {k: v[np.isfinite(v) & (v > 0)] for k, v in found.items()}
    if not any(v.size for v in drawable.values()):
        raise ValueError("norms has no norm above 0 that is finite.")
    left_out = sum(len(v) - len(drawable[k]) for k, v in found.items())
    names = [label_text(key) for key in found]
    figure, axes = pictures.new(max(5.0, 1.6 + 0.62 * len(found)), 4.2, grid="y")
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
        color = pictures.COLORS[1]
        for k, c in enumerate(np.broadcast_to(np.log10(clip_norms), [len(names)])):
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


def label_text(key: Any) -> str:
    """A label of a picture's axis."""
    return f"{key:g}" if isinstance(key, (int, float)) else str(key)
