r"""Measures what the settings of the plan lose against the best of a grid.

    python -m keras_examples.nothing_to_tune --data_dir=DIR
    python -m keras_examples.nothing_to_tune --tasks=digits,table_7 --seeds=1

Two dozen tasks (images, tables, texts, series, LoRA, fixed features) are trained
without privacy, with every clip, optimizer and rate of a grid, and by the plan, which
gets epsilon, delta and the number of records only. The plan's rule is chosen on half of
the tasks; the other half is held out. The measurements are kept in
OUTPUT_DIR/trials.jsonl, and a run that was stopped goes on; changed settings of the
plan are measured anew. Tasks of images and plays need --data_dir, with mnist,
fashion_mnist and shakespeare in it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from driver_kit import kept, programs, progress, settings
from driver_kit.lazy import tf
from keras_examples import tuning_runs, tuning_tables, tuning_tasks
from keras_examples.tuning_runs import Cell

WAYS = ("plain", "grid", "plan")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    tasks: tuple[str, ...] = settings.choices(
        tuning_tasks.TASKS, tuning_tasks.TASKS, "Which tasks."
    )
    data_dir: str | None = settings.words(
        None, "Directory with mnist, fashion_mnist and shakespeare in it."
    )
    what: tuple[str, ...] = settings.choices(WAYS, WAYS, "Which ways to train.")
    epsilons: tuple[float, ...] = settings.numbers(
        (1.0, 3.0, 8.0), "Privacy budgets.", above=0
    )
    seeds: int = settings.count(3, "Runs of each kind.")
    clips: tuple[str, ...] = settings.choices(
        ("default", "fixed 0.3", "fixed 3", "quantile 0.95"),
        tuple(tuning_runs.CLIPS),
        "Clip rules of the grid.",
    )
    momentum_rates: tuple[float, ...] = settings.numbers(
        (0.05, 0.25, 1.0), "Rates of the grid, momentum 0.9.", above=0
    )
    adam_rates: tuple[float, ...] = settings.numbers(
        (0.003, 0.015), "Rates of the grid, Adam.", above=0
    )
    batch_size: int = settings.count(300, "Of the grid.")
    epochs: int = settings.count(15, "Of the grid.")
    decay: str = settings.choice(
        "constant", tuning_runs.DECAYS, "The course of the rates of the grid."
    )
    weighted: bool = settings.switch(
        False, "Whether the grid gives weights to the classes of unequal tasks."
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("nothing_to_tune")

    @property
    def cells(self) -> list[Cell]:
        """The cells of the grid."""
        found = tuning_runs.grid(
            self.clips,
            self.momentum_rates,
            self.adam_rates,
            batch_size=self.batch_size,
            epochs=self.epochs,
            decay=self.decay,
            weighted=self.weighted,
        )
        return list(found)

    @property
    def runs(self) -> int:
        """The number of runs of all tasks, measured before or not."""
        private = len(self.cells) * ("grid" in self.what) + ("plan" in self.what)
        each = len(self.epsilons) * private + ("plain" in self.what)
        return len(self.tasks) * self.seeds * each


class Study:
    """The measurements, kept in a file."""

    def __init__(self, used: Settings):
        self.used = used
        path = pathlib.Path(used.output_dir) / "trials.jsonl"
        # A place names all settings of its run, so that the file may hold many grids.
        self.trials = kept.Kept(path, {"delta": tuning_runs.DELTA})

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each run, measured now or before."""
        for name in self.used.tasks:
            task = tuning_tasks.load(name, self.used.data_dir)
            about = {
                "half": tuning_tasks.half_of(name),
                "kind": task.kind,
                "task": name,
                "metric": task.metric,
                "examples": task.examples,
            }
            for way in WAYS:
                if way in self.used.what:
                    for row in getattr(self, f"_{way}")(task):
                        yield {**about, "what": way, **row}
            tf.keras.backend.clear_session()

    def _run(self, task, place: list, train) -> dict[str, Any]:
        """The result of a run, measured or known, of the task as it is now."""
        place = [task.name, task.signature, *place]
        return self.trials.get(place, lambda: dataclasses.asdict(train()))

    def _plain(self, task) -> Iterator[dict[str, Any]]:
        for seed in range(self.used.seeds):
            train = functools.partial(tuning_runs.train_plainly, task, seed)
            yield {"seed": seed, **self._run(task, ["plain", seed], train)}

    def _grid(self, task) -> Iterator[dict[str, Any]]:
        def traced(cell: Cell) -> Cell:
            return dataclasses.replace(cell, learning_rate=1.0)

        for epsilon in self.used.epsilons:
            for shared, cells in itertools.groupby(self.used.cells, traced):
                trainer = functools.partial(tuning_runs.Trainer, task, epsilon, shared)
                # Made for the first run that is not known.
                trainer = functools.cache(trainer)
                for cell, seed in itertools.product(cells, range(self.used.seeds)):
                    fields = dataclasses.asdict(cell)
                    place = ["grid", epsilon, *fields.values(), seed]
                    train = functools.partial(_trained, trainer, cell, seed)
                    run = self._run(task, place, train)
                    yield {"epsilon": epsilon, **fields, "seed": seed, **run}

    def _plan(self, task) -> Iterator[dict[str, Any]]:
        for epsilon in self.used.epsilons:
            chosen = tuning_runs.plan_settings(task, epsilon)
            for seed in range(self.used.seeds):
                place = ["plan", epsilon, *chosen.items(), seed]
                train = functools.partial(
                    tuning_runs.train_by_plan, task, epsilon, seed
                )
                run = self._run(task, place, train)
                yield {"epsilon": epsilon, **chosen, "seed": seed, **run}


def _trained(trainer, cell: Cell, seed: int) -> tuning_runs.Run:
    return trainer().run(seed, cell.learning_rate)


def run(used: Settings) -> programs.Outcome:
    """Measures what is not measured yet, and reports."""
    bar = progress.Progress("measuring", used.runs, unit="run")
    rows = []
    for row in Study(used).rows():
        rows.append(row)
        bar.show(len(rows), [f"{row['task']}, {row['what']}: {row['score']:.1f}"])
    bar.close()
    gaps = tuning_tables.gaps(rows)
    halves = tuning_tables.summary(gaps)
    figure = tuning_tables.picture(gaps)
    return programs.Outcome(
        title="Nothing to tune: the plan against the best of a grid",
        findings=[_finding(line) for line in halves]
        or ["No gaps: they need --what=grid,plan."],
        privacy="every private run is "
        f"({', '.join(f'{e:g}' for e in used.epsilons)}; {tuning_runs.DELTA:g})-"
        "differentially private by itself. The comparison of all runs is not accounted "
        "for; the data are public or made.",
        caveats=[
            "The best of the grid is the greatest mean of "
            f"{len(used.cells)} cells by the test records, which flatters it; "
            "best_fresh is its score in runs that did not choose it.",
            "half_width: half of a 95 % interval (t): of a task over runs (Welch), of "
            "a half of the tasks over tasks.",
            "R2 below 0 counts as 0.",
        ],
        tables={
            "summary": halves,
            "gaps": gaps,
            "fixed_cells": tuning_tables.fixed_cells(rows),
            "seconds": tuning_tables.durations(rows),
            "runs": rows,
        },
        figures={} if figure is None else {"gaps": figure},
        texts={"tables.md": tuning_tables.page(gaps, rows)},
        shown=("summary", "gaps", "seconds"),
    )


def _finding(line: dict[str, Any]) -> str:
    return (
        f"{line['half']}, epsilon {line['epsilon']:g}, {line['tasks']} tasks: mean gap "
        f"{line['mean_gap']:+.2f} ± {line['half_width']:.2f} points, worst "
        f"{line['worst']:+.2f} ({line['worst_task']})."
    )


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
