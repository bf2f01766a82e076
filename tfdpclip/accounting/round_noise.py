"""The noise of federated rounds, from the aggregator that adds it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpclip import _arguments
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


def noise_of_aggregator(aggregator: Any) -> Any:
    """Returns an aggregator's correlated noise, or None.

    Raises:
      ValueError: If `aggregator` is not an aggregator of this library.
    """
    if not hasattr(aggregator, "round_noise"):
        raise ValueError(
            "aggregator must be the result of dpc.federated.clipped_mean(...) or "
            f"plan.aggregator(...), got {_arguments.shown(aggregator)}. For noise that "
            "code of your own adds, keep a dpc.accounting.Ledger."
        )
    return aggregator.correlated


def settings_of_noise(noise: Any, scheme: Any) -> dict[str, Any]:
    """Returns the settings of a ledger's phase for correlated noise."""
    if noise is None:
        return {}
    if not noise.sampling.accounts_for(scheme):
        raise PrivacyMismatchError(
            f"The noise is made for {noise.sampling.describe()}, and the cohorts are "
            f"drawn by {scheme.describe()}. How often a client takes part determines "
            "the noise: give both the same scheme."
        )
    return noise.of_a_phase
