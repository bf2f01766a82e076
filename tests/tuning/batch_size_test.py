"""Noise by batch size: known figures, the rule, its table and its picture."""

import json
import math
import pathlib

import pytest

from tests.diagnostics.plots import check_picture
from tfdpclip import accounting, tuning
from tfdpclip.sampling import FullBatch, Poisson
from tfdpclip.tuning import batch_size_advice, batch_size_noise

_FILE = pathlib.Path(__file__).parents[1] / "accounting" / "oracle_cases.json"
ORACLE = [
    case
    for case in json.loads(_FILE.read_text())
    if case["name"].startswith("002/sigma/") and "B" in case["inputs"]
]
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)


def _convention(case):
    if "floor" in case["name"]:
        return "floor"
    return "loader" if "loader" in case["name"] else "ceil"


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: case["name"])
@pytest.mark.thinned(16)
def test_oracle(case):
    inputs, expected = case["inputs"], case["expected"]
    (found,) = batch_size_noise(
        inputs["N"],
        inputs["epsilon"],
        inputs["delta"],
        [inputs["B"]],
        epochs=inputs.get("epochs", 8),
        convention=_convention(case),
    )
    assert found.steps == inputs["T"]
    assert found.sampling_rate == pytest.approx(inputs["q"], rel=1e-12)
    rel = case["tolerance"]["rel"]
    assert found.noise_multiplier == pytest.approx(expected["sigma"], rel=rel)
    for key, value in (
        ("cumulative", found.cumulative_noise),
        ("effective", found.effective_noise),
        ("per_step_std", found.noise_multiplier / found.batch_size),
    ):
        if key in expected:
            assert value == pytest.approx(expected[key], rel=rel)


def test_oracle_is_used():
    assert len(ORACLE) == 40


# Steps, and z sqrt(T) for each epsilon: 50,000 records, 8 epochs.
FIGURE_7 = {
    256: (1563, 64.141, 41.416, 31.268, 25.330, 20.693),
    512: (782, 61.211, 37.045, 25.813, 20.043, 16.016),
    1024: (391, 59.595, 34.454, 22.259, 16.283, 12.596),
    2048: (196, 58.870, 33.059, 20.103, 13.719, 10.138),
    4096: (98, 58.374, 32.222, 18.784, 11.999, 8.367),
    8192: (49, 58.022, 31.686, 17.965, 10.874, 7.116),
    16384: (25, 58.793, 31.822, 17.668, 10.251, 6.307),
    50000: (8, 56.255, 29.845, 15.950, 8.649, 4.802),
}


@pytest.mark.slow
def test_cumulative_noise_of_figure_7():
    for k, epsilon in enumerate(EPSILONS):
        found = batch_size_noise(50_000, epsilon, DELTA, list(FIGURE_7), epochs=8)
        for one in found:
            steps, *noise = FIGURE_7[one.batch_size]
            assert one.steps == steps
            assert one.cumulative_noise == pytest.approx(noise[k], rel=2e-4)


def test_noise_of_figures_6_and_a13():
    found = {
        c.batch_size: c
        for c in batch_size_noise(50_000, 0.5, DELTA, [256, 4096, "full"], epochs=8)
    }
    assert found[256].noise_multiplier / 256 == pytest.approx(6.337e-3, rel=1e-3)
    assert found[4096].cumulative_noise / 4096 == pytest.approx(1.425e-2, rel=1e-3)
    assert found[256].effective_noise == pytest.approx(316.9, rel=1e-3)
    assert found[50_000].effective_noise == pytest.approx(19.9, rel=1e-2)


# The recommended batch size for each epsilon, by tolerance and least number of steps.
ANSWERS = {
    (0.01, 20): (4096, 8192, 16384, 16384, 16384),
    (0.02, 20): (2048, 4096, 8192, 16384, 16384),
    (0.03, 20): (1024, 4096, 8192, 16384, 16384),
    (0.05, 20): (1024, 2048, 8192, 16384, 16384),
    (0.10, 20): (512, 1024, 4096, 8192, 16384),
    (0.15, 20): (256, 1024, 2048, 8192, 8192),
    (0.20, 20): (256, 512, 2048, 4096, 8192),
    (0.10, 1): (512, 4096, 50000, 50000, 50000),
}


@pytest.mark.parametrize(("settings", "expected"), ANSWERS.items())
@pytest.mark.slow
def test_recommendations(settings, expected):
    tolerance, steps = settings
    found = [
        batch_size_advice(50_000, 8, e, DELTA, steps, tolerance=tolerance)
        for e in EPSILONS
    ]
    assert tuple(advice.batch_size for advice in found) == expected


@pytest.mark.slow
def test_recommendations_for_the_larger_set():
    for tolerance, expected in (
        (0.10, (512, 2048, 8192, 16384, 32768)),
        (0.05, (1024, 4096, 8192, 32768, 32768)),
    ):
        found = [
            batch_size_advice(87_002, 8, e, DELTA, tolerance=tolerance).batch_size
            for e in EPSILONS
        ]
        assert tuple(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        (2, (1024, 4096, 4096, 4096, 4096)),
        (4, (1024, 4096, 4096, 4096, 4096)),
        (16, (256, 1024, 4096, 16384, 16384)),
        (32, (256, 1024, 4096, 16384, 16384)),
    ],
)
def test_recommendations_at_other_epochs(epochs, expected):
    sizes = [256, 1024, 4096, 16384, "full"]
    found = [
        batch_size_advice(50_000, epochs, e, DELTA, candidates=sizes).batch_size
        for e in EPSILONS
    ]
    assert tuple(found) == expected


@pytest.mark.slow
def test_recommendations_for_a_small_set():
    sizes = [64, 128, 256, 512, "full"]
    found = [
        batch_size_advice(1437, 8, e, DELTA, candidates=sizes).batch_size
        for e in (0.25, 0.5, 1.0, 2.0, 8.0)
    ]
    assert found == [64, 64, 64, 128, 512]
    assert batch_size_advice(1437, 8, 1.0, DELTA).candidates[0].batch_size == 16


def test_the_plan_stays_within_the_budget():
    chosen = batch_size_advice(1437, 8, 2.0, DELTA).chosen
    spent = accounting.epsilon(
        chosen.noise_multiplier, chosen.steps, chosen.sampling, DELTA
    )
    assert 1.99 < spent <= 2.0
    full = batch_size_noise(1437, 2.0, DELTA, ["full"], epochs=8)[0]
    assert full.sampling == FullBatch() and full.sampling_rate == 1
    # Closed form: the noise of all steps together is epochs / mu.
    mu = accounting.gdp_mu(2.0, DELTA)
    assert full.cumulative_noise == pytest.approx(8 / mu, rel=1e-4)


@pytest.mark.parametrize(
    ("convention", "rate", "steps"),
    [
        ("ceil", 0.3, 27),
        ("floor", 0.3, 26),
        ("loader", 0.25, 32),
        ("framework", 0.3, 32),
    ],
)
def test_conventions(convention, rate, steps):
    (found,) = batch_size_noise(
        1000, 1.0, DELTA, [300], epochs=8, convention=convention
    )
    assert (found.sampling_rate, found.steps) == (rate, steps)
    assert found.sampling == Poisson(rate)


def test_fixed_steps():
    """Then the effective noise falls towards a limit, without a plateau (8.6)."""
    found = batch_size_noise(1000, 1.0, DELTA, [50, 100, 400, "full"], steps=30)
    assert [c.steps for c in found] == [30] * 4
    noise = [c.effective_noise for c in found]
    assert noise == sorted(noise, reverse=True)


def test_too_few_epochs_says_so():
    advice = batch_size_advice(1000, 1, 1.0, DELTA, candidates=[100, 500, "full"])
    assert advice.batch_size == 100 and advice.good == ()
    assert "too few epochs" in str(advice) and "more epochs" in advice.reason


def test_text():
    advice = batch_size_advice(50_000, 8, 2.0, DELTA)
    text = str(advice)
    assert "Expected batch size 4096" in text and "costs no privacy" in text
    assert "within 10 %" in advice.reason and "up to 16384" in advice.reason
    lines = advice.table().splitlines()
    assert len(lines) == 1 + len(advice.candidates)
    assert sum("recommended" in line for line in lines) == 1
    assert sum("too few steps" in line for line in lines) == 2


def test_picture(tmp_path):
    figure = batch_size_advice(1437, 8, 2.0, DELTA).plot(tmp_path / "a" / "noise.png")
    check_picture(figure, tmp_path / "a" / "noise.png", labels=2)


NAMES = ["population", "epochs", "epsilon", "delta", "minimum_steps", "candidates"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, 0, "x", True])
@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments(name, bad):
    good = dict(zip(NAMES, [1000, 8, 1.0, DELTA, 20, [100]], strict=True))
    good[name] = [bad] if name == "candidates" else bad
    with pytest.raises(ValueError, match=name):
        batch_size_advice(**good)


def test_bad_settings():
    with pytest.raises(ValueError, match="tolerance"):
        batch_size_advice(1000, 8, 1.0, DELTA, tolerance=math.nan)
    with pytest.raises(ValueError, match="convention"):
        batch_size_advice(1000, 8, 1.0, DELTA, convention="round")
    with pytest.raises(ValueError, match="candidates must be at most 1000, got 2000"):
        batch_size_advice(1000, 8, 1.0, DELTA, candidates=[2000])
    with pytest.raises(ValueError, match="candidates must not be empty"):
        batch_size_advice(1000, 8, 1.0, DELTA, candidates=[])
    for both in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(ValueError, match="either epochs or steps"):
            batch_size_noise(1000, 1.0, DELTA, [10], **both)


def test_recipe():
    recipe = tuning.three_step_recipe(
        1437,
        8,
        2.0,
        DELTA,
        learning_rate=0.1,
        at_batch_size=32,
        clip_norms=(0.1, 1.0, 10.0),
        seeds=(0,),
        candidates=[64, 128, 256, 512],
    )
    assert recipe.advice.batch_size == 128
    assert recipe.grid.learning_rates == pytest.approx((0.2 / 3, 0.2, 0.6))
    assert "costs privacy" in str(recipe) and "0.1, 1, 10" in str(recipe)
    result = tuning.run_grid(
        recipe.grid, lambda p: -abs(p.clip_norm - 1.1) - abs(p.learning_rate - 0.6)
    )
    finer = recipe.refine(result)
    assert set(finer.clip_norms) == {1.0, 0.1}
    assert finer.learning_rates[::2] == pytest.approx((0.2, 0.6, 1.8))
    assert len(finer.learning_rates) == 5
    nothing = tuning.run_grid(recipe.grid, lambda p: math.nan)
    with pytest.raises(ValueError, match="result"):
        recipe.refine(nothing)
