"""What the names in a plan's arguments stand for."""

from __future__ import annotations

from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.schemes import FixedSize, FullBatch, Poisson, ShuffledEpochs
from tfdpclip.sampling.separated import MinSeparation

#: Ways to draw, by name.
SAMPLING = ("poisson", "fixed_size", "shuffled", "fixed_order")


def scheme_of(sampling: str, batch_size: int, examples: int) -> SamplingScheme:
    """The scheme that a name stands for, with these sizes."""
    if sampling == "fixed_size":
        return FixedSize(batch_size, examples)
    if sampling == "shuffled":
        return ShuffledEpochs(batch_size, examples)
    if sampling == "fixed_order":
        return MinSeparation(examples, batch_size)
    return FullBatch() if batch_size == examples else Poisson(batch_size / examples)
