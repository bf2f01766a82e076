"""Batches of people, and of several views of each record."""

import collections
import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdpclip import sampling
from tfdpclip.sampling import distributed, people

IDS = np.array([3, 1, 3, 3, 2, 1, 3, 3])
NUMBERS = np.arange(len(IDS), dtype=np.float32)
X, Y = np.stack([NUMBERS, IDS], axis=1), NUMBERS.astype(np.int32)
EVERYBODY = sampling.FullBatch()


def drawn(scheme=EVERYBODY, data=(X, Y), per_person=2, people=IDS, **options):
    return scheme.batches(data, people=people, per_person=per_person, **options)


def test_a_person_has_rows_of_its_own():
    batches = drawn()
    assert batches.population == 3 and batches.rows_per_record == 2
    x, y, weights = (part.numpy() for part in next(iter(batches)))
    assert x.shape == (6, 2) and len(batches) == 1
    np.testing.assert_array_equal(x[:, 1], [1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(x[:, 0], y)
    # The second person has one example: the second row repeats it with weight 0.
    np.testing.assert_array_equal(weights, [1, 1, 2, 0, 1, 1])
    assert y[2] == y[3] == 4 and set(y[:2]) == {1, 5} and y[4] != y[5]


@pytest.mark.slow
def test_the_examples_of_a_person_are_drawn_anew_and_uniformly():
    # Each of the 10 pairs of five examples, and each step for itself: the most extreme
    # of ten counts is beyond these bounds with probability 1e-7.
    steps = 2000
    batches = drawn(steps=steps)
    seen = collections.Counter(
        tuple(sorted(y.numpy()[4:].tolist())) for _, y, _ in batches
    )
    assert len(seen) == 10
    most = stats.binom.isf(5e-9, steps, 0.1)
    least = stats.binom.ppf(5e-9, steps, 0.1)
    assert least <= min(seen.values()) and max(seen.values()) <= most


def test_who_else_is_there_changes_nothing():
    alone = people.People(drawn()._drawer.source._examples, IDS, 3)
    rng = np.random.default_rng
    everybody = alone.rows_of(np.arange(3), rng(0))
    for person, rows in enumerate(everybody):
        assert set(IDS[rows]) == {person + 1}
    assert alone.rows_of(np.array([], np.int64), rng(0)).shape == (0, 3)


@pytest.mark.parametrize("count, wide", [(1, 1), (5, 5), (7, 2), (200, 199)])
def test_no_example_comes_twice(count, wide):
    source = people.People(
        drawn(
            data=np.zeros([count, 1]), people=np.zeros(count, int)
        )._drawer.source._examples,
        np.zeros(count, int),
        wide,
    )
    for seed in range(20):
        (rows,) = source.rows_of(np.array([0]), np.random.default_rng(seed))
        assert len(set(rows)) == wide and set(rows) <= set(range(count))


def test_weights_of_examples_count_within_the_person():
    given = np.arange(1, 9, dtype=np.float32)
    _, y, weights = next(iter(drawn(data=(X, Y, given))))
    counted = weights.numpy() > 0
    shares = np.array([1, 1, 2, 0, 1, 1])
    np.testing.assert_allclose(weights, given[y.numpy()] * shares)
    assert counted.tolist() == [True, True, True, False, True, True]


def test_weights_make_sums_of_means():
    given = np.minimum(np.bincount(IDS)[IDS], 3).astype(np.float32) / 3
    _, y, weights = next(iter(drawn(data=(X, Y, given), per_person=3)))
    # The mean over a person's three rows is a third of the sum over its examples.
    rows = np.reshape(weights, [3, 3])
    np.testing.assert_allclose(rows, [[1, 1, 0], [1, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    "ids", [list("cacbacaa"), np.array(list("cacbacaa")), IDS.astype("uint8")]
)
def test_ids_may_be_texts_or_integers(ids):
    assert drawn(people=ids).population == 3


def test_ids_that_end_otherwise_are_of_two_people():
    assert drawn(people=[*("a" * 4), *(["a\0"] * 4)]).population == 2


def test_ids_are_those_of_when_the_batches_were_made():
    ids = IDS.copy()
    batches = drawn(people=ids)
    ids[:] = np.arange(8)
    assert batches.population == 3
    assert set(next(iter(batches))[0].numpy()[:, 1]) == {1, 2, 3}


@pytest.mark.parametrize(
    "ids, message",
    [
        (IDS[:-1], r"one id for each of the 8 examples, \[8\], got shape \[7\]"),
        (IDS[:, np.newaxis], r"got shape \[8, 1\]"),
        (7, r"got shape \[\]"),
        (IDS.astype(float), "integers or texts"),
        ([None, *IDS[1:]], "integers or texts"),
        ([*"abcdefg", float("nan")], "integers or texts"),
        (IDS > 1, "integers or texts"),
        (
            np.where(IDS > 1, IDS, np.nan).astype(str),
            "known, and a missing id becomes 'nan'",
        ),
        (
            np.array(list("abcdefg") + ["None"], object),
            "known, and a missing id becomes 'None'",
        ),
        ([b""] + [b"a"] * 7, "known, and a missing id becomes b''"),
        (np.where(IDS > 1, IDS, -1), "known, and the codes of pandas have -1"),
        ([2**63, *IDS[1:].tolist()], "be integers below 2"),
        ("user", r"got 'user' of shape \[\]"),
        (np.ma.masked_array(IDS, IDS < 2), "known, and some ids are masked"),
    ],
)
def test_bad_ids(ids, message):
    with pytest.raises(ValueError, match=f"people must .*{message}"):
        drawn(people=ids)


@pytest.mark.parametrize("per_person", [0, -1, 1.5, "2", True])
def test_bad_numbers_of_examples(per_person):
    with pytest.raises(ValueError, match="per_person must be an integer of at least 1"):
        drawn(per_person=per_person)


@pytest.mark.parametrize("given", [{"people": IDS}, {"per_person": 2}])
def test_one_without_the_other(given):
    with pytest.raises(ValueError, match="people and per_person go together"):
        EVERYBODY.batches((X, Y), **given)


SCHEMES = [
    sampling.Poisson(0.5),
    sampling.FixedSize(2, 3),
    sampling.ShuffledEpochs(2, 3),
    sampling.MinSeparation(3, 1),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)
@pytest.mark.parametrize("source", ["arrays", "items", "pipeline"])
def test_every_scheme_and_source(scheme, source):
    class Items:
        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            return X[index], Y[index]

    data = {
        "arrays": (X, Y),
        "items": Items(),
        "pipeline": tf.data.Dataset.from_tensor_slices((X, Y)),
    }[source]
    batches = drawn(scheme, data, steps=4)
    for x, y, weights in batches:
        assert len(x) == 2 * batches.physical_batch_size
        ids = np.reshape(x[:, 1], [-1, 2])
        np.testing.assert_array_equal(ids[:, 0], ids[:, 1])
        there = np.reshape(weights, [-1, 2]).sum(axis=1)
        np.testing.assert_array_equal(there, 2 * (ids[:, 0] > 0))
        np.testing.assert_array_equal(x[:, 0], y)


def test_a_step_of_several_elements_keeps_people_whole():
    batches = drawn(physical_batch_size=1, accumulation_steps=3)
    found = [x.numpy() for x, _, _ in batches]
    assert [x[:, 1].tolist() for x in found] == [[1, 1], [2, 2], [3, 3]]


def test_views_are_rows_one_after_the_other():
    batches = EVERYBODY.batches((X, Y), views=3)
    x, y, weights = next(iter(batches))
    assert batches.views == batches.rows_per_record == 3
    assert x.shape == (24, 2) and batches.expected_batch_size == 8
    np.testing.assert_array_equal(y, np.repeat(Y, 3))
    np.testing.assert_array_equal(weights, np.ones(24))


def test_every_view_is_changed_in_its_own_way():
    def noisy(x, y):
        return x + tf.random.uniform(x.shape), y

    batches = EVERYBODY.batches((X, Y), views=4).map(noisy)
    x, y, _ = next(iter(batches))
    assert len(np.unique(x.numpy()[:, 0])) == 32
    np.testing.assert_array_equal(np.floor(x.numpy()[:, 0]), y)


def test_views_of_a_persons_examples():
    batches = drawn(views=2)
    x, _, weights = next(iter(batches))
    assert batches.rows_per_record == 4 and x.shape == (12, 2)
    np.testing.assert_array_equal(weights[4:8], [2, 2, 0, 0])
    np.testing.assert_array_equal(x[:, 1], np.repeat([1, 2, 3], 4))


@pytest.mark.parametrize("data", [X, (X, Y, NUMBERS), ({"a": X, "b": Y}, (Y, Y))])
def test_views_of_data_of_any_structure(data):
    for batches in (EVERYBODY.batches(data, views=2), drawn(data=data)):
        parts = tf.nest.flatten(next(iter(batches)))
        rows = {len(part) for part in parts if part is not None}
        assert rows == {batches.rows_per_record * batches.population}


def test_texts_of_rows_that_are_left_over_can_be_decoded():
    texts = np.array([tf.io.encode_base64(str(i)).numpy() for i in range(8)])
    batches = drawn(sampling.Poisson(0.5), (texts, Y)).map(
        lambda x, y: (tf.strings.to_number(tf.io.decode_base64(x)), y)
    )
    for x, y, weights in batches.repeat().take(10):
        counted = weights.numpy() > 0
        np.testing.assert_array_equal(x[counted], y[counted])


@pytest.mark.parametrize("views", [0, 1.5, None, "2"])
def test_bad_numbers_of_views(views):
    with pytest.raises(ValueError, match="views must be an integer of at least 1"):
        EVERYBODY.batches((X, Y), views=views)


def test_replicas_get_whole_records():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    for batches in (drawn(), EVERYBODY.batches((X, Y), views=2)):
        x, _, _ = next(iter(batches.distribute(strategy)))
        ids = np.reshape(x[:, 1], [-1, 2])
        np.testing.assert_array_equal(ids[:, 0], ids[:, 1])


@pytest.mark.parametrize("options", [{"views": 2}, {"people": IDS, "per_person": 1}])
def test_several_machines_are_refused(options):
    class Several(tf.distribute.MirroredStrategy):
        def distribute_datasets_from_function(self, function):
            return function(tf.distribute.InputContext(2, 0, 2))

    batches = sampling.Poisson(0.5).batches((X, Y), **options)
    strategy = Several(["CPU:0"])
    with mock.patch.object(distributed, "STRATEGIES", (Several,)):
        with pytest.raises(ValueError, match="devices of one machine"):
            batches.distribute(strategy)


def test_the_statement_says_how_people_are_told_apart():
    (said,) = drawn().assumptions
    assert "a record is a person" in said and "at most 2 examples" in said


def test_the_same_seed_draws_the_same_examples():
    first, second = (
        np.concatenate([y for _, y, _ in drawn(seed=1, steps=5)]) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    other = np.concatenate([y for _, y, _ in drawn(seed=2, steps=5)])
    assert math.isclose(len(first), len(other)) and not np.array_equal(first, other)
