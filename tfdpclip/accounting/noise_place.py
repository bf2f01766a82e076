"""Where correlated noise is, in the state of a server that carries it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdpclip import _arguments

#: Under which a server's state holds what correlated noise keeps between rounds.
NOISE_KEY = "correlated_noise"
#: What it consists of.
PARTS = ("step", "ticket", "before", "run", "kept")


@dataclasses.dataclass(frozen=True)
class NoisePlace:
    """How far the noise of a state is, and which state it came from.

    Attributes:
      step: Rounds of the present matrix that had their noise.
      ticket: A random name of the state.
      before: The name of the state that it came from.
      run: The `digest` of the `CorrelatedNoise` that it is of.
    """

    step: int
    ticket: tuple[int, ...]
    before: tuple[int, ...]
    run: tuple[int, ...]


@dataclasses.dataclass
class Trail:
    """What a ledger keeps of the states that rounds went on from; all of it is public.

    *Formal guarantees*

    * A round that has begun is in it before it runs: it is saved with what the round
      reserves in the ledger.
    * No state begins two matrices, in whichever process: those that began one are kept.

    Attributes:
      order: A digest of who the clients of the last run are, in their order.
      last: The name of the state that its last round began from.
      first: The names of all states with which a matrix began.
    """

    order: str | None = None
    last: str | None = None
    first: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        for name in ("order", "last"):
            if getattr(self, name) is not None:
                _arguments.text(name, getattr(self, name))
        self.first = [
            _arguments.text("first", one)
            for one in _arguments.items("first", self.first)
        ]

    def began_with(self, place: NoisePlace) -> bool:
        """Whether a matrix began with a state."""
        return _text_of(place.ticket) in self.first

    def follows(self, place: NoisePlace) -> bool:
        """Whether a state comes from the one that the last round began from."""
        return self.last == _text_of(place.before)

    def use(self, place: NoisePlace, order: str | None) -> None:
        """Notes that a round begins from a state, with clients in an order."""
        self.order, self.last = order, _text_of(place.ticket)
        if place.step == 0:
            self.first.append(self.last)

    def begin(self) -> None:
        """Forgets the last run: no state goes on with it."""
        self.order = self.last = None


def noise_of(state: Any) -> Mapping[str, Any] | None:
    """What correlated noise keeps in a state, wherever it is there; None without.

    Args:
      state: Of an aggregator, or of a learning process around one.

    Raises:
      ValueError: If there are several, or something else.
    """
    found = list(_found(state))
    if len(found) > 1:
        raise ValueError(
            f"state holds correlated noise {len(found)} times; a budget is for one "
            "release in each round."
        )
    if found and not (isinstance(found[0], Mapping) and set(found[0]) == set(PARTS)):
        raise ValueError(
            f"The content of state[{NOISE_KEY!r}] must be what an aggregator of this "
            f"library keeps: {', '.join(PARTS)}."
        )
    return found[0] if found else None


def place_of(state: Any) -> NoisePlace | None:
    """How far the noise of a state is; None if it has none that is correlated."""
    noise = noise_of(state)
    if noise is None:
        return None
    names = (tuple(int(w) for w in noise[k]) for k in ("ticket", "before", "run"))
    return NoisePlace(int(noise["step"]), *names)


def _text_of(ticket: tuple[int, ...]) -> str:
    return ":".join(map(str, ticket))


def _found(state: Any) -> Any:
    if isinstance(state, Mapping):
        for name, part in state.items():
            if name == NOISE_KEY:
                yield part
            else:
                yield from _found(part)
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from _found(part)


def with_noise(state: Any, noise: Mapping[str, Any]) -> Any:
    """A copy of a state with something else in the place of its noise."""
    if isinstance(state, Mapping):
        return collections.OrderedDict(
            (name, noise if name == NOISE_KEY else with_noise(part, noise))
            for name, part in state.items()
        )
    if hasattr(state, "_asdict"):
        return type(state)(*(with_noise(part, noise) for part in state))
    if isinstance(state, (list, tuple)):
        return type(state)(with_noise(part, noise) for part in state)
    return state
