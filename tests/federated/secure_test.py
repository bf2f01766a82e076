"""Secure sums: the data that leave a client, the contexts, and production's needs."""

import asyncio
import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates, vector_type
from tfdpclip import federated


def _assert_only_secure_sums(computation):
    tff.test.assert_contains_secure_aggregation(computation)
    tff.test.assert_not_contains_unsecure_aggregation(computation)


@pytest.mark.parametrize(
    "clip", [1.0, dpc.QuantileClip(), dpc.clipping.LayerwiseClip()], ids=str
)
def test_nothing_but_secure_sums_leaves_a_client(clip):
    process = federated.clipped_mean(1.0, 100, clip, secure=True).create(NESTED)
    _assert_only_secure_sums(process.next)


def test_plain_sums_are_told_apart():
    process = federated.clipped_mean(1.0, 100).create(NESTED)
    with pytest.raises(AssertionError):
        tff.test.assert_contains_secure_aggregation(process.next)


def _two_values(process):
    """`next` with the two results that the form has."""

    @tff.federated_computation(process.next.type_signature.parameter)
    def next_round(arg):
        output = process.next(arg[0], arg[1])
        released = tff.federated_zip((output.result, output.measurements))
        return output.state, released

    return next_round


def test_compiles_to_map_reduce_form_and_runs_there():
    # Plain sums: only production systems execute the form of secure sums.
    process = federated.clipped_mean(1.0, 100).create(vector_type(20_000))
    form = tff.backends.mapreduce.get_map_reduce_form_for_computation(
        _two_values(process)
    )
    compiled = tff.backends.mapreduce.get_computation_for_map_reduce_form(form)
    state = process.initialize()
    rng = np.random.default_rng(0)
    data = updates(rng, 3, 20_000)
    first, second = (compiled(state, data) for _ in range(2))
    results = [np.asarray(o[1][0]) for o in (first, second)]
    # Noise is drawn in every execution (5 stddevs of a correlation).
    noise = [r - np.mean(results, 0) for r in results]
    assert np.std(noise[0]) > 0
    expected = dpc.accounting.split_noise_multiplier(1.0, [5.0]) * 0.1 / 100
    difference = results[0] - results[1]
    assert np.std(difference) / np.sqrt(2) == pytest.approx(expected, rel=5 / 200)
    # The state and the measurements have the same draw.
    measured = first[1][1]
    assert first[0]["clip"][0] == measured["next_clip_norm"]


def test_secure_sums_compile_to_map_reduce_form():
    process = federated.clipped_mean(1.0, 100, secure=True).create(NESTED)
    form = tff.backends.mapreduce.get_map_reduce_form_for_computation(
        _two_values(process)
    )
    assert isinstance(form, tff.backends.mapreduce.MapReduceForm)
    assert form.securely_aggregates_tensors


@pytest.mark.slow
def test_a_context_without_secure_sums_is_refused_with_the_fix():
    with federated.local_context():
        factory = federated.clipped_mean(1.0, 100, secure=True)
        with pytest.raises(RuntimeError, match="local_context.simulate_secure_sums"):
            factory.create(NESTED)
        elsewhere = federated.SecureSettings(check_context=False)
        process = federated.clipped_mean(1.0, 100, secure=elsewhere).create(NESTED)
        _assert_only_secure_sums(process.next)
        federated.clipped_mean(1.0, 100).create(NESTED)


@pytest.mark.slow
@pytest.mark.parametrize("simulated", [False, True])
def test_contexts_of_programs_are_tried_out(simulated):
    """The context is tried inside a running program too."""
    factory = federated.clipped_mean(1.0, 100, secure=True)

    async def program():
        return factory.create(NESTED)

    with federated.local_context(simulate_secure_sums=simulated, asynchronous=True):
        for create in (lambda: asyncio.run(program()), lambda: factory.create(NESTED)):
            if simulated:
                _assert_only_secure_sums(create().next)
                continue
            with pytest.raises(RuntimeError, match="cannot run secure sums"):
                create()


def test_contexts_that_compute_nothing_are_refused():
    factory = federated.clipped_mean(1.0, 100, secure=True)

    class Other(tff.framework.SyncContext):
        def __init__(self, answer):
            self.answer = answer

        def invoke(self, comp, arg):
            return self.answer

    for answer in (None, 1, np.int32(3), "2", [1, 1]):
        with tff.framework.get_context_stack().install(Other(answer)):
            with pytest.raises(RuntimeError, match="cannot run secure sums"):
                factory.create(NESTED)

    def traced():
        factory.create(NESTED)
        return tff.federated_value(1, tff.SERVER)

    with pytest.raises(RuntimeError, match="cannot run secure sums"):
        tff.federated_computation(traced)


@pytest.mark.slow
def test_plain_and_secure_rounds_agree():
    rng = np.random.default_rng(1)
    data = [nested(x) for x in updates(rng, 10, 11)]
    results = []
    for secure in (False, True):
        process = federated.clipped_mean(0.0, 10, 0.5, secure=secure).create(NESTED)
        results.append(flat(process.next(process.initialize(), data).result))
    np.testing.assert_allclose(*results, atol=1e-7)


@pytest.mark.slow
def test_counts_of_a_mean_of_bits_are_exact():
    # A rule with a single count, the mean of three groups' bits: thirds.
    rule = dpc.clipping.PublicNormClip(
        dpc.QuantileClip(initial_norm=1.0), norms=dict.fromkeys("012", 1.0)
    )
    value_type = tff.to_type([np.float32] * 3)
    data = [
        [np.float32(x) for x in row] for row in ([2, 2, 0.5], [2, 0.5, 0.5], [2, 2, 2])
    ]
    fractions = []
    for secure in (False, True):
        process = federated.clipped_mean(0.0, 3, rule, secure=secure).create(value_type)
        output = process.next(process.initialize(), data)
        fractions.append(output.measurements["unclipped_fraction"])
    np.testing.assert_allclose(fractions, 3 / 9, atol=1e-6)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SendsNorms(dpc.FixedClip):
    """A rule of somebody's own: a record sends its norm, up to 10 clip norms."""

    def indicators(self, norms, state, present=None):
        sent = tf.clip_by_value(norms / 10 / self.norm, 0.0, 1.0) - 0.5
        counted = tf.math.is_finite(norms)
        if present is not None:
            counted &= present
        sent = tf.where(counted, sent, tf.zeros_like(sent))
        return tf.cast(sent, tf.float32)[:, tf.newaxis]

    def count_stddevs(self, records_per_step, private=True):
        return (0.0,)


def test_numbers_that_are_no_bits_are_sent_finely():
    """The mean is that of the records, not of numbers rounded to bits."""
    rule = SendsNorms(1.0)
    value_type = tff.to_type(np.float32)
    data = [np.float32(x) for x in (0.3, 0.9, 1.7, 4.1, 30.0)]
    wanted = np.minimum(np.array(data) / 10, 1).mean()
    for secure in (False, True):
        process = federated.clipped_mean(0.0, 5, rule, secure=secure).create(value_type)
        output = process.next(process.initialize(), data)
        found = output.measurements["unclipped_fraction"]
        np.testing.assert_allclose(found, wanted, atol=1 / 512)


@pytest.mark.parametrize("bits", [0, 3, 33, 2.5, float("nan"), None])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(ValueError, match="bits"):
        federated.SecureSettings(bits=bits)


def test_too_few_bits_for_so_many_coordinates_are_refused_with_the_fix():
    settings = federated.SecureSettings(bits=8)
    factory = federated.clipped_mean(1.0, 100, secure=settings)
    with pytest.raises(ValueError, match=r"bits = 8.*SecureSettings\(bits=11\)"):
        factory.create(vector_type(1_000_000))
    enough = federated.SecureSettings(bits=11)
    federated.clipped_mean(1.0, 100, secure=enough).create(vector_type(1_000_000))


@pytest.mark.slow
def test_measurements_are_public_or_noised():
    names = {
        "round",
        "clip_norm",
        "next_clip_norm",
        "unclipped_fraction",
        "sum_noise_stddev",
        "count_noise_stddev",
        "noise_multiplier",
        "private",
    }
    rng = np.random.default_rng(2)
    for options in (
        {},
        {"secure": True},
        {"inner": tff.aggregators.SumFactory()},
        {
            # Its own measurements are exact counts of clients.
            "inner": federated.InnerSum(tff.aggregators.SecureSumFactory(10.0, -10.0))
        },
    ):
        process = federated.clipped_mean(1.0, 100, **options).create(NESTED)
        state = process.initialize()
        output = process.next(state, [nested(x) for x in updates(rng, 3, 11)])
        assert set(output.measurements) == names
        # Measurements of two rounds with the same state differ only where they depend
        # on noise.
        again = process.next(state, [nested(x) for x in updates(rng, 5, 11)])
        noised = {"unclipped_fraction", "next_clip_norm"}
        for name in names:
            same = output.measurements[name] == again.measurements[name]
            assert same == (name not in noised), name


def test_the_result_has_the_containers_of_the_value():
    process = federated.clipped_mean(1.0, 100, secure=True).create(NESTED)
    result = process.next(process.initialize(), []).result
    assert isinstance(result, collections.OrderedDict)
    assert isinstance(result["rest"][1], collections.OrderedDict)
    tff.test.assert_types_identical(
        process.next.type_signature.result.result.member, NESTED
    )
