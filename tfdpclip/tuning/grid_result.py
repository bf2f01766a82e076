"""What a grid gave: the best settings, tables and pictures."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from tfdpclip.tuning.search_privacy import SearchStatement

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class GridResult:
    """The runs of a grid. `str()` gives the best settings and the privacy statement.

    Attributes:
      rows: one dictionary for each run: settings, scores and seconds.
      settings: names of the settings that are not repeats.
      metric: the score to compare by.
      maximize: whether more is better.
      planned: how many runs there are when all are done.
      only_best: whether nothing but the best run may be released.
      statement: what the search cost.
    """

    rows: tuple[dict[str, Any], ...]
    settings: tuple[str, ...]
    metric: str
    maximize: bool
    planned: int
    only_best: bool
    statement: SearchStatement

    def summary(self, metric: str | None = None) -> list[dict[str, Any]]:
        """Mean, minimum and maximum over the repeats of each setting.

        Args:
          metric: which score; that of the grid by default.

        Returns:
          One dictionary for each setting, with it, "mean", "min", "max" and "runs".
          A repeat that is NaN makes all three NaN.

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
                "min": min(scores) if not _any_nan(scores) else math.nan,
                "max": max(scores) if not _any_nan(scores) else math.nan,
                "runs": len(scores),
            }
            for place, scores in groups.items()
        ]

    def tuned(
        self, over: str = "learning_rate", metric: str | None = None
    ) -> list[dict[str, Any]]:
        """The summary with the best value of one setting for each of the others.

        Args:
          over: the setting to choose the best value of, by the mean.
          metric: which score; that of the grid by default.

        Returns:
          Rows of `summary`.

        Raises:
          ValueError: if there is no such setting or score.
        """
        if over not in self.settings:
            raise ValueError(
                f"over must be one of {', '.join(self.settings)}; got {over!r}."
            )
        best: dict[tuple, dict[str, Any]] = {}
        for row in self.summary(metric):
            place = tuple(row[name] for name in self.settings if name != over)
            if place not in best or self._value(row) > self._value(best[place]):
                best[place] = row
        return list(best.values())

    def best(self, metric: str | None = None) -> dict[str, Any]:
        """The row of `summary` with the best mean; of equal ones the first.

        Where only the best run may be released, it is the single best run.

        Raises:
          ValueError: if no run has ended, or there is no such score.
        """
        rows = self.summary(metric)
        if self.only_best:
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
            raise ValueError("No run has ended yet, so there is no best one.")
        return max(rows, key=self._value)

    def to_frame(self) -> pandas.DataFrame:
        """All runs as a pandas data frame. Needs pandas (the extra "plots")."""
        import pandas

        return pandas.DataFrame(list(self.rows))

    def heatmap(
        self,
        path: Any = None,
        *,
        metric: str | None = None,
        label: str | None = None,
        title: str | None = None,
    ) -> Figure:
        """Draws the score over clip norm and batch size, at the best learning rate.

        As Figure 1 of Rehn et al. (2025). Other settings must have one value each.
        Needs matplotlib (the extra "plots").

        Args:
          path: where to save the picture; None for not saving it.
          metric: which score; that of the grid by default.
          label: what to call it in the picture, with its unit.
          title: a title.

        Returns:
          The figure.

        Raises:
          ValueError: if there is nothing to draw.
        """
        from tfdpclip.tuning import _plots

        return _plots.heatmap(self, path, self._metric(metric), label, title)

    def curves(
        self,
        path: Any = None,
        *,
        x: str = "clip_norm",
        by: str | None = None,
        metric: str | None = None,
        difference_to_best: bool = False,
        label: str | None = None,
        title: str | None = None,
    ) -> Figure:
        """Draws mean scores with bands from the least to the greatest repeat.

        As Figure 2 of Rehn et al. (2025). All settings but `x` and `by` are tuned: the
        best value of each is taken at every place. Needs matplotlib.

        Args:
          path: where to save the picture; None for not saving it.
          x: the setting on the horizontal axis.
          by: the setting that makes one curve for each of its values.
          metric: which score; that of the grid by default.
          difference_to_best: draw the distance to the best mean of each curve.
          label: what to call the score in the picture, with its unit.
          title: a title.

        Returns:
          The figure.

        Raises:
          ValueError: if a setting does not exist or there is nothing to draw.
        """
        for name, value in (("x", x), ("by", by)):
            if value not in self.settings and not (name == "by" and value is None):
                raise ValueError(
                    f"{name} must be one of {', '.join(self.settings)}; got {value!r}."
                )
        from tfdpclip.tuning import _plots

        metric = self._metric(metric)
        return _plots.curves(
            self, path, x, by, metric, difference_to_best, label, title
        )

    def best_at(self, names: tuple[str, ...], metric: str) -> list[dict[str, Any]]:
        """The best row of `summary` for each combination of the named settings."""
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
        lines.append(f"Privacy: {self.statement}")
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
        """What `max` compares: NaN is the worst."""
        mean = row["mean"] if self.maximize else -row["mean"]
        return -math.inf if math.isnan(mean) else mean


def _any_nan(scores) -> bool:
    return any(math.isnan(score) for score in scores)
