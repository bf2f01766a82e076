"""The study of correlated noise: equal budgets, fair choices, and nothing twice."""

from __future__ import annotations

import json

import pytest

import tfdpclip as dpc
from keras_examples import correlated_noise, noise_trials
from tests.keras_examples import image_files
from tests.output_files import rows_of, words_of

FIXED_ORDER, AMPLIFIED = noise_trials.FIXED_ORDER, noise_trials.AMPLIFIED


def study(directory, *options):
    correlated_noise.main(
        ["correlated_noise", f"--output_dir={directory}", "--dataset=synthetic"]
        + [*options]
    )


def test_all_noises_have_the_same_budget_and_only_references_are_amplified():
    used = correlated_noise.Settings(batch_size=250, epochs=5)
    plans = {
        name: noise_trials.planned(name, 2.0, 1000, used)
        for name in (*FIXED_ORDER, *AMPLIFIED)
    }
    for name, how in plans.items():
        assert how.steps == 20
        assert how.scheme.amplified == (name in AMPLIFIED)
        spent = dpc.accounting.epsilon(
            how.noise_multiplier, 20, how.scheme, used.delta, matrix=how.matrix
        )
        assert 2 * 0.9999 < spent <= 2
    # In fixed orders the tree improves on independent noise, and bands on the tree.
    independent, tree, bands, buffered = (plans[n].deviation for n in FIXED_ORDER)
    assert bands < buffered < tree < independent
    assert plans["cyclic"].deviation < plans["poisson"].deviation < independent
    assert plans["cyclic"].matrix.bands == plans["cyclic"].scheme.separation
    one = dpc.accounting.noise_multiplier(
        2.0, used.delta, 20, plans["cyclic"].scheme, matrix=plans["cyclic"].matrix
    )
    assert plans["cyclic"].noise_multiplier == one


def pretended(calls):
    """Made-up accuracies for each request, without training."""

    def trained(data, how, rule, rate, epsilon, part, used):
        adaptive = isinstance(rule, dpc.QuantileClip)
        calls.append((how.matrix, adaptive, rate, part))
        found = 0.5 + 0.1 * (how.matrix is not None) + 0.02 * (rate == 0.6)
        if part == "test":
            # Two repeats of each, 0.02 apart.
            found += 0.01 * (-1) ** len(calls) + 0.03 * adaptive
        return {
            "accuracy": found,
            "spent": epsilon,
            "last_clip_norm": 1.0,
            "statement": "stated",
            "seconds": 0.1,
        }

    return trained


@pytest.mark.slow
def test_the_best_rate_is_measured_anew_and_gains_are_compared(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(noise_trials, "trained", pretended(calls))
    flags = (
        *("--batch_size=64", "--epochs=1", "--epsilons=4", "--repeats=2"),
        *("--clips=fixed,quantile", "--learning_rates=0.25,0.6,1.5"),
    )
    study(tmp_path, *flags, "--noises=independent,buffered")
    tried = [(adaptive, rate) for _, adaptive, rate, part in calls if part != "test"]
    # As often, and the same rates, for each noise.
    assert len(tried) == 12 and len(set(tried)) == 6
    assert {rate for *_, rate, part in calls if part == "test"} == {0.6}
    results = rows_of(tmp_path, "results")
    assert [row["end_of_grid"] for row in results] == ["False"] * 4
    # Two values that are 0.02 apart: the error of their mean is 0.01.
    assert all(
        float(row["standard_error"]) == pytest.approx(0.01, abs=1e-9) for row in results
    )
    fixed, adaptive = rows_of(tmp_path, "gains")
    assert float(fixed["gain"]) == float(adaptive["gain"]) == pytest.approx(10)
    assert adaptive["more_than_fixed"] == "0.0" and fixed["more_than_fixed"] == ""
    assert adaptive["against_fixed"] == "not told apart"
    # The difference has four means: twice the error of one, and at most two runs'
    # degrees of freedom.
    ratio = float(adaptive["more_half_width"]) / float(adaptive["gain_half_width"])
    assert ratio == pytest.approx(2**0.5, rel=1e-2)
    told = words_of(tmp_path)
    assert "buffered +10.00 +- " in told and "one run: stated" in told
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    known = len(calls)
    study(tmp_path, *flags, "--noises=independent,buffered,tree")
    assert len(calls) == known + 10 and all(
        isinstance(matrix, dpc.correlated.Tree) for matrix, *_ in calls[known:]
    )
    # The report covers the runs that exist; nothing is trained for missing runs.
    known = len(calls)
    study(tmp_path, *flags, "--clips=fixed,median", "--report_only")
    assert len(calls) == known
    found = [row["noise"] for row in rows_of(tmp_path, "results")]
    assert found == ["independent", "tree", "buffered"]
    with pytest.raises(SystemExit, match="--report_only: .* has not all runs of any"):
        study(tmp_path, *flags, "--clips=median", "--report_only")
    with pytest.raises(SystemExit, match=r"measured with other settings \(epochs\)"):
        study(tmp_path, *flags, "--epochs=2")


@pytest.mark.slow
def test_a_run_states_what_it_spent(tmp_path):
    image_files.mnist_idx(tmp_path, count=120)
    used = correlated_noise.Settings(data_dir=str(tmp_path), batch_size=20, epochs=1)
    data = noise_trials.load(used)
    parts = (data.train, data.validation, data.test)
    assert [len(y) for _, y in parts] == [100, 20, 120]
    how = noise_trials.planned("buffered", 3.0, 100, used)
    rule = correlated_noise.CLIPS["median"](1.0)
    found = noise_trials.trained(data, how, rule, 0.5, 3.0, "validation", used)
    assert 0 <= found["accuracy"] <= 1 and 3 * 0.9999 < found["spent"] <= 3
    assert 0 < found["last_clip_norm"] != 1
    for words in (
        "(3, 1e-05)-differential privacy",
        "a fixed order, 20 of 100 per step",
        "3 buffers for 5 steps",
        "QuantileClip",
    ):
        assert words in found["statement"], words


@pytest.mark.slow
def test_every_noise_is_run(tmp_path):
    flags = (
        *("--batch_size=64", "--epochs=1", "--epsilons=8", "--repeats=2"),
        *("--learning_rates=0.5", "--clips=quantile"),
    )
    study(tmp_path, *flags)
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    places = [json.loads(line)["place"] for line in lines]
    assert len(places) == 6 * 3
    assert len(rows_of(tmp_path, "results")) == 6
    assert len(rows_of(tmp_path, "noises")) == 6
    spent = [float(row["spent"]) for row in rows_of(tmp_path, "runs")]
    assert max(spent) <= 8 and min(spent) > 8 * 0.9999


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--batch_size=5000", "--batch_size=5000: there are only"),
        ("--noises=pink", "--noises=pink: must be one of independent, tree"),
        ("--buffers=0", "--buffers=0: must be a whole number"),
        ("--repeats=1", "--repeats=1: must be a whole number, 2 or more"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, flag, words):
    with pytest.raises(SystemExit, match=words):
        study(tmp_path, flag)


def test_a_batch_too_small_to_count_in_is_refused(tmp_path):
    flags = ("--batch_size=2", "--noises=independent", "--clips=median")
    with pytest.raises(SystemExit, match="--batch_size=2: Quantile.* so few images"):
        study(tmp_path, *flags, "--epsilons=0.1", "--epochs=1")
