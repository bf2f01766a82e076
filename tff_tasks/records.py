"""The files of a run: the table of rounds, checkpoints, settings."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pathlib
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

METRICS, CONFIG, REPORT = "metrics.csv", "config.json", "report.txt"

_PACKAGES = ("tfdpclip", "tensorflow", "tensorflow-federated", "keras")
_PACKAGES += ("dp-accounting", "numpy", "scipy", "scikit-learn")


class RunMismatchError(ValueError):
    """The directory holds a run with other settings."""


def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file in one step: it is never seen half written."""
    content = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


class Table:
    """A CSV file with one row for each round, replaced atomically.

    Args:
      path: the file; read if it exists.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            with open(path, encoding="utf-8", newline="") as file:
                self.rows = [
                    {name: _number(text) for name, text in row.items() if text != ""}
                    for row in csv.DictReader(file)
                ]

    def forget_after(self, round_num: int) -> None:
        """Drops the rows of later rounds, which are about to be run again."""
        self.rows = [row for row in self.rows if row["round"] <= round_num]

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row and writes the file."""
        self.rows.append(dict(row))
        self.write()

    def write(self) -> None:
        """Writes the file."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self._path, text.getvalue())


class Checkpoints:
    """The latest two states of a run, each in one file.

    Args:
      directory: where.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory

    def _path(self, round_num: int) -> pathlib.Path:
        return self._directory / f"round_{round_num:06d}.npz"

    def rounds(self) -> list[int]:
        """The rounds after which there is a checkpoint."""
        found = self._directory.glob("round_*.npz")
        return sorted(int(path.stem.split("_")[1]) for path in found)

    def save(self, round_num: int, arrays: Sequence[np.ndarray]) -> None:
        """Saves, and deletes all but the last two."""
        self._directory.mkdir(exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **{f"part_{i:04d}": array for i, array in enumerate(arrays)})
        write_atomically(self._path(round_num), content.getvalue())
        for old in self.rounds()[:-2]:
            self._path(old).unlink()

    def load(self, round_num: int) -> list[np.ndarray]:
        """The arrays of a checkpoint."""
        with np.load(self._path(round_num), allow_pickle=False) as content:
            return [content[name] for name in sorted(content.files)]


def check_same_run(
    directory: pathlib.Path, settings: Mapping[str, Any], free: frozenset[str]
) -> bool:
    """Whether the directory holds this very run, begun before.

    Args:
      directory: the run's.
      settings: of this run.
      free: settings that may differ.

    Raises:
      RunMismatchError: if it holds another.
    """
    path = directory / CONFIG
    if not path.exists():
        return False
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunMismatchError(
            f"output_dir={directory}: {CONFIG} cannot be read ({error}). Use another "
            "directory."
        ) from error
    now = json.loads(to_json(settings))
    for name in sorted(set(now) | set(before)):
        if name not in free and before.get(name) != now.get(name):
            raise RunMismatchError(
                f"output_dir={directory} holds a run with {name}="
                f"{before.get(name)!r}, not {now.get(name)!r}. Continue it with the "
                "settings it has, or use another directory."
            )
    return True


def to_json(content: Any) -> str:
    """JSON, in which "inf" and null stand for infinity and NaN."""
    return json.dumps(_plain(content), indent=2, allow_nan=False) + "\n"


def versions() -> dict[str, str]:
    """The versions of what results may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value
