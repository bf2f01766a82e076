"""What this process remembers of draws, private steps and rounds: notes for ledgers.

`NOTES` is the one object that all calls of a process share: the batches note what they
draw and hand out, private steps which element they use, optimizers how many releases
they made, aggregators their noise; the engine and the ledgers ask. This module needs no
TensorFlow, which accounting alone does not import.
"""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

# How many elements and uses to remember: ledgers read the uses after each step, and the
# steps of earlier elements are long done, unless the program holds the elements.
_KEPT, _HELD = 64, 4096


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


class TakenElement:
    """An element of drawn batches that eager code took.

    Args:
      drawer: the drawer of the element.
      tensors: the element's eager tensors, held by weak references.
      once: whether a second private step would cost more than the accounting covers.

    Attributes:
      released: whether a private step used the element.
      guessed: whether that step may have used another element at hand.
      once: see Args.
    """

    def __init__(self, drawer: Any, tensors: Sequence[Any], once: bool):
        self.released = self.guessed = False
        self.once = once
        self._drawer = weakref.ref(drawer)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def tensors(self) -> list[Any]:
        """The tensors that are still alive."""
        referents = [reference() for reference in self._tensors]
        return [tensor for tensor in referents if tensor is not None]

    @property
    def held(self) -> bool:
        """Whether any of the element's tensors is still alive."""
        return bool(self.tensors())

    @property
    def waits(self) -> bool:
        """Whether the element has not been used in a private step yet.

        False for elements of batches that no longer exist.
        """
        return not self.released and self._drawer() is not None


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
      waiting: the taken elements that are remembered.
      iterators: the iterators of eager code, which may have drawn ahead.
    """

    def __init__(self, drawer: Any):
        self.scheme, self.pieces = drawer.scheme, drawer.pieces
        self.drawn = self.taken = 0
        self.ahead: float = 0
        self.waiting: weakref.WeakSet[TakenElement] = weakref.WeakSet()
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._drawer = weakref.ref(drawer)

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


class Notes:
    """The notes of one process.

    Attributes:
      drawers: every drawer alive, so that a callback can find the drawer of a run.
      elements_used: how many elements that eager code took private steps have used.
      recorded_by_number: how many steps ledgers recorded of which they know the number
        alone.
      counters: objects that count their releases, with `identity` (a text), `releases`,
        `take_settings()`, which returns `ReleaseSettings`, and `raise_failures()`.
      round_noises: the noise of all aggregators that made a process, in order.
      round_blocks: the blocks of federated rounds that are under way.
      counting_contexts: an entry for each open context that counts computations.
      data_sources: the sources of federated programs, by name.
      constant_states: all comparisons of variables from step to step, which forget the
        values of variables that any optimizer trains.
      followed_steps: for each Keras model, what stands in the place of `train_step`.
      foreign_histories: the histories of optimizers of other libraries.
      public_layers: the Keras layers that were declared as adapted to public data.
      secure_contexts: TensorFlow Federated's contexts that computed a secure sum.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.drawers: weakref.WeakSet[Any] = weakref.WeakSet()
        # Of all drawers: a program may hold elements of a drawer that is gone.
        self._draws: list[Draws] = []
        # The elements that eager code took; and those dealt out, a part for a replica.
        self._taken: collections.deque[Any] = collections.deque(maxlen=_HELD)
        self._dealt: collections.deque[TakenElement] = collections.deque(maxlen=_KEPT)
        self._uses: collections.deque[Use] = collections.deque(maxlen=_KEPT)
        self.elements_used = 0
        # What private steps need, each text with the number of its last note.
        self._assumed: dict[str, int] = {}
        self.counters: weakref.WeakSet[Any] = weakref.WeakSet()
        # By identity, how many releases a ledger has counted as a counter's.
        self._counted: collections.Counter[str] = collections.Counter()
        self.recorded_by_number = 0
        self.round_noises: dict[Any, None] = {}
        self.round_blocks: list[Any] = []
        self.counting_contexts: list[None] = []
        self.data_sources: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )
        self.constant_states: weakref.WeakSet[Any] = weakref.WeakSet()
        self.followed_steps: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        self.foreign_histories: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        self.public_layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.secure_contexts: weakref.WeakSet[Any] = weakref.WeakSet()

    # Draws.

    def begin_draws(self, drawer: Any) -> Draws:
        """The count of a new drawer's elements."""
        self.drawers.add(drawer)
        self._draws.append(Draws(drawer))
        return self._draws[-1]

    def elements_drawn(self) -> dict[Draws, tuple[int, int]]:
        """For each object that draws, how many elements eager code took, and all."""
        return {draws: (draws.taken, draws.drawn) for draws in self._draws}

    def elements_spent(self) -> dict[Draws, int]:
        """For each object that draws, how many elements a later step cannot use."""
        return {draws: draws.spent for draws in self._draws}

    def steps_drawn(
        self, spent: Mapping[Draws, int], counts: Callable[[Any], bool]
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
        for draws in self._draws:
            left = draws.drawn - spent.get(draws, 0)
            if left <= 0:
                continue
            if counts(draws.scheme):
                number += -(-left // draws.pieces)
            else:
                others.append(draws.scheme)
        return number, others

    # Elements that eager code took.

    def note_taken(self, taken: TakenElement, draws: Draws) -> None:
        """Notes that eager code took an element, and forgets old elements."""
        draws.taken += 1
        draws.waiting.add(taken)
        with self._lock:
            loose = [e for e in self._taken if not e.held]
            waiting = [e for e in loose if e.waits]
            kept = {id(e) for e in waiting[-_KEPT:]}
            for old in [e for e in loose if id(e) not in kept]:
                self._taken.remove(old)
            self._taken.append(taken)

    def note_dealt(self, dealt: TakenElement) -> None:
        """Notes that eager code took an element with a part for each replica."""
        with self._lock:
            self._dealt.append(dealt)

    def candidate_elements(self) -> list[Any]:
        """The elements that the next step may use, used or not.

        Elements with live tensors come first; if there are none (a step may get tensors
        computed from an element), all unused elements.
        """
        with self._lock:
            held = [e for e in self._taken if e.held]
            return held or [e for e in self._taken if e.waits]

    def mark_released(self, element: TakenElement, use: Use) -> None:
        """Notes that a private step uses the element."""
        with self._lock:
            element.released, element.guessed = True, False
            self._uses.append(use)
            self.elements_used += 1

    def mark_one_released(self, elements: Sequence[TakenElement]) -> None:
        """Notes that a private step uses one of several elements, not known which."""
        with self._lock:
            for element in elements:
                if not element.released:
                    element.released = element.guessed = True
                    return

    def mark_other_released(self, element: TakenElement) -> bool:
        """Takes back a guess: the step used another element at hand.

        Returns:
          False if the element itself was used, or no other element can have been.
        """
        with self._lock:
            others = [e for e in self._taken if e.held and not e.released]
            if not element.guessed or not others:
                return False
            others[0].released = others[0].guessed = True
            element.released = element.guessed = False
            return True

    def release_dealt(self) -> bool:
        """Marks the element at hand as used by a private step of all replicas.

        Returns:
          False if all elements at hand were used before, and a second private step
          costs more than the accounting covers.
        """
        with self._lock:
            held = [element for element in self._dealt if element.held]
            unused = [element for element in held if not element.released]
            if len(unused) == 1:
                unused[0].released = True
            return bool(unused) or not any(element.once for element in held)

    def used_since(self, before: int) -> list[Use]:
        """The elements used since `elements_used` was `before`."""
        with self._lock:
            new = min(self.elements_used - before, len(self._uses))
            return list(self._uses)[len(self._uses) - new :]

    # Assumptions of private steps.

    def note_assumption(self, text: str) -> None:
        """Notes, for the ledgers of loops, an assumption that a private step needs."""
        with self._lock:
            self._assumed[text] = self.assumptions_noted() + 1

    def assumptions_noted(self) -> int:
        """The number of the last note of an assumption."""
        return max(self._assumed.values(), default=0)

    def assumptions_since(self, before: int) -> list[str]:
        """The assumptions noted since `assumptions_noted` returned `before`."""
        assumed = list(self._assumed.items())
        return [text for text, number in assumed if number > before]

    # Releases. `Ledger.step()` declares how many steps a loop takes, and an optimizer
    # counts its releases: the ledger compares the two numbers, and the noise.

    def releases_so_far(self) -> dict[str, int]:
        """The number of releases of each counter."""
        return {counter.identity: counter.releases for counter in list(self.counters)}

    def releases_since(self, before: Mapping[str, int]) -> int:
        """The number of releases since `releases_so_far` returned `before`."""
        now = self.releases_so_far()
        return sum(count - before.get(name, 0) for name, count in now.items())

    def settings_since(
        self, before: Mapping[str, int]
    ) -> list[tuple[str, int, ReleaseSettings]]:
        """The counters that made releases since `before`.

        Returns:
          The identity, the number of the releases, and their settings.
        """
        releases = []
        for counter in list(self.counters):
            made = counter.releases - before.get(counter.identity, 0)
            settings = counter.take_settings() if made else None
            if settings is not None:
                releases.append((counter.identity, made, settings))
        return releases

    def raise_failures(self, identities: Collection[str]) -> None:
        """Raises the errors of releases that code compiled by XLA could not raise.

        Args:
          identities: the counters of the releases.
        """
        for counter in list(self.counters):
            if counter.identity in identities:
                counter.raise_failures()

    def note_counted(self, identity: str, releases: int) -> None:
        """Notes that a ledger has counted releases of a counter."""
        self._counted[identity] += releases

    def uncounted_releases(self) -> dict[str, int]:
        """For each counter, its releases minus those that ledgers have counted as its.

        Below 0 where two ledgers counted the same releases.
        """
        made = self.releases_so_far()
        return {name: number - self._counted[name] for name, number in made.items()}


NOTES = Notes()
