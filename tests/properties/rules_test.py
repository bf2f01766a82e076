"""Clip rules keep their promises for any norms, clips, types and groups."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
    as_rule,
    serialize_rule,
)

QUICK = settings(derandomize=True, deadline=None, max_examples=60)
MANY = settings(deadline=None, max_examples=2000)

DTYPES = {
    "float16": tf.float16,
    "bfloat16": tf.bfloat16,
    "float32": tf.float32,
    "float64": tf.float64,
}
# The relative error that float32 arithmetic may add to a record's norm.
SLACK = {name: 1e-6 for name in DTYPES}

NORMS = st.one_of(
    st.floats(0.0, 1e300),
    st.floats(0.0, 10.0),
    st.sampled_from([0.0, 5e-324, 1e-320, 1e-45, 1e-40, 1e-38, 1e-8, 1e38, 1e308]),
    st.sampled_from([math.nan, math.inf]),
)
CLIPS = st.floats(1e-12, 1e12)
NAMES = ["a/kernel", "a/bias", "b/kernel", "c/kernel"]


def flat_rules():
    normalize = st.booleans()
    return st.one_of(
        st.builds(FixedClip, CLIPS, normalize),
        st.builds(
            QuantileClip,
            st.floats(0.0, 1.0),
            CLIPS,
            st.floats(1e-3, 10.0),
            st.one_of(st.none(), st.floats(0.0, 100.0)),
            st.sampled_from(["geometric", "linear"]),
            normalize,
        ),
        st.builds(AutomaticClip, st.floats(0.0, 1e3), normalize),
    )


def grouped_rules():
    allocation = st.sampled_from(["per_layer", "joint"])
    numbers = st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3)
    positive = st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3)
    norms = numbers.map(lambda found: dict(zip("abc", found, strict=True)))
    floor = st.floats(1e-3, 1.0)
    # A public rule has a flat rule for all groups, whose sensitivity is its clip.
    flat = flat_rules()
    return st.one_of(
        st.builds(LayerwiseClip, flat, st.none(), allocation),
        st.builds(
            LayerwiseClip,
            st.tuples(flat, flat, flat),
            st.none(),
            allocation,
        ),
        st.builds(PublicNormClip, flat, st.none(), allocation, norms, floor),
        st.builds(ScaledClip, positive, flat, st.none(), floor),
    ).map(lambda rule: rule.bind(NAMES))


def as_norms(values, name):
    # Casting to the type is part of the data: it overflows to infinity.
    with np.errstate(over="ignore"):
        return tf.cast(tf.constant(values, tf.float64), DTYPES[name])


def in_double(tensor):
    return tf.cast(tensor, tf.float64).numpy()


def check_flat(rule, values, name):
    norms = as_norms(values, name)
    state = rule.initial_state()
    weights = rule.weights(norms, state)
    assert weights.dtype == (norms.dtype if norms.dtype.size >= 4 else tf.float32)
    weights, norms = in_double(weights), in_double(norms)
    finite = np.isfinite(norms)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    assert (weights[~finite] == 0).all()
    norms = np.where(finite, norms, 0.0)
    sensitivity = float(rule.sensitivity(state))
    assert (weights * norms <= sensitivity * (1 + SLACK[name])).all()
    if not isinstance(rule, AutomaticClip) and not rule.normalize:
        assert (weights <= 1).all()
    # A norm without a representable inverse may weigh 0, and so may a weight that would
    # underflow.
    used = finite & (weights > 0)
    assert used[finite & (norms > 1e-30) & (norms < 1e24)].all()
    order = np.argsort(norms[used], kind="stable")
    assert (np.diff(weights[used][order]) <= 0).all(), "a longer record weighs more"


@QUICK
@given(
    flat_rules(), st.lists(NORMS, min_size=1, max_size=6), st.sampled_from([*DTYPES])
)
def test_a_weighted_record_is_within_the_sensitivity(rule, values, name):
    check_flat(rule, values, name)


@pytest.mark.slow
@MANY
@given(
    flat_rules(), st.lists(NORMS, min_size=1, max_size=6), st.sampled_from([*DTYPES])
)
def test_many_weighted_records_are_within_the_sensitivity(rule, values, name):
    check_flat(rule, values, name)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("norm", [1e-12, 1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("normalize", [False, True])
def test_extreme_clips_in_every_type(name, norm, normalize):
    values = [0.0, 1e-300, 1e-40, 1e-7, 1.0, 1e4, 1e30, 1e300, math.inf, math.nan]
    for rule in (FixedClip(norm, normalize), QuantileClip(0.5, norm)):
        check_flat(rule, values, name)


@pytest.mark.parametrize("make", [FixedClip, lambda x: QuantileClip(initial_norm=x)])
@pytest.mark.parametrize("norm", [1e308, 1e39, 1e-46, 1e-320, 5e-324])
def test_a_clip_that_is_no_float32_is_refused(make, norm):
    with pytest.raises(ValueError, match="norm must be.*float32"):
        make(norm)


def test_automatic_clip_without_stability_of_the_smallest_records():
    check_flat(AutomaticClip(0.0), [0.0, 1e-45, 1e-39, 1e-38, 2e-38, 1e-30], "float32")


def check_grouped(rule, rows, name):
    norms = as_norms(rows, name)
    state = rule.initial_state()
    weights = in_double(rule.weights(norms, state))
    norms = in_double(norms)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    # A group that is not finite weighs 0; the engine drops the record as a whole.
    finite = np.isfinite(norms).all(axis=1)
    assert (weights[~np.isfinite(norms)] == 0).all()
    parts = (weights * np.where(np.isfinite(norms), norms, 0.0))[finite]
    slack = 1 + SLACK[name]
    sensitivity = in_double(rule.sensitivity(state))
    assert (parts <= sensitivity * slack).all()
    scales = in_double(rule.noise_scales(state))
    assert (scales > 0).all()
    # One Gaussian mechanism: all parts together, each in units of its noise.
    assert (np.linalg.norm(parts / scales, axis=1) <= slack).all()


ROWS = st.lists(st.lists(NORMS, min_size=3, max_size=3), min_size=1, max_size=4)
WIDE = st.sampled_from(["float32", "float64"])


@pytest.mark.slow
@QUICK
@given(grouped_rules(), ROWS, WIDE)
def test_groups_together_are_one_gaussian_mechanism(rule, rows, name):
    check_grouped(rule, rows, name)


@pytest.mark.slow
@MANY
@given(grouped_rules(), ROWS, WIDE)
def test_many_groups_together_are_one_gaussian_mechanism(rule, rows, name):
    check_grouped(rule, rows, name)


@pytest.mark.slow
@QUICK
@given(
    st.one_of(flat_rules(), grouped_rules()),
    ROWS,
    st.permutations(range(4)),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_permuting_records_permutes_what_belongs_to_them(rule, rows, order, present):
    order = [i for i in order if i < len(rows)]
    norms = as_norms(rows, "float32")
    norms = norms[:, 0] if rule.assignment is None else norms
    present = tf.constant(present[: len(rows)])
    state = rule.initial_state()
    there = tf.gather(norms, order)
    weights = tf.gather(rule.weights(norms, state), order)
    np.testing.assert_array_equal(rule.weights(there, state), weights)
    bits = tf.gather(rule.indicators(norms, state, present), order)
    again = rule.indicators(there, state, tf.gather(present, order))
    np.testing.assert_array_equal(again, bits)


@pytest.mark.slow
@QUICK
@given(
    st.one_of(flat_rules(), grouped_rules()),
    ROWS,
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_indicators_are_halves_and_padding_counts_as_neither(rule, rows, present):
    norms = as_norms(rows, "float32")
    norms = norms[:, 0] if rule.assignment is None else norms
    there = np.array(present[: len(rows)])
    state = rule.initial_state()
    bits = in_double(rule.indicators(norms, state, tf.constant(there)))
    assert bits.shape == (len(rows), len(rule.count_stddevs(10.0)))
    assert (np.abs(bits) <= 0.5).all()
    assert (bits[~there] == 0).all()


@QUICK
@given(
    st.floats(0.0, 1.0),
    CLIPS,
    st.floats(1e-3, 1e30),
    st.sampled_from(["geometric", "linear"]),
    st.one_of(st.floats(-10.0, 10.0), st.sampled_from([math.inf, -math.inf])),
)
def test_the_clip_moves_towards_the_quantile(quantile, clip, rate, update, fraction):
    rule = QuantileClip(quantile, clip, rate, update=update)
    state = rule.initial_state()
    before = float(rule.clip_norm(state))
    after = float(rule.clip_norm(rule.next_state(state, tf.constant([fraction]))))
    assert 0 < after < math.inf
    assert 1e-12 * (1 - 1e-6) <= after <= 1e12 * (1 + 1e-6)
    seen = min(1.0, max(0.0, np.float32(fraction)))
    if seen > np.float32(quantile):
        assert after <= before
    if seen < np.float32(quantile):
        assert after >= before


def test_a_fraction_that_is_no_number_leaves_a_clip_that_can_be_used():
    for update in ("geometric", "linear"):
        rule = QuantileClip(update=update)
        state = rule.next_state(rule.initial_state(), tf.constant([math.nan]))
        clip = float(rule.clip_norm(state))
        assert 0 < clip < math.inf


@pytest.mark.slow
@QUICK
@given(st.one_of(flat_rules(), grouped_rules()))
def test_saving_and_loading_gives_the_same_rule(rule):
    saved = serialize_rule(rule)
    assert as_rule(saved) == rule
    loaded = as_rule(json.loads(json.dumps(saved)))
    assert loaded == rule and hash(loaded) == hash(rule)
    assert str(loaded) == str(rule)
    assert type(rule)(**rule.get_config()) == rule
    if rule.assignment is not None:
        loaded = loaded.bind(NAMES)
        assert loaded.assignment == rule.assignment
    for one, other in zip(
        tf.nest.flatten(rule.initial_state()),
        tf.nest.flatten(loaded.initial_state()),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
