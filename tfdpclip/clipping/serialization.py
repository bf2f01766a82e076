"""Clip rules from users' arguments, and from saved configurations."""

from __future__ import annotations

from typing import Any

from tfdpclip import _arguments, _schedules
from tfdpclip._arguments import shown
from tfdpclip.clipping.base import ClipRule, registered_rules
from tfdpclip.clipping.rules import FixedClip
from tfdpclip.tensorflow_privacy import as_clip, in_place_of


def as_rule(clip: Any, name: str = "clip") -> ClipRule:
    """The rule meant by `clip`: a rule, a clip norm, or a rule's serialised form.

    Args:
      clip: a clip rule, a number above 0, a Keras schedule, a result of
        `serialize_rule`, or a query of tensorflow-privacy, whose rule counts and not
        its noise.
      name: the argument's name, for errors.

    Raises:
      ValueError: if `clip` is none of these.

    >>> as_rule(1.5)
    FixedClip(norm=1.5)
    """
    clip = as_clip(clip) or clip
    if isinstance(clip, ClipRule):
        return clip
    if isinstance(clip, dict) and "module" not in clip:
        kind, config = clip.get("class_name"), clip.get("config", {})
        registered = registered_rules()
        if not isinstance(kind, str) or kind not in registered:
            raise ValueError(
                f"{name} names an unknown rule {shown(kind)}; known: "
                f"{', '.join(registered)}. A rule of your own is known once its class "
                "is registered, by @dpc.clipping.register_rule above it: import the "
                "module that defines the class before you load what was saved."
            )
        try:
            rule = registered[kind](**config)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} has a config that {kind} does not take: {error}"
            ) from error
        return rule
    if isinstance(clip, (str, bytes, bool)) or clip is None:
        raise ValueError(
            f"{name} must be a clip norm or a clip rule, got {shown(clip)}. For "
            f"example {name}=1.0, {name}=dpc.QuantileClip() or "
            f"{name}=dpc.AutomaticClip()."
        )
    if text := in_place_of(*(kind.__name__ for kind in type(clip).__mro__)):
        raise ValueError(f"{name} must be a clip norm or a clip rule.{text}")
    return FixedClip(_schedules.setting(name, clip, _arguments.clip_norm))


def serialize_rule(rule: ClipRule) -> dict[str, Any]:
    """A JSON-able form of `rule`, from which `as_rule` makes an equal rule."""
    _arguments.instance("rule", rule, ClipRule, "a clip rule")
    return {"class_name": type(rule).__name__, "config": rule.get_config()}
