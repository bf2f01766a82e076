"""The comparison of clip rules: equal privacy, honest words, all files."""

from __future__ import annotations

import numpy as np
import pytest

import tfdpclip as dpc
from driver_kit import intervals
from keras_examples import compare, digits_data, networks, trials
from tests.output_files import rows_of, words_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare")
    compare.main(
        [
            "compare",
            f"--output_dir={path}",
            "--rules=fixed,automatic,scaled",
            "--variants=imbalanced",
            "--epsilons=8",
            "--clip_norms=1",
            "--learning_rates=0.1",
            "--epochs=2",
            "--repeats=2",
            "--tuning_repeats=1",
            "--batch_size=128",
        ]
    )
    return path


def test_variants_share_their_split():
    plain, hard, imbalanced = map(digits_data.load_data, digits_data.VARIANTS)
    assert len(plain.train[0]) + len(plain.public[0]) + len(plain.test[0]) == 1797
    np.testing.assert_array_equal(plain.train[1], hard.train[1])
    np.testing.assert_array_equal(plain.test[0], imbalanced.test[0])
    assert np.abs(hard.train[0] - plain.train[0]).mean() > 0.3
    counts = np.bincount(imbalanced.train[1])
    assert counts[5:].max() < 20 < 100 < counts[:5].min()


def test_network_has_the_parameters_that_it_says():
    assert networks.digits_network().count_params() == 2778


@pytest.mark.slow
def test_results_have_intervals_and_choices(directory):
    rows = {row["rule"]: row for row in rows_of(directory, "results")}
    assert set(rows) == {"fixed 1", "fixed", "automatic", "scaled"}
    for row in rows.values():
        low, mean, high = (float(row[n]) for n in ("low", "macro_accuracy", "high"))
        assert low <= mean <= high
        assert 0 < mean < 1
        assert row["learning_rate"] == "0.1"


def test_report_states_privacy_and_what_is_not_counted(directory):
    report = words_of(directory)
    size = len(digits_data.load_data("imbalanced").train[0])
    for words in (
        "(8, 1e-05)-differential privacy",
        f"Poisson, rate {128 / size:.6g}",
        "steps: 12" if 2 * -(-size // 128) == 12 else f"steps: {2 * -(-size // 128)}",
        "which they do not count",
        "automatic against fixed: imbalanced at epsilon 8:",
        "scaled against fixed",
    ):
        assert words in report, words
    assert (directory / "compare.png").stat().st_size > 10_000


def test_all_rules_get_the_same_noise_multiplier():
    used = compare.Settings(epochs=1, batch_size=256)
    problem = compare.problem("plain", used)
    noises = {
        trials.Trainer(make(1.0), problem, 4.0).noise_multiplier
        for make, _ in compare.RULES.values()
    }
    assert len(noises) == 1
    spent = dpc.accounting.epsilon(
        noises.pop(),
        5,
        dpc.sampling.Poisson(256 / len(problem.data.train[0])),
        used.delta,
    )
    assert spent == pytest.approx(4.0, rel=1e-3)


def row(mean, error, runs=5):
    return {"macro_accuracy": mean, "standard_error": error, "runs": runs}


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (row(0.9, 0.01), row(0.8, 0.01), "better"),
        (row(0.8, 0.01), row(0.9, 0.01), "worse"),
        (row(0.81, 0.01), row(0.8, 0.01), "not told apart"),
    ],
)
def test_verdict_is_by_the_interval(one, other, words):
    difference, half, said = intervals.verdict(one, other, "macro_accuracy")
    assert said == words
    # Welch with equal errors: 8 degrees of freedom, sqrt(2) times the error.
    assert half == pytest.approx(2.306 * np.sqrt(2) * 0.01, rel=1e-3)


def test_too_large_a_batch_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--batch_size=5000: there are only"):
        compare.main(["compare", "--batch_size=5000", f"--output_dir={tmp_path}"])
