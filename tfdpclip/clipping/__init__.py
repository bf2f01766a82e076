"""Clip rules: pure functions from record norms and a small state to weights.

A rule is a frozen dataclass of public settings. Its methods are pure functions over
tensors, so the same object runs inside a Keras ``tf.function`` and inside a serialised
federated computation. Private data only ever arrives as an argument.

A user's own rule is a subclass of `ClipRule`, registered by `register_rule` so that
saved models can name the class, and tested by `dpc.testing.assert_clip_rule`; see "Add
a clip rule" in docs/architecture.md.
"""

from tfdpclip.clipping.base import ClipRule, register_rule, registered_rules
from tfdpclip.clipping.groups import Groups, make_groups
from tfdpclip.clipping.interface import bound_rule
from tfdpclip.clipping.layerwise import GroupedRule, LayerwiseClip
from tfdpclip.clipping.public_norms import PublicNormClip, ScaledClip
from tfdpclip.clipping.rules import (
    AutomaticClip,
    FixedClip,
    PerSampleAdaptiveClip,
    QuantileClip,
)
from tfdpclip.clipping.serialization import as_rule, serialize_rule

__all__ = [
    "AutomaticClip",
    "ClipRule",
    "FixedClip",
    "GroupedRule",
    "Groups",
    "LayerwiseClip",
    "PerSampleAdaptiveClip",
    "PublicNormClip",
    "QuantileClip",
    "ScaledClip",
    "as_rule",
    "bound_rule",
    "make_groups",
    "register_rule",
    "registered_rules",
    "serialize_rule",
]
