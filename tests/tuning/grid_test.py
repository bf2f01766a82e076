"""Grids continue after a stop, and state their privacy cost."""

import csv
import json
import math

import numpy as np
import pytest

from tfdpclip.sampling import Poisson
from tfdpclip.tuning import (
    Grid,
    RandomStopping,
    TrainingPlan,
    geometric,
    run_grid,
    search_privacy,
)

GRID = Grid([0.1, 1.0, "automatic"], [64, "full"], [0.01, 0.1], seeds=(0, 1))


def score(point):
    """Best at clip norm 1, batch 64, learning rate 0.1; seeds differ by 0.01."""
    value = {0.1: 0.5, 1.0: 0.7, "automatic": 0.6}[point.clip_norm]
    value -= 0.1 * (point.batch_size == "full") + 0.2 * (point.learning_rate == 0.01)
    return value + 0.01 * point.seed


class Counting:
    """Counts its calls, and stops after some."""

    def __init__(self, function=score, stop=math.inf):
        self.points, self._function, self._stop = [], function, stop

    def __call__(self, point):
        if len(self.points) >= self._stop:
            raise KeyboardInterrupt
        self.points.append(point)
        return self._function(point)


def plan(point):
    return TrainingPlan(Poisson(0.01), 2.0, 100 if point.batch_size == 64 else 200)


def test_every_combination_once():
    run = Counting()
    result = run_grid(GRID, run)
    settings = [tuple(point.settings().values()) for point in run.points]
    assert len(set(settings)) == len(settings) == len(GRID) == len(result.rows) == 24
    # All settings with the first seed before the second: early results are complete.
    assert [point.seed for point in run.points] == [0] * 12 + [1] * 12


def test_summary_and_best():
    result = run_grid(GRID, score)
    best = result.best()
    assert (best["clip_norm"], best["batch_size"]) == (1.0, 64)
    assert best["learning_rate"] == 0.1 and best["runs"] == 2
    assert (best["mean"], best["min"], best["max"]) == pytest.approx((0.705, 0.7, 0.71))
    tuned = result.best_at(("clip_norm", "batch_size"))
    assert len(tuned) == 6 and {row["learning_rate"] for row in tuned} == {0.1}
    text = str(result)
    assert "24 of 24 runs" in text and "0.705" in text and "by luck" in text
    assert len(result.rows) == 24 and "seconds" in result.rows[0]


def test_minimising_and_several_scores():
    def run(point):
        return {"loss": 1 - score(point), "accuracy": score(point)}

    result = run_grid(GRID, run, metric="loss", maximize=False)
    assert result.best()["clip_norm"] == 1.0
    assert result.best()["mean"] == pytest.approx(1 - 0.705)
    assert len(result.summary("accuracy")) == 12
    with pytest.raises(ValueError, match="metric: there is no score 'f1'"):
        result.best("f1")
    with pytest.raises(ValueError, match="metric: run returned 'loss', 'accuracy'"):
        run_grid(GRID, run, metric="score")
    with pytest.raises(ValueError, match="names must be of .*'momentum'"):
        result.best_at(("momentum",))


def test_runs_that_diverge_are_the_worst():
    def run(point):
        return math.nan if point.clip_norm == 1.0 else score(point)

    for maximize in (True, False):
        result = run_grid(GRID, run, maximize=maximize)
        assert result.best()["clip_norm"] != 1.0
        assert len(result.best_at(("clip_norm", "batch_size"))) == 6
    only = run_grid(Grid([1.0], [64], [0.1]), run)
    assert math.isnan(only.best()["mean"])


# Interruptions.


def test_goes_on_after_an_interruption(tmp_path):
    path = tmp_path / "deep" / "grid.csv"
    first = Counting(stop=10)
    with pytest.raises(KeyboardInterrupt):
        run_grid(GRID, first, path=path)
    second = Counting()
    result = run_grid(GRID, second, path=path)
    assert len(first.points) == 10 and len(second.points) == 14
    assert not set(map(repr, first.points)) & set(map(repr, second.points))
    expected = run_grid(GRID, score)
    assert result.summary() == expected.summary()
    again = Counting()
    run_grid(GRID, again, path=path)
    assert again.points == []
    with open(path, encoding="utf-8", newline="") as file:
        assert len(list(csv.reader(file))) == 25


def test_a_row_that_was_cut_off_is_run_again(tmp_path):
    path = tmp_path / "grid.csv"
    run_grid(GRID, score, path=path, max_runs=5)
    path.write_text(path.read_text()[:-8])
    rest = Counting()
    result = run_grid(GRID, rest, path=path)
    assert len(rest.points) == 20 and len(result.rows) == 24
    assert result.summary() == run_grid(GRID, score).summary()


def test_max_runs_and_progress(tmp_path):
    path, lines = tmp_path / "grid.csv", []
    result = run_grid(GRID, score, path=path, max_runs=7, progress=lines.append)
    assert len(result.rows) == len(lines) == 7 and "7 of 24 runs" in str(result)
    assert "clip_norm=0.1" in lines[0] and "0.3" in lines[0]
    assert len(run_grid(GRID, score, path=path, max_runs=7).rows) == 14


def test_numbers_survive_the_file(tmp_path):
    rates = geometric(0.001, 0.02, 7)
    grid = Grid([1 / 3], [64], rates, others={"name": ["a,b", 'c"d'], "k": [1, 0.1]})
    path = tmp_path / "grid.csv"
    run_grid(grid, lambda point: point.learning_rate / 7, path=path)
    run = Counting()
    result = run_grid(grid, run, path=path)
    assert run.points == []
    for row in result.rows:
        assert row["learning_rate"] in rates and row["clip_norm"] == 1 / 3
        assert row["score"] == row["learning_rate"] / 7
        assert row["name"] in ("a,b", 'c"d')


def test_a_larger_grid_uses_the_old_runs(tmp_path):
    path = tmp_path / "grid.csv"
    run_grid(Grid([0.1], [64], [0.1], seeds=(0, 1)), score, path=path)
    rest = Counting()
    result = run_grid(GRID, rest, path=path)
    assert len(rest.points) == 22 and len(result.rows) == 24
    # A smaller grid uses only its own runs.
    assert len(run_grid(Grid([1.0], [64], [0.1]), score, path=path).rows) == 1


def test_files_of_other_grids_are_refused(tmp_path):
    path = tmp_path / "grid.csv"
    run_grid(GRID, score, path=path)
    other = Grid([0.1], [64], [0.1], others={"momentum": [0.9]})
    with pytest.raises(ValueError, match="path: .*another grid"):
        run_grid(other, score, path=path)
    with pytest.raises(ValueError, match="path: .*another grid"):
        run_grid(GRID, lambda p: {"loss": 1.0}, path=path, metric="loss")
    with pytest.raises(ValueError, match="Return the same scores"):
        run_grid(
            Grid([2.0], [64], [0.1]), lambda p: {"score": 1.0, "x": 1.0}, path=path
        )
    path.write_text(path.read_text() + "1,2\n")
    with pytest.raises(ValueError, match="path: .*a row of 2 cells"):
        run_grid(GRID, score, path=path)


# Privacy.


def test_without_a_plan_the_search_is_said_not_to_be_private():
    result = run_grid(GRID, score)
    assert result.statement().epsilon == math.inf
    assert "the search was not private" in str(result)
    assert "does not cover the choice" in str(result)


def test_composition_counts_the_runs_that_were_made(tmp_path):
    path = tmp_path / "grid.csv"
    some = run_grid(GRID, score, path=path, plan=plan, delta=1e-5, max_runs=3)
    points = list(GRID)
    without_file = search_privacy([plan(p) for p in points[:3]], 1e-5)
    assert some.statement().epsilon == without_file.epsilon
    every = run_grid(GRID, score, path=path, plan=plan, delta=1e-5)
    every_run = search_privacy([plan(p) for p in points], 1e-5)
    assert every.statement().epsilon == every_run.epsilon
    assert every.statement().epsilon > some.statement().epsilon
    assert "composition of 24 runs" in str(every)


def test_runs_of_an_earlier_grid_in_the_file_count(tmp_path):
    coarse = Grid(
        [0.1, "automatic"], [64, "full"], [0.01, 0.1], others={"tied": [True]}
    )
    fine = Grid([0.1, 0.2], [64], [0.1], others={"tied": [True, False]})
    run_grid(coarse, Counting(lambda point: 1.0), path=tmp_path / "runs.csv")
    result = run_grid(
        fine, lambda point: 1.0, path=tmp_path / "runs.csv", plan=plan, delta=1e-5
    )
    assert len(result.rows) == 4
    of_both = [*coarse, *(p for p in fine if p.settings() not in settings_of(coarse))]
    assert len(of_both) == 8 + 3
    expected = search_privacy([plan(point) for point in of_both], 1e-5)
    assert result.statement().epsilon == pytest.approx(expected.epsilon)
    assert "composition of 11 runs" in str(result.statement())
    assert "interrupted" in str(result.statement())


def test_a_run_counts_with_the_plan_that_it_had(tmp_path):
    path, grid = tmp_path / "grid.csv", Grid([0.1, 1.0], [64], [0.1])
    strong = dict(plan=plan, delta=1e-5)
    weak = dict(plan=lambda p: TrainingPlan(Poisson(0.01), 8.0, 100), delta=1e-5)
    run_grid(grid, score, path=path, max_runs=1, **strong)
    again = Counting()
    with pytest.raises(ValueError, match=r"plan: .*multiplier 2;.*multiplier 8;"):
        run_grid(grid, again, path=path, **weak)
    # A run of the file that is not in the present grid counts, too.
    with pytest.raises(ValueError, match="plan: the file has a run of clip_norm=0.1"):
        run_grid(Grid([1.0], [64], [0.1]), again, path=path, **weak)
    assert not again.points
    result = run_grid(grid, score, path=path, **strong)
    both = search_privacy([plan(point) for point in grid], 1e-5)
    assert result.statement().epsilon == both.epsilon
    assert not [a for a in result.statement().assumptions if "without a plan" in a]
    drawn, search = tmp_path / "drawn.csv", RandomStopping(2.0)
    run_grid(grid, score, path=drawn, search=search, **strong)
    with pytest.raises(ValueError, match="plan: the file has a run"):
        run_grid(grid, score, path=drawn, search=search, **weak)


def test_runs_without_a_written_plan_are_named(tmp_path):
    path, grid = tmp_path / "grid.csv", Grid([0.1, 1.0], [64], [0.1])
    run_grid(grid, score, path=path, max_runs=1)
    result = run_grid(grid, score, path=path, plan=plan, delta=1e-5)
    assert "1 runs in the file were made without a plan" in str(result)
    # A file of an earlier version has no such column.
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    place = lines[0].index("plan")
    path.write_text("".join(",".join(c[:place] + c[place + 1 :]) + "\n" for c in lines))
    more = Grid([0.1, 1.0, "automatic"], [64], [0.1])
    result = run_grid(more, score, path=path, plan=plan, delta=1e-5)
    assert "3 runs in the file were made without a plan" in str(result)
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize("removed", [False, True])
def test_two_searches_do_not_share_a_file(tmp_path, removed):
    path, grid = tmp_path / "grid.csv", Grid([0.1, 1.0], [64], [0.1])
    run_grid(grid, score, path=path, max_runs=1)

    def meanwhile(point):
        if removed:
            path.unlink()
        else:
            run_grid(Grid(["automatic"], [64], [0.1]), score, path=path)
        return score(point)

    with pytest.raises(ValueError, match="path: .*changed, or removed, while"):
        run_grid(grid, meanwhile, path=path)
    if not removed:  # The rows of the second search are there.
        assert len(path.read_text().splitlines()) == 3


def test_a_score_has_a_name_of_its_own(tmp_path):
    grid = Grid([0.1], [64], [0.1])
    with pytest.raises(ValueError, match="score named 'clip_norm'"):
        run_grid(grid, lambda point: {"score": 1.0, "clip_norm": 2.0})


def test_a_search_has_one_best_run():
    grid = Grid([0.1, 1.0], [64], [0.1])
    search = RandomStopping(30.0)
    result = run_grid(
        grid,
        lambda point: {"score": score(point), "time": 1.0},
        plan=plan,
        delta=1e-5,
        search=search,
    )
    assert result.best() == result.best("score")
    with pytest.raises(ValueError, match="'score' alone"):
        result.best("time")


def settings_of(grid):
    return [point.settings() for point in grid]


def test_random_stopping(tmp_path, monkeypatch):
    path = tmp_path / "search.csv"
    grid = Grid([0.1, 1.0, "automatic"], [64, "full"], [0.01, 0.1])
    search = RandomStopping(30.0)
    monkeypatch.setattr(RandomStopping, "draw", lambda *_: 30)
    run = Counting()
    result = run_grid(
        grid, run, path=path, plan=plan, delta=1e-5, search=search, max_runs=2
    )
    assert "finish the search first" in str(result.statement())
    assert result.statement().not_private
    result = run_grid(grid, run, path=path, plan=plan, delta=1e-5, search=search)
    draws = json.loads((tmp_path / "search.csv.draws.json").read_text())["draws"]
    points = list(grid)
    # With replacement: a setting drawn twice is trained twice.
    assert [p.settings() for p in run.points] == [points[i].settings() for i in draws]
    assert len(result.rows) == len(draws)
    alone = search_privacy([plan(p) for p in grid], 1e-5, search)
    assert result.statement().epsilon == alone.epsilon
    assert result.statement().assumptions[:-1] == alone.assumptions
    assert "a run that was interrupted" in result.statement().assumptions[-1]
    best = result.best()
    assert best["mean"] == max(row["score"] for row in result.rows)
    assert best["runs"] == 1
    text = str(result)
    assert "nothing but the best run" in text and "runs done" not in text
    with pytest.raises(ValueError, match="search: .*draws of a different search"):
        run_grid(
            grid, run, path=path, plan=plan, delta=1e-5, search=RandomStopping(2.0)
        )


def test_random_stopping_does_not_take_over_chosen_runs(tmp_path):
    path = tmp_path / "grid.csv"
    grid = Grid([0.1], [64], [0.1])
    run_grid(grid, score, path=path)
    with pytest.raises(ValueError, match="path: .*not drawn at random"):
        run_grid(
            grid, score, path=path, plan=plan, delta=1e-5, search=RandomStopping(2.0)
        )


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="delta is required"):
        run_grid(GRID, score, plan=plan)
    with pytest.raises(ValueError, match="plan is required"):
        run_grid(GRID, score, search=RandomStopping(2.0))
    with pytest.raises(ValueError, match="seeds: "):
        run_grid(GRID, score, plan=plan, delta=1e-5, search=RandomStopping(2.0))
    with pytest.raises(ValueError, match="max_runs"):
        run_grid(GRID, score, max_runs=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_norms", [0.0]),
        ("clip_norms", [math.nan]),
        ("clip_norms", []),
        ("clip_norms", [1.0, 1]),
        ("clip_norms", [" x"]),
        ("batch_sizes", [0]),
        ("batch_sizes", [1.5]),
        ("batch_sizes", ["half"]),
        ("learning_rates", [-0.1]),
        ("learning_rates", [math.inf]),
        ("seeds", [0.5]),
        ("seeds", []),
        ("others", {"seed": [1]}),
        ("others", {"momentum": []}),
        ("others", {"momentum": [None]}),
    ],
)
def test_bad_grids(name, value):
    good = {"clip_norms": [1.0], "batch_sizes": [64], "learning_rates": [0.1]}
    with pytest.raises(ValueError, match=name):
        Grid(**{**good, name: value})


def test_geometric():
    """The learning rates of Table A1 of Rehn et al. (2025)."""
    expected = [0.001, 0.001534127, 0.002353547, 0.003610641]
    expected += [0.005539183, 0.008497812, 0.01303673, 0.02]
    np.testing.assert_allclose(geometric(0.001, 0.02, 8), expected, rtol=1e-6)
    assert geometric(2.0, 2.0, 1) == (2.0,)
    for bad in ((0.0, 1.0, 3), (1.0, 0.5, 3), (1.0, 2.0, 1)):
        with pytest.raises(ValueError, match="lowest"):
            geometric(*bad)
    with pytest.raises(ValueError, match="count"):
        geometric(1.0, 2.0, 0)
