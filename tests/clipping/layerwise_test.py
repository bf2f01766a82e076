"""Rules with groups: every record stays in the ball that the noise is scaled by."""

import itertools
import json
import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

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

_FILE = pathlib.Path(__file__).parents[1] / "data" / "clipping_cases.json"
CASES = {c["name"]: c for c in json.loads(_FILE.read_text())["cases"]}
schedules = tf.keras.optimizers.schedules
NAMES = ["a/kernel:0", "a/bias:0", "b/kernel:0", "c/kernel:0"]
GROUPS = 3

BASES = {
    "fixed": FixedClip(0.7),
    "fixed_normalize": FixedClip(0.7, normalize=True),
    "schedule": FixedClip(schedules.ExponentialDecay(0.7, 1, 0.5)),
    "quantile": QuantileClip(0.5, 0.7),
    "quantile_normalize": QuantileClip(0.5, 0.7, normalize=True),
    "quantile_linear": QuantileClip(0.3, 0.7, update="linear", count_stddev=2.0),
    "quantile_schedule": QuantileClip(schedules.ExponentialDecay(0.7, 1, 0.5), 0.7),
    "automatic": AutomaticClip(0.01),
    "automatic_normalize": AutomaticClip(0.01, normalize=True),
    "automatic_unit": AutomaticClip(0.0),
}
MIXED = {"a": FixedClip(0.3), "b": QuantileClip(0.5, 2.0), "c": AutomaticClip()}
E = {"a": 3.0, "b": 0.5, "c": 40.0}


def every_rule():
    """Every kind of rule over every base, by name."""
    found = {}
    for (name, base), allocation in itertools.product(
        BASES.items(), ["per_layer", "joint"]
    ):
        found[f"layerwise/{name}/{allocation}"] = LayerwiseClip(
            base, allocation=allocation
        )
        found[f"public/{name}/{allocation}"] = PublicNormClip(
            base, allocation=allocation, norms=E
        )
    for name, base in BASES.items():
        found[f"scaled/{name}"] = ScaledClip({"a": 4.0, "b": 30.0, "c": 0.5}, base)
    for allocation in ["per_layer", "joint"]:
        found[f"mixed/{allocation}"] = LayerwiseClip(MIXED, allocation=allocation)
        found[f"own norms/{allocation}"] = PublicNormClip(
            None, allocation=allocation, norms=E
        )
        found[f"zero norm/{allocation}"] = PublicNormClip(
            1.0, allocation=allocation, norms={**E, "b": 0.0}
        )
    found["names"] = LayerwiseClip({"c": 1.0, "a": 2.0, "b": QuantileClip()})
    return found


RULES = every_rule()


def norms_of_records(seed=0):
    """`[B, 3]`: every mix of ordinary, extreme and broken norms."""
    rng = np.random.default_rng(seed)
    extreme = [0.0, 1e-30, 1e-12, 0.5, 0.7, 50.0, 1e12, 1e30, math.inf, math.nan]
    every = np.array(list(itertools.product(extreme, repeat=GROUPS)))
    ordinary = np.exp(rng.normal(0, 3, size=(200, GROUPS)))
    return np.concatenate([every, ordinary]).astype(np.float32)


def loads(rule, state, norms):
    """Each record's joint norm, every group divided by its noise scale."""
    weights = rule.weights(tf.constant(norms), state).numpy().astype(np.float64)
    finite = np.isfinite(norms)
    assert np.all(np.isfinite(weights)) and np.all(weights >= 0)
    assert np.all(weights[~finite] == 0)
    parts = np.where(finite, weights * np.where(finite, norms, 0.0), 0.0)
    sensitivity = rule.sensitivity(state).numpy().astype(np.float64)
    scales = rule.noise_scales(state).numpy().astype(np.float64)
    assert sensitivity.shape == scales.shape == (GROUPS,)
    assert np.all(np.isfinite(scales)) and np.all(scales > 0)
    assert np.all(parts <= sensitivity * (1 + 1e-5))
    return np.linalg.norm(parts / scales, axis=1)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_record_stays_in_the_unit_ball_of_the_noise_scales(rule):
    rule = rule.bind(NAMES)
    state = rule.initial_state()
    norms = norms_of_records()
    rng = np.random.default_rng(1)
    for _ in range(4):
        found = loads(rule, state, norms)
        assert found.max() <= 1 + 1e-5
        # The bound is reached, or nearly: no noise is wasted.
        assert found.max() > 0.98
        fractions = rng.random(len(rule.count_stddevs(100.0))).astype(np.float32)
        state = rule.next_state(state, tf.constant(fractions))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_indicators_are_halves_and_only_of_records_that_are_there(rule):
    rule = rule.bind(NAMES)
    state = rule.initial_state()
    norms = norms_of_records()
    count = len(rule.count_stddevs(100.0))
    found = rule.indicators(tf.constant(norms), state).numpy()
    assert found.shape == (len(norms), count)
    assert np.all(np.abs(found) <= 0.5)
    assert np.all(found[~np.isfinite(norms).any(axis=1)] == 0)
    nobody = rule.indicators(
        tf.constant(norms), state, tf.zeros([len(norms)], tf.bool)
    ).numpy()
    assert np.all(nobody == 0)
    if count:
        assert np.any(found == 0.5)


@pytest.mark.thinned(20)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_comes_back_from_json(rule):
    for one in (rule, rule.bind(NAMES)):
        again = as_rule(json.loads(json.dumps(serialize_rule(one))))
        assert type(again) is type(rule)
        assert again == one and hash(again) == hash(one) and str(again) == str(one)
        bound, expected = again.bind(NAMES), rule.bind(NAMES)
        state = expected.initial_state()
        norms = tf.constant(norms_of_records())
        np.testing.assert_array_equal(
            bound.weights(norms, bound.initial_state()), expected.weights(norms, state)
        )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_not_equal_to_one_with_another_setting(rule):
    others = [other for other in RULES.values() if other is not rule]
    assert all(rule != other for other in others)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("allocation", ["per_layer", "joint"])
def test_one_rule_for_all_groups_is_the_same_as_one_for_each(name, allocation):
    """The fast path in a single operation against the general path."""
    base = BASES[name]
    fast = LayerwiseClip(base, allocation=allocation).bind(NAMES)

    class Other(type(base)):
        """A class that the fast path does not know."""

    slow = LayerwiseClip(
        dict.fromkeys("abc", Other(**base.get_config())), allocation=allocation
    ).bind(NAMES)
    assert fast._shared is not None and slow._shared is None
    states = [fast.initial_state(), slow.initial_state()]
    norms = tf.constant(norms_of_records())
    rng = np.random.default_rng(0)
    for _ in range(3):
        for method in ("weights", "indicators"):
            a, b = (
                getattr(rule, method)(norms, state)
                for rule, state in zip((fast, slow), states, strict=True)
            )
            np.testing.assert_allclose(a, b, rtol=1e-6)
        for method in ("sensitivity", "noise_scales", "clip_norms", "clip_norm"):
            a, b = (
                getattr(rule, method)(state)
                for rule, state in zip((fast, slow), states, strict=True)
            )
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert fast.count_stddevs(60.0) == slow.count_stddevs(60.0)
        fractions = tf.constant(rng.random(len(fast.count_stddevs(60.0))), tf.float32)
        states = [
            rule.next_state(state, fractions)
            for rule, state in zip((fast, slow), states, strict=True)
        ]


def bound(rule):
    rule = rule.bind(NAMES)
    return rule, rule.initial_state()


def test_per_layer_and_joint_noise_of_the_paper():
    norms = {"a": 1.0, "b": 2.0, "c": 2.0}
    rule, state = bound(LayerwiseClip(norms))
    np.testing.assert_allclose(
        rule.noise_scales(state), math.sqrt(3) * np.array([1, 2, 2]), rtol=1e-6
    )
    rule, state = bound(LayerwiseClip(norms, allocation="joint"))
    np.testing.assert_allclose(rule.noise_scales(state), [3, 3, 3], rtol=1e-6)


def test_two_layers_of_the_paper():
    """[3, 4] and [0.3, 0.4] clipped to 1 and 0.25, by hand, and by flat clipping."""
    rule = LayerwiseClip({"a": 1.0, "b": 0.25}).bind(["a/w", "b/w"])
    weights = rule.weights(tf.constant([[5.0, 0.5]]), rule.initial_state()).numpy()[0]
    np.testing.assert_allclose(weights[0] * np.array([3, 4]), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(weights[1] * np.array([0.3, 0.4]), [0.15, 0.2], 1e-6)
    case = CASES["full_clip"]
    flat = np.concatenate(case["inputs"]["layers"])
    one = LayerwiseClip(float(case["inputs"]["C"]), groups=[".*"]).bind(["a/w", "b/w"])
    norm = np.linalg.norm(flat).astype(np.float32)
    factor = one.weights(tf.constant([[norm]]), one.initial_state()).numpy()
    np.testing.assert_allclose(factor[0, 0] * flat, case["expected"]["out"], rtol=1e-6)


# Nguyen et al. (2023), section 3.3: the norms on public data, the master clip, and
# the clips C_h. Their noise is 2 C_h sigma for each layer.
ALC = [
    ([2, 1, 0.5], 0.1, [0.1, 0.05, 0.025]),
    ([0.3, 0.3, 0.3], 1.0, [1.0, 1.0, 1.0]),
    ([4, 0.1, 8, 2], 0.095, [0.0475, 0.0011875, 0.095, 0.02375]),
    ([5], 0.2, [0.2]),
]


@pytest.mark.parametrize("norms, master, expected", ALC)
def test_clips_in_proportion_to_public_norms(norms, master, expected):
    names = [f"l{i}/w" for i in range(len(norms))]
    rule = PublicNormClip(master, norms={f"l{i}": norm for i, norm in enumerate(norms)})
    rule = rule.bind(names)
    state = rule.initial_state()
    np.testing.assert_allclose(rule.clip_norms(state), expected, rtol=1e-6)
    scales = math.sqrt(len(norms)) * np.array(expected)
    np.testing.assert_allclose(rule.noise_scales(state), scales, rtol=1e-6)
    # Clipping clips at exactly these norms.
    pairs = np.stack([np.array(expected) * 0.99, np.array(expected) * 2])
    weights = rule.weights(tf.constant(pairs, tf.float32), state).numpy()
    np.testing.assert_allclose(weights, [[1.0] * len(norms), [0.5] * len(norms)], 1e-5)


def test_without_a_master_the_clips_are_the_public_norms():
    rule, state = bound(PublicNormClip(None, norms=E))
    np.testing.assert_allclose(rule.clip_norms(state), [3.0, 0.5, 40.0], rtol=1e-6)
    moved = rule.with_public_norms(state, [1.0, 2.0, 4.0])
    np.testing.assert_allclose(rule.clip_norms(moved), [1.0, 2.0, 4.0], rtol=1e-6)


def test_a_public_norm_of_zero_is_floored():
    rule, state = bound(PublicNormClip(2.0, norms={**E, "b": 0.0}, floor=0.01))
    np.testing.assert_allclose(rule.clip_norms(state), [0.15, 0.02, 2.0], rtol=1e-6)
    rule, state = bound(PublicNormClip(None, norms={**E, "b": 0.0}, floor=0.01))
    np.testing.assert_allclose(rule.clip_norms(state), [3.0, 0.4, 40.0], rtol=1e-6)
    rule, state = bound(ScaledClip(norm=1.0, floor=0.01))
    state = rule.with_public_norms(state, [3.0, 0.0, 40.0])
    np.testing.assert_allclose(state[1], [40 / 3, 100, 1], rtol=1e-6)


@pytest.mark.parametrize("make", [PublicNormClip, ScaledClip])
@pytest.mark.parametrize("norms", [[0.0, 0.0, 0.0], [1e-30, 0.0, 1e-35]])
def test_public_norms_that_are_all_nothing_leave_a_usable_rule(make, norms):
    rule, state = bound(make())
    state = rule.with_public_norms(state, norms)
    assert loads(rule, state, norms_of_records()).max() <= 1 + 1e-5


def test_multipliers_come_from_public_norms():
    rule, state = bound(ScaledClip(norm=2.0))
    assert not bool(rule.knows_norms(state))
    state = rule.with_public_norms(state, [1.0, 2.0, 8.0])
    assert bool(rule.knows_norms(state))
    np.testing.assert_allclose(state[1], [8, 4, 1], rtol=1e-6)
    np.testing.assert_allclose(rule.noise_scales(state), [0.25, 0.5, 2.0], rtol=1e-6)


def test_a_scaled_record_is_clipped_as_a_whole():
    rule, state = bound(ScaledClip({"a": 3.0, "b": 4.0, "c": 1.0}, 2.5))
    weights = rule.weights(tf.constant([[1.0, 1.0, 0.0]]), state).numpy()
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0.5]], rtol=1e-6)
    # With multipliers of 1 it is the flat clip, without a factor sqrt(L).
    plain, plain_state = bound(ScaledClip(dict.fromkeys("abc", 1.0), 2.5))
    np.testing.assert_allclose(plain.noise_scales(plain_state), [2.5] * 3, rtol=1e-6)


def test_every_group_of_a_quantile_rule_follows_its_own_norms():
    rule, state = bound(LayerwiseClip(QuantileClip(0.5, 1.0, 0.3)))
    rng = np.random.default_rng(0)
    medians = np.array([0.1, 1.0, 30.0])
    for _ in range(80):
        norms = medians * np.exp(0.1 * rng.normal(size=(200, GROUPS)))
        bits = rule.indicators(tf.constant(norms, tf.float32), state)
        state = rule.next_state(state, tf.reduce_mean(bits, axis=0) + 0.5)
    np.testing.assert_allclose(rule.clip_norms(state), medians, rtol=0.2)


def test_an_adaptive_master_follows_the_norms_relative_to_their_shares():
    rule, state = bound(PublicNormClip(QuantileClip(0.5, 1.0, 0.3), norms=E))
    shares = np.array([3, 0.5, 40]) / 40
    rng = np.random.default_rng(0)
    for _ in range(80):
        norms = 7.0 * shares * np.exp(0.1 * rng.normal(size=(200, GROUPS)))
        bits = rule.indicators(tf.constant(norms, tf.float32), state)
        assert bits.shape == (200, 1)
        state = rule.next_state(state, tf.reduce_mean(bits, axis=0) + 0.5)
    np.testing.assert_allclose(rule.clip_norms(state), 7 * shares, rtol=0.2)


def test_a_mixed_rule_gives_each_fraction_to_the_group_that_counted():
    counts = QuantileClip(0.5, 1.0, 1.0)
    rule, state = bound(LayerwiseClip({"a": counts, "b": 1.0, "c": counts}))
    assert rule.count_stddevs(40.0) == (2.0, 2.0)
    assert rule.default_counts == (True, True)
    state = rule.next_state(state, tf.constant([0.0, 1.0]))
    expected = [math.exp(0.5), 1.0, math.exp(-0.5)]
    np.testing.assert_allclose(rule.clip_norms(state), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [LayerwiseClip, lambda base: PublicNormClip(base, norms={"a": 1, "b": 1, "c": 1})],
)
def test_a_schedule_of_the_clip_norm_moves_by_the_step(make):
    schedule = schedules.PiecewiseConstantDecay([0, 1], [4.0, 2.0, 1.0])
    rule, state = bound(make(schedule))
    for expected in (4.0, 2.0, 1.0, 1.0):
        np.testing.assert_allclose(rule.clip_norms(state), [expected] * 3, rtol=1e-6)
        np.testing.assert_allclose(
            rule.noise_scales(state), [expected * math.sqrt(3)] * 3, rtol=1e-6
        )
        state = rule.next_state(state, tf.zeros([0]))


def test_a_schedule_of_the_quantile_moves_by_the_step():
    schedule = schedules.PiecewiseConstantDecay([0], [0.9, 0.1])
    rule, state = bound(LayerwiseClip(QuantileClip(schedule, 1.0, 1.0)))
    fraction = tf.constant([0.5, 0.5, 0.5])
    state = rule.next_state(state, fraction)
    np.testing.assert_allclose(rule.clip_norms(state), [math.exp(0.4)] * 3, rtol=1e-5)
    state = rule.next_state(state, fraction)
    np.testing.assert_allclose(rule.clip_norms(state), [1.0] * 3, rtol=1e-5)


class Leaves(schedules.LearningRateSchedule):
    """1 at step 0 and a value after it. (Keras 3 would multiply both if piecewise.)"""

    def __init__(self, value):
        self.value = value

    def __call__(self, step):
        return tf.where(tf.cast(step, tf.int32) > 0, self.value, 1.0)

    def get_config(self):
        return {"value": self.value}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_schedule_that_leaves_the_range_still_clips(value):
    schedule = Leaves(value)
    for rule in (
        LayerwiseClip(FixedClip(schedule)),
        LayerwiseClip(FixedClip(schedule, normalize=True)),
        PublicNormClip(schedule, norms=E),
        ScaledClip({"a": 1.0, "b": 2.0, "c": 3.0}, schedule),
    ):
        rule, state = bound(rule)
        state = rule.next_state(state, tf.zeros([0]))
        assert loads(rule, state, norms_of_records()).max() <= 1 + 1e-5


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: LayerwiseClip(0.0), "rule must be a finite number above 0"),
        (lambda: LayerwiseClip(math.nan), "rule must be a finite number above 0"),
        (lambda: LayerwiseClip("1.0"), "rule must be a clip norm or a clip rule"),
        (lambda: LayerwiseClip(None), "rule must be a clip norm or a clip rule"),
        (lambda: LayerwiseClip([1.0, 2.0]), "rule must be a finite number above 0"),
        (lambda: LayerwiseClip({"a": math.inf}), "rule must be a finite number"),
        (lambda: LayerwiseClip(LayerwiseClip(1.0)), "rule must be a rule without"),
        (lambda: LayerwiseClip(1.0, allocation="flat"), "allocation must be"),
        (lambda: PublicNormClip(-1.0), "master_norm must be a finite number above 0"),
        (lambda: PublicNormClip(math.inf), "master_norm must be a finite number"),
        (lambda: PublicNormClip(ScaledClip()), "master_norm must be a rule without"),
        (lambda: PublicNormClip(1.0, allocation=1), "allocation must be"),
        (lambda: PublicNormClip(floor=0.0), r"floor must be in \(0, 1\]"),
        (lambda: PublicNormClip(floor=1.5), r"floor must be in \(0, 1\]"),
        (lambda: PublicNormClip(floor=math.nan), r"floor must be in \(0, 1\]"),
        (lambda: PublicNormClip(norms=3.0), "norms must be one number per group"),
        (lambda: PublicNormClip(norms="abc"), "norms must be one number per group"),
        (lambda: PublicNormClip(norms={"a": -1.0}), r"norms\['a'\] must be"),
        (lambda: PublicNormClip(norms=[1.0]), "norms must be one number per group"),
        (lambda: ScaledClip({"a": 0.0}), r"multipliers\['a'\] must be"),
        (lambda: ScaledClip([1.0]), "multipliers must be one number per group"),
        (lambda: ScaledClip(norm=0.0), "norm must be a finite number above 0"),
        (lambda: ScaledClip(norm=LayerwiseClip()), "norm must be a rule without"),
        (lambda: ScaledClip(floor=-1.0), r"floor must be in \(0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "rule, text",
    [
        (LayerwiseClip({}), "rule has groups , but the groups are a, b, c"),
        (LayerwiseClip({"a": 1.0, "b": 2.0}), "rule has groups a, b, but the groups"),
        (PublicNormClip(norms={"a": 1.0}), "norms says nothing about group 'b'"),
        (ScaledClip({"a": 1.0, "b": 2.0}), "multipliers says nothing about group 'c'"),
    ],
)
def test_settings_that_do_not_fit_the_groups_are_refused(rule, text):
    with pytest.raises(ValueError, match=text):
        rule.bind(NAMES)


def test_numbers_of_numpy_are_numbers():
    rule = PublicNormClip(1.0, norms={k: np.float32(v) for k, v in E.items()})
    again = as_rule(json.loads(json.dumps(serialize_rule(rule))))
    assert again == rule
    rule = ScaledClip(dict(zip("abc", np.array([1.0, 2.0, 3.0]), strict=True)), 1.0)
    assert as_rule(json.loads(json.dumps(serialize_rule(rule)))) == rule


@pytest.mark.thinned(2)
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-22, 3e-20, 1e-19, 1e15, 1e25])
def test_scaled_norms_whose_squares_are_no_float32_are_bounded(size):
    # In float32 the norm of (3e-20, 3e-20) is 0, or the norm of a single entry.
    multipliers = {"a": 1.0, "b": 0.9, "c": 1.1}
    rule = ScaledClip(multipliers, AutomaticClip(0.0)).bind(NAMES)
    state = rule.initial_state()
    norms = tf.constant([[size, size, size]], tf.float32)
    parts = rule.weights(norms, state).numpy().astype(float) * norms.numpy()
    joint = np.linalg.norm(parts / rule.noise_scales(state).numpy())
    assert joint <= 1 + 1e-6
    assert joint == pytest.approx(1.0, rel=1e-5) or size == 1e-38
