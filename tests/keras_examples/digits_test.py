"""The digits program keeps its promises, with each clip rule, and reports its run."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from matplotlib import image

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import digits, tracking

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = ["step", "epoch", "epsilon", "test_accuracy", "clip_norm"]
QUICK = ("--baseline_epochs=0", "--noshow_true_norms")
UNPROTECTED = [f"unprotected_norm_{name}" for name in ("p10", "quantile", "p90")]


class Output:
    """The printed text and the files of a run."""

    def __init__(self, directory: pathlib.Path, *arguments: str):
        self.directory = directory
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            digits.main(["digits", f"--output_dir={directory}", *arguments])
        self.printed = printed.getvalue()
        self.report = (directory / "report.txt").read_text()
        self.config = json.loads(
            (directory / "config.json").read_text(), parse_constant=pytest.fail
        )
        with open(directory / "history.csv", newline="") as file:
            reader = csv.DictReader(file)
            self.columns = reader.fieldnames
            rows = list(reader)
        self.history = {c: [float(row[c]) for row in rows] for c in self.columns}
        # Prose is wrapped; a test looks for words.
        self.words = " ".join(self.report.split())


RULES = ("quantile", "fixed", "automatic")


# CI runs `make demo` besides, which is the first of them.
@pytest.fixture(
    scope="module",
    params=[pytest.param(rule, marks=pytest.mark.slow) for rule in RULES],
)
def short(request, tmp_path_factory) -> Output:
    """Two epochs with each clip rule."""
    return Output(
        tmp_path_factory.mktemp(request.param) / "deep" / "inside",
        f"--clip={request.param}",
        "--epochs=2",
        "--baseline_epochs=1",
    )


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Output:
    """Enough epochs to learn something, with the default settings."""
    return Output(tmp_path_factory.mktemp("longer"), "--epochs=12")


@pytest.mark.slow
def test_writes_all_files_and_a_picture(short):
    names = {path.name for path in short.directory.iterdir()}
    assert names == {"report.txt", "digits.png", "config.json", "history.csv"}
    picture = image.imread(short.directory / "digits.png")
    assert picture.shape[0] > 500 and picture.shape[1] > 1000
    assert 0.01 < np.mean(picture[..., :3] < 0.9) < 0.5
    assert short.report in short.printed
    assert str(short.directory) in short.printed


@pytest.mark.slow
def test_history_has_a_row_per_epoch(short):
    assert short.columns == COLUMNS + UNPROTECTED
    assert short.history["epoch"] == [0, 1, 2]
    assert short.history["step"] == [0, 6, 12]
    assert short.config["derived"]["steps"] == 12


@pytest.mark.thinned(3)
def test_epsilon_rises_and_stays_within_the_budget(short):
    epsilon = short.history["epsilon"]
    assert epsilon[0] == 0
    assert all(np.diff(epsilon) > 0)
    assert 2.99 < epsilon[-1] <= 3
    assert epsilon[-1] == short.config["result"]["epsilon"]
    assert short.config["result"]["private"] is True


def test_epsilon_is_what_accounting_says(short):
    derived = short.config["derived"]
    rate = derived["sampling_rate"]
    assert rate == derived["expected_batch_size"] / derived["train_size"]
    expected = dpc.accounting.epsilon(
        derived["noise_multiplier"], 12, dpc.sampling.Poisson(rate), 1e-5
    )
    assert short.history["epsilon"][-1] == pytest.approx(expected, rel=1e-4)


def test_report_says_what_the_claim_means(short):
    for words in (
        "test accuracy",
        "without privacy",
        "clip norm",
        "(3, 1e-05)-differential privacy",
        "add or remove one record",
        "Poisson, rate 0.178",
        "privacy loss distributions (pld)",
        "12, each with 256 of 1437 images on average",
        f"multiplier {short.config['derived']['noise_multiplier']:.6g}",
        "images, 1437, is treated as public",
        "WITHOUT noise and is outside the guarantee",
        "only because this data set is public",
        "not counted",
        "find a record that was in the data at most",
    ):
        assert words in short.words, words
    assert "not private" not in short.words.lower()


def test_clip_norm_is_reported(short):
    norms = short.history["clip_norm"]
    rule = short.config["flags"]["clip"]
    if rule == "quantile":
        assert norms[0] == pytest.approx(0.1)
        assert norms[2] > norms[1] > norms[0]
        assert f"{norms[-1]:.4g} at the end" in short.words
    elif rule == "fixed":
        assert norms == pytest.approx([0.1] * 3)
        assert "0.1, fixed" in short.words
    else:
        assert all(map(math.isnan, norms))
        assert short.config["result"]["final_clip_norm"] is None
        assert "the automatic rule scales every gradient" in short.words


def test_config_has_all_flags_and_versions(short):
    assert set(short.config["flags"]) == set(settings.of(digits.Settings))
    assert short.config["versions"]["tensorflow"].startswith("2.")


@pytest.mark.slow
def test_learns_with_privacy(longer):
    assert longer.config["flags"]["epsilon"] == 3
    assert longer.history["epsilon"][-1] <= 3
    assert longer.history["test_accuracy"][-1] > 0.6
    assert longer.history["test_accuracy"][0] < 0.35


@pytest.mark.slow
def test_comparison_without_privacy_learns_more(longer):
    baseline = longer.config["result"]["non_private_test_accuracy"]
    assert baseline > 0.93
    assert f"{baseline:.1%} (same network" in longer.words


@pytest.mark.slow
def test_clip_norm_comes_near_the_true_quantile(longer):
    true = longer.history["unprotected_norm_quantile"][-1]
    assert true / 3 < longer.history["clip_norm"][-1] < 3 * true


@pytest.mark.slow
def test_seed_repeats_the_run_and_forfeits_privacy(tmp_path):
    arguments = ("--seed=5", "--epochs=1", *QUICK)
    one, two = (Output(tmp_path / name, *arguments) for name in ("one", "two"))
    for column in one.columns:
        # Threads may add in a different order.
        assert one.history[column] == pytest.approx(two.history[column], rel=1e-3)
    assert "Privacy: not private" in one.words
    assert "This run guarantees nothing" in one.words
    assert one.config["result"]["private"] is False


@pytest.mark.slow
def test_infinite_epsilon_is_no_privacy(tmp_path):
    output = Output(tmp_path, "--epsilon=inf", "--epochs=2", "--seed=1", *QUICK)
    assert output.config["derived"]["noise_multiplier"] == 0
    assert output.config["result"]["epsilon"] == "inf"
    assert "Privacy: not private" in output.words
    assert output.history["test_accuracy"][-1] > 0.3


@pytest.mark.slow
def test_nothing_unprotected_is_measured_if_not_wanted(tmp_path):
    output = Output(tmp_path, "--epochs=1", *QUICK)
    assert output.columns == COLUMNS
    assert "WITHOUT noise" not in output.words
    assert "without privacy" not in output.words


@pytest.mark.slow
def test_accumulation_changes_no_step_count(tmp_path):
    output = Output(
        tmp_path,
        "--accumulation_steps=3",
        "--epochs=1",
        "--optimizer=adam",
        *QUICK,
    )
    assert output.history["step"] == [0, 6]
    assert output.config["derived"]["physical_batch_size"] < 256
    assert "step 6 of 6" in output.printed


@pytest.mark.parametrize(
    "argument, good",
    [
        ("--epsilon=-1", "3"),
        ("--epsilon=nan", "3"),
        ("--epsilon=three", "3"),
        ("--delta=0", "1e-05"),
        ("--delta=1", "1e-05"),
        ("--clip=median", "quantile"),
        ("--clip_norm=0", "0.1"),
        ("--clip_norm=inf", "0.1"),
        ("--target_quantile=1.5", "0.5"),
        ("--clip_learning_rate=-0.2", "0.2"),
        ("--batch_size=0", "256"),
        ("--batch_size=25.6", "256"),
        ("--accumulation_steps=0", "1"),
        ("--epochs=0", "60"),
        ("--optimizer=lion", "sgd"),
        ("--learning_rate=0", "0.07"),
        ("--momentum=1", "0.9"),
        ("--seed=-1", "1"),
        ("--baseline_epochs=-1", "20"),
    ],
)
def test_bad_flag_is_named_with_a_good_value(argument, good):
    with pytest.raises(settings.UsageError) as caught:
        settings.parse(digits.Settings, ["digits", argument])
    assert argument in str(caught.value)
    assert good in str(caught.value)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--batch_size=2000"], "flag --batch_size=2000: there are only 1437"),
        (["--batch_size=2", "--epsilon=0.05"], "flag --batch_size=2: too small for"),
        (["--output_dir=/dev/null/x"], "flag --output_dir=/dev/null/x"),
    ],
)
def test_flags_that_do_not_fit_are_named(arguments, named, tmp_path):
    given = ["digits", f"--output_dir={tmp_path}", "--epochs=1", *arguments]
    with pytest.raises(SystemExit, match=named) as caught:
        digits.main(given)
    assert "for example" in str(caught.value)


def test_stray_argument_is_refused():
    with pytest.raises(SystemExit, match="Unknown argument 'epsilon=3'"):
        digits.main(["digits", "epsilon=3"])


def test_split_is_fixed_and_stratified():
    (images, labels), (test_images, test_labels) = digits.load_data()
    again, _ = digits.load_data()
    assert images.shape == (1437, 8, 8, 1) and test_images.shape == (360, 8, 8, 1)
    assert np.array_equal(images, again[0])
    assert images.min() == -1 and images.max() == 1
    assert np.ptp(np.bincount(labels)) <= 8 and np.ptp(np.bincount(test_labels)) <= 3


def test_tracker_measures_the_true_quantile():
    (images, labels), test = digits.load_data()
    images, labels = images[:21], labels[:21]
    model = digits.build_network()
    optimizer = dpc.keras.DPSGD(clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(optimizer)
    tracker = tracking.Tracker(test, unprotected=(images, labels), quantile=0.25)
    tracker.set_model(model)
    tracker.on_train_begin()

    norms = []
    for x, y in zip(images, labels, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.keras.losses.sparse_categorical_crossentropy(
                y[np.newaxis], model(x[np.newaxis]), from_logits=True
            )
        norms.append(tf.linalg.global_norm(tape.gradient(loss, model.weights)).numpy())
    row = tracker.rows[0]
    expected = np.quantile(norms, [0.1, 0.25, 0.9])
    assert [row[column] for column in UNPROTECTED] == pytest.approx(expected, rel=1e-4)
    right = np.argmax(model.predict(test[0], verbose=0), axis=1) == test[1]
    assert row["test_accuracy"] == pytest.approx(np.mean(right))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_reads_well(stream):
    progress = tracking.Progress("training", 200, None, 2, stream)
    progress.set_params({"epochs": 40})
    progress.on_train_begin()
    for epoch in range(40):
        for batch in range(10):
            progress.on_train_batch_end(batch)
        progress.on_epoch_end(epoch)
    progress.on_train_end()
    shown = stream.getvalue()
    if stream.isatty():
        assert "training   0%" in shown and "training 100%" in shown
        assert shown.count("\n") == 1
    else:
        assert shown.count("\n") == 11 and "\r" not in shown
        assert re.search(r"step 200 of 200, .* s each\n$", shown)


def test_a_single_epoch_shows_lines_before_its_end():
    stream = io.StringIO()
    progress = tracking.Progress("training", 200, stream=stream)
    progress.set_params({"epochs": 1})
    progress.on_train_begin()
    for batch in range(199):
        progress.on_train_batch_end(batch)
    assert stream.getvalue().count(" left") == 9


@pytest.mark.slow
def test_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "keras_examples.digits", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("--epochs=1", f"--output_dir={tmp_path}", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "differential privacy" in done.stdout
    assert (tmp_path / "digits.png").exists()
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr

    refused = run("--delta=2")
    assert refused.returncode != 0
    assert "--delta=2" in refused.stderr and "1e-05" in refused.stderr
    assert "Traceback" not in refused.stderr
