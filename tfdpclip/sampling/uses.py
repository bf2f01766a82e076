"""The elements that were drawn, and used by private steps: notes for ledgers.

This module needs no TensorFlow, which accounting alone does not import.
"""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Mapping
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


class Draws:
    """How many elements one drawer drew in this process.

    Args:
      drawer: the drawer, with `scheme` and `pieces`, the elements of a step.

    Attributes:
      scheme: the scheme that draws.
      pieces: the number of elements of a step.
      drawn: the number of elements drawn.
      taken: the number of those that eager code took.
      ahead: the most elements that an iterator gathers before they are taken.
      waiting: the taken elements that are remembered, with `released` and `held`.
      iterators: the iterators of eager code, which may have drawn ahead.
    """

    def __init__(self, drawer: Any):
        self.scheme, self.pieces = drawer.scheme, drawer.pieces
        self.drawn = self.taken = 0
        self.ahead: float = 0
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._drawer = weakref.ref(drawer)
        # Kept when the drawer is gone: a program may hold its elements.
        _DRAWS.append(self)

    def note_taken(self, element: Any) -> None:
        """Notes that eager code took an element."""
        self.taken += 1
        self.waiting.add(element)

    def handed_out(self, since: tuple[int, int]) -> int:
        """How many steps the loop was handed, the last of them perhaps in part.

        Args:
          since: `taken` and `drawn` at the beginning.
        """
        taken, drawn = self.taken - since[0], self.drawn - since[1]
        drawer = self._drawer()
        if not taken and drawer is not None and not drawer.runs_ahead:
            # Within a graph, whose iterator may have gathered some ahead.
            taken = drawn - int(min(drawn, self.ahead))
        return -(-taken // self.pieces)

    @property
    def usable(self) -> int:
        """How many steps of elements at hand no private step has used."""
        unused = sum(not e.released and e.held for e in list(self.waiting))
        return -(-unused // self.pieces)

    @property
    def spent(self) -> int:
        """How many elements a later step cannot use: they were used, or are gone."""
        drawer = self._drawer()
        alive = drawer is not None
        unused = sum(not e.released and (alive or e.held) for e in list(self.waiting))
        if drawer is None:
            return self.drawn - unused
        # Of the elements that eager code did not take, its iterator may hold some. The
        # rest was taken in a graph, as in `fit`, or is gone.
        eager = self.taken > 0 and len(self.iterators) > 0
        ahead = math.inf if drawer.runs_ahead else self.ahead if eager else 0
        return int(self.drawn - min(self.drawn - self.taken, ahead)) - unused


_DRAWS: list[Draws] = []


def elements_drawn() -> dict[Draws, tuple[int, int]]:
    """For each object that draws, how many elements eager code took, and all drawn."""
    return {draws: (draws.taken, draws.drawn) for draws in _DRAWS}


def elements_spent() -> dict[Draws, int]:
    """For each object that draws, how many elements a later step cannot use."""
    return {draws: draws.spent for draws in _DRAWS}


def steps_drawn(
    spent: Mapping[Draws, int], counts: Callable[[Any], bool]
) -> tuple[int, list[Any]]:
    """How many steps were drawn that `spent`, of `elements_spent`, leaves.

    Args:
      spent: the elements that are left out.
      counts: whether the draws of a scheme count.

    Returns:
      The number of steps, begun steps included, and the schemes that drew elements
      that do not count.
    """
    number, others = 0, []
    for draws in _DRAWS:
        left = draws.drawn - spent.get(draws, 0)
        if left <= 0:
            continue
        if counts(draws.scheme):
            number += -(-left // draws.pieces)
        else:
            others.append(draws.scheme)
    return number, others


_LOCK = threading.Lock()
# The assumptions that private steps need, each with the number of its last note.
_ASSUMED: dict[str, int] = {}


def note_assumption(text: str) -> None:
    """Notes, for the ledgers of loops, an assumption that a private step needs."""
    with _LOCK:
        _ASSUMED[text] = assumptions_noted() + 1


def assumptions_noted() -> int:
    """The number of the last note of an assumption."""
    return max(_ASSUMED.values(), default=0)


def assumptions_since(before: int) -> list[str]:
    """The assumptions noted since `assumptions_noted` returned `before`."""
    return [text for text, number in list(_ASSUMED.items()) if number > before]


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
