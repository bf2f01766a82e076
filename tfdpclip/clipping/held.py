"""Holds clip rules that are not of this library to their word, in every step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdpclip._arguments import foreign
from tfdpclip.clipping.base import ClipRule
from tfdpclip.clipping.bounds import ROUNDING


@tf.autograph.experimental.do_not_convert
def within(
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
    scales = tf.cast(rule.noise_scales(state), weights.dtype)
    parts = tf.abs(weights * tf.cast(norms, weights.dtype) / scales)
    nothing = tf.zeros_like(parts)
    # Also of an infinite norm, and of a group that may add nothing.
    parts = tf.where(tf.equal(weights, nothing), nothing, parts)
    length = parts if rule.assignment is None else tf.norm(parts, axis=1, keepdims=True)
    held = weights / tf.maximum(length, 1.0)
    held = tf.where(length <= 1 + ROUNDING, weights, held)
    return tf.where(tf.math.is_finite(length) & (weights >= nothing), held, nothing)


@tf.autograph.experimental.do_not_convert
def cut(rule: ClipRule, indicators: tf.Tensor) -> tf.Tensor:
    """Indicators that move a count no further than every rule's may."""
    if not foreign(rule, ClipRule):
        return indicators
    held = tf.clip_by_value(indicators, -0.5, 0.5)
    # What is no number, a clip does not cut.
    return tf.where(tf.math.is_finite(indicators), held, tf.zeros_like(held))
