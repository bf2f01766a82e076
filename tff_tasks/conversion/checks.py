"""Reads a federated file again, as the benchmarks do, and summarises its contents."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sqlite3
from collections.abc import Callable

import numpy as np

from tff_tasks.client_files import DataFileError, FederatedFile
from tff_tasks.conversion.targets import Target
from tff_tasks.sources import FileSource
from tff_tasks.vocabulary import CHARACTERS

# A share of unknown characters that is worth a word.
_MANY_UNKNOWN = 0.01
_MOST_SHOWN = 5


@dataclasses.dataclass
class SplitSummary:
    """The contents of a split.

    Attributes:
      name: in the file.
      sizes: the number of examples of each client.
      characters: bytes of text.
      unknown: the bytes for which the benchmark has no number.
      ink: the mean of pixels; None if there are none.
    """

    name: str
    sizes: list[int]
    characters: int = 0
    unknown: int = 0
    ink: float | None = None

    def line(self) -> str:
        """A line of the report."""
        sizes = np.array(self.sizes)
        text = f"{self.characters:,} characters, " if self.characters else ""
        return (
            f"{self.name}: {len(sizes):,} clients, {sizes.sum():,} examples, {text}"
            f"{sizes.min()} to {sizes.max():,} examples a client, median "
            f"{np.median(sizes):g}"
        )


@dataclasses.dataclass
class Summary:
    """The contents of a file.

    Attributes:
      splits: by purpose.
      both: clients that are in the training data and in the data for evaluation.
      notices: remarks for the user.
    """

    splits: dict[str, SplitSummary]
    both: list[str]
    notices: list[str]

    def lines(self) -> list[str]:
        """The report."""
        return [split.line() for split in self.splits.values()]


def check_file(
    path: pathlib.Path, target: Target, checked: Callable[[int, int], None]
) -> Summary:
    """Reads every example of a file.

    Args:
      path: the file.
      target: the benchmark that it is for.
      checked: is called with the number of clients that were read, and of all.

    Raises:
      DataFileError: if a benchmark could not read it: no table, column, index or split;
        an example without a feature, of a wrong type or shape or out of range; a client
        whose number of examples differs from the file's, or is 0.
    """
    file = FederatedFile(path)
    try:
        _check_numbers(path)
        sources = {
            purpose: FileSource(file, name, target.features)
            for purpose, name in target.splits.items()
        }
        total = sum(len(source.counts) for source in sources.values())
        done = 0
        found = {}
        for purpose, source in sources.items():
            name = target.splits[purpose]
            found[purpose] = split = SplitSummary(name, list(source.counts.values()))
            pixels = []
            for client in source.client_ids:
                arrays = source.examples(client)
                try:
                    target.check(arrays)
                except DataFileError as error:
                    raise DataFileError(
                        f"{path}: client {client!r} of split {name!r}: {error}"
                    ) from error
                _count_characters(split, target, arrays)
                if "pixels" in arrays:
                    pixels.append(float(arrays["pixels"].mean()))
                done += 1
                checked(done, total)
            split.ink = float(np.mean(pixels)) if pixels else None
    finally:
        file.close()
    training = set(sources["train"].counts)
    others = [set(s.counts) for purpose, s in sources.items() if purpose != "train"]
    both = sorted(training & set().union(*others))
    return Summary(found, both, _notices(target, found, both))


def _check_numbers(path: pathlib.Path) -> None:
    """Every row belongs to a client that the file knows."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            row = connection.execute(
                "SELECT split_name, client_id FROM examples EXCEPT "
                "SELECT split_name, client_id FROM client_metadata LIMIT 1"
            ).fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise DataFileError(f"{path} is damaged: {error}. Get it again.") from error
    if row is not None:
        raise DataFileError(
            f"{path}: client {row[1]!r} has examples in split {row[0]!r}, but "
            "client_metadata does not know it. Convert or get the file again."
        )


def _count_characters(split: SplitSummary, target: Target, arrays) -> None:
    for name, values in arrays.items():
        if values.dtype == object:
            joined = b"".join(values)
            split.characters += len(joined)
            if name == "snippets":
                split.unknown += len(joined.translate(None, CHARACTERS))


def _notices(
    target: Target, found: dict[str, SplitSummary], both: list[str]
) -> list[str]:
    notices = []
    if both:
        notices.append(
            f"{len(both)} clients are in train and in another split ({some(both)}): "
            "models are tested on other examples of clients that they were trained on."
        )
    training = found["train"]
    unknown = sum(split.unknown for split in found.values())
    total = sum(split.characters for split in found.values())
    if unknown > _MANY_UNKNOWN * total:
        notices.append(
            f"{unknown / total:.1%} of the bytes are none of the {len(CHARACTERS)} "
            "characters that shakespeare_character knows; all of them are one symbol "
            "to it."
        )
    if target.task_name == "shakespeare_character" and not total:
        notices.append("No example has a character: is the column the right one?")
    if training.ink is not None and training.ink < 0.5:
        notices.append(
            f"Pixels are {training.ink:.2f} on average, so most are ink, which is 0 in "
            "these files. If 0 is paper in yours: --pixels=ink_1, or ink_255."
        )
    return notices


def some(names: list[str]) -> str:
    """A few of many names.

    >>> some(["a", "b"])
    'a, b'
    """
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"{shown}, ..." if len(names) > _MOST_SHOWN else shown
