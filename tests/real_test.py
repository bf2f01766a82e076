"""The runs on real data: right commands, and visible failures."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import shlex

import pytest

from driver_kit import settings
from tests.source_tree import ROOT
from tff_tasks import command, registry
from tools import real, real_runs

_CONFIGS = ("SweepConfig", "RecipeConfig", "RatesConfig", "PlotConfig")
README = ROOT / "docs" / "results" / "real" / "README.md"


def check_flags(line: str) -> None:
    """Raises if a program does not take these flags."""
    module, *flags = shlex.split(line)
    task = module.removeprefix("tff_tasks.")
    if task in registry.TASKS:
        command.config_from(task, flags)
        return
    program = importlib.import_module(module)
    kinds = [
        kind
        for name, kind in vars(program).items()
        if name == "Settings" or name in _CONFIGS
    ]
    assert len(kinds) == 1, module
    assert settings.parse(kinds[0], [module, *flags]) is not None


@pytest.mark.parametrize(
    "run", real_runs.RUNS, ids=[f"{run.form} {run.name}" for run in real_runs.RUNS]
)
def test_every_program_takes_its_flags(run):
    assert run.form in ("short", "long") and run.minutes > 0
    lines = run.commands("some data", "out of/here")
    for line in lines:
        check_flags(line)
    assert any(f"out of/here/{run.name}" in line for line in lines)


def test_names_are_unique_and_the_short_form_is_short():
    assert len({(run.form, run.name) for run in real_runs.RUNS}) == len(real_runs.RUNS)
    short = [run for run in real_runs.RUNS if run.form == "short"]
    assert 0 < sum(run.minutes for run in short) < 30


def test_a_wrong_flag_would_be_found():
    with pytest.raises(settings.UsageError, match="no_such_flag"):
        check_flags("keras_examples.mnist_cnn --no_such_flag=1")
    with pytest.raises(settings.UsageError, match="epochs"):
        check_flags("keras_examples.mnist_cnn --epochs=many")


def test_the_page_has_the_commands_of_the_long_form():
    """As they are, but for where the data are and where results go."""
    text = re.sub(r"\\\n\s*", "", README.read_text())
    for run in real_runs.RUNS:
        if run.form == "long":
            for line in run.commands("data", "runs/real/long"):
                assert f"python -m {line}" in text, line


@pytest.fixture
def runs(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    made = [
        real_runs.Run("good", "short", 1, ("platform --terse",)),
        real_runs.Run("bad", "short", 1, ("platform", "no_such_module_of_ours")),
        real_runs.Run("images", "short", 1, ("platform {data}/mnist",)),
        real_runs.Run("later", "short", 1, ("platform {all}/good/x",)),
    ]
    monkeypatch.setattr(real_runs, "RUNS", tuple(made))
    (tmp_path / "data").mkdir()
    return real.Settings(data_dir=f"{tmp_path}/data", output_dir=f"{tmp_path}/real")


def test_what_failed_is_said_and_what_ended_well_is_not_repeated(runs, tmp_path):
    both = dataclasses.replace(runs, only="good,bad")
    with pytest.raises(settings.UsageError, match="These failed:\nbad: see .*bad.txt"):
        real.rerun(both)
    assert "No module named" in (tmp_path / "real/short/bad.txt").read_text()
    log = tmp_path / "real/short/good.txt"
    log.write_text("the first")
    with pytest.raises(settings.UsageError, match="bad"):
        real.rerun(both)
    assert log.read_text() == "the first"
    only = real.rerun(dataclasses.replace(runs, only="good"))
    assert "1 runs ended well" in only
    times = (tmp_path / "real/wall_times.csv").read_text().splitlines()
    assert times[0] == "run,seconds" and times[1].startswith("short/good,")
    assert len(times) == 2


def test_missing_data_are_named_before_anything_runs(runs, tmp_path):
    with pytest.raises(settings.UsageError, match="no mnist in it.*IDX"):
        real.rerun(runs)
    with pytest.raises(settings.UsageError, match="--data_dir is missing"):
        real.rerun(dataclasses.replace(runs, data_dir=None))
    with pytest.raises(settings.UsageError, match="no 'worse'; it has bad, good, im"):
        real.rerun(dataclasses.replace(runs, only="worse"))
    assert not pathlib.Path(runs.output_dir).exists()


def test_a_dry_run_says_what_would_run(runs):
    said = real.rerun(dataclasses.replace(runs, dry_run=True, data_dir=None))
    assert "images (60 s):\n  python -m platform DIR/mnist" in said
    assert "In all: 4 min." in said
    later = real.rerun(dataclasses.replace(runs, dry_run=True, only="later"))
    # Its input comes first.
    assert later.index("good (60 s)") < later.index("later (60 s)")
    assert "/short/good/x" in later and "bad" not in later
