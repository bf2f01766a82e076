"""Weights of clients: a public cap, a public divisor, at most one clip norm."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates, vector_type
from tests.federated.noise_test import CLOSE, SIZE
from tests.federated.sensitivity_test import ABSENT, KINDS, spread
from tfdpclip import accounting, correlated, federated

CLIENTS = 50
CAP = 8.0
FLOAT = tff.TensorType(np.float32)
SECURE = federated.SecureSettings(bits=32)
WAYS = {
    "plain": {},
    "secure": {"secure": SECURE},
    "secure 8 bits": {"secure": federated.SecureSettings(bits=8)},
    "inner": {"inner": tff.aggregators.UnweightedMeanFactory()},
    "distributed": {"secure": SECURE, "noise": "distributed", "minimum_clients": 1},
}
WEIGHTS = [0.0, -3.0, 1e-30, 2.0, CAP, 1e5, 3e38, np.inf, -np.inf, np.nan]


@pytest.fixture(scope="module")
def processes():
    made = {}

    def process(way, clip=0.7):
        if (way, clip) not in made:
            factory = federated.clipped_mean(
                0.0, CLIENTS, clip, weight_cap=CAP, weight_per_round=40, **WAYS[way]
            )
            made[way, clip] = factory.create(NESTED, FLOAT)
        return made[way, clip]

    return process


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_is_of_capped_weights_over_a_public_number(processes, way):
    rng = np.random.default_rng(0)
    records = updates(rng, 6, 11)
    weights = [1.0, 2.0, 8.0, 9.0, 1e5, 0.0]
    process = processes(way)
    data = [nested(x) for x in records], [np.float32(w) for w in weights]
    result = flat(process.next(process.initialize(), *data).result)
    factors = [0.7 / max(0.7, np.linalg.norm(x)) for x in records]
    expected = sum(
        min(w, CAP) * f * np.float64(x)
        for w, f, x in zip(weights, factors, records, strict=True)
    )
    # 8 bits are steps of 1 / 127 of the clip norm, and a little less of each update.
    slack = 0.15 if way == "secure 8 bits" else 2e-6
    np.testing.assert_allclose(result * 40 / CAP, expected / CAP, atol=slack)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(3)
def test_no_weight_moves_a_sum_by_more_than_the_clip_norm(processes, way):
    process = processes(way, dpc.QuantileClip(initial_norm=0.7))
    rng = np.random.default_rng(6)
    others = [nested(x) for x in updates(rng, 4, 11)]
    ones = [np.float32(CAP)] * 4
    state = process.initialize()
    without = process.next(state, others, ones)
    slack = 1e-5 if way == "distributed" else 1e-6
    cases = [("usual", w) for w in WEIGHTS] + [(kind, 1e5) for kind in KINDS]
    for kind, weight in cases:
        record, weight = nested(spread(kind, rng)), np.float32(weight)
        output = process.next(state, [*others, record], [*ones, weight])
        moved = (flat(output.result) - flat(without.result)) * 40 / CAP
        share = min(max(float(weight), 0), CAP) / CAP
        absent = kind in ABSENT or not np.isfinite(weight)
        bound = 0.0 if absent else 0.7 * share
        assert np.linalg.norm(moved) <= bound * (1 + 1e-6) + slack, (kind, weight)
        fractions = [o.measurements["unclipped_fraction"] for o in (output, without)]
        # Whether the update was clipped is a single bit, whatever the weight.
        expected = 0.0 if absent else 0.5
        counted = abs(fractions[0] - fractions[1]) * CLIENTS
        assert counted == pytest.approx(expected, abs=1e-4), (kind, weight)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_noise_depends_on_no_weight(secure):
    factory = federated.clipped_mean(
        1.0,
        100,
        dpc.QuantileClip(initial_norm=3.0),
        secure=secure,
        weight_cap=5,
        weight_per_round=200,
    )
    process = factory.create(vector_type(SIZE), FLOAT)
    state = process.initialize()
    stddev = accounting.split_noise_multiplier(1.0, [5.0]) * 3.0
    zeros = [np.zeros(SIZE, np.float32)]
    for weights in ([], [1.0], [100_000.0]):
        output = process.next(state, zeros * len(weights), np.float32(weights).tolist())
        # On the sum of shares of the cap; 200 / 5 of them are expected.
        assert output.measurements["sum_noise_stddev"] == pytest.approx(stddev)
        found = np.std(np.float64(output.result)) * 200 / 5
        assert found == pytest.approx(stddev, rel=CLOSE)


@pytest.mark.slow
def test_shares_of_distributed_noise_depend_on_no_weight():
    size, factory = 40_000, federated.clipped_mean(
        1.0, 10, 1.0, secure=True, noise="distributed", minimum_clients=6, weight_cap=4
    )  # fmt: skip
    process = factory.create(vector_type(size), FLOAT)
    state, data = process.initialize(), [np.zeros(size, np.float32)] * 6
    for weight in (0.0, 1.0, 1e6):
        output = process.next(state, data, [weight] * 6)
        # Five standard deviations of the estimate: once in 1.7 million tests.
        found = np.std(np.float64(output.result)) * 10
        assert found == pytest.approx(1.0, rel=5 / np.sqrt(2 * size) + 1e-3)
    with pytest.raises(Exception, match="minimum_clients=6"):
        process.next(state, data[:5], [1.0] * 5)


@pytest.mark.parametrize(
    "options",
    [{}, {"noise": "distributed", "minimum_clients": 50}],
    ids=["central", "distributed"],
)
def test_nothing_but_secure_sums_leaves_a_client(options):
    factory = federated.clipped_mean(1.0, 100, secure=True, weight_cap=9, **options)
    process = factory.create(NESTED, FLOAT)
    tff.test.assert_contains_secure_aggregation(process.next)
    tff.test.assert_not_contains_unsecure_aggregation(process.next)


def test_what_is_measured_and_kept_says_nothing_of_weights(processes):
    process = processes("plain")
    state = process.initialize()
    data = [nested(x) for x in updates(np.random.default_rng(1), 3, 11)]
    outputs = [process.next(state, data, [np.float32(w)] * 3) for w in (0.0, 5.0, 1e9)]
    for output in outputs[1:]:
        tf.nest.map_structure(
            np.testing.assert_array_equal,
            (output.measurements, output.state),
            (outputs[0].measurements, outputs[0].state),
        )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64, np.float16])
def test_weights_may_be_any_numbers(dtype):
    factory = federated.clipped_mean(0.0, 2, 1.0, weight_cap=4)
    process = factory.create(vector_type(1), tff.TensorType(dtype))
    data = [np.float32([1.0]), np.float32([-1.0])]
    result = process.next(process.initialize(), data, [dtype(3), dtype(100)]).result
    np.testing.assert_allclose(result, [(3 - 4) / 8], rtol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        tff.TensorType(np.float32, [2]),
        tff.TensorType(np.str_),
        tff.TensorType(np.bool_),
        tff.to_type([np.float32]),
        "a weight",
    ],
)
def test_weights_that_are_no_numbers_are_refused(kind):
    factory = federated.clipped_mean(1.0, 100, weight_cap=4)
    with pytest.raises(ValueError, match="weight_type must be one number"):
        factory.create(NESTED, kind)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"weight_cap": 0}, "weight_cap"),
        ({"weight_cap": -1}, "weight_cap"),
        ({"weight_cap": np.inf}, "weight_cap"),
        ({"weight_cap": np.nan}, "weight_cap"),
        ({"weight_cap": True}, "weight_cap"),
        ({"weight_cap": "examples"}, "weight_cap"),
        ({"weight_per_round": 100}, "weight_per_round needs weight_cap"),
        ({"weight_cap": 5, "weight_per_round": 0}, "weight_per_round"),
        ({"weight_cap": 5, "weight_per_round": np.nan}, "weight_per_round"),
        ({"weight_cap": 5, "weight_per_round": 501}, "at most weight_cap"),
    ],
)
def test_bad_caps_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        federated.clipped_mean(1.0, 100, **arguments)


def test_types_of_weights_are_for_capped_weights_alone():
    with pytest.raises(ValueError, match=r"clipped_mean\(..., weight_cap=100\)"):
        federated.clipped_mean(1.0, 100).create(NESTED, FLOAT)
    with pytest.raises(ValueError, match="weight_type must be given"):
        federated.clipped_mean(1.0, 100, weight_cap=3).create(NESTED)


def test_a_weighted_mean_costs_what_an_unweighted_one_does():
    weighted = federated.clipped_mean(1.3, 100, weight_cap=7)
    plain = federated.clipped_mean(1.3, 100)
    assert weighted.event(5) == plain.event(5)
    assert weighted.epsilon(1e-6, 5) == plain.epsilon(1e-6, 5)
    assert weighted.divisor == plain.divisor == 100
    assert "weight_cap=7, weight_per_round=700" in repr(weighted)
    assert isinstance(weighted, tff.aggregators.WeightedAggregationFactory)
    assert not isinstance(weighted, tff.aggregators.UnweightedAggregationFactory)
    assert isinstance(plain, tff.aggregators.UnweightedAggregationFactory)
    assert not isinstance(plain, tff.aggregators.WeightedAggregationFactory)
    for factory in (weighted, plain):
        assert isinstance(factory, federated.ClippedMeanFactory)


@pytest.mark.slow
def test_correlated_noise_takes_weights_too():
    scheme = dpc.sampling.AvailableClients(4, separation=2)
    noise = dpc.CorrelatedNoise(correlated.SquareRootToeplitz(3), 6, scheme)
    factory = federated.clipped_mean(1.0, 4, 1.0, noise=noise, weight_cap=2)
    process = factory.create(vector_type(SIZE), FLOAT)
    state, data = process.initialize(), [np.zeros(SIZE, np.float32)]
    for _ in range(2):
        output = process.next(state, data, [np.float32(50)])
        state = output.state
        stated = output.measurements["sum_noise_stddev"]
        assert np.std(np.float64(output.result)) * 4 >= stated * (1 - CLOSE)
    assert state["correlated_noise"]["step"] == 2


def test_a_plan_weights_by_a_cap():
    plan = federated.PrivacyPlan(4, 1e-4, 200, clients_per_round=40, rounds=6)
    noise = plan.noise_multiplier / 40
    assert f"{noise:.3g} clip norms on the mean" in str(plan)
    # The norm of the noise on n weights is the root of n times the noise of one.
    assert f"as long as the clip with {noise**-2:,.0f} weights" in str(plan)
    made = plan.aggregator(weight_cap=10, weight_per_round=100)
    assert made.noise_multiplier == plan.noise_multiplier
    assert (made.weight_cap, made.divisor) == (10, 10)
    assert f"{plan.noise_multiplier / 10:.3g} clip norms on the mean" in str(plan)
    with plan.budget(list(range(200))).round():
        pass
    assert plan.statement().epsilon <= 4


@pytest.mark.slow
def test_one_client_with_many_examples_moves_a_model_as_far_as_its_cap():
    """Federated averaging by the number of examples, the first of them 10,000."""
    spec = collections.OrderedDict(
        x=tf.TensorSpec([None, 2], tf.float32), y=tf.TensorSpec([None, 1], tf.float32)
    )

    def model_fn():
        dense = tf.keras.layers.Dense(1, kernel_initializer="zeros")
        model = tf.keras.Sequential([tf.keras.Input((2,)), dense])
        loss = tf.keras.losses.MeanSquaredError()
        return tff.learning.models.from_keras_model(model, loss=loss, input_spec=spec)

    def client(examples, value):
        x = np.full((examples, 2), value, np.float32)
        y = np.full((examples, 1), 50 * value, np.float32)
        data = tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))
        return data.batch(10_000)

    # All updates are longer than the clip norm.
    factory = federated.clipped_mean(0.0, 4, 0.5, weight_cap=20)
    process = tff.learning.algorithms.build_weighted_fed_avg(
        model_fn,
        tff.learning.optimizers.build_sgdm(0.1),
        tff.learning.optimizers.build_sgdm(1.0),
        model_aggregator=factory,
    )
    state = process.initialize()

    def moved(*clients):
        next_state = process.next(state, [client(*one) for one in clients]).state
        weights = [process.get_model_weights(s) for s in (state, next_state)]
        return flat(weights[1].trainable) - flat(weights[0].trainable)

    few, many = moved((5, 1.0)), moved((10_000, 1.0))
    assert np.linalg.norm(many) == pytest.approx(0.5 / 4, rel=1e-5)
    np.testing.assert_allclose(few, many / 4, rtol=1e-4)
    # Also with a second client: the divisor does not depend on the clients.
    both = moved((5, -1.0), (10_000, 1.0))
    np.testing.assert_allclose(both, moved((5, -1.0)) + many, atol=1e-6)
    assert set(process.next(state, []).metrics["aggregator"]) == {
        "round",
        "clip_norm",
        "next_clip_norm",
        "unclipped_fraction",
        "sum_noise_stddev",
        "count_noise_stddev",
        "noise_multiplier",
        "private",
    }
