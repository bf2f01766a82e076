"""Holds every clip rule to its bound, in every step.

A rule says how long a weighted record may be, by its `noise_scales`, and how much each
record weighs. The noise of a step is scaled by the first, so that the second must keep
to the first. No rule is believed: its weights are limited in every step.

*Formal guarantees*, for every rule, whatever its methods return, and norms that are
right:
* A record's parts, the part of group h over ``scales(state)[h]``, have a joint L2 norm
  of at most 1, up to a rounding of 1e-6. A record that would be longer is shortened,
  and a record of a weight or norm that is not a number has weight 0.
* Indicators are in [-1/2, 1/2], and 0 for padding and where they are not numbers.
* The weights and indicators of a foreign rule depend on the record's own norms and the
  state alone: the rule gets a single record at a time. The rules of the library are
  elementwise.
* The scales of a foreign rule are a trace, made at the first use of the rule: a later
  change of the rule does not change the scales between the clip of a record and the
  noise of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip.kernel.checks import foreign
from tfdpclip.kernel.rule import Rule

#: The relative error that float32 arithmetic may add.
ROUNDING = 1e-6


def is_foreign(rule: Rule) -> bool:
    """Whether a rule, or a rule inside it, is not of this library."""
    return bool(foreign(rule, Rule))


def scales_of(rule: Rule) -> Callable[[Any], tf.Tensor]:
    """The largest norm of a record in each group, as a function of the rule's state.

    Args:
      rule: a clip rule, bound to its variables if it has groups.
    """
    if not is_foreign(rule):
        return rule.noise_scales
    traced = vars(rule).get("_scales")
    if traced is None:
        traced = TracedScales(rule)
        object.__setattr__(rule, "_scales", traced)
    return traced


class TracedScales:
    """A trace of a rule's `noise_scales` in its present settings.

    Args:
      rule: the rule.

    Attributes:
      settings: the settings, by name, as text.
      function: the trace, a function of the flat state.
    """

    def __init__(self, rule: Rule):
        self.settings = settings_of(rule)
        with tf.init_scope():
            state = tf.nest.map_structure(tf.convert_to_tensor, rule.initial_state())
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(state)]

            def scales(*leaves):
                return rule.noise_scales(tf.nest.pack_sequence_as(state, leaves))

            traced = tf.function(scales, autograph=False)
            self.function = traced.get_concrete_function(*specs)

    def __call__(self, state: Any) -> tf.Tensor:
        return self.function(*map(tf.convert_to_tensor, tf.nest.flatten(state)))

    def __reduce__(self):
        # A trace cannot be copied: a copy of the rule is traced when it is used.
        return type(None), ()


def settings_of(rule: Rule) -> dict[str, str]:
    """The settings of a rule, by name, as text."""
    fields = dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()
    return {field.name: repr(getattr(rule, field.name)) for field in fields}


@tf.autograph.experimental.do_not_convert
def weights_of(rule: Rule, norms: tf.Tensor, state: Any) -> tf.Tensor:
    """Weights under which no record is longer than the rule states.

    Args:
      rule: a clip rule, bound to its variables if it has groups.
      norms: the records' norms, `[B]`, or `[B, L]` for a rule with groups.
      state: the rule's state.

    Returns:
      Weights, of the norms' shape.
    """
    weights = _record_by_record(rule, lambda part: rule.weights(part, state), norms)
    return limit_weights(rule, norms, state, weights)


@tf.autograph.experimental.do_not_convert
def limit_weights(
    rule: Rule, norms: tf.Tensor, state: Any, weights: tf.Tensor
) -> tf.Tensor:
    """The limit of `weights_of`, for weights that a rule has returned."""
    most = tf.cast(scales_of(rule)(state), weights.dtype)
    parts = tf.abs(weights * tf.cast(norms, weights.dtype) / most)
    nothing = tf.zeros_like(parts)
    # 0 also for an infinite norm, and for a group that may add nothing.
    parts = tf.where(tf.equal(weights, nothing), nothing, parts)
    length = parts if rule.assignment is None else tf.norm(parts, axis=1, keepdims=True)
    limited = weights / tf.maximum(length, 1.0)
    limited = tf.where(length <= 1 + ROUNDING, weights, limited)
    return tf.where(tf.math.is_finite(length) & (weights >= nothing), limited, nothing)


@tf.autograph.experimental.do_not_convert
def indicators_of(
    rule: Rule, norms: tf.Tensor, state: Any, present: tf.Tensor | None = None
) -> tf.Tensor:
    """The indicators of each record, `[B, K]`, within [-1/2, 1/2].

    Args:
      rule: a clip rule, bound to its variables if it has groups.
      norms: the records' norms, `[B]` or `[B, L]`.
      state: the rule's state.
      present: `[B]`, False for padding; None if every record is real.
    """
    real = tf.ones(tf.shape(norms)[:1], tf.bool) if present is None else present
    indicators = _record_by_record(
        rule, lambda *parts: rule.indicators(parts[0], state, parts[1]), norms, real
    )
    limited = tf.clip_by_value(indicators, -0.5, 0.5)
    # A clip leaves NaN unchanged, so NaN becomes 0 here.
    usable = tf.math.is_finite(indicators) & real[:, tf.newaxis]
    return tf.where(usable, limited, tf.zeros_like(limited))


def limit_fractions(rule: Rule, fractions: tf.Tensor) -> tf.Tensor:
    """Noised fractions, in [0, 1] for a user's rule, which may rely on the range."""
    return tf.clip_by_value(fractions, 0.0, 1.0) if is_foreign(rule) else fractions


def _record_by_record(
    rule: Rule, method: Callable[..., tf.Tensor], *rows: tf.Tensor
) -> tf.Tensor:
    """The results of a method for all records, of a user's rule for each alone."""
    if not is_foreign(rule) or rows[0].shape[0] == 1:
        return method(*rows)
    return tf.vectorized_map(
        lambda parts: method(*(part[tf.newaxis] for part in parts))[0], rows
    )
