"""How many private releases were made, by whatever counts its own.

A loop says how many steps it takes, `Ledger.step()`, and an optimizer counts how often
it releases. The two numbers meet here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

#: What counts its releases: objects with `identity`, a text, and `releases`.
COUNTERS: weakref.WeakSet[Any] = weakref.WeakSet()


def releases_so_far() -> dict[str, int]:
    """How many releases each counter has counted."""
    return {counter.identity: counter.releases for counter in list(COUNTERS)}


def releases_since(before: Mapping[str, int]) -> int:
    """How many releases were made since `releases_so_far` gave this."""
    now = releases_so_far()
    return sum(count - before.get(name, 0) for name, count in now.items())
