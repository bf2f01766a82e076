"""Every way for a record to take part in a few steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tfdpclip.correlated import MinSeparation


def patterns(participation: MinSeparation, steps: int) -> Iterator[tuple[int, ...]]:
    """Every set of steps that a record can be in."""
    for count in range(participation.most(steps) + 1):
        for chosen in itertools.combinations(range(steps), count):
            between = (j - i for i, j in itertools.pairwise(chosen))
            if all(gap >= participation.separation for gap in between):
                yield chosen
