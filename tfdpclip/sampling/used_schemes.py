"""The sampling schemes of the elements that private steps of loops used.

Without TensorFlow, because the accounting reads it.
"""

from __future__ import annotations

import collections
import itertools
import threading
from typing import Any

# More than the elements that a block of `Ledger.step` uses.
_KEPT = 64
_LOCK = threading.Lock()
_NUMBERS = itertools.count(1)
_NOTED: collections.deque[tuple[int, Any]] = collections.deque(maxlen=_KEPT)


def note(scheme: Any) -> None:
    """Notes that a private step used an element that `scheme` drew."""
    with _LOCK:
        _NOTED.append((next(_NUMBERS), scheme))


def count() -> int:
    """How many elements private steps have used."""
    with _LOCK:
        return _NOTED[-1][0] if _NOTED else 0


def since(before: int) -> list[Any]:
    """The schemes of the elements that were used since `count` returned `before`."""
    with _LOCK:
        return [scheme for number, scheme in _NOTED if number > before]
