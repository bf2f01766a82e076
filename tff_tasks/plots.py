"""Draws Figures 3 to 7 of the paper from the tables of sweeps.

    python -m tff_tasks.plots --sweeps=runs/sweep_digits

Figure 3 is the cost of clipping without noise, 4 the clip norm over the rounds, 5 and 6
adaptive and fixed clipping with noise, 7 the median against the best fixed clip norm.
One panel for each sweep. Missing runs are not drawn, and captions give the numbers of
rounds, seeds and server learning rates of each sweep. (Figures 1 and 2 are drawn by
`tff_tasks.quantile_tracking`.)
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from driver_kit import json_files, plotting, programs, reports, settings
from tfdpclip import pictures
from tff_tasks import records, studies
from tff_tasks.studies import Row


@dataclasses.dataclass(frozen=True)
class PlotConfig:
    """The settings of the figures."""

    sweeps: str = settings.words(
        "runs/sweep_digits", "Directories of sweeps, separated by commas."
    )
    output_dir: str | None = settings.words(
        None, "Where figures go. Default: the first sweep."
    )
    titles: str = settings.words(
        "",
        "What to call the sweeps, separated by semicolons, where the benchmark's name "
        "does not say what was run.",
        good="MNIST dealt to 600 clients, 2NN",
    )
    figure_format: tuple[str, ...] = settings.figure_format()

    def __post_init__(self):
        settings.check(self)
        given, sweeps = self.titles.split(";"), self.sweeps.split(",")
        if not all(part.strip() for part in sweeps):
            raise ValueError(
                f"sweeps must name a directory between commas, got {self.sweeps!r}; "
                "for example --sweeps=runs/sweep_digits."
            )
        if self.titles and len(given) != len(sweeps):
            raise ValueError(
                f"titles must be one for each of {len(sweeps)} sweeps, separated by "
                f"semicolons, got {self.titles!r}; for example titles="
                f"{';'.join('ABC'[i % 3] for i in range(len(sweeps)))}."
            )


class Results:
    """A sweep's table.

    Args:
      directory: the sweep's.

    Raises:
      ValueError: if there is none.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self.rows = studies.read_rows(directory)
        path = directory / studies.SETTINGS
        self.settings: dict[str, Any] = (
            json_files.read_json(path) if path.exists() else {}
        )
        if not self.settings:
            # A sweep that has not ended; every run names its metric.
            config = directory / self.rows[0].directory / reports.CONFIG
            content = json_files.read_json(config)
            self.settings = {
                "title": content["settings"]["task"] + " (not all was run)",
                "metric": content["derived"]["metric"],
                "higher_is_better": content["derived"]["higher_is_better"],
            }

    @property
    def metric(self) -> str:
        """The metric's name, for people."""
        return self.settings["metric"].replace("_", " ")

    @property
    def title(self) -> str:
        """The benchmark's."""
        return self.settings["title"]

    @property
    def final_clients(self) -> str:
        """The clients of Figure 7."""
        base = self.settings.get("base", {})
        return studies.final_clients(base.get("eval_split", "test"))

    def averages(self, clipping: str) -> dict[tuple[float, float], float]:
        """The metric by level and noise, at the best rate, averaged over seeds."""
        better = max if self.settings["higher_is_better"] else min
        found: dict[tuple[float, float], dict[float, list[float]]] = {}
        for row in self._searched(clipping):
            key = row.level, row.noise_multiplier
            found.setdefault(key, {}).setdefault(row.rate_factor, []).append(
                row.summary
            )
        return {
            key: float(better(np.mean(values) for values in by_rate.values()))
            for key, by_rate in found.items()
        }

    def _searched(self, clipping: str) -> list[Row]:
        """Rows of the search, without the further seeds of Figure 7."""
        chosen = self.settings.get("settings", {})
        last = chosen.get("first_seed", 1) + chosen.get("seeds", 1)
        return [r for r in self.rows if r.clipping == clipping and r.seed < last]

    def levels(self, clipping: str) -> list[float]:
        """The quantiles or norms that were run."""
        return sorted({row.level for row in self._searched(clipping)})

    def best(self, clipping: str, level: float) -> Row | None:
        """The best run without noise of a setting."""
        rows = [
            row
            for row in self._searched(clipping)
            if (row.level, row.noise_multiplier) == (level, 0.0)
        ]
        better = max if self.settings["higher_is_better"] else min
        return better(rows, key=lambda row: row.summary) if rows else None

    def has(self, clipping: str, noise: bool | None = None) -> bool:
        """Whether anything of a kind was run: with noise, without, or either."""
        return any(
            noise is None or (row.noise_multiplier > 0) == noise
            for row in self._searched(clipping)
        )

    def caption(self) -> str:
        """The runs in words."""
        rows = [
            row
            for kind in ("none", "adaptive", "fixed")
            for row in self._searched(kind)
        ]
        rounds = sorted({row.rounds for row in rows})
        seeds = len({row.seed for row in rows})
        clipped = [row for row in rows if row.clipping != "none"]
        rates = len({row.rate_factor for row in clipped})
        tuned = f"best of {rates} server rates" if rates > 1 else "one server rate"
        return (
            f"{'/'.join(map(str, rounds))} rounds, {tuned}, "
            f"{seeds} seed{'s' if seeds > 1 else ''}"
        )


def _panels(results: list[Results], title: str) -> Any:
    picture, axes = pictures.new(5.6 * len(results), 4.4, 1, len(results))
    for one, result in zip(axes[0], results, strict=True):
        one.set_title(f"{result.title}\n{result.caption()}", fontsize=9)
    pictures.title(picture, title, fontsize=12)
    return picture, axes[0]


def _baseline(one, result):
    unclipped = result.averages("none")
    if (0.0, 0.0) in unclipped:
        one.axhline(
            unclipped[0.0, 0.0],
            color=pictures.GREY,
            linestyle=":",
            label="no clipping, no noise",
        )


def figure_3(results: list[Results]) -> Any:
    """The metric at five quantiles against no clipping, without noise."""
    results = [r for r in results if r.has("adaptive", noise=False)]
    if not results:
        return None
    picture, axes = _panels(results, "Clipping without noise")
    for one, result in zip(axes, results, strict=True):
        _baseline(one, result)
        _lines(one, result, "adaptive", only=(0.0,))
        one.set_xlabel("target quantile")
        one.set_ylabel(result.metric)
        one.set_xticks(result.levels("adaptive"))
        one.legend(fontsize=8)
    return picture


def figure_4(results: list[Results]) -> Any:
    """The clip norm over the rounds, at five quantiles, without noise."""
    results = [r for r in results if r.has("adaptive", noise=False)]
    if not results:
        return None
    picture, axes = _panels(
        results, "Clip norm that follows a quantile of update norms, without noise"
    )
    for one, result in zip(axes, results, strict=True):
        levels = result.levels("adaptive")
        for colour, quantile in zip(pictures.COLORS, levels, strict=False):
            best = result.best("adaptive", quantile)
            if best is None:
                continue
            table = records.Table(result.directory / best.directory / records.METRICS)
            rows = [row for row in table.rows if "clip_norm" in row]
            one.plot(
                [row["round"] for row in rows],
                [row["clip_norm"] for row in rows],
                color=colour,
                label=f"{quantile:g}",
            )
        one.set_yscale("log")
        one.set_xlabel("round")
        one.legend(title="quantile", fontsize=8, title_fontsize=8)
    axes[0].set_ylabel("clip norm (log scale)")
    return picture


def _lines(one, result, clipping, only=None):
    averages = result.averages(clipping)
    noises = sorted({z for _, z in averages})
    for colour, z in zip(pictures.COLORS, noises, strict=False):
        if only is not None and z not in only:
            continue
        points = sorted((level, v) for (level, zz), v in averages.items() if zz == z)
        one.plot(
            [level for level, _ in points],
            [value for _, value in points],
            "o-",
            color=colour,
            label="clipped, no noise" if z == 0 else f"noise multiplier {z:g}",
        )


def figure_5(results: list[Results]) -> Any:
    """The metric at five quantiles and several levels of noise."""
    results = [r for r in results if r.has("adaptive", noise=True)]
    if not results:
        return None
    picture, axes = _panels(results, "Adaptive clipping with noise")
    for one, result in zip(axes, results, strict=True):
        _baseline(one, result)
        _lines(one, result, "adaptive")
        one.set_xlabel("target quantile")
        one.set_ylabel(result.metric)
        one.set_xticks(result.levels("adaptive"))
        one.legend(fontsize=8)
    return picture


def figure_6(results: list[Results]) -> Any:
    """The metric at five fixed clip norms and several levels of noise."""
    results = [r for r in results if r.has("fixed")]
    if not results:
        return None
    picture, axes = _panels(results, "Fixed clipping with noise")
    for one, result in zip(axes, results, strict=True):
        _baseline(one, result)
        _lines(one, result, "fixed")
        one.set_xscale("log")
        levels = result.levels("fixed")
        one.set_xticks(levels, [f"{level:.3g}" for level in levels])
        one.set_xticks([], minor=True)
        one.set_xlabel("clip norm (log scale)")
        one.set_ylabel(result.metric)
        one.legend(fontsize=8)
    return picture


def figure_7(results: list[Results]) -> Any:
    """The median against the best fixed norm, with many seeds."""
    results = [r for r in results if r.settings.get("figure_7")]
    if not results:
        return None
    picture, axes = pictures.new(7.6 * len(results), 3.4, 1, len(results))
    for one, result in zip(axes[0], results, strict=True):
        chosen = result.settings["figure_7"]
        names = ("adaptive to the median", f"fixed clip {chosen['clip']:.3g}")
        for place, kind in enumerate(("adaptive", "fixed")):
            found = chosen[kind]["final"]
            values = [
                row.final
                for row in result.rows
                if row.clipping == kind
                and row.noise_multiplier == chosen["noise_multiplier"]
                and row.level == (0.5 if kind == "adaptive" else chosen["clip"])
                and row.rate_factor == chosen["rate_factors"][kind]
                and row not in result._searched(kind)
            ]
            colour = pictures.COLORS[place]
            spread = np.linspace(-0.12, 0.12, max(1, len(values)))
            one.plot(values, place + spread, ".", color=colour, alpha=0.35)
            error = [
                [found["mean"] - found["low"]],
                [found["high"] - found["mean"]],
            ]
            one.errorbar(
                found["mean"], place, xerr=error, fmt="o", color=colour, capsize=6
            )
        one.locator_params(axis="x", nbins=6)
        one.set_yticks([0, 1], names)
        one.set_ylim(1.5, -0.5)
        one.set_xlabel(
            f"{result.metric} on {result.final_clients}\n"
            "(dots: single runs; bars: 95% interval of the mean)",
            fontsize=9,
        )
        one.set_title(
            f"{result.title}: noise multiplier {chosen['noise_multiplier']:g}, "
            f"{found['runs']} seeds",
            fontsize=9,
        )
    return picture


#: By the numbers of the paper. Each returns None if none of its runs exist.
FIGURES = {3: figure_3, 4: figure_4, 5: figure_5, 6: figure_6, 7: figure_7}


def draw(config: PlotConfig) -> str:
    """Draws the figures whose runs exist; returns the text to print."""
    directories = [pathlib.Path(part) for part in config.sweeps.split(",")]
    results = [Results(directory) for directory in directories]
    if config.titles:
        for result, title in zip(results, config.titles.split(";"), strict=True):
            result.settings["title"] = title.strip()
    target = pathlib.Path(config.output_dir or directories[0])
    drawn = {number: figure(results) for number, figure in FIGURES.items()}
    written = [
        str(path)
        for number, picture in drawn.items()
        if picture is not None
        for path in plotting.save_as(
            picture, target / f"figure_{number}", config.figure_format
        )
    ]
    lines = ["Written:", *written]
    missing = [number for number, picture in drawn.items() if picture is None]
    if missing:
        lines.append(f"Not run, and so not drawn: {', '.join(map(str, missing))}.")
    return "\n".join(lines)


if __name__ == "__main__":
    programs.run_program(__doc__, PlotConfig, draw, errors=(ValueError,))
