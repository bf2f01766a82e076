"""The randomness of draws: one entropy, and a stream of its own for every step."""

from __future__ import annotations

import dataclasses
import secrets

import numpy as np


@dataclasses.dataclass(frozen=True)
class DrawKey:
    """Where randomness comes from: one entropy, one independent stream per step.

    Attributes:
      entropy: A seed, or as many random bits as `words` of 32 hold.
      words: How many words of entropy a stream is made from. NumPy mixes whatever it
        is given into 4 of them unless told otherwise; with the 8 that the generator
        takes, no two entropies of 256 bits are taken for one.
      shard: Which part of the records is drawn from, where several machines draw from
        a part each; None for all records.
    """

    entropy: int
    words: int = 4
    shard: int | None = None
    # The last order that was asked for: of which epoch and how many records, and it.
    _order: list = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def fresh(cls) -> DrawKey:
        """Returns a key of 256 bits of the operating system's entropy."""
        return cls(secrets.randbits(256), 8)

    def sequence(self, step: int, purpose: int | None = None) -> np.random.SeedSequence:
        """Returns what that generator is made of."""
        place = (step,) if purpose is None else (step, purpose)
        if self.shard is not None:
            place = (step, purpose or 0, self.shard)
        return np.random.SeedSequence(
            self.entropy, spawn_key=place, pool_size=self.words
        )

    def rng(self, step: int, purpose: int | None = None) -> np.random.Generator:
        """Returns the generator of one step, or of one purpose within it."""
        return np.random.Generator(np.random.PCG64(self.sequence(step, purpose)))

    def order(self, epoch: int, population: int) -> np.ndarray:
        """All records in an epoch's random order, `[population]`.

        The last one is kept, 8 bytes a record: every step of an epoch takes its part.
        """
        asked = epoch, population
        if not self._order or self._order[0] != asked:
            self._order[:] = asked, self.rng(epoch).permutation(population)
        return self._order[1]
