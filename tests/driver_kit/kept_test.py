"""A study measures each setting once, and never mixes up the results."""

from __future__ import annotations

import json
import math

import pytest

from driver_kit import kept, settings

SETTINGS = {"epochs": 3, "norms": (0.1, 1.0)}


def measured_never():
    raise AssertionError("measured again")


def test_what_was_measured_is_found_again_as_it_was(tmp_path):
    path = tmp_path / "kept.jsonl"
    first = kept.Kept(path, SETTINGS)
    place = ("a", 0.5, None)
    given = first.get(place, lambda: {"rows": [(1, 2)], "epsilon": math.inf})
    assert place in first and ("a", 0.5, 1) not in first
    again = kept.Kept(path, SETTINGS).get(place, measured_never)
    assert again == given == {"rows": [[1, 2]], "epsilon": math.inf}


def test_a_line_that_was_cut_is_measured_again_and_the_others_are_not(tmp_path):
    path = tmp_path / "kept.jsonl"
    study = kept.Kept(path, SETTINGS)
    for k in range(3):
        study.get((k,), lambda k=k: {"found": k})
    whole = path.read_text()
    path.write_text(whole[:-5])
    study = kept.Kept(path, SETTINGS)
    assert study.get((1,), measured_never) == {"found": 1}
    assert (2,) not in study
    study.get((2,), lambda: {"found": 2})
    assert path.read_text() == whole


def test_a_run_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "kept.jsonl"
    with pytest.raises(AssertionError, match="measured again"):
        kept.Kept(path, SETTINGS).get((0,), measured_never)
    assert not path.exists()


def test_other_settings_are_refused_and_named(tmp_path):
    path = tmp_path / "kept.jsonl"
    kept.Kept(path, SETTINGS).get((0,), dict)
    with pytest.raises(settings.UsageError, match=r"other settings \(epochs, seed\)"):
        kept.Kept(path, {**SETTINGS, "epochs": 4, "seed": 1})


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", '{"place": [1], "settings": 3}', '{"place": [1]}', ""]
)
def test_lines_that_cannot_be_read_are_named(tmp_path, line):
    path = tmp_path / "kept.jsonl"
    good = json.dumps({"place": [0], "settings": {}})
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(settings.UsageError, match=r"line 2 of .*cannot be read"):
        kept.Kept(path, {})
