"""Central noise: Algorithm 1, peers' results, and the quantiles that the clip finds."""

import collections
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates, vector_type
from tfdpclip import federated

SECURE = federated.SecureSettings(bits=32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"secure": SECURE},
        {"secure": True},
        {"inner": tff.aggregators.SumFactory()},
        {"inner": tff.aggregators.UnweightedMeanFactory()},
        {
            "inner": federated.InnerSum(
                tff.aggregators.HadamardTransformFactory(tff.aggregators.SumFactory())
            )
        },
    ],
    ids=["plain", "secure32", "secure24", "inner sum", "inner mean", "rotation"],
)
@pytest.mark.slow
def test_twenty_noiseless_rounds_equal_gaussian_adaptive(options):
    rng = np.random.default_rng(1)
    clients = 8
    ours = federated.clipped_mean(0.0, clients, **options).create(NESTED)
    peer = tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        0.0, clients
    ).create(NESTED)
    state, peer_state = ours.initialize(), peer.initialize()
    for _ in range(20):
        data = [nested(x) for x in updates(rng, clients, 11, scale=0.2)]
        output, expected = ours.next(state, data), peer.next(peer_state, data)
        state, peer_state = output.state, expected.state
        np.testing.assert_allclose(
            flat(output.result), flat(expected.result), atol=1e-6, rtol=0
        )
        np.testing.assert_allclose(
            output.measurements["next_clip_norm"],
            expected.measurements["dp_query_metrics"]["clip"],
            rtol=1e-6,
        )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("update", ["geometric", "linear"])
@pytest.mark.parametrize("normalize", [False, True])
def test_follows_algorithm_1(update, normalize):
    rng = np.random.default_rng(2)
    rule = dpc.QuantileClip(0.3, 0.5, update=update, normalize=normalize)
    process = federated.clipped_mean(0.0, 10, rule).create(vector_type(5))
    state = process.initialize()
    clip_norm = 0.5
    for round_num in range(1, 6):
        data = updates(rng, 7, 5)  # Three of the ten do not show up.
        output = process.next(state, data)
        state = output.state
        norms = np.array([np.linalg.norm(x) for x in data])
        factors = np.minimum(1, clip_norm / norms) / (clip_norm if normalize else 1)
        np.testing.assert_allclose(output.result, factors @ data / 10, rtol=1e-5)
        fraction = np.sum(np.where(norms <= clip_norm, 0.5, -0.5)) / 10 + 0.5
        np.testing.assert_allclose(
            output.measurements["unclipped_fraction"], fraction, atol=1e-6
        )
        np.testing.assert_allclose(
            output.measurements["clip_norm"], clip_norm, rtol=1e-5
        )
        if update == "geometric":
            clip_norm *= math.exp(-0.2 * (fraction - 0.3))
        else:
            clip_norm -= 0.2 * (fraction - 0.3)
        np.testing.assert_allclose(
            output.measurements["next_clip_norm"], clip_norm, rtol=1e-5
        )
        assert output.measurements["round"] == round_num


@pytest.mark.slow
def test_other_rules_give_their_weights():
    data = [np.float32([3, 4]), np.float32([0.3, 0.4])]
    for clip, factors in [
        (1.0, [0.2, 1]),
        (dpc.FixedClip(2.0, normalize=True), [0.2, 0.5]),
        (dpc.AutomaticClip(0.0), [0.2, 2]),
        (None, [1, 1]),
    ]:
        for secure in (False, SECURE):
            if clip is None and secure:
                continue
            process = federated.clipped_mean(0.0, 4, clip, secure=secure).create(
                vector_type(2)
            )
            output = process.next(process.initialize(), data)
            expected = (factors[0] * data[0] + factors[1] * data[1]) / 4
            np.testing.assert_allclose(output.result, expected, rtol=2e-6)
            assert np.isnan(output.measurements["unclipped_fraction"])
            assert not output.measurements["private"]


@pytest.mark.slow
def test_groups_clip_and_count_on_their_own():
    rule = dpc.clipping.LayerwiseClip(
        {
            ".*": dpc.QuantileClip(initial_norm=1.0),
            "out": dpc.QuantileClip(initial_norm=0.1),
        },
        groups=["out", ".*"],
    )
    value_type = tff.to_type([(np.float32, [2]), (np.float32, [2]), np.float32])
    data = [[np.float32([3, 4]), np.float32([0.03, 0.04]), np.float32(0.3)]] * 2
    for secure in (False, SECURE):
        factory = federated.clipped_mean(
            0.0,
            2,
            rule,
            secure=secure,
            variable_names=["in/kernel", "out/kernel", "in/bias"],
        )
        process = factory.create(value_type)
        output = process.next(process.initialize(), data)
        inside = np.linalg.norm([3, 4, 0.3])
        first, second, third = output.result
        norms = output.measurements["clip_norm"]
        names = rule.bind(["in/kernel", "out/kernel", "in/bias"]).layout.names
        clips = dict(zip(names, norms, strict=True))
        inner = clips[".*"] / inside
        np.testing.assert_allclose(first, inner * np.array([3, 4]), rtol=1e-5)
        np.testing.assert_allclose(third, inner * 0.3, rtol=1e-5)
        outer = min(1, clips["out"] / 0.05)
        np.testing.assert_allclose(second, outer * np.array([0.03, 0.04]), rtol=1e-5)
        fractions = dict(
            zip(names, output.measurements["unclipped_fraction"], strict=True)
        )
        assert fractions == {"out": 1.0, ".*": 0.0}


@pytest.mark.slow
def test_scaled_and_public_rules_equal_the_rule_by_hand():
    rng = np.random.default_rng(3)
    value_type = tff.to_type([(np.float32, [3]), (np.float32, [4])])
    data = [[x[:3], x[3:]] for x in updates(rng, 5, 7)]
    rules = [
        dpc.clipping.ScaledClip(
            {"0": 4.0, "1": 1.0}, dpc.QuantileClip(initial_norm=1.0)
        ),
        dpc.clipping.PublicNormClip(
            dpc.QuantileClip(initial_norm=1.0),
            norms={"0": 1.0, "1": 4.0},
            allocation="joint",
        ),
    ]
    for rule in rules:
        bound = rule.bind(["0", "1"])
        state = bound.initial_state()
        norms = tf.constant([[np.linalg.norm(p) for p in x] for x in data], tf.float32)
        weights = bound.weights(norms, state).numpy()
        bits = bound.indicators(norms, state, tf.ones([5], tf.bool)).numpy()
        for secure in (False, SECURE):
            process = federated.clipped_mean(0.0, 5, rule, secure=secure).create(
                value_type
            )
            output = process.next(process.initialize(), data)
            for h in range(2):
                expected = sum(w[h] * x[h] for w, x in zip(weights, data, strict=True))
                np.testing.assert_allclose(
                    output.result[h], expected / 5, rtol=2e-5, atol=1e-7
                )
            np.testing.assert_allclose(
                output.measurements["unclipped_fraction"],
                bits.sum() / 5 + 0.5,
                atol=1e-6,
            )


def test_schedules_advance_every_round():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    process = federated.clipped_mean(0.0, 1, dpc.FixedClip(schedule)).create(
        vector_type(1)
    )
    state = process.initialize()
    for expected in (1.0, 0.5, 0.25):
        output = process.next(state, [np.float32([10])])
        state = output.state
        np.testing.assert_allclose(output.result, [expected])


def test_mixed_dtypes_keep_their_own():
    value_type = tff.to_type(
        collections.OrderedDict(
            a=(np.float16, [2]), b=(np.float32, [2]), c=(np.float64, [2])
        )
    )
    value = collections.OrderedDict(
        a=np.float16([300, 0]), b=np.float32([0, 400]), c=np.float64([0, 0])
    )
    for secure in (False, SECURE):
        process = federated.clipped_mean(0.0, 1, 5.0, secure=secure).create(value_type)
        result = process.next(process.initialize(), [value]).result
        assert [x.dtype for x in result.values()] == [
            np.float16,
            np.float32,
            np.float64,
        ]
        np.testing.assert_allclose(flat(result), [3, 0, 0, 4, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("layerwise", [False, True])
def test_large_and_small_tensors_come_back_in_their_places(layerwise):
    # Large tensors are summed separately, small tensors as a single vector.
    shapes = [[3], [300, 300], [2, 2], [70_000], []]
    rng = np.random.default_rng(0)
    clients = [
        [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        for _ in range(3)
    ]
    clip = dpc.LayerwiseClip(0.5, groups="variable") if layerwise else 0.5
    process = federated.clipped_mean(0.0, 3, clip).create(
        tff.to_type([(np.float32, shape) for shape in shapes])
    )
    result = process.next(process.initialize(), clients).result
    norms = np.array([[np.linalg.norm(np.ravel(x)) for x in c] for c in clients])
    if not layerwise:
        norms = np.linalg.norm(norms, axis=1, keepdims=True) * np.ones_like(norms)
    weights = np.minimum(1, 0.5 / norms)
    for i, found in enumerate(result):
        assert found.shape == tuple(shapes[i])
        expected = sum(w[i] * c[i] for w, c in zip(weights, clients, strict=True)) / 3
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_a_round_without_clients_is_noise_alone():
    for secure in (False, True):
        process = federated.clipped_mean(1.0, 100, secure=secure).create(NESTED)
        output = process.next(process.initialize(), [])
        result = flat(output.result)
        assert np.all(np.isfinite(result)) and np.all(result != 0)
    process = federated.clipped_mean(
        1.0, 100, inner=tff.aggregators.UnweightedMeanFactory()
    ).create(NESTED)
    assert np.all(np.isfinite(flat(process.next(process.initialize(), []).result)))


# Section 3.1 of Andrew et al. (2021): three log-normal populations, five quantiles.
_Z_SCORES = {0.1: -1.28155, 0.3: -0.52440, 0.5: 0.0, 0.7: 0.52440, 0.9: 1.28155}
_POPULATIONS = [(0.0, 1.0), (0.0, 0.1), (math.log(10), 1.0)]


def _tracks(norms, quantile, mean, stddev):
    """Whether the clip norm settled at the quantile: F(C) within 0.06 of it.

    Around its resting point, log C wanders with a stddev of 0.2 * 0.07 / sqrt(2 * 0.2 *
    f), where f is the density there and 0.07 the noise of a fraction (of the count and
    of sampling); F(C) by f times that, 0.014 at most, less in the mean over 40 rounds:
    5.6 stddevs or more (false alarm below 1e-7). The narrow population has f = 4, and
    steps that are not small in comparison: 0.2 there.
    """
    found = np.mean(np.log(norms[-40:]))
    reached = 0.5 * math.erfc(-(found - mean) / stddev / math.sqrt(2))
    return abs(reached - quantile) < (0.06 if stddev == 1 else 0.2)


@pytest.mark.slow
def test_log_normal_norms_are_tracked_by_one_layerwise_clip():
    # 15 scalars, each its own group, are the 15 experiments at once.
    cases = [(q, *p) for p in _POPULATIONS for q in _Z_SCORES]
    rule = dpc.clipping.LayerwiseClip(
        {k: dpc.QuantileClip(case[0]) for k, case in enumerate(cases)},
        groups="variable",
    )
    factory = federated.clipped_mean(0.5, 100, rule)
    process = factory.create(tff.to_type([np.float32] * len(cases)))

    @tff.tensorflow.computation(vector_type(len(cases)))
    def split(x):
        return tf.unstack(x)

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(vector_type(len(cases)), tff.CLIENTS),
    )
    def next_round(state, x):
        return process.next(state, tff.federated_map(split, x))

    rng = np.random.default_rng(4)
    state, norms = process.initialize(), []
    means, stddevs = (np.array(part) for part in list(zip(*cases, strict=True))[1:])
    for _ in range(230):
        data = np.exp(means + stddevs * rng.normal(size=(100, 15)))
        output = next_round(state, list(data.astype(np.float32)))
        state = output.state
        norms.append(output.measurements["clip_norm"])
    norms = np.array(norms)
    for k, (quantile, mean, stddev) in enumerate(cases):
        assert _tracks(norms[:, k], quantile, mean, stddev), (quantile, mean, stddev)


@pytest.mark.parametrize("mean,stddev", _POPULATIONS)
@pytest.mark.slow
def test_log_normal_medians_are_tracked_by_a_flat_clip(mean, stddev):
    # The three cases of the paper, the third through secure sums.
    factory = federated.clipped_mean(0.1, 100, secure=mean > 0)
    process = factory.create(tff.TensorType(np.float32, []))
    rng = np.random.default_rng(5)
    state, norms = process.initialize(), []
    for _ in range(120):
        data = np.exp(mean + stddev * rng.normal(size=100)).astype(np.float32)
        output = process.next(state, list(data))
        state = output.state
        norms.append(output.measurements["clip_norm"])
    assert _tracks(norms, 0.5, mean, stddev)
