"""Tables and a figure of runs: how far a way to train is from the best of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from tfdpclip import pictures

Row = Mapping[str, Any]
#: The settings by which a cell of the grid is known.
CELL = ("clip", "optimizer", "learning_rate", "batch_size", "epochs", "decay")
CELL += ("weighted",)
_PLACE = ("task", "epsilon")
_ABOUT = ("half", "kind", "task", "metric", "examples")


def _by(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _scores(rows: Iterable[Row]) -> np.ndarray:
    """The scores of some runs, in the order of their seeds."""
    return np.array([row["score"] for row in sorted(rows, key=lambda r: r["seed"])])


def half_width(scores: Sequence[float], others: Sequence[float] = ()) -> float:
    """Half of a 95 % interval of a mean, or of a difference of means (Welch).

    >>> round(half_width([1.0, 2.0, 3.0]), 2)
    2.48
    >>> half_width([1.0])
    nan
    """
    parts = [np.array(part) for part in (scores, others) if len(part)]
    if any(len(part) < 2 for part in parts):
        return math.nan
    errors = [part.var(ddof=1) / len(part) for part in parts]
    if not sum(errors):
        return 0.0
    freedom = sum(errors) ** 2 / sum(
        error**2 / (len(part) - 1) for error, part in zip(errors, parts, strict=True)
    )
    return float(stats.t.ppf(0.975, freedom) * math.sqrt(sum(errors)))


def fresh_best(cells: Sequence[np.ndarray]) -> float:
    """The score of the best cell in runs that did not choose it.

    The greatest mean of many cells is above what its cell would get again. So for each
    seed, the runs of the other seeds choose the cell.

    Args:
      cells: the scores of each cell, with the same seeds.

    >>> fresh_best([np.array([80.0, 90.0]), np.array([86.0, 84.0])])
    82.0
    """
    scores = np.array(cells)
    if scores.shape[1] < 2:
        return math.nan
    others = (scores.sum(axis=1, keepdims=True) - scores) / (scores.shape[1] - 1)
    return float(np.mean(scores[others.argmax(axis=0), np.arange(scores.shape[1])]))


def gaps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each task and epsilon: the plan against the best cell of the grid.

    Args:
      rows: of runs.
    """
    table = []
    plain = {
        name: part
        for (name, what), part in _by(rows, ("task", "what")).items()
        if what == "plain"
    }
    for (task, epsilon), part in _by(
        [row for row in rows if row["what"] != "plain"], _PLACE
    ).items():
        cells = {
            cell: _scores(runs)
            for cell, runs in _by(
                [row for row in part if row["what"] == "grid"], CELL
            ).items()
        }
        planned = _scores(row for row in part if row["what"] == "plan")
        row = {name: part[0][name] for name in _ABOUT}
        row |= {"epsilon": epsilon, "plain": math.nan, "runs": len(planned)}
        if task in plain:
            row["plain"] = float(_scores(plain[task]).mean())
        if cells:
            best = max(cells, key=lambda cell: cells[cell].mean())
            row["best"] = float(cells[best].mean())
            row["best_cell"] = f"{best[0]}, {best[1]} {best[2]:g}"
            if len({len(scores) for scores in cells.values()}) == 1:
                row["best_fresh"] = fresh_best(list(cells.values()))
        if len(planned):
            row["plan"] = float(planned.mean())
        if cells and len(planned):
            row["gap"] = row["plan"] - row["best"]
            row["half_width"] = half_width(planned, cells[best])
        table.append(row)
    return table


def summary(table: Sequence[Row], name: str = "gap") -> list[dict[str, Any]]:
    """The mean gap of each half of the tasks and each epsilon, and the worst gap.

    The interval is over tasks: it says what further tasks of these kinds would give.

    Args:
      table: rows of `gaps`.
      name: the column of the gap.
    """
    with_gap = [row for row in table if name in row]
    lines = []
    for (half, epsilon), part in sorted(_by(with_gap, ("half", "epsilon")).items()):
        values = [row[name] for row in part]
        worst = min(part, key=lambda row: row[name])
        lines.append(
            {
                "half": half,
                "epsilon": epsilon,
                "tasks": len(part),
                "mean_gap": float(np.mean(values)),
                "half_width": half_width(values),
                "worst": worst[name],
                "worst_task": worst["task"],
            }
        )
    return lines


def fixed_cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each cell of the grid as a rule for all tasks: its gap to the best cell of each.

    Args:
      rows: of runs.
    """
    grid = [row for row in rows if row["what"] == "grid"]
    best: dict[tuple, float] = {}
    means = {}
    for place, part in _by(grid, (*_PLACE, *CELL)).items():
        means[place] = float(_scores(part).mean())
        best[place[:2]] = max(best.get(place[:2], -math.inf), means[place])
    cells: dict[tuple, list[tuple[float, str]]] = {}
    for place, mean in means.items():
        cells.setdefault(place[2:], []).append((mean - best[place[:2]], place[0]))
    table = [
        {
            **dict(zip(CELL, cell, strict=True)),
            "places": len(found),
            "mean_gap": float(np.mean([gap for gap, _ in found])),
            "worst": min(found)[0],
            "worst_task": min(found)[1],
        }
        for cell, found in cells.items()
    ]
    return sorted(table, key=lambda row: -row["mean_gap"])


def durations(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The median seconds of a run of each task, by way to train."""
    table: dict[str, dict[str, Any]] = {}
    for (task, what), part in _by(rows, ("task", "what")).items():
        seconds = float(np.median([row["seconds"] for row in part]))
        table.setdefault(task, {"task": task})[what] = round(seconds, 1)
    return list(table.values())


def markdown(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A table in Markdown.

    Args:
      rows: of the table.
      columns: the headings, by name of the column.

    >>> print(markdown([{"a": 1.25, "b": "x"}, {"a": 3.0}], {"a": "A", "b": "B"}))
    | A | B |
    | --- | --- |
    | 1.2 | x |
    | 3.0 |  |
    """
    lines = [columns.values(), ["---"] * len(columns)]
    lines += [[_cell(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.1f}"
    return str(value)


def page(table: Sequence[Row], rows: Sequence[Row]) -> str:
    """The tables of the page of results, in Markdown.

    Args:
      table: rows of `gaps`.
      rows: of runs.
    """
    halves = {
        "half": "half",
        "epsilon": "epsilon",
        "tasks": "tasks",
        "mean_gap": "mean gap",
        "half_width": "± (95 %, over tasks)",
        "worst": "worst",
        "worst_task": "task of the worst",
    }
    tasks = {
        "half": "half",
        "task": "task",
        "examples": "records",
        "metric": "score, %",
        "epsilon": "epsilon",
        "plain": "without privacy",
        "best": "best of the grid",
        "best_cell": "its settings",
        "best_fresh": "in fresh runs",
        "plan": "the plan",
        "gap": "gap",
        "half_width": "± (95 %, over runs)",
    }
    cells = {
        "clip": "clip",
        "optimizer": "optimizer",
        "learning_rate": "rate",
        "mean_gap": "mean gap",
        "worst": "worst",
        "worst_task": "task of the worst",
    }
    # Rates are not percentages: they keep their digits.
    fixed = [
        {**row, "learning_rate": f"{row['learning_rate']:g}"}
        for row in fixed_cells(rows)
    ]
    whole = [{**row, "epsilon": f"{row['epsilon']:g}"} for row in table]
    short = [{**row, "epsilon": f"{row['epsilon']:g}"} for row in summary(table)]
    parts = [
        "## The plan against the best of the grid",
        markdown(short, halves),
        "## By task",
        markdown(whole, tasks),
        "## One setting for all tasks",
        markdown(fixed, cells),
    ]
    return "\n\n".join(parts) + "\n"


def picture(table: Sequence[Row]) -> Any:
    """A figure of the gaps of `gaps`, a line for each task; None if there are none."""
    shown = [row for row in table if "gap" in row]
    if not shown:
        return None
    names = list(dict.fromkeys(row["task"] for row in shown))
    figure, axes = pictures.new(7.0, 1.6 + 0.24 * len(names))
    ax = axes[0, 0]
    epsilons = sorted({row["epsilon"] for row in shown})
    for k, epsilon in enumerate(epsilons):
        part = [row for row in shown if row["epsilon"] == epsilon]
        shift = 0.22 * (k - (len(epsilons) - 1) / 2)
        widths = [row["half_width"] for row in part]
        ax.errorbar(
            [row["gap"] for row in part],
            [names.index(row["task"]) + shift for row in part],
            xerr=[0.0 if math.isnan(width) else width for width in widths],
            fmt=pictures.MARKERS[k % len(pictures.MARKERS)],
            color=pictures.COLORS[k % len(pictures.COLORS)],
            markersize=4,
            label=f"epsilon {epsilon:g}",
        )
    ax.axvline(0, color=pictures.GREY, linewidth=1)
    half = {row["task"]: row["half"] for row in shown}
    marks = [f"{name}{' *' if half[name] == 'held out' else ''}" for name in names]
    ax.set_yticks(range(len(names)), marks, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("points from the best of the grid (* held out)")
    ax.legend(fontsize=8)
    pictures.title(figure, "Nothing tuned, against the best of a grid")
    return figure
