"""Sampling schemes that draw the records and state what that does to privacy.

`Poisson(rate)` and the others are frozen dataclasses of public settings.
`scheme.batches(data)` draws training batches for `model.fit`, `scheme.cohorts(ids)`
draws the clients of federated rounds, and `scheme.event(noise_multiplier, steps)` is
what `tfdpclip.accounting` measures.
"""

from typing import TYPE_CHECKING

from tfdpclip.sampling import drawing  # Gives schemes `batches` and `cohorts`.
from tfdpclip.sampling.available import AvailableClients, AvailableCohorts
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.capped import CappedPoisson
from tfdpclip.sampling.cohorts import Cohorts
from tfdpclip.sampling.schemes import (
    FixedSize,
    FullBatch,
    Poisson,
    ShuffledEpochs,
    from_dict,
)
from tfdpclip.sampling.separated import CyclicPoisson, MinSeparation

if TYPE_CHECKING:
    from tfdpclip.sampling.batches import Batches


def __getattr__(name: str):
    # Batches need TensorFlow; schemes and accounting do not.
    if name == "Batches":
        from tfdpclip.sampling.batches import Batches

        return Batches
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "SamplingScheme",
    "ShuffledEpochs",
    "from_dict",
]
