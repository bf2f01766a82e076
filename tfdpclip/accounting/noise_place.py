"""The position of correlated noise, in the state of a server that carries it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdpclip import _arguments

#: The key of a server's state for the data that correlated noise keeps between rounds.
NOISE_KEY = "correlated_noise"
#: The parts of these data.
PARTS = ("step", "ticket", "before", "run", "kept")


@dataclasses.dataclass(frozen=True)
class NoisePlace:
    """The position of a state's noise, and the state's origin.

    Attributes:
      step: Rounds of the current matrix that got their noise.
      ticket: A random name of the state.
      before: The name of the state before this one.
      run: The `name_with` of the state's `CorrelatedNoise` and noise multiplier.
    """

    step: int
    ticket: tuple[int, ...]
    before: tuple[int, ...]
    run: tuple[int, ...]

    def is_of(self, noise: Any, noise_multiplier: float) -> bool:
        """Whether a round with this noise may continue from the state.

        States of earlier versions have the `digest`, without the noise multiplier. A
        matrix that `split_noise` made anew may get any noise multiplier.

        Args:
          noise: The `CorrelatedNoise` of the round.
          noise_multiplier: z of the round.
        """
        names = [noise.digest, noise.name_with(noise_multiplier)]
        if self.step == 0:
            names.append(tuple(unnamed(noise.digest)))
        return self.run in names


@dataclasses.dataclass
class StateHistory:
    """A ledger's public record of the states from which rounds continued.

    *Formal guarantees*

    * A round is in the record before it runs: the record is saved with the round's
      reservation in the ledger.
    * No state begins two matrices, in any process: the record keeps every state that
      began a matrix.

    Attributes:
      order: A digest of the clients of the last run, in their order.
      last: The name of the state from which its last round began.
      first: The names of all states from which a matrix began.
    """

    order: str | None = None
    last: str | None = None
    first: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        for name in ("order", "last"):
            _arguments.set_field(self, name, _arguments.text)
        self.first = [
            _arguments.text("first", one)
            for one in _arguments.items("first", self.first)
        ]

    def began_with(self, place: NoisePlace) -> bool:
        """Whether a matrix began with a state."""
        return _text_of(place.ticket) in self.first

    def follows(self, place: NoisePlace) -> bool:
        """Whether a state comes from the state that the last round began from."""
        return self.last == _text_of(place.before)

    def use(self, place: NoisePlace, order: str | None) -> None:
        """Records that a round begins from a state, with clients in an order."""
        self.order, self.last = order, _text_of(place.ticket)
        if place.step == 0:
            self.first.append(self.last)

    def begin(self) -> None:
        """Forgets the last run: no state continues it."""
        self.order = self.last = None


def unnamed(run: Any) -> np.ndarray:
    """Returns a `NoisePlace.run` without its noise multiplier."""
    return np.array([run[0], 0], np.int64)


def noise_of(state: Any) -> Mapping[str, Any] | None:
    """Returns the correlated noise in a state, at any depth; None if absent.

    Args:
      state: The state of an aggregator, or of a learning process around an aggregator.

    Raises:
      ValueError: If the state has several noises, or unknown content under the key.
    """
    found = list(_found(state))
    if len(found) > 1:
        raise ValueError(
            f"state holds correlated noise {len(found)} times; a budget is for one "
            "release in each round."
        )
    if found and not (isinstance(found[0], Mapping) and set(found[0]) == set(PARTS)):
        raise ValueError(
            f"The content of state[{NOISE_KEY!r}] must come from an aggregator of this "
            f"library, with the parts {', '.join(PARTS)}."
        )
    return found[0] if found else None


def place_of(state: Any) -> NoisePlace | None:
    """Returns the position of a state's noise; None without correlated noise."""
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
    """Returns a copy of a state with its noise replaced by `noise`."""
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
