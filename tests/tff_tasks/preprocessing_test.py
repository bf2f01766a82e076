"""Preprocessing has known answers."""

import numpy as np
import pytest
import tensorflow as tf

from tff_tasks import language_tasks, ordering, preprocessing, registry, vocabulary
from tff_tasks.vocabulary import SequenceIds


def rng(seed=0):
    return np.random.default_rng(seed)


def one_of(name, **options):
    return registry.TASKS[name](options)


# Images.


def test_central_crop_is_in_the_centre():
    images = np.arange(32 * 32 * 3).reshape(1, 32, 32, 3)
    expected = tf.image.central_crop(images[0], 0.75).numpy()
    assert np.array_equal(preprocessing.crop(images, 24)[0], expected)


def test_random_crop_gives_parts_half_of_them_flipped():
    row = np.tile(np.arange(32), (32, 1))
    column = row.T
    images = np.repeat(np.stack([row, column], -1)[None], 400, 0)
    parts = preprocessing.crop(images, 24, rng())
    rows, columns = parts[..., 1][:, :, 0], parts[..., 0][:, 0]
    assert np.all(np.diff(rows) == 1)
    steps = np.diff(columns)
    assert np.all(np.abs(steps) == 1) and np.ptp(steps, axis=1).max() == 0
    # Binomial(400, 1/2) is within 50 of its mean but for 6e-7.
    assert 150 < (steps[:, 0] < 0).sum() < 250
    # Every one of the 9 places, missed with probability 9 * (8/9)^400 < 1e-19.
    assert set(rows[:, 0]) == set(columns.min(1)) == set(range(9))


def test_standardised_like_tensorflow():
    images = rng().integers(256, size=(5, 24, 24, 3))
    images[2] = 77
    expected = tf.image.per_image_standardization(images.astype(np.float32))
    np.testing.assert_allclose(preprocessing.standardize(images), expected, atol=2e-5)
    assert not preprocessing.standardize(images)[2].any()


def test_cifar_crops_before_it_standardises():
    image = np.full((1, 32, 32, 3), 100)
    image[:, :4] = 255  # Cut off.
    examples = {"image": image, "label": np.array([7])}
    pixels, label = one_of("cifar100_image").encode(examples)
    assert pixels.shape == (1, 24, 24, 3) and not pixels.any() and label[0] == 7


def test_cifar_training_images_are_distorted_only_if_wanted():
    examples = {
        "image": rng().integers(256, size=(4, 32, 32, 3)),
        "label": np.zeros(4, int),
    }
    task, later = (
        one_of("cifar100_image"),
        one_of("cifar100_image", distort_train_images=False),
    )
    plain = task.encode(examples)[0]
    assert not np.allclose(task.encode(examples, rng())[0], plain)
    assert np.array_equal(later.encode(examples, rng())[0], plain)


def test_emnist_character_keeps_ink_at_zero():
    pixels = rng().random((3, 28, 28)).astype(np.float32)
    x, y = one_of("emnist_character").encode(
        {"pixels": pixels, "label": np.array([1, 2, 61])}
    )
    assert x.shape == (3, 28, 28, 1) and np.array_equal(x[..., 0], pixels)
    assert y.tolist() == [1, 2, 61]


def test_background_is_zero_for_the_autoencoder():
    pixels = np.ones((2, 28, 28), np.float32)
    pixels[1, 0, 1] = 0.25
    x, y = one_of("emnist_autoencoder").encode({"pixels": pixels})
    assert not x[0].any() and not y[0].any()
    assert x[1, 1] == y[1, 1] == 0.75 and x.shape == (2, 784)


# Text.


def test_characters():
    assert len(vocabulary.CHARACTERS) == 86 == len(set(vocabulary.CHARACTERS))
    assert list(vocabulary.CHARACTERS) == sorted(vocabulary.CHARACTERS)
    ids = SequenceIds(86)
    assert (ids.unknown, ids.begin, ids.end, ids.size) == (87, 88, 89, 90)


def test_short_snippet_is_padded_to_one_chunk():
    chunks = preprocessing.character_chunks([b"abc"], 80)
    a = vocabulary.CHARACTERS.index(b"a") + 1
    assert chunks.shape == (1, 81)
    assert chunks[0, :5].tolist() == [88, a, a + 1, a + 2, 89]
    assert not chunks[0, 5:].any()
    inputs, targets = preprocessing.next_item_pairs(chunks)
    assert inputs.shape == targets.shape == (1, 80)
    assert targets[0, :4].tolist() == [a, a + 1, a + 2, 89]


@pytest.mark.parametrize(
    "length, chunks, padding", [(0, 1, 79), (79, 1, 0), (80, 2, 80), (160, 2, 0)]
)
def test_snippets_are_cut_into_chunks(length, chunks, padding):
    made = preprocessing.character_chunks([b"x" * length], 80)
    assert made.shape == (chunks, 81)
    assert np.count_nonzero(made == 0) == padding
    assert made.flat[0] == 88 and made.flat[length + 1] == 89


def test_no_chunk_mixes_snippets_and_unknown_bytes_have_one_number():
    made = preprocessing.character_chunks([b"a", "é{".encode(), b""], 80)
    assert made.shape == (3, 81)
    assert made[1, :5].tolist() == [88, 87, 87, 87, 89]
    assert made[2, :3].tolist() == [88, 89, 0]
    assert preprocessing.character_chunks([], 80).shape == (0, 81)


WORDS = preprocessing.word_numbers(["a", "b"])


@pytest.mark.parametrize(
    "sentence, row",
    [
        (" ".join(["a"] * 20), [4, *[1] * 20]),
        (" ".join(["b"] * 25), [4, *[2] * 20]),
        (" ".join(["a"] * 19), [4, *[1] * 19, 5]),
        ("b", [4, 2, 5, *[0] * 18]),
        ("a zebra", [4, 1, 3, 5, *[0] * 17]),
        # An empty sentence has a single empty word, as in the reference.
        ("", [4, 3, 5, *[0] * 18]),
        ("a  b", [4, 1, 3, 2, 5, *[0] * 16]),
    ],
)
def test_sentences(sentence, row):
    made = preprocessing.sentence_numbers([sentence.encode()], WORDS, 20)
    assert made.tolist() == [row]


@pytest.mark.parametrize(
    "divisor, bag", [("all", [0.5, 0.25]), ("in_vocabulary", [2 / 3, 1 / 3])]
)
def test_bags_of_words(divisor, bag):
    task = one_of("stackoverflow_tag", bag_divisor=divisor)
    task.words, task.tags = ["a", "b"], ["x", "y"]
    examples = {
        "tokens": np.array([b"a b oov", b"oov", b""], object),
        "title": np.array([b"a", b"", b""], object),
        "tags": np.array([b"y|other", b"x|x", b""], object),
    }
    inputs, targets = next(iter(task.dataset(task.encode(examples), 3)))
    np.testing.assert_allclose(inputs, [bag, [0, 0], [0, 0]], rtol=1e-6)
    assert targets.numpy().tolist() == [[0, 1], [2, 0], [0, 0]]


def test_no_known_words_at_all():
    coordinates, values = preprocessing.bags_of_words([b"x", b""], WORDS, "all")
    dense = language_tasks.densify_bags(coordinates, values, 2)
    assert dense.numpy().tolist() == [[0, 0], [0, 0]]


# Order.


def options(**changes):
    return {
        "shuffle_buffer": 100,
        "epochs": 1,
        "max_elements": None,
        "cap": "before",
        **changes,
    }


def test_every_epoch_has_every_example_in_another_order():
    order = ordering.example_order(9, rng(), **options(epochs=2))
    assert sorted(order[:9]) == sorted(order[9:]) == list(range(9))
    assert order[:9].tolist() != order[9:].tolist()


def test_cap_before_takes_the_first_and_after_takes_any():
    before = ordering.example_order(50, rng(), **options(max_elements=5, epochs=2))
    assert sorted(before) == sorted([*range(5)] * 2)
    after = ordering.example_order(
        50, rng(), **options(max_elements=5, epochs=2, cap="after")
    )
    assert len(after) == 5 and max(after) > 4


def test_small_buffer_shuffles_within_reach():
    orders = np.array([ordering.buffered_shuffle(12, 3, rng(i)) for i in range(300)])
    assert np.array_equal(np.sort(orders), np.tile(np.arange(12), (300, 1)))
    # Item i enters the buffer when place i - 2 is filled.
    assert np.all(orders <= np.arange(12) + 2)
    # The first place is uniform over the buffer: each within 40 of 100 but for 1e-6.
    counts = np.bincount(orders[:, 0], minlength=3)
    assert counts.sum() == 300 and np.all(np.abs(counts - 100) < 40)
    assert orders[:, -1].min() < 9  # Some items stay long.
