"""Speeches of Shakespeare's plays, by the kind of play, and what follows in them."""

from __future__ import annotations

import pathlib
import re

import numpy as np

from driver_kit.settings import UsageError
from keras_examples import text_records

#: Words of a speech that are read, and public buckets that they are hashed to.
WORDS, BUCKETS = 64, 2048
#: Letters and the space, by number.
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
Arrays = tuple[np.ndarray, np.ndarray]
# The characters of a speech, at least.
_SHORTEST = 100
# How the names of the files of histories and tragedies begin; comedies are the rest.
_HISTORIES = ("henry_", "john", "richard_")
_TRAGEDIES = (
    *("antony", "coriolanus", "cymbeline", "hamlet", "julius", "lear", "macbeth"),
    *("othello", "romeo", "timon", "titus", "tragedy", "troilus"),
)


def _speeches(data_dir: str | None) -> list[tuple[str, int]]:
    """Speeches, and whether a comedy (0), a history (1) or a tragedy (2) has them."""
    if data_dir is None:
        raise UsageError(
            "flag --data_dir is missing: it must name a directory with shakespeare in "
            "it, which has plays as .txt files. --tasks=digits needs no files."
        )
    speeches, speakers = text_records.speeches(
        str(pathlib.Path(data_dir) / "shakespeare"), "--data_dir"
    )
    return [
        (
            speech.text,
            1 if speaker.startswith(_HISTORIES) else 2 * speaker.startswith(_TRAGEDIES),
        )
        for speech, speaker in zip(speeches, speakers, strict=True)
        if len(speech.text) >= _SHORTEST
    ]


def _split(x: np.ndarray, y: np.ndarray) -> tuple[Arrays, Arrays]:
    """Training and test records: four fifths, and the rest."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y, test = x[order], y[order], len(x) // 5
    return (x[test:], y[test:]), (x[:test], y[:test])


def kinds(data_dir: str | None, as_bag: bool) -> tuple[Arrays, Arrays]:
    """Speeches as hashed words, and the kind of play, `[n]`.

    Args:
      data_dir: the directory with shakespeare in it.
      as_bag: whether to give 1 for each bucket that has a word, `[n, BUCKETS]`, and not
        the buckets of the words, `[n, WORDS]`.

    Raises:
      UsageError: if there are no plays.
    """
    rows, labels = [], []
    for text, kind in _speeches(data_dir):
        words = " ".join(re.findall("[a-z']+", text.lower()))
        rows.append(text_records.hashed(words, WORDS, BUCKETS))
        labels.append(kind)
    x = np.array(rows)
    if as_bag:
        bags = np.zeros([len(x), BUCKETS], np.float32)
        bags[np.arange(len(x))[:, np.newaxis], x] = 1
        bags[:, 0] = 0  # no word
        x = bags
    return _split(x, np.array(labels, np.int32))


def next_characters(data_dir: str | None, length: int) -> tuple[Arrays, Arrays]:
    """A place of each speech: the characters before it, `[n, length]`, and the next.

    Args:
      data_dir: the directory with shakespeare in it.
      length: how many characters come before.

    Raises:
      UsageError: if there are no plays.
    """
    rng, rows = np.random.default_rng(1), []
    for text, _ in _speeches(data_dir):
        letters = " ".join(re.findall("[a-z]+", text.lower()))
        if len(letters) > length:
            start = rng.integers(len(letters) - length)
            part = letters[start : start + length + 1]
            rows.append([ALPHABET.index(letter) for letter in part])
    array = np.array(rows, np.int32)
    return _split(array[:, :-1], array[:, -1])
