"""Cohorts of the clients that are available, with a minimum time between rounds."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from tfdpclip import _arguments, correlated
from tfdpclip.sampling.base import DrawKey, NeighboringRelation, SamplingScheme


@dataclasses.dataclass(frozen=True)
class AvailableClients(SamplingScheme):
    """Clients come when they are idle, with a minimum number of rounds between.

    A server cannot draw from all clients of a deployment, so there is no
    amplification. A server can enforce how often a client takes part, and the number
    of rounds between.

    *Formal guarantees*

    * A client takes part at most `participations` times, with at least `separation`
      rounds from one time to the next (enforced by `AvailableCohorts`).
    * Neighbours: the contribution of one client is replaced by zero. That the client
      was available, and when, is not protected, and must not depend on its data.

    Attributes:
      cohort_size: Clients per round, at most; the public divisor.
      separation: b, 1 or more.
      participations: k; None for as often as the separation allows.

    >>> AvailableClients(10, separation=100, participations=4).participation(1000)
    MinSeparation(separation=100, participations=4)
    """

    cohort_size: int
    separation: int
    participations: int | None = None

    amplified: ClassVar[bool] = False
    independent_steps: ClassVar[bool] = False

    def __post_init__(self):
        self._keep_counts("cohort_size", "separation", "participations")

    neighboring_relation = NeighboringRelation.REPLACE_SPECIAL

    def participation(self, steps: int) -> correlated.MinSeparation:
        _arguments.integer("steps", steps, 1)
        return correlated.MinSeparation(self.separation, self.participations)

    def expected_batch_size(self, population: int) -> float:
        del population
        return float(self.cohort_size)

    def steps_per_epoch(self, population: int) -> int:
        population = _arguments.count_of("population", population, 0)
        return -(-population // self.cohort_size)

    def describe(self) -> str:
        return f"up to {self.cohort_size} of the clients that are available"

    def assumptions(self) -> tuple[str, ...]:
        found = correlated.MinSeparation(self.separation, self.participations)
        return (
            f"no amplification by sampling: {found.describe()}",
            "the availability of clients in a round does not depend on their data",
        )

    def at_worst(self) -> AvailableClients:
        return AvailableClients(self.cohort_size, 1)

    def _capacity(self, population: int) -> int:
        del population
        return self.cohort_size

    def _releases(self, steps: int) -> int:
        if steps == 0:
            return 0
        return self.participation(steps).most(steps)

    def _for_data(self, population: int, capacity: int) -> AvailableClients:
        raise ValueError(
            "scheme: AvailableClients needs the list of available clients of each "
            "round. Draw cohorts by AvailableCohorts(scheme, available)."
        )

    def _draw(self, key, population, step):
        return self._for_data(population, 0)


class AvailableCohorts:
    """The clients of each round, out of the available clients.

    Give it to `dpc.accounting.RoundBudget` like all cohorts.

    *Formal guarantees*

    * No client is in two rounds less than `separation` apart, or in more than
      `participations`: counted before a cohort is handed out, and for as long as
      `state` is kept.
    * Of the clients that may take part, every subset is equally likely; with fewer than
      `cohort_size` eligible clients, all are taken. No data enter the choice.

    Args:
      scheme: `AvailableClients`.
      available: A function of the round that returns the ids of the available clients:
        texts or integers.
      state: The `state` of an earlier process. It records who took part when: keep
        the state on the server.

    Raises:
      ValueError: If an argument is out of range.

    >>> scheme = AvailableClients(2, separation=2)
    >>> cohorts = AvailableCohorts(scheme, lambda round_num: ["a", "b", "c"])
    >>> len(cohorts(0)), len(cohorts(1)), len(cohorts(2))
    (2, 1, 2)
    """

    seed: ClassVar[None] = None

    def __init__(
        self,
        scheme: AvailableClients,
        available: Callable[[int], Iterable[Any]],
        *,
        state: Mapping[str, Any] | None = None,
    ):
        wanted = "AvailableClients(cohort_size, separation)"
        self.scheme = _arguments.instance("scheme", scheme, AvailableClients, wanted)
        self._available = _arguments.function("available", available, 1)
        self._key = DrawKey.fresh()
        self._name = secrets.token_hex(16)
        self._next = 0
        self._last: dict[Any, int] = {}
        self._times: dict[Any, int] = {}
        if state is not None:
            self._restore(state)

    @property
    def expected_cohort_size(self) -> float:
        """Most clients per round: the public divisor."""
        return float(self.scheme.cohort_size)

    @property
    def order(self) -> str:
        """A public name, which cohorts restored from this `state` share."""
        return self._name

    @property
    def state(self) -> dict[str, Any]:
        """How often, and when last, each client took part; JSON-ready."""
        return {
            "name": self._name,
            "next": self._next,
            "clients": [[c, n, self._times[c]] for c, n in self._last.items()],
        }

    def __call__(self, round_num: int) -> list[Any]:
        """Returns the clients of a round.

        Args:
          round_num: The round, later than all earlier rounds.

        Raises:
          ValueError: If `round_num` is not later, or ids are invalid or repeated.
        """
        round_num = _arguments.integer("round_num", round_num)
        if round_num < self._next:
            raise ValueError(
                f"round_num must be at least {self._next}, got {round_num}: a cohort "
                "depends on the rounds before, which cannot be drawn again."
            )
        there = _arguments.items("available", self._available(round_num))
        for client in there:
            _check_id(client)
        if len(set(there)) != len(there):
            raise ValueError("available must not repeat a client: it is one record.")
        may = [client for client in there if self._may(client, round_num)]
        size = min(self.scheme.cohort_size, len(may))
        chosen = self._key.rng(round_num).choice(len(may), size, replace=False)
        cohort = [may[index] for index in chosen]
        self._next = round_num + 1
        for client in cohort:
            self._last[client] = round_num
            self._times[client] = self._times.get(client, 0) + 1
        return cohort

    def _may(self, client: Any, round_num: int) -> bool:
        if client not in self._last:
            return True
        limit = self.scheme.participations
        rested = round_num - self._last[client] >= self.scheme.separation
        return rested and (limit is None or self._times[client] < limit)

    def _restore(self, state: Mapping[str, Any]) -> None:
        _arguments.instance("state", state, Mapping, "a dictionary")
        try:
            self._name = _arguments.text("state", state["name"])
            self._next = _arguments.integer("state", state["next"])
            for client, last, times in state["clients"]:
                _check_id(client)
                self._last[client] = _arguments.integer(
                    "state", last, 0, self._next - 1
                )
                self._times[client] = _arguments.integer("state", times, 1)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state must be the value of AvailableCohorts.state: {error}."
            ) from error


def _check_id(client: Any) -> None:
    # Types that JSON preserves: an id that changes its type would be a new client.
    if isinstance(client, bool) or not isinstance(client, (str, int)):
        raise ValueError(
            "available must give ids that are text or whole numbers, got "
            f"{_arguments.shown(client)}."
        )
