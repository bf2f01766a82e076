"""Clip rules: their promises about weights, sensitivity, indicators and state."""

import copy
import dataclasses
import json
import math
import pathlib
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    QuantileClip,
    as_rule,
    serialize_rule,
)
from tfdpclip.mechanism import Mechanism

_FILE = pathlib.Path(__file__).parent / "data" / "clipping_cases.json"
CASES = {case["name"]: case for case in json.loads(_FILE.read_text())["cases"]}

RULES = {
    "fixed": FixedClip(0.5),
    "fixed_normalized": FixedClip(0.5, normalize=True),
    "quantile": QuantileClip(0.3, 0.7),
    "quantile_linear": QuantileClip(0.3, 0.7, 0.05, update="linear"),
    "quantile_normalized": QuantileClip(0.3, 0.7, normalize=True),
    "automatic": AutomaticClip(0.01),
    "automatic_unit": AutomaticClip(0.0),
}
all_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

NORMS = [0.0, 1e-42, 1e-30, 1e-6, 0.01, 0.4999, 0.5, 0.5001, 0.7, 3.0, 1e6, 1e30, 3e38]
NOT_FINITE = [math.inf, -math.inf, math.nan]
BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, True, "1.0", b"1", [1, 2], object()]


def expected_weight(rule, norm, clip_norm):
    """The papers' formula, in double precision."""
    if isinstance(rule, AutomaticClip):
        return 1 / (norm + rule.stability) if norm + rule.stability else 0.0
    weight = min(1.0, clip_norm / norm) if norm else 1.0
    return weight / clip_norm if rule.normalize else weight


@all_rules
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_weights_are_those_of_the_papers(rule, dtype):
    state = rule.initial_state()
    norms = [n for n in NORMS if n == 0 or n > 1e-38]
    found = rule.weights(tf.constant(norms, dtype), state)
    assert found.dtype == dtype
    clip_norm = float(rule.clip_norm(state))
    expected = [expected_weight(rule, n, clip_norm) for n in norms]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-38)


@all_rules
def test_no_weighted_record_exceeds_the_sensitivity(rule):
    state = rule.initial_state()
    norms = np.array([*NORMS, *np.logspace(-37, 38, 2001)], np.float32)
    weights = rule.weights(tf.constant(norms), state).numpy()
    assert np.all(np.isfinite(weights)) and np.all(weights >= 0)
    released = weights.astype("float64") * norms
    assert np.all(released <= float(rule.sensitivity(state)) * (1 + 1e-6))


@all_rules
@pytest.mark.parametrize("norm", NOT_FINITE)
def test_a_record_whose_norm_is_not_finite_has_weight_and_indicator_zero(rule, norm):
    state = rule.initial_state()
    norms = tf.constant([norm, 0.2])
    assert rule.weights(norms, state).numpy()[0] == 0
    assert np.all(rule.indicators(norms, state).numpy()[:1] == 0)


@all_rules
def test_a_zero_record_stays_zero(rule):
    weight = rule.weights(tf.constant([0.0]), rule.initial_state()).numpy()[0]
    assert np.isfinite(weight) and weight * 0.0 == 0


@all_rules
def test_an_empty_batch_has_empty_weights_and_indicators(rule):
    state = rule.initial_state()
    assert rule.weights(tf.zeros([0]), state).shape == [0]
    indicators = rule.indicators(tf.zeros([0]), state, tf.zeros([0], tf.bool))
    assert indicators.shape[0] == 0
    assert tf.reduce_sum(indicators, axis=0).shape == [len(rule.count_stddevs(100))]


@pytest.mark.parametrize("update", ["geometric", "linear"])
def test_indicators_say_whether_the_norm_is_within_the_clip(update):
    rule = QuantileClip(initial_norm=0.5, update=update)
    norms = tf.constant([0.0, 0.49, 0.5, 0.51, 9.0])
    found = rule.indicators(norms, tf.constant(0.5)).numpy()
    assert found.shape == (5, 1)
    assert found.ravel().tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]


@all_rules
def test_indicators_are_bounded_by_one_half(rule):
    norms = tf.constant([*NORMS, *NOT_FINITE], tf.float32)
    found = rule.indicators(norms, rule.initial_state()).numpy()
    assert np.all(np.abs(found) <= 0.5)


def test_padding_gives_no_indicator_whatever_its_norm():
    rule = QuantileClip(initial_norm=0.5)
    present = tf.constant([True, False, True, False, False])
    norms = tf.constant([0.1, 0.1, 2.0, 2.0, math.nan])
    found = rule.indicators(norms, rule.initial_state(), present).numpy().ravel()
    assert found.tolist() == [0.5, 0, -0.5, 0, 0]


@pytest.mark.parametrize("name", ["update/geometric", "update/linear"])
def test_one_update_matches_the_known_answer(name):
    case = CASES[name]
    inputs = case["inputs"]
    rule = QuantileClip(
        inputs["gamma"], inputs["C"], inputs["eta"], update=name.split("/")[1]
    )
    state = rule.next_state(rule.initial_state(), tf.constant([inputs["b"]]))
    assert float(state) == pytest.approx(case["expected"]["C_next"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if "growth/gamma" in name])
def test_growth_by_ten_takes_the_known_number_of_rounds(name):
    inputs, rounds = CASES[name]["inputs"], CASES[name]["expected"]["rounds_for_x10"]
    rule = QuantileClip(inputs["gamma"], 0.1, inputs["eta"])
    state = rule.initial_state()
    for _ in range(math.floor(rounds)):
        state = rule.next_state(state, tf.zeros([1]))
    assert float(state) < 1.0 + 1e-4
    state = rule.next_state(state, tf.zeros([1]))
    assert float(state) > 1.0 - 1e-4


def test_growth_over_23_rounds():
    rule = QuantileClip(0.5, 0.1, 0.2)
    state = rule.initial_state()
    for _ in range(23):
        state = rule.next_state(state, tf.zeros([1]))
    expected = CASES["growth/23rounds"]["expected"]["C"]
    assert float(state) == pytest.approx(expected, rel=1e-5)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("update", ["geometric", "linear"])
@pytest.mark.parametrize("fraction", [0.0, 1.0, -7.0, 7.0, 1e30])
def test_a_state_stays_finite_and_positive_for_ever(update, fraction):
    rule = QuantileClip(0.5, 0.1, 5.0, update=update)
    state = rule.initial_state()
    for _ in range(200):
        state = rule.next_state(state, tf.constant([fraction]))
        assert math.isfinite(float(state)) and float(state) > 0
        weights = rule.weights(tf.constant(NORMS, tf.float32), state).numpy()
        assert np.all(np.isfinite(weights))


@pytest.mark.parametrize(
    ("records", "stddev", "target", "runs"),
    [
        (100, 5.0, 0.99, 32),
        pytest.param(100, 5.0, 0.01, 32, marks=pytest.mark.slow),
        pytest.param(20, 6.0, 0.9, 128, marks=pytest.mark.slow),
        pytest.param(20, 9.0, 0.65, 128, marks=pytest.mark.slow),
    ],
)
def test_the_noise_of_the_paper_does_not_move_the_quantile(
    records, stddev, target, runs
):
    """Algorithm 1 of Andrew et al. on exp(N(0, 1)), from 0.1: the mass below C.

    2000 rounds after 1000; simulated means of all runs have a standard deviation of at
    most 0.0007: seven of them, 3e-12. Clamped fractions end at masses of 1.00, 0.00,
    1.00 and 0.72.
    """
    rule = QuantileClip(target, 0.1, 0.2, count_stddev=stddev)
    mechanism = Mechanism(rule, 0.0, records)

    @tf.function
    def follow(clips, seed):
        norms = tf.exp(tf.random.stateless_normal([records, runs], [seed, 1]))
        counts = tf.reduce_sum(rule.indicators(norms, clips), axis=0)
        counts += tf.random.stateless_normal([runs], [seed, 2], stddev=stddev)
        return rule.next_state(clips, mechanism.fractions(counts))

    clips, masses = tf.fill([runs], 0.1), []
    for i in range(3000):
        clips = follow(clips, tf.constant(i))
        masses.append(clips.numpy())
    below = [
        [math.erf(math.log(c) / math.sqrt(2)) for c in row] for row in masses[1000:]
    ]
    assert (1 + np.mean(below)) / 2 == pytest.approx(target, abs=0.005)


@pytest.mark.parametrize(
    ("target", "records", "stddev", "name", "value"),
    [
        (0.99, 20, 9.0, "target_quantile", 0.969),
        (0.01, 20, 9.0, "target_quantile", 0.031),
        (1.0, 100, 5.0, "target_quantile", 0.99962),
        (0.5, 1, 7.0, "learning_rate", 0.075),
    ],
)
def test_a_target_that_noise_makes_unreachable_warns_with_a_line_that_does_not(
    target, records, stddev, name, value
):
    settings = {"target_quantile": target, "count_stddev": stddev}
    rule = QuantileClip(**settings)
    layers = LayerwiseClip({"a": FixedClip(1.0), "b": rule})
    grouped = layers.bind(["a/kernel", "b/kernel"])
    for clip in (rule, grouped):
        with pytest.warns(UserWarning, match=f"of {stddev / records:.3g} on") as told:
            Mechanism(clip, 0.0, records)
        line = re.search(rf"write {name}=(\S+)\.$", str(told[0].message))
        assert float(line[1]) == pytest.approx(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        better = QuantileClip(**settings | {name: value})
        Mechanism(better, 0.0, records)


@pytest.mark.parametrize(
    ("target", "records", "stddev"),
    [(0.99, 100, 5), (0.01, 100, 5), (0.9, 20, 6), (0.65, 20, 9), (0.65, 8, 5.7)],
)
def test_targets_of_the_paper_do_not_warn(target, records, stddev):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Mechanism(QuantileClip(target, count_stddev=stddev), 0.0, records)
    assert not told


def test_the_clip_norm_grows_tenfold_in_23_rounds_of_all_clipped_with_noise_or_not():
    """Andrew et al., for target 0.5: 9.97. With clamped noise it was 9.1."""
    rule = QuantileClip(0.5, 0.1, 0.2)
    plain = noisy = tf.constant(0.1)
    for i in range(23):
        plain = rule.next_state(plain, tf.constant([0.0]))
        noisy = rule.next_state(noisy, tf.constant([0.05 * (-1) ** i]))
    # The noise was positive once more than negative, which the next round evens out.
    noisy = rule.next_state(noisy, tf.constant([0.45]))
    assert float(plain) == pytest.approx(0.997418, rel=1e-5)
    assert float(noisy) == pytest.approx(0.997418, rel=1e-5)


def test_one_step_moves_a_clip_norm_by_its_learning_rate_at_most():
    rule = QuantileClip(0.5, 0.1)
    far = rule.next_state(rule.initial_state(), tf.constant([-3.0]))
    assert float(far) == pytest.approx(0.1 * math.exp(0.2), rel=1e-6)


def test_the_linear_update_stops_above_zero():
    rule = QuantileClip(0.0, 0.1, 0.2, update="linear")
    state = rule.next_state(rule.initial_state(), tf.constant([1.0]))
    assert 0 < float(state) < 0.1
    back = rule.next_state(state, tf.constant([0.0]))
    assert math.isfinite(float(back))


@pytest.mark.parametrize("update", ["geometric", "linear"])
def test_a_quantile_stays_at_the_least_norm_and_leaves_it(update):
    rule = QuantileClip(0.5, 1.0, 0.4, update=update, minimum_norm=0.3)
    state = rule.initial_state()
    for _ in range(20):
        state = rule.next_state(state, tf.constant([1.0]))
    assert float(rule.clip_norm(state)) == pytest.approx(0.3)
    state = rule.next_state(state, tf.constant([0.0]))
    assert float(rule.clip_norm(state)) > 0.3
    with pytest.raises(ValueError, match="minimum_norm must be at most initial_norm"):
        QuantileClip(0.5, 0.1, minimum_norm=0.3)


@pytest.mark.parametrize("update", ["geometric", "linear"])
def test_a_quantile_stays_at_the_greatest_norm_counts_there_and_leaves_it(update):
    rule = QuantileClip(0.5, 1.0, 0.4, update=update, maximum_norm=1.3)
    state = rule.initial_state()
    for _ in range(20):
        # Noise may take a fraction far outside of 0 to 1.
        state = rule.next_state(state, tf.constant([-7.0]))
    assert float(rule.clip_norm(state)) == pytest.approx(1.3)
    assert float(rule.sensitivity(state)) == float(rule.clip_norm(state))
    bits = rule.indicators(tf.constant([1.299, 1.301]), state)
    assert bits.numpy().ravel().tolist() == [0.5, -0.5]
    np.testing.assert_allclose(rule.weights(tf.constant([2.6]), state).numpy(), [0.5])
    # At a bound the move does not tell the fraction.
    assert np.isnan(rule.mean_fraction(rule.initial_state(), state, 20))
    below = rule.next_state(state, tf.constant([1.0]))
    assert float(rule.clip_norm(below)) < 1.299
    # A state of a checkpoint of a rule with a greater bound: used as it is, once.
    assert float(rule.clip_norm(rule.next_state(tf.constant(9.0), [0.0]))) < 1.301


def test_the_bounds_of_a_norm_are_around_its_first():
    QuantileClip(0.5, 1.0, minimum_norm=1.0, maximum_norm=1.0)
    with pytest.raises(ValueError, match="maximum_norm must be at least initial_norm"):
        QuantileClip(0.5, 1.0, maximum_norm=0.9)
    for bad in (0.0, math.nan, math.inf, "3"):
        with pytest.raises(ValueError, match="maximum_norm"):
            QuantileClip(0.5, 1.0, maximum_norm=bad)


def test_a_rule_saved_before_there_was_a_greatest_norm_has_none():
    saved = serialize_rule(QuantileClip(0.65, 1.0, normalize=True, minimum_norm=0.1))
    del saved["config"]["maximum_norm"]
    rule = as_rule(saved)
    assert rule.maximum_norm is None
    state = rule.next_state(tf.constant(50.0), tf.constant([0.0]))
    assert float(rule.clip_norm(state)) > 50
    bounded = QuantileClip(0.5, 1.0, maximum_norm=3.0)
    assert as_rule(serialize_rule(bounded)) == bounded


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_extreme_quantiles_move_one_way_only(target):
    rule = QuantileClip(target, 1.0)
    for fraction in (0.0, 0.3, 1.0):
        moved = float(rule.next_state(rule.initial_state(), tf.constant([fraction])))
        assert moved <= 1.0 if target == 0 else moved >= 1.0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("autos")])
def test_automatic_clip_matches_the_known_answer(name):
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    gradient = np.array(inputs["g"], np.float32)
    rule = AutomaticClip(inputs["gamma"])
    weight = rule.weights(tf.constant([np.linalg.norm(gradient)]), ())
    clipped = weight.numpy()[0] * gradient
    np.testing.assert_allclose(clipped, expected["out"], rtol=1e-6)
    assert np.linalg.norm(clipped) == pytest.approx(expected["norm"], rel=1e-6)


def test_automatic_clip_without_stability_gives_unit_norms():
    norms = tf.constant([1e-20, 1e-3, 1.0, 1e20])
    released = AutomaticClip(0.0).weights(norms, ()) * norms
    np.testing.assert_allclose(released.numpy(), 1.0, rtol=1e-6)
    assert AutomaticClip(0.0).weights(tf.constant([0.0]), ()).numpy()[0] == 0


def test_clipping_over_layers_together_matches_the_known_answer():
    case = CASES["full_clip"]
    flat = np.concatenate(case["inputs"]["layers"])
    norm = tf.constant([np.linalg.norm(flat)], tf.float32)
    weight = FixedClip(case["inputs"]["C"]).weights(norm, ()).numpy()[0]
    np.testing.assert_allclose(weight * flat, case["expected"]["out"], rtol=1e-6)


def test_clipping_each_record_matches_the_known_answer():
    case = CASES["batch_vs_individual"]
    gradients = np.array(case["inputs"]["gradients"], np.float32)
    norms = tf.constant(np.linalg.norm(gradients, axis=1))
    weights = FixedClip(case["inputs"]["C"]).weights(norms, ()).numpy()
    expected = case["expected"]["ic_sum"]
    # One of the sums cancels to 0, except for rounding.
    np.testing.assert_allclose(weights @ gradients, expected, rtol=1e-6, atol=1e-6)


def test_the_weight_a_class_keeps_matches_the_known_answer():
    case = CASES["retained/C=0.1"]
    rule = FixedClip(case["inputs"]["C"])
    for name, norms in case["inputs"]["norms"].items():
        kept = rule.weights(tf.constant(norms, tf.float32), ()).numpy().mean()
        expected = case["expected"]["class_weight"][name]
        assert kept == pytest.approx(expected, rel=1e-6)


def test_a_normalized_rule_has_sensitivity_one_and_reports_its_clip_norm():
    for rule in (
        FixedClip(0.2, normalize=True),
        QuantileClip(0.5, 0.2, normalize=True),
    ):
        state = rule.initial_state()
        assert float(rule.sensitivity(state)) == 1.0
        assert float(rule.clip_norm(state)) == pytest.approx(0.2)
    assert float(AutomaticClip().sensitivity(())) == 1.0


def test_count_stddev_defaults_to_a_twentieth_of_the_records():
    assert QuantileClip().count_stddevs(100) == (5.0,)
    assert QuantileClip(count_stddev=3).count_stddevs(100) == (3.0,)
    assert QuantileClip().count_stddevs(100, private=False) == (0.0,)
    assert FixedClip(1.0).count_stddevs(100) == ()
    assert QuantileClip().default_counts == (True,)
    assert QuantileClip(count_stddev=3).default_counts == (False,)
    assert FixedClip(1.0).default_counts == ()


ARGUMENTS = [
    (FixedClip, "norm", (0.0,)),
    (QuantileClip, "initial_norm", (0.0,)),
    (QuantileClip, "learning_rate", (0.0,)),
    (QuantileClip, "target_quantile", (1.01,)),
    (QuantileClip, "count_stddev", ()),
    (AutomaticClip, "stability", (None,)),
]


@pytest.mark.parametrize(
    "rule, name, value",
    [(r, n, v) for r, n, more in ARGUMENTS for v in [*BAD_NUMBERS, *more]],
)
def test_a_bad_number_is_refused_by_name(rule, name, value):
    with pytest.raises(ValueError, match=name):
        rule(**{name: value})


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.bool_(True)])
@pytest.mark.parametrize("rule", [FixedClip, QuantileClip, AutomaticClip])
def test_normalize_must_be_a_bool(rule, value):
    arguments = {"norm": 1.0} if rule is FixedClip else {}
    with pytest.raises(ValueError, match="normalize"):
        rule(normalize=value, **arguments)


@pytest.mark.parametrize("value", ["exponential", None, 1, "Geometric"])
def test_an_unknown_update_is_refused(value):
    with pytest.raises(ValueError, match="update"):
        QuantileClip(update=value)


@pytest.mark.parametrize(
    "value", ["quantile", b"1", None, True, False, math.nan, math.inf, -1.0, 0, [1.0]]
)
def test_a_clip_that_is_no_clip_is_refused(value):
    with pytest.raises(ValueError, match="clip"):
        as_rule(value)


def test_an_unknown_rule_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'BestClip'.*QuantileClip.*register_rule"):
        as_rule({"class_name": "BestClip", "config": {}})
    with pytest.raises(ValueError):
        as_rule({})


def test_a_number_means_a_fixed_clip():
    assert as_rule(2) == FixedClip(2.0)
    assert as_rule(np.float32(0.5)) == FixedClip(0.5)


@all_rules
def test_a_rule_survives_its_configuration(rule):
    config = json.loads(json.dumps(serialize_rule(rule)))
    assert as_rule(config) == rule
    assert type(rule)(**rule.get_config()) == rule
    assert copy.deepcopy(rule) == rule


@all_rules
def test_a_rule_is_frozen_and_hashable(rule):
    assert hash(rule) == hash(dataclasses.replace(rule))
    name = dataclasses.fields(rule)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, name, 3.0)


@pytest.mark.thinned(4)
@all_rules
@pytest.mark.parametrize("jit", [False, True])
def test_a_rule_gives_the_same_inside_a_compiled_function(rule, jit):
    def everything(norms, state):
        indicators = rule.indicators(norms, state, norms < 2.0)
        fractions = tf.reduce_sum(indicators, axis=0) / 10 + 0.5
        return (
            rule.weights(norms, state),
            rule.sensitivity(state),
            indicators,
            rule.next_state(state, fractions),
        )

    norms = tf.constant([0.0, 1e-5, 0.5, 0.6, 1.9, 3.0, math.inf, math.nan])
    state = rule.initial_state()
    expected = tf.nest.flatten(everything(norms, state))
    compiled = tf.function(everything, jit_compile=jit)
    for a, b in zip(expected, tf.nest.flatten(compiled(norms, state)), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
