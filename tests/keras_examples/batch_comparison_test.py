"""The conclusions of a sweep, from known results."""

from __future__ import annotations

import pytest

from keras_examples import batch_comparison
from keras_examples.batch_comparison import Run

BOTH = ("equal_sigma", "equal_privacy")


def entry(last, epsilon=3.0):
    rows = [
        {"epoch": k, "test_accuracy": a, "seconds": 1.0 * k}
        for k, a in enumerate((0.1, 0.9 * last, last))
    ]
    return {"rows": rows, "epsilon": epsilon, "relation": "replace one", "mu": 1.0}


def made(adaptive, full, lower):
    found = {}
    for k, (a, f, low) in enumerate(zip(adaptive, full, lower, strict=True)):
        found[Run("sgd", 64, None, None, False, k)] = {"rows": entry(0.97)["rows"]}
        found[Run("batch:adaptive", 64, 0.5, 0.2, False, k)] = entry(a)
        found[Run("batch:full", 64, 0.5, 0.2, False, k)] = entry(f, 1.0)
        found[Run("batch:full", 64, 0.5, 0.2, True, k)] = entry(low)
    return found


def test_claims_are_judged_by_what_came_out():
    found = made((0.72, 0.74), (0.35, 0.36), (0.73, 0.81))
    rows = batch_comparison.results(found)
    texts = batch_comparison.findings(rows, BOTH)
    assert len(texts) == 4
    assert (
        "at equal sigma, last epoch, %: sgd 97.0 (97.0 to 97.0), batch:ad" in texts[0]
    )
    assert "NOT equally private: epsilon 1 to 3." in texts[0]
    assert "at equal privacy" in texts[2] and "NOT" not in texts[2]
    assert "+37.5 points, as claimed; the runs' ranges are apart" in texts[1]
    assert "-4.0 points, against the claim; the runs' ranges overlap" in texts[3]


def test_signals_stand_beside_each_other_by_layer():
    found = made((0.7,), (0.3,), (0.8,))
    for run, entry in found.items():
        if run.method != "sgd":
            ratio = 0.5 if run.equal_privacy else 0.25
            entry["signal"] = [
                {"moment": "start", "layer": "a", "parameters": 9, "ratio": ratio},
                {"moment": "start", "layer": "all", "parameters": 9, "ratio": 2 * ratio}
                | {"cosine": ratio / 5},
            ]
    rows = batch_comparison.ratios(found)
    assert [row["layer"] for row in rows] == ["a", "all", "cosine"]
    assert [rows[0][m] for m in ("batch:adaptive", "batch:full", "batch:full*")] == [
        0.25,
        0.25,
        0.5,
    ]
    *_, text = batch_comparison.findings(batch_comparison.results(found), BOTH, rows)
    assert "start of training" in text
    assert "batch:full* 0.1000, batch:adaptive 0.0500, batch:full 0.0500." in text


def test_one_run_decides_nothing():
    rows = batch_comparison.results(made((0.7,), (0.3,), (0.8,)))
    texts = batch_comparison.findings(rows, BOTH)
    assert "one run each, so that chance is not excluded" in texts[1]


def test_results_have_the_mean_and_the_range_of_the_last_epochs():
    rows = batch_comparison.results(made((0.72, 0.74), (0.3, 0.3), (0.8, 0.8)))
    assert [row["method"] for row in rows][:2] == ["sgd", "batch:adaptive"]
    assert [rows[1][k] for k in ("last", "low", "high", "runs")] == [73, 72, 74, 2]
    assert rows[0]["epsilon"] == "" and rows[0]["relation"] == "not private"
    assert (rows[2]["epsilon"], rows[3]["epsilon"]) == (1.0, 3.0)


def test_each_panel_has_its_runs():
    rows = batch_comparison.results(made((0.7,), (0.3,), (0.8,)))
    for noise, last in zip(BOTH, (30, 80), strict=True):
        shown = [row for row in rows if batch_comparison.shown_in(noise, row)]
        assert [row["method"] for row in shown] == [
            "sgd",
            "batch:adaptive",
            "batch:full",
        ]
        assert shown[2]["last"] == last


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, {"epochs"}),
        ({"sigma": 2.5}, {"epochs", "sigma"}),
        ({"clip_norm": 1.0}, {"epochs", "clip_norm"}),
        ({"batch_size": 128}, {"epochs", "batch_size"}),
    ],
)
def test_there_is_a_figure_of_what_was_varied(changed, names):
    found = made((0.7, 0.72), (0.3, 0.3), (0.8, 0.8))
    for run in list(found):
        if run.method != "sgd" or "batch_size" in changed:
            found[run._replace(**changed)] = found[run]
    rows = batch_comparison.results(found)
    trends = [t for t in batch_comparison.findings(rows, BOTH) if " by " in t]
    assert len(trends) == (0 if not changed else 4 if "batch_size" in changed else 3)
    if "clip_norm" in changed:
        words = "batch:full (sigma / sqrt(L)), m 64, sigma 0.5, last epoch, %, by C: "
        assert words + "80.0 at 0.2, 80.0 at 1." in trends
    figures = batch_comparison.figures(found, rows, BOTH, "T")
    assert set(figures) == names
    for figure in figures.values():
        words = [text.get_text() for text in figure.legends[0].get_texts()]
        assert words == ["sgd", "batch:adaptive", "batch:full"]
        for ax in figure.axes:
            assert len(ax.get_lines()) >= 3
