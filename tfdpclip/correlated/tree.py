"""Binary trees of noise: the baseline that matrices are compared with."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdpclip import _arguments
from tfdpclip.correlated import streams, toeplitz
from tfdpclip.correlated.matrices import NoiseMatrix, count


@dataclasses.dataclass(frozen=True)
class Tree(NoiseMatrix):
    """Prefix sums from the nodes of a binary tree over the steps.

    Each node holds the sum of its steps with noise of its own; a prefix is a sum of at
    most log2 n nodes (Dwork et al. 2010; Chan et al. 2011; for training, Kairouz et al.
    2021, arXiv 2103.00039). C has a row for every node that n steps complete.

    Attributes:
      honaker: Whether a node's sum is estimated from all noise below it as well, by
        the inverse of the variances (Honaker 2015, his estimate from below, which
        Kairouz et al. 2021 use). The nodes, and so the privacy, are the same.

    >>> Tree().strategy(2)
    array([[1., 0.],
           [0., 1.],
           [1., 1.]])
    """

    honaker: bool = True

    def __post_init__(self):
        _arguments.boolean("honaker", self.honaker)

    @property
    def bandwidth(self) -> int | None:
        return None

    def strategy(self, steps: int) -> np.ndarray:
        steps = count(steps)
        toeplitz.check_dense(steps)
        rows = []
        for end in range(1, steps + 1):
            # In the order in which draws are made: the leaf, then what it completes.
            for level in range((end & -end).bit_length()):
                row = np.zeros(steps)
                row[end - 2**level : end] = 1
                rows.append(row)
        return np.array(rows)

    def noising(self, steps: int) -> np.ndarray:
        steps = count(steps)
        toeplitz.check_dense(steps)
        stream = self.stream()
        total = 2 * steps - steps.bit_count()
        used = iter(range(total))

        def draw():
            unit = np.zeros(total)
            unit[next(used)] = 1
            return unit

        return np.array([stream.next(draw) for _ in range(steps)])

    def stream(self) -> streams.Stream:
        return streams.TreeSums(self._share)

    def _share(self, level: int) -> float:
        if not self.honaker:
            return 1.0
        # The estimate of a level has variance v, 1 for leaves. The sum of two has 2 v,
        # beside a draw of variance 1: v' = 2 v / (2 v + 1) = 2^h / (2^(h+1) - 1).
        return 2.0**level / (2.0 ** (level + 1) - 1)

    def describe(self) -> str:
        estimator = ", Honaker's estimate from below" if self.honaker else ""
        return f"noise from a binary tree{estimator}"
