"""The files in a search's directory, for resuming it and for other programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from driver_kit import json_files, reports
from driver_kit.settings import UsageError
from keras_examples.problems import Problem
from tfdpclip import files
from tfdpclip.tuning import Grid

#: Tables of the best settings at every clip norm, and at every batch size.
CLIP_NORMS, BATCH_SIZES = "best", "best_batch_sizes"
_SEARCH = "search.json"
_TEXTS = {"clip_norm": ("auto_s",)}  # Beside numbers.
_COLUMNS = (
    *("epochs", "epsilon", "clip_norm", "batch_size"),
    *("learning_rate", "mean", "min", "max", "runs"),
)


@dataclasses.dataclass(frozen=True)
class Results:
    """The results in a directory.

    Attributes:
      name: of data and network.
      size: number of training examples.
      delta: of all budgets.
      clip_norms: a row for each epochs, epsilon and clip norm: the best batch size and
        learning rate, and the mean, least and greatest score of repeats.
      batch_sizes: the same for each batch size, which is a number of examples.
      directory: of the search.
    """

    name: str
    size: int
    delta: float
    clip_norms: list[dict[str, Any]]
    batch_sizes: list[dict[str, Any]]
    directory: pathlib.Path

    def cells(self, epsilon: float) -> dict[tuple[float, int], float]:
        """The mean score by clip norm and batch size, at the best learning rate.

        Of runs at several epochs, those at the most count.

        Args:
          epsilon: the budget.

        Raises:
          UsageError: if the table of this budget is missing or damaged.
        """
        path = grid_path(self.directory, epsilon)
        try:
            header, *lines = _cells(path)
            rows = [dict(zip(header, line, strict=True)) for line in lines]
            epochs = max(float(row.get("epochs", 0)) for row in rows)
            scores: dict[tuple[float, int, float], list[float]] = {}
            for row in rows:
                most = float(row.get("epochs", 0)) == epochs
                if row["clip_norm"] not in _TEXTS["clip_norm"] and most:
                    batch = int(row["batch_size"].replace("full", str(self.size)))
                    place = float(row["clip_norm"]), batch, float(row["learning_rate"])
                    scores.setdefault(place, []).append(float(row["macro_accuracy"]))
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"flag --results: {path} is no table of runs: {error}."
            ) from error
        best: dict[tuple[float, int], float] = {}
        for (clip, batch, _), some in scores.items():
            mean = sum(some) / len(some)
            best[clip, batch] = max(mean, best.get((clip, batch), -math.inf))
        return best


def grid_path(directory: pathlib.Path, epsilon: float) -> pathlib.Path:
    """The table of all runs at a budget."""
    return directory / f"grid_eps_{epsilon:g}.csv"


def begin(
    directory: pathlib.Path,
    problem: Problem,
    delta: float,
    grid: Grid,
    epsilons: Iterable[float],
) -> None:
    """Records a search's data, network and grid; refuses results of other searches.

    Raises:
      UsageError: if the directory has runs on other data or of another network, or at
        settings outside the grid, whose cost its statement would leave out.
    """
    about = {
        "name": problem.name,
        "trained": problem.trained,
        "size": problem.size,
        "delta": delta,
        "data": problem.digest,
    }
    path = directory / _SEARCH
    if path.exists():
        same = _json(path) == about
    else:
        same = not any(directory.glob("grid_eps_*.csv"))
        if same:
            files.write_atomically(path, reports.to_json(about))
    if not same:
        raise UsageError(
            f"flag --output_dir={directory}: it holds runs on other features, images "
            "or networks. What they cost is not what these would. Give another, for "
            "example --output_dir=runs/mine."
        )
    planned = {tuple(map(_text, point.settings().values())) for point in grid}
    for epsilon in epsilons:
        table = grid_path(directory, epsilon)
        if table.exists():
            header, *rows = _cells(table)
            width = len(next(iter(planned)))
            if {
                tuple(row[:width]) for row in rows if len(row) == len(header)
            } - planned:
                raise UsageError(
                    f"flag --output_dir={directory}: {table.name} has runs at settings "
                    "that are not in this grid, and what they cost would be left out. "
                    "Give these settings as well, or another directory, for example "
                    "--output_dir=runs/mine."
                )


def read(name: str) -> Results:
    """The results of a directory that `tune_grid` has written.

    Raises:
      UsageError: if they are not there, or damaged.
    """
    directory = pathlib.Path(name)
    try:
        about = _json(directory / _SEARCH)
        size, delta, title = about["size"], about["delta"], about["name"]
        if type(size) is not int or not isinstance(title, str):
            raise ValueError(f"{_SEARCH} is damaged")
        tables = [
            _rows(directory / f"{table}.csv", size)
            for table in (CLIP_NORMS, BATCH_SIZES)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"flag --results={name}: {error}. It must be the --output_dir of a search "
            "by keras_examples.tune_grid that has ended."
        ) from error
    return Results(title, size, float(delta), *tables, directory)


def _rows(path: pathlib.Path, size: int) -> list[dict[str, Any]]:
    header, *rows = _cells(path)
    if set(_COLUMNS) - set(header) or not rows:
        raise ValueError(f"{path.name} must have rows of {', '.join(_COLUMNS)}")
    found = []
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        cells["batch_size"] = cells["batch_size"].replace("full", str(size))
        found.append({name: _value(name, cells[name]) for name in _COLUMNS})
    return found


def _value(name: str, text: str) -> Any:
    if text in _TEXTS.get(name, ()):
        return text
    value = int(text) if name in ("batch_size", "runs") else float(text)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {text}")
    return value


def _cells(path: pathlib.Path) -> Sequence[list[str]]:
    rows = list(csv.reader(io.StringIO(files.read_bytes(path).decode())))
    if not rows:
        raise UsageError(f"{path} is empty.")
    return rows


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _json(path: pathlib.Path) -> Any:
    try:
        return json_files.read_json(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
