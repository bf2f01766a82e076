"""Distributed noise: sensitivity in integers, noise of theory, dropout."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates, vector_type
from tfdpclip import accounting, federated
from tfdpclip.federated import discrete, distributed

NAN, INF = float("nan"), float("inf")


def _factory(z=1.0, clients=10, minimum=None, clip=None, bits=24):
    return federated.clipped_mean(
        z,
        clients,
        dpc.QuantileClip() if clip is None else clip,
        secure=federated.SecureSettings(bits=bits),
        noise="distributed",
        minimum_clients=clients if minimum is None else minimum,
    )


def _plan(size=100, counts=1, z=1.0, bits=24, clients=50, minimum=40):
    stddevs = (clients / 20,) * counts
    return distributed.plan(
        noise_multiplier=z,
        sum_multiplier=accounting.split_noise_multiplier(z, stddevs) if z else 0.0,
        count_stddevs=stddevs,
        size=size,
        bits=bits,
        clients=clients,
        minimum_clients=minimum,
    )


@pytest.mark.slow
def test_without_noise_rounds_equal_plain_ones():
    rng = np.random.default_rng(0)
    plain = federated.clipped_mean(0.0, 8).create(NESTED)
    ours = _factory(0.0, 8, bits=32).create(NESTED)
    state, other = plain.initialize(), ours.initialize()
    for _ in range(10):
        data = [nested(x) for x in updates(rng, 8, 11, scale=0.2)]
        expected, output = plain.next(state, data), ours.next(other, data)
        state, other = expected.state, output.state
        np.testing.assert_allclose(
            flat(output.result), flat(expected.result), atol=2e-6
        )
        np.testing.assert_allclose(
            output.measurements["next_clip_norm"],
            expected.measurements["next_clip_norm"],
            rtol=1e-5,
        )
    assert not output.measurements["private"]


@pytest.mark.slow
def test_layerwise_and_normalised_rules_too():
    rng = np.random.default_rng(1)
    data = [nested(x) for x in updates(rng, 8, 11)]
    multipliers = {"kernel": 1.0, "rest/0": 2.0, "rest/1/scale": 3.0}
    for clip in (
        dpc.clipping.LayerwiseClip(dpc.QuantileClip(initial_norm=0.5)),
        dpc.clipping.ScaledClip(multipliers, 0.7, groups="variable"),
        dpc.QuantileClip(normalize=True),
        dpc.AutomaticClip(),
        0.5,
    ):
        plain = federated.clipped_mean(0.0, 8, clip).create(NESTED)
        ours = _factory(0.0, 8, clip=clip, bits=32).create(NESTED)
        expected = plain.next(plain.initialize(), data)
        output = ours.next(ours.initialize(), data)
        np.testing.assert_allclose(
            flat(output.result), flat(expected.result), atol=1e-5
        )
        np.testing.assert_allclose(
            output.measurements["unclipped_fraction"],
            expected.measurements["unclipped_fraction"],
            atol=1e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize("clients,minimum", [(10, 10), (10, 6), (7, 6)])
def test_noise_has_the_stddev_of_theory(clients, minimum):
    size = 40_000
    factory = _factory(1.0, 10, minimum, clip=dpc.QuantileClip(count_stddev=3.0))
    process = factory.create(vector_type(size))
    output = process.next(process.initialize(), [np.zeros(size, np.float32)] * clients)
    # With `minimum` clients the noise is the accounted noise; with more it is larger.
    z_g = accounting.split_noise_multiplier(1.0, [3.0])
    least = z_g * 0.1
    measured = output.measurements["sum_noise_stddev"]
    # Rounding makes records longer, by a known little.
    assert least <= measured <= least * 1.001
    expected = measured * math.sqrt(clients / minimum)
    # Five standard deviations of the estimate: once in 1.7 million tests.
    found = np.std(np.float64(output.result)) * 10
    assert found == pytest.approx(expected, rel=5 / math.sqrt(2 * size))
    assert abs(np.mean(np.float64(output.result))) * 10 < 5 * expected / math.sqrt(size)
    assert output.measurements["count_noise_stddev"] == pytest.approx(3.0, rel=1e-3)


@pytest.mark.slow
def test_counts_have_the_stddev_of_theory():
    # 40 groups of one coordinate each: 40 noised counts at once.
    rule = dpc.clipping.LayerwiseClip(dpc.QuantileClip(), groups="variable")
    factory = _factory(0.2, 20, clip=rule)
    process = factory.create(tff.to_type([np.float32] * 40))

    @tff.tensorflow.computation(np.float32)
    def one(x):
        return [x] * 40

    @tff.federated_computation(
        process.initialize.type_signature.result,
        tff.FederatedType(np.float32, tff.CLIENTS),
    )
    def next_round(state, x):
        return process.next(state, tff.federated_map(one, x))

    fractions, state = [], process.initialize()
    for _ in range(25):
        # Ten within and ten beyond: one half, ten stddevs from where it clamps.
        output = next_round(state, [0.0] * 10 + [9.0] * 10)
        fractions.append(output.measurements["unclipped_fraction"])
    fractions = np.ravel(fractions)
    assert len(fractions) == 1000
    # Five standard deviations of the estimates.
    assert np.std(fractions) == pytest.approx(0.05, rel=5 / math.sqrt(2000) + 1e-3)
    assert np.mean(fractions) == pytest.approx(0.5, abs=5 * 0.05 / math.sqrt(1000))


def test_too_few_clients_fail_the_round():
    process = _factory(0.5, 10, 6).create(vector_type(4))
    state = process.initialize()
    data = [np.zeros(4, np.float32)]
    process.next(state, data * 6)
    with pytest.raises(Exception, match="minimum_clients=6"):
        process.next(state, data * 5)


@pytest.mark.slow
def test_noise_is_new_for_every_client_call_and_restored_state(tmp_path):
    size = 20_000
    process = _factory(1.0, 2, clip=0.1).create(vector_type(size))
    state = process.initialize()
    data = [np.zeros(size, np.float32)] * 2
    manager = tff.program.FileProgramStateManager(tmp_path)
    import asyncio

    asyncio.run(manager.save(state, 1))
    restored = asyncio.run(manager.load(1, process.initialize()))
    np.testing.assert_array_equal(restored["rotation"], state["rotation"])
    first, second, third = (
        np.float64(process.next(s, data).result) for s in (state, state, restored)
    )
    # Two clients with the same share would have sqrt(2) times the stddev.
    expected = process.next(state, data).measurements["sum_noise_stddev"] / 2
    assert np.std(first) == pytest.approx(expected, rel=5 / math.sqrt(2 * size))
    for x, y in [(first, second), (first, third), (second, third)]:
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(size)


def test_rotations_differ_between_processes():
    a, b = (_factory(0.5).create(vector_type(4)).initialize() for _ in range(2))
    assert not np.array_equal(a["rotation"], b["rotation"])


def test_nothing_but_secure_sums_leaves_a_client():
    process = _factory(0.5).create(NESTED)
    tff.test.assert_contains_secure_aggregation(process.next)
    tff.test.assert_not_contains_unsecure_aggregation(process.next)


@pytest.mark.slow
def test_bad_updates_contribute_nothing_but_noise():
    process = _factory(0.0, 4, clip=dpc.QuantileClip(initial_norm=0.5), bits=32)
    process = process.create(NESTED)
    state = process.initialize()
    rng = np.random.default_rng(2)
    others = [nested(x) for x in updates(rng, 3, 11)]
    nothing = nested(np.zeros(11))
    for bad in (NAN, INF, -INF):
        x = np.ones(11)
        x[5] = bad
        output = process.next(state, [*others, nested(x)])
        without = process.next(state, [*others, nothing])
        np.testing.assert_allclose(flat(output.result), flat(without.result), atol=1e-6)
        # A zero update is within the clip norm; a bad update is not counted.
        counted = [o.measurements["unclipped_fraction"] * 4 for o in (output, without)]
        assert counted[1] - counted[0] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("bits", [12, 16, 24, 32])
@pytest.mark.parametrize("size,counts", [(1, 1), (11, 0), (500, 3)])
def test_integers_of_a_client_are_within_the_bound(bits, size, counts):
    constants = _plan(size, counts, bits=bits, clients=20, minimum=20)
    rng = np.random.default_rng(bits)
    longest = 0
    for trial in range(20):
        x = rng.normal(size=size) if trial % 2 else np.eye(size)[0]
        x = x / np.linalg.norm(x)
        if trial == 5:
            x = 0 * x
        bits_sent = rng.choice([-0.5, 0.5], size=counts)
        seed, rotation = (
            tf.constant(rng.integers(2**60, size=2), tf.int64) for _ in range(2)
        )
        whole = distributed.encode(
            constants,
            [tf.constant(x * constants.update_factor)],
            tf.constant(bits_sent),
            rotation,
            seed,
        ).numpy()
        square = sum(int(q) ** 2 for q in whole)
        assert square <= constants.squared_norm
        longest = max(longest, square)
    # The vector has norm 1 before, so that the bound is not far off.
    assert longest > 0.5 * constants.squared_norm


def test_an_update_and_its_bits_have_norm_one_together():
    # Theorem 1 in one vector: z_g of the update and (2 s)^-1 of each bit.
    for counts in (0, 1, 5):
        for z in (0.0, 0.5):
            constants = _plan(10, counts, z=z, clients=100)
            squares = constants.update_factor**2
            squares += sum(f**2 / 4 for f in constants.count_factors)
            assert squares == pytest.approx(1)


def test_the_share_is_what_the_bound_asks_for():
    constants = _plan(10_000, 1, z=0.8, clients=50, minimum=40)
    reached = discrete.sum_multiplier(
        constants.local_stddev,
        40,
        math.sqrt(constants.squared_norm),
        constants.dimension,
    )
    assert reached == pytest.approx(0.8, rel=1e-8) and reached >= 0.8


def test_rounding_falls_back_towards_zero_and_then_to_nothing():
    vector = tf.constant([0.9, -1.9, 2.5])
    up = tf.fill([3], 1 - 2.0**-16)
    assert distributed.round_within(vector, up, 100).numpy().tolist() == [1, -1, 3]
    # 1 + 1 + 9 is too long; 0 + 1 + 4 is not.
    assert distributed.round_within(vector, up, 5).numpy().tolist() == [0, -1, 2]
    assert distributed.round_within(vector, up, 4).numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("dimension", [2, 8, 2**16, 2**20])
def test_the_quick_look_at_a_norm_never_sees_it_too_small(dimension):
    rng = np.random.default_rng(dimension)
    for scale in (1.0, 700.0, 3e7):
        whole = np.round(scale * rng.normal(size=dimension)).astype(np.float32)
        exact = sum(int(q) ** 2 for q in whole)
        found = float(distributed._squares_at_most(tf.constant(whole)))
        assert exact <= found <= exact * (1 + 4e-6)


@pytest.mark.slow
def test_rounding_is_right_on_average():
    vector = tf.constant([0.25, -1.75, 3.0])
    rng = np.random.default_rng(3)
    draws = [
        distributed.round_within(
            vector, tf.constant(rng.random(3), tf.float32), 100
        ).numpy()
        for _ in range(2000)
    ]
    # Five standard deviations of at most 1/2 each.
    np.testing.assert_allclose(
        np.mean(draws, 0), vector.numpy(), atol=5 * 0.5 / math.sqrt(2000)
    )


@pytest.mark.slow
def test_sums_do_not_leave_the_modulus():
    # All clients agree, which makes the sum as long as possible.
    for bits, size in [(14, 40), (16, 1000)]:
        process = _factory(1.0, 10, clip=1.0, bits=bits).create(vector_type(size))
        x = np.full(size, 1 / math.sqrt(size), np.float32)
        output = process.next(process.initialize(), [x] * 10)
        error = (np.float64(output.result) - x) * 10
        stddev = output.measurements["sum_noise_stddev"]
        # A coordinate beyond the modulus is off by 2^bits steps: 15 stddevs or more,
        # spread over all by the rotation. 5.5 stddevs: once in 25 000 000 / size.
        assert np.std(error) < 1.5 * stddev
        assert np.max(np.abs(error)) < 7 * stddev


@pytest.mark.slow
@pytest.mark.parametrize("bits,dtype", [(24, "int32"), (30, "int32"), (31, "int64")])
def test_sums_that_wrap_around_are_right(bits, dtype):
    # 300 clients' integers of 24 bits do not fit into 32 bits.
    clients, size = 300, 30
    process = _factory(0.0, clients, clip=1.0, bits=bits).create(vector_type(size))
    constants = _plan(size, 0, 0.0, bits, clients, clients)
    assert constants.dtype == dtype and constants.modulus.dtype == dtype
    x = np.full(size, 1 / math.sqrt(size), np.float32)
    output = process.next(process.initialize(), [x] * clients)
    np.testing.assert_allclose(output.result, x, rtol=1e-3)


def test_too_few_bits_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"bits = 8 .*SecureSettings\(bits=1\d\)"):
        _factory(1.0, 50, bits=8).create(vector_type(100_000))


def test_coarse_shares_of_many_clients_are_accounted_or_refused():
    # 14 bits for 20,000 clients leave each a share of a few steps.
    for bits in (14, 15, 16, 18):
        try:
            constants = _plan(1000, 1, bits=bits, clients=20_000, minimum=16_000)
        except ValueError as error:
            assert "bits" in str(error)
            continue
        assert 1 <= constants.sum_stddev <= 1.5
        reached = discrete.sum_multiplier(
            constants.local_stddev,
            16_000,
            math.sqrt(constants.squared_norm),
            constants.dimension,
        )
        assert reached >= 1


def test_rounding_is_cheap_at_enough_bits():
    # Noise grows by the rounding error: documented figures.
    for bits, most in [(16, 1.035), (18, 1.0025), (20, 1.00025), (24, 1.00002)]:
        constants = _plan(1_200_000, 1, bits=bits, clients=50, minimum=40)
        assert 1 <= constants.inflation < most


def test_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        federated.clipped_mean(
            1.0, 10, secure=True, noise="distributed", minimum_clients=5, seed=1
        )
