"""Differentially private training for TensorFlow, Keras and TFF, by clipping.

``import tfdpclip as dpc`` is the documented spelling.
"""

from tfdpclip import accounting, gradients, keras, sampling
from tfdpclip._version import __version__
from tfdpclip.clipping import AutomaticClip, ClipRule, FixedClip, QuantileClip
from tfdpclip.gradients import ExampleIsolationError, LossStructureError

__all__ = [
    "AutomaticClip",
    "ClipRule",
    "ExampleIsolationError",
    "FixedClip",
    "LossStructureError",
    "QuantileClip",
    "__version__",
    "accounting",
    "gradients",
    "keras",
    "sampling",
]
