"""Scripts end, and so do the processes that they started."""

import contextlib
import io
import pathlib
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import tensorflow_federated as tff

import tfdpclip as dpc
from tfdpclip._notes import NOTES
from tfdpclip.federated import _tff

ROOT = pathlib.Path(__file__).resolve().parents[2]
_ROUND = """
import numpy as np, tensorflow_federated as tff
import tfdpclip as dpc

factory = dpc.federated.clipped_mean(0.5, 10, 0.7, secure=True)
with dpc.federated.local_context(simulate_secure_sums=True):
    process = factory.create(tff.TensorType(np.float32, [3]))
    update = np.ones(3, np.float32)
    result = process.next(process.initialize(), [update] * 4).result
    print("shape", result.shape, flush=True)
    {then}
"""


def workers(process=None):
    found = psutil.Process(process).children(recursive=True)
    return {child.pid for child in found if child.name() == "worker_binary"}


def answer():
    return tff.tensorflow.computation(lambda: 40 + 2)()


@pytest.mark.parametrize(
    "then, ignore, code",
    [("pass", False, 0), ("pass", True, 0), ("raise SystemExit(3)", False, 3)],
    ids=["ends", "ends in the background", "gives up"],
)
@pytest.mark.slow
def test_a_script_behind_a_pipe_ends(then, ignore, code):
    # A shell's background jobs ignore interrupts, and so would their workers.
    before = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignore else None
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ROUND.format(then=then)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=before,
        text=True,
        timeout=150,
    )
    assert done.returncode == code, done.stdout
    assert "shape (3,)" in done.stdout


@pytest.mark.slow
def test_the_worker_ends_with_the_context_and_no_other_process_does():
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    others = workers()
    with dpc.federated.local_context():
        assert answer() == 42
        own = workers() - others
        assert len(own) == 1
        with dpc.federated.local_context():
            assert answer() == 42
            assert len(workers() - others - own) == 1
        assert workers() == others | own
        assert answer() == 42
    assert workers() == others
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_it_ends_with_an_error_as_well():
    others = workers()
    with pytest.raises(ZeroDivisionError), dpc.federated.local_context():
        answer()
        raise ZeroDivisionError
    assert workers() == others


def test_a_context_that_nothing_ran_in_starts_and_ends_nothing():
    others = workers()
    with dpc.federated.local_context():
        assert workers() == others


def test_the_context_before_is_back_and_the_signal_too():
    stack = tff.framework.get_context_stack()
    before = stack.current
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with dpc.federated.local_context() as context:
            assert stack.current is context
            assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, own)
    assert stack.current is before


class _Notebook:
    """An output without a descriptor, as in notebooks."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("output", [io.StringIO, _Notebook])
@pytest.mark.parametrize("outputs", ["stdout", "both"])
def test_outputs_that_are_no_files_may_be_redirected(output, outputs):
    with contextlib.ExitStack() as redirected:
        redirected.enter_context(contextlib.redirect_stdout(output()))
        if outputs == "both":
            redirected.enter_context(contextlib.redirect_stderr(output()))
        factory = dpc.federated.clipped_mean(0.0, 2, 1.0, secure=True)
        with dpc.federated.local_context(simulate_secure_sums=True):
            factory.create(tff.TensorType(np.float32, [2]))
            assert answer() == 42


def test_a_worker_that_lacks_an_output_is_told_of_it(monkeypatch):
    def fails(*arguments):
        raise io.UnsupportedOperation("fileno")

    monkeypatch.setattr(_tff, "computed_now", fails)
    # An earlier test may have asked this context.
    NOTES.secure_contexts.discard(_tff.current_context())
    factory = dpc.federated.clipped_mean(0.0, 2, 1.0, secure=True)
    with pytest.raises(RuntimeError, match="sys.stdout.*fileno.*local_context"):
        factory.create(tff.TensorType(np.float32, [2]))


@pytest.mark.slow
def test_secure_sums_run_on_demand_only():
    factory = dpc.federated.clipped_mean(0.0, 2, 1.0, secure=True)
    value_type, updates = tff.TensorType(np.float32, [2]), [np.ones(2, np.float32)] * 2
    with dpc.federated.local_context(simulate_secure_sums=True):
        process = factory.create(value_type)
        output = process.next(process.initialize(), updates)
        np.testing.assert_allclose(output.result, np.full(2, 0.5**0.5), rtol=1e-5)
    with dpc.federated.local_context():
        with pytest.raises(RuntimeError, match="simulate_secure_sums=True"):
            factory.create(value_type)


def test_a_worker_that_cannot_be_ended_is_refused_before_it_starts(monkeypatch):
    class Other:
        executor_factory = None

    monkeypatch.setitem(_tff._CONTEXTS, (False, False), Other)
    with pytest.raises(RuntimeError, match="requirements.txt"):
        with dpc.federated.local_context():
            pass


@pytest.mark.parametrize("name", ["simulate_secure_sums", "asynchronous"])
def test_arguments_are_bools(name):
    with pytest.raises(ValueError, match=name):
        with dpc.federated.local_context(**{name: 1}):
            pass
