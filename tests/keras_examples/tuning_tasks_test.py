"""The tasks of nothing_to_tune: two halves, from a seed or from files."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from driver_kit.settings import UsageError
from keras_examples import made_data, plays, tuning_models, tuning_tasks
from tests.keras_examples import image_files

QUICK = [n for n in tuning_tasks.WITHOUT_FILES if n != "decoder_lora"]


@pytest.fixture
def data_dir(tmp_path):
    """A directory with a few images and speeches in the layout of the real data."""
    for folder in ("mnist", "fashion_mnist"):
        (tmp_path / folder).mkdir()
        image_files.mnist_idx(tmp_path / folder, count=100)
    (tmp_path / "shakespeare").mkdir()
    for stem, word in (("hamlet", "skull"), ("john", "crown"), ("tempest", "isle")):
        speech = " ".join([word] * 30)
        (tmp_path / "shakespeare" / f"{stem}_gut.txt").write_text(
            "\n\n".join(f"{name}.\n{speech}." for _ in range(5) for name in "ABCD")
        )
    return str(tmp_path)


def test_the_halves_share_no_task_and_have_the_same_kinds():
    assert len(tuning_tasks.TASKS) == len(set(tuning_tasks.TASKS)) >= 16
    assert {tuning_tasks.half_of(name) for name in tuning_tasks.CHOSEN_ON} == {
        "chosen on"
    }
    assert {tuning_tasks.half_of(name) for name in tuning_tasks.HELD_OUT} == {
        "held out"
    }


@pytest.mark.parametrize("name", QUICK)
def test_a_task_without_files_is_the_same_in_every_process(name):
    task, again = tuning_tasks.load(name), tuning_tasks.load(name)
    for one, other in zip(
        task.train + task.test, again.train + again.test, strict=True
    ):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()
    assert task.name == name and task.examples == len(task.train[0]) >= 1000
    assert len(task.test[0]) == len(task.test[1]) >= 500
    assert task.signature == again.signature


@pytest.mark.parametrize("name", ["digits", "heavy_years"])
def test_a_seed_is_one_set_of_first_weights(name):
    task = tuning_tasks.load(name)
    weights = [task.build(seed).get_weights() for seed in (0, 0, 1)]
    for one, same, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, same)
        # Biases begin at 0 with every seed.
        assert not one.any() or not np.array_equal(one, other)


def test_classes_are_as_rare_as_the_names_of_the_tasks_say():
    for name, share in (("table_2", 0.02), ("table_7", 0.07), ("table_25", 0.25)):
        # Of the training records alone: the share is exact over all records.
        labels = tuning_tasks.load(name).train[1]
        assert labels.mean() == pytest.approx(share, rel=0.15)
    counts = np.bincount(tuning_tasks.load("six_classes").train[1])
    assert len(counts) == 6 and counts.min() < 0.05 * counts.max()
    assert tuning_tasks.load("fifteen_labels").train[1].shape[1] == 15


@pytest.mark.slow
def test_images_and_plays_come_from_the_directory(data_dir):
    kinds = collections.defaultdict(set)
    for name in tuning_tasks.TASKS:
        if name in tuning_tasks.WITHOUT_FILES or name == "images_lora":
            continue
        task = tuning_tasks.load(name, data_dir)
        outputs = task.build(0)(task.train[0][:3]).shape
        assert outputs[0] == 3 and task.train[1].max() < outputs[1]
        assert 0 <= task.scored(task.build(0)) <= 100
        kinds[tuning_tasks.half_of(name)].add(task.kind)
    assert kinds["chosen on"] == kinds["held out"] == {"images", "text", "public"}


@pytest.mark.parametrize("name", ["mnist_1000", "plays_bag", "characters_lstm"])
def test_missing_files_are_named(name):
    with pytest.raises(UsageError, match="flag --data_dir is missing"):
        tuning_tasks.load(name)


def test_a_place_of_a_speech_is_followed_by_its_next_character(data_dir):
    (x, y), _ = plays.next_characters(data_dir, 12)
    for row, label in zip(x, y, strict=True):
        text = "".join(plays.ALPHABET[k] for k in [*row, label])
        assert any(text in " ".join([w] * 30) for w in ("skull", "crown", "isle"))


def test_scores_are_percentages_of_the_best():
    labels = np.array([0, 0, 0, 1])
    right, constant = np.eye(2)[labels], np.array([[1.0, 0.0]] * 4)
    for score, of_constant in (
        (tuning_models.accuracy, 75.0),
        (tuning_models.macro_recall, 50.0),
    ):
        assert score(labels, right) == 100
        assert score(labels, constant) == of_constant
    numbers = np.array([[1.0], [2.0], [4.0]])
    assert tuning_models.explained(numbers, numbers) == 100
    # A diverged model counts as one that explains nothing.
    assert tuning_models.explained(numbers, 1e6 * numbers) == 0
    assert tuning_models.area(numbers > 1.5, numbers) == 100


def test_outputs_that_are_not_finite_score_as_a_constant():
    task = tuning_tasks.load("table_25")
    model = task.build(0)
    model.set_weights([np.full_like(w, np.nan) for w in model.get_weights()])
    assert task.scored(model) == 50


def test_walks_have_the_transitions_of_their_class():
    transitions = made_data.chains(2, 3, 0)
    (x, y), _ = made_data.walks(transitions, 4000, 12, 1)
    for label in range(2):
        rows = x[y == label]
        for symbol in range(3):
            follows = rows[:, 1:][rows[:, :-1] == symbol]
            shares = np.bincount(follows, minlength=3) / len(follows)
            # Some 7,000 steps of each kind: 0.06 is 10 standard errors.
            np.testing.assert_allclose(shares, transitions[label, symbol], atol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder_lora"])
def test_lora_begins_with_public_weights_and_trains_few(name):
    task = tuning_tasks.load(name)
    one, other = task.build(0), task.build(1)
    frozen = [v.numpy() for v in one.non_trainable_variables]
    for value, same in zip(frozen, other.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(value, same.numpy())
    trained = sum(np.prod(v.shape) for v in one.trainable_variables)
    assert trained < 0.25 * sum(value.size for value in frozen)
