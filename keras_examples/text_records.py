"""Texts as private records: read from files, a row of tokens each.

A record is a row: its tokens never share a row with other records. Packing several
records into a row, as language models are usually trained, would make the row the
protected unit, or let a record reach into two rows; here a record that is too long is
cut at a public length, and a short record is padded with weight 0.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from driver_kit.settings import UsageError
from tfdpclip import files

PAD, START, END = range(3)
_FIRST = 3
#: How many tokens there are: bytes, and the three above.
BYTES = 256 + _FIRST
#: The trained parts of `tiny_language`: updates of low rank in the blocks, their second
#: factors alone beside first factors that stay random (FFA-LoRA, Sun et al. 2024), all,
#: the biases of dense layers, or the last layer.
TRAINED = ("lora", "ffa_lora", "full", "bias", "head")
_ENDINGS = (".jsonl", ".csv", ".txt")
_HEADINGS = ("ACT", "SCENE", "PROLOGUE", "EPILOGUE")


@dataclasses.dataclass(frozen=True)
class Record:
    """A person's text, or a sentence, with its label if it has one."""

    text: str
    label: str | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of tokens, one for each record.

    Attributes:
      x: inputs `[n, ...]`: tokens, or the inputs of a KerasHub model.
      y: `[n, T]`: the next tokens; or `[n]`, classes.
      weights: `[n, T]`: 1 for tokens of the record and 0 for padding; None for classes.
    """

    x: np.ndarray | dict[str, np.ndarray]
    y: np.ndarray
    weights: np.ndarray | None

    @property
    def data(self) -> tuple:
        """For `plan.batches`."""
        return (self.x, self.y) if self.weights is None else (*self._all,)

    @property
    def _all(self):
        return self.x, self.y, self.weights


def read(
    names: str, text_field: str = "text", label_field: str | None = None
) -> list[Record]:
    """The records of some files, in order.

    A line of JSON lines or of a CSV file is a record. In a text file a record is a
    paragraph: the text between empty lines, such as a speech of a play.

    Args:
      names: files, or directories of them, separated by commas.
      text_field: the field or column of the text.
      label_field: the field or column of the label; None: there is none.

    Raises:
      UsageError: for files that cannot be read so.
    """
    records = []
    for path in files_of(names):
        text = files.read_bytes(path).decode("utf-8", errors="replace")
        if path.suffix == ".txt":
            if label_field is not None:
                raise UsageError(f"{path}: paragraphs have no labels; use .jsonl.")
            records += [Record(part) for part in paragraphs(text)]
            continue
        parse = _json_lines if path.suffix == ".jsonl" else _csv
        for number, row in enumerate(parse(path, text), 1):
            records.append(
                _record(f"{path}, record {number}", row, text_field, label_field)
            )
    if not records:
        raise UsageError(f"{names}: there is no text in it.")
    return records


def files_of(names: str) -> Iterator[pathlib.Path]:
    """The files of names separated by commas; of a directory, all texts in it."""
    for name in names.split(","):
        path = pathlib.Path(name)
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [p for p in found if p.suffix in _ENDINGS]
        if not found or not all(p.exists() for p in found):
            raise UsageError(
                f"{name}: no such file or directory with {', '.join(_ENDINGS)} in it."
            )
        yield from found


def paragraphs(text: str, least: int = 20) -> Iterator[str]:
    """What stands between empty lines, on one line each; the short ones left out.

    >>> list(paragraphs("Anna.\\nGood morrow to you all,\\nsirs.\\n\\nExit.\\n"))
    ['Anna. Good morrow to you all, sirs.']
    """
    for part in re.split(r"\r?\n\s*\r?\n", text):
        words = " ".join(part.split())
        if len(words) >= least:
            yield words


def _json_lines(path, text) -> Iterator[dict]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise UsageError(f'{path}, line {number}: must be like {{"text": "..."}}.')
        yield row


def _csv(path, text) -> Iterator[dict]:
    del path
    yield from csv.DictReader(io.StringIO(text))


def _record(place, row, text_field, label_field) -> Record:
    for flag, name in (("text_field", text_field), ("label_field", label_field)):
        if name is not None and row.get(name) is None:
            raise UsageError(
                f"{place} has no {name!r}, but {', '.join(map(str, row))}: name the "
                f"field, --{flag}=..."
            )
    label = None if label_field is None else str(row[label_field])
    return Record(str(row[text_field]), label)


def encode(text: str) -> list[int]:
    """The bytes of a text as tokens.

    >>> decode(encode("ä!"))
    'ä!'
    """
    return [byte + _FIRST for byte in text.encode()]


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens; the three that are no bytes are left out."""
    found = bytes(int(t) - _FIRST for t in tokens if t >= _FIRST)
    return found.decode(errors="replace")


def hashed(text: str, words: int, buckets: int) -> np.ndarray:
    """The buckets of the first words, `[words]`; 0 for no word.

    The buckets are public: no vocabulary is made from the records.
    """
    row = np.zeros([words], np.int32)
    found = text.lower().split()[:words]
    row[: len(found)] = [1 + zlib.crc32(w.encode()) % (buckets - 1) for w in found]
    return row


def byte_rows(records: Sequence[Record], length: int) -> Rows:
    """Next-byte prediction: row i is record i, and nothing else.

    Args:
      records: what to make rows of.
      length: T; longer records are cut.

    >>> rows = byte_rows([Record("ab"), Record("cdefg")], 4)
    >>> [decode(row) for row in rows.x], rows.weights.sum(1).tolist()
    (['ab', 'cde'], [3.0, 4.0])
    """
    tokens = np.full([len(records), length + 1], PAD, np.int32)
    for row, record in zip(tokens, records, strict=True):
        own = [START, *encode(record.text)[: length + 1], END][: length + 1]
        row[: len(own)] = own
    y = tokens[:, 1:]
    return Rows(tokens[:, :-1], y, (y != PAD).astype(np.float32))


def classes(records: Sequence[Record], labels: Sequence[str]) -> np.ndarray:
    """Labels as numbers: their places in a public list.

    Raises:
      UsageError: if there is another label.
    """
    place = {label: k for k, label in enumerate(labels)}
    if any(record.label not in place for record in records):
        raise UsageError(
            "flag --labels: the records have another label than "
            f"{', '.join(labels)}. The list is public: it is not taken from the data."
        )
    return np.array([place[record.label] for record in records], np.int32)


def split(records: Sequence[Record], share: float) -> tuple[list[Record], list[Record]]:
    """Training and test records; always the same for the same records."""
    order = np.random.default_rng(0).permutation(len(records))
    test = max(1, round(share * len(records)))
    kept: Callable = lambda places: [records[k] for k in sorted(places)]  # noqa: E731
    return kept(order[test:]), kept(order[:test])


def speaker_of(speech: str) -> str | None:
    """The speaker of a paragraph of a play, if it begins with a name.

    >>> speaker_of("LADY MACBETH. Out, damned spot!"), speaker_of("They fight.")
    ('LADY MACBETH', None)
    """
    found = re.match(r"([A-Z][A-Za-z]*(?: [A-Z][A-Za-z]*){0,2})\. ", speech)
    return found[1] if found and found[1].split()[0] not in _HEADINGS else None


def speeches(names: str, flag: str) -> tuple[list[Record], np.ndarray]:
    """The speeches of plays, and for each its play and speaker.

    Raises:
      UsageError: if there are fewer than ten speakers; it names the flag.
    """
    found, people = [], []
    for path in files_of(names):
        play = read(str(path))
        for record in play:
            who = speaker_of(record.text)
            if who is not None:
                said = record.text[len(who) + 2 :]
                found.append(Record(said))
                people.append(f"{path.stem}: {who.upper()}")
    if len(set(people)) < 10:
        raise UsageError(
            f"flag {flag}: plays, in which a speech is a paragraph that begins with "
            f"its speaker and a full stop; found {len(set(people))} speakers."
        )
    return found, np.array(people)
