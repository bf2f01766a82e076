"""The noise of a round: its size, and that no two draws are the same."""

import math

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import flat, vector_type
from tfdpclip import accounting, federated

SIZE = 60_000
# An estimate of a standard deviation from SIZE samples is off by a relative 0.0029 (one
# standard deviation); five of them happen once in 1.7 million tests.
CLOSE = 5 / math.sqrt(2 * SIZE)
# A correlation of SIZE independent pairs is off by 1 / sqrt(SIZE); as above.
UNCORRELATED = 5 / math.sqrt(SIZE)


def _process(size=SIZE, **options):
    factory = federated.clipped_mean(1.0, 100, **options)
    return factory.create(tff.to_type([(np.float32, [size]), (np.float32, [size])]))


def _noise(output):
    """Noise of the two leaves."""
    return [np.asarray(x, np.float64) for x in output.result]


def _correlation(x, y):
    return abs(np.corrcoef(x, y)[0, 1])


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_noise_has_the_stddev_of_theorem_1(secure):
    process = _process(secure=secure, clip=dpc.QuantileClip(initial_norm=3.0))
    output = process.next(process.initialize(), [])
    expected = accounting.split_noise_multiplier(1.0, [5.0]) * 3.0
    assert output.measurements["sum_noise_stddev"] == pytest.approx(expected)
    assert output.measurements["count_noise_stddev"] == pytest.approx(5.0)
    for leaf in _noise(output):
        assert np.std(leaf) * 100 == pytest.approx(expected, rel=CLOSE)
        # The mean is off by stddev / sqrt(SIZE).
        assert abs(np.mean(leaf)) * 100 < 5 * expected / math.sqrt(SIZE)


@pytest.mark.slow
def test_counts_have_the_stddev_they_were_given():
    # 200 groups of one coordinate: 200 noised counts in every round. No client takes
    # part, so fractions are 1/2 plus noise of 0.05, ten stddevs from where they clamp.
    rule = dpc.clipping.LayerwiseClip(dpc.QuantileClip(), groups="variable")
    factory = federated.clipped_mean(0.4, 100, rule)
    process = factory.create(tff.to_type([np.float32] * 200))
    state, fractions = process.initialize(), []
    for _ in range(12):
        output = process.next(state, [])
        state = output.state
        fractions.append(output.measurements["unclipped_fraction"])
    fractions = np.ravel(fractions)
    # 2400 samples: 5 stddevs of the estimate.
    assert np.std(fractions) == pytest.approx(0.05, rel=5 / math.sqrt(4800))
    assert abs(np.mean(fractions) - 0.5) < 5 * 0.05 / math.sqrt(2400)


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_groups_get_the_noise_of_their_allocation(secure):
    for allocation, expected in [
        ("per_layer", [1.0 * math.sqrt(2), 3.0 * math.sqrt(2)]),
        ("joint", [math.sqrt(10), math.sqrt(10)]),
    ]:
        rule = dpc.clipping.LayerwiseClip({"0": 1.0, "1": 3.0}, allocation=allocation)
        output_of = _process(secure=secure, clip=rule)
        output = output_of.next(output_of.initialize(), [])
        for leaf, stddev in zip(_noise(output), expected, strict=True):
            assert np.std(leaf) * 100 == pytest.approx(stddev, rel=CLOSE)
        np.testing.assert_allclose(output.measurements["sum_noise_stddev"], expected)
    scaled = _process(
        clip=dpc.clipping.ScaledClip({"0": 4.0, "1": 1.0}, 2.0), secure=secure
    )
    output = scaled.next(scaled.initialize(), [])
    for leaf, stddev in zip(_noise(output), [0.5, 2.0], strict=True):
        assert np.std(leaf) * 100 == pytest.approx(stddev, rel=CLOSE)


def test_inflation_of_an_inner_sum_makes_the_noise_larger():
    inner = federated.InnerSum(tff.aggregators.SumFactory(), inflation=2.5)
    process = _process(inner=inner, clip=1.0)
    output = process.next(process.initialize(), [])
    for leaf in _noise(output):
        assert np.std(leaf) * 100 == pytest.approx(2.5, rel=CLOSE)


def test_normalised_noise_does_not_scale_with_the_clip():
    process = _process(clip=dpc.FixedClip(7.0, normalize=True))
    output = process.next(process.initialize(), [])
    assert np.std(_noise(output)[0]) * 100 == pytest.approx(1.0, rel=CLOSE)
    assert output.measurements["clip_norm"] == pytest.approx(7.0)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"secure": True}, {"inner": tff.aggregators.SumFactory()}],
    ids=["plain", "secure", "inner"],
)
def test_no_two_draws_are_alike(options):
    process = _process(**options)
    state = process.initialize()
    first, second = process.next(state, []), process.next(state, [])
    later = process.next(first.state, [])
    parts = [*_noise(first), *_noise(second), *_noise(later)]
    for i in range(len(parts)):
        for j in range(i):
            assert _correlation(parts[i], parts[j]) < UNCORRELATED, (i, j)
    fractions = [o.measurements["unclipped_fraction"] for o in (first, second, later)]
    assert len(set(fractions)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_two_calls_in_one_computation_are_not_merged(secure):
    # The compiler merges calls that it takes for equal.
    with federated.local_context(simulate_secure_sums=secure):
        first, second = _call_twice()
    assert _correlation(first[0], second[0]) < 5 / math.sqrt(1000)


def _call_twice():
    process = _process(1000)

    @tff.federated_computation(process.next.type_signature.parameter)
    def twice(arg):
        a, b = process.next(arg[0], arg[1]), process.next(arg[0], arg[1])
        return a.result, b.result

    return twice(process.initialize(), [])


def test_what_is_released_twice_is_the_same_draw():
    # The state, the measurements and the result must not come from separate
    # executions of the graph that draws: the noised fraction would be released twice.
    process = _process(10)
    state = process.initialize()
    for _ in range(3):
        output = process.next(state, [])
        measured = output.measurements
        moved = measured["clip_norm"] * math.exp(
            -0.2 * (measured["unclipped_fraction"] - 0.5)
        )
        assert measured["next_clip_norm"] == pytest.approx(moved, rel=1e-5)
        assert output.state["clip"][0] == measured["next_clip_norm"]
        state = output.state


def test_noise_does_not_repeat_after_a_checkpoint(tmp_path):
    process = _process()
    state = process.next(process.initialize(), []).state
    manager = tff.program.FileProgramStateManager(tmp_path)
    _wait(manager.save(state, 1))
    before = process.next(state, [])
    restored = _wait(manager.load(1, process.initialize()))
    np.testing.assert_array_equal(flat(restored["clip"]), flat(state["clip"]))
    assert restored["round"] == state["round"] == 1
    again = process.next(restored, [])
    for x, y in zip(_noise(before), _noise(again), strict=True):
        assert _correlation(x, y) < UNCORRELATED
    # The clip norm does carry over.
    assert again.measurements["clip_norm"] == before.measurements["clip_norm"]


def _wait(coroutine):
    import asyncio

    return asyncio.run(coroutine)


def test_a_seed_repeats_the_noise_and_says_so():
    factory = federated.clipped_mean(1.0, 100, seed=7)
    assert not factory.private and "not private" in repr(factory)
    process, other = (f.create(vector_type(1000)) for f in (factory, factory))
    state = process.initialize()
    first = process.next(state, [])
    assert not first.measurements["private"]
    np.testing.assert_array_equal(first.result, other.next(state, []).result)
    second = process.next(first.state, [])
    assert _correlation(first.result, second.result) < 5 / math.sqrt(1000)
    reseeded = federated.clipped_mean(1.0, 100, seed=8).create(vector_type(1000))
    changed = reseeded.next(state, [])
    assert _correlation(first.result, changed.result) < 5 / math.sqrt(1000)


def test_state_is_small_and_holds_no_noise():
    state = _process().initialize()
    assert list(state) == ["round", "clip"]
    assert len(flat(state)) == 2
