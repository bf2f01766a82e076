"""Differentially private training for TensorFlow, Keras and TFF, by clipping.

``import tfdpclip as dpc`` is the documented spelling. Names are loaded when they are
first used, so that ``tfdpclip.accounting`` does not wait for TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfdpclip._version import __version__
from tfdpclip.tensorflow_privacy import in_place_of

if TYPE_CHECKING:
    from tfdpclip import (
        accounting,
        clipping,
        correlated,
        diagnostics,
        federated,
        gradients,
        keras,
        sampling,
        testing,
        tuning,
    )
    from tfdpclip.clipping import (
        AutomaticClip,
        ClipRule,
        FixedClip,
        LayerwiseClip,
        PerSampleAdaptiveClip,
        PublicNormClip,
        QuantileClip,
        ScaledClip,
    )
    from tfdpclip.gradients import (
        ExampleIsolationError,
        GradientMismatchError,
        LossStructureError,
    )
    from tfdpclip.noise.runs import CorrelatedNoise

#: The modules of the names of `__all__`, other than modules and names of `clipping`.
_HOMES = {
    "CorrelatedNoise": "tfdpclip.noise.runs",
    "ExampleIsolationError": "tfdpclip.gradients",
    "GradientMismatchError": "tfdpclip.gradients",
    "LossStructureError": "tfdpclip.gradients",
}

__all__ = [
    "AutomaticClip",
    "ClipRule",
    "CorrelatedNoise",
    "ExampleIsolationError",
    "FixedClip",
    "GradientMismatchError",
    "LayerwiseClip",
    "LossStructureError",
    "PerSampleAdaptiveClip",
    "PublicNormClip",
    "QuantileClip",
    "ScaledClip",
    "__version__",
    "accounting",
    "clipping",
    "correlated",
    "diagnostics",
    "federated",
    "gradients",
    "keras",
    "sampling",
    "testing",
    "tuning",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}." + in_place_of(name)
        )
    if name.islower():
        return importlib.import_module(f"tfdpclip.{name}")
    home = importlib.import_module(_HOMES.get(name, "tfdpclip.clipping"))
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
