"""Sampling schemes: how records are drawn, and the privacy event of the draws.

Schemes such as `Poisson(rate)` are frozen dataclasses of public settings.
`scheme.batches(data)` draws training batches for `model.fit`, `scheme.cohorts(ids)`
draws the clients of federated rounds, and `tfdpclip.accounting` measures the event
`scheme.event(noise_multiplier, steps)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.available import AvailableClients, AvailableCohorts
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.cohorts import Cohorts
from tfdpclip.sampling.poisson import CappedPoisson, FullBatch, Poisson
from tfdpclip.sampling.schemes import FixedSize, ShuffledEpochs, from_dict
from tfdpclip.sampling.separated import CyclicPoisson, MinSeparation
from tfdpclip.sampling.thresholded import LaplaceRelease, ThresholdedCounts

if TYPE_CHECKING:
    from tfdpclip.sampling.batches import Batches
    from tfdpclip.sampling.streams import Stream


def __getattr__(name: str):
    # Batches need TensorFlow; schemes and accounting do not.
    if name == "Batches":
        from tfdpclip.sampling.batches import Batches

        return Batches
    if name == "Stream":
        from tfdpclip.sampling.streams import Stream

        return Stream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _batches(self: SamplingScheme, data: Any, *others: Any, **options: Any) -> Batches:
    """Draws training batches of `data`, ready for `model.fit`.

    See `tfdpclip.sampling.Batches` for the options and guarantees.

    Raises:
      TypeError: if inputs and labels are not one argument.
    """
    if others:
        raise TypeError(
            "Inputs and labels are one argument: batches((x, y)), or plan.fit(model, "
            "(x, y)). Name all further arguments, as in batches((x, y), seed=1)."
        )
    return __getattr__("Batches")(self, data, **options)


def _cohorts(
    self: SamplingScheme, client_ids: Any, *, seed: int | None = None
) -> Cohorts:
    """Draws the clients of each federated round.

    See `tfdpclip.sampling.Cohorts`.
    """
    return Cohorts(self, client_ids, seed=seed)


# `Batches` and `Cohorts` import the schemes; schemes import neither. The methods are
# attached here because every import of a scheme runs this module first.
SamplingScheme.batches = _batches
SamplingScheme.cohorts = _cohorts

__all__ = [
    "AvailableClients",
    "AvailableCohorts",
    "Batches",
    "CappedPoisson",
    "Cohorts",
    "CyclicPoisson",
    "FixedSize",
    "FullBatch",
    "LaplaceRelease",
    "MinSeparation",
    "Poisson",
    "RandomAllocation",
    "SamplingScheme",
    "ShuffledEpochs",
    "Stream",
    "ThresholdedCounts",
    "from_dict",
]
