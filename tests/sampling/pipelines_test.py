"""A pipeline's elements are records: dense, of equal shapes, each row in one record."""

import numpy as np
import pytest
import tensorflow as tf

from tests.sampling.numbered import numbered
from tfdpclip import sampling

X, Y = numbered()


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def first(x, y):
    return x


def second(x, y):
    return y


def negated(x, y):
    return -x, y


def zipped(*parts):
    return tf.data.Dataset.zip(parts)


DOUBLED = {
    "the next one's label": lambda d: zipped(d.map(first), d.skip(1).map(second)),
    "the one before": lambda d: zipped(d.skip(1), d),
    "concatenated": lambda d: d.concatenate(d),
    "and mirrored": lambda d: d.concatenate(d.map(negated)),
    "in part": lambda d: d.take(40).concatenate(d.skip(30)),
    "below other steps": lambda d: (
        d.concatenate(d).map(negated).cache().prefetch(1).take(100).skip(10)
    ),
    "thinned": lambda d: zipped(d.take(30), d.shard(2, 0)),
    "thinned twice": lambda d: d.shard(2, 0).concatenate(d.shard(3, 0)),
    "numbers": lambda d: tf.data.Dataset.range(9).apply(
        lambda r: r.concatenate(r.map(lambda i: i))
    ),
    "of other people": lambda d: zipped(d, tf.data.Dataset.range(60)).apply(
        lambda z: zipped(z, z.skip(2))
    ),
}
SINGLE = {
    "with itself": lambda d: zipped(d.map(first), d.map(negated), d),
    "parts": lambda d: d.take(20).concatenate(d.skip(20)),
    "parts in another order": lambda d: d.skip(20).concatenate(d.take(20)),
    "thinned": lambda d: d.shard(2, 1).concatenate(d.shard(2, 0)),
    "thinned and counted": lambda d: zipped(d.shard(3, 1), d.skip(1).shard(3, 0)),
    "zip of parts": lambda d: (
        d.take(20)
        .concatenate(d.skip(20))
        .apply(lambda c: zipped(c.map(first), c.map(second)))
    ),
    "other data": lambda d: d.concatenate(slices()),
    "enumerated": lambda d: zipped(tf.data.Dataset.range(60), d),
    "halves": lambda d: zipped(d.take(30).concatenate(d.skip(30)), d.skip(30)),
    "the same, otherwise": lambda d: zipped(d.skip(9).take(9), d.take(18).skip(9)),
}


@pytest.mark.parametrize("made", DOUBLED.values(), ids=DOUBLED)
def test_a_pipeline_that_has_a_row_in_two_records_is_refused(made):
    with pytest.raises(ValueError, match="is in 2 records.*#rows-that-are-not"):
        sampling.Poisson(0.5).batches(made(slices()))


@pytest.mark.parametrize("made", SINGLE.values(), ids=SINGLE)
def test_a_pipeline_that_has_each_row_in_one_record_is_taken(made):
    pipeline = made(slices())
    batches = sampling.Poisson(0.5).batches(pipeline)
    assert batches.population == len(list(pipeline))


REGROUPED = {
    "batch": lambda d: d.batch(5, num_parallel_calls=2),
    "paddedbatch": lambda d: d.padded_batch(5),
    "unbatch": lambda d: d.batch(5).unbatch(),
    "window": lambda d: d.window(5),
    "repeat": lambda d: d.repeat(),
    "shuffle": lambda d: d.shuffle(9).take(9),
    # `apply` hides the concatenated data from `_inputs`.
    "groupbywindow": lambda d: d.apply(
        lambda data: data.concatenate(
            data.group_by_window(lambda x, y: y, lambda key, rows: rows, 2)
        )
    ),
    "interleave": lambda d: d.interleave(
        lambda x, y: tf.data.Dataset.from_tensors((x, y)).repeat(2)
    ).apply(tf.data.experimental.assert_cardinality(120)),
    "sample_from_datasets": lambda d: tf.data.Dataset.choose_from_datasets(
        [d, d], tf.data.Dataset.range(60).map(lambda i: i % 2)
    ).apply(tf.data.experimental.assert_cardinality(60)),
}


@pytest.mark.parametrize("name", REGROUPED)
def test_a_pipeline_that_regroups_records_is_refused(name):
    match = "no random access" if name == "interleave" else f"goes through .*{name}"
    with pytest.raises(ValueError, match=match):
        sampling.Poisson(0.5).batches(REGROUPED[name](slices()))


def sparse_column():
    return tf.sparse.from_dense(X * (np.arange(len(X)) % 2)[:, None])


@pytest.mark.parametrize(
    "data, column",
    [
        (lambda: (sparse_column(), Y), lambda x: x),
        (lambda: ({"a": sparse_column(), "b": X}, Y), lambda x: x["a"]),
        (lambda: {"a": sparse_column()}, lambda x: x["a"]),
    ],
    ids=["x", "of two", "alone"],
)
def test_slices_of_sparse_tensors_are_made_dense(data, column):
    pipeline = tf.data.Dataset.from_tensor_slices(data())
    batches = sampling.FullBatch().batches(pipeline)
    x = next(iter(batches))[0]
    np.testing.assert_array_equal(column(x), tf.sparse.to_dense(sparse_column()))
    assert column(batches.element_spec[0]).shape == X.shape


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda ragged: tf.data.Dataset.from_tensor_slices((ragged, [1, 2, 3])),
        lambda ragged: tf.data.Dataset.from_tensor_slices({"a": ragged}),
        lambda ragged: tf.data.Dataset.range(3).map(
            lambda i: tf.RaggedTensor.from_row_lengths(tf.range(i), [i])
        ),
    ],
    ids=["slices", "a column", "a map"],
)
def test_a_ragged_pipeline_is_refused_with_its_column(pipeline):
    ragged = tf.ragged.constant([[1], [2, 3], [4]])
    with pytest.raises(ValueError, match=r"data: x.* is ragged.*to_tensor\(shape="):
        sampling.Poisson(0.5).batches(pipeline(ragged))


@pytest.mark.parametrize(
    "change",
    [
        lambda text, y: (tf.strings.split(text), y),
        lambda text, y: ({"a": tf.zeros([tf.strings.length(text)])}, y),
        lambda text, y: (tf.strings.to_number(tf.strings.split(text, " ")), y),
    ],
)
def test_records_of_several_lengths_are_refused_before_any_is_drawn(change):
    texts = np.array(["1"] * 40 + ["1 2"] + ["3"] * 40)
    pipeline = tf.data.Dataset.from_tensor_slices((texts, np.arange(81))).map(change)
    with pytest.raises(ValueError, match=r"data: record \d+ is unlike.*x.* the shape"):
        sampling.Poisson(0.01).batches(pipeline)


def test_records_of_one_shape_that_is_not_known_before_are_taken():
    texts = np.array(["1 2", "3 4", "5 6"])
    pipeline = tf.data.Dataset.from_tensor_slices(texts).map(
        lambda text: tf.strings.to_number(tf.strings.split(text))
    )
    batches = sampling.FullBatch().batches(pipeline)
    assert next(iter(batches))[0].numpy().tolist() == [[1, 2], [3, 4], [5, 6]]
    assert not batches.assumptions


SEEN = tf.Variable(tf.zeros(X.shape[1:], X.dtype), trainable=False)
SEEDS = tf.Variable(0, trainable=False)
TABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)


def centred(x, y):
    """By a mean of the records that were read so far."""
    return x - SEEN.assign(SEEN - (SEEN - x) // 10), y


@tf.function
def centred_inside(x, y):
    return tf.cond(tf.reduce_all(x >= x), lambda: centred(x, y), lambda: (x, y))


def listed(x, y):
    TABLE.insert(tf.cast(y, tf.int64), TABLE.size())
    return x, y


def with_seeds_of_a_generator(x, y):
    """As Keras 3's layers draw."""
    seed = tf.stack([SEEDS, SEEDS.assign_add(1)])
    SEEDS.assign(SEEDS * 3)
    return x + tf.random.stateless_normal(x.shape, seed), y


@pytest.mark.parametrize("function", [centred, centred_inside, listed])
@pytest.mark.parametrize("parallel", [None, 2])
def test_a_pipeline_whose_functions_keep_of_records_is_refused(
    function, parallel, tmp_path
):
    data = slices().map(function, num_parallel_calls=parallel).map(negated)
    with pytest.raises(ValueError, match="depend on the records read before"):
        sampling.Poisson(0.1).batches(data)
    with pytest.raises(ValueError, match="depend on the records read before"):
        sampling.Stream(data, examples=len(X), folder=tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipeline_may_draw_random_numbers(inside):
    function = with_seeds_of_a_generator
    data = slices().map(tf.function(function) if inside else function)
    assert len(sampling.Poisson(0.1).batches(data)) == 10
