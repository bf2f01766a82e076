"""The results of a grid: the best settings, and tables."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tfdpclip.tuning.search_privacy import SearchStatement


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
