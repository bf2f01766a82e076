"""The search of learning rates: every pair once, no clipping, the best pair named."""

from __future__ import annotations

import json

import pytest

from tests.output_files import rows_of
from tff_tasks import program, rates

FLAGS = "--engine=local --rounds=2 --clients_per_round=5 --max_final_examples=50"


def config(directory, **changes):
    options = {
        "run_flags": FLAGS,
        "client_factors": "0.1,1",
        "server_factors": "0.5,1",
        "output_dir": str(directory),
    }
    return rates.RatesConfig(**options | changes)


@pytest.mark.slow
def test_every_pair_is_run_once_and_the_best_is_named(tmp_path, monkeypatch):
    text = rates.run(config(tmp_path))
    rows = rows_of(tmp_path, "rates")
    assert len(rows) == 4
    best = max(rows, key=lambda row: float(row["accuracy"]))
    assert f"client {float(best['client_learning_rate']):.4g}, server" in text
    assert "edge of the grid" in text
    for path in tmp_path.glob("*/config.json"):
        settings = json.loads(path.read_text())["settings"]
        assert settings["clipping"] == "none" and settings["noise_multiplier"] == 0
    base = config(tmp_path).base()
    ratios = {
        float(r["client_learning_rate"]) / base.client_learning_rate for r in rows
    }
    assert sorted(ratios) == pytest.approx([0.1, 1.0])
    assert (tmp_path / "rates.png").stat().st_size > 5000

    def again(config):
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr(program, "run", again)
    assert rates.run(config(tmp_path)) == text
    with pytest.raises(ValueError, match="other run_flags"):
        rates.run(config(tmp_path, run_flags=FLAGS + " --client_batch_size=3"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run_flags": "--noise_multiplier=1"}, "leave --noise_multiplier out"),
        ({"run_flags": "--clipping=fixed --clip=1"}, "leave --clipping out"),
        ({"client_factors": "0,1"}, "client_factors must be above 0"),
        ({"server_factors": "x"}, "server_factors must be numbers"),
    ],
)
def test_bad_settings_are_named(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        config(tmp_path, **changes)
