"""Limits the weights and indicators of users' clip rules in every step."""

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
    """The largest norm of a record in each group, as a function of the rule's state.

    Records are limited to these norms when they are clipped, and noise is scaled by
    them when a step ends, several batches later. Anything else that a user's rule reads
    may change in between. So the function is traced when the rule is given, and both
    uses call that trace.

    Args:
      rule: a clip rule.

    Raises:
      ValueError: if the rule is a user's, and reads more than its state.
    """
    if not foreign(rule, ClipRule):
        return rule.noise_scales
    traced = vars(rule).get("_scales")
    if traced is None:
        traced = _Traced(rule)
        object.__setattr__(rule, "_scales", traced)
    return traced


def trace_scales(rule: ClipRule) -> None:
    """Traces a user's rule in its present settings, for all callers of `scales_of`.

    Raises:
      ValueError: as `scales_of`; or if the rule was traced before, and its settings
        changed since: callers may still use the earlier trace.
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
    """A trace of a rule's `noise_scales` in its present settings."""

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
                f"clip={rule}: sensitivity(state) depends on more than its state: "
                f"{other}. A step's records are clipped before its noise is drawn, and "
                "the value may change in between. Keep all changing values in the "
                "state: initial_state() and next_state(...)."
                + see("schedules-that-read-more-than-the-step")
            )
        _refuse_memory(rule, state)

    def __call__(self, state: Any) -> tf.Tensor:
        return self._function(*map(tf.convert_to_tensor, tf.nest.flatten(state)))

    def __reduce__(self):
        # A trace cannot be copied: a copy of the rule is traced when it is given.
        return type(None), ()


def _refuse_memory(rule: ClipRule, state: Any) -> None:
    """Raises if a method of a user's rule reads or writes more than its arguments.

    A variable that `weights` writes keeps exact norms, which `next_state` would release
    with the next clip norm, and `weights` with the next step's records.
    """
    groups = () if rule.assignment is None else (max(rule.assignment) + 1,)
    norms = tf.TensorSpec([None, *groups], tf.float32)
    counts = tf.TensorSpec([len(rule.count_stddevs(1.0))], tf.float32)
    leaves = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(state)]

    def with_state(method):
        def call(first, *parts):
            return method(first, tf.nest.pack_sequence_as(state, parts))

        return call

    methods = {
        "weights(norms, state)": (rule.weights, norms),
        "indicators(norms, state, present)": (rule.indicators, norms),
        "next_state(state, fractions)": (
            lambda fractions, now: rule.next_state(now, fractions),
            counts,
        ),
    }
    for name, (method, spec) in methods.items():
        with tf.init_scope():
            function = tf.function(with_state(method), autograph=False)
            traced = function.get_concrete_function(spec, *leaves)
        other = _schedules.read_besides(traced)
        if other is not None:
            raise ValueError(
                f"clip={rule}: {name} uses more than its arguments: {other}. What a "
                "rule keeps of one step's norms would be released without noise, or "
                "change the clip of other records. Keep all changing values in the "
                "state: initial_state() and next_state(...), of noised fractions."
                + see("clip-norms-from-private-data")
            )


@tf.autograph.experimental.do_not_convert
def limit_weights(
    rule: ClipRule, norms: tf.Tensor, state: Any, weights: tf.Tensor
) -> tf.Tensor:
    """Weights under which no record is longer than the rule states.

    The test of a rule covers some hundreds of norms, and a user's rule may break its
    guarantee between these. So its weights are limited in every step: a record that
    would be too long is shortened to the length that the noise hides, and a record of a
    weight or norm that is not a number is dropped. The library's own rules are tested
    far more closely, and their weights are not changed.

    Args:
      rule: a clip rule.
      norms: the records' norms, `[B]`, or `[B, L]` for a rule with groups.
      state: the rule's state.
      weights: the rule's weights for these norms.

    Returns:
      Weights, of the norms' shape.
    """
    if not foreign(rule, ClipRule):
        return weights
    most = tf.cast(scales_of(rule)(state), weights.dtype)
    parts = tf.abs(weights * tf.cast(norms, weights.dtype) / most)
    nothing = tf.zeros_like(parts)
    # 0 also for an infinite norm, and for a group that may add nothing.
    parts = tf.where(tf.equal(weights, nothing), nothing, parts)
    length = parts if rule.assignment is None else tf.norm(parts, axis=1, keepdims=True)
    held = weights / tf.maximum(length, 1.0)
    held = tf.where(length <= 1 + ROUNDING, weights, held)
    return tf.where(tf.math.is_finite(length) & (weights >= nothing), held, nothing)


def limit_fractions(rule: ClipRule, fractions: tf.Tensor) -> tf.Tensor:
    """Noised fractions, in [0, 1] for a user's rule, which may rely on the range."""
    return (
        tf.clip_by_value(fractions, 0.0, 1.0) if foreign(rule, ClipRule) else fractions
    )


@tf.autograph.experimental.do_not_convert
def limit_indicators(rule: ClipRule, indicators: tf.Tensor) -> tf.Tensor:
    """Indicators in [-1/2, 1/2], as every rule's must be."""
    if not foreign(rule, ClipRule):
        return indicators
    held = tf.clip_by_value(indicators, -0.5, 0.5)
    # A clip leaves NaN unchanged, so NaN becomes 0 here.
    return tf.where(tf.math.is_finite(indicators), held, tf.zeros_like(held))
