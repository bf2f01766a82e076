"""Progress says how long it will take."""

from __future__ import annotations

import io
import re

from driver_kit import progress


def lines_of(monkeypatch, last, seconds_each, start=0):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = progress.Progress("training", last, start, stream=stream)
    for done in range(start + 1, last + 1):
        clock[0] += seconds_each
        shown.show(done, [f"loss {done}"])
    return stream.getvalue().splitlines()


def test_lines_say_how_much_time_is_left(monkeypatch):
    lines = lines_of(monkeypatch, 100, 0.1)
    assert lines[0] == "training:" and len(lines) == 11
    assert lines[1] == "  step  10 of 100, 0.1 s each, 9 s left   loss 10"
    assert lines[-1] == "  step 100 of 100, 0.1 s each   loss 100"
    # The steps before this process took none of its time.
    resumed = lines_of(monkeypatch, 100, 60.0, start=90)
    assert "step  91 of 100, 60 s each, 9 min left" in resumed[1]


def test_a_long_run_shows_a_line_soon(monkeypatch):
    lines = lines_of(monkeypatch, 1000, 7.0)
    # After 20 seconds, then at each tenth.
    assert re.match("  step +3 of 1000, 7 s each, 2 h left", lines[1])
    assert 11 <= len(lines) <= 12
