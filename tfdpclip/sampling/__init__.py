"""Sampling schemes that draw the records and state what that does to privacy.

`Poisson(rate)` and the others are frozen dataclasses of public settings.
`scheme.batches(data)` draws training batches for `model.fit`, `scheme.cohorts(ids)`
draws the clients of federated rounds, and `scheme.event(noise_multiplier, steps)` is
what `tfdpclip.accounting` measures.
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
from tfdpclip.sampling.thresholded import ThresholdedCounts

if TYPE_CHECKING:
    from tfdpclip.sampling.batches import Batches


def __getattr__(name: str):
    # Batches need TensorFlow; schemes and accounting do not.
    if name == "Batches":
        from tfdpclip.sampling.batches import Batches

        return Batches
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _batches(self: SamplingScheme, data: Any, *others: Any, **options: Any) -> Batches:
    """Draws training batches of `data`, ready for `model.fit`.

    See `tfdpclip.sampling.Batches` for the options and guarantees.

    Raises:
      TypeError: if inputs and labels are not one argument.
    """
    if others:
        raise TypeError(
            "batches takes inputs and labels as one argument: batches((x, y)). All "
            "others have names, as in batches((x, y), seed=1)."
        )
    return __getattr__("Batches")(self, data, **options)


def _cohorts(
    self: SamplingScheme, client_ids: Any, *, seed: int | None = None
) -> Cohorts:
    """Draws the clients of each federated round.

    See `tfdpclip.sampling.Cohorts`.
    """
    return Cohorts(self, client_ids, seed=seed)


# Batches and cohorts know the schemes that they draw by, and schemes know neither.
# Whoever imports a scheme has been here.
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
    "MinSeparation",
    "Poisson",
    "RandomAllocation",
    "SamplingScheme",
    "ShuffledEpochs",
    "ThresholdedCounts",
    "from_dict",
]
