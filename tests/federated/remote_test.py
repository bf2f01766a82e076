"""Remote workers compute the same as a single machine, once."""

import asyncio
import collections
import concurrent.futures
import signal
import socket
import threading
import time

import grpc
import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates, vector_type
from tests.federated.remote_workers import running
from tfdpclip import federated
from tfdpclip.federated import _tff

CLIENTS = [nested(x) for x in updates(np.random.default_rng(1), 9, 11)]
RULE = dpc.QuantileClip(initial_norm=0.5)
MODES = {
    "plain": {},
    "secure": {"secure": True},
    "distributed": {"secure": True, "noise": "distributed", "minimum_clients": 9},
}
_LISTED = tff.FederatedType(np.int32, tff.CLIENTS)


@pytest.fixture(scope="module")
def addresses():
    with running(2) as started:
        yield [worker.address for worker in started]


def rounds(z, clip, **options):
    """The results and the clip norms of three rounds."""
    process = federated.clipped_mean(z, 9, clip, **options).create(NESTED)
    state, results, norms = process.initialize(), [], []
    for _ in range(3):
        output = process.next(state, CLIENTS)
        state = output.state
        results.append(flat(output.result))
        norms.append(np.ravel(output.measurements["next_clip_norm"]))
    return np.array(results), np.array(norms)


def drawn(addresses, size=40_000, clients=4, **options):
    """The noise of a round on the sum, over the stated standard deviation."""
    with federated.remote_context(addresses, simulate_secure_sums=True):
        factory = federated.clipped_mean(2.0, clients, 1.0, **options)
        process = factory.create(vector_type(size))
        zeros = [np.zeros(size, np.float32)] * clients
        result = process.next(process.initialize(), zeros).result
    return np.asarray(result) * clients / 2.0


@pytest.mark.parametrize(
    "workers, subrounds",
    [
        (2, None),
        pytest.param(1, None, marks=pytest.mark.slow),
        pytest.param(2, 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_results_do_not_depend_on_the_workers(addresses, mode, workers, subrounds):
    expected = rounds(0.0, RULE, **MODES[mode])
    with federated.remote_context(
        addresses[:workers], simulate_secure_sums=True, subrounds=subrounds
    ):
        found = rounds(0.0, RULE, **MODES[mode])
    # Plain sums are rounded in a different order; distributed sums at random.
    rounding = 2 * np.spacing(np.max(np.abs(expected[0])).astype(np.float32))
    bound = {"plain": rounding, "secure": 0, "distributed": 1e-5}[mode]
    assert np.max(np.abs(found[0] - expected[0])) <= bound
    bound = 1e-6 if mode == "distributed" else 0
    np.testing.assert_allclose(found[1], expected[1], rtol=bound)
    assert len(np.unique(expected[1])) == 3  # The clip norm moved.


@pytest.mark.parametrize("noise", ["central", "distributed"])
@pytest.mark.thinned(2)
def test_noise_is_drawn_once(addresses, noise):
    options = {**MODES["distributed"], "minimum_clients": 4}
    drawn_once = drawn(addresses, **(options if noise == "distributed" else {}))
    # False alarms: 5 standard deviations, below 1e-6. Twice would be 1.41.
    error = 5 / np.sqrt(2 * len(drawn_once))
    assert np.std(drawn_once) == pytest.approx(1.0, rel=error)


@pytest.mark.slow
def test_seeded_noise_is_that_of_one_machine(addresses):
    expected, norms = rounds(1.0, 0.5, seed=3)
    with federated.remote_context(addresses):
        found, found_norms = rounds(1.0, 0.5, seed=3)
    np.testing.assert_allclose(found, expected, atol=1e-7)
    np.testing.assert_array_equal(found_norms, norms)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1])
def test_rounds_of_nobody_and_of_one(addresses, count):
    with federated.remote_context(addresses):
        process = federated.clipped_mean(0.0, 9, 0.5).create(NESTED)
        output = process.next(process.initialize(), CLIENTS[:count])
    expected = flat(CLIENTS[0]) * count
    expected *= min(1, 0.5 / max(np.linalg.norm(expected), 1e-9)) / 9
    np.testing.assert_allclose(flat(output.result), expected, atol=1e-7)


@pytest.mark.slow
def test_workers_compute_at_the_same_time(addresses, tmp_path):
    """Each client waits until the second client has begun."""
    pattern = str(tmp_path / "began*")

    @tff.tensorflow.computation(np.int32)
    def meet(x):
        name = tf.strings.join([str(tmp_path / "began"), tf.strings.as_string(x)])
        with tf.control_dependencies([tf.io.write_file(name, "")]):
            return tf.while_loop(
                lambda seen: seen < 2,
                lambda seen: tf.size(tf.io.matching_files(pattern)),
                [0],
            )[0]

    @tff.federated_computation(_LISTED)
    def meetings(values):
        return tff.federated_sum(tff.federated_map(meet, values))

    with federated.remote_context(addresses, round_seconds=60):
        assert meetings([1, 2]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("simulated", [False, True])
def test_results_keep_their_containers(addresses, simulated):
    Pair = collections.namedtuple("Pair", "left right")

    @tff.tensorflow.computation(np.int32)
    def pair(x):
        return Pair(x, [x + 1, collections.OrderedDict(b=x, a=x)])

    with federated.remote_context(addresses, simulate_secure_sums=simulated):
        found = pair(3)
        process = federated.clipped_mean(0.0, 9, 0.5).create(NESTED)
        output = process.next(process.initialize(), CLIENTS)
    assert isinstance(output, tff.templates.MeasuredProcessOutput)
    assert isinstance(output.result, collections.OrderedDict)
    assert isinstance(output.result["rest"], list)
    assert found == Pair(3, [4, collections.OrderedDict(b=3, a=3)])
    assert isinstance(found, Pair) and isinstance(found.right, list)


def test_noise_for_each_part_is_refused(addresses):
    @tff.federated_computation(_LISTED)
    def same(values):
        return values, tff.federated_sum(values)

    with federated.remote_context(addresses):
        with pytest.raises(ValueError, match="at the server only"):
            same([1, 2, 3])
    with federated.remote_context(addresses[:1]):
        assert same([1, 2, 3]) == ([1, 2, 3], 6)


@pytest.mark.slow
def test_programs_can_await(addresses):
    async def one_round(process):
        output = process.next(process.initialize(), [np.ones(4, np.float32)] * 3)
        return await tff.program.materialize_value(output.result)

    with federated.remote_context(addresses, asynchronous=True):
        process = federated.clipped_mean(0.0, 3, 1.0).create(vector_type(4))
        found = asyncio.run(one_round(process))
    np.testing.assert_allclose(found, np.full(4, 0.5), atol=1e-6)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_secure_sums_are_refused_unless_simulated(addresses, asynchronous):
    factory = federated.clipped_mean(0.0, 9, 0.5, secure=True)
    with federated.remote_context(addresses, asynchronous=asynchronous):
        with pytest.raises(RuntimeError, match="simulate_secure_sums=True"):
            factory.create(NESTED)
    with federated.remote_context(
        addresses, asynchronous=asynchronous, simulate_secure_sums=True
    ):
        factory.create(NESTED)


def test_an_error_of_a_client_is_raised_and_the_next_call_works(addresses):
    @tff.tensorflow.computation(np.int32)
    def checked(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 5, "too large")]):
            return tf.identity(x)

    @tff.federated_computation(_LISTED)
    def total(values):
        return tff.federated_sum(tff.federated_map(checked, values))

    with federated.remote_context(addresses):
        with pytest.raises(grpc.RpcError, match="too large"):
            total([1, 2, 7])
        assert total([1, 2, 3]) == 6


@pytest.mark.slow
def test_the_context_ends_and_workers_stay(addresses):
    before = tff.framework.get_context_stack().current
    children = {c.pid for c in psutil.Process().children(recursive=True)}
    with pytest.raises(ZeroDivisionError):
        with federated.remote_context(addresses) as context:
            assert tff.framework.get_context_stack().current is context
            rounds(0.0, 0.5)
            raise ZeroDivisionError
    assert tff.framework.get_context_stack().current is before
    assert children == {c.pid for c in psutil.Process().children(recursive=True)}
    assert not [t for t in threading.enumerate() if "tfdpclip" in t.name]
    with federated.remote_context(addresses):
        rounds(0.0, 0.5)


@pytest.mark.slow
def test_workers_forget_what_they_were_given(addresses, monkeypatch):
    given, forgotten = [], []
    stub = _tff.WorkerStub
    get, dispose = stub.get_executor, stub.dispose_executor

    def noted_get(self, request):
        response = get(self, request)
        given.append((id(self), response.executor.id))
        return response

    def noted_dispose(self, request):
        forgotten.append((id(self), request.executor.id))
        dispose(self, request)

    monkeypatch.setattr(stub, "get_executor", noted_get)
    monkeypatch.setattr(stub, "dispose_executor", noted_dispose)
    with federated.remote_context(addresses) as context:
        assert context is not None
        process = federated.clipped_mean(0.0, 9, 0.5).create(NESTED)
        for count in (3, 9):
            process.next(process.initialize(), CLIENTS[:count])
        assert set(given) - set(forgotten)
    assert set(given) == set(forgotten)


@pytest.mark.parametrize(
    "workers, message",
    [
        ([], "must not be empty"),
        ("10.0.0.1:10000", "must be a list"),
        (None, "must be a list"),
        (["10.0.0.1"], "host:port"),
        (["10.0.0.1:0"], "host:port"),
        (["10.0.0.1:65536"], "host:port"),
        (["http://10.0.0.1:80"], "host:port"),
        ([10000], "host:port"),
        (["::1:10000"], "host:port"),
        (["a:1", "b:1", "A:01"], "a:1 more than once"),
    ],
)
def test_wrong_addresses_are_refused(workers, message):
    with pytest.raises(ValueError, match=f"workers .*{message}"):
        with federated.remote_context(workers):
            pass


@pytest.mark.parametrize(
    "name, value",
    [
        ("simulate_secure_sums", 1),
        ("asynchronous", None),
        ("ready_seconds", 0),
        ("ready_seconds", float("nan")),
        ("round_seconds", -1),
        ("round_seconds", None),
        ("subrounds", 0),
        ("subrounds", 1.5),
    ],
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        with federated.remote_context(["127.0.0.1:1"], **{name: value}):
            pass


def test_all_that_do_not_answer_are_named(addresses):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = ["127.0.0.1:1", f"127.0.0.1:{mute.getsockname()[1]}"]
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=", ".join(silent)) as caught:
            with federated.remote_context([*silent, addresses[0]], ready_seconds=1):
                pass
    assert time.monotonic() - began < 15
    assert addresses[0] not in str(caught.value)


def test_another_server_is_no_worker():
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ValueError, match=f"workers.*:{port} is not a worker"):
            with federated.remote_context([f"127.0.0.1:{port}"]):
                pass
    finally:
        server.stop(None)


@pytest.mark.slow
def test_a_frozen_worker_is_named_at_the_deadline():
    with running(2) as (good, frozen):
        with federated.remote_context([good.address, frozen.address], round_seconds=4):
            assert tff.tensorflow.computation(lambda: 42)() == 42
            process = federated.clipped_mean(0.0, 9, 0.5).create(NESTED)
            state = process.initialize()
            frozen.send(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TimeoutError) as caught:
                process.next(state, CLIENTS)
            # The deadline, then a question to each worker; the machine may be busy.
            assert 3.9 < time.monotonic() - began < 25
            assert "round_seconds=4" in str(caught.value)
            assert f"No answer from {frozen.address}." in str(caught.value)
            frozen.send(signal.SIGCONT)
            # The worker is back, and so is the context.
            process.next(state, CLIENTS)
