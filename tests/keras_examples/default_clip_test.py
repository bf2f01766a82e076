"""The study of default clips: every rule against fixed norms, and nothing twice."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tfdpclip as dpc
from keras_examples import default_clip, text_records
from tests.keras_examples import feature_files, image_files
from tests.output_files import rows_of, words_of

SHORT = [
    "--tasks=digits",
    "--epsilons=8",
    "--clip_norms=0.3,3",
    "--learning_rates=0.1,0.3",
    "--epochs=2",
    "--batch_size=256",
    "--repeats=2",
]


def study(directory, *options):
    arguments = [*SHORT, f"--output_dir={directory}", *options]
    default_clip.main(["default_clip", *arguments])


@pytest.mark.slow
def test_a_stopped_study_goes_on_and_compares_with_the_best_fixed_norm(tmp_path):
    study(tmp_path, "--rules=quantile 0.5")
    first = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["place"][2] for line in first] == ["fixed", "quantile 0.5"]
    study(tmp_path, "--rules=quantile 0.5,quantile")
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert lines[:2] == first and len(lines) == 3
    results = {row["rule"]: row for row in rows_of(tmp_path, "results")}
    assert set(results) == {"fixed 0.3", "fixed 3", "fixed", "quantile 0.5", "quantile"}
    for row in rows_of(tmp_path, "gaps"):
        gap = float(row["accuracy"]) - float(row["best_fixed"])
        assert float(row["gap"]) == pytest.approx(gap, abs=0.011)
        mean = 100 * float(results["fixed"]["macro_accuracy"])
        assert float(row["best_fixed"]) == pytest.approx(mean, abs=0.006)
    rates = {float(row["learning_rate"]) for row in rows_of(tmp_path, "tuning")}
    assert max(rates) == pytest.approx(4.8)  # 16 times, where C multiplies the rate.
    assert "(8, 1e-05)-differential privacy" in words_of(tmp_path)
    with pytest.raises(SystemExit, match="measured with other settings"):
        study(tmp_path, "--epochs=3")


def test_lines_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "trials.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="line 1 of .*trials.jsonl cannot be read"):
        study(tmp_path)


def test_features_of_a_network_that_saw_the_records_are_refused(tmp_path):
    path = tmp_path / "features.npz"
    frozen = default_clip.Settings(batch_size=10)
    feature_files.write_features(path)
    problem = default_clip.problem(str(path), frozen)
    assert problem.name == f"{tmp_path.name}/features"
    assert problem.network().output_shape[-1] == problem.data.train[1].max() + 1
    feature_files.write_features(path, ledger=feature_files.film_ledger())
    with pytest.raises(SystemExit, match="trained on these very"):
        study(tmp_path / "run", "--tasks=features", f"--features={path}")
    with pytest.raises(SystemExit, match="--features is missing"):
        study(tmp_path / "run", "--tasks=features")


def test_every_rule_of_the_study_needs_no_norm():
    for name, make in default_clip.RULES.items():
        assert make() == dpc.clipping.as_rule(make()), name
    every = default_clip.Settings(rules=tuple(default_clip.RULES))
    fixed, *others = default_clip.candidates(every)
    assert fixed.each and len(fixed.norms) == 5
    assert [one.name for one in others] == list(default_clip.RULES)


def test_images_are_read_and_classes_made_rare(tmp_path):
    (tmp_path / "fashion_mnist").mkdir()
    image_files.mnist_idx(tmp_path / "fashion_mnist", count=400)
    used = default_clip.Settings(data_dir=str(tmp_path), batch_size=10)
    problem = default_clip.problem("fashion_mnist", used)
    assert problem.network().count_params() == 26_010
    whole = problem.data.train[1]
    rare = default_clip.problem("imbalanced_fashion", used).data.train[1]
    np.testing.assert_array_equal(np.bincount(whole)[:5], np.bincount(rare)[:5])
    assert np.bincount(rare)[5:].max() <= -(-np.bincount(whole)[5:].max() // 10)
    few = default_clip.Settings(data_dir=str(tmp_path), batch_size=10, examples=20)
    assert len(default_clip.problem("fashion_mnist", few).data.train[1]) == 20
    with pytest.raises(SystemExit, match="--data_dir is missing"):
        study(tmp_path, "--tasks=mnist")


def test_speeches_are_learned_by_the_kind_of_play_without_their_speakers(tmp_path):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    for stem, word in (("hamlet", "skull"), ("john", "crown"), ("tempest", "isle")):
        says = " ".join([word] * 30)
        folder.joinpath(f"{stem}_gut.txt").write_text(
            "\n\n".join(f"{name}.\n{says}, {k}!" for k in range(5) for name in "ABCD")
            + "\n\nA.\nToo short, and left out."
        )
    used = default_clip.Settings(data_dir=str(tmp_path), batch_size=10)
    bags = default_clip.problem("plays", used)
    assert bags.network().count_params() == 3 * 2049
    (x, y), (x_test, y_test) = bags.data.train, bags.data.test
    assert len(x) == 48 and len(x_test) == 12
    # A word for each kind of play; neither the numbers nor the speakers are words.
    np.testing.assert_array_equal(x.sum(axis=1), 1)
    kinds = {label: set(x[y == label].argmax(axis=1)) for label in range(3)}
    assert len(set.union(*kinds.values())) == 3
    for label, words in kinds.items():
        assert set(x_test[y_test == label].argmax(axis=1)) <= words
    [skull] = kinds[2]
    assert skull == text_records.hashed("skull", 1, 2048)[0]
    rows = default_clip.problem("plays_embedding", used)
    assert rows.data.train[0].shape == (48, 64)
    assert rows.network()(rows.data.train[0][:2]).shape == (2, 3)
    with pytest.raises(SystemExit, match="--data_dir is missing"):
        study(tmp_path, "--tasks=plays")
