"""The federated study of noises: equal budgets, fair choices, and nothing twice."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex

import pytest

import tfdpclip as dpc
from driver_kit import settings
from tests.output_files import rows_of, words_of
from tests.source_tree import ROOT
from tff_tasks import correlated_noise
from tff_tasks.config import RunConfig

PAGE = ROOT / "docs" / "results" / "correlated"
SMALL = (
    "--rounds=8 --num_clients=40 --hidden_units=4 --clients_per_round=10 "
    "--rounds_per_eval=8"
)
NOISES = ("independent", "tree", "toeplitz", "buffered")


def study(directory, *options, flags=SMALL):
    correlated_noise.main(
        ["correlated_noise", f"--output_dir={directory}", f"--run_flags={flags}"]
        + [*options]
    )


def configs(monkeypatch) -> list[RunConfig]:
    """The settings of the runs of a study, which are made up."""
    asked: list[RunConfig] = []

    def trained(config, test):
        asked.append(config)
        found = 0.5 + 0.1 * (config.noise == "tree")
        found += 0.02 * (config.server_learning_rate == 0.3)
        if test:
            # Two repeats of each, 0.02 apart.
            found += 0.01 * (-1) ** len(asked) + 0.03 * (config.clipping == "adaptive")
        return {"accuracy": found, "spent": 3.0, "statement": "stated"}

    monkeypatch.setattr(correlated_noise, "trained", trained)
    return asked


def test_all_noises_and_clips_have_the_same_budget():
    used = correlated_noise.Settings(run_flags=SMALL, epsilon=3.0, count_share=0.2)
    base = used.base()
    plans = {n: correlated_noise.planned(n, base, 40, used) for n in NOISES}
    for noise, plan in plans.items():
        config = correlated_noise.config_of(used, noise, plan, "adaptive", 0.3, None)
        run = config.correlated(40)
        assert (run is None) == (noise == "independent")
        spent = dpc.accounting.epsilon(
            config.noise_multiplier,
            config.rounds,
            config.scheme(40),
            40**-1.1,
            unit="client",
            matrix=None if run is None else run.matrix,
        )
        assert 3 * 0.9999 < spent <= 3
        # The share of the counts, and so the noise of the sum, is the same for all.
        counts = config.clip_rule().count_stddevs(10.0)
        left = dpc.accounting.split_noise_multiplier(plan.noise_multiplier, counts)
        assert left == pytest.approx(plan.noise_multiplier / math.sqrt(0.8))
        fixed = correlated_noise.config_of(used, noise, plan, "fixed", 0.3, 1)
        assert fixed.clip_rule().count_stddevs(10.0) == ()
        assert (fixed.noise_multiplier, fixed.seed) == (plan.noise_multiplier, 1)
        assert fixed.clip == 0.3 and config.clip == 0.1 and config.seed is None
    assert all(plans["independent"].deviation > plans[n].deviation for n in NOISES[1:])


@pytest.mark.slow
def test_the_best_rate_is_measured_anew_and_gains_are_compared(tmp_path, monkeypatch):
    asked = configs(monkeypatch)
    flags = ("--repeats=2", "--epsilon=3", "--server_learning_rates=0.1,0.3,1")
    study(tmp_path, *flags, "--noises=independent,tree")
    tried = [c for c in asked if c.seed is not None]
    fresh = [c for c in asked if c.seed is None]
    # As often, at the same rates and with the same seed, for each noise and clip.
    assert len(tried) == 12 and len(fresh) == 8
    assert {c.seed for c in tried} == {1}
    assert len({(c.noise, c.clipping, c.server_learning_rate) for c in tried}) == 12
    assert {c.server_learning_rate for c in fresh} == {0.3}
    assert {c.sampling for c in asked} == {"fixed_order"}
    assert {c.eval_split for c in asked} == {"validation"}
    results = rows_of(tmp_path, "results")
    assert [row["end_of_grid"] for row in results] == ["False"] * 4
    fixed, adaptive = rows_of(tmp_path, "gains")
    assert float(fixed["gain"]) == float(adaptive["gain"]) == pytest.approx(10)
    assert adaptive["more_than_fixed"] == "0.0" and fixed["more_than_fixed"] == ""
    # Four means, each with an error of 0.01: 0.02 in all; as much freedom as two have.
    half = float(adaptive["more_half_width"])
    assert half == pytest.approx(100 * 0.02 * 4.303, rel=0.01)
    told = words_of(tmp_path)
    assert "tree +10.00 +- " in told and "one run: stated" in told
    assert "server momentum 0.9" in told and "8 rounds, 10 of 40 clients" in told
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[0] == "| clip | independent | tree |" and len(lines) == 4
    assert lines[2].startswith("| fixed | 52.00 ± 12.71 | 62.00 ± 12.71 |")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert (tmp_path / "rates.png").stat().st_size > 10_000

    # A second study runs only the missing settings, and a report trains nothing.
    known = len(asked)
    study(tmp_path, *flags, "--noises=independent,toeplitz")
    assert {c.noise for c in asked[known:]} == {"toeplitz"}
    assert len(asked) == known + 10
    known = len(asked)
    study(tmp_path, *flags, "--noises=independent,tree,buffered", "--report_only")
    assert len(asked) == known
    found = {row["noise"] for row in rows_of(tmp_path, "results")}
    assert found == {"independent", "tree"}
    with pytest.raises(SystemExit, match="--report_only: .* has not all runs of any"):
        study(tmp_path, *flags, "--noises=buffered", "--report_only")
    with pytest.raises(SystemExit, match=r"other settings \(count_share\)"):
        study(tmp_path, *flags, "--count_share=0.3")


@pytest.mark.slow
def test_runs_state_what_they_spent(tmp_path):
    flags = ("--repeats=2", "--epsilon=3", "--server_learning_rates=0.3")
    study(tmp_path, *flags, "--noises=buffered", "--clips=adaptive")
    runs = rows_of(tmp_path, "runs")
    assert [row["part"] for row in runs] == ["validation", "test", "test"]
    assert [row["private"] for row in runs] == ["False", "True", "True"]
    assert all(3 * 0.9999 < float(row["spent"]) <= 3 for row in runs)
    assert all(0 <= float(row["accuracy"]) <= 1 for row in runs)
    entries = (tmp_path / "trials.jsonl").read_text().splitlines()
    stated = [json.loads(line)["statement"] for line in entries]
    assert "a seed was fixed" in stated[0]
    for words in (
        "(3, 0.01729)-differential privacy",
        "a fixed order, 10 of 40 per step",
        "3 buffers for 8 steps",
        "QuantileClip",
        "one client, its update clipped as a whole",
    ):
        assert words in stated[1], words
    # The two runs differ.
    assert runs[1]["last_clip_norm"] != runs[2]["last_clip_norm"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--noises=pink", "--noises=pink: must be one of independent, tree"),
        ("--repeats=1", "--repeats=1: must be a whole number, 2 or more"),
        ("--run_flags=--noise=tree", "the study sets --noise itself"),
        ("--run_flags=--clip 0.3", "the study sets --clip itself"),
        ("--run_flags=--nosecure", "the study sets --secure itself"),
        ("--run_flags=--clients_per_round=300", "only 200 clients"),
        ("--task=emnist_autoencoder", "is measured by a loss"),
        ("--count_share=1", "--count_share=1"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, flag, words):
    with pytest.raises(SystemExit, match=words):
        correlated_noise.main(["correlated_noise", f"--output_dir={tmp_path}", flag])


@pytest.mark.parametrize("task", ["digits"])
def test_the_page_has_the_command_of_what_was_run(task):
    text = (PAGE / "README.md").read_text().replace("\\\n", " ")
    lines = [
        shlex.split(line)
        for line in text.splitlines()
        if line.startswith("    python -m tff_tasks.correlated_noise")
    ]
    (used,) = [
        one
        for line in lines
        if (one := settings.parse(correlated_noise.Settings, line[2:])).task == task
    ]
    ran = json.loads((PAGE / f"federated_{task}" / "config.json").read_text())
    free = {"output_dir": ran["settings"]["output_dir"], "report_only": True}
    said = json.loads(json.dumps({**dataclasses.asdict(used), **free}))
    assert said == ran["settings"]
