"""The effect of a client on the sums, noise off, for every update it may send.

Adding or removing a client moves the sum of updates (the result times the public number
of clients) by at most the clip norm, and the sum of bits by at most 1/2.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates, vector_type
from tfdpclip import federated
from tfdpclip.federated._records import Layout, RecordClip
from tfdpclip.federated.secure import SecureEncoding

SECURE = federated.SecureSettings(bits=32)
CLIENTS = 50  # More than take part, so that fractions do not clamp.
NAN, INF = float("nan"), float("inf")


def spread(kind, rng):
    x = rng.normal(size=11)
    if kind == "usual":
        return x
    if kind == "zero":
        return 0 * x
    if kind == "huge":
        return 1e30 * np.sign(x)
    if kind == "largest":
        return np.full(11, np.finfo(np.float32).max)
    if kind == "tiny":
        return 1e-30 * x
    if kind == "one NaN":
        x[7] = NAN
    elif kind == "all NaN":
        x[:] = NAN
    elif kind == "infinite":
        x[3] = INF
    elif kind == "minus infinite":
        x[:] = -INF
    elif kind == "huge beside NaN":
        x[:5], x[10] = 1e38, NAN
    return x


KINDS = (
    "usual",
    "zero",
    "huge",
    "largest",
    "tiny",
    "one NaN",
    "all NaN",
    "infinite",
    "minus infinite",
    "huge beside NaN",
)
ABSENT = ("one NaN", "all NaN", "infinite", "minus infinite", "huge beside NaN")

RULES = {
    "quantile": (dpc.QuantileClip(initial_norm=0.7), 0.7),
    "fixed": (dpc.FixedClip(0.7), 0.7),
    "normalised": (dpc.QuantileClip(initial_norm=0.7, normalize=True), 1.0),
    "automatic": (dpc.AutomaticClip(0.0), 1.0),
}


@pytest.fixture(scope="module")
def processes():
    made = {}

    def process(rule, way):
        if (rule, way) not in made:
            options = {
                "plain": {},
                "secure": {"secure": SECURE},
                "secure 8 bits": {"secure": federated.SecureSettings(bits=8)},
                "inner": {"inner": tff.aggregators.UnweightedMeanFactory()},
                "distributed": {
                    "secure": SECURE,
                    "noise": "distributed",
                    "minimum_clients": 1,
                },
            }[way]
            factory = federated.clipped_mean(0.0, CLIENTS, rule, **options)
            made[rule, way] = factory.create(NESTED)
        return made[rule, way]

    return process


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "way", ["plain", "secure", "secure 8 bits", "inner", "distributed"]
)
@pytest.mark.thinned(16)
def test_one_client_moves_sums_by_no_more_than_the_guarantee(processes, rule, way):
    clip, bound = RULES[rule]
    process = processes(clip, way)
    rng = np.random.default_rng(6)
    others = [nested(x) for x in updates(rng, 4, 11)]
    state = process.initialize()
    without = process.next(state, others)
    # Rounding of float32 beside the others' sum; with distributed noise, of all of them
    # at random to steps of 1e-7.
    slack = 1e-5 if way == "distributed" else 1e-6
    for kind in KINDS:
        record = nested(spread(kind, rng))
        output = process.next(state, [*others, record])
        moved = (flat(output.result) - flat(without.result)) * CLIENTS
        assert np.linalg.norm(moved) <= bound * (1 + 1e-6) + slack, kind
        assert np.all(np.isfinite(moved)), kind
        if kind in ABSENT:
            np.testing.assert_allclose(moved, 0, atol=slack)
        elif kind == "huge":
            shrink = 0.98 if way == "secure 8 bits" else 1 - 1e-5
            assert np.linalg.norm(moved) >= bound * shrink, kind
        fractions = [o.measurements["unclipped_fraction"] for o in (output, without)]
        if np.isnan(fractions[0]):
            continue
        counted = (fractions[0] - fractions[1]) * CLIENTS
        expected = 0.0 if kind in ABSENT else 0.5
        assert abs(counted) == pytest.approx(expected, abs=1e-4), kind


@pytest.mark.slow
def test_a_record_with_a_nan_in_one_group_is_absent_from_all():
    rule = dpc.clipping.LayerwiseClip(dpc.QuantileClip(initial_norm=0.7))
    rng = np.random.default_rng(7)
    others = [nested(x) for x in updates(rng, 4, 11)]
    for secure in (False, SECURE):
        factory = federated.clipped_mean(0.0, CLIENTS, rule, secure=secure)
        process = factory.create(NESTED)
        state = process.initialize()
        outputs = [
            process.next(state, [*others, *more])
            for more in ([], [nested(spread("one NaN", rng))])
        ]
        np.testing.assert_allclose(*(flat(o.result) for o in outputs), atol=1e-7)
        fractions = [o.measurements["unclipped_fraction"] for o in outputs]
        np.testing.assert_allclose(*fractions, atol=1e-7)


@pytest.mark.parametrize(
    "rule",
    [
        dpc.clipping.LayerwiseClip({"0": 0.5, "1": 3.0, "2": 1.0}),
        dpc.clipping.LayerwiseClip({"0": 0.5, "1": 3.0, "2": 1.0}, allocation="joint"),
        dpc.clipping.ScaledClip({"0": 4.0, "1": 0.5, "2": 1.0}, 1.5),
        dpc.clipping.PublicNormClip(1.5, norms={"0": 1.0, "1": 3.0, "2": 2.0}),
    ],
    ids=["per layer", "joint", "scaled", "public"],
)
@pytest.mark.parametrize("secure", [False, federated.SecureSettings(bits=10)])
@pytest.mark.thinned(4)
def test_groups_stay_within_their_joint_bound(rule, secure):
    value_type = tff.to_type([(np.float32, [n]) for n in (5, 20, 1)])
    process = federated.clipped_mean(0.0, 1, rule, secure=secure).create(value_type)
    bound = rule.bind(["0", "1", "2"])
    scales = bound.noise_scales(bound.initial_state()).numpy()
    limits = bound.sensitivity(bound.initial_state()).numpy()
    rng = np.random.default_rng(8)
    state = process.initialize()
    longest = 0.0
    for factor in (1e-3, 0.3, 1.0, 3.0, 1e30):
        record = [(factor * rng.normal(size=n)).astype(np.float32) for n in (5, 20, 1)]
        result = process.next(state, [record]).result
        norms = np.array([np.linalg.norm(np.float64(x)) for x in result])
        assert np.all(norms <= limits * (1 + 1e-6))
        joint = np.linalg.norm(norms / scales)
        assert joint <= 1 + 1e-6
        longest = max(longest, joint)
    assert longest > 0.9


def test_mixed_dtypes_are_clipped_together():
    value_type = tff.to_type([(np.float16, [3]), (np.float64, [3]), (np.float32, [3])])
    for secure in (False, SECURE):
        process = federated.clipped_mean(0.0, 1, 1.0, secure=secure).create(value_type)
        state = process.initialize()
        for x in (
            [np.float16([6e4] * 3), np.float64([1e100] * 3), np.float32([1e38] * 3)],
            [np.float16([6e4] * 3), np.float64([0, 0, 0]), np.float32([0, 0, 0])],
            [np.float16([0.1] * 3), np.float64([1, 2, 3]), np.float32([1e-30] * 3)],
        ):
            norm = np.linalg.norm(flat(process.next(state, [x]).result))
            # Half of a unit in the last place of float16.
            assert norm == pytest.approx(1, abs=5e-4)


def test_normalised_tiny_updates_do_not_exceed_one():
    # Their squares vanish in float32, where their norm would come out too small.
    process = federated.clipped_mean(0.0, 1, dpc.AutomaticClip(0.0)).create(
        vector_type(40_001)
    )
    record = np.full(40_001, 1e-21, np.float32)
    record[0] = 2e-19
    result = process.next(process.initialize(), [record]).result
    assert np.linalg.norm(np.float64(result)) == pytest.approx(1, abs=1e-5)


def _encoding(rule, sizes, bits):
    value_type = tff.to_type([(np.float32, [n]) for n in sizes])
    clip = RecordClip(rule, Layout(value_type))
    return clip, SecureEncoding(clip, federated.SecureSettings(bits=bits))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bits", [8, 12, 16, 24, 32])
@pytest.mark.parametrize("sizes", [[1], [7], [5, 3000]])
def test_rounded_records_keep_the_norm_exactly(bits, sizes):
    # In integers: no rounding can hide an excess.
    clip, encoding = _encoding(dpc.FixedClip(0.37), sizes, bits)
    if bits == 8 and sum(sizes) > 3000:
        pytest.skip("too few bits is an error, tested elsewhere")
    rng = np.random.default_rng(bits)
    limit = encoding.levels**2
    total = sum(sizes)
    half_steps = (np.arange(total) % 2 + 0.5) / encoding.levels
    shapes = [
        np.ones(total),
        np.eye(total)[0],
        rng.normal(size=total),
        # Many coordinates just above half a step: all of them round up.
        (half_steps + 1e-9) * 0.37 / max(np.linalg.norm(half_steps), 1),
        np.full(total, 0.50001 * 0.37 / encoding.levels),
    ]
    for x in shapes:
        for factor in (1e-4, 0.999999, 1.0, 1.000001, 1e3, 1e30):
            x32 = (x * factor).astype(np.float32)
            parts = [tf.constant(p) for p in np.split(x32, np.cumsum(sizes)[:-1])]
            weights, norms, _ = clip.weigh(parts, (), exact=True)
            codes = encoding.encode(parts, weights, norms, ()).numpy()
            whole = [int(c) - encoding.levels for c in codes]
            assert min(codes) >= 0 and max(codes) <= 2 * encoding.levels < 2**bits
            assert sum(q * q for q in whole) <= limit


@pytest.mark.parametrize("exact", [False, True])
def test_a_rule_of_others_is_held_to_its_sensitivity(exact):
    """A rule whose weights are 1 in a window of norms that no check tries."""

    class Window(dpc.FixedClip):
        def weights(self, norms, state):
            held = super().weights(norms, state)
            window = (norms > 1.2) & (norms < 1.3)
            return tf.where(window, tf.ones_like(held), held)

    clip = RecordClip(Window(0.1), Layout(tff.to_type([(np.float32, [2])])))
    for norm in (0.05, 1.25, 7.0):
        weights, norms, _ = clip.weigh([tf.constant([norm, 0.0])], (), exact=exact)
        assert float(norms[0]) == pytest.approx(min(norm, 0.1), rel=1e-6)
        assert float(weights[0]) == pytest.approx(min(1.0, 0.1 / norm), rel=1e-6)


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_rounded_is_within_a_scale_below_the_sensitivity(bits):
    class Wide(dpc.FixedClip):
        def sensitivity(self, state):
            return tf.constant(10.0)

        def noise_scales(self, state):
            return tf.constant(1.0)

    clip, encoding = _encoding(Wide(1.0), [20], bits)
    # Just above a half: each coordinate is rounded up, until the bound is reached.
    steps = np.floor(encoding.levels / 10 / np.sqrt(20)) + 0.5001
    record = [tf.fill([20], np.float32(steps * 10 / encoding.levels))]
    weights, norms, _ = clip.weigh(record, (), exact=True)
    codes = encoding.encode(record, weights, norms, ())
    sent = encoding.decode(codes, tf.constant(1), ())
    assert 0.5 < np.linalg.norm(sent) <= 1


def test_a_sum_of_many_extreme_records_is_exact():
    clip, encoding = _encoding(dpc.FixedClip(1.0), [1], 32)
    parts = [tf.constant([-1e30])]
    weights, norms, _ = clip.weigh(parts, (), exact=True)
    code = encoding.encode(parts, weights, norms, ())
    decoded = encoding.decode(code * 100_000, tf.constant(100_000), ())
    # The sum has half a step of room, so it may be off by a step of 2^-31.
    assert decoded.numpy()[0] == pytest.approx(-100_000, rel=2**-30)


def test_rounding_error_is_what_is_documented():
    for bits, expected in [(16, 1.5e-5), (20, 1e-6), (24, 6e-8)]:
        half_step = 0.5 / (2 ** (bits - 1) - 1)
        assert half_step == pytest.approx(expected, rel=0.06)
        clip, encoding = _encoding(dpc.FixedClip(1.0), [100], bits)
        x = tf.constant(np.random.default_rng(9).uniform(-0.05, 0.05, 100), tf.float32)
        weights, norms, _ = clip.weigh([x], (), exact=True)
        code = encoding.encode([x], weights, norms, ())
        back = encoding.decode(code, tf.constant(1), ()).numpy()
        assert np.max(np.abs(back - x.numpy())) <= half_step * 1.0001
    for bits, cost in [(16, 0.015), (20, 0.001), (24, 0.00006)]:
        _, encoding = _encoding(dpc.FixedClip(1.0), [1_000_000], bits)
        assert encoding._allowances[0] == pytest.approx(cost, rel=0.06)


def test_secure_sums_of_ordered_structures_keep_their_places():
    value_type = tff.to_type(collections.OrderedDict(z=np.float32, a=(np.float32, [2])))
    process = federated.clipped_mean(0.0, 1, 10.0, secure=SECURE).create(value_type)
    value = collections.OrderedDict(z=np.float32(1), a=np.float32([2, 3]))
    result = process.next(process.initialize(), [value]).result
    assert list(result) == ["z", "a"]
    np.testing.assert_allclose(flat(result), [1, 2, 3], rtol=1e-6)
