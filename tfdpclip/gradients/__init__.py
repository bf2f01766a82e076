"""Per-example gradients from the loss and the variables alone."""

from tfdpclip.gradients.engine import PerExampleGradients
from tfdpclip.gradients.errors import (
    ExampleIsolationError,
    GradientMismatchError,
    LossStructureError,
)
from tfdpclip.gradients.flows.op_flows import op_flow
from tfdpclip.gradients.functions import clipped_sum, per_example_norms
from tfdpclip.gradients.proof.fallback import JacobianFallbackWarning
from tfdpclip.gradients.proof.single_examples import OneByOneWarning
from tfdpclip.gradients.rules.rule_table import OpUse, op_rule

__all__ = [
    "ExampleIsolationError",
    "GradientMismatchError",
    "JacobianFallbackWarning",
    "LossStructureError",
    "OneByOneWarning",
    "OpUse",
    "PerExampleGradients",
    "clipped_sum",
    "op_flow",
    "op_rule",
    "per_example_norms",
]
