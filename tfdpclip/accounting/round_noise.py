"""What the noise of federated rounds is, and from whom a budget knows it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError


@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """The noise of a round, as far as its cost depends on it.

    Attributes:
      noise_multiplier: z.
      place: `"central"`, the server's, or `"distributed"`, the clients' shares.
      run: The digest of correlated noise; None for independent noise.
      seeded: Whether it comes from a fixed seed.
    """

    noise_multiplier: float
    place: str = "central"
    run: tuple[int, ...] | None = None
    seeded: bool = False

    def __str__(self) -> str:
        kind = "" if self.run is None else ", correlated"
        seed = ", from a seed" if self.seeded else ""
        return f"{self.place} noise of multiplier {self.noise_multiplier:g}{kind}{seed}"


# Of the aggregators whose processes were made in this Python process.
_made: dict[RoundNoise, None] = {}


def note_made(noise: RoundNoise) -> None:
    """Says that an aggregator with this noise made its process."""
    _made[noise] = None


def made() -> list[str]:
    """The noise of the aggregators that made their processes here, in words."""
    return [str(noise) for noise in _made]


def is_possible(noise: RoundNoise) -> bool:
    """Whether rounds here may have such noise: an aggregator has, or none was made."""
    return not _made or noise in _made


def declared(noise_multiplier: Any, noise: Any) -> RoundNoise:
    """The noise of which only numbers are known."""
    if noise_multiplier is None:
        raise ValueError(
            "aggregator must be given, which adds the noise that is counted: "
            "RoundBudget(epsilon, delta, cohorts, aggregator=aggregator), of "
            "aggregator = dpc.federated.clipped_mean(...). Or noise_multiplier, of "
            "noise that something else adds."
        )
    if hasattr(noise_multiplier, "round_noise"):
        raise ValueError(
            "noise_multiplier is an aggregator: write RoundBudget(epsilon, delta, "
            "cohorts, aggregator=aggregator)."
        )
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    digest = getattr(noise, "digest", None)
    return RoundNoise(z, run=None if digest is None else tuple(digest))


def of_aggregator(aggregator: Any, said: dict[str, Any], unit: Any) -> Any:
    """The correlated noise of an aggregator, which nothing that was given contradicts.

    Args:
      aggregator: What should be a `clipped_mean`.
      said: What else was said, by argument.
      unit: What is clipped.

    Raises:
      ValueError: If it is none.
      PrivacyMismatchError: If there is a contradiction.
    """
    if not hasattr(aggregator, "round_noise"):
        raise ValueError(
            "aggregator must be what dpc.federated.clipped_mean(...) or "
            f"plan.aggregator(...) returned, got {_arguments.shown(aggregator)}."
        )
    if unit != "client":
        _arguments.choice("unit", unit, ("client",))
    clip, noise = aggregator.clip, aggregator.correlated
    follows = {
        "noise_multiplier": (None, (aggregator.noise_multiplier,)),
        "clip": ("", (clip, str(clip))),
        "noise": (None, () if noise is None else (noise,)),
    }
    for name, (left_out, fits) in follows.items():
        given = said[name]
        if given is left_out or given == left_out:
            continue
        if not any(given == value for value in fits):
            raise PrivacyMismatchError(
                f"{name}={_arguments.shown(given)} contradicts aggregator, whose "
                f"{name} is {_arguments.shown(fits[0] if fits else None)}: what is "
                f"counted follows from the aggregator. Leave {name} out."
                + see("two-numbers-for-one-noise")
            )
    return noise


def of_noise(noise: Any, scheme: Any) -> dict[str, Any]:
    """What a ledger's phase is told of correlated noise."""
    if noise is None:
        return {}
    if not hasattr(noise, "of_a_phase"):
        raise ValueError(
            "noise must be a dpc.CorrelatedNoise(matrix, rounds, scheme), that of the "
            f"aggregator, or None; got {_arguments.shown(noise)}."
        )
    if not noise.sampling.accounts_for(scheme):
        raise PrivacyMismatchError(
            f"The noise is made for {noise.sampling.describe()}, and the cohorts are "
            f"drawn by {scheme.describe()}. How often a client takes part decides how "
            "much noise it needs: make both of one scheme."
        )
    return noise.of_a_phase
