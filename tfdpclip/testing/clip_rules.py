"""Tests that a clip rule keeps the contract of clip rules."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import instance, integer, items, shown, text
from tfdpclip.clipping import ClipRule, as_rule, registered_rules, serialize_rule
from tfdpclip.clipping.interface import check_rule
from tfdpclip.kernel import limits

_NAMES = ("one/kernel", "one/bias", "two/kernel", "three/kernel")
# The expected number of records in a step, for the defaults of counts.
_RECORDS = 100.0
# The states after so many steps of each sequence of fractions are tried.
_STEPS = (2, 30, 1000)
# Norms drawn from all magnitudes for each state and type.
_DRAWN = 500
# Norms at which a rule may change, relative to its clip norm and its bound.
_NEAR = (0.1, 0.5, 0.9, 1 - 2e-7, 1.0, 1 + 2e-7, 1.1, 1.5, 2.0, 3.0, 10.0, 1e3, 1e5)
_NOT_FINITE = (np.inf, -np.inf, np.nan)
# The relative difference between vectorised arithmetic and scalar arithmetic.
_UNALIGNED = 4 * limits.ROUNDING
# Vectorised reciprocals of TensorFlow 2.21 are off by up to 3e-4 above 1e32.
_COARSE = 1e-3
_WEIGHTS = (
    "a weighted record has at most the length noise_scales(state), {}, and a weight is "
    "finite, 0 or above, 0 for a norm that is not finite, and depends on the record's "
    "own norm and the state alone, not on other records"
)
_INDICATORS = (
    "indicators are in -1/2 to 1/2, 0 for padding and for a record of a norm that is "
    "not finite, and depend on the record's own norm and the state alone, not on other "
    "records"
)


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

    Every step limits a rule, so that no rule leaks. A rule that keeps its contract
    needs no limit, and clips as its author meant:

    * **Bounded**: a step's limit changes no weight and no indicator, for norms of 0,
      around the clip norm, of all magnitudes, and not finite, in float32 and in further
      types. A weighted record has at most the length ``noise_scales(state)``;
      indicators are within -1/2 to 1/2, and 0 for padding and for norms that are not
      finite.
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
    instance("rule", rule, ClipRule, "a clip rule")
    names = _NAMES if names is None else items("names", names)
    names = [text("names", name) for name in names]
    draw = np.random.default_rng(integer("seed", seed))
    bound = rule.bind(names)
    if len(names) < 2:
        raise ValueError(f"names must be two or more, got {shown(names)}.")
    try:
        check_rule(bound, "rule")
    except ValueError as error:
        raise AssertionError(str(error)) from error
    try:
        states = list(_states(bound, draw))
        report = _check_norms(bound, states, draw)
        _check_reports(bound, states)
        _check_saved(bound)
    except AssertionError as error:
        raise AssertionError(f"{bound}: {error}.") from error
    except Exception as error:  # A foreign rule may raise any error.
        raise AssertionError(
            f"{bound} raises {type(error).__name__}: {shown(str(error))}."
        ) from error
    return report


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
    for first in _first_states(rule):
        yield first
        if not tf.nest.flatten(first):
            continue
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, first)
        many = tf.function(
            functools.partial(_many_steps, rule),
            input_signature=[specs, tf.TensorSpec([None, counts])],
            autograph=False,
        )
        for course in _courses(counts, draw):
            fractions = tf.constant(course, tf.float32)
            _check_structure(first, rule.next_state(first, fractions[0]))
            state, start = first, 0
            for end in _STEPS:
                state, good = many(state, fractions[start:end])
                if not good:
                    raise AssertionError(
                        f"the state is not finite in steps {start + 1} to {end} of "
                        f"fractions {shown(course[start:].tolist())}; it ends as "
                        f"{_format(state)}"
                    )
                start = end
                yield state


def _first_states(rule: ClipRule) -> Iterator[Any]:
    """The rule's first state, or its states for several public norms."""
    state = rule.initial_state()
    if not rule.takes_public_norms or bool(rule.knows_norms(state)):
        yield tf.nest.map_structure(tf.convert_to_tensor, state)
        return
    (count,) = _groups(rule)
    for norms in (np.logspace(0, 6, count), np.eye(1, count)[0], np.zeros(count)):
        yield rule.with_public_norms(state, norms.astype(np.float32))


def _groups(rule: ClipRule) -> list[int]:
    return [] if rule.assignment is None else [max(rule.assignment) + 1]


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
    shape = (_STEPS[-1], counts)
    yield np.zeros(shape)
    if counts:
        yield np.ones(shape)
        yield np.indices(shape).sum(axis=0) % 2.0
        yield draw.uniform(size=shape)


def _check_structure(first: Any, state: Any) -> None:
    before, after = (
        tf.nest.map_structure(lambda t: (t.dtype.name, t.shape.as_list()), nest)
        for nest in (first, tf.nest.map_structure(tf.convert_to_tensor, state))
    )
    if before != after:
        raise AssertionError(
            f"next_state(state, fractions) has the types and shapes {after}, and the "
            f"first state has {before}: they must be the same"
        )


def _check_norms(
    rule: ClipRule, states: list[Any], draw: np.random.Generator
) -> ClipRuleReport:
    worst, whose, records = -1.0, "0", 0
    kinds = [tf.float32, tf.float64]
    if not rule.has_groups:
        kinds += [tf.float16, tf.bfloat16]
    for state in states:
        _check_scales(rule, state)
        drawn = _norms(rule, state, draw)
        for dtype in kinds:
            # Casting overflows to infinity and underflows to zero.
            norms = tf.cast(tf.constant(drawn), dtype)
            lengths = _lengths(rule, state, norms)
            _check_indicators(rule, state, norms)
            records += len(lengths)
            index = int(np.argmax(lengths))
            if lengths[index] > worst:
                worst, whose = float(lengths[index]), _row(norms, index)
    return ClipRuleReport(worst, whose, len(states), records)


def _check_scales(rule: ClipRule, state: Any) -> None:
    for method in ("sensitivity", "noise_scales"):
        value = _double(getattr(rule, method)(state))
        if list(value.shape) != _groups(rule) or not (
            np.isfinite(value).all() and (value > 0).all()
        ):
            raise AssertionError(
                f"{method}(state) is {shown(value.tolist())} in state "
                f"{_format(state)}; it must be of shape {_groups(rule)}, finite and "
                "above 0"
            )


def _norms(rule: ClipRule, state: Any, draw: np.random.Generator) -> np.ndarray:
    """Norms, `[B]` or `[B, L]`: of all magnitudes, near the bounds, and not finite."""
    groups = _groups(rule)
    drawn = 10.0 ** draw.uniform(-46, 38, (_DRAWN, *groups))
    # Half of the norms are in the usual range of training.
    drawn[::2] = 10.0 ** draw.uniform(-4, 4, drawn[::2].shape)
    if groups:
        drawn[1::4] *= draw.integers(0, 2, drawn[1::4].shape)
    bounds = rule.noise_scales(state), rule.clip_norm(state)
    near = [x * np.broadcast_to(_double(b), groups) for b in bounds for x in _NEAR]
    edges = [np.full(groups, x) for x in (0.0, 1e-45, 1e-38, 3e38, *_NOT_FINITE)]
    return np.concatenate([drawn, near, edges])


def _lengths(rule: ClipRule, state: Any, norms: tf.Tensor) -> np.ndarray:
    """The length of each weighted record, as a share of the allowed length, `[B]`."""
    weights = rule.weights(norms, state)
    wanted = norms.dtype if norms.dtype.size >= 4 else tf.float32
    if weights.dtype != wanted:
        raise AssertionError(
            f"weights(norms, state) is {weights.dtype.name} for norms of "
            f"{norms.dtype.name}, and must be {wanted.name}"
        )
    limited = limits.weights_of(rule, norms, state)
    scales = _double(rule.noise_scales(state))
    allowed = _WEIGHTS.format(shown(scales.tolist()))
    _compare("weights", weights, limited, norms, state, allowed)
    values = _double(norms)
    parts = np.where(np.isfinite(values), values, 0) * _double(weights)
    lengths = np.linalg.norm(np.reshape(parts / scales, [len(values), -1]), axis=1)
    longest = int(np.argmax(lengths))
    if lengths[longest] > 1 + limits.ROUNDING:
        raise AssertionError(
            f"a record of norm {_row(norms, longest)} has {lengths[longest]:.7g} times "
            f"the allowed length in state {_format(state)}; allowed is: {allowed}"
        )
    return lengths


def _check_indicators(rule: ClipRule, state: Any, norms: tf.Tensor) -> None:
    finite = tf.reshape(tf.math.is_finite(norms), [len(norms), -1])
    # The caller drops a record as a whole.
    finite = tf.reduce_any(finite, axis=1)
    for present in (None, tf.range(len(norms)) % 3 > 0):
        indicators = rule.indicators(norms, state, present)
        counted = finite if present is None else finite & present
        limited = limits.indicators_of(rule, norms, state, counted)
        _compare("indicators", indicators, limited, norms, state, _INDICATORS)


def _compare(
    method: str,
    values: tf.Tensor,
    limited: tf.Tensor,
    norms: tf.Tensor,
    state: Any,
    allowed: str,
) -> None:
    """Raises if a step would change a result of a rule."""
    values, limited = _double(values), _double(limited)
    close = np.isclose(values, limited, rtol=_COARSE, atol=0)
    if close.all():
        return
    index = int(np.argwhere(~close)[0][0])
    raise AssertionError(
        f"the {method} of a record of norm {_row(norms, index)} are "
        f"{shown(values[index].tolist())} in state {_format(state)}, and "
        f"{shown(limited[index].tolist())} in a step, which limits them; allowed is: "
        f"{allowed}"
    )


def _check_reports(rule: ClipRule, states: list[Any]) -> None:
    """Checks the clip norm of the rule's reports, and its threshold."""
    for state in states:
        clip_norm = rule.clip_norm(state)
        value = _double(clip_norm)
        if clip_norm.shape.rank != 0 or not (np.isfinite(value) and value >= 0):
            raise AssertionError(
                f"clip_norm(state) is {shown(value.tolist())} in state "
                f"{_format(state)}; it must be one finite number, 0 or above"
            )
        if rule.threshold != "record":
            continue
        below = value * np.array([1e-3, 0.5, 0.99])
        weights = _double(rule.weights(tf.constant(below, tf.float64), state))
        if not np.allclose(weights, weights[0], rtol=_UNALIGNED, atol=0):
            raise AssertionError(
                f'threshold is "record", but records of norms {shown(below.tolist())}, '
                f"below clip_norm(state), get weights {shown(weights.tolist())} and "
                "not all the same; if no norm separates clipped records from the rest, "
                "set threshold = None"
            )


def _format(state: Any) -> str:
    """A state for a message."""
    return shown(tf.nest.map_structure(lambda part: np.asarray(part).tolist(), state))


def _row(norms: tf.Tensor, index: int) -> str:
    """The norms of a record for a message."""
    return f"{shown(_double(norms)[index].tolist())} ({norms.dtype.name})"


def _double(tensor: Any) -> np.ndarray:
    """A tensor's numbers in double precision."""
    return tf.cast(tensor, tf.float64).numpy()
