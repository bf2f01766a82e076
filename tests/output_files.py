"""Reads a program's --output_dir."""

from __future__ import annotations

import csv
import pathlib


def rows_of(directory: pathlib.Path, name: str) -> list[dict[str, str]]:
    """The rows of a table, by its name without ending."""
    with open(directory / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def words_of(directory: pathlib.Path, name: str = "report.txt") -> str:
    """A report in a single line, so that a search is not broken by wrapped lines."""
    return " ".join((directory / name).read_text().split())
