"""Work that may take over ten seconds shows its progress on a terminal."""

import contextlib
import io
import time

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip import _progress
from tfdpclip.accounting import search
from tfdpclip.correlated import optimized

pytestmark = pytest.mark.unchecked


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Bars do not wait until something takes long."""
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)


def shown(run, stream=None):
    """The text on standard error while `run` runs."""
    stream = stream or Terminal()
    with contextlib.redirect_stderr(stream):
        run()
    return stream.getvalue()


def model():
    made = tf.keras.Sequential([tf.keras.Input((200,)), tf.keras.layers.Dense(1)])
    optimizer = dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    made.compile(optimizer, "mse")
    return made


def data():
    return np.ones((4, 200), np.float32), np.ones((4, 1), np.float32)


def grid():
    def run(point):
        time.sleep(0.15)  # a bar is drawn ten times a second at the most
        return point.clip_norm

    return dpc.tuning.run_grid(dpc.tuning.Grid([0.1, 1.0], [64], [0.5]), run)


def passes():
    meter = dpc.diagnostics.GradientMeter(model())
    return meter.norms(data(), batch_size=2)


def rows():
    plan = dpc.keras.PrivacyPlan(3, 1e-5, examples=100, batch_size=50, epochs=2)
    return plan.rows()


def first_step():
    plan = dpc.keras.PrivacyPlan(3, 1e-5, examples=4, batch_size=2, epochs=1)
    made = model()
    made.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    made.fit(plan.batches(data()), verbose=0, callbacks=plan.callbacks)


LONG = {
    "building the private step, and comparing its gradients": (first_step, "(00:0"),
    "search": (grid, "1/2"),
    "pass": (passes, "0/2"),
    "noise": (lambda: dpc.testing.assert_noise(model(), data(), steps=4), "0/4"),
    "sensitivity": (
        lambda: dpc.testing.assert_sensitivity(model(), data(), records=[0, 1]),
        "0/2",
    ),
    "batch sizes": (
        lambda: dpc.tuning.batch_size_noise(100, 1.0, 1e-5, [50, 100], epochs=1),
        "0/2",
    ),
    "neighbours": (rows, "0/6"),
    # The number of tries is unknown.
    "least noise": (
        lambda: search.least_noise(lambda z, c=1: 1 / z, 2.0, False),
        "try",
    ),
    "most steps": (lambda: search.most_steps(lambda t, c=1: t / 100, 1.0), "try"),
    "matrix of least error": (
        lambda: optimized.least(lambda x: (float(x @ x), 2 * x), [np.ones(3)], (-2, 2)),
        "try",
    ),
}


@pytest.mark.parametrize("title", LONG)
def test_what_may_take_long_shows_how_far_it_is(title):
    run, what = LONG[title]
    seen = shown(run)
    assert f"{title}: " in seen
    assert what in seen[seen.index(title) :]


@pytest.mark.parametrize("how", ["switched off", "soon over", "a file"])
def test_no_bar_where_none_is_wanted(how, monkeypatch):
    if how == "switched off":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    elif how == "soon over":
        monkeypatch.setattr(_progress, "DELAY", 60.0)
    assert shown(grid, io.StringIO() if how == "a file" else None) == ""


@pytest.mark.parametrize(
    "how",
    [
        "said",
        "quiet",
        pytest.param("soon over", marks=pytest.mark.slow),
        pytest.param("switched off", marks=pytest.mark.slow),
    ],
)
def test_where_there_are_no_bars_a_line_says_what_the_first_step_does(
    how, monkeypatch, capsys
):
    """The line appears once, for the first step alone, unless `fit` has verbose=0."""
    monkeypatch.setattr(_progress, "LINE_DELAY", 60.0 if how == "soon over" else 0.0)
    if how == "switched off":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    plan = dpc.keras.PrivacyPlan(3, 1e-5, examples=4, batch_size=2, epochs=2)
    made = model()
    made.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    batches = plan.batches(data())

    def fit():
        verbose = 0 if how == "quiet" else 2
        made.fit(batches, verbose=verbose, callbacks=plan.callbacks)

    for lines in (1 if how == "said" else 0, 0):
        assert shown(fit, io.StringIO()) == ""
        said = capsys.readouterr().out
        assert said.count("building the private step and checking it") == lines


def test_lines_of_a_search_are_in_place_of_the_bar():
    lines, grid = [], dpc.tuning.Grid([0.1, 1.0], [64], [0.5])

    def run():
        dpc.tuning.run_grid(grid, lambda point: 1.0, progress=lines.append)

    assert shown(run) == "" and len(lines) == 2
