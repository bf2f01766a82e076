"""The files of a run: the table of rounds, checkpoints, settings."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from driver_kit import json_files, npz_files, reports
from tfdpclip import files

if TYPE_CHECKING:
    from tfdpclip.noise.carried import NoiseMemory

METRICS = "metrics.csv"

_CHECKPOINT = re.compile(r"round_(\d{6,})\.npz")

write_atomically = files.write_atomically


class RunMismatchError(ValueError):
    """The directory holds a run with other settings."""


class RunFileError(ValueError):
    """A file of a run is damaged."""


class Table:
    """A CSV file with a row for each round, replaced atomically.

    Args:
      path: the file; read if it exists.

    Raises:
      RunFileError: if it is damaged.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [
                {name: _number(text) for name, text in row.items() if text != ""}
                for row in read_rows(path, "round")
            ]
            rounds = [row.get("round") for row in self.rows]
            if rounds != list(range(len(rounds))):
                raise RunFileError(
                    f"{path} is damaged: its column `round` is not 0, 1, 2, ... "
                    "Delete it with the rest of the directory, or restore it."
                )

    def forget_after(self, round_num: int) -> None:
        """Drops the rows of later rounds, which are about to be run again."""
        self.rows = [row for row in self.rows if row["round"] <= round_num]

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row and writes the file."""
        self.rows.append(dict(row))
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_atomically(self._path, reports.table_text(self.rows))


def read_rows(path: pathlib.Path, column: str) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Args:
      path: the file.
      column: a required column, unless the table is empty.

    Raises:
      RunFileError: if it is no such table, or a row has more or fewer cells than the
        first.
    """
    try:
        text = files.read_bytes(path).decode()
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except (ValueError, csv.Error) as error:
        raise RunFileError(f"{path} is damaged: {error}.") from error
    if not text.endswith("\n"):
        raise RunFileError(f"{path} is cut: it does not end with a whole line.")
    header, *rows = lines
    if column not in header and text != "\n":
        raise RunFileError(f"{path} is damaged: it has no column {column!r}.")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or len(set(header)) != len(header):
            raise RunFileError(
                f"{path}, line {number}: {len(row)} cells under {len(header)} columns."
            )
    return [dict(zip(header, row, strict=True)) for row in rows]


class Checkpoints:
    """The latest two states of a run, each in a file.

    The memory of correlated noise is a secret, in a separate file beside each state,
    which only its owner can read.

    Args:
      directory: of the files.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory

    def _path(self, round_num: int) -> pathlib.Path:
        return self._directory / f"round_{round_num:06d}.npz"

    def rounds(self) -> list[int]:
        """The rounds after which there is a checkpoint."""
        found = map(_CHECKPOINT.fullmatch, self._names())
        return sorted(int(match[1]) for match in found if match)

    def _names(self) -> list[str]:
        return [path.name for path in self._directory.glob("round_*")]

    def _secret(self, round_num: int) -> pathlib.Path:
        return self._directory / f"secret_noise_{round_num:06d}.npz"

    def save(
        self,
        round_num: int,
        arrays: Sequence[np.ndarray],
        memory: NoiseMemory | None = None,
    ) -> None:
        """Saves a state, and deletes all but the last two.

        Args:
          round_num: the last round of the state.
          arrays: the state, without secrets.
          memory: of correlated noise.
        """
        if not self._directory.is_dir():
            files.prepare_directory(self._directory)
        files.remove_leftovers(self._directory)
        if memory is not None:
            memory.save(self._secret(round_num))
        content = io.BytesIO()
        np.savez(content, **{f"part_{i:04d}": array for i, array in enumerate(arrays)})
        write_atomically(self._path(round_num), content.getvalue())
        for old in self.rounds()[:-2]:
            # A file that cannot be deleted now is tried again at the next checkpoint.
            with contextlib.suppress(OSError):
                self._secret(old).unlink(missing_ok=True)
                self._path(old).unlink()

    def memory(self, round_num: int) -> NoiseMemory | None:
        """The memory of correlated noise after a round; None if it is not there.

        Raises:
          RunFileError: if it is damaged, or other users can read it.
        """
        # This import comes late, because it takes seconds.
        from tfdpclip.noise.carried import NoiseMemory

        path = self._secret(round_num)
        if not path.exists():
            return None
        try:
            return NoiseMemory.load(path)
        except ValueError as error:
            raise RunFileError(
                f"{error} Delete {path} to continue with another matrix, which is "
                "counted."
            ) from error

    def load(self, round_num: int, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of a checkpoint.

        Args:
          round_num: of the checkpoint.
          like: arrays of the shapes and types that it must have.

        Raises:
          RunFileError: if it is damaged, or of another network.
        """
        path = self._path(round_num)
        earlier = [str(r) for r in self.rounds() if r < round_num]
        advice = f"Delete it to continue from round {(earlier or ['0'])[-1]}."
        try:
            content = npz_files.read_npz(path)
        except ValueError as error:
            raise RunFileError(f"{error} {advice}") from error
        expected = [f"part_{i:04d}" for i in range(len(like))]
        if sorted(content) != expected:
            raise RunFileError(
                f"{path} has {len(content)} arrays, not the {len(like)} of this run. "
                f"{advice}"
            )
        for name, part in zip(expected, like, strict=True):
            found, part = content[name], np.asarray(part)
            if found.shape != part.shape or found.dtype != part.dtype:
                raise RunFileError(
                    f"{path}: {name} is {found.shape} of {found.dtype}, not "
                    f"{part.shape} of {part.dtype} as in this run. {advice}"
                )
        return [content[name] for name in expected]


def check_same_run(
    directory: pathlib.Path, settings: Mapping[str, Any], free: frozenset[str]
) -> bool:
    """Whether the directory holds this very run, begun before.

    Args:
      directory: the run's.
      settings: of this run.
      free: settings that may differ.

    Raises:
      RunMismatchError: if it holds a different run.
    """
    path = directory / reports.CONFIG
    if not path.exists():
        if (directory / METRICS).exists():
            # Rows of two runs would be mixed.
            raise RunMismatchError(
                f"output_dir={directory} has {METRICS} but no {reports.CONFIG} to say "
                f"what run it is of. Restore {reports.CONFIG}, or use another "
                "directory."
            )
        return False
    try:
        before = dict(json_files.read_json(path)["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunMismatchError(
            f"output_dir={directory}: {reports.CONFIG} cannot be read ({error}). Use "
            "another directory."
        ) from error
    now = json.loads(reports.to_json(settings))
    for name in sorted(set(now) | set(before)):
        if name not in free and before.get(name) != now.get(name):
            raise RunMismatchError(
                f"output_dir={directory} holds a run with {name}="
                f"{before.get(name)!r}, not {now.get(name)!r}. Continue it with the "
                "settings it has, or use another directory."
            )
    return True


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
