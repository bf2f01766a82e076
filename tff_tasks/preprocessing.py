"""From raw features to the models' inputs, in NumPy.

Nothing here depends on the machine that trains: a client's arrays are made before they
are shipped. (TensorFlow's lookup tables would have to be shipped along.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from tff_tasks.vocabulary import CHARACTERS, PAD, SequenceIds


def crop(
    images: np.ndarray, size: int, rng: np.random.Generator | None = None
) -> np.ndarray:
    """Square parts of images `[n, h, w, c]`: the centre, or anywhere if `rng` is given.

    With `rng`, every second image, at random, is also flipped from left to right.
    """
    count, height, width, _ = images.shape
    if rng is None:
        top, left = (height - size) // 2, (width - size) // 2
        return images[:, top : top + size, left : left + size]
    tops = rng.integers(height - size + 1, size=count)
    lefts = rng.integers(width - size + 1, size=count)
    rows = tops[:, None] + np.arange(size)
    columns = lefts[:, None] + np.arange(size)
    flipped = rng.random(count) < 0.5
    columns[flipped] = columns[flipped, ::-1]
    places = np.arange(count)[:, None, None]
    return images[places, rows[:, :, None], columns[:, None, :]]


def standardize(images: np.ndarray) -> np.ndarray:
    """Images `[n, ...]` with mean 0 and deviation 1, each by itself, in float32.

    The deviation is taken to be at least 1 / sqrt(pixels), so that an image of one
    colour becomes zeros.
    """
    images = images.astype(np.float32)
    axes = tuple(range(1, images.ndim))
    mean = images.mean(axes, keepdims=True)
    stddev = images.std(axes, keepdims=True)
    floor = 1 / np.sqrt(np.prod(images.shape[1:]))
    return (images - mean) / np.maximum(stddev, floor)


@functools.lru_cache(maxsize=1)
def _character_numbers() -> np.ndarray:
    ids = SequenceIds(len(CHARACTERS))
    numbers = np.full(256, ids.unknown, np.int32)
    numbers[np.frombuffer(CHARACTERS, np.uint8)] = np.arange(1, ids.items + 1)
    return numbers


def character_chunks(snippets: Sequence[bytes], length: int) -> np.ndarray:
    """Snippets as chunks of `length + 1` character numbers, `[chunks, length + 1]`.

    Each snippet gets a beginning and an end, is padded with 0 to a whole number of
    chunks and cut into them. Chunks do not overlap, and none mixes two snippets.
    """
    ids = SequenceIds(len(CHARACTERS))
    numbers = _character_numbers()
    width = length + 1
    chunks = []
    for snippet in snippets:
        used = len(snippet) + 2
        row = np.full(-(-used // width) * width, PAD, np.int32)
        row[0] = ids.begin
        row[1 : used - 1] = numbers[np.frombuffer(snippet, np.uint8)]
        row[used - 1] = ids.end
        chunks.append(row.reshape(-1, width))
    return np.concatenate(chunks) if chunks else np.zeros((0, width), np.int32)


def word_numbers(words: Sequence[str]) -> dict[bytes, int]:
    """The number of each word, from 1."""
    return {word.encode(): number for number, word in enumerate(words, 1)}


def sentence_numbers(
    sentences: Sequence[bytes], numbers: Mapping[bytes, int], length: int
) -> np.ndarray:
    """Sentences as rows of word numbers, `[n, length + 1]`.

    The first `length` words, separated by single spaces; a beginning before them; after
    fewer than `length` words an end; then padding.
    """
    ids = SequenceIds(len(numbers))
    rows = np.full((len(sentences), length + 1), PAD, np.int32)
    rows[:, 0] = ids.begin
    for row, sentence in zip(rows, sentences, strict=True):
        words = sentence.split(b" ")[:length]
        row[1 : len(words) + 1] = [numbers.get(word, ids.unknown) for word in words]
        if len(words) < length:
            row[len(words) + 1] = ids.end
    return rows


def next_item_pairs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All but the last item of each row, and all but the first, to be predicted."""
    return rows[:, :-1], rows[:, 1:]


def bags_of_words(
    texts: Sequence[bytes], numbers: Mapping[bytes, int], divisor: str
) -> tuple[np.ndarray, np.ndarray]:
    """The known words of each text, and the value of each occurrence.

    Dense bags of 10,000 words would be large to ship; `densify_bags` makes them.

    Args:
      texts: words separated by white space.
      numbers: the number of each known word, from 1.
      divisor: "all" divides by the number of all words, so that a bag adds up to the
        share of known words (the code of the paper's time); "in_vocabulary" by that of
        the known words, so that it adds up to 1.

    Returns:
      Coordinates from 0, `[n, longest]`, padded with -1, and the value of each
      occurrence, `[n]`.
    """
    found, values = [], np.zeros(len(texts), np.float32)
    for i, text in enumerate(texts):
        words = text.split()
        known = [numbers[word] - 1 for word in words if word in numbers]
        count = len(words if divisor == "all" else known)
        values[i] = 1 / count if count else 0.0
        found.append(known)
    coordinates = np.full((len(texts), max(map(len, found), default=0)), -1, np.int32)
    for row, known in zip(coordinates, found, strict=True):
        row[: len(known)] = known
    return coordinates, values


def multi_hot(tags: Sequence[bytes], numbers: Mapping[bytes, int]) -> np.ndarray:
    """Known tags, separated by ``|``, as counts: `[n, tags]`, usually 0 or 1."""
    labels = np.zeros((len(tags), len(numbers)), np.float32)
    for row, text in zip(labels, tags, strict=True):
        for tag in text.split(b"|"):
            if tag in numbers:
                row[numbers[tag] - 1] += 1
    return labels
