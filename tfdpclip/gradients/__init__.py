"""Per-example gradients from the loss and the variables alone."""

from tfdpclip.gradients import recurrent as _recurrent  # noqa: F401  adds its rule
from tfdpclip.gradients.engine import (
    PerExampleGradients,
    clipped_sum,
    per_example_norms,
)
from tfdpclip.gradients.errors import (
    ExampleIsolationError,
    GradientMismatchError,
    LossStructureError,
)
from tfdpclip.gradients.fallback import JacobianFallbackWarning

__all__ = [
    "ExampleIsolationError",
    "GradientMismatchError",
    "JacobianFallbackWarning",
    "LossStructureError",
    "PerExampleGradients",
    "clipped_sum",
    "per_example_norms",
]
