"""Fixtures and settings of every test run."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import zlib

# Both must be set before the import of TensorFlow and of matplotlib.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import psutil
import pytest

# TensorFlow Federated interrupts a worker that it no longer needs and waits for its
# end, for ever if interrupts are ignored, as they are in a shell's background jobs. A
# handler, unlike "ignore", is not inherited.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


# Traced graphs are many Python objects: at Python's default thresholds, collecting
# garbage among them takes a tenth of the tests' time.
gc.set_threshold(100_000, 10, 10)

# Every so many modules, all objects are collected, not only the recent objects.
_ALL_OBJECTS_EVERY = 20
_modules = itertools.count(1)


# Some TensorFlow kernels exist only with oneDNN, which is on by default on some
# processors. A test whose plain gradient needs a missing kernel is skipped.
_NO_KERNEL = "CPU implementations do not yet support dilation rates larger than 1"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except Exception as error:
        if _NO_KERNEL in str(error):
            pytest.skip("TensorFlow cannot differentiate it on this processor.")
        raise


@pytest.fixture(autouse=True)
def _no_aggregators_of_other_tests():
    """Has a budget look at the aggregators of its own test alone."""
    notes = sys.modules.get("tfdpclip._notes")
    if notes is not None:
        notes.NOTES.round_noises.clear()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test():
    """Makes a test draw the same data whichever tests ran before it."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].keras.utils.set_random_seed(0)


def pytest_configure(config) -> None:
    config.addinivalue_line(
        "markers",
        "every_check: in `make test` too, every trace of a step checks itself.",
    )
    config.addinivalue_line(
        "markers",
        "unchecked: about what becomes of sums; in `make test`, no step checks itself.",
    )
    config.addinivalue_line(
        "markers",
        "thinned(n): says the same of many layers, ops or rules; every n-th of its "
        "cases is fast, the others are slow.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    seen: dict[str, int] = {}
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is None or item.get_closest_marker("slow"):
            continue
        name = item.nodeid.split("[")[0]
        place = seen[name] = seen.get(name, -1) + 1
        if place % thinned.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _few_checks(request, monkeypatch):
    """Has the engine check one step of every eighth test.

    The comparison of a step (`tfdpclip/gradients/comparison.py`) is half of the
    time to trace a small model, and many tests trace a dozen times. The checked step is
    the first that the test traces; a hash of the test's name decides which tests are
    checked. Tests of the check, and tests that need it, are marked `every_check`; files
    on sums, noise, schedules, budgets or files are marked `unchecked`. `make test-all`
    checks every step of all of them.
    """
    if request.config.option.markexpr != "not slow":
        return
    engine = sys.modules.get("tfdpclip.gradients.engine")
    if engine is None or request.node.get_closest_marker("every_check"):
        return
    compare = engine.PerExampleGradients._compare_gradients
    unchecked = request.node.get_closest_marker("unchecked")
    unchecked = unchecked or zlib.crc32(request.node.nodeid.encode()) % 8
    # The losses traced so far.
    traced = ["nothing"] if unchecked else []

    def once(self, graph, when, groups):
        if when == "first" and traced:
            when = "never"
        traced.append(self.loss.name)
        compare(self, graph, when, groups)

    monkeypatch.setattr(engine.PerExampleGradients, "_compare_gradients", once)


@pytest.fixture(autouse=True)
def _ops_without_stacks(request, monkeypatch):
    """Has TensorFlow not record the Python stack of every op.

    The stacks are for messages only, and under pytest, whose stacks are deep, they take
    a fifth of the time of tracing. `make test-all` has them.
    """
    if request.config.option.markexpr != "not slow" or "tensorflow" not in sys.modules:
        return
    from tensorflow.python.util import tf_stack

    here = tf_stack.extract_stack()
    monkeypatch.setattr(tf_stack, "extract_stack", lambda stacklevel=1: here)


def pytest_collection_finish() -> None:
    if "tensorflow" in sys.modules:
        _tune_no_iterator()
    gc.collect()
    gc.freeze()


def _tune_no_iterator() -> None:
    """Has data sets run without the thread that tunes them.

    Deleting an iterator waits for this thread, which sleeps the longer the iterator has
    existed: collecting a few iterators as garbage took 20 seconds.
    """
    from tensorflow.python.data.ops import dataset_ops

    def untuned(self):
        options = dataset_ops.options_lib.Options()
        options.autotune.enabled = False
        return dataset_ops._OptionsDataset(self, options)

    dataset_ops.DatasetV2._apply_debug_options = untuned


@pytest.fixture(autouse=True)
def _variable_scope_as_before():
    """Fails a test that leaves the process without distribution strategies.

    See `tfdpclip._tf_private.map_elements`.
    """
    yield
    if "tensorflow" in sys.modules:
        scope = sys.modules["tensorflow"].compat.v1.get_variable_scope()
        left, scope._caching_device = scope.caching_device, None
        assert left is None, "an error inside tf.map_fn left a caching device"


@pytest.fixture(scope="module", autouse=True)
def _traced_functions_are_freed():
    """Drops the references that keep every traced function of a module's tests alive.

    TensorFlow registers the gradient function of each call of a `tf.custom_gradient` by
    name for the process's life, and with it the graph of the call: without this
    fixture, two processes of this suite grow to 24 GiB. The objects that are alive
    afterwards mostly stay: collecting garbage among them after each module took up to
    three seconds.
    """
    yield
    if "tensorflow" in sys.modules:
        from tensorflow.python.framework import ops

        registered = ops.gradient_registry._registry
        for name in [n for n in registered if n.startswith("CustomGradient-")]:
            del registered[name]
        if next(_modules) % _ALL_OBJECTS_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Ends workers of TensorFlow Federated that a test left behind.

    `dpc.federated.local_context` ends its own workers. A worker that was started
    outside of it would keep the output open, so that `make test | tee log` would never
    end.
    """
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name() == "worker_binary"
    ]
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers, timeout=5)
