"""The kinds of damage to a file."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator


def truncations(content: bytes) -> Iterator[bytes]:
    """Cut at several lengths, 0 included."""
    size = len(content)
    for length in sorted(
        {0, 1, 4, 8, 15, 16, size // 3, size // 2, size - 9, size - 1}
    ):
        if 0 <= length < size:
            yield content[:length]


def flips(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Changes one random bit, or one random byte."""
    rng = random.Random(seed)
    for number in range(count):
        changed = bytearray(content)
        # Half of them near the beginning, where headers are.
        place = rng.randrange(len(content) if number % 2 else min(512, len(content)))
        changed[place] ^= 1 << rng.randrange(8) if number % 3 else rng.randrange(1, 256)
        yield bytes(changed)


def every_bit(content: bytes) -> Iterator[bytes]:
    """Changes each bit in turn."""
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            yield bytes(changed)


def damaged(content: bytes, count: int = 60) -> Iterator[bytes]:
    """Cut, changed, prolonged, or something else."""
    yield from truncations(content)
    yield from flips(content, count)
    yield content + b"\x00"
    yield content + content
    yield b"\x00" * len(content)
    yield b"\x80\x04\x95" + content
    yield b"PK\x03\x04" + content[4:]
    yield b"<!DOCTYPE html><title>404</title>\n"
    yield random.Random(1).randbytes(len(content))


class Trap:
    """A pickle of this makes a directory if it is read by `pickle` without checks."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def refused_or(read, path, errors=ValueError, needed=""):
    """The result of `read`; None if it refused with an error that names the file."""
    try:
        return read()
    except errors as error:
        assert str(path.name) in str(error), error
        assert needed in str(error), error
        assert type(error).__module__.split(".")[0] in (
            "builtins",
            "tff_tasks",
            "tfdpclip",
        )
        assert not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        return None
