"""Named streams of randomness, all from the same seed."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int | None, *place: str | int) -> np.random.Generator:
    """A generator for a purpose and place, such as ("shuffle", round, client).

    A function of its arguments alone, so that a run that is resumed continues as it
    would have; streams of different places are independent.

    Args:
      seed: the run's seed; None for fresh entropy of the operating system.
      place: the purpose and its numbers.

    >>> bool(stream(1, "noise", 2).random() == stream(1, "noise", 2).random())
    True
    """
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng([seed, _number(place)])


def stream_seed(seed: int, *place: str | int) -> int:
    """A seed, below 2^31, for code that wants a number."""
    return int(stream(seed, *place).integers(2**31 - 1))


def _number(place: tuple) -> int:
    text = "\x00".join(map(str, place))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
