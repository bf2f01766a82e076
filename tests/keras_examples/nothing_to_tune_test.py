"""The benchmark of the plan against a grid: its runs, its tables, and its pages."""

from __future__ import annotations

import dataclasses
import math
import types

import numpy as np
import pytest

from keras_examples import (
    nothing_to_tune,
    tracking,
    tuning_runs,
    tuning_tables,
    tuning_tasks,
)
from tests.output_files import rows_of, words_of


def _row(what, score, seed, rate=0.25, task="digits", half="chosen on"):
    row = {"half": half, "kind": "images", "task": task, "metric": "accuracy"}
    row["examples"] = 1297
    row |= {"what": what, "seed": seed, "score": score, "seconds": 2.0}
    if what != "plain":
        row["epsilon"] = 3.0
    if what == "grid":
        row |= dataclasses.asdict(tuning_runs.Cell(learning_rate=rate))
    return row


ROWS = [
    _row("plain", 97.0, 0),
    _row("plain", 99.0, 1),
    *(_row("grid", score, seed, 0.05) for seed, score in enumerate((80.0, 90.0))),
    *(_row("grid", score, seed, 0.25) for seed, score in enumerate((86.0, 85.0))),
    *(_row("plan", score, seed) for seed, score in enumerate((84.0, 85.0))),
    *(
        _row("grid", score, 0, rate, "table_2", "held out")
        for rate, score in ((0.05, 70.0), (0.25, 60.0))
    ),
    _row("plan", 71.0, 0, task="table_2", half="held out"),
]


def test_the_gap_is_to_the_cell_of_the_greatest_mean():
    digits, table = tuning_tables.gaps(ROWS)
    assert digits["plain"] == 98 and math.isnan(table["plain"])
    assert digits["best"] == 85.5 and digits["best_cell"] == "default, momentum 0.25"
    assert digits["plan"] == 84.5 and digits["gap"] == -1.0
    # In runs that did not choose: seed 1 chooses 0.05 (80), seed 0 0.25 (85).
    assert digits["best_fresh"] == 82.5
    # The quantile of t with 2 degrees of freedom, and two errors of 1/4 each.
    assert digits["half_width"] == pytest.approx(4.302653 * math.sqrt(0.25 + 0.25))
    assert table["gap"] == 1 and math.isnan(table["half_width"])


def test_halves_are_summarised_apart_with_the_worst_task():
    again = [{**row, "task": "mnist_10000"} for row in ROWS if row["task"] == "digits"]
    again = [{**r, "score": r["score"] - 2 * (r["what"] == "plan")} for r in again]
    chosen, held = tuning_tables.summary(tuning_tables.gaps([*ROWS, *again]))
    assert (chosen["half"], chosen["tasks"], chosen["mean_gap"]) == ("chosen on", 2, -2)
    assert (chosen["worst"], chosen["worst_task"]) == (-3, "mnist_10000")
    assert (held["half"], held["mean_gap"], held["worst_task"]) == (
        *("held out", 1),
        "table_2",
    )


def test_one_cell_for_all_tasks_is_compared_with_the_best_of_each():
    first, second = tuning_tables.fixed_cells(ROWS)
    assert first["learning_rate"] == 0.05 and first["mean_gap"] == -0.25
    assert first["worst"] == -0.5 and first["worst_task"] == "digits"
    assert second["mean_gap"] == -5 and second["worst_task"] == "table_2"


def test_an_interval_of_a_difference_is_welchs():
    one, other = [1.0, 2.0, 3.0, 5.0], [2.0, 2.5]
    found = tuning_tables.half_width(one, other)
    errors = np.array([np.var(s, ddof=1) / len(s) for s in (one, other)])
    freedom = errors.sum() ** 2 / (errors**2 / [3, 1]).sum()
    assert 3 < freedom < 4
    # The quantile of t lies between those of 3 and 4 degrees of freedom.
    low, high = (q * math.sqrt(errors.sum()) for q in (2.776, 3.182))
    assert low < found < high
    assert math.isnan(tuning_tables.half_width([1.0], other))


def test_pages_and_figures_have_every_task():
    table = tuning_tables.gaps(ROWS)
    page = tuning_tables.page(table, ROWS)
    assert "| chosen on | digits | 1297 | accuracy | 3 | 98.0 | 85.5 |" in page
    assert "| default | momentum | 0.05 |" in page and "nan" not in page
    labels = tuning_tables.picture(table).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["digits", "table_2 *"]
    assert tuning_tables.picture([]) is None


def test_the_grid_is_of_every_clip_with_five_optimizers_and_rates():
    used = nothing_to_tune.Settings()
    assert len(used.cells) == len(set(used.cells)) == 20
    assert used.runs == 24 * 3 * (1 + 3 * (20 + 1))
    assert all(cell.batch_size == 300 and cell.epochs == 15 for cell in used.cells)


def test_the_rate_falls_by_half_a_cosine_to_zero():
    callback = tracking.Cosine(0.5, 100)
    optimizer = types.SimpleNamespace(iterations=0, learning_rate=None)
    callback.set_model(types.SimpleNamespace(optimizer=optimizer))
    rates = []
    for optimizer.iterations in (0, 50, 100, 101):
        callback.on_train_batch_begin(0)
        rates.append(optimizer.learning_rate)
    assert rates == pytest.approx([0.5, 0.25, 0.0, 0.0])


def test_weights_make_classes_equal_and_other_tasks_have_none():
    task = tuning_tasks.load("table_25")
    weights = tuning_runs.balancing_weights(task)
    share = task.train[1].mean()
    assert share * weights[1] == pytest.approx((1 - share) * weights[0])
    for name in ("heavy_years", "fifteen_labels"):
        assert tuning_runs.balancing_weights(tuning_tasks.load(name)) is None


@pytest.mark.slow
def test_a_second_run_of_a_trainer_begins_anew():
    task = tuning_tasks.load("table_25")
    trainer = tuning_runs.Trainer(task, 8.0, tuning_runs.Cell(epochs=2))
    for _ in range(2):
        run = trainer.run(0)
        assert int(trainer._optimizer.iterations) == trainer.plan.steps
        assert 40 < run.score < 100
    # A rate of 0 leaves the weights of the seed.
    trainer.run(5, 1e-12)
    for value, first in zip(
        trainer._model.get_weights(), task.build(5).get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, first, atol=1e-8)


@pytest.mark.slow
def test_every_way_of_a_tiny_study_is_kept_and_reported(tmp_path):
    arguments = [
        *("--tasks=digits", "--epsilons=8", "--seeds=1", "--clips=default"),
        *("--momentum_rates=0.5", "--adam_rates=0.01", "--epochs=3"),
        f"--output_dir={tmp_path}",
    ]
    nothing_to_tune.main(["study", *arguments])
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 1
    rows = rows_of(tmp_path, "runs")
    plain = [float(row["score"]) for row in rows if row["what"] == "plain"]
    assert min(plain) > 90
    [gap] = rows_of(tmp_path, "gaps")
    grid = [row for row in rows if row["what"] == "grid"]
    assert float(gap["best"]) <= max(float(row["score"]) for row in grid)
    assert float(gap["gap"]) == float(gap["plan"]) - float(gap["best"])
    assert "chosen on, epsilon 8, 1 tasks: mean gap" in words_of(tmp_path)
    assert "| chosen on | digits |" in (tmp_path / "tables.md").read_text()
    nothing_to_tune.main(["study", *arguments])
    assert (tmp_path / "trials.jsonl").read_text().splitlines() == lines
