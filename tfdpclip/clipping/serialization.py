"""Clip rules from what users write, and from saved configurations."""

from __future__ import annotations

from typing import Any

from tfdpclip.clipping import checks
from tfdpclip.clipping.rules import AutomaticClip, ClipRule, FixedClip, QuantileClip

_RULES: dict[str, type[ClipRule]] = {}


def register_rule(rule_class: type[ClipRule]) -> type[ClipRule]:
    """Makes a rule class known to `as_rule`, by its name."""
    _RULES[rule_class.__name__] = rule_class
    return rule_class


for _rule in (FixedClip, QuantileClip, AutomaticClip):
    register_rule(_rule)


def as_rule(clip: Any, name: str = "clip") -> ClipRule:
    """The rule meant by `clip`: a rule, a clip norm, or a rule's serialised form.

    Args:
      clip: a clip rule, a number above 0, a Keras schedule, or what `serialize_rule`
        returned.
      name: the argument's name, for errors.

    Raises:
      ValueError: if `clip` is none of these.

    >>> as_rule(1.5)
    FixedClip(norm=1.5)
    """
    if isinstance(clip, ClipRule):
        return clip
    if isinstance(clip, dict) and clip.get("class_name") in _RULES:
        return _RULES[clip["class_name"]](**clip.get("config", {}))
    if isinstance(clip, dict) and "module" not in clip:
        raise ValueError(
            f"{name} names an unknown rule {clip.get('class_name')!r}; known: "
            f"{', '.join(_RULES)}."
        )
    if isinstance(clip, (str, bytes, bool)) or clip is None:
        raise ValueError(
            f"{name} must be a clip norm or a clip rule, got {clip!r}. For example "
            f"{name}=1.0, {name}=dpc.QuantileClip() or {name}=dpc.AutomaticClip()."
        )
    return FixedClip(checks.check_setting(name, clip))


def serialize_rule(rule: ClipRule) -> dict[str, Any]:
    """A JSON-able form of `rule` that `as_rule` turns back into it."""
    return {"class_name": type(rule).__name__, "config": rule.get_config()}
