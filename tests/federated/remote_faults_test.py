"""Workers that are killed in the middle of a round, and the processes left behind."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.federated.helpers import NESTED, flat, nested, updates
from tests.federated.remote_workers import free_port, gated_sum, running, wait_for
from tfdpclip import federated

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = [nested(x) for x in updates(np.random.default_rng(1), 9, 11)]


def in_the_middle(directory, total, act):
    """The sum of two clients, each on its worker; calls `act` during the round."""

    def meanwhile():
        for number in (1, 2):
            wait_for(directory / f"began{number}")
        act()
        (directory / "gate").touch()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        return total([1, 2])
    finally:
        thread.join()


@pytest.mark.slow
def test_a_worker_that_is_back_computes_its_part_again(tmp_path):
    with running(2) as workers:

        def restart():
            workers[1].kill()
            (tmp_path / "began2").unlink()
            workers[1].start()

        with federated.remote_context([w.address for w in workers]):
            assert in_the_middle(tmp_path, gated_sum(tmp_path), restart) == 3
        # The client ran twice.
        assert (tmp_path / "began2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_rounds_after_a_restart_are_the_same(secure):
    clip = dpc.QuantileClip(initial_norm=0.5)
    results = []
    for killed in (False, True):
        with running(2) as workers:
            with federated.remote_context(
                [w.address for w in workers], simulate_secure_sums=True
            ):
                factory = federated.clipped_mean(0.0, 9, clip, secure=secure)
                process = factory.create(NESTED)
                state = process.initialize()
                for number in range(3):
                    if killed and number == 1:
                        workers[0].kill()
                        threading.Timer(3, workers[0].start).start()
                    output = process.next(state, CLIENTS)
                    state = output.state
                results.append(flat(output.result))
    np.testing.assert_array_equal(*results)


def test_a_worker_that_stays_away_is_named(tmp_path):
    with running(2) as workers:
        with federated.remote_context([w.address for w in workers], ready_seconds=2):
            began = time.monotonic()
            with pytest.raises(TimeoutError) as caught:
                in_the_middle(tmp_path, gated_sum(tmp_path), workers[1].kill)
            # The machine may be busy.
            assert time.monotonic() - began < 30
    assert f"workers: {workers[1].address} did not answer" in str(caught.value)
    assert "ready_seconds=2" in str(caught.value)


@pytest.mark.slow
def test_a_worker_that_freezes_in_the_round_is_named(tmp_path):
    """The worker was asked, and will never answer."""
    with running(2) as workers:
        with federated.remote_context([w.address for w in workers], round_seconds=10):
            began = time.monotonic()
            with pytest.raises(TimeoutError) as caught:
                in_the_middle(
                    tmp_path,
                    gated_sum(tmp_path),
                    lambda: workers[1].send(signal.SIGSTOP),
                )
            # The deadline, then a question to each worker; the machine may be busy.
            assert 9.9 < time.monotonic() - began < 30
    assert f"No answer from {workers[1].address}." in str(caught.value)


@pytest.mark.slow
def test_training_goes_on_with_the_survivor_and_then_with_a_new_worker(tmp_path):
    manager = tff.program.FileProgramStateManager(tmp_path)
    clip = dpc.QuantileClip(initial_norm=0.5)
    norms = []

    def train(addresses, last):
        with federated.remote_context(addresses, ready_seconds=2):
            process = federated.clipped_mean(0.0, 9, clip).create(NESTED)
            state, done = _latest(manager, process.initialize())
            for number in range(done + 1, last + 1):
                output = process.next(state, CLIENTS)
                state = output.state
                norms.append(float(output.measurements["next_clip_norm"]))
                _save(manager, state, number)

    with federated.local_context():
        process = federated.clipped_mean(0.0, 9, clip).create(NESTED)
        state, expected = process.initialize(), []
        for _ in range(6):
            output = process.next(state, CLIENTS)
            state = output.state
            expected.append(float(output.measurements["next_clip_norm"]))
    with running(3) as workers:
        addresses = [w.address for w in workers]
        train(addresses[:2], 2)
        workers[1].kill()
        with pytest.raises(TimeoutError, match=addresses[1]):
            train(addresses[:2], 4)
        train(addresses[:1], 4)
        train([addresses[0], addresses[2]], 6)
    assert norms == expected


def _latest(manager, initial):
    state, version = asyncio.run(manager.load_latest(initial))
    return (initial, 0) if state is None else (state, version)


def _save(manager, state, version):
    asyncio.run(manager.save(state, version))


@pytest.mark.slow
def test_a_script_behind_a_pipe_ends_and_leaves_the_workers():
    code = (
        "import numpy as np, tensorflow_federated as tff\n"
        "import tfdpclip as dpc\n"
        "with dpc.federated.remote_context({}):\n"
        "    factory = dpc.federated.clipped_mean(0.5, 10, 0.7)\n"
        "    process = factory.create(tff.TensorType(np.float32, [3]))\n"
        "    update = np.ones(3, np.float32)\n"
        "    output = process.next(process.initialize(), [update] * 4)\n"
        "    print('shape', output.result.shape, flush=True)\n"
    )
    with running(2) as workers:
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                code.format([w.address for w in workers]),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout
        assert "shape (3,)" in done.stdout
        assert [w.process.poll() for w in workers] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command_starts_a_worker_and_ends_it(number, tmp_path):
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "tfdpclip.federated.worker"]
    command.append(f"--port={port}")
    log = (tmp_path / "log").open("w+")
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # As in a shell's background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        with federated.remote_context([f"localhost:{port}"], ready_seconds=120):
            assert tff.tensorflow.computation(lambda: 42)() == 42
        again = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert again.returncode == 1 and "the port is in use" in again.stderr
        assert "without encryption or authentication" in (tmp_path / "log").read_text()
        assert psutil.Process(started.pid).children() == []
        os.kill(started.pid, number)
        assert started.wait(30) == -number
    finally:
        started.kill()
        started.wait()
