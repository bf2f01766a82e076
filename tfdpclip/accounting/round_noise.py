"""The noise of federated rounds, from the aggregator or as declared to a budget."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._notes import NOTES
from tfdpclip.accounting.phases import PrivacyMismatchError


@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """The noise of a round, as far as its cost depends on it.

    Attributes:
      noise_multiplier: z.
      place: `"central"`, the server's, or `"distributed"`, the clients' shares.
      run: The digest of correlated noise; None for independent noise.
      seeded: Whether the noise comes from a fixed seed.
    """

    noise_multiplier: float
    place: str = "central"
    run: tuple[int, ...] | None = None
    seeded: bool = False

    def __str__(self) -> str:
        kind = "" if self.run is None else ", correlated"
        seed = ", from a seed" if self.seeded else ""
        return f"{self.place} noise of multiplier {self.noise_multiplier:g}{kind}{seed}"


def list_made() -> list[str]:
    """The noise of the aggregators that made processes here, in words."""
    return [str(noise) for noise in NOTES.round_noises]


def is_possible(noise: RoundNoise) -> bool:
    """Whether rounds here may have this noise: an aggregator has it, or none exists."""
    return not NOTES.round_noises or noise in NOTES.round_noises


def declared_noise(noise_multiplier: Any, noise: Any) -> RoundNoise:
    """Returns the noise of a budget that was given numbers instead of an aggregator."""
    if noise_multiplier is None:
        raise ValueError(
            "aggregator must be given: RoundBudget(epsilon, delta, cohorts, "
            "aggregator=aggregator), with aggregator = "
            "dpc.federated.clipped_mean(...). If code of your own adds the noise, give "
            "noise_multiplier instead."
        )
    if hasattr(noise_multiplier, "round_noise"):
        raise ValueError(
            "noise_multiplier is an aggregator: write RoundBudget(epsilon, delta, "
            "cohorts, aggregator=aggregator)."
        )
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    digest = getattr(noise, "digest", None)
    return RoundNoise(z, run=None if digest is None else tuple(digest))


def noise_of_aggregator(aggregator: Any, said: dict[str, Any], unit: Any) -> Any:
    """Returns an aggregator's correlated noise, after a check for contradictions.

    Args:
      aggregator: A `clipped_mean`.
      said: The budget's further arguments, by name.
      unit: The object that is clipped.

    Raises:
      ValueError: If `aggregator` is not an aggregator of this library.
      PrivacyMismatchError: If an argument contradicts the aggregator.
    """
    if not hasattr(aggregator, "round_noise"):
        raise ValueError(
            "aggregator must be the result of dpc.federated.clipped_mean(...) or "
            f"plan.aggregator(...), got {_arguments.shown(aggregator)}."
        )
    if unit != "client":
        _arguments.choice("unit", unit, ("client",))
    clip, noise = aggregator.clip, aggregator.correlated
    follows = {
        "noise_multiplier": (None, (float(aggregator.noise_multiplier),)),
        "clip": ("", (clip, str(clip))),
        "noise": (None, () if noise is None else (noise,)),
    }
    for name, (left_out, fits) in follows.items():
        given = said[name]
        if name == "noise_multiplier" and given is not None:
            given = _arguments.number(name, given)
        if given is left_out or _equal(given, left_out):
            continue
        if not any(_equal(given, value) for value in fits):
            raise PrivacyMismatchError(
                f"{name}={_arguments.shown(given)} contradicts aggregator, which has "
                f"{name} {_arguments.shown(fits[0] if fits else None)}: the aggregator "
                f"determines {name}. Leave {name} out."
                + see("two-numbers-for-one-noise")
            )
    return noise


def _equal(given: Any, value: Any) -> bool:
    """Whether two values of one type are equal: arrays and tensors may not compare."""
    return isinstance(given, type(value)) and bool(given == value)


def settings_of_noise(noise: Any, scheme: Any) -> dict[str, Any]:
    """Returns the settings of a ledger's phase for correlated noise."""
    if noise is None:
        return {}
    if not hasattr(noise, "of_a_phase"):
        raise ValueError(
            "noise must be the aggregator's dpc.CorrelatedNoise(matrix, rounds, "
            f"scheme), or None; got {_arguments.shown(noise)}."
        )
    if not noise.sampling.accounts_for(scheme):
        raise PrivacyMismatchError(
            f"The noise is made for {noise.sampling.describe()}, and the cohorts are "
            f"drawn by {scheme.describe()}. How often a client takes part determines "
            "the noise: give both the same scheme."
        )
    return noise.of_a_phase
