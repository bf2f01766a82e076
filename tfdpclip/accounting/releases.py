"""The private releases, as counted by the optimizers.

`Ledger.step()` declares how many steps a loop takes, and an optimizer counts its
releases. The ledger compares the two numbers, and the noise of the releases with the
noise that it counts.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

#: Objects that count their releases, with `identity` (a text), `releases`,
#: `take_settings()`, which returns `ReleaseSettings`, and `raise_failures()`.
COUNTERS: weakref.WeakSet[Any] = weakref.WeakSet()


#: By identity, how many releases a ledger of this process has counted as a counter's.
_COUNTED: collections.Counter[str] = collections.Counter()
#: How many steps ledgers of this process have recorded by a number, of no counter.
_BY_NUMBER = [0]


class ReleaseSettings(NamedTuple):
    """The settings of releases.

    Attributes:
      noise_multiplier: the least noise multiplier of the releases.
      unit: the clipped unit.
      correlated: whether the noise of several releases is correlated.
      seeded: whether the noise has a fixed seed.
    """

    noise_multiplier: float
    unit: str
    correlated: bool
    seeded: bool


def releases_so_far() -> dict[str, int]:
    """The number of releases of each counter."""
    return {counter.identity: counter.releases for counter in list(COUNTERS)}


def releases_since(before: Mapping[str, int]) -> int:
    """The number of releases since `releases_so_far` returned `before`."""
    now = releases_so_far()
    return sum(count - before.get(name, 0) for name, count in now.items())


def settings_since(before: Mapping[str, int]) -> list[tuple[str, int, ReleaseSettings]]:
    """The counters that made releases since `before`.

    Returns:
      The identity, the number of the releases, and their settings.
    """
    releases = []
    for counter in list(COUNTERS):
        made = counter.releases - before.get(counter.identity, 0)
        settings = counter.take_settings() if made else None
        if settings is not None:
            releases.append((counter.identity, made, settings))
    return releases


def raise_failures(identities: Collection[str]) -> None:
    """Raises the errors of releases that code compiled by XLA could not raise.

    Args:
      identities: the counters of the releases.
    """
    for counter in list(COUNTERS):
        if counter.identity in identities:
            counter.raise_failures()


def note_counted(identity: str, releases: int) -> None:
    """Notes that a ledger has counted releases of a counter."""
    _COUNTED[identity] += releases


def note_recorded(steps: int) -> None:
    """Notes that a ledger has recorded steps of which it knows the number alone."""
    _BY_NUMBER[0] += steps


def recorded_by_number() -> int:
    """How many steps ledgers recorded of which they know the number alone."""
    return _BY_NUMBER[0]


def uncounted_releases() -> dict[str, int]:
    """For each counter, its releases minus those that ledgers have counted as its own.

    Below 0 where two ledgers counted the same releases.
    """
    return {name: made - _COUNTED[name] for name, made in releases_so_far().items()}
