"""Examples in order from CSV, JSON lines, NPZ and plain text.

CSV, JSON lines and text are read line by line. Arrays of an NPZ file are in memory.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from driver_kit import npz_files
from tfdpclip import files
from tff_tasks.client_files import DataFileError
from tff_tasks.conversion import plays

# A line, or an example of several lines: an unclosed quote must not fill the memory.
_MOST_BYTES = 2**25
_MOST_PLAY = 2**27

#: The column that plain text is in.
TEXT = "text"
#: The column of a play's speakers.
SPEAKER = "speaker"


class Row(NamedTuple):
    """An example.

    Attributes:
      path: its file.
      number: of its line, row or example in the file, from 1.
      values: by column.
    """

    path: pathlib.Path
    number: int
    values: Mapping[str, Any]


@dataclasses.dataclass
class Meter:
    """The number of bytes read: of files before this file, and of this file."""

    before: int = 0
    here: int = 0

    @property
    def done(self) -> int:
        """Of all files."""
        return self.before + self.here


def csv_rows(path: pathlib.Path, meter: Meter) -> Iterator[Row]:
    """The rows of a CSV file (or TSV), whose first line names the columns."""
    current = [0]

    def lines():
        for number, line in _lines(path, meter):
            current[0] = number
            yield line

    tabs = path.name.removesuffix(".gz").endswith(".tsv")
    before = csv.field_size_limit(_MOST_BYTES)
    try:
        reader = csv.reader(lines(), delimiter="\t" if tabs else ",", strict=True)
        header = next(reader, None)
        if not header:
            raise DataFileError(
                f"{path} is empty. Its first line must name the columns."
            )
        for name in header:
            if header.count(name) > 1:
                raise DataFileError(
                    f"{path}, line 1: two columns are called {name!r}. Rename one."
                )
        first = reader.line_num + 1
        for cells in reader:
            if cells:
                if len(cells) != len(header):
                    raise DataFileError(
                        f"{path}, line {first}: {len(cells)} values, but line 1 names "
                        f"{len(header)} columns. Quote values that have the separator "
                        'in them: "so, like this".'
                    )
                yield Row(path, first, dict(zip(header, cells, strict=True)))
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataFileError(
            f"{path}, line {current[0]}: {error}. Is a quote not closed, or not "
            'doubled within quotes ("")?'
        ) from error
    finally:
        csv.field_size_limit(before)


def json_rows(path: pathlib.Path, meter: Meter) -> Iterator[Row]:
    """The objects of a file with one JSON object on each line."""
    for number, line in _lines(path, meter):
        if not line.strip():
            continue
        try:
            found = json.loads(
                line, parse_constant=_no_constant, object_pairs_hook=_no_repeats
            )
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            hint = ""
            if number == 1 and line.lstrip().startswith("["):
                hint = " A list must be taken apart: one object on each line."
            raise DataFileError(
                f"{path}, line {number}: no JSON object: {error}. Each line must be "
                f'one, such as {{"client": "anna", "text": "..."}}.{hint}'
            ) from error
        yield Row(path, number, found)


def npz_rows(path: pathlib.Path, meter: Meter) -> Iterator[Row]:
    """The rows of arrays of equal length."""
    try:
        arrays = npz_files.read_npz(path)
    except ValueError as error:
        raise DataFileError(str(error)) from error
    sizes = {name: len(x) if x.ndim else None for name, x in arrays.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        said = ", ".join(f"{name} {arrays[name].shape}" for name in sizes) or "none"
        raise DataFileError(
            f"{path}: its arrays must have one row for each example, all as many; it "
            f"has {said}. Image sets with x_train, y_train, x_test and y_test are "
            "dealt out: --dealt_to=600."
        )
    count = next(iter(sizes.values())) or 0
    size = path.stat().st_size
    for i in range(count):
        meter.here = size * (i + 1) // count
        values = {
            # Texts and numbers as Python's own, images as arrays.
            name: x[i].item() if x.ndim == 1 else x[i]
            for name, x in arrays.items()
        }
        yield Row(path, i + 1, values)


def text_rows(path: pathlib.Path, meter: Meter, examples: str) -> Iterator[Row]:
    """A text as examples: its "lines", its "paragraphs", or the whole "file".

    Empty examples are left out. Paragraphs end at empty lines.
    """
    parts: list[str] = []
    size, first = 0, 1
    for number, line in _lines(path, meter):
        text = line.rstrip("\r\n")
        ends = examples == "lines" or (examples == "paragraphs" and not text.strip())
        if not parts:
            first = number
        if text.strip() or examples == "file":
            parts.append(text)
            size += len(line)
        if size > _MOST_BYTES:
            raise DataFileError(
                f"{path}, line {first}: an example of more than {_MOST_BYTES} bytes. "
                "Use --text_examples=lines, or insert empty lines and use "
                "--text_examples=paragraphs."
            )
        if ends and parts:
            yield Row(path, first, {TEXT: "\n".join(parts)})
            parts, size = [], 0
    if any(part.strip() for part in parts):
        yield Row(path, first, {TEXT: "\n".join(parts)})


def play_rows(path: pathlib.Path, meter: Meter) -> Iterator[Row]:
    """The speeches of a play. The whole text is in memory: plays are small."""
    try:
        text = files.read_bytes(path, _MOST_PLAY).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _no_text(path, _line_of(error)) from error
    except ValueError as error:
        raise DataFileError(str(error)) from error
    meter.here = path.stat().st_size
    for i, (speaker, speech) in enumerate(plays.speeches(text), 1):
        yield Row(path, i, {SPEAKER: speaker, TEXT: speech})


#: Readers of tables by the ending of a file's name, before .gz.
READERS: dict[str, Callable[[pathlib.Path, Meter], Iterator[Row]]] = {
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".npz": npz_rows,
}


def ending(path: pathlib.Path) -> str:
    """The ending of a file's name, before .gz, in small letters.

    >>> ending(pathlib.Path("posts.JSONL.gz"))
    '.jsonl'
    """
    name = path.name.lower()
    return pathlib.PurePath(name.removesuffix(".gz")).suffix


def _lines(path: pathlib.Path, meter: Meter) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends, from UTF-8."""
    try:
        with open(path, "rb") as raw:
            packed = path.name.lower().endswith(".gz")
            file: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw
            number = 0
            while line := file.readline(_MOST_BYTES + 1):
                number += 1
                if len(line) > _MOST_BYTES:
                    raise DataFileError(
                        f"{path}, line {number} has more than {_MOST_BYTES} bytes. Is "
                        "this the right format?"
                    )
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if number % 256 == 1:
                    meter.here = raw.tell()
                try:
                    yield number, line.decode()
                except UnicodeDecodeError as error:
                    raise _no_text(path, number) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataFileError(
            f"{path} is cut or damaged: {error}. Get it again."
        ) from error


def _no_text(path: pathlib.Path, line: int) -> DataFileError:
    return DataFileError(
        f"{path}, line {line}: not in UTF-8. Convert it, for example: iconv -f "
        f"latin1 -t utf-8 {path.name} > new; or is it packed?"
    )


def _line_of(error: UnicodeDecodeError) -> int:
    return error.object[: error.start].count(b"\n") + 1


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found
