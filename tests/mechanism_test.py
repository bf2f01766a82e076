"""The mechanism: its noise, its order, and its refusals."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.clipping.contract_test import RULES as SETUPS
from tests.fixed_noise import Fixed, Given
from tfdpclip import accounting, clipping
from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
)
from tfdpclip.mechanism import Mechanism, Unclipped
from tfdpclip.noise import GaussianNoise

NAMES = ["a/kernel", "a/bias", "b/kernel", "c/kernel"]
NORMS = {"a": 0.1, "b": 1.0, "c": 2.0}
Z, RECORDS = 0.8, 40
schedules = tf.keras.optimizers.schedules

RULES: dict[str, clipping.ClipRule] = {
    "fixed": FixedClip(0.7),
    "fixed, normalised": FixedClip(0.7, normalize=True),
    "fixed, scheduled": FixedClip(schedules.ExponentialDecay(0.7, 10, 0.5)),
    "quantile": QuantileClip(initial_norm=0.7),
    "quantile, normalised": QuantileClip(initial_norm=0.7, normalize=True),
    "quantile, linear": QuantileClip(initial_norm=0.7, update="linear"),
    "automatic": AutomaticClip(1e-6),
    "layerwise": LayerwiseClip(QuantileClip(initial_norm=0.7)),
    "layerwise, joint": LayerwiseClip(
        {"a": 0.5, "b": 1.0, "c": 3.0}, allocation="joint"
    ),
    "layerwise, mixed": LayerwiseClip(
        {"a": 0.5, "b": QuantileClip(), "c": AutomaticClip(1e-6)}
    ),
    "public": PublicNormClip(QuantileClip(), norms=NORMS),
    "public, joint": PublicNormClip(1.0, norms=NORMS, allocation="joint"),
    "public, no master": PublicNormClip(None, norms=NORMS),
    "scaled": ScaledClip({"a": 0.3, "b": 1.0, "c": 4.0}, QuantileClip()),
}
# Further rules: the first setup of each in the table of the rules' contract.
_KINDS = {type(rule).__name__ for rule in RULES.values()}
RULES |= {name: setups[0] for name, setups in SETUPS.items() if name not in _KINDS}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def made(rule, z=Z, records=RECORDS, **options):
    found = Mechanism(rule.bind(NAMES), z, records, **options)
    return found, found.rule.initial_state()


def oracle(prefix):
    path = pathlib.Path(__file__).parent / "accounting" / "oracle_cases.json"
    found = [c for c in json.loads(path.read_text()) if c["name"].startswith(prefix)]
    assert found
    return pytest.mark.parametrize("case", found, ids=lambda case: case["name"])


# The noise.


@pytest.mark.thinned(2)
@oracle("001/thm1/z")
def test_the_sum_gets_what_theorem_1_leaves_of_z(case):
    inputs = case["inputs"]
    given = QuantileClip(count_stddev=inputs["sigma_b"])
    for rule in (given, QuantileClip()):
        found = Mechanism(rule, inputs["z"], inputs["m"])
        assert found.count_stddevs == pytest.approx((inputs["sigma_b"],), rel=1e-12)
        z_g = found.gradient_noise_multiplier()
        assert z_g == pytest.approx(case["expected"]["z_delta"], rel=1e-12)


@oracle("001/thm1/invalid")
def test_counts_too_precise_for_z_are_refused(case):
    rule = QuantileClip(count_stddev=case["inputs"]["sigma_b"])
    with pytest.raises(ValueError, match="too precise"):
        Mechanism(rule, case["inputs"]["z"], 100)


@oracle("004/layers/sigma")
def test_layers_get_the_noise_of_section_3_2(case):
    """Noise sigma on each of L layers of clip norm 1 is noise 1/mu on all of them."""
    layers, sigma = case["inputs"]["L"], case["inputs"]["sigma"]
    rule = LayerwiseClip(1.0).bind([f"layer{i}/kernel" for i in range(layers)])
    found = Mechanism(rule, 1 / case["expected"]["mu"], 100)
    stddevs = found.noise_stddevs(rule.initial_state()).numpy()
    np.testing.assert_allclose(stddevs, np.full(layers, sigma), rtol=1e-6)


@pytest.mark.thinned(4)
@every_rule
def test_one_record_is_within_noise_multiplier_z(rule):
    """A record's parts and bits, each over its noise's stddev, have norm 1/z at most.

    That is the whole guarantee: sum_h (S_h / sigma_h)^2 = z_g^-2 and z_g^-2 + sum_k (2
    s_k)^-2 = z^-2. A large record, or a record at the clip norm, comes close: no noise
    is wasted.
    """
    found, state = made(rule)
    rng = np.random.default_rng(0)
    shape = (400,) if found.rule.assignment is None else (400, 3)
    norms = np.exp(rng.normal(0, 3, shape)).astype(np.float32)
    norms[0], norms[1] = 1e15, found.rule.clip_norm(state)
    weights, bits = found.clip(tf.constant(norms), state)
    clipped = np.reshape(weights.numpy().astype(np.float64) * norms, [400, -1])
    parts = np.square(clipped / found.noise_stddevs(state).numpy()).sum(1)
    z_g = found.gradient_noise_multiplier()
    assert parts.max() <= z_g**-2 * (1 + 1e-5)
    assert parts.max() == pytest.approx(z_g**-2, rel=1e-5)
    counts = np.square(bits.numpy() / np.array(found.count_stddevs)).sum(1)
    assert (parts + counts).max() <= Z**-2 * (1 + 1e-5)
    assert (parts + counts).max() == pytest.approx(Z**-2, rel=1e-5)


@pytest.mark.parametrize("name", ["layerwise", "layerwise, joint", "public"])
def test_the_groups_share_z_g(name):
    found, state = made(RULES[name])
    z_h = found.noise_stddevs(state) / found.rule.sensitivity(state)
    z_g = found.gradient_noise_multiplier()
    assert np.sum(z_h.numpy() ** -2.0) == pytest.approx(z_g**-2, rel=1e-5)
    spent = sum((2 * s) ** -2 for s in found.count_stddevs)
    assert z_g**-2 + spent == pytest.approx(Z**-2, rel=1e-12)


def test_an_inflated_sum_gets_more_noise_and_its_counts_do_not():
    (one, state), (two, _) = (made(RULES["layerwise"], inflation=x) for x in (1.0, 2.5))
    np.testing.assert_allclose(
        two.noise_stddevs(state), 2.5 * one.noise_stddevs(state), rtol=1e-6
    )
    assert two.count_stddevs == one.count_stddevs
    sums = [tf.zeros([2])] * len(NAMES)
    release = two.release(state, sums, tf.zeros([3]), Given())
    first = 2.5 * one.noise_stddevs(state)[0] / RECORDS
    np.testing.assert_allclose(release.means[0], [first, first], rtol=1e-6)
    # A count of 0 and noise of a stddev.
    np.testing.assert_allclose(release.fractions, np.full(3, 0.5 + 1 / 20), rtol=1e-6)


# The order: clip with C_t, sum, noise with C_t, divide, adapt.


def test_a_step_is_clip_sum_noise_divide_adapt():
    found, state = made(QuantileClip(0.5, initial_norm=0.5, count_stddev=3.0))
    z_g = (Z**-2 - 6.0**-2) ** -0.5
    e = np.array([1.5, -0.5, 2.0])
    for _ in range(3):
        clip = float(state)
        gradients = np.array([[3.0, 4.0], [0.0, 0.3], [0.0, 0.0]])
        norms = np.array([5.0, 0.3, 0.0])
        weights, bits = found.clip(
            tf.constant(norms, tf.float32), state, tf.constant([True, True, False])
        )
        total = gradients.T @ weights.numpy()
        source = Given(e)
        release = found.release(
            state, [tf.constant(total, tf.float32)], tf.reduce_sum(bits, 0), source
        )
        wanted = [0.6 * clip, 0.8 * clip + 0.3 * min(1, clip / 0.3)]
        noised = wanted + e[:2] * z_g * clip
        np.testing.assert_allclose(release.means[0], noised / RECORDS, rtol=1e-5)
        assert release.stddevs.numpy() == pytest.approx([z_g * clip], rel=1e-5)
        # The first record is above the clip norm, the second above only where
        # C < 0.3, and padding counts nowhere.
        count = -0.5 + (0.5 if clip >= 0.3 else -0.5)
        fraction = (count + 2.0 * 3.0) / RECORDS + 0.5
        assert release.fractions.numpy() == pytest.approx([fraction], rel=1e-5)
        moved = clip * math.exp(-0.2 * (fraction - 0.5))
        assert float(release.next_state) == pytest.approx(moved, rel=1e-5)
        state = release.next_state


@pytest.mark.thinned(2)
@every_rule
def test_the_noise_is_scaled_by_the_clip_that_was_applied(rule):
    found, state = made(rule)
    source = Given()
    sums = [tf.zeros([2])] * len(NAMES)
    # All within: an adaptive clip shrinks.
    counts = tf.fill([len(found.count_stddevs)], RECORDS / 2.0)
    of = found.rule.assignment or (0,) * len(NAMES)
    # A normalised record has norm 1 with any clip.
    moves = "Decay" in str(rule) or (counts.shape[0] and "normalize" not in str(rule))
    for step in range(3):
        release = found.release(state, sums, counts, source, step)
        before, after = (
            found.noise_stddevs(s).numpy() for s in (state, release.next_state)
        )
        np.testing.assert_allclose(source.stddevs[:-1], before[list(of)], rtol=1e-6)
        np.testing.assert_allclose(release.stddevs, before, rtol=1e-6)
        if moves:
            assert (after < before * 0.999).any()
        state = release.next_state


def test_the_clip_follows_the_noised_counts_alone():
    found, state = made(QuantileClip(initial_norm=0.7))
    drawn = found.release(state, [], tf.constant([4.0]), Given([-2.0]))
    # 4 - 2 stddevs of 2.
    exact = found.finish(state, [], tf.constant([0.0]))
    assert float(drawn.next_state) == pytest.approx(float(exact.next_state), rel=1e-6)
    assert drawn.fractions.numpy() == [0.5]


def test_fractions_leave_the_unit_interval_with_the_noise_and_not_in_a_users_rule():
    class Recorder(QuantileClip):
        def next_state(self, state, fractions):
            return tf.reshape(1 + fractions, tf.shape(state))

    ours, state = made(QuantileClip(initial_norm=0.7))
    users, _ = made(Recorder(initial_norm=0.7))
    for count, fraction, within in (
        (100.0, 3.0, 1),
        (-50.0, -0.75, 0),
        (10.0, 0.75, 0.75),
    ):
        for found in (ours, users):
            release = found.finish(state, [], tf.constant([count]))
            assert release.fractions.numpy().tolist() == [fraction]
        assert float(release.next_state) == 1 + within


@pytest.mark.thinned(2)
@every_rule
def test_dividing_weights_is_dividing_sums(rule):
    found, state = made(rule)
    rng = np.random.default_rng(1)
    sums = [tf.constant(rng.normal(size=3), tf.float32) for _ in NAMES]
    counts = tf.zeros([len(found.count_stddevs)])
    standard = rng.normal(size=12 + len(found.count_stddevs))
    after = found.release(state, sums, counts, Given(standard))
    before = found.release(
        state, [s / RECORDS for s in sums], counts, Given(standard), divided=True
    )
    for a, b in zip(after.means, before.means, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(after.stddevs, before.stddevs)


@pytest.mark.thinned(4)
@every_rule
def test_it_is_the_same_inside_a_function(rule):
    found, state = made(rule)
    counts = tf.fill([len(found.count_stddevs)], 4.0)
    groups = () if found.rule.assignment is None else (found.groups,)
    norms = tf.random.stateless_uniform([5, *groups], [1, 2], maxval=3.0)

    def step(norms, state, counts):
        weights, bits = found.clip(norms, state)
        sums = [tf.reduce_sum(weights) * tf.ones([1])] * len(NAMES)
        return bits, *found.release(state, sums, counts, Fixed())

    eager, traced = (f(norms, state, counts) for f in (step, tf.function(step)))
    for a, b in zip(tf.nest.flatten(eager), tf.nest.flatten(traced), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_noise_comes_from_the_source_with_the_stated_stddev():
    found, state = made(FixedClip(0.5))
    size = 100_000
    release = found.release(state, [tf.zeros([size])], tf.zeros([0]), GaussianNoise())
    # An estimate within 5.3 of its own stddevs: 1e-7.
    close = 5.3 / math.sqrt(2 * size)
    assert np.std(release.means[0]) * RECORDS == pytest.approx(Z * 0.5, rel=close)


# No noise, and noise that follows a schedule.


@pytest.mark.thinned(2)
@every_rule
def test_without_noise_nothing_is_added(rule):
    found, state = made(rule, z=0.0)
    source = Given()
    sums = [tf.fill([2], float(i)) for i in range(len(NAMES))]
    counts = tf.fill([len(found.count_stddevs)], 4.0)
    release = found.release(state, sums, counts, source)
    assert source.stddevs[:-1] == [0.0] * len(NAMES)
    for part, mean in zip(sums, release.means, strict=True):
        np.testing.assert_array_equal(part / RECORDS, mean)
    assert set(release.fractions.numpy().tolist()) <= {np.float32(0.6)}


def test_a_schedule_moves_z_and_the_counts_keep_their_noise():
    z = schedules.PiecewiseConstantDecay([0, 1], [1.0, 2.0, 0.5])
    found, state = made(QuantileClip(initial_norm=0.5, count_stddev=3.0), z)
    for step, value in enumerate([1.0, 2.0, 0.5]):
        z_g = (value**-2 - 6.0**-2) ** -0.5
        for t in (step, tf.constant(step)):
            found_z = float(found.gradient_noise_multiplier(t))
            assert found_z == pytest.approx(z_g, rel=1e-6)
        source = Given()
        release = found.release(state, [tf.zeros([1])], tf.zeros([1]), source, step)
        assert source.stddevs[0] == pytest.approx(z_g * 0.5, rel=1e-6)
        assert release.stddevs.numpy() == pytest.approx([z_g * 0.5], rel=1e-6)
        assert release.fractions.numpy() == pytest.approx([0.5 + 3.0 / RECORDS])


def test_a_schedule_moves_the_noise_of_counts_that_nobody_chose():
    values = [1.0, 4.0, 0.5, 0.0]
    z = schedules.PiecewiseConstantDecay([0, 1, 2], values)
    groups = LayerwiseClip(
        {"a": QuantileClip(), "b": QuantileClip(count_stddev=6.0), "c": 1.0}
    )
    rule = dataclasses.replace(groups, groups="variable").bind(["a", "b", "c"])
    found = Mechanism(rule, z, records=20)
    assert found.count_stddevs == (1.0, 6.0)
    state = rule.initial_state()
    for step, value in enumerate(values):
        stddevs = accounting.count_stddevs(rule, 20, value)
        if value == 0:
            stddevs = (1.0, 6.0)
        z_g = accounting.split_noise_multiplier(value, stddevs)
        for t in (step, tf.constant(step)):
            assert float(found.gradient_noise_multiplier(t)) == pytest.approx(
                z_g, rel=1e-5
            )
        release = found.release(
            state, [tf.zeros([1])] * 3, tf.zeros([2]), Given(), step
        )
        expected = [0.5 + stddev / 20 for stddev in stddevs]
        np.testing.assert_allclose(release.fractions, expected, rtol=1e-6)


class GoodAtFirst(schedules.LearningRateSchedule):
    """1 at step 0 and something else from then on, which may be NaN."""

    def __init__(self, later):
        self.later = later

    def __call__(self, step):
        return tf.where(tf.equal(step, 0), 1.0, self.later)

    def get_config(self):
        return {"later": self.later}


@pytest.mark.parametrize("value", [6.5, -1.0, math.nan], ids=str)
def test_a_step_of_a_schedule_that_cannot_be_private_releases_nothing(value):
    rule = QuantileClip(initial_norm=0.5, count_stddev=3.0)
    found, state = made(rule, GoodAtFirst(value))
    counts = tf.constant([40.0])
    release = found.release(state, [tf.ones([2])], counts, GaussianNoise(), 1)
    assert np.isnan(release.means[0]).all()
    # The count alone would exceed the budget z: the clip must not move.
    assert np.isnan(release.fractions).all()
    assert float(release.next_state) == float(state)
    first = found.release(state, [tf.ones([2])], counts, GaussianNoise(), 0)
    assert np.isfinite(first.means[0]).all()
    assert np.isfinite(first.fractions).all()
    assert float(first.next_state) != float(state)


def test_an_exact_count_under_a_schedule_is_refused():
    z = schedules.PiecewiseConstantDecay([0], [1.0, 2.0])
    with pytest.raises(ValueError, match="count_stddev is 0"):
        Mechanism(QuantileClip(count_stddev=0.0), z, 100)


# Refusals.


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((0.5, 1.0, 100), "rule must be a clip rule"),
        ((FixedClip(1.0), -1.0, 100), "noise_multiplier"),
        ((FixedClip(1.0), math.nan, 100), "noise_multiplier"),
        ((FixedClip(1.0), 1.0, 0), "records"),
        ((FixedClip(1.0), 1.0, math.inf), "records"),
        ((Unclipped(), 1.0, 100), "clip must not be None with noise"),
        ((LayerwiseClip(1.0), 1.0, 100), "does not know the variables"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        Mechanism(*arguments)
    with pytest.raises(ValueError, match="inflation"):
        Mechanism(FixedClip(1.0), 1.0, 100, inflation=0.0)


def test_sums_of_other_variables_are_refused():
    found, state = made(RULES["layerwise"])
    with pytest.raises(ValueError, match="sums has 3 entries"):
        found.release(state, [tf.zeros([2])] * 3, tf.zeros([3]), Given())
    with pytest.raises(ValueError, match=r"counts has shape \(1,\), .* counts 3"):
        found.release(state, [tf.zeros([2])] * 4, tf.zeros([1]), Given())


def test_what_has_no_sum_gets_no_noise():
    found, state = made(FixedClip(1.0))
    release = found.release(state, [None, tf.zeros([2])], tf.zeros([0]), Given([1, 2]))
    assert release.means[0] is None
    np.testing.assert_allclose(release.means[1], np.array([Z, 2 * Z]) / RECORDS)


# Imports.


@pytest.mark.slow
def test_the_kernel_loads_nothing_else():
    """A reviewer of the mechanism reads these files, and no accountant or scheme."""
    code = (
        "import json, sys, tfdpclip.kernel.mechanism as m, tfdpclip.kernel.certificate"
    )
    code += "; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert not {"tensorflow_federated", "dp_accounting"} & set(loaded)
    names = {name for name in loaded if name.startswith("tfdpclip")}
    assert {n for n in names if not n.startswith("tfdpclip.kernel")} == {
        *("tfdpclip", "tfdpclip._version", "tfdpclip.tensorflow_privacy")
    }


def test_a_rule_is_a_public_class():
    assert set(clipping.__all__) >= {type(rule).__name__ for rule in RULES.values()}
