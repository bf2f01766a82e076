"""Clip rules: pure functions from record norms and a small state to weights.

A rule is a frozen dataclass of public settings. Its methods are pure functions over
tensors, so the same object runs inside a Keras ``tf.function`` and inside a serialised
federated computation. Private data only ever arrives as an argument.
"""

from tfdpclip.clipping.groups import Groups, layer_of, make_groups
from tfdpclip.clipping.layerwise import (
    GroupedRule,
    LayerwiseClip,
    PublicNormClip,
    ScaledClip,
)
from tfdpclip.clipping.rules import AutomaticClip, ClipRule, FixedClip, QuantileClip
from tfdpclip.clipping.serialization import as_rule, register_rule, serialize_rule

for _rule in (LayerwiseClip, PublicNormClip, ScaledClip):
    register_rule(_rule)

__all__ = [
    "AutomaticClip",
    "ClipRule",
    "FixedClip",
    "GroupedRule",
    "Groups",
    "LayerwiseClip",
    "PublicNormClip",
    "QuantileClip",
    "ScaledClip",
    "as_rule",
    "layer_of",
    "make_groups",
    "register_rule",
    "serialize_rule",
]
