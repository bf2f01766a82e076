"""Steps are timed in turn and compared by rounds; a failure gives its reason, alone."""

from __future__ import annotations

import importlib.util
import math
import time

import pytest

from benchmarks import cells, timing
from benchmarks.peers import installed


def sleeper(seconds: float):
    return lambda: lambda: time.sleep(seconds)


def failing(error: Exception, after: int = 0):
    calls = []

    def step():
        calls.append(1)
        if len(calls) > after:
            raise error

    return lambda: step


def test_fast_peer_without_a_fast_way_is_not_timed():
    if importlib.util.find_spec("tensorflow_privacy") is None:
        pytest.skip("the fast peer is tensorflow-privacy, which is not installed")
    from benchmarks import variants

    makers, _ = variants.makers(timing.Spec("mnist_cnn", 2, ("plain", "tfp_fast")))
    found = timing.interleaved({"tfp_fast": makers["tfp_fast"]}, 1, 1.0)
    assert found["tfp_fast"]["status"] == "unsupported"
    assert "Conv2D" in found["tfp_fast"]["note"]


def test_variants_are_timed_in_turn_and_slow_ones_less(monkeypatch):
    order, clock = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def noted(name, seconds, first=0.0):
        def step():
            clock[0] += seconds + (0.0 if name in order else first)
            order.append(name)

        return lambda: step

    makers = {
        "plain": noted("p", 0.001),
        "a": noted("a", 0.004, first=5.0),
        "b": noted("b", 0.03),
        "c": noted("c", 0.2),
    }
    found = timing.interleaved(makers, 20, 0.1)
    # Eight steps of each, or as many as there is time for. Tracing, as of a, is not
    # counted: later steps check themselves as well.
    warm = ["p"] * 8 + ["a"] * 8 + ["b"] * 5 + ["c"] * 2
    assert order[:23] == warm
    assert order[23:31] == ["p", "a", "b", "c"] * 2
    counts = {name: len(cell["times"]) for name, cell in found.items()}
    # c: three steps at least, unless two take more than three times the limit.
    assert counts == {"plain": 20, "a": 20, "b": 4, "c": 2}
    assert found["b"]["times"] == pytest.approx([0.03] * 4)
    assert found["c"]["first"] == pytest.approx(0.2)


def test_one_failure_spares_the_others():
    makers = {
        "plain": sleeper(0.0),
        "early": failing(RuntimeError("at once\nmore")),
        "late": failing(RuntimeError("later"), after=10),
        "cannot": failing(timing.UnsupportedError("no such thing")),
        "memory": failing(MemoryError("full")),
        "good": sleeper(0.0),
    }
    found = timing.interleaved(makers, 5, 1.0)
    assert {name: cell["status"] for name, cell in found.items()} == {
        "plain": "ok",
        "early": "error",
        "late": "error",
        "cannot": "unsupported",
        "memory": "memory",
        "good": "ok",
    }
    assert found["early"]["note"] == "RuntimeError: at once"
    assert len(found["good"]["times"]) == 5


def test_ratios_are_of_the_same_rounds():
    spec = timing.Spec("mlp", 4, ("plain", "a"))
    # The machine slows down fourfold; a stopped after two rounds.
    found = {
        "plain": {"status": "ok", "times": [1.0, 1.0, 4.0, 4.0, 4.0]},
        "a": {"status": "ok", "times": [2.0, 2.0]},
    }
    plain, row = cells.time_rows("tensorflow", spec, found)
    assert (row["ratio"], row["ratio_q25"], row["ratio_q75"]) == (2.0, 2.0, 2.0)
    assert plain["ratio"] == 1.0 and row["median_ms"] == 2000.0
    nothing = {"a": {"status": "timeout", "times": []}}
    (row,) = cells.time_rows("tensorflow", spec, nothing)
    assert math.isnan(row["ratio"]) and row["plain_ms"] is None


def test_stopped_processes_say_why(monkeypatch, tmp_path):
    script = tmp_path / "worker"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(installed, "python_of", lambda name: str(script))
    spec = timing.Spec("mlp", 4, ("plain", "a"))
    found = cells.run("tensorflow", spec, timeout=0.3)
    assert {cell["status"] for cell in found.values()} == {"timeout"}
    found = cells.run("tensorflow", spec, timeout=30, memory_limit_mib=0.01)
    assert found["a"]["status"] == "memory" and "MiB" in found["a"]["note"]
    script.write_text("#!/bin/sh\necho it broke; exit 3\n")
    found = cells.run("tensorflow", spec, timeout=30)
    assert (found["a"]["status"], found["a"]["note"]) == ("error", "it broke")
    monkeypatch.setattr(installed, "python_of", lambda name: None)
    assert cells.run("tensorflow", spec, timeout=30) is None
