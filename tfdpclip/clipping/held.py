"""Holds clip rules that are not of this library to their word, in every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip import _schedules
from tfdpclip._arguments import foreign
from tfdpclip._docs import see
from tfdpclip.clipping.base import ClipRule
from tfdpclip.clipping.bounds import ROUNDING


def scales_of(rule: ClipRule) -> Callable[[Any], tf.Tensor]:
    """How far a record may get in each group: a function of the rule's state alone.

    Records are held to it when they are clipped, and noise is scaled by it when a step
    ends, batches later. What a rule of others' reads in between may change, so it is
    traced when the rule is taken: that trace is what both use.

    Args:
      rule: a clip rule.

    Raises:
      ValueError: if it is of others, and reads something besides its state.
    """
    if not foreign(rule, ClipRule):
        return rule.noise_scales
    traced = vars(rule).get("_scales")
    if traced is None:
        traced = _Traced(rule)
        object.__setattr__(rule, "_scales", traced)
    return traced


def trace_scales(rule: ClipRule) -> None:
    """Traces a rule of others as it is now, for all who use it.

    Raises:
      ValueError: as `scales_of`; or if it was taken before, and changed since: its
        trace is of what it was, for whoever uses it still.
    """
    traced = scales_of(rule)
    if isinstance(traced, _Traced) and traced.settings != _settings_of(rule):
        raise ValueError(
            f"clip={rule} was used before, and changed since. Make a new one: "
            f"{type(rule).__name__}(...)."
        )


def _settings_of(rule: ClipRule) -> dict[str, str]:
    fields = dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()
    return {field.name: repr(getattr(rule, field.name)) for field in fields}


class _Traced:
    """The `noise_scales` of a rule as they are now."""

    def __init__(self, rule: ClipRule):
        self.settings = _settings_of(rule)
        with tf.init_scope():
            state = tf.nest.map_structure(tf.convert_to_tensor, rule.initial_state())
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(state)]

            def scales(*leaves):
                return rule.noise_scales(tf.nest.pack_sequence_as(state, leaves))

            function = tf.function(scales, autograph=False)
            self._function = function.get_concrete_function(*specs)
        other = _schedules.read_besides(self._function)
        if other is not None:
            raise ValueError(
                f"clip={rule}: how far it lets a record get, sensitivity(state), "
                f"depends on more than its state: {other}. A step's records are "
                "clipped before its noise is drawn, and it may change in between. Keep "
                "what changes in the state: initial_state() and next_state(...)."
                + see("schedules-that-read-more-than-the-step")
            )

    def __call__(self, state: Any) -> tf.Tensor:
        return self._function(*map(tf.convert_to_tensor, tf.nest.flatten(state)))

    def __reduce__(self):
        # No trace can be copied: a copy of the rule is traced when it is taken.
        return type(None), ()


@tf.autograph.experimental.do_not_convert
def limit_weights(
    rule: ClipRule, norms: tf.Tensor, state: Any, weights: tf.Tensor
) -> tf.Tensor:
    """Weights that take no record further than the rule says, whatever it does.

    What is tried are some hundreds of norms, and a rule of others' may break its word
    between them. So its weights are held to it in every step: a record that would get
    further is shortened to where the noise hides it, and one of which that is no number
    is dropped. The library's own rules are tested far more closely, and left alone.

    Args:
      rule: a clip rule.
      norms: the records' norms, `[B]`, or `[B, L]` for a rule with groups.
      state: its state.
      weights: what it gave for them.

    Returns:
      Weights, of the norms' shape.
    """
    if not foreign(rule, ClipRule):
        return weights
    most = tf.cast(scales_of(rule)(state), weights.dtype)
    parts = tf.abs(weights * tf.cast(norms, weights.dtype) / most)
    nothing = tf.zeros_like(parts)
    # Also of an infinite norm, and of a group that may add nothing.
    parts = tf.where(tf.equal(weights, nothing), nothing, parts)
    length = parts if rule.assignment is None else tf.norm(parts, axis=1, keepdims=True)
    held = weights / tf.maximum(length, 1.0)
    held = tf.where(length <= 1 + ROUNDING, weights, held)
    return tf.where(tf.math.is_finite(length) & (weights >= nothing), held, nothing)


@tf.autograph.experimental.do_not_convert
def limit_indicators(rule: ClipRule, indicators: tf.Tensor) -> tf.Tensor:
    """Indicators that move a count no further than every rule's may."""
    if not foreign(rule, ClipRule):
        return indicators
    held = tf.clip_by_value(indicators, -0.5, 0.5)
    # What is no number, a clip does not cut.
    return tf.where(tf.math.is_finite(indicators), held, tf.zeros_like(held))
