"""Differentially private training for TensorFlow, Keras and TFF, by clipping.

``import tfdpclip as dpc`` is the documented spelling.
"""

from tfdpclip._version import __version__
from tfdpclip.clipping import AutomaticClip, ClipRule, FixedClip, QuantileClip

__all__ = [
    "AutomaticClip",
    "ClipRule",
    "FixedClip",
    "QuantileClip",
    "__version__",
]
