"""Grids of runs, from which Figures 3 to 7 of the paper are drawn.

    python -m tff_tasks.sweep --task=digits --run_flags="--engine=local"
    python -m tff_tasks.plots --sweeps=runs/sweep_digits

In order: no clipping; adaptive clipping at five quantiles without noise (Figures 3 and
4), then with noise (Figure 5); five fixed clip norms, from the range that adaptive
clipping discovered, with and without noise (Figure 6); and at one noise level the
median against the best fixed norm, with many seeds (Figure 7). Every clipped run is
repeated with several server learning rates, and the best counts.

A sweep that is stopped continues where it was. All runs are seeded, so none is private,
and choosing among them would not be either.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import shlex
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from driver_kit import programs, progress, reports, settings
from tfdpclip import files
from tff_tasks import command, cost, records, studies
from tff_tasks.config import RunConfig
from tff_tasks.registry import task_class

_RATE_FACTORS = "1,1.778,3.162,5.623,10"


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """The settings of a sweep."""

    task: str = settings.words("digits", "The benchmark.")
    output_dir: str | None = settings.words(
        None, "Where results go. Default: runs/sweep_TASK."
    )
    run_flags: str = settings.words(
        "", "Flags of all runs, as in --run_flags='--data_dir=data --rounds=100'."
    )
    figures: str = settings.words("3,4,5,6,7", "Which figures to run for, such as 3,4.")
    quantiles: str = settings.words(
        ",".join(map(str, studies.QUANTILES)), "Target quantiles of adaptive clipping."
    )
    fixed_clips: int = settings.count(5, "How many fixed norms to try.", least=2)
    noise_multipliers: str = settings.words(
        "", "Levels of noise, such as 0,0.03. Default: the paper's for the task."
    )
    server_rate_factors: str = settings.words(
        _RATE_FACTORS, "What the server learning rate is multiplied by."
    )
    seeds: int = settings.count(1, "Runs of each setting in Figures 3 to 6.")
    final_seeds: int = settings.count(20, "Runs of each setting in Figure 7.")
    clip_range: str = settings.words(
        "discover",
        "Fixed norms are between these, as in 0.3,1.6; 'paper' for the paper's; "
        "'discover' for what adaptive clipping finds.",
    )
    first_seed: int = settings.count(1, "Seeds count from here.", least=0)

    def __post_init__(self):
        settings.check(self)
        task_class(self.task)
        if not self.output_dir:
            object.__setattr__(self, "output_dir", f"runs/sweep_{self.task}")
        self.base()
        studies.numbers(self.figures, "figures", {3, 4, 5, 6, 7})
        studies.numbers(self.server_rate_factors, "server_rate_factors")
        if self.noise_multipliers:
            studies.numbers(self.noise_multipliers, "noise_multipliers")
        self._check_quantiles()
        if self.clip_range not in ("discover", "paper"):
            if len(studies.numbers(self.clip_range, "clip_range")) != 2:
                raise ValueError(
                    f"clip_range must be two numbers, 'paper' or 'discover', got "
                    f"{self.clip_range!r}; for example clip_range=0.3,1.6."
                )

    def _check_quantiles(self):
        levels = studies.numbers(self.quantiles, "quantiles")
        if max(levels) > 1:
            raise ValueError(
                f"quantiles must be at most 1, got {self.quantiles!r}; for example "
                "quantiles=0.1,0.5,0.9."
            )
        if 0.5 not in levels and "7" in self.figures:
            raise ValueError(
                f"quantiles={self.quantiles} has no median, which Figure 7 is about; "
                "add 0.5, or leave 7 out of --figures."
            )

    def base(self) -> RunConfig:
        """The common settings of all runs."""
        return command.config_from(self.task, shlex.split(self.run_flags))

    def noise_levels(self) -> list[float]:
        """Noise multipliers, without 0 unless asked for."""
        if self.noise_multipliers:
            return studies.numbers(self.noise_multipliers, "noise_multipliers")
        return list(task_class(self.task).paper.noise_grid)


class Sweep:
    """Runs cells and keeps the table.

    Args:
      config: the settings.
    """

    def __init__(self, config: SweepConfig):
        self.config = config
        self.base = config.base()
        self.task = task_class(config.task)
        self.directory = pathlib.Path(config.output_dir)
        files.prepare_directory(self.directory)
        first = config.first_seed
        self._search_seeds = range(first, first + config.seeds)
        self.rows: list[studies.Row] = []
        self.clips: list[float] = []
        self._known = {
            (*row.setting, row.rate_factor, row.seed): row for row in self._read()
        }
        self._started, self._ran = time.monotonic(), 0

    def _read(self) -> list[studies.Row]:
        return (
            studies.read_rows(self.directory)
            if (self.directory / studies.TABLE).exists()
            else []
        )

    @property
    def better(self):
        """max or min."""
        return max if self.task.higher_is_better else min

    def measure(self, cell: studies.Cell) -> studies.Row:
        """A cell's result, from the files if it was run before."""
        # This import comes late, because it takes seconds.
        from tff_tasks import program

        config = cell.config(self.base, self.directory)
        result = studies.finished(config)
        if result is None:
            program.run(config, None if self._ran else self._announce)
            self._ran += 1
            result = studies.finished(config)
        row = studies.Row(
            clipping=cell.clipping,
            level=cell.level,
            noise_multiplier=cell.noise_multiplier,
            rate_factor=cell.rate_factor,
            seed=cell.seed,
            # A run that diverged has the worst possible score, and is not missing.
            summary=studies.score(result["summary"], self.task.higher_is_better),
            final=studies.score(
                result["final"][self.task.metric], self.task.higher_is_better
            ),
            rounds=result["rounds"],
            directory=cell.name,
        )
        key = (*row.setting, row.rate_factor, row.seed)
        if key not in self._known:
            self._known[key] = row
        if row not in self.rows:
            self.rows.append(row)
        self._write()
        seconds = time.monotonic() - self._started
        print(
            f"{cell.name}: {self.task.metric} {row.summary:.4g} "
            f"({len(self.rows)} runs, {seconds:.0f} s)",
            flush=True,
        )
        return row

    def _announce(self, expected: cost.Cost) -> None:
        """Prints the estimated time of all runs, once the first run's time is known."""
        left = self.planned() - len(self.rows)
        total = progress.duration(left * expected.seconds)
        print(f"A run: {expected.lines()[0]}", *expected.lines()[1:], sep="\n")
        print(f"{left} runs: about {total}, if each is as long.", flush=True)

    def planned(self) -> int:
        """How many runs there will be in all."""
        config = self.config
        wanted = set(studies.numbers(config.figures, "figures"))
        noises = sum(z > 0 for z in config.noise_levels())
        rates = len(studies.numbers(config.server_rate_factors, "server_rate_factors"))
        quantiles = len(studies.numbers(config.quantiles, "quantiles"))
        settings = quantiles
        if 5 in wanted or 7 in wanted:
            settings += noises * (quantiles if 5 in wanted else 1)
        if wanted & {6, 7}:
            settings += config.fixed_clips * (1 + noises)
        final = 2 * config.final_seeds if 7 in wanted else 0
        return config.seeds * (1 + settings * rates) + final

    def _write(self):
        rows = map(dataclasses.asdict, self._known.values())
        text = reports.table_text(rows)
        records.write_atomically(self.directory / studies.TABLE, text)

    def measure_all(
        self, clipping: str, levels: Sequence[float], noises: Sequence[float]
    ) -> list[studies.Row]:
        """All rates and seeds of some settings."""
        factors = studies.numbers(
            self.config.server_rate_factors, "server_rate_factors"
        )
        if clipping == "none":
            # The paper tunes this rate too, but around a different value.
            factors = [1.0]
        return [
            self.measure(studies.Cell(clipping, level, z, factor, seed))
            for level, z, factor, seed in itertools.product(
                levels, noises, factors, self._search_seeds
            )
        ]

    def run(self) -> str:
        """The whole sweep; returns a report."""
        wanted = set(studies.numbers(self.config.figures, "figures"))
        quantiles = studies.numbers(self.config.quantiles, "quantiles")
        noises = [z for z in self.config.noise_levels() if z > 0]
        self.measure_all("none", [0.0], [0.0])
        adaptive = self.measure_all("adaptive", quantiles, [0.0])
        if wanted & {6, 7}:
            self.clips = self._clips(adaptive)
        if 5 in wanted or 7 in wanted:
            self.measure_all("adaptive", quantiles if 5 in wanted else [0.5], noises)
        if 6 in wanted or 7 in wanted:
            self.measure_all("fixed", self.clips, [0.0, *noises])
        chosen = None
        if 7 in wanted:
            chosen = self._final(noises)
        content = {
            "settings": dataclasses.asdict(self.config),
            "fixed_clips": self.clips,
            "figure_7": chosen,
            "metric": self.task.metric,
            "higher_is_better": self.task.higher_is_better,
            "title": self.task.title,
            "base": self.base.to_dict(),
            "versions": reports.versions("tensorflow-federated"),
        }
        path = self.directory / studies.SETTINGS
        records.write_atomically(path, reports.to_json(content))
        return self._report(chosen)

    def _clips(self, adaptive: list[studies.Row]) -> list[float]:
        if self.config.clip_range == "paper":
            return self.task.paper.fixed_clips(self.config.fixed_clips)
        if self.config.clip_range != "discover":
            low, high = studies.numbers(self.config.clip_range, "clip_range")
            return np.geomspace(low, high, self.config.fixed_clips).tolist()
        low, high = studies.discovered_range(adaptive, self.directory, self.better)
        # The names of the norms have two digits; the runs use the rounded norms.
        norms = np.geomspace(low, high, self.config.fixed_clips)
        return [float(f"{clip:.2g}") for clip in norms]

    def best(self, clipping: str, noise_multiplier: float) -> studies.Row:
        """The best level and rate by the average over seeds."""
        rows = [
            row
            for row in self.rows
            if row.clipping == clipping
            and row.noise_multiplier == noise_multiplier
            and row.seed in self._search_seeds
        ]
        return self._best_of(rows)

    def _best_of(self, rows: list[studies.Row]) -> studies.Row:
        averages: dict[tuple, list[float]] = {}
        for row in rows:
            averages.setdefault((row.level, row.rate_factor), []).append(row.summary)
        key = self.better(averages, key=lambda k: np.mean(averages[k]))
        return next(row for row in rows if (row.level, row.rate_factor) == key)

    def average(self, row: studies.Row) -> float:
        """The metric of a row's setting and rate, averaged over seeds."""
        same = [
            other.summary
            for other in self.rows
            if (other.setting, other.rate_factor) == (row.setting, row.rate_factor)
            and other.seed in self._search_seeds
        ]
        return float(np.mean(same))

    def _final(self, noises: list[float]) -> dict[str, Any]:
        """Figure 7: the largest acceptable noise, and both rivals with many seeds."""
        reference = self.average(self.best("adaptive", 0.0))
        chosen = 0.0
        for z in sorted(noises):
            rival = self.better(
                self.average(self.best(kind, z)) for kind in ("adaptive", "fixed")
            )
            loss = studies.relative_loss(reference, rival, self.task.higher_is_better)
            if loss <= studies.ACCEPTABLE_LOSS:
                chosen = z
        median = self._best_of(
            [r for r in self.rows if r.setting == ("adaptive", 0.5, chosen)]
        )
        fixed = self.best("fixed", chosen)
        # Seeds that nothing was chosen by.
        first = self._search_seeds.stop
        seeds = range(first, first + self.config.final_seeds)
        summaries = {}
        for rival in (median, fixed):
            cells = [
                studies.Cell(
                    rival.clipping, rival.level, chosen, rival.rate_factor, seed
                )
                for seed in seeds
            ]
            summaries[rival.clipping] = [self.measure(cell) for cell in cells]
        return {
            "noise_multiplier": chosen,
            "clip": fixed.level,
            "rate_factors": {r.clipping: r.rate_factor for r in (median, fixed)},
            **{
                clipping: {
                    column: studies.bootstrap([getattr(row, column) for row in rows])
                    for column in ("summary", "final")
                }
                for clipping, rows in summaries.items()
            },
        }

    def _report(self, chosen) -> str:
        lines = [
            f"{self.task.title}: {len(self.rows)} runs of {self.base.rounds} rounds.",
            "Fixed clip norms: "
            + (", ".join(f"{c:.3g}" for c in self.clips) or "not run"),
            "",
            f"Best {self.task.metric} by clipping and noise multiplier:",
        ]
        for kind in ("none", "adaptive", "fixed"):
            rows = [row for row in self.rows if row.clipping == kind]
            for z in sorted({row.noise_multiplier for row in rows}):
                row = self.best(kind, z)
                level = "" if kind == "none" else f" at {row.level:g}"
                lines.append(
                    f"  {kind:<9} z={z:<5g} {self.average(row):.4g}{level}, server "
                    f"rate x {row.rate_factor:g}"
                )
        if chosen:
            lines += [
                "",
                f"At noise multiplier {chosen['noise_multiplier']:g}, with "
                f"{self.config.final_seeds} seeds not used before (95% bootstrap "
                f"interval of the mean, evaluated on "
                f"{studies.final_clients(self.base.eval_split)}):",
                f"  adaptive to the median: {_interval(chosen['adaptive']['final'])}",
                f"  fixed clip {chosen['clip']:g}: "
                f"{_interval(chosen['fixed']['final'])}",
            ]
        lines += ["", f"Written to {self.directory}"]
        return "\n".join(lines)


def _interval(found: dict[str, float]) -> str:
    return f"{found['mean']:.4g} ({found['low']:.4g} to {found['high']:.4g})"


def run(config: SweepConfig) -> str:
    """Runs a sweep, or the rest of it; returns the report."""
    sweep = Sweep(config)
    text = sweep.run()
    records.write_atomically(sweep.directory / "report.txt", text + "\n")
    return text


if __name__ == "__main__":
    programs.run_program(__doc__, SweepConfig, run, errors=(ValueError,))
