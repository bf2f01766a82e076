"""The programs: each is its own benchmark, and errors are sentences."""

import io
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

from tests.tff_tasks import fixtures
from tff_tasks import command, digits_task, program, registry, reporting
from tff_tasks.config import RunConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", registry.TASKS)
def test_every_benchmark_has_a_program(monkeypatch, name):
    started = []
    monkeypatch.setattr(command, "main", started.append)
    runpy.run_module(f"tff_tasks.{name}", run_name="__main__")
    assert started == [name]


@pytest.mark.parametrize(
    "task, arguments, message",
    [
        ("emnist_character", [], "data_dir must be given.*--synthetic"),
        ("emnist_character", ["--data_dir={}"], "emnist_all.sqlite is missing"),
        ("stackoverflow_tag", ["--data_dir={}"], "word_count is missing"),
        ("emnist_character", ["--rounds=0"], "--rounds=0: must be a whole number"),
        ("digits", ["--clients_per_round=300"], "only 200 clients"),
        ("digits", ["--num_clients=5000"], "num_clients must be at most"),
    ],
)
def test_errors_are_sentences(tmp_path, task, arguments, message):
    filled = [argument.format(tmp_path) for argument in arguments]
    with pytest.raises(SystemExit, match=message):
        command.main(task, [*filled, f"--output_dir={tmp_path / 'out'}"])


@pytest.mark.slow
def test_other_settings_in_the_same_directory_are_a_sentence(tmp_path, capsys):
    arguments = [
        f"--output_dir={tmp_path}",
        "--engine=local",
        "--num_clients=30",
        "--hidden_units=4",
        "--clients_per_round=10",
        "--sampling=poisson",
        "--accountant=rdp",
        "--rounds=1",
        "--notensorboard",
    ]
    command.main("digits", arguments)
    printed = capsys.readouterr().out
    assert "differential privacy" in printed and f"Written to {tmp_path}" in printed
    assert "round 1 of 1" in printed
    with pytest.raises(SystemExit, match="holds a run with clip=0.1, not 0.2"):
        command.main("digits", [*arguments, "--clip=0.2"])


def test_help_lists_flags(capsys):
    command.main("cifar100_image", ["--help"])
    text = capsys.readouterr().out
    assert "--norm" in text and "python -m tff_tasks.cifar100_image" in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_reads_well(stream):
    config = RunConfig("digits")
    progress = reporting.Progress(config, 0, 100, stream)
    for number in range(1, 101):
        row = {"round": number, "clip_norm": 0.25, "unclipped_fraction": 0.5}
        if number % 10 == 0:
            row |= {"epsilon": number / 10, "eval_accuracy": 0.75}
        progress.show(row, "accuracy")
    progress.close()
    shown = stream.getvalue()
    for words in ("accuracy 0.75", "clip 0.25", "unclipped 0.5", "epsilon 10"):
        assert words in shown
    if not stream.isatty():
        assert shown.count("\n") == 11 and "\r" not in shown


def test_no_progress_if_quiet(capsys):
    progress = reporting.Progress(RunConfig("digits", quiet=True), 0, 1)
    progress.show({"round": 1}, "accuracy")
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_digits_are_dealt_out_once_and_unevenly():
    labels = np.repeat(np.arange(10), 50)
    dealt = digits_task.dirichlet_split(labels, 40, 0.1, np.random.default_rng(0))
    assert sorted(np.concatenate(dealt)) == list(range(500))
    assert {len(indices) for indices in dealt} == {12, 13}
    even = digits_task.dirichlet_split(labels, 40, 1e4, np.random.default_rng(0))
    # How many of a client's examples have its most frequent label.
    top = [
        np.mean([np.bincount(labels[i]).max() / len(i) for i in split])
        for split in (dealt, even)
    ]
    assert top[0] > top[1] + 0.2


@pytest.mark.slow
def test_a_program_ends_its_workers_and_its_output(data_dir, tmp_path):
    """A pipe ends with the program: no child process keeps it open."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tff_tasks.emnist_character",
            f"--data_dir={data_dir}",
            f"--output_dir={tmp_path}",
            "--rounds=1",
            "--clients_per_round=2",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stdout
    assert "differential privacy" in done.stdout


@pytest.mark.parametrize("engine", ["local", "tff"])
@pytest.mark.slow
def test_a_round_without_clients_is_a_round(tmp_path, engine):
    """Poisson sampling at a rate of one in thirty often draws no client."""
    config = RunConfig(
        "digits",
        str(tmp_path),
        options={"num_clients": 30, "hidden_units": 4},
        rounds=5,
        clients_per_round=1,
        noise_multiplier=0.05,
        sampling="poisson",
        accountant="rdp",
        engine=engine,
        seed=1,
        log_cohorts=True,
        quiet=True,
        tensorboard=False,
    )
    result = program.run(config)
    lines = (tmp_path / "cohorts.jsonl").read_text().splitlines()
    assert any('"clients": []' in line for line in lines)
    assert all(np.isfinite(w).all() for w in result.weights)


def test_fitting_names_every_task_with_files():
    assert set(fixtures.FITTING) | {"digits"} == set(registry.TASKS)
