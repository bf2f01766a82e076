"""Programs that read searches: two backbones, colours, the rule's choice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from driver_kit import settings
from keras_examples import batch_size, grid_results, plot_grids

ABOUT = '{"name": "%s", "trained": "x", "size": 1000, "delta": 1e-5, "data": ""}'
RUNS = "clip_norm,batch_size,learning_rate,seed,macro_accuracy\n"
HEADER = "epochs,epsilon,clip_norm,batch_size,learning_rate,mean,min,max,runs\n"


def results(directory, name, best):
    """A directory of a search whose best clip norms are given by epsilon."""
    directory.mkdir()
    (directory / "search.json").write_text(ABOUT % name)
    rows = [
        f"8.0,{epsilon},{clip},64,0.1,{mean},{mean - 0.01},{mean + 0.01},2\n"
        for epsilon, top in best.items()
        for clip in (0.1, 1.0, 10.0, "auto_s")
        for mean in [0.9 if clip == top else 0.5]
    ]
    (directory / "best.csv").write_text(HEADER + "".join(rows))
    sizes = [
        f"{epochs},{epsilon},1.0,{size},0.1,{mean},{mean - 0.01},{mean + 0.01},2\n"
        for epochs in (8.0, 16.0)
        for epsilon in best
        for size, mean in ((64, 0.7), (256, 0.8), ("full", 0.6))
    ]
    (directory / "best_batch_sizes.csv").write_text(HEADER + "".join(sizes))
    for epsilon, top in best.items():
        # Two repeats at two rates, of which the second is the better.
        runs = [
            f"{clip},{size},{rate},{seed},{score - 0.3 * (rate < 0.1) + 0.02 * seed}\n"
            for clip in (0.1, 1.0, 10.0, "auto_s")
            for size in (64, "full")
            for rate in (0.05, 0.1)
            for seed in (0, 1)
            for score in [0.9 if (clip, size) == (top, 64) else 0.6]
        ]
        path = grid_results.grid_path(directory, epsilon)
        path.write_text(RUNS + "".join(runs))
    return str(directory)


def test_two_backbones_in_one_figure(tmp_path):
    paths = [
        results(tmp_path / "a", "A", {0.5: 10.0, 8: 1.0}),
        results(tmp_path / "b", "B", {0.5: 1.0, 8: 1.0}),
    ]
    outcome = plot_grids.run(plot_grids.Settings(results=",".join(paths)))
    found = [(r["results"], r["epsilon"]) for r in outcome.tables["best_clip_norms"]]
    assert found == [("A", 0.5), ("A", 8), ("B", 0.5), ("B", 8)]
    first, second = outcome.figures["clip_norm"].axes
    assert (first.get_title(), second.get_title()) == ("A", "B")
    assert list(first.get_lines()[0].get_ydata()) == pytest.approx([-40, -40, 0])
    text = " ".join(outcome.findings)
    assert "A, 8 epochs: best clip norm 10 at epsilon 0.5, 1 at 8: evidence for" in text
    assert (
        "B, 8 epochs: best clip norm 1 at epsilon 0.5, 1 at 8: not told apart" in text
    )
    # Figure 1: the first search at its largest epsilon, the last there, and tight.
    titles = [ax.get_title() for ax in outcome.figures["heat_maps"].axes[:3]]
    assert [title.split("\n")[0] for title in titles] == [
        *("A, ε = 8", "B, ε = 8", "B, ε = 0.5")
    ]
    assert all("best 91.0%" in title for title in titles)
    image = outcome.figures["heat_maps"].axes[0].get_images()[0].get_array()
    np.testing.assert_allclose(image, [[-30, 0, -30], [-30, -30, -30]], atol=1e-9)
    again = plot_grids.Settings(results=",".join(paths), labels="x; y")
    assert plot_grids.run(again).tables["best_clip_norms"][-1]["results"] == "y"
    for wrong in ({"labels": "x"}, {"labels": "x; x"}, {"results": ""}):
        with pytest.raises(settings.UsageError, match="flag --"):
            plot_grids.run(dataclasses.replace(again, **wrong))


@pytest.mark.slow
def test_noise_is_coloured_by_accuracy_and_the_rule_is_compared(tmp_path):
    path = results(tmp_path / "a", "A", {0.5: 10.0, 8: 1.0})
    outcome = batch_size.run(batch_size.Settings(results=path))
    rows = outcome.tables["noise"]
    assert {row["epochs"] for row in rows} == {8, 16}
    assert {row["batch_size"] for row in rows} == {64, 256, 1000}
    lost = {row["batch_size"]: row["less_than_best"] for row in rows}
    assert lost == pytest.approx({64: 0.1, 256: 0.0, 1000: 0.2})
    for row in outcome.tables["recommendation"]:
        assert (row["grid_best"], row["not_told_apart"]) == (256, "256")
    panels = outcome.figures["cumulative_noise"].axes
    assert [ax.get_title() for ax in panels[:2]] == ["8 epochs", "16 epochs"]
    colours = panels[0].collections[0].get_array()
    np.testing.assert_allclose(colours, [-10, 0, -20], atol=1e-9)
    for wrong in (
        {"num_examples": 50_000},
        {"delta": 1e-6},
        {"mode": "fixed_steps"},
        {"steps_convention": "floor"},
    ):
        used = batch_size.Settings(results=path, **wrong)
        with pytest.raises(settings.UsageError, match="the runs of"):
            batch_size.run(used)


def test_unfinished_and_damaged_results_are_refused(tmp_path):
    path = results(tmp_path / "a", "A", {8: 1.0})
    table = tmp_path / "a" / "best.csv"
    text = table.read_text()
    for damaged in (
        "",
        HEADER,
        text.replace("0.9", "nan"),
        "a,b\n1,2\n",
        text + "1,2\n",
    ):
        table.write_text(damaged)
        with pytest.raises(settings.UsageError, match="--results="):
            grid_results.read(path)
    found = grid_results.read(results(tmp_path / "b", "B", {8: 1.0}))
    assert found.cells(8)[1.0, 64] == pytest.approx(0.91)
    for damaged in ("", "a,b\n1,2\n", RUNS, RUNS + "x,64,0.1,0,0.5\n"):
        grid_results.grid_path(tmp_path / "b", 8).write_text(damaged)
        with pytest.raises(settings.UsageError, match="no table of runs|is empty"):
            found.cells(8)
    with pytest.raises(settings.UsageError, match="grid_eps_3.csv is no table"):
        found.cells(3)
    table.unlink()
    with pytest.raises(settings.UsageError, match="a search .* that has ended"):
        grid_results.read(path)
