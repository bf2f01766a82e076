"""From rows of users' files to clients and examples of a benchmark."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from driver_kit.settings import UsageError
from tff_tasks.client_files import DataFileError
from tff_tasks.conversion import rows
from tff_tasks.conversion.rows import Meter, Row
from tff_tasks.conversion.targets import Target, ValueProblem


def parse_columns(text: str | None, target: Target) -> dict[str, str]:
    """The column of each feature, from the text of --columns; by default the same name.

    >>> parse_columns("snippets=body", Target("shakespeare_character"))
    {'snippets': 'body'}

    Raises:
      UsageError: for an unknown feature, or a feature without a column.
    """
    columns = {name: name for name in target.features}
    for part in (text or "").split(",") if text else ():
        name, equals, column = part.partition("=")
        if name.strip() not in columns or not equals or not column.strip():
            raise UsageError(
                f"flag --columns={text}: {part!r} is no FEATURE=COLUMN; "
                f"{target.task_name} has the features {', '.join(columns)}: for "
                f"example --columns={next(iter(columns))}=COLUMN."
            )
        columns[name.strip()] = column.strip()
    return columns


def input_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The file, or the files of a folder in sorted order, without hidden ones.

    Raises:
      DataFileError: if there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        problem = "is no regular file" if path.exists() else "is missing"
        raise DataFileError(f"{path} {problem}. --input must name a file or a folder.")
    found = []
    for one in sorted(path.rglob("*")):
        if any(part.startswith(".") for part in one.relative_to(path).parts):
            continue
        if one.is_file():
            found.append(one)
        elif one.is_symlink() or not one.is_dir():
            # Files in a linked folder are not read, and must not be missed silently.
            raise DataFileError(
                f"{one} is no regular file. Take it out of the folder, or put what it "
                "stands for in its place."
            )
    if not found:
        raise DataFileError(f"{path} has no files.")
    return found


@dataclasses.dataclass
class Reader:
    """Reads clients' examples.

    Args:
      target: the benchmark whose examples they must become.
      path: a file, or a folder with files.
      kind: "csv", "jsonl", "npz", "text", "plays", or "auto": by each file's ending.
      client: the column of client ids; None: each file of the folder is a client.
      columns: the column of each feature.
      text_examples: the unit of a plain text that is an example.

    Attributes:
      empty: the files without an example, of those read so far.
      meter: how many bytes were read.
      size: how many there are.
    """

    target: Target
    path: pathlib.Path
    kind: str
    client: str | None
    columns: Mapping[str, str]
    text_examples: str = "lines"

    def __post_init__(self):
        self.meter = Meter()
        self.empty: list[str] = []
        self.files = input_files(self.path)
        self._readers = {path: self._reader(path) for path in self.files}
        self._check_clients()
        self.size = sum(path.stat().st_size for path in self.files)

    def _reader(self, path: pathlib.Path) -> str:
        """Which reader a file needs: "plays", "text", or an ending with a table's."""
        if self.kind in ("plays", "text"):
            kind = self.kind
        elif self.kind != "auto":
            kind = f".{self.kind}"
            if self.kind == "csv" and rows.ending(path) == ".tsv":
                kind = ".tsv"
        else:
            kind = rows.ending(path)
            if kind == ".txt":
                kind = "text"
            elif kind not in rows.READERS:
                raise DataFileError(
                    f"{path} ends in none of {', '.join(rows.READERS)}, .txt. Say "
                    "what it is, for example --format=csv, or take it out of the "
                    "folder."
                )
        if kind in ("plays", "text") and self.target.text_feature() is None:
            raise UsageError(
                f"{path} is a plain text, but examples of {self.target.task_name} "
                f"have {', '.join(self.target.features)}. Use CSV, JSON lines or NPZ."
            )
        return kind

    def _check_clients(self):
        """Every client has a single name, and no two have the same."""
        if self.kind == "plays" and self.client is not None:
            raise UsageError("flag --client: in plays, clients are the speakers.")
        if self.client is None and self.kind != "plays" and self.path.is_file():
            raise UsageError(
                "flag --client is missing: it names the column of client ids in "
                f"{self.path}, for example --client=user. (In a folder without it, "
                "each file is a client.)"
            )
        if self.client is not None and "text" in self._readers.values():
            raise UsageError(
                f"flag --client={self.client}: plain texts have no columns. Without "
                "it each file is a client."
            )
        if self.client is None:
            seen: dict[str, pathlib.Path] = {}
            for path in self.files:
                name = self._file_name(path)
                if name in seen:
                    raise DataFileError(
                        f"{seen[name]} and {path} would both be the client {name!r}. "
                        "Rename one of them, or join them if they are of one client."
                    )
                seen[name] = path

    def _file_name(self, path: pathlib.Path) -> str:
        """A file's name below the folder, without endings."""
        below = path.relative_to(self.path) if path != self.path else path
        name = below.name
        if path.name.lower().endswith(".gz"):
            name = name[: -len(".gz")]
        stem = pathlib.PurePath(name).stem
        if path == self.path:
            return stem
        return (below.parent / stem).as_posix()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Pairs of a client and a serialised example.

        Raises:
          DataFileError: names the file, the line and the column.
        """
        for path in self.files:
            count = 0
            size = path.stat().st_size
            for row in self._rows(path):
                count += 1
                yield self._example(row)
            if not count:
                self.empty.append(str(path))
            self.meter.before += size
            self.meter.here = 0

    def _rows(self, path: pathlib.Path) -> Iterator[Row]:
        kind = self._readers[path]
        if kind == "plays":
            return rows.play_rows(path, self.meter)
        if kind == "text":
            return rows.text_rows(path, self.meter, self.text_examples)
        return rows.READERS[kind](path, self.meter)

    def _example(self, row: Row) -> tuple[str, bytes]:
        kind = self._readers[row.path]
        columns = self.columns
        if kind in ("text", "plays"):
            columns = {str(self.target.text_feature()): rows.TEXT}
        if kind == "plays":
            client = f"{self._file_name(row.path)}/{row.values[rows.SPEAKER]}"
        elif self.client is None:
            client = self._file_name(row.path)
        else:
            client = self._client_of(row, self.client)
        values = {}
        for name, column in columns.items():
            raw, cells = self._raw(row, column)
            try:
                values[name] = self.target.array(name, raw)
            except ValueProblem as problem:
                cell = column if problem.item is None or not cells else None
                cell = cell or cells[problem.item or 0]
                raise DataFileError(
                    f"{_place(row)}, column {cell!r} {problem}."
                ) from problem
        _check_id(client, row)
        return client, self.target.serialize(values)

    def _raw(self, row: Row, column: str) -> tuple[Any, list[str]]:
        """A value, and the columns that it is from if there are several."""
        if column in row.values:
            return row.values[column], []
        first, colon, last = column.partition(":")
        names = list(row.values)
        if colon and first in row.values and last in row.values:
            begin, end = names.index(first), names.index(last)
            cells = names[begin : end + 1]
            if cells:
                return tuple(row.values[name] for name in cells), cells
        feature = next(n for n, c in self.columns.items() if c == column)
        raise DataFileError(
            f"{_place(row)}: there is no column {column!r}; there are {_some(names)}. "
            f"Say which it is: --columns={feature}=COLUMN"
            + (f", or --columns={feature}=FIRST:LAST for several." if names else ".")
        )

    def _client_of(self, row: Row, column: str) -> str:
        if column not in row.values:
            raise DataFileError(
                f"{_place(row)}: there is no column {column!r}; there are "
                f"{_some(list(row.values))}. --client must name one of them."
            )
        client = row.values[column]
        if isinstance(client, int) and not isinstance(client, bool):
            return str(client)
        if isinstance(client, str):
            return client
        raise DataFileError(
            f"{_place(row)}, column {column!r} is {client!r}, but a client id must be "
            "a text or a whole number."
        )


def _check_id(client: str, row: Row) -> None:
    """Refuses an id that may be a second spelling of a client, who would become two."""
    if not client.strip():
        problem = "is empty; every example must have a client"
    elif client != client.strip() or not client.isprintable():
        problem = (
            f"is {client!r}, with spaces around it or characters that cannot be seen: "
            "take them out, or one client may count as two"
        )
    else:
        return
    raise DataFileError(f"{_place(row)}: the client id {problem}.")


def _place(row: Row) -> str:
    by_line = rows.ending(row.path) not in (".npz",)
    return f"{row.path}, {'line' if by_line else 'row'} {row.number}"


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"
