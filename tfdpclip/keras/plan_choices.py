"""What the names in a plan's arguments stand for."""

from __future__ import annotations

from typing import Any

from tfdpclip.correlated import (
    BufferedToeplitz,
    NoiseMatrix,
    SquareRootToeplitz,
    Tree,
)
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.schemes import FixedSize, FullBatch, Poisson, ShuffledEpochs
from tfdpclip.sampling.separated import MinSeparation

#: Ways to draw, by name.
SAMPLING = ("poisson", "fixed_size", "shuffled", "fixed_order")
#: Correlated noise, by name.
NOISE = ("independent", "buffered", "toeplitz", "tree")
# Buffers and bands of what is named so; docs/correlated_noise.md has what more bring.
_BUFFERS, _BANDS = 3, 16


def scheme_of(sampling: str, batch_size: int, examples: int) -> SamplingScheme:
    """The scheme that a name stands for, with these sizes."""
    if sampling == "fixed_size":
        return FixedSize(batch_size, examples)
    if sampling == "shuffled":
        return ShuffledEpochs(batch_size, examples)
    if sampling == "fixed_order":
        return MinSeparation(examples, batch_size)
    return FullBatch() if batch_size == examples else Poisson(batch_size / examples)


def matrix_of(noise: str | NoiseMatrix, steps: int, scheme: SamplingScheme) -> Any:
    """The matrix that an argument stands for; None for independent noise."""
    if isinstance(noise, NoiseMatrix):
        return noise
    if noise == "buffered":
        return BufferedToeplitz(_BUFFERS, steps, scheme)
    if noise == "toeplitz":
        return SquareRootToeplitz(_BANDS)
    return Tree() if noise == "tree" else None
