"""Matrices as JSON-ready values, and back, for ledgers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdpclip import _arguments
from tfdpclip.correlated import matrices
from tfdpclip.correlated import participation as participations
from tfdpclip.correlated.workload import Workload

_PARTICIPATIONS: dict[str, Any] = {
    "SingleEpoch": lambda **_: participations.SingleEpoch(),
    "MinSeparation": participations.MinSeparation,
    "CyclicPoisson": participations.CyclicPoisson,
}


def from_dict(settings: dict[str, Any]) -> matrices.NoiseMatrix:
    """Returns the matrix that `NoiseMatrix.to_dict` described.

    The coefficients of an optimised matrix are restored, not searched for again.

    Raises:
      ValueError: If the settings do not describe a matrix.

    >>> from_dict(matrices.SquareRootToeplitz(3).to_dict())
    SquareRootToeplitz(bands=3, momentum=0.0)
    """
    settings = dict(_arguments.instance("settings", settings, Mapping, "a dictionary"))
    kinds = _arguments.kinds_of(matrices.NoiseMatrix)
    try:
        kind = kinds[settings.pop("matrix")]
        if isinstance(settings.get("participation"), Mapping):
            given = dict(settings["participation"])
            make = _PARTICIPATIONS[given.pop("participation")]
            settings["participation"] = make(**given)
        if isinstance(settings.get("workload"), Mapping):
            settings["workload"] = Workload(**settings["workload"])
        return kind(**settings)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"settings do not describe a noise matrix ({error}); known matrices are "
            f"{', '.join(sorted(kinds))}."
        ) from error
