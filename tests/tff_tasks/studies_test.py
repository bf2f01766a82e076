"""Sweeps, figures, the recipe, and following quantiles."""

import csv
import dataclasses
import json
import re

import matplotlib.image
import numpy as np
import pytest

from driver_kit import reports
from tff_tasks import plots, quantile_tracking, recipe, studies, sweep
from tff_tasks.config import RunConfig
from tff_tasks.quantile_tracking import TrackingConfig

FLAGS = (
    "--engine=local --rounds=15 --clients_per_round=20 --num_clients=60 "
    "--hidden_units=8 --sampling=poisson --accountant=rdp --rounds_per_eval=5"
)


# Following quantiles.


@pytest.fixture(scope="module")
def tracked():
    config = TrackingConfig(seed=1, rounds=150)
    return config, quantile_tracking.run(config)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.slow
def test_estimates_settle_at_the_true_quantile(tracked, quantile):
    config, paths = tracked
    for name, mean, stddev in quantile_tracking.distributions(config):
        true = quantile_tracking.true_quantile(mean, stddev, quantile)
        late = np.mean(paths[f"{name} q={quantile:g}"][-40:])
        # The seed is fixed: a test of these paths, not of chance.
        assert late == pytest.approx(true, rel=0.15)


def test_true_quantiles():
    found = [
        quantile_tracking.true_quantile(0, 1, q) for q in quantile_tracking.QUANTILES
    ]
    assert found == pytest.approx([0.278, 0.592, 1, 1.689, 3.602], abs=5e-4)


def test_all_clipped_grows_tenfold_in_23_rounds():
    config = TrackingConfig(rounds=24, count_stddev=0.0, seed=0)
    path = quantile_tracking.track(config, 20.0, 0.1, 0.5, np.random.default_rng(0))
    assert path[0] == pytest.approx(0.1)
    assert path[[1, 2, 23, 24]] == pytest.approx(
        [0.110517, 0.122140, 0.997418, 1.102318], rel=1e-5
    )


@pytest.mark.parametrize(
    "quantile, least", [(0.01, 15), (0.5, 34), (0.75, 45), (0.99, 48)]
)
def test_loss_of_figure_1_is_least_at_the_quantile(quantile, least):
    clips = np.linspace(10, 55, 4501)
    values = np.array(quantile_tracking.VALUES, float)
    losses = quantile_tracking.pinball_loss(clips, values, quantile)
    minima = clips[losses <= losses.min() + 1e-9]
    assert minima.mean() == pytest.approx(least, abs=0.02)
    if quantile == 0.5:
        assert (minima[0], minima[-1]) == pytest.approx((28, 40), abs=0.02)


@pytest.mark.slow
def test_privacy_of_figure_2_in_both_conventions():
    text = quantile_tracking.statement(TrackingConfig())
    assert "or 0.034 as the paper has it" in text
    assert "add or remove one client" in text and "NOT" not in text
    assert "NOT private" in quantile_tracking.statement(TrackingConfig(seed=1))
    assert "nothing is private" in quantile_tracking.statement(
        TrackingConfig(count_stddev=0.0)
    )


@pytest.mark.slow
def test_tracking_writes_table_and_figures(tmp_path):
    config = TrackingConfig(str(tmp_path), rounds=5, seed=1)
    text = quantile_tracking.write(config)
    assert (tmp_path / "report.txt").read_text() == text
    with open(tmp_path / "tracking.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 7 and len(rows[0]) == 16
    for name in ("figure_1.png", "figure_2.png"):
        picture = matplotlib.image.imread(tmp_path / name)
        assert 0.005 < np.mean(picture[..., :3] < 0.9) < 0.5


@pytest.mark.parametrize(
    "name, value",
    [
        ("rounds", 0),
        ("clip_learning_rate", -0.2),
        ("initial_clip", float("nan")),
        ("narrow_stddev", 0),
        ("delta", 1.0),
        ("count_stddev", -1.0),
        ("population", 10),
    ],
)
def test_tracking_names_bad_settings(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*for example {name}="):
        TrackingConfig(**{name: value})


# Sweeps.


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep")
    config = sweep.SweepConfig(
        output_dir=str(directory),
        run_flags=FLAGS,
        noise_multipliers="0,0.3",
        server_rate_factors="3",
        clip_range="0.1,0.4",
        final_seeds=2,
    )
    return config, sweep.run(config)


@pytest.mark.slow
def test_sweep_runs_every_setting_once(swept):
    config, _ = swept
    rows = studies.read_rows(sweep.Sweep(config).directory)
    search = [row for row in rows if row.seed == 1]
    # No clipping; 5 quantiles and 5 norms, at 2 levels of noise.
    assert len(search) == 1 + 2 * 5 * 2
    assert len({(*row.setting, row.rate_factor) for row in search}) == len(search)
    later = [row for row in rows if row.seed != 1]
    assert sorted((row.clipping, row.seed) for row in later) == [
        ("adaptive", 2),
        ("adaptive", 3),
        ("fixed", 2),
        ("fixed", 3),
    ]
    assert all(row.rounds == 15 for row in rows)
    # The number announced before the first run.
    assert sweep.Sweep(config).planned() == len(rows)


@pytest.mark.slow
def test_sweep_resumes_without_running_again(swept, monkeypatch):
    from tff_tasks import program

    config, text = swept

    def never(*_):
        raise AssertionError("ran again")

    monkeypatch.setattr(program, "run", never)
    assert sweep.run(config) == text


def test_sweep_says_what_all_runs_will_take_once(tmp_path, monkeypatch, capsys):
    from tff_tasks import cost, program

    def no_run(config, on_cost):
        if on_cost is not None:
            on_cost(cost.Cost(15, 1.0, 3, 5.0))

    monkeypatch.setattr(program, "run", no_run)
    outcome = {"summary": 0.5, "final": {"accuracy": 0.5}, "rounds": 15}
    known: list[str] = []

    def finished(config):
        known.append(config.output_dir)
        return outcome if known.count(config.output_dir) > 1 else None

    monkeypatch.setattr(studies, "finished", finished)
    config = sweep.SweepConfig(
        output_dir=str(tmp_path),
        run_flags=FLAGS,
        figures="3,5,6",
        noise_multipliers="0,0.3",
        quantiles="0.5,0.9",
        fixed_clips=2,
        clip_range="0.1,0.4",
        server_rate_factors="1,3",
    )
    text = sweep.run(config)
    # No clipping; 2 quantiles and 2 norms, at 2 levels of noise and 2 rates.
    assert len(studies.read_rows(tmp_path)) == 1 + 2 * 2 * 2 * 2
    said = capsys.readouterr().out
    assert said.count("A run: About 30 s: 15 rounds of 1 s") == 1
    assert "17 runs: about 8 min, if each is as long." in said
    assert "Fixed clip norms: 0.1, 0.4" in text


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("test", "on the clients that settings were chosen by"),
        ("validation", "not used"),
    ],
)
def test_figure_7_says_whom_it_is_measured_on(tmp_path, split, words):
    settings = [("adaptive", 0.5, 0.3), ("fixed", 1.0, 0.3)]
    directory = sweep_of(tmp_path, *settings)
    found = {"mean": 0.9, "low": 0.8, "high": 0.95, "runs": 2}
    chosen = {
        "noise_multiplier": 0.3,
        "clip": 1.0,
        "rate_factors": {"adaptive": 1.0, "fixed": 1.0},
        "adaptive": {"final": found},
        "fixed": {"final": found},
    }
    path = directory / studies.SETTINGS
    about = json.loads(path.read_text())
    about |= {"figure_7": chosen, "base": {"eval_split": split}}
    about["settings"] = {"first_seed": 0}  # The runs are not of the search.
    path.write_text(json.dumps(about))
    (axes,) = plots.FIGURES[7]([plots.Results(directory)]).axes
    assert words in axes.get_xlabel()


@pytest.mark.slow
def test_sweep_states_what_it_chose(swept):
    config, text = swept
    content = json.loads((sweep.Sweep(config).directory / studies.SETTINGS).read_text())
    assert content["fixed_clips"] == pytest.approx(np.geomspace(0.1, 0.4, 5).tolist())
    chosen = content["figure_7"]
    assert chosen["noise_multiplier"] in (0.0, 0.3)
    assert chosen["adaptive"]["final"]["runs"] == 2
    assert "with 2 seeds not used before" in text
    assert "adaptive to the median" in text


@pytest.mark.slow
def test_figures_are_drawn(swept, tmp_path):
    config, _ = swept
    text = plots.draw(plots.PlotConfig(config.output_dir, str(tmp_path)))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"figure_{i}.png" for i in (3, 4, 5, 6, 7)}
    assert all(name in text for name in names)
    for path in tmp_path.iterdir():
        picture = matplotlib.image.imread(path)
        assert 0.005 < np.mean(picture[..., :3] < 0.9) < 0.5


def sweep_of(directory, *settings):
    """The files of a sweep with a run for each (clipping, level, noise)."""
    rows = []
    for k, (clipping, level, noise) in enumerate(settings):
        (directory / f"run{k}").mkdir(parents=True)
        (directory / f"run{k}" / "metrics.csv").write_text(
            "round,clip_norm\n0,0.1\n1,0.2\n"
        )
        rows.append(studies.Row(clipping, level, noise, 1.0, 1, 0.9, 0.9, 2, f"run{k}"))
    table = reports.table_text([dataclasses.asdict(row) for row in rows])
    (directory / studies.TABLE).write_text(table)
    about = {"title": "Some task", "metric": "accuracy", "higher_is_better": True}
    (directory / studies.SETTINGS).write_text(json.dumps(about))
    return directory


def test_figures_have_the_papers_numbers(tmp_path):
    adaptive = [("adaptive", q, 0.0) for q in studies.QUANTILES]
    results = [plots.Results(sweep_of(tmp_path, *adaptive))]
    # 3: the impact of clipping without noise; 4: the clip norm over the rounds.
    (three,), (four,) = (plots.FIGURES[n](results).axes for n in (3, 4))
    assert (three.get_xlabel(), three.get_ylabel()) == ("target quantile", "accuracy")
    assert (four.get_xlabel(), four.get_ylabel()[:9]) == ("round", "clip norm")
    assert len(four.lines) == 5


@pytest.mark.parametrize(
    ("run", "drawn"),
    [
        ([("none", 0.0, 0.0)], set()),
        ([("adaptive", 0.5, 0.0)], {3, 4}),
        ([("adaptive", 0.5, 0.3)], {5}),
        ([("fixed", 1.0, 0.0), ("fixed", 2.0, 0.3)], {6}),
    ],
)
def test_no_figure_of_what_was_not_run(run, drawn, tmp_path):
    directory = sweep_of(tmp_path / "sweep", *run)
    text = plots.draw(plots.PlotConfig(str(directory), str(tmp_path / "out")))
    assert {path.name for path in tmp_path.glob("out/*")} == {
        f"figure_{n}.png" for n in drawn
    }
    missing = ", ".join(str(n) for n in range(3, 8) if n not in drawn)
    assert f"not drawn: {missing}." in text


def test_figures_have_the_titles_that_are_given(tmp_path, monkeypatch):
    directory = sweep_of(tmp_path / "sweep", ("adaptive", 0.5, 0.0))
    seen = []
    monkeypatch.setitem(
        plots.FIGURES, 3, lambda results: seen.extend(r.title for r in results)
    )
    plots.draw(
        plots.PlotConfig(f"{directory},{directory}", str(tmp_path), "MNIST; plays")
    )
    assert seen == ["MNIST", "plays"]
    with pytest.raises(ValueError, match="titles must be one for each of 2 sweeps"):
        plots.PlotConfig(f"{directory},{directory}", str(tmp_path), "MNIST")


def test_figures_need_a_sweep(tmp_path):
    with pytest.raises(ValueError, match="python -m tff_tasks.sweep"):
        plots.draw(plots.PlotConfig(str(tmp_path)))


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"task": "mnist"}, "task must be one of"),
        ({"figures": "2"}, "figures must be"),
        ({"server_rate_factors": "a"}, "server_rate_factors must be"),
        ({"noise_multipliers": "-1"}, "noise_multipliers must be"),
        ({"clip_range": "1"}, "clip_range must be"),
        ({"run_flags": "--rounds=0"}, "--rounds=0: must be"),
        ({"final_seeds": 0}, "final_seeds must be"),
        ({"quantiles": "0.5,1.1"}, "quantiles must be at most 1"),
        ({"quantiles": "0.1,0.9"}, "no median.*add 0.5"),
        ({"fixed_clips": 1}, "fixed_clips must be"),
    ],
)
def test_sweep_names_bad_settings(settings, named):
    with pytest.raises(ValueError, match=named):
        sweep.SweepConfig(**settings)


def test_range_is_what_settled_estimates_went_through(tmp_path):
    def run(name, level, pairs):
        directory = tmp_path / name
        directory.mkdir()
        lines = ["round,clip_norm,unclipped_fraction", "0,,"]
        lines += [f"{i},{c},{b}" for i, (c, b) in enumerate(pairs, 1)]
        (directory / "metrics.csv").write_text("\n".join(lines) + "\n")
        return studies.Row("adaptive", level, 0.0, 1.0, 1, 0.5, 0.5, 3, name)

    rows = [
        run("low", 0.1, [(0.05, 0.9), (0.3, 0.12), (0.2, 0.3)]),
        run("high", 0.9, [(9.0, 0.0), (2.0, 0.86), (3.0, 0.9)]),
    ]
    assert studies.discovered_range(rows, tmp_path, max) == (0.2, 3.0)
    rows[1] = run("never", 0.9, [(9.0, 0.0)])
    with pytest.raises(ValueError, match="--clip_range=0.1,1"):
        studies.discovered_range(rows, tmp_path, max)


def test_bootstrap_covers_the_mean():
    rng = np.random.default_rng(0)
    found = studies.bootstrap(rng.normal(3.0, 1.0, size=400))
    assert found["low"] < found["mean"] < found["high"]
    # 3.92 standard errors.
    assert found["high"] - found["low"] == pytest.approx(3.92 / 20, rel=0.15)


def test_diverged_runs_are_the_worst():
    assert studies.score(None, True) == -np.inf
    assert studies.score("inf", False) == np.inf


# The recipe.


@pytest.mark.slow
def test_recipe_end_to_end(tmp_path, monkeypatch):
    config = recipe.RecipeConfig(
        output_dir=str(tmp_path),
        run_flags=FLAGS,
        client_rate_factors="1",
        server_rate_factors="1,3",
        noise_factor=4.0,
        max_steps=3,
        trial_noise=0.1,
        population=10**6,
    )
    text = recipe.write(config)
    content = json.loads((tmp_path / "recipe.json").read_text())
    assert content["levels"][0][0] == 0.1
    assert content["noise_multiplier"] in [level for level, _ in content["levels"]]
    assert content["plan"]["epsilon"] <= 5
    scale = content["plan"]["noise_multiplier"] / content["noise_multiplier"]
    assert content["plan"]["clients_per_round"] / 20 == pytest.approx(scale, rel=0.1)
    assert re.search(r"3\. For epsilon 5 at delta .* with 1000000 clients", text)

    monkeypatch.setattr(recipe, "measure", lambda c: 1 - c.noise_multiplier)
    result = recipe.run(config)
    # 0.1, 0.4 loses a third: stop, and keep 0.1.
    assert result.noise_multiplier == 0.1 and len(result.levels) == 2


@pytest.mark.slow
def test_recipe_says_when_the_population_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "measure", lambda c: 0.5)
    config = recipe.RecipeConfig(
        output_dir=str(tmp_path),
        run_flags=FLAGS,
        population=100,
        client_rate_factors="1",
        server_rate_factors="1",
        max_steps=1,
        epsilon=0.01,
    )
    result = recipe.run(config)
    assert result.plan is None
    assert "too small" in recipe.report(config, result)


@pytest.mark.slow
def test_recipe_for_a_loss_goes_the_other_way(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "measure", lambda c: 1 + c.noise_multiplier)
    config = recipe.RecipeConfig(
        task="emnist_autoencoder",
        output_dir=str(tmp_path),
        run_flags="--synthetic --clients_per_round=9",
        noise_factor=10.0,
        trial_noise=0.01,
        max_steps=3,
        epsilon=100.0,
    )
    result = recipe.run(config)
    # 0.1 is 9 % worse than 0.01: too much.
    assert result.noise_multiplier == 0.01 and len(result.levels) == 2


def test_recipe_says_when_the_trial_was_large_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "measure", lambda c: 0.5)
    config = recipe.RecipeConfig(
        output_dir=str(tmp_path),
        run_flags=FLAGS,
        client_rate_factors="1",
        server_rate_factors="1",
        trial_noise=1.5,
        max_steps=1,
        epsilon=8.0,
    )
    result = recipe.run(config)
    assert (result.plan.scale, result.plan.clients_per_round) == (1.0, 20)
    text = recipe.report(config, result)
    assert "That is the trial itself, which spends epsilon" in text
    assert "times the trial" not in text


def test_recipe_names_bad_settings():
    with pytest.raises(ValueError, match="noise_factor must be a number above 1"):
        recipe.RecipeConfig(noise_factor=1.0)
    with pytest.raises(ValueError, match="client_rate_factors must be"):
        recipe.RecipeConfig(client_rate_factors="")
    assert isinstance(recipe.RecipeConfig().base(), RunConfig)
