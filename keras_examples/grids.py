"""The grids of Rehn et al. (2025, Table A1), and their changes by flags."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

from driver_kit import settings
from tfdpclip.tuning import Grid, geometric


@dataclasses.dataclass(frozen=True)
class NamedGrid:
    """A row of Table A1.

    Attributes:
      size: number of training examples N.
      largest: exponent of the largest batch size, 2^8 to 2^largest and full.
      rates: least and greatest learning rate, and how many.
      clip_norms: clip norms.
      epochs: epochs.
      smallest: exponent of the smallest batch size.
    """

    size: int
    largest: int
    rates: tuple[float, float, int]
    clip_norms: tuple[float, ...]
    epochs: int
    smallest: int = 8

    def batch_sizes(self, size: int | None = None) -> tuple[int | str, ...]:
        """The grid's sizes below the number of training examples, and "full"."""
        sizes = [2**k for k in range(self.smallest, self.largest + 1)]
        return (*(b for b in sizes if b < (size or self.size)), "full")


_VIT, _RESNET = (0.001, 0.02, 8), (0.0005, 0.01, 10)
_WIDE = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10)
_SUN = (0.1, 1, 10, 12, 14, 18, 26, 42)
GRIDS = {
    "digits": NamedGrid(1437, 8, (0.005, 0.5, 4), (0.01, 0.1, 1, 3), 8, smallest=6),
    "cifar100_vit_tiny": NamedGrid(50_000, 14, _VIT, _WIDE, 8),
    "cifar100_vit_base": NamedGrid(50_000, 14, _VIT, _WIDE, 8),
    "cifar100_resnet50": NamedGrid(50_000, 14, _RESNET, _WIDE, 8),
    "cifar100_10_vit_tiny": NamedGrid(5000, 14, _VIT, (1e-4, 1e-2, 0.1, 1, 5, 10), 32),
    "cifar100_10_vit_base": NamedGrid(5000, 14, _VIT, (1e-4, 1e-2, 0.1, 1, 5, 10), 32),
    "cifar100_10_resnet50": NamedGrid(
        5000, 14, _RESNET, (1e-3, 1e-2, 0.1, 1, 10, 26, 42), 32
    ),
    "sun397_vit_tiny": NamedGrid(87_002, 16, _VIT, _SUN, 8),
    "sun397_vit_base": NamedGrid(87_002, 16, _VIT, (0.1, 1, 10, 26, 42), 8),
    "sun397_resnet50": NamedGrid(87_002, 16, _RESNET, _SUN, 8),
    # Not the paper's: MNIST or Fashion-MNIST, as the features are.
    "mnist_efficientnet_lite0": NamedGrid(60_000, 14, _VIT, (0.1, 1, 10, 42), 8),
    "cassava_vit_tiny": NamedGrid(7545, 14, _VIT, (0.1, 1, 10, 26, 42), 32),
    "cassava_vit_base": NamedGrid(7545, 14, _VIT, (0.1, 1, 10, 26, 42), 32),
    "cassava_resnet50": NamedGrid(7545, 14, _RESNET, (1e-2, 0.1, 1, 10, 50), 32),
}


class Choices(Protocol):
    """Flags that change a grid; None keeps the named grid's values."""

    grid: str
    clip_norms: str | None
    batch_sizes: str | None
    learning_rates: str | None
    methods: tuple[str, ...]
    epochs: tuple[float, ...]
    seeds: int


def make(used: Choices, size: int | None = None) -> Grid:
    """The grid after flags.

    Args:
      used: the flags.
      size: number of training examples, if it is not that of the named grid: batches
        of the named grid that are as large are left out.
    """
    named = GRIDS[used.grid]
    clips: list[float | str] = []
    if "flat" in used.methods:
        clips += read_numbers(used.clip_norms) or named.clip_norms
    if "auto_s" in used.methods:
        clips.append("auto_s")
    sizes = read_sizes(used.batch_sizes) or named.batch_sizes(size)
    rates = read_numbers(used.learning_rates) or geometric(*named.rates)
    epochs = used.epochs or (named.epochs,)
    return Grid(clips, sizes, rates, range(used.seeds), {"epochs": epochs})


def read_numbers(text: str | None) -> list[float]:
    """Positive numbers, separated by commas, or geom:LEAST:GREATEST:HOW_MANY.

    Raises:
      ValueError: for any other text.

    >>> read_numbers("geom:0.1:10:3")
    [0.1, 1.0, 10.0]
    """
    if text is None:
        return []
    if text.startswith("geom:"):
        low, high, count = text[5:].split(":")
        found = list(geometric(float(low), float(high), int(count)))
    else:
        found = [float(part) for part in text.split(",")]
    if not all(math.isfinite(v) and v > 0 for v in found):
        raise ValueError(f"{text}: numbers must be above 0.")
    return found


def read_sizes(text: str | None) -> list[int | str]:
    """Batch sizes, separated by commas: whole numbers above 0, or "full".

    Raises:
      ValueError: for any other text.

    >>> read_sizes("256, full")
    [256, 'full']
    """
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(p == "full" or (p.isdecimal() and int(p) > 0) for p in parts):
        raise ValueError(f"{text}: sizes must be whole numbers above 0, or full.")
    return [p if p == "full" else int(p) for p in parts]


def read_size(text: str) -> int | str:
    """One batch size.

    Raises:
      ValueError: for any other text.
    """
    (size,) = read_sizes(text)
    return size


def numbers_flag(text: str) -> Any:
    """The field for the numbers of a grid, after `read_numbers`."""
    return settings.words(
        None,
        text,
        good="0.1,1",
        form="numbers above 0, separated by commas, or geom:LEAST:GREATEST:HOW_MANY",
        reads=read_numbers,
    )
