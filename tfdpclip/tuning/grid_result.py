"""The results of a grid: the best settings, tables and pictures."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpclip import pictures
from tfdpclip.tuning.search_privacy import SearchStatement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The settings of a heat map: two on its axes, and the tuned one.
_DRAWN = ("clip_norm", "batch_size", "learning_rate")


@dataclasses.dataclass(frozen=True)
class GridResult:
    """The runs of a grid. `str()` gives the best settings and the privacy statement.

    Attributes:
      rows: one dictionary for each run, for CSV files or pandas: settings, scores and
        seconds.
      settings: names of the settings that are not repeats.
      metric: the score to compare by.
      maximize: whether more is better.
      planned: the number of runs of the complete grid.
      only_best: whether only the best run may be released.
    """

    rows: tuple[dict[str, Any], ...]
    settings: tuple[str, ...]
    metric: str
    maximize: bool
    planned: int
    only_best: bool
    _statement: SearchStatement

    def statement(self) -> SearchStatement:
        """Returns the privacy cost of the search."""
        return self._statement

    def summary(self, metric: str | None = None) -> list[dict[str, Any]]:
        """Mean, minimum and maximum over the repeats of each setting.

        Args:
          metric: the score; the grid's metric by default.

        Returns:
          One dictionary for each setting, with "mean", "min", "max" and "runs". If
          a repeat is NaN, all three scores are NaN.

        Raises:
          ValueError: if there is no such score.
        """
        metric = self._metric(metric)
        groups: dict[tuple, list[float]] = {}
        for row in self.rows:
            place = tuple(row[name] for name in self.settings)
            groups.setdefault(place, []).append(float(row[metric]))
        return [
            {
                **dict(zip(self.settings, place, strict=True)),
                "mean": math.fsum(scores) / len(scores),
                "min": float(np.min(scores)),
                "max": float(np.max(scores)),
                "runs": len(scores),
            }
            for place, scores in groups.items()
        ]

    def best(self, metric: str | None = None) -> dict[str, Any]:
        """The row of `summary` with the best mean; the first row among equal rows.

        If only the best run may be released, it is the single best run, by the metric
        of the search: the best run by a second score would be a second release.

        Raises:
          ValueError: if no run has ended, there is no such score, or the search
            releases the best run by a different score.
        """
        rows = self.summary(metric)
        if self.only_best:
            if metric not in (None, self.metric):
                raise ValueError(
                    f"metric: this search may release its best run by {self.metric!r} "
                    f"alone, and the best run by {metric!r} would be a second one. "
                    f"To choose by {metric!r}, search with metric={metric!r}."
                )
            name = self._metric(metric)
            rows = [
                {
                    **{key: row[key] for key in self.settings},
                    **dict.fromkeys(("mean", "min", "max"), float(row[name])),
                    "runs": 1,
                }
                for row in self.rows
            ]
        if not rows:
            raise ValueError("No run has ended yet, so there is no best run.")
        return max(rows, key=self._value)

    def heatmap(
        self,
        path: Any = None,
        *,
        label: str | None = None,
        title: str | None = None,
    ) -> Figure:
        """Draws the score over clip norm and batch size, at the best learning rate.

        As Figure 1 of Rehn et al. (2025). All further settings must have one value.
        Needs matplotlib (the extra "plots").

        Args:
          path: the file for the picture; None for not saving it.
          label: the name of the score in the picture, with its unit.
          title: a title.

        Returns:
          The figure.

        Raises:
          ValueError: if there is nothing to draw.
        """
        rows = self.best_at(("clip_norm", "batch_size"))
        if not rows:
            raise ValueError("There is nothing to draw: no run has ended yet.")
        extra = [
            name
            for name in self.settings
            if name not in _DRAWN and len({row[name] for row in self.rows}) > 1
        ]
        if extra:
            raise ValueError(
                f"heatmap: {extra[0]!r} has several values; draw the rows of one: "
                "dataclasses.replace(result, rows=[...]).heatmap()."
            )
        clips = _ordered({row["clip_norm"] for row in rows})
        sizes = _ordered({row["batch_size"] for row in rows})
        values = np.full([len(sizes), len(clips)], np.nan)
        for row in rows:
            place = sizes.index(row["batch_size"]), clips.index(row["clip_norm"])
            values[place] = row["mean"]
        figure, axes = pictures.new(
            2.6 + 0.8 * len(clips), 1.9 + 0.5 * len(sizes), grid=None
        )
        ax = axes[0, 0]
        image = ax.imshow(
            values, origin="lower", aspect="auto", cmap=pictures.SEQUENTIAL
        )
        finite = values[np.isfinite(values)]
        middle = (finite.min() + finite.max()) / 2 if finite.size else 0.0
        best = finite.max() if self.maximize else finite.min()
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
        name = self.metric if label is None else label
        figure.colorbar(image, ax=ax, label=_sentence(f"{name}, mean of repeats"))
        pictures.title(figure, title or _sentence(f"{name} at the best learning rate"))
        if self.only_best:
            pictures.note(figure, "not to be released: the search's privacy needs that")
        return pictures.finish(figure, path)

    def best_at(
        self, names: tuple[str, ...], metric: str | None = None
    ) -> list[dict[str, Any]]:
        """The best row of `summary` for each combination of the named settings.

        Args:
          names: settings; the best value of each other setting is taken.
          metric: the score; the grid's metric by default.

        Returns:
          Rows of `summary`.

        Raises:
          ValueError: if there is no such setting or score.
        """
        for name in names:
            if name not in self.settings:
                raise ValueError(
                    f"names must be of {', '.join(self.settings)}; got {name!r}."
                )
        best: dict[tuple, dict[str, Any]] = {}
        for row in self.summary(metric):
            place = tuple(row[name] for name in names)
            if place not in best or self._value(row) > self._value(best[place]):
                best[place] = row
        return list(best.values())

    def __str__(self) -> str:
        if self.only_best:
            lines = []  # the number of runs is not to be released
        else:
            lines = [f"{len(self.rows)} of {self.planned} runs done."]
        if self.rows:
            best = self.best()
            settings = ", ".join(f"{name} {best[name]}" for name in self.settings)
            lines.append(f"Best {self.metric}: {best['mean']:.6g} at {settings}")
            if self.only_best:
                lines[-1] += "."
            else:
                lines[-1] += (
                    f" (mean; from {best['min']:.6g} to {best['max']:.6g} in "
                    f"{best['runs']} runs). The best of many is better by luck, "
                    "too: repeat it with other seeds before comparing."
                )
        lines.append(f"Privacy: {self._statement}")
        return "\n".join(lines)

    def _metric(self, metric: str | None) -> str:
        metric = self.metric if metric is None else metric
        if self.rows and metric not in self.rows[0]:
            raise ValueError(
                f"metric: there is no score {metric!r}; the columns are "
                f"{', '.join(self.rows[0])}."
            )
        return metric

    def _value(self, row) -> float:
        """The key for `max`: NaN is the worst."""
        mean = row["mean"] if self.maximize else -row["mean"]
        return -math.inf if math.isnan(mean) else mean


def _ordered(values) -> list:
    """Numbers by size, then names ("full" is larger than any size)."""
    return sorted(values, key=lambda v: (isinstance(v, str), v))


def _shown(value) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _digits(values) -> int:
    """The number of digits that tells scores apart, three at most for scores near 1."""
    if not len(values):
        return 3
    size = float(np.max(np.abs(values)))
    return 3 if size <= 2 else max(0, 3 - math.ceil(math.log10(size)))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
