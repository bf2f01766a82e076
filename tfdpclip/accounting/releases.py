"""The number of private releases, as counted by the optimizers.

`Ledger.step()` declares how many steps a loop takes, and an optimizer counts its
releases. The ledger compares the two numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

#: Objects that count their releases, with `identity` (a text) and `releases`.
COUNTERS: weakref.WeakSet[Any] = weakref.WeakSet()


def releases_so_far() -> dict[str, int]:
    """The number of releases of each counter."""
    return {counter.identity: counter.releases for counter in list(COUNTERS)}


def releases_since(before: Mapping[str, int]) -> int:
    """The number of releases since `releases_so_far` returned `before`."""
    now = releases_so_far()
    return sum(count - before.get(name, 0) for name, count in now.items())
