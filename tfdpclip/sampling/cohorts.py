"""Draws the clients that take part in a federated round."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdpclip import _arguments, _sealed
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.base import DrawKey, SamplingScheme
from tfdpclip.sampling.poisson import Poisson
from tfdpclip.sampling.schemes import FixedSize
from tfdpclip.sampling.separated import CyclicPoisson, MinSeparation

# The multiplicative congruential generator of Lehmer with the constants of Park and
# Miller: one 31-bit seed per round, reachable without going through earlier rounds.
_MULTIPLIER = 16807
_MODULUS = 2**31 - 1


_DRAWN = (FixedSize, Poisson, RandomAllocation, MinSeparation, CyclicPoisson)


class Cohorts:
    """The clients of each round, as a function of the round number alone.

    Made by the `cohorts` method of a scheme.

    *Formal guarantees*

    * Round t's cohort is drawn by `scheme`, independently across rounds unless the
      scheme keeps them apart. Calling twice with the same round gives the same cohort.
    * Randomness is fresh from the operating system unless `seed` is given; after a
      restart, rounds not yet run are drawn afresh. Each `RoundBudget`, and each
      `ledger.begin`, has draws of its own: two runs that shared their draws would cost
      more than their sum. With a seed, cohorts are the same
      in every process, so a run can be resumed at any round; anyone who knows the seed
      knows the cohorts, and privacy statements say that the run is not private.

    With `FixedSize` and a seed, the cohorts equal the cohorts of TensorFlow Federated's
    `build_uniform_sampling_fn`, so that published experiments can be repeated client
    for client.

    Args:
      scheme: `FixedSize`, `Poisson`, `RandomAllocation`, or a scheme that keeps
        a client's rounds apart (`MinSeparation`, `CyclicPoisson`).
      client_ids: The clients, in a fixed order; not a set, which has no order.
      seed: Fixes the cohorts. For experiments only.

    Raises:
      ValueError: If the scheme does not fit the clients.

    >>> from tfdpclip import sampling
    >>> cohorts = sampling.FixedSize(3, 10).cohorts("0123456789", seed=1)
    >>> cohorts(1), cohorts(2)
    (['7', '0', '6'], ['8', '2', '7'])
    """

    def __init__(
        self,
        scheme: SamplingScheme,
        client_ids: Sequence[Any],
        *,
        seed: int | None = None,
    ):
        if not isinstance(scheme, _DRAWN):
            raise ValueError(
                "scheme must be FixedSize or Poisson (or RandomAllocation, "
                "MinSeparation or CyclicPoisson) to draw cohorts, got "
                f"{_arguments.shown(scheme)}. For clients that come and go, use "
                "AvailableCohorts(AvailableClients(...), available)."
            )
        # Text is a sequence of one-letter ids.
        ids = list(client_ids) if isinstance(client_ids, str) else client_ids
        self.client_ids = _arguments.ordered("client_ids", ids)
        try:
            distinct = len(set(self.client_ids))
        except TypeError as error:
            raise ValueError(f"client_ids must be hashable: {error}.") from error
        if distinct != len(self.client_ids):
            raise ValueError("client_ids must not repeat: a client is one record.")
        if not self.client_ids:
            raise ValueError("client_ids must hold at least one client, got none.")
        if isinstance(scheme, (Poisson, CyclicPoisson, RandomAllocation)):
            capacity = scheme.capacity or len(self.client_ids)
        else:
            capacity = scheme.batch_size
        self.scheme = scheme._for_data(len(self.client_ids), capacity)
        self.seed = None if seed is None else _arguments.integer("seed", seed)
        self._key = DrawKey.fresh() if seed is None else DrawKey(seed)
        self._first, self._begun = 0, False

    def _for_one_run(self) -> Cohorts:
        """The same clients, with draws that no other run has."""
        own = copy.copy(self)
        own._begun = True  # `_begin_run` makes the key.
        return own

    def _begin_run(self, step: int) -> None:
        """Begins the draws of a run, and an epoch if the accounting covers epochs."""
        if self.seed is not None:
            return
        if self._begun or self.scheme.begins_epochs:
            self._key = DrawKey.fresh()
        if self.scheme.begins_epochs:
            self._first = step
        self._begun = True

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.client_ids)

    @property
    def order(self) -> str | None:
        """A digest of the clients in their order; None for ids that JSON lacks."""
        plain = [c.item() if isinstance(c, np.generic) else c for c in self.client_ids]
        try:
            return _sealed.digest(plain)
        except (TypeError, ValueError):
            return None

    @property
    def expected_cohort_size(self) -> float:
        """Expected clients per round: the public divisor."""
        return self.scheme.expected_batch_size(self.population)

    def __call__(self, round_num: int) -> list[Any]:
        """Returns the clients of a round; empty if Poisson sampling drew no client.

        Args:
          round_num: The round, 0 or above.

        Raises:
          ValueError: If `round_num` is not an integer, or below 0.
        """
        round_num = _arguments.integer("round_num", round_num)
        # TensorFlow Federated's algorithm, for the library's scheme.
        if self.seed is not None and type(self.scheme) is FixedSize:
            indices = self._lehmer_draw(round_num)
        else:
            place = round_num - self._first
            if place < 0:
                raise ValueError(
                    f"round_num must be {self._first} or above, where these cohorts "
                    f"began an epoch, got {round_num}."
                )
            indices = self.scheme._drawn(self._key, self.population, place)
        return [self.client_ids[index] for index in indices]

    def _lehmer_draw(self, round_num: int) -> np.ndarray:
        start = int(np.random.RandomState(self.seed % 2**32).randint(1, _MODULUS - 1))
        seed = pow(_MULTIPLIER, round_num, _MODULUS) * start % _MODULUS
        return np.random.RandomState(seed).choice(
            self.population, self.scheme.batch_size, replace=self.scheme.replacement
        )
