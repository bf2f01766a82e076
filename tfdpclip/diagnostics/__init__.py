"""Looking at gradients: their norms, what clipping does to them, and their geometry.

Everything here is measured without noise. On private data the results are private, too,
and must not be released; on public data they may be.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfdpclip.diagnostics.geometry import (
    ClippingBias,
    GradientGeometry,
    gradient_geometry,
)
from tfdpclip.diagnostics.norms import NormSummary, summarize_norms
from tfdpclip.diagnostics.reweighting import (
    ClassAccuracy,
    RetainedWeight,
    class_accuracy,
    class_weights,
    retained_weight,
)
from tfdpclip.diagnostics.symmetry import SymmetryScore, symmetry_score

if TYPE_CHECKING:
    from tfdpclip.diagnostics.gradients import GradientMeter, GradientNorms

# These need TensorFlow, which functions of arrays do without.
_LAZY = ("GradientMeter", "GradientNorms")

__all__ = [
    "ClassAccuracy",
    "ClippingBias",
    "GradientGeometry",
    "GradientMeter",
    "GradientNorms",
    "NormSummary",
    "RetainedWeight",
    "SymmetryScore",
    "class_accuracy",
    "class_weights",
    "gradient_geometry",
    "retained_weight",
    "summarize_norms",
    "symmetry_score",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.gradients"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
