"""`scheme.batches(...)` and `scheme.cohorts(...)`: every scheme gets them from above.

Batches and cohorts know the schemes that they draw by. Schemes know neither, so the
methods that lead from a scheme to what draws are here; `tfdpclip.sampling` imports this
module, and thereby so does whoever imports a scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.cohorts import Cohorts

if TYPE_CHECKING:
    from tfdpclip.sampling.batches import Batches


def batches(self: SamplingScheme, data: Any, *others: Any, **options: Any) -> Batches:
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
    # They need TensorFlow; schemes and accounting do not.
    from tfdpclip.sampling.batches import Batches

    return Batches(self, data, **options)


def cohorts(
    self: SamplingScheme, client_ids: Any, *, seed: int | None = None
) -> Cohorts:
    """Draws the clients of each federated round.

    See `tfdpclip.sampling.Cohorts`.
    """
    return Cohorts(self, client_ids, seed=seed)


SamplingScheme.batches = batches
SamplingScheme.cohorts = cohorts
