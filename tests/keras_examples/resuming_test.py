"""A training of a program that is killed goes on, and its epsilon stays true."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import mnist_cnn, transfer_film
from keras_examples.resuming import Unfinished
from tests.keras_examples import image_files
from tests.output_files import rows_of, words_of
from tests.source_tree import ROOT
from tfdpclip.accounting import Ledger


def test_rows_come_back_with_nan_and_infinity(tmp_path):
    used = mnist_cnn.Settings(output_dir=str(tmp_path))
    begun = Unfinished(used, examples=64)
    begun.add({"epoch": 0, "step": 0, "epsilon": 0.0, "loss": math.nan})
    begun.add({"epoch": 1, "step": 4, "epsilon": math.inf, "loss": 2.0})
    begun.add({"epoch": 1, "step": 4, "epsilon": math.inf, "loss": 1.0})
    first, last = Unfinished(used, examples=64).rows
    assert math.isnan(first["loss"]) and first["step"] == 0
    assert last == {"epoch": 1, "step": 4, "epsilon": math.inf, "loss": 1.0}


@pytest.mark.parametrize(
    ("change", "facts"), [({"clip_norm": 2.0}, {}), ({}, {"examples": 65})]
)
def test_another_training_never_goes_on_from_a_stopped_one(tmp_path, change, facts):
    used = mnist_cnn.Settings(output_dir=str(tmp_path))
    Unfinished(used, examples=64)
    other = dataclasses.replace(used, **change)
    name = next(iter(change | facts))
    with pytest.raises(settings.UsageError, match=f"under another --{name}"):
        Unfinished(other, **{"examples": 64} | facts)


def test_where_data_lie_and_what_figures_look_like_may_change(tmp_path):
    used = mnist_cnn.Settings(output_dir=str(tmp_path))
    Unfinished(used)
    Unfinished(dataclasses.replace(used, data_dir="x", figure_format=("pdf",))).remove()
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("steps", [1, 8, 25, 97, 98, 391, 2719])
def test_parts_of_a_run_make_all_of_its_steps(steps):
    parts = transfer_film._parts(steps)
    assert steps % parts == 0 and (parts > 1 or steps == 1)


def start(program, out, *flags):
    log = (out.parent / "log").open("a")
    return subprocess.Popen(
        [sys.executable, "-m", f"keras_examples.{program}", f"--output_dir={out}"]
        + list(flags),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def kill_after(process, ready):
    """Kills a process as soon as something is true, and before it ends by itself."""
    until = time.monotonic() + 200
    while not ready() and time.monotonic() < until:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


MANY = ["--epochs=200", "--batch_size=16"]
PROGRAMS = {
    "mnist_cnn": [*MANY, "--clip=quantile", "--noise_multiplier=3"],
    "gradient_symmetry": [
        *MANY,
        "--scatter_epochs=0,1",
        "--planes_epoch=1",
        "--cosine_epochs=1",
        "--score_epochs=2",
        "--samples=16",
        "--permutations=9",
    ],
    "batch_clipping": [
        *MANY,
        "--network=bn_lenet5",
        "--dataset=mnist",
        "--sigma=2",
        "--baseline_epochs=1",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_killed_program_goes_on_with_the_same_command(tmp_path, program):
    """All steps run, no epoch is lost or twice, and epsilon counts what ran twice."""
    image_files.mnist_idx(tmp_path, 64)
    out = tmp_path / "out"
    flags = [f"--data_dir={tmp_path}", *PROGRAMS[program]]
    rows = out / "unfinished" / "rows.json"

    def trained(epochs):
        return lambda: rows.exists() and len(json.loads(rows.read_text())) > epochs

    kill_after(start(program, out, *flags), trained(5))
    kill_after(start(program, out, *flags), trained(20))
    counted = Ledger.load(out / "unfinished" / "privacy.json")
    assert counted.steps >= 20 * 3
    assert start(program, out, *flags).wait(400) == 0, (tmp_path / "log").read_text()
    assert not (out / "unfinished").exists()
    log = (tmp_path / "log").read_text()
    assert "Going on with the training in" in log

    found = [row for row in rows_of(out, "history") if row.get("run") != "SGD"]
    assert [int(float(row["epoch"])) for row in found] == list(range(201))
    steps = [float(row["step"]) for row in found]
    each = steps[1]
    assert steps == [each * k for k in range(201)]
    epsilons = [float(row["epsilon"]) for row in found]
    assert epsilons == sorted(epsilons)
    if program == "batch_clipping":
        return  # Its noise and scheme are another test's.
    z = 3.0 if program == "mnist_cnn" else 1.1
    scheme = dpc.sampling.Poisson(16 / 64)
    planned = int(steps[-1])
    # A kill costs at most the epoch in flight and a hundredth written ahead.
    most = planned + 2 * (int(each) + planned // 100 + 1)
    low, high = (dpc.accounting.epsilon(z, n, scheme, 1e-5) for n in (planned, most))
    assert low * (1 - 1e-3) <= epsilons[-1] <= high * (1 + 1e-3)
    assert f"{epsilons[-1]:.3g}"[:3] in words_of(out)


@pytest.mark.slow
def test_a_killed_transfer_goes_on_with_the_same_command(tmp_path):
    """Its steps are saved in parts; epsilon counts the part that ran again."""
    out = tmp_path / "out"
    flags = ["--dataset=digits", "--model=vit_micro", "--pretraining_epochs=1"]
    flags += ["--batch_size=64", "--epochs=40"]
    ledger = out / "unfinished" / "privacy.json"

    def trained():
        return ledger.exists() and Ledger.load(ledger).steps > 100

    kill_after(start("transfer_film", out, *flags), trained)
    assert start("transfer_film", out, *flags).wait(400) == 0, (
        tmp_path / "log"
    ).read_text()
    (row,) = rows_of(out, "run")
    steps, rate, z = int(row["T"]), float(row["q"]), float(row["sigma"])
    parts = transfer_film._parts(steps)
    assert steps > 200 and parts > 5
    scheme = dpc.sampling.Poisson(rate)
    low, high = (
        dpc.accounting.epsilon(z, steps + n, scheme, 1e-5)
        for n in (0, steps // parts + steps // 100 + 2)
    )
    assert low * (1 - 1e-3) <= float(row["epsilon"]) <= high * (1 + 1e-3)
    assert "Going on with the training in" in (tmp_path / "log").read_text()
    assert not ledger.exists()


@pytest.mark.slow
def test_a_kill_in_the_comparison_keeps_the_private_training(tmp_path):
    """No private step runs again, and the report has all of its epochs."""
    image_files.mnist_idx(tmp_path, 64)
    out, log = tmp_path / "out", tmp_path / "log"
    flags = [f"--data_dir={tmp_path}", "--network=bn_lenet5", "--dataset=mnist"]
    flags += ["--batch_size=16", "--epochs=2", "--baseline_epochs=300", "--sigma=2"]
    kill_after(
        start("batch_clipping", out, *flags),
        lambda: log.exists() and "SGD without privacy" in log.read_text(),
    )
    steps = Ledger.load(out / "unfinished" / "privacy.json").steps
    before = (out / "unfinished" / "rows.json").read_text()
    again = start("batch_clipping", out, *flags)
    kill_after(again, lambda: log.read_text().count("SGD without privacy:") > 1)
    assert Ledger.load(out / "unfinished" / "privacy.json").steps == steps
    assert (out / "unfinished" / "rows.json").read_text() == before
