"""Tests that a clip rule keeps the contract of clip rules."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import integer, items, shown, text
from tfdpclip.clipping import (
    ClipRule,
    as_rule,
    registered_rules,
    serialize_rule,
)
from tfdpclip.testing.rule_trials import (
    UNALIGNED,
    Trial,
    as_double,
    first_states,
    format_state,
    groups_of,
)

_NAMES = ("one/kernel", "one/bias", "two/kernel", "three/kernel")
_RECORDS = 100.0
# Steps of one sequence of fractions: in eager code, in the middle, and at the end.
_EAGER, _MIDDLE, _STEPS = 2, 30, 1000
# Norms drawn from all magnitudes for each state and type.
_DRAWN = 500


@dataclasses.dataclass(frozen=True)
class ClipRuleReport:
    """The inputs that were tried on a clip rule that passed.

    Attributes:
      ratio: the largest norm of a weighted record, as a share of the allowed norm. Far
        below 1, the noise is larger than necessary.
      norm: the norm of that record.
      states: the number of states tried.
      records: the number of records tried, over all states and types.
    """

    ratio: float
    norm: str
    states: int
    records: int

    def __str__(self) -> str:
        return (
            f"a record of norm {self.norm} reaches {self.ratio:.7g} of what is allowed "
            f"({self.records} records in {self.states} states tried)"
        )


def assert_clip_rule(
    rule: ClipRule, *, names: Sequence[str] | None = None, seed: int = 0
) -> ClipRuleReport:
    """Checks that a clip rule keeps its contract, by trying.

    * **Bounded**: ``weights(norms, state) * norms``, taken exactly, is at most
      ``sensitivity(state)``, and with groups at most 1 in units of
      ``noise_scales(state)``, up to a rounding of 1e-6; for norms of 0, the smallest
      and largest numbers of their type, around the clip norm to the last bits, and of
      all magnitudes. A norm that is not finite has weight 0, not NaN.
    * **Counted**: indicators are within -1/2 to 1/2, and 0 for padding and for norms
      that are not finite; there is a `count_stddevs` for each.
    * **Isolated**: a record's weight and indicators do not depend on the remaining
      records.
    * **Steady**: `next_state` gives a finite state of the same structure, types and
      shapes for any fractions in [0, 1], for a thousand steps; the states on the way
      pass all of the above checks.
    * **Saved**: registered, and the same rule after its configuration went through
      JSON.

    The test cannot find a rule that deliberately breaks the contract on norms and
    states that are not tried.

    Args:
      rule: a clip rule.
      names: variables' names to bind it to, if its groups require certain names.
      seed: the seed of the drawn norms.

    Returns:
      How close a record came to the allowed norm.

    Raises:
      AssertionError: if the rule breaks its contract; names the norm, the state, the
        result, and the allowed result.
      ValueError: if an argument is out of range, or the names do not fit the groups.

    >>> import tfdpclip as dpc
    >>> round(assert_clip_rule(dpc.FixedClip(0.5)).ratio, 4)
    1.0
    """
    if not isinstance(rule, ClipRule):
        raise ValueError(f"rule must be a clip rule, got {shown(rule)}.")
    if names is None:
        names = _NAMES
    names = [text("names", name) for name in items("names", names)]
    draw = np.random.default_rng(integer("seed", seed))
    bound = rule.bind(names)
    if len(names) < 2:
        raise ValueError(f"names must be two or more, got {shown(names)}.")
    kept = _remembered(bound)
    states: list[Any] = []
    report = ClipRuleReport(0.0, "0", 0, 0)
    with tf.variable_creator_scope(_no_variables):
        try:
            states.extend(_states(bound, draw))
            report = _check_bounded(bound, states, draw)
            _check_reports(bound, states)
            _check_saved(bound)
        except AssertionError as error:
            raise AssertionError(f"{bound}: {error}.") from error
        except Exception as error:  # A foreign rule may raise any error.
            raise AssertionError(
                f"{bound} raises {type(error).__name__}: {shown(str(error))}."
            ) from error
    if _remembered(bound) != kept:
        raise AssertionError(
            f"{bound}: it is not the same object after its methods were called: "
            f"{shown(kept)} became {shown(_remembered(bound))}. Rules must not keep "
            "data; put changing values into the state."
        )
    return report


def _no_variables(*args: Any, **kwargs: Any) -> None:
    raise AssertionError(
        "it makes a variable; put changing values into the state, which methods take "
        "and return"
    )


def _remembered(rule: ClipRule) -> dict[str, str]:
    found = {k: repr(v) for k, v in vars(rule).items() if k != "_scales"}
    return {**found, "hash": str(hash(rule))}


def _check_saved(rule: ClipRule) -> None:
    kind: Any = type(rule)
    if not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen):
        raise AssertionError(
            f"{kind.__name__} is no frozen dataclass; decorate it with "
            "@dataclasses.dataclass(frozen=True, eq=False, repr=False)"
        )
    if registered_rules().get(kind.__name__) is not kind:
        raise AssertionError(
            f"{kind.__name__} is not registered, so saved settings could not be "
            "loaded: put @dpc.clipping.register_rule above the class"
        )
    saved = serialize_rule(rule)
    loaded = as_rule(json.loads(json.dumps(saved)))
    again = kind(**rule.get_config())
    for other, way in ((loaded, "JSON"), (again, "get_config()")):
        if not (
            other == rule and hash(other) == hash(rule) and repr(other) == repr(rule)
        ):
            raise AssertionError(f"it is {other} after {way}, which is not equal to it")


def _states(rule: ClipRule, draw: np.random.Generator) -> Iterator[Any]:
    """First states, and states after sequences of fractions from 0 to 1."""
    counts = len(rule.count_stddevs(_RECORDS))
    specs = tf.nest.map_structure(
        tf.TensorSpec.from_tensor, next(iter(first_states(rule)))
    )
    many = tf.function(
        functools.partial(_many_steps, rule),
        input_signature=[specs, tf.TensorSpec([None, counts])],
        autograph=False,
    )
    for first in first_states(rule):
        yield first
        if not tf.nest.flatten(first):
            continue
        for course in _courses(counts, draw):
            given = tf.constant(course, tf.float32, [_STEPS, counts])
            state = first
            for i in range(_EAGER):
                state = rule.next_state(state, given[i])
                _check_state(first, state, given[i])
            yield state
            for start, end in ((_EAGER, _MIDDLE), (_MIDDLE, _STEPS)):
                state, good = many(state, given[start:end])
                if not good:
                    raise AssertionError(
                        f"the state is not finite in steps {start + 1} to {end} of "
                        f"fractions {shown(course[start:].tolist())}; it ends as "
                        f"{format_state(state)}"
                    )
                yield state


def _many_steps(rule: ClipRule, state: Any, fractions: tf.Tensor) -> tuple[Any, Any]:
    """The state after these fractions, and whether all states were finite."""

    def step(i, state, good):
        state = rule.next_state(state, fractions[i])
        parts = [tf.cast(part, tf.float64) for part in tf.nest.flatten(state)]
        finite = [tf.reduce_all(tf.math.is_finite(part)) for part in parts]
        return i + 1, state, tf.reduce_all([good, *finite])

    size = tf.shape(fractions)[0]
    start = (0, state, True)
    _, state, good = tf.while_loop(lambda i, *_: i < size, step, start)
    return state, good


def _courses(counts: int, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Sequences of fractions in [0, 1], `[steps, K]`."""
    shape = (_STEPS, counts)
    yield np.zeros(shape)
    if counts:
        yield np.ones(shape)
        yield np.indices(shape).sum(axis=0) % 2.0
        yield draw.uniform(size=shape)


def _check_state(first: Any, state: Any, fractions: tf.Tensor) -> None:
    where = f"after fractions {shown(fractions.numpy().tolist())}"
    try:
        tf.nest.assert_same_structure(first, state)
    except (TypeError, ValueError):
        raise AssertionError(
            f"the state is {format_state(state)} {where}, of another structure than "
            f"{format_state(first)}"
        ) from None
    for old, new in zip(tf.nest.flatten(first), tf.nest.flatten(state), strict=True):
        old, new = tf.convert_to_tensor(old), tf.convert_to_tensor(new)
        if old.dtype != new.dtype or old.shape != new.shape:
            raise AssertionError(
                f"a part of the state is {new.dtype.name} {list(new.shape)} {where}, "
                f"and was {old.dtype.name} {list(old.shape)} at first"
            )
        if not np.isfinite(as_double(new)).all():
            raise AssertionError(
                f"the state is {format_state(state)} {where}: not finite"
            )


def _check_bounded(
    rule: ClipRule, states: list[Any], draw: np.random.Generator
) -> ClipRuleReport:
    worst, whose, records = -1.0, "0", 0
    kinds = [np.float32, np.float64]
    if not rule.has_groups:
        kinds += [np.float16, tf.bfloat16.as_numpy_dtype]
    for i, state in enumerate(states):
        for dtype in kinds:
            trial = Trial(rule, state, dtype, _drawn(rule, dtype, draw))
            # Coupling shows in every state, and is slow to test, so one state suffices.
            fault = trial.fault() or (trial.coupling() if not i else None)
            if fault is not None:
                raise AssertionError(fault)
            records += len(trial.norms)
            ratio, index = trial.worst
            if ratio > worst:
                worst, whose = ratio, shown(trial.norms[index].tolist())
    return ClipRuleReport(worst, whose, len(states), records)


def _drawn(rule: ClipRule, dtype: Any, draw: np.random.Generator) -> np.ndarray:
    """Norms of all magnitudes, `[B]` or `[B, L]`."""
    low, high = (-330, 308) if dtype == np.float64 else (-46, 38)
    groups = groups_of(rule)
    size = (_DRAWN, groups) if groups else (_DRAWN,)
    norms = 10.0 ** draw.uniform(low, high, size)
    # Half of the norms are in the usual range of training.
    norms[::2] = 10.0 ** draw.uniform(-4, 4, norms[::2].shape)
    if groups:
        norms[1::4] *= draw.integers(0, 2, norms[1::4].shape)
    return norms


def _check_reports(rule: ClipRule, states: list[Any]) -> None:
    """Checks the rule's reports about itself, apart from the bounds."""
    for private in (True, False):
        stddevs = rule.count_stddevs(_RECORDS, private)
        good = isinstance(stddevs, tuple) and all(
            np.isfinite(s) and s >= 0 for s in stddevs
        )
        if not good or len(stddevs) != len(rule.count_stddevs(_RECORDS)):
            raise AssertionError(
                f"count_stddevs({_RECORDS:g}, private={private}) is {shown(stddevs)}; "
                "it must be a tuple of finite numbers, 0 or above, of one length"
            )
    for state in states:
        clip_norm = rule.clip_norm(state)
        value = as_double(clip_norm)
        if clip_norm.shape.rank != 0 or not (np.isfinite(value) and value >= 0):
            raise AssertionError(
                f"clip_norm(state) is {shown(value.tolist())} in state "
                f"{format_state(state)}; it must be one finite number, 0 or above"
            )
        if rule.threshold != "record":
            continue
        below = value * np.array([1e-3, 0.5, 0.99])
        weights = as_double(rule.weights(tf.constant(below, tf.float64), state))
        if not np.allclose(weights, weights[0], rtol=UNALIGNED, atol=0):
            raise AssertionError(
                f'threshold is "record", but records of norms {shown(below.tolist())}, '
                f"below clip_norm(state), get weights {shown(weights.tolist())} and "
                "not all the same; if no norm separates clipped records from the rest, "
                "set threshold = None"
            )
