"""Grids over clip norm, batch size and learning rate, run by run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpclip import _arguments, _progress, files
from tfdpclip.accounting import Ledger
from tfdpclip.tuning import _table
from tfdpclip.tuning.grid_result import GridResult
from tfdpclip.tuning.search_privacy import (
    RandomStopping,
    SearchStatement,
    TrainingPlan,
    check_search,
    check_spent,
    not_accounted,
    search_privacy,
)

_INTERRUPTED = (
    "nothing is released of a run that was interrupted, and made again: a run counts "
    "when its row is written"
)
_UNWRITTEN = (
    "{} runs in the file were made without a plan, or by an earlier version: their "
    "noise and steps are as plan states"
)


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """The settings of one run.

    Attributes:
      clip_norm: a clip norm, or the name of a rule (such as "automatic").
      batch_size: expected batch size, or "full".
      learning_rate: learning rate.
      seed: the seed of the repeat. For a private run it must not seed the noise.
      others: further settings, by name.
    """

    clip_norm: float | str
    batch_size: int | str
    learning_rate: float
    seed: int
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """All settings by name: the first columns of the table of results."""
        return {
            "clip_norm": self.clip_norm,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            **self.others,
            "seed": self.seed,
        }


@dataclasses.dataclass(frozen=True)
class Grid:
    """The settings to try: every combination of the values.

    Args:
      clip_norms: clip norms above 0, or names of rules.
      batch_sizes: expected batch sizes, or "full".
      learning_rates: learning rates above 0; `geometric` makes some.
      seeds: one run for each, to see how much results vary.
      others: further settings: a name and its values (numbers or text).

    Raises:
      ValueError: if values are missing, repeated or out of range.

    >>> len(Grid([0.1, 1.0], [256, "full"], geometric(0.001, 0.02, 8), seeds=range(5)))
    160
    """

    clip_norms: Sequence[float | str]
    batch_sizes: Sequence[int | str]
    learning_rates: Sequence[float]
    seeds: Sequence[int] = (0,)
    others: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        checks = {
            "clip_norms": _positive_or_name,
            "batch_sizes": _size,
            "learning_rates": _arguments.positive,
            "seeds": _arguments.integer,
        }
        for name, check in checks.items():
            object.__setattr__(self, name, _values(name, getattr(self, name), check))
        wanted = "a dictionary of a name and its values"
        _arguments.instance("others", self.others, Mapping, wanted)
        others = {
            name: _values(f"others[{name!r}]", values, _plain)
            for name, values in dict(self.others).items()
        }
        taken = {"clip_norm", "batch_size", "learning_rate", "seed", "draw"}
        taken |= {_table.PLAN, _table.SECONDS}
        for name in others:
            if not isinstance(name, str) or name in taken:
                raise ValueError(f"others: {name!r} cannot be the name of a setting.")
        object.__setattr__(self, "others", others)

    def __len__(self) -> int:
        sizes = [self.clip_norms, self.batch_sizes, self.learning_rates, self.seeds]
        return math.prod(len(v) for v in [*sizes, *self.others.values()])

    def __iter__(self) -> Iterator[GridPoint]:
        names = list(self.others)
        for seed in self.seeds:
            for clip, size, rate, rest in itertools.product(
                self.clip_norms,
                self.batch_sizes,
                self.learning_rates,
                tuple(itertools.product(*(self.others[name] for name in names))),
            ):
                others = dict(zip(names, rest, strict=True))
                yield GridPoint(clip, size, rate, seed, others)


def geometric(lowest: float, highest: float, count: int) -> tuple[float, ...]:
    """Returns `count` values from `lowest` to `highest` at equal ratios.

    >>> [round(rate, 4) for rate in geometric(0.001, 0.02, 4)]
    [0.001, 0.0027, 0.0074, 0.02]
    """
    lowest = _arguments.positive("lowest", lowest)
    highest = _arguments.positive("highest", highest)
    count = _arguments.integer("count", count, 1, 10**6)
    if highest < lowest or (count == 1 and highest != lowest):
        raise ValueError(
            f"highest must be above lowest, and count above 1; got {lowest!r}, "
            f"{highest!r}, {count!r}."
        )
    return tuple(float(v) for v in np.geomspace(lowest, highest, count))


def run_grid(
    grid: Grid,
    run: Callable[[GridPoint], float | Mapping[str, float]],
    *,
    path: Any = None,
    metric: str = "score",
    maximize: bool = True,
    plan: Callable[[GridPoint], TrainingPlan] | None = None,
    delta: float | None = None,
    search: RandomStopping | None = None,
    max_runs: int | None = None,
    progress: Callable[[str], None] | None = None,
    spent: Ledger | None = None,
) -> GridResult:
    """Runs a grid, or the missing part of a grid.

    With `path`, the row of a run is written when it ends, with the privacy that `plan`
    states, and runs with a row in the file are skipped: call the function again after
    an interruption. A row counts with the privacy of its run, so a changed `plan` is
    refused. One search at a time writes a file.

    *Formal guarantees*: see `search_privacy`, if `plan` is true for each run and runs
    draw fresh noise. Without `plan` the result states that the search was not private.
    The file holds the results of all runs: with `search` it must not be released, and
    only the best run may be.

    Args:
      grid: the settings to try.
      run: ``run(point)`` trains and returns the score, or several by name. Runs that
        diverge may return NaN, which counts as the worst.
      path: a CSV file to write and to continue from. Runs of earlier grids in the file
        count in the statement, too.
      metric: the name of a score that is a single number, and the score to compare by.
      maximize: whether more is better.
      plan: ``plan(point)`` returns the privacy of the run at that point: its sampling,
        noise multiplier and steps. None if the search need not be private.
      delta: for the privacy statement; required with `plan`.
      search: draws the runs at random, with replacement, and their number, too; needs
        `plan`. The draws are kept next to `path`, so that an interrupted search
        continues with the same draws. Each draw must train anew, also for equal seeds.
      max_runs: stop after this many new runs.
      progress: called with a line of text after every run, in place of a bar.
      spent: the ledger of earlier training on the same records, if any: of a network
        with features that the runs train on, for example. Needs `plan`.

    Returns:
      The results so far, with the statement.

    Raises:
      ValueError: if the file belongs to a different grid, has runs of a different
        plan, or was changed by a second search; or arguments do not fit.

    >>> result = run_grid(Grid([0.1, 1.0], [64], [0.5], seeds=(0, 1)),
    ...                   lambda point: point.clip_norm + 0.1 * point.seed)
    >>> best = result.best()
    >>> best["clip_norm"], round(best["mean"], 3), round(best["max"], 3)
    (1.0, 1.05, 1.1)
    """
    max_runs = _check_run_arguments(
        grid, run, metric, maximize, plan, delta, search, max_runs, progress, spent
    )
    points = list(grid)
    draws = None
    if search is not None:
        if len(grid.seeds) != 1:
            raise ValueError(
                "seeds: with search every run is drawn at random; give one seed."
            )
        draws = _draws(points, search, path)
        points = [points[i] for i in draws]
    table = _table.Table(path, _columns(grid, draws), metric)
    if plan is not None:
        _refuse_other_plans(table, grid, points, plan)
    settings = [_settings_of(point, draws, k) for k, point in enumerate(points)]
    _run_missing(points, settings, table, run, metric, plan, max_runs, progress)
    rows = table.matching(settings)
    return GridResult(
        rows=tuple(rows),
        settings=tuple(_columns(grid, None)[:-1]),
        metric=metric,
        maximize=maximize,
        planned=len(points),
        only_best=search is not None,
        _statement=_state_privacy(
            grid, points, rows, table, plan, delta, search, spent
        ),
    )


def _check_run_arguments(
    grid, run, metric, maximize, plan, delta, search, max_runs, progress, spent
) -> int | None:
    """Raises ValueError unless the arguments of `run_grid` fit; returns `max_runs`."""
    _arguments.instance("grid", grid, Grid, "a dpc.tuning.Grid")
    _arguments.function("run", run, 1)
    _arguments.text("metric", metric)
    _arguments.boolean("maximize", maximize)
    _arguments.optional(_arguments.function, "plan", plan, 1)
    _arguments.optional(_arguments.function, "progress", progress, 1)
    check_search(search)
    check_spent(spent)
    for name, option in (("spent", spent), ("search", search)):
        if option is not None and plan is None:
            raise ValueError(f"plan is required with {name}, which counts its cost.")
    if plan is not None and delta is None:
        raise ValueError("delta is required with plan, for example delta=1e-5.")
    if delta is not None:
        _arguments.delta(delta)
    return _arguments.optional(_arguments.integer, "max_runs", max_runs)


def _settings_of(point: GridPoint, draws, number: int) -> dict[str, Any]:
    """The settings of a run, with the number of its draw in a random search."""
    settings = point.settings()
    return settings if draws is None else {**settings, "draw": number}


def _run_missing(
    points, all_settings, table, run, metric, plan, max_runs, progress
) -> None:
    """Runs the points without a row in the table, and adds their rows."""
    new = 0
    numbered = enumerate(points)
    if progress is None:
        count = len(points)
        numbered = _progress.bar(numbered, title="search", unit="run", total=count)
    for number, point in numbered:
        settings = all_settings[number]
        if table.has(settings):
            continue
        if max_runs is not None and new >= max_runs:
            break
        table.refuse_other_writers()
        started = time.monotonic()
        found = run(point)
        scores = dict(found) if isinstance(found, Mapping) else {metric: found}
        if metric not in scores:
            raise ValueError(
                f"metric: run returned {', '.join(map(repr, scores))}, but no "
                f"{metric!r}."
            )
        scores = {name: float(value) for name, value in scores.items()}
        planned = "" if plan is None else _in_words(plan(point))
        table.add(settings, scores, planned, time.monotonic() - started)
        new += 1
        if progress is not None:
            shown = ", ".join(f"{k}={v}" for k, v in settings.items())
            progress(f"{number + 1} of {len(points)}: {shown}: {scores[metric]:.6g}")


def _in_words(plan: Any) -> str:
    """The privacy of a run, for its row; none for a ledger, which keeps its own."""
    if not isinstance(plan, TrainingPlan):
        return ""
    return (
        f"{plan.sampling.describe()}; noise multiplier {plan.noise_multiplier:.6g}; "
        f"{plan.steps} steps; unit {plan.unit}"
    )


def _refuse_other_plans(table, grid, points, plan) -> None:
    """Raises ValueError if a run in the file was planned otherwise than now."""
    for row in table.rows:
        written = row.get(_table.PLAN)
        if not written:
            continue
        planned = _in_words(plan(_point_of(row, grid, points)))
        if planned and planned != written:
            settings = ", ".join(f"{name}={row[name]}" for name in table.columns)
            raise ValueError(
                f"plan: the file has a run of {settings} with the plan ({written}), "
                f"and plan now states ({planned}). A run costs the privacy that it "
                "had. Give the plan of the runs in the file, or a new path; for both "
                "together, dpc.tuning.search_privacy with a plan for each run."
            )


def _state_privacy(
    grid, points, rows, table, plan, delta, search, spent
) -> SearchStatement:
    """The privacy statement of the rows so far."""
    if plan is None or delta is None:
        return not_accounted()
    if search is not None:
        statement = search_privacy([plan(p) for p in grid], delta, search, spent)
        statement = _with_file(statement, table)
        if len(rows) < len(points):
            missing = "runs that were drawn are missing: finish the search first"
            statement = dataclasses.replace(
                statement, not_private=(*statement.not_private, missing)
            )
        return statement
    # All that ran, also of earlier grids in the same file.
    done = [_point_of(row, grid, points) for row in table.rows]
    statement = search_privacy([plan(p) for p in done or points], delta, spent=spent)
    return _with_file(statement, table)


def _with_file(statement: SearchStatement, table) -> SearchStatement:
    """The statement, with the assumptions about runs in a file."""
    if table.path is None:
        return statement
    assumptions = [*statement.assumptions, _INTERRUPTED]
    unwritten = sum(not row.get(_table.PLAN) for row in table.rows)
    if unwritten:
        assumptions.append(_UNWRITTEN.format(unwritten))
    return dataclasses.replace(statement, assumptions=tuple(assumptions))


def _point_of(row: Mapping[str, Any], grid: Grid, points) -> GridPoint:
    """The settings of a run in the table."""
    columns = _columns(grid, None)
    for point in points:
        if _table.key(point.settings(), columns) == _table.key(row, columns):
            return point
    others = {name: row[name] for name in grid.others}
    return GridPoint(
        row["clip_norm"], row["batch_size"], row["learning_rate"], row["seed"], others
    )


def _columns(grid: Grid, draws) -> list[str]:
    columns = ["clip_norm", "batch_size", "learning_rate", *grid.others, "seed"]
    return columns if draws is None else [*columns, "draw"]


def _draws(points, search, path) -> list[int]:
    """Draws the runs' points, or reads them from a file: they must not change."""
    kept = None if path is None else pathlib.Path(f"{path}.draws.json")
    about = {
        "mean": search.mean,
        "shape": "1.0",  # Of geometric draws, as earlier versions wrote it.
        "points": [p.settings() for p in points],
    }
    about = json.loads(json.dumps(about))
    if kept is not None and kept.exists():
        return _draws_in(kept, about)
    if path is not None and pathlib.Path(path).exists():
        raise ValueError(
            f"path: {str(path)!r} has results of runs that were not drawn at random. "
            "Give a new path."
        )
    rng = np.random.default_rng()  # entropy of the operating system
    draws = [int(i) for i in rng.integers(len(points), size=search.draw(rng))]
    if kept is not None:
        files.prepare_directory(kept.parent)
        files.write_atomically(kept, json.dumps({"search": about, "draws": draws}))
    return draws


def _draws_in(path: pathlib.Path, about: dict[str, Any]) -> list[int]:
    """The draws of this search; ValueError for a damaged file, or another search."""
    try:
        written = json.loads(files.read_bytes(path))
        search, draws = written["search"], written["draws"]
    except (KeyError, RecursionError, TypeError, ValueError):
        search, draws = about, None
    if search != about:
        raise ValueError(
            f"search: {str(path)!r} holds the draws of a different search. Give "
            "a new path."
        )
    points = range(len(about["points"]))
    if not isinstance(draws, list) or not all(
        type(i) is int and i in points for i in draws
    ):
        raise ValueError(
            f"path: {str(path)!r} is damaged. Restore it, since new draws would not be "
            "the search of the accounting. Or give a new path."
        )
    return draws


def _values(name, values, check) -> tuple:
    if isinstance(values, (str, bytes)) or _arguments.real(values) is not None:
        values = [values]
    found = tuple(check(name, value) for value in _arguments.items(name, values))
    if not found:
        raise ValueError(f"{name} must not be empty.")
    if len(set(found)) < len(found):
        raise ValueError(f"{name} has a value twice: {found}.")
    return found


def _positive_or_name(name, value):
    return value if _is_name(value) else _arguments.positive(name, value)


def _size(name, value):
    return (
        value
        if _is_name(value) and value == "full"
        else _arguments.integer(name, value, 1)
    )


def _plain(name, value):
    if _is_name(value) or isinstance(value, bool):
        return value
    return _arguments.finite(name, value)


def _is_name(value) -> bool:
    return isinstance(value, str) and bool(value) and value == value.strip()
