"""Where correlated noise is, in the state of a server that carries it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

#: Under which a server's state holds what correlated noise keeps between rounds.
NOISE_KEY = "correlated_noise"
#: What it consists of.
PARTS = ("step", "ticket", "before", "kept")


@dataclasses.dataclass(frozen=True)
class NoisePlace:
    """How far the noise of a state is, and which state it came from.

    Attributes:
      step: Rounds of the present matrix that had their noise.
      ticket: A random name of the state.
      before: The name of the state that it came from.
    """

    step: int
    ticket: tuple[int, ...]
    before: tuple[int, ...]


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
    ticket, before = (tuple(int(w) for w in noise[k]) for k in ("ticket", "before"))
    return NoisePlace(int(noise["step"]), ticket, before)


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
