"""What studies of noises and clips share: runs that are kept, gains, figures.

A result is a row with "epsilon", "noise", "rule" (the clip), the metric and what
`intervals.of_mean` adds to it. A run is a row with "epsilon", "noise", "clip",
"learning_rate", "part" ("validation" or "test") and the metric of one run.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from driver_kit import intervals, kept, progress
from driver_kit.settings import UsageError
from tfdpclip import pictures

Row = dict[str, Any]
#: The noise that others gain over, and the clip that others' gains are compared with.
INDEPENDENT, FIXED = "independent", "fixed"
#: The part of a run that settings are chosen by, and of one that is a result.
CHOICE, TEST = "validation", "test"


class NotRun(Exception):
    """A run that a report would need."""


class Runs:
    """The runs of a study, each measured once.

    Args:
      directory: where they are kept.
      settings: all that results depend on besides their places.
      metric: what of a run counts.
      report_only: whether nothing is run.
    """

    def __init__(
        self,
        directory: str,
        settings: Mapping[str, Any],
        metric: str,
        report_only: bool,
    ):
        self._kept = kept.Kept(pathlib.Path(directory) / "trials.jsonl", settings)
        self._metric, self._report_only = metric, report_only
        self._directory = directory
        #: A row for every run.
        self.rows: list[Row] = []
        #: What a fresh run stated, by noise and epsilon.
        self.statements: dict[tuple[str, float], str] = {}

    def score(
        self, place: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]
    ) -> float:
        """The metric of one run, of now or of before.

        Args:
          place: where in the study; has "noise", "epsilon" and "part".
          measure: runs it; gives the metric, a "statement", and what else to keep.

        Raises:
          NotRun: if it is not kept, and nothing is to be run.
        """
        key = tuple(place.values())
        if self._report_only and key not in self._kept:
            raise NotRun
        found = self._kept.get(key, measure)
        row = {k: v for k, v in found.items() if k != "statement"}
        self.rows.append({**place, **row})
        if place["part"] == TEST:
            noise = place["noise"], place["epsilon"]
            self.statements.setdefault(noise, found["statement"].strip())
        return found[self._metric]

    def results(
        self, cells: Sequence[tuple], result: Callable[..., Row], metric: str
    ) -> list[Row]:
        """The results of all cells, or of those whose runs are all kept.

        Args:
          cells: what `result` is called with, one after the other.
          result: runs a cell and gives its result.
          metric: of results.

        Raises:
          UsageError: if there is none.
        """
        bar, results = progress.Progress("measuring", len(cells), unit="cell"), []
        for done, cell in enumerate(cells, 1):
            known = len(self.rows)
            try:
                results.append(result(*cell))
            except NotRun:
                del self.rows[known:]
                continue
            words = " ".join(map(str, cell))
            bar.show(done, [f"{words}: {100 * results[-1][metric]:.1f} %"])
        bar.close()
        if not results:
            raise UsageError(
                f"flag --report_only: {self._directory} has not all runs of any noise "
                "and clip; run it without, or with fewer learning rates or --repeats."
            )
        return results

    def told(self) -> str:
        """What the runs stated, a paragraph for each noise."""
        return "\n".join(
            f"{noise}, epsilon {epsilon:g}, one run: {text}"
            for (noise, epsilon), text in self.statements.items()
        )


def gains(results: Iterable[Row], metric: str) -> Iterator[Row]:
    """What each noise gains over independent noise, and how a clip changes that.

    In percent. "more_than_fixed" is the gain under a clip less the same noise's gain
    under the fixed clip: what a clip that adapts adds to it, or takes away.

    Args:
      results: rows of results.
      metric: what gains are of.
    """
    rows = {(r["epsilon"], r["noise"], r["rule"]): r for r in results}
    for (epsilon, noise, clip), row in rows.items():
        base = rows.get((epsilon, INDEPENDENT, clip))
        if base is None or noise == INDEPENDENT:
            continue
        gain, half, words = intervals.verdict(row, base, metric)
        told = {
            "epsilon": epsilon,
            "noise": noise,
            "clip": clip,
            "accuracy": round(100 * row[metric], 2),
            "independent": round(100 * base[metric], 2),
            "gain": round(100 * gain, 2),
            "gain_half_width": round(100 * half, 2),
            "verdict": words,
        }
        pair = [rows.get((epsilon, n, FIXED)) for n in (noise, INDEPENDENT)]
        if clip != FIXED and None not in pair:
            more, half, words = intervals.verdict(
                intervals.difference(row, base, metric),
                intervals.difference(*pair, metric),
                metric,
            )
            told |= {
                "more_than_fixed": round(100 * more, 2),
                "more_half_width": round(100 * half, 2),
                "against_fixed": words,
            }
        yield told


def findings(
    gained: Sequence[Row], epsilons: Sequence[float], clips: Sequence[str]
) -> list[str]:
    """Gains in words, a sentence for each epsilon and clip."""
    texts = []
    for epsilon, clip in itertools.product(epsilons, clips):
        parts = []
        for row in gained:
            if (row["epsilon"], row["clip"]) != (epsilon, clip):
                continue
            text = f"{row['noise']} {row['gain']:+.2f} +- {row['gain_half_width']:.2f}"
            if "more_than_fixed" in row:
                text += (
                    f" ({row['more_than_fixed']:+.2f} +- {row['more_half_width']:.2f} "
                    "to its gain under fixed)"
                )
            parts.append(text)
        if parts:
            texts.append(
                f"Epsilon {epsilon:g}, clip {clip}, points gained over independent "
                f"noise: {'; '.join(parts)}."
            )
    return texts or ["Without independent noise there is nothing to compare with."]


def markdown(results: Sequence[Row], metric: str) -> str:
    """Results as a table in Markdown: a row for each clip, a column for each noise.

    Args:
      results: rows of results, of one epsilon.
      metric: of results.

    >>> row = {"noise": "tree", "rule": "fixed", "loss": 0.5, "high": 0.52}
    >>> print(markdown([row], "loss"), end="")
    | clip | tree |
    | --- | --- |
    | fixed | 50.00 ± 2.00 |
    """
    cells = {(row["rule"], row["noise"]): row for row in results}
    noises = dict.fromkeys(row["noise"] for row in results)
    lines = [["clip", *noises], ["---"] * (len(noises) + 1)]
    for clip in dict.fromkeys(row["rule"] for row in results):
        found = [cells.get((clip, noise)) for noise in noises]
        lines.append([clip, *("" if r is None else _cell(r, metric) for r in found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row, metric: str) -> str:
    return f"{100 * row[metric]:.2f} ± {100 * (row['high'] - row[metric]):.2f}"


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a study.

    Attributes:
      metric: of results.
      of_run: the same of a run.
      epsilons: in order.
      noises: in order.
      clips: in order.
      repeats: of the runs that a result is of.
      measured_on: in words, what results were measured on.
      chosen_on: in words, what learning rates were chosen on.
      amplified: the noises that sampling amplifies.
    """

    metric: str
    of_run: str
    epsilons: Sequence[float]
    noises: Sequence[str]
    clips: Sequence[str]
    repeats: int
    measured_on: str
    chosen_on: str
    amplified: Sequence[str] = ()

    def both(self, results: Sequence[Row], runs: Sequence[Row]) -> dict[str, Any]:
        """The figures by name: "accuracy" and "rates"."""
        noises = [n for n in self.noises if any(r["noise"] == n for r in results)]
        return {
            "accuracy": self._accuracy(results, noises),
            "rates": self._rates(runs, noises),
        }

    def _accuracy(self, results, noises):
        columns = len(self.epsilons)
        figure, axes = pictures.new(1.8 + 3.6 * columns, 4.0, columns=columns)
        for ax, epsilon in zip(axes[0], self.epsilons, strict=True):
            for k, clip in enumerate(self.clips):
                place = epsilon, clip
                mine = [r for r in results if (r["epsilon"], r["rule"]) == place]
                shift = (k - (len(self.clips) - 1) / 2) * 0.2
                ax.errorbar(
                    [noises.index(r["noise"]) + shift for r in mine],
                    [100 * r[self.metric] for r in mine],
                    yerr=[100 * (r["high"] - r[self.metric]) for r in mine],
                    **pictures.style(k) | {"linestyle": "none"},
                    capsize=3,
                    label=clip,
                )
            for k, noise in enumerate(noises):
                if noise in self.amplified:
                    ax.axvspan(k - 0.5, k + 0.5, color="#eeeeee", lw=0)
            ax.set_xticks(range(len(noises)), noises, rotation=30, ha="right")
            ax.set_title(f"epsilon = {epsilon:g}", fontsize=10.5)
        name = self.metric.replace("_", " ")
        axes[0, 0].set_ylabel(f"{name} on {self.measured_on} (%)")
        axes[0, 0].legend(fontsize=8, frameon=False, title="clip", title_fontsize=8)
        words = f"Mean and 95 % interval of {self.repeats} runs"
        if not set(noises).isdisjoint(self.amplified):
            words += " (grey: amplified by sampling)"
        pictures.title(figure, words, fontsize=9.5)
        return figure

    def _rates(self, runs, noises):
        """The metric by which learning rates were chosen."""
        rows, columns = len(self.epsilons), len(self.clips)
        figure, axes = pictures.new(
            1.5 + 3 * columns, 0.8 + 2.5 * rows, rows, columns, sharey="row"
        )
        tried = [run for run in runs if run["part"] == CHOICE]
        for (i, epsilon), (j, clip), (k, noise) in itertools.product(
            enumerate(self.epsilons), enumerate(self.clips), enumerate(noises)
        ):
            best: dict[float, float] = {}
            for r in tried:
                if (r["epsilon"], r["clip"], r["noise"]) == (epsilon, clip, noise):
                    rate = r["learning_rate"]
                    best[rate] = max(best.get(rate, 0.0), 100 * r[self.of_run])
            if best:
                axes[i, j].plot(
                    *zip(*sorted(best.items()), strict=True),
                    **pictures.style(k),
                    label=noise,
                )
            axes[i, j].set_xscale("log")
            axes[i, j].set_title(f"epsilon = {epsilon:g}, {clip}", fontsize=10)
        for ax in axes[-1]:
            ax.set_xlabel("learning rate")
        for ax in axes[:, 0]:
            ax.set_ylabel(f"{self.metric.replace('_', ' ')} (%)")
        axes[0, 0].legend(fontsize=7, frameon=False)
        words = f"{self.chosen_on}, one run each: how rates were chosen"
        pictures.title(figure, words)
        return figure
