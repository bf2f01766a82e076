"""The elements that private steps used: notes for ledgers, without TensorFlow."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Any, NamedTuple

# How many uses to remember: a ledger reads them after each step.
_KEPT = 64


class Use(NamedTuple):
    """A private step's use of an element.

    Attributes:
      scheme: the scheme that drew the element.
      order: the drawer, by a weak reference.
      step: the number of the element's step in the order; None where it is not known.
      place: the number of steps of the same epoch before it.
    """

    scheme: Any
    order: weakref.ref
    step: int | None
    place: int


_LOCK = threading.Lock()
_USED: collections.deque[Use] = collections.deque(maxlen=_KEPT)
_COUNT = [0]


def note_use(use: Use) -> None:
    """Notes that a private step uses a known element."""
    with _LOCK:
        _USED.append(use)
        _COUNT[0] += 1


def elements_used() -> int:
    """How many known elements private steps have used."""
    return _COUNT[0]


def used_since(before: int) -> list[Use]:
    """The elements used since `elements_used` returned `before`."""
    with _LOCK:
        new = min(_COUNT[0] - before, len(_USED))
        return list(_USED)[len(_USED) - new :]
