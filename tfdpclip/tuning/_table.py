"""A CSV file of runs that survives interruptions."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpclip import files

#: The columns after the scores: the privacy of the run, and its duration.
PLAN, SECONDS = "plan", "seconds"


def key(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """The settings as written in the file, by which runs are told apart."""
    return [_text(row[name]) for name in columns]


def _text(value: Any) -> str:
    # repr of a float is the shortest text that reads back as the same number.
    return repr(value) if isinstance(value, float) else str(value)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


class Table:
    """Rows of settings and scores, in memory and perhaps in a file.

    Args:
      path: the file, or None.
      columns: names of the settings.
      metric: the score that must be there.

    Raises:
      ValueError: if the file has other columns.
    """

    def __init__(self, path: Any, columns: Sequence[str], metric: str):
        self.columns = list(columns)
        self.path = None if path is None else pathlib.Path(path)
        self._rows: dict[tuple[str, ...], dict[str, Any]] = {}
        self._header: list[str] | None = None
        # The text to write again, and the content of the file as of the last access.
        self._text = ""
        self._content = b""
        if self.path is not None and self.path.exists():
            self._read(self.path, metric)

    def has(self, settings: Mapping[str, Any]) -> bool:
        """Whether a run with these settings is there."""
        return tuple(key(settings, self.columns)) in self._rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        return list(self._rows.values())

    def matching(self, settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows of these settings that are there, in this order."""
        keys = [tuple(key(one, self.columns)) for one in settings]
        return [dict(self._rows[k]) for k in keys if k in self._rows]

    def add(
        self,
        settings: Mapping[str, Any],
        scores: Mapping[str, float],
        plan: str,
        seconds: float,
    ) -> None:
        """Adds a run, and writes it down before anything else happens."""
        taken = {*settings, PLAN, SECONDS} & set(scores)
        if taken:
            raise ValueError(
                f"run returned a score named {min(taken)!r}, which is a column of its "
                "own. Give the score a name of its own."
            )
        row = {**settings, **scores, PLAN: plan, SECONDS: round(seconds, 3)}
        if self._header is None:
            self._header = list(row)
            self._write(self._header)
        if PLAN not in self._header:
            del row[PLAN]  # A file of an earlier version.
        if set(row) != set(self._header):
            raise ValueError(
                f"run returned {sorted(scores)}; earlier runs of this table have the "
                f"columns {self._header}. Return the same scores every time."
            )
        self._write([_text(row[name]) for name in self._header])
        self._rows[tuple(key(settings, self.columns))] = row

    def refuse_other_writers(self) -> None:
        """Raises ValueError if the file is not as this table left it.

        Each search writes all rows that it knows, so a second search on the same file
        would remove rows of runs, which would then not be counted.
        """
        if self.path is None:
            return
        exists = self.path.exists()
        found = files.read_bytes(self.path) if exists else b""
        if found != self._content:
            raise ValueError(
                f"path: {str(self.path)!r} was changed, or removed, while this search "
                "ran, for example by a second search with the same path. Both would "
                "forget runs of each other, and state too small an epsilon. Give each "
                "search a path of its own, and state the privacy of all runs by "
                "dpc.tuning.search_privacy. A run without a row counts, too."
            )

    def _write(self, cells: Sequence[str]) -> None:
        if self.path is None:
            return
        self.refuse_other_writers()
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        if not self._text:
            files.prepare_directory(self.path.parent)
        # All of it: a line appended to a full disk would be half a line.
        text = self._text + line.getvalue()
        files.write_atomically(self.path, text)
        self._text, self._content = text, text.encode()

    def _read(self, path: pathlib.Path, metric: str) -> None:
        try:
            self._content = files.read_bytes(path)
            text = self._content.decode()
            # A half line at the end is what an editor or a copy that broke off left.
            self._text = text[: text.rfind("\n") + 1]
            lines = list(csv.reader(io.StringIO(self._text), strict=True))
        except (ValueError, csv.Error) as error:
            raise ValueError(f"path: {str(path)!r} is damaged: {error}.") from error
        if not lines:
            return
        header, *rows = lines
        if header[: len(self.columns)] != self.columns or metric not in header:
            raise ValueError(
                f"path: {str(path)!r} belongs to another grid: its columns are "
                f"{header}, expected {self.columns} and {metric!r}. Give another path."
            )
        self._header = header
        for cells in rows:
            if len(cells) != len(header):
                raise ValueError(
                    f"path: {str(path)!r} has a row of {len(cells)} cells under "
                    f"{len(header)} columns: {cells}."
                )
            row = {name: _value(cell) for name, cell in zip(header, cells, strict=True)}
            self._rows[tuple(cells[: len(self.columns)])] = row
