"""An aggregator as `RoundBudget` sees it, without TensorFlow Federated."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdpclip.accounting.round_noise import RoundNoise


@dataclasses.dataclass(frozen=True)
class Aggregator:
    """Says of its noise what `dpc.federated.clipped_mean` says of central noise."""

    noise_multiplier: float
    correlated: Any = None
    clip: Any = 1.0

    accountant = None

    @property
    def round_noise(self) -> RoundNoise:
        run = None if self.correlated is None else tuple(self.correlated.digest)
        return RoundNoise(self.noise_multiplier, run=run)

    def of_a_phase(self, cohorts: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        told = {
            "noise_multiplier": self.noise_multiplier,
            "clip": self.clip,
            "seed": getattr(cohorts, "seed", None),
            "sampling": cohorts.scheme,
        }
        return told, ()
