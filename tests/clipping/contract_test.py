"""Every registered rule keeps the contract; rules that break it are refused, twice."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.clipping import rule_graphs, rule_trials
from tfdpclip.clipping import (
    AutomaticClip,
    ClipRule,
    FixedClip,
    LayerwiseClip,
    PerSampleAdaptiveClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
    as_rule,
    register_rule,
    registered_rules,
)
from tfdpclip.mechanism import Mechanism
from tfdpclip.testing import assert_clip_rule, clip_rules

ROOT = pathlib.Path(__file__).parents[2]
schedules = tf.keras.optimizers.schedules
NAMES = ["one/kernel", "one/bias", "two/kernel"]

# The setups of every rule, also for tests/mechanism_test.py and
# tests/federated/rules_test.py.
RULES: dict[str, list[ClipRule]] = {
    "FixedClip": [
        FixedClip(0.5),
        FixedClip(3e5, normalize=True),
        FixedClip(schedules.ExponentialDecay(0.7, 1, 0.5)),
        FixedClip(schedules.PiecewiseConstantDecay([3], [0.7, 2.0])),
    ],
    "QuantileClip": [
        QuantileClip(),
        QuantileClip(0.9, 1e-3, 7.0, update="linear", normalize=True),
        QuantileClip(0.3, 0.5, normalize=True, minimum_norm=0.4),
        QuantileClip(0.9, 0.5, 7.0, minimum_norm=0.4, maximum_norm=0.6),
        QuantileClip(schedules.ExponentialDecay(0.7, 1, 0.5), 0.7, count_stddev=2.0),
    ],
    "AutomaticClip": [AutomaticClip(), AutomaticClip(0.0)],
    "PerSampleAdaptiveClip": [
        PerSampleAdaptiveClip(0.5),
        PerSampleAdaptiveClip(1e8, stability=1e-30),
        PerSampleAdaptiveClip(2.0, stability=1.0),
    ],
    "LayerwiseClip": [
        LayerwiseClip(groups="variable"),
        LayerwiseClip({"one": 0.3, "two": QuantileClip(0.5, 2.0)}, allocation="joint"),
    ],
    "PublicNormClip": [
        PublicNormClip(QuantileClip()),
        PublicNormClip(None, allocation="joint", norms={"one": 1.0, "two": 0.0}),
    ],
    "ScaledClip": [
        ScaledClip(None, AutomaticClip(0.0)),
        ScaledClip({"one": 1e-3, "two": 20.0}, QuantileClip(normalize=True)),
    ],
}


def cases():
    for name, rules in RULES.items():
        for i, rule in enumerate(rules):
            marks = pytest.mark.slow if i else ()
            yield pytest.param(rule, id=f"{name}-{i}", marks=marks)


def rules_of_the_library():
    return {
        name
        for name, kind in registered_rules().items()
        if kind.__module__.startswith("tfdpclip.")
    }


def test_every_rule_of_the_library_has_an_entry():
    ours = rules_of_the_library()
    assert not ours - set(RULES), f"add {ours - set(RULES)} to RULES of {__file__}"
    assert ours == set(RULES)
    for name, rules in RULES.items():
        assert {type(rule).__name__ for rule in rules} == {name}


def test_every_rule_of_the_library_has_a_public_name():
    public = {
        name
        for name in dpc.clipping.__all__
        if isinstance(kind := getattr(dpc.clipping, name), type)
        and issubclass(kind, ClipRule)
    }
    # The two base classes are no rules.
    assert rules_of_the_library() == public - {"ClipRule", "GroupedRule"}
    for name in rules_of_the_library():
        assert name in dpc.__all__ and getattr(dpc, name) is getattr(dpc.clipping, name)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("rule", cases())
def test_a_rule_of_the_library_keeps_the_contract(rule):
    report = assert_clip_rule(rule, names=NAMES)
    bound, draw = rule.bind(NAMES), np.random.default_rng(0)
    states = list(clip_rules._states(bound, draw))
    rule_trials.check_bounded(bound, states, draw)
    rule_graphs.check_pure(bound, states)
    rule_graphs.check_portable(bound, states)
    if not bound.has_groups:
        rule_graphs.check_groups(bound, NAMES, draw)
    # A bound that no record reaches would mean noise for nothing.
    assert 0.999 < report.ratio <= 1 + 1e-6
    assert report.states > 0 and str(report.records) in str(report)


# Rules that break the contract.

_frozen = dataclasses.dataclass(frozen=True, eq=False, repr=False)


@_frozen
class _Base(ClipRule):
    """A sound rule, whose subclasses break the contract."""

    norm: float = 1.0

    def initial_state(self):
        return tf.constant(self.norm)

    def weights(self, norms, state):
        norms = tf.cast(norms, tf.float32) if norms.dtype.size < 4 else norms
        clip = tf.cast(state, norms.dtype)
        weights = clip / tf.maximum(norms, clip)
        return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))

    def sensitivity(self, state):
        return tf.convert_to_tensor(state)


@_frozen
class _Small(_Base):
    norm: float = 0.05


@_frozen
class _Counting(_Base):
    """A sound rule with a single count."""

    def count_stddevs(self, records_per_step, private=True):
        return (5.0,)

    def indicators(self, norms, state, present=None):
        counted = tf.math.is_finite(norms)
        if present is not None:
            counted = counted & present
        bits = tf.where(norms <= tf.cast(state, norms.dtype), 0.5, -0.5)
        return tf.where(counted, bits, tf.zeros_like(bits))[:, tf.newaxis]

    def next_state(self, state, fractions):
        moved = state * tf.exp(0.2 * (0.5 - tf.reshape(fractions, [])))
        return tf.clip_by_value(moved, 1e-12, 1e12)


def _floored(self, norms, state):
    return tf.maximum(_Base.weights(self, norms, state), 0.1)


def _floored_kindly(self, norms, state):
    finite = tf.math.is_finite(norms)
    return tf.where(finite, _floored(self, norms, state), tf.zeros_like(norms))


def _nan_let_through(self, norms, state):
    weights = _Base.weights(self, norms, state)
    return tf.where(tf.math.is_nan(norms), tf.ones_like(weights), weights)


def _nan_kept(self, norms, state):
    clip = tf.cast(state, norms.dtype)
    return clip / tf.maximum(norms, clip)


def _shared_among_the_batch(self, norms, state):
    # Every record is bounded, but its weight depends on the rest of the batch.
    count = tf.cast(tf.math.count_nonzero(norms > 1e9), norms.dtype)
    return _Base.weights(self, norms, state) / (1 + count)


def _by_the_largest(self, norms, state):
    finite = tf.math.is_finite(norms)
    clip = tf.cast(state, norms.dtype)
    largest = tf.reduce_max(tf.where(finite, norms, tf.zeros_like(norms)))
    return tf.where(finite, clip / tf.maximum(largest, clip), tf.zeros_like(norms))


def _by_batch_size(self, norms, state):
    return _Base.weights(self, norms, state) / tf.cast(tf.size(norms), norms.dtype)


def _squared(self, norms, state):
    norms = tf.cast(norms, tf.float32) if norms.dtype.size < 4 else norms
    clip = tf.cast(state, norms.dtype)
    weights = clip / tf.maximum(tf.square(norms), clip)
    return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))


def _negative(self, norms, state):
    return -_Base.weights(self, norms, state)


def _single(self, norms, state):
    return tf.cast(_Base.weights(self, norms, state), tf.float32)


def _a_last_bit_more(self, norms, state):
    return _Base.weights(self, norms, state) * (1 + 1e-5)


def _whole(self, norms, state, present=None):
    return 2 * _Counting.indicators(self, norms, state, present)


def _padding_counted(self, norms, state, present=None):
    return _Counting.indicators(self, norms, state)


def _nan_counted(self, norms, state, present=None):
    bits = tf.where(norms <= tf.cast(state, norms.dtype), 0.5, -0.5)
    keep = tf.ones_like(bits) if present is None else tf.cast(present, bits.dtype)
    return (bits * keep)[:, tf.newaxis]


def _two_columns(self, norms, state, present=None):
    return tf.repeat(_Counting.indicators(self, norms, state, present), 2, axis=1)


def _relative_to_the_mean(self, norms, state, present=None):
    finite = tf.where(tf.math.is_finite(norms), norms, tf.zeros_like(norms))
    mean = tf.reduce_mean(tf.minimum(finite, 10.0))
    return _Counting.indicators(self, norms, tf.cast(mean, tf.float32), present)


def _no_noise(self, state):
    return tf.constant(0.0)


def _to_zero(self, state, fractions):
    return tf.maximum(state - tf.reshape(fractions, []), 0.0)


UNBOUNDED = {
    "floored": (_Base, "weights", _floored, "weight"),
    "floored where finite": (_Base, "weights", _floored_kindly, "norm 10"),
    "NaN let through": (_Base, "weights", _nan_let_through, "norm nan"),
    "NaN kept": (_Base, "weights", _nan_kept, "norm -inf"),
    "squared norm": (_Small, "weights", _squared, "weighted"),
    "no clip": (_Base, "weights", lambda self, n, s: tf.ones_like(n), "weight"),
    "negative": (_Base, "weights", _negative, "0 or above"),
    "precision lost": (_Base, "weights", _single, "must be float64"),
    "a last bit more": (_Base, "weights", _a_last_bit_more, "weighted"),
    "of the whole batch": (_Base, "weights", _shared_among_the_batch, "other records"),
    "of the largest record": (_Base, "weights", _by_the_largest, "other records"),
    "of the batch's size": (_Base, "weights", _by_batch_size, "other records"),
    "sensitivity understated": (
        _Base,
        "sensitivity",
        lambda self, state: 0.99 * state,
        r"noise_scales\(state\), 0\.99",
    ),
    "noise understated": (
        _Base,
        "noise_scales",
        lambda self, state: 0.5 * state,
        "noise_scales",
    ),
    "no noise": (_Base, "noise_scales", _no_noise, "noise_scales.*above 0"),
    "infinite": (
        _Base,
        "sensitivity",
        lambda self, state: state * np.inf,
        "noise_scales.*finite",
    ),
    "a vector of sensitivities": (
        _Base,
        "sensitivity",
        lambda self, state: tf.stack([state, state]),
        "must be a scalar",
    ),
    "raises": (_Base, "weights", lambda self, n, s: n / [1.0, 2.0], "of shape"),
    "indicators of one": (_Counting, "indicators", _whole, "-1/2 to 1/2"),
    "padding counted": (_Counting, "indicators", _padding_counted, "0 for padding"),
    "NaN counted": (_Counting, "indicators", _nan_counted, "norm inf.*0 for"),
    "more columns than counts": (_Counting, "indicators", _two_columns, "of shape"),
    "indicators of the whole batch": (
        _Counting,
        "indicators",
        _relative_to_the_mean,
        "other records",
    ),
    "a state that ends": (_Counting, "next_state", _to_zero, "above 0"),
}


def broken(base, method, replacement, module="tests.broken"):
    """A registered rule that differs from a sound rule in one method."""
    body = {method: replacement, "__module__": module}
    kind = type("BrokenRule", (base,), body)
    return register_rule(_frozen(kind))()


@pytest.mark.slow
@pytest.mark.parametrize("base", [_Base, _Counting])
def test_the_rules_that_are_broken_below_are_sound(base):
    kind = type("BrokenRule", (base,), {"__module__": "tests.broken"})
    rule = register_rule(_frozen(kind))()
    assert as_rule(rule) is rule
    assert assert_clip_rule(rule).ratio > 0.999


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_rule_without_its_bound_is_refused_by_the_assertion(name):
    *how, said = UNBOUNDED[name]
    with pytest.raises(AssertionError, match=said):
        assert_clip_rule(broken(*how))


TRIED = [0.0, 0.1, 0.5, 0.9, 1.0, 1.01, 2.0, 10.0, 1e4, 1e30, 3e38]
TRIED += [np.inf, -np.inf, np.nan]


def assert_held(rule, norms):
    """Asserts that a mechanism clips as its noise hides, whatever a rule says."""
    found, state = Mechanism(rule, 1.0, 100), rule.initial_state()
    present = tf.constant(np.arange(len(norms)) % 3 > 0)
    weights, bits = (x.numpy() for x in found.clip(norms, state, present))
    finite = np.isfinite(norms)
    assert (weights >= 0).all() and (weights[~finite] == 0).all()
    parts = np.where(finite, norms, 0) * weights.astype(float)
    parts = np.reshape(parts / np.asarray(rule.noise_scales(state)), [len(norms), -1])
    assert np.linalg.norm(parts, axis=1).max() <= 1 + 2e-6
    assert (np.abs(bits) <= 0.5).all() and (bits[~present.numpy()] == 0).all()
    for i in range(len(norms)):
        rows = slice(i, i + 1)
        alone = found.clip(norms[rows], state, present[rows])
        for one, together in zip(alone, (weights, bits), strict=True):
            np.testing.assert_allclose(one[0], together[i], rtol=1e-6)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_rule_without_its_bound_is_held_to_it_where_it_is_used(name):
    """Refused if its parts do not fit each other; limited in every step if they do."""
    *how, _ = UNBOUNDED[name]
    rule = broken(*how)
    try:
        Mechanism(rule, 1.0, 100)
    except ValueError as error:
        assert "clip=" in str(error) and "assert_clip_rule" in str(error)
        assert name in REFUSED
    else:
        assert name not in REFUSED
        assert_held(rule, tf.constant(TRIED))
        assert_held(rule, tf.constant(TRIED, tf.float64))
        grouped = LayerwiseClip(rule, groups="variable").bind(NAMES)
        norms = np.stack([np.roll(TRIED, i) for i in range(3)], axis=1)
        assert_held(grouped, tf.constant(norms, tf.float32))


REFUSED = {"no noise", "infinite", "a vector of sensitivities", "raises"}
REFUSED |= {"more columns than counts"}


def test_a_rule_of_the_library_is_held_to_its_bound_as_well(monkeypatch):
    scales = LayerwiseClip.noise_scales
    monkeypatch.setattr(
        LayerwiseClip, "noise_scales", lambda self, state: 0.5 * scales(self, state)
    )
    rule = LayerwiseClip(1.0).bind(NAMES)
    norms = np.stack([np.roll(TRIED, i) for i in range(2)], axis=1)
    assert_held(rule, tf.constant(norms, tf.float32))
    monkeypatch.setattr(FixedClip, "weights", lambda self, n, s: tf.ones_like(n))
    assert_held(FixedClip(0.5), tf.constant(TRIED))


def test_a_rule_with_groups_of_its_own_making_is_held():
    class Alone(_Base):
        """Groups without `GroupedRule`; bound from the start, and not bounded."""

        has_groups = True
        assignment = (0, 0, 1)

        def weights(self, norms, state):
            return tf.ones_like(norms)

        def sensitivity(self, state):
            return tf.stack([state, state])

        def clip_norms(self, state):
            return self.sensitivity(state)

    norms = np.stack([np.roll(TRIED, i) for i in range(2)], axis=1)
    assert_held(Alone(), tf.constant(norms, tf.float32))


@pytest.mark.parametrize("name", ["floored", "of the largest record"])
def test_the_engine_holds_it_as_well(name):
    w = tf.Variable([1.0, 1.0])
    rule = broken(*UNBOUNDED[name][:3])

    @tf.function(autograph=False)
    def step(x):
        loss = tf.linalg.matvec(x, w)
        return dpc.gradients.clipped_sum(loss, [w], rule, rule.initial_state())

    sums, _ = step(tf.constant([[300.0, 400.0], [0.0, 0.5]]))
    np.testing.assert_allclose(sums[0], [0.6, 1.3], rtol=1e-5)


def lists_rules(line):
    """Whether a line of code tests for the class of a rule."""
    names = "|".join([*RULES, "GroupedRule"])
    asks = r"(isinstance|issubclass)\(|\btype\(\w+\) (not )?(in|is|==)"
    return bool(re.search(rf"({asks}).*\b({names})\b", line))


def test_no_list_of_rules_decides_what_a_rule_can_do():
    assert lists_rules("if rule is None or isinstance(rule, (AutomaticClip, Other)):")
    assert lists_rules("elementwise = type(first) in (FixedClip, QuantileClip)")
    assert lists_rules("if not isinstance(rule, GroupedRule):")
    assert not lists_rules("if not isinstance(rule, ClipRule):")
    for package in ("tfdpclip", "keras_examples", "tff_tasks"):
        for path in (ROOT / package).rglob("*.py"):
            for line in path.read_text().splitlines():
                assert not lists_rules(line), (path, line)


@pytest.mark.slow
def test_the_module_is_public():
    program = "import tfdpclip as dpc; print(dpc.clipping.as_rule(0.5))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "FixedClip(norm=0.5)\n", done.stderr


# Rules that do not leak in a step, and yet break the contract, for the assertion.


def _drawn(self, norms, state):
    noise = tf.random.uniform(tf.shape(norms), 0.5, 1.0, norms.dtype)
    return _Base.weights(self, norms, state) * noise


class _Memory:
    largest = 1.0


def _remembering(self, norms, state):
    weights = _Base.weights(self, norms, state)
    if not tf.is_tensor(norms) or not hasattr(norms, "numpy"):
        return weights
    finite = norms.numpy()[np.isfinite(norms.numpy())]
    before, _Memory.largest = _Memory.largest, float(len(finite))
    return weights * (0.5 if before < 50 else 1.0)


_OUTSIDE: dict[str, tf.Tensor] = {}


def _captured(self, norms, state):
    half = _OUTSIDE.setdefault("half", tf.constant(0.5))
    return _Base.weights(self, norms, state) * tf.cast(half, norms.dtype)


def _with_a_variable(self, norms, state):
    half = tf.Variable(0.5)
    return _Base.weights(self, norms, state) * tf.cast(half, norms.dtype)


def _python_draw(self, norms, state):
    return _Base.weights(self, norms, state) * random.choice([0.5, 0.75])


def _by_numpy(self, norms, state):
    with np.errstate(all="ignore"):
        found = np.minimum(1, float(state) / np.maximum(norms.numpy(), 1e-30))
    return tf.constant(np.where(np.isfinite(norms), found, 0), norms.dtype)


def _other_structure(self, state, fractions):
    return (state, fractions)


def _longer(self, state, fractions):
    return state + tf.zeros([1])


def _grown(self, state, fractions):
    return state * 1e10


def _wide(self, state, fractions):
    return tf.cast(state, tf.float64)


IMPURE = {
    "random weights": (_Base, "weights", _drawn),
    "remembers": (_Base, "weights", _remembering),
    "captures a tensor": (_Base, "weights", _captured),
    "makes a variable": (_Base, "weights", _with_a_variable),
    "random in Python": (_Base, "weights", _python_draw),
    "leaves TensorFlow": (_Base, "weights", _by_numpy),
    "another structure": (_Counting, "next_state", _other_structure),
    "another shape": (_Counting, "next_state", _longer),
    "another type": (_Counting, "next_state", _wide),
    "grows without end": (_Counting, "next_state", _grown),
}


@pytest.mark.parametrize("name", IMPURE)
def test_a_rule_that_is_no_pure_function_is_refused_by_the_assertion(name):
    with pytest.raises(AssertionError, match="BrokenRule"):
        assert_clip_rule(broken(*IMPURE[name]))


@pytest.mark.slow
def test_a_claim_to_be_elementwise_is_tried():
    def weights(self, norms, state):
        # Of `[B, L]`, the clip of the first group for all.
        return _Base.weights(self, norms, tf.reshape(state, [-1])[0])

    rule = broken(_Counting, "weights", weights)
    type(rule).elementwise = True
    with pytest.raises(AssertionError, match="elementwise"):
        rule_graphs.check_groups(rule, NAMES, np.random.default_rng(0))


def test_a_claim_is_not_inherited_by_what_may_break_it():
    class Mine(FixedClip):
        pass

    assert FixedClip.elementwise and not Mine(1.0).elementwise
    with pytest.raises(ValueError, match="elementwise"):
        PublicNormClip(Mine(1.0))


def test_a_wrong_threshold_is_refused():
    with pytest.raises(AssertionError, match="threshold"):
        rule = broken(AutomaticClip, "threshold", "record")
        assert_clip_rule(rule)


@pytest.mark.slow
def test_a_rule_that_cannot_be_loaded_is_refused():
    @_frozen
    class Unregistered(_Base):
        pass

    with pytest.raises(AssertionError, match="register_rule"):
        assert_clip_rule(Unregistered())

    def get_config(self):
        return {"norm": 2 * self.norm}

    with pytest.raises(AssertionError, match="JSON"):
        assert_clip_rule(broken(_Base, "get_config", get_config))

    @register_rule
    class NotFrozen(_Base):
        pass

    # A subclass that adds nothing is as frozen as its base.
    assert assert_clip_rule(NotFrozen()).ratio > 0.999


def test_messages_say_norm_state_outcome_and_what_was_allowed():
    rule = broken(_Base, "weights", _floored_kindly)
    with pytest.raises(AssertionError) as caught:
        assert_clip_rule(rule)
    message = str(caught.value)
    for part in (r"BrokenRule()", "norm ", "weight ", "in state 1.0", "allowed is"):
        assert part in message


def test_a_name_is_not_taken_from_another_rule():
    kind = type("FixedClip", (_Base,), {"__module__": "tests.broken"})
    with pytest.raises(ValueError, match="FixedClip.*choose another name"):
        register_rule(_frozen(kind))
    assert registered_rules()["FixedClip"] is FixedClip


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"rule": 1.0}, "rule must be a clip rule"),
        ({"rule": FixedClip(1.0), "seed": -1}, "seed"),
        ({"rule": FixedClip(1.0), "names": "one"}, "names"),
        ({"rule": FixedClip(1.0), "names": ["one"]}, "names"),
        ({"rule": LayerwiseClip({"one": 1.0})}, "the groups are one, two, three"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        assert_clip_rule(**arguments)
