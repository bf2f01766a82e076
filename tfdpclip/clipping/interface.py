"""Refuses a user's clip rule whose methods do not fit, before the first step.

`tfdpclip.kernel.limits` holds every rule to its bound in every step, and gives a user's
rule a single record at a time, so that no bound is tried here. A trace of the rule's
methods shows two further faults: results of a wrong shape or type, and methods that
read or write more than their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _schedules
from tfdpclip._arguments import instance, shown
from tfdpclip._docs import see
from tfdpclip.clipping.base import ClipRule
from tfdpclip.kernel import limits

_TRY = " dpc.testing.assert_clip_rule(rule) tests a rule of your own in your tests."


def bound_rule(rule: ClipRule, names: Sequence[str], name: str = "clip") -> ClipRule:
    """The rule for variables of these names, checked.

    Args:
      rule: a clip rule.
      names: the variables' names, in order.
      name: the argument's name, for errors.

    Raises:
      ValueError: if the groups do not fit the variables, or `check_rule` refuses.

    >>> from tfdpclip.clipping import LayerwiseClip, bound_rule
    >>> bound_rule(LayerwiseClip(1.0), ["a/kernel", "a/bias", "b/kernel"]).assignment
    (0, 0, 1)
    """
    instance("rule", rule, ClipRule, "a clip rule")
    return check_rule(rule.bind(names), name)


def check_rule(rule: ClipRule, name: str = "clip") -> ClipRule:
    """`rule`, whose scales are traced in its present settings; see `limits.scales_of`.

    Args:
      rule: a clip rule, bound if it has groups.
      name: the argument's name, for errors.

    Raises:
      ValueError: if a method of a user's rule reads or writes more than its arguments,
        returns what does not fit, or raises; or if the rule was used before, and its
        settings changed since.
    """
    if not limits.is_foreign(rule):
        return rule
    try:
        fault = _fault(rule, limits.scales_of(rule))
    except Exception as error:  # A user's rule may raise any error.
        fault = f"it raises {type(error).__name__}: {shown(str(error))}.{_TRY}"
        raise ValueError(f"{name}={type(rule).__name__}: {fault}") from error
    if fault is not None:
        raise ValueError(f"{name}={rule}{fault}")
    return rule


def _fault(rule: ClipRule, traced: Any) -> str | None:
    """A description of the rule's first fault, or None."""
    if traced.settings != limits.settings_of(rule):
        return (
            " was used before, and changed since. Make a new one: "
            f"{type(rule).__name__}(...)."
        )
    other = _schedules.read_besides(traced.function)
    if other is not None:
        return (
            f": sensitivity(state) depends on more than its state: {other}. A step's "
            "records are clipped before its noise is drawn, and the value may change "
            "in between. Keep all changing values in the state: initial_state() and "
            "next_state(...)." + see("schedules-that-read-more-than-the-step")
        )
    return _fault_of_scales(rule, traced) or _fault_of_methods(rule)


def _fault_of_scales(rule: ClipRule, scales: Any) -> str | None:
    with tf.init_scope():
        state = rule.initial_state()
        if not bool(rule.knows_norms(state)):
            return None
        first = scales(state).numpy()
    groups = _groups_of(rule)
    if list(first.shape) != groups or not (np.isfinite(first) & (first > 0)).all():
        wanted = f"of shape {groups}" if groups else "a scalar"
        return (
            f": noise_scales(state) is {shown(first.tolist())} at first; it must be "
            f"{wanted}, finite and above 0.{_TRY}"
        )
    return None


def _groups_of(rule: ClipRule) -> list[int]:
    return [] if rule.assignment is None else [max(rule.assignment) + 1]


def _fault_of_methods(rule: ClipRule) -> str | None:
    """A description of a method with side effects, or of a result that does not fit.

    A variable that `weights` writes keeps exact norms, which `next_state` would release
    with the next clip norm, and `weights` with the next step's records.
    """
    groups = _groups_of(rule)
    count = len(rule.count_stddevs(1.0))
    with tf.init_scope():
        state = tf.nest.map_structure(tf.convert_to_tensor, rule.initial_state())
    leaves = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(state)]
    norms, fractions = tf.TensorSpec([1, *groups]), tf.TensorSpec([count])

    def with_state(method):
        def call(first, *parts):
            return method(first, tf.nest.pack_sequence_as(state, parts))

        return call

    def moved(fractions, now):
        return rule.next_state(now, fractions)

    for call, method, spec, shape in (
        ("weights(norms, state)", rule.weights, norms, [1, *groups]),
        ("indicators(norms, state, present)", rule.indicators, norms, [1, count]),
        ("next_state(state, fractions)", moved, fractions, None),
    ):
        with tf.init_scope():
            function = tf.function(with_state(method), autograph=False)
            traced = function.get_concrete_function(spec, *leaves)
        other = _schedules.read_besides(traced)
        if other is not None:
            return (
                f": {call} uses more than its arguments: {other}. What a rule keeps of "
                "one step's norms would be released without noise, or change the clip "
                "of other records. Keep all changing values in the state: "
                "initial_state() and next_state(...), of noised fractions."
                + see("clip-norms-from-private-data")
            )
        result = traced.structured_outputs
        if shape is not None and not (
            tf.is_tensor(result)
            and result.dtype == tf.float32
            and result.shape.is_compatible_with(shape)
        ):
            return (
                f": {call} is {shown(result)} for one record of float32 norms; it must "
                f"be float32 of shape {shape}.{_TRY}"
            )
    return None
