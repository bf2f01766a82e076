"""Distributions of gradient norms, and what a clip norm does to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpclip import _arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclasses.dataclass(frozen=True)
class NormSummary:
    """A distribution of gradient norms in a few numbers.

    Attributes:
      count: number of norms that are finite.
      dropped: number of norms that are not.
      mean: their mean.
      quantiles: by level: 5, 25, 50, 75 and 95 %.
      clip_norm: the clip norm, if there is one.
      fraction_clipped: the fraction above it; NaN without a clip norm.
      target: the norm at the quantile that an adaptive clip norm aims at, which it
        should be near; NaN without one.
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
      norms: `[n]`, 0 or above. Those that are not finite are counted and left out.
      clip_norm: the clip norm, to see how many are clipped.
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
        level = _arguments.finite("target_quantile", target_quantile)
        if not 0 <= level <= 1:
            raise ValueError(
                f"target_quantile must be in [0, 1], got {target_quantile!r}."
            )
        target = float(np.quantile(finite, level))
    return NormSummary(
        count=int(finite.size),
        dropped=int(norms.size - finite.size),
        # The sum may overflow where the mean does not.
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


def by_class(norms: Any, labels: Any) -> dict[Any, np.ndarray]:
    """The norms of each class, by ascending label.

    >>> by_class([1.0, 2.0, 3.0], [1, 0, 1])[1].tolist()
    [1.0, 3.0]
    """
    norms = check_norms(norms)
    labels = check_labels(labels, len(norms))
    return {label.item(): norms[labels == label] for label in np.unique(labels)}


def check_labels(
    labels: Any, count: int, name: str = "labels", of: str = "norms"
) -> np.ndarray:
    """`labels` as an array `[count]`, or an error.

    Args:
      labels: numbers or text, one for each example.
      count: number of examples.
      name: the argument's name.
      of: the argument that says how many examples there are.
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
    `by_class(norms, labels)`; by layer, ``dict(zip(groups, by_group.T))``.

    Args:
      norms: for each label on the horizontal axis, `[n]` norms. Zeros and norms that
        are not finite are left out and counted.
      path: where to save the picture; None for not saving it.
      clip_norms: one clip norm, or one for each violin.
      xlabel: what the labels are.
      title: a title.
      public: whether the data are public; otherwise the picture says that it must not
        be released.

    Returns:
      The figure. Needs matplotlib (the extra "plots").

    Raises:
      ValueError: if there is nothing to draw.
    """
    from tfdpclip.diagnostics import _plots

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
        clip_norms = clip_norms.tolist()
    return _plots.violins(found, path, clip_norms, xlabel, title, public)
