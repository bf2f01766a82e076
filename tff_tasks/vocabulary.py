"""Vocabularies: the words and tags of Stack Overflow, the characters of Shakespeare."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from driver_kit import json_files
from tff_tasks.client_files import DataFileError

WORD_FILE = "stackoverflow.word_count"
TAG_FILE = "stackoverflow.tag_count"

_CHARACTERS = (
    b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    b"\n\r !\"#$%&'()*,-./:;?@[]_"
)
#: The 86 bytes of Shakespeare's texts, in the order of their codes. (The order is
#: arbitrary: it numbers the rows of an embedding.)
CHARACTERS = bytes(sorted(_CHARACTERS))

#: Pads sequences. Known items have the numbers 1, 2, ...
PAD = 0


@dataclasses.dataclass(frozen=True)
class SequenceIds:
    """The numbers of a vocabulary of a language model.

    0 pads; the items are 1 to `items`; then come a number for all unknown items, the
    beginning and the end of a sequence.

    >>> ids = SequenceIds(86)
    >>> ids.unknown, ids.begin, ids.end, ids.size
    (87, 88, 89, 90)
    """

    items: int

    @property
    def unknown(self) -> int:
        """Stands for all items outside the vocabulary."""
        return self.items + 1

    @property
    def begin(self) -> int:
        """Begins a sequence."""
        return self.items + 2

    @property
    def end(self) -> int:
        """Ends a sequence."""
        return self.items + 3

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.items + 4


def load_words(data_dir: str | pathlib.Path, size: int) -> list[str]:
    """The most frequent words, most frequent first.

    Args:
      data_dir: where `stackoverflow.word_count` is: a line for each word, the word and
        its count, most frequent first.
      size: how many.

    Raises:
      DataFileError: if the file is missing, malformed or too short.
    """
    path = _existing(data_dir, WORD_FILE)
    words: list[str] = []
    last = None
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(words) == size:
                    break
                word, _, count = line.rstrip("\n").rpartition(" ")
                if not word or not count.isdigit():
                    raise DataFileError(
                        f"{path}, line {number}: not a word and a count: {line!r}."
                    )
                if last is not None and int(count) > last:
                    raise DataFileError(
                        f"{path}, line {number}: not sorted, most frequent first."
                    )
                last = int(count)
                words.append(word)
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path} is not a text in UTF-8. Is it packed?") from error
    return _enough(path, words, size, "vocab_size")


def load_tags(data_dir: str | pathlib.Path, size: int) -> list[str]:
    """The most frequent tags, most frequent first; ties in the order of the file.

    Args:
      data_dir: the directory of `stackoverflow.tag_count`, one JSON object, tag to
        count.
      size: how many.

    Raises:
      DataFileError: if the file is missing, malformed or too short.
    """
    path = _existing(data_dir, TAG_FILE)
    try:
        counts = json_files.read_json(path)
        if not isinstance(counts, dict):
            raise ValueError("it is not an object")
        counts = {tag: int(count) for tag, count in counts.items()}
    except (UnicodeDecodeError, ValueError, TypeError) as error:
        raise DataFileError(
            f"{path} is not a JSON object of tags and counts: {error}."
        ) from error
    tags = sorted(counts, key=counts.__getitem__, reverse=True)
    return _enough(path, tags[:size], size, "tag_vocab_size")


def _existing(data_dir: str | pathlib.Path, name: str) -> pathlib.Path:
    path = pathlib.Path(data_dir) / name
    if not path.exists():
        raise DataFileError(
            f"{path} is missing. It is in {name}.tar.bz2, next to "
            "stackoverflow.sqlite.lzma in the public bucket tff-datasets-public."
        )
    if not path.is_file():
        raise DataFileError(f"{path} is no regular file.")
    return path


def _enough(
    path: pathlib.Path, items: Sequence[str], size: int, flag: str
) -> list[str]:
    if len(set(items)) != len(items):
        raise DataFileError(f"{path} names an item twice.")
    if len(items) < size:
        raise DataFileError(
            f"{path} has {len(items)} items, but --{flag}={size}. The whole file has "
            f"more; for this one use --{flag}={len(items)}."
        )
    return list(items)
