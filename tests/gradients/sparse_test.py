"""Sparse batches: the proofs about them, and the refusals."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import mostly_slow
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    clipped_sum,
    per_example_norms,
)

B, V, D = 5, 9, 3
# The third example is empty, and the fourth has the same id three times.
IDS = [[1, 1, 3], [4], [], [2, 8, 2, 2], [0, 5]]


def features():
    """`[B, V]` numbers, and an example without any."""
    rng = np.random.default_rng(0)
    dense = (rng.random([B, V]) < 0.4) * rng.normal(size=[B, V])
    dense[2] = 0
    return tf.sparse.from_dense(dense.astype(np.float32))


def ids():
    """`[B, 4]` ids."""
    places = [[i, j] for i, row in enumerate(IDS) for j in range(len(row))]
    values = [value for row in IDS for value in row]
    return tf.SparseTensor(places, tf.constant(values, tf.int64), [B, 4])


class Model:
    """A table and a head."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.table = tf.Variable(rng.normal(size=[V, D]).astype(np.float32))
        self.head = tf.Variable(rng.normal(size=[D, 2]).astype(np.float32))
        self.variables = [self.table, self.head]

    def losses(self, hidden):
        return tf.reduce_mean(tf.square(tf.tanh(hidden) @ self.head), axis=1)


def product(model, x):
    return tf.sparse.sparse_dense_matmul(x, model.table)


def looked_up(combiner):
    def hidden(model, x):
        return tf.nn.safe_embedding_lookup_sparse(model.table, x, combiner=combiner)

    return hidden


def squared(model, x):
    return product(model, tf.sparse.map_values(tf.square, x))


def positive(model, x):
    return product(model, tf.sparse.retain(x, x.values > 0))


def normalised(model, x):
    return product(model, tf.sparse.softmax(x))


def dense(model, x):
    return tf.sparse.to_dense(x) @ model.table


def twice(model, x):
    return product(model, x) + dense(model, tf.sparse.map_values(tf.square, x))


def step_of(model, hidden, rule):
    @tf.function
    def step(x):
        return clipped_sum(model.losses(hidden(model, x)), model.variables, rule)

    return step


@pytest.mark.parametrize("first", mostly_slow([0], [0, 1, 3]))
@pytest.mark.parametrize(
    "hidden, data",
    [
        (product, features),
        (squared, features),
        (positive, features),
        (dense, features),
        (twice, features),
        (looked_up("sum"), ids),
        (looked_up("mean"), ids),
        (looked_up("sqrtn"), ids),
    ],
    ids="product squared positive dense twice sum mean sqrtn".split(),
)
@pytest.mark.thinned(9)
def test_examples_of_a_sparse_batch_are_clipped_one_by_one(hidden, data, first):
    model, x = Model(), data()
    width = x.dense_shape[1]
    x = tf.sparse.slice(x, [first, 0], [B - first, width])
    gradients = []
    for i in range(B - first):
        with tf.GradientTape() as tape:
            one = tf.sparse.slice(x, [i, 0], [1, width])
            loss = tf.reduce_sum(model.losses(hidden(model, one)))
        found = tape.gradient(loss, model.variables)
        gradients.append(
            np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in found])
        )
    gradients = np.stack(gradients)
    norms = np.linalg.norm(gradients, axis=1)
    rule = dpc.FixedClip(float(np.median(norms)))
    sums, found = step_of(model, hidden, rule)(x)
    # The norm of a sum of two lookups may be larger, by the floor for rounding.
    assert (found >= norms * (1 - 1e-5)).numpy().all()
    np.testing.assert_allclose(found, norms, rtol=1e-2 if hidden is twice else 1e-5)
    sums = np.concatenate([np.ravel(tf.convert_to_tensor(s)) for s in sums])
    weights = rule.weights(found, rule.initial_state()).numpy()
    np.testing.assert_allclose(sums, weights @ gradients, rtol=1e-4, atol=1e-6)


def test_a_softmax_of_the_entries_is_refused():
    """No layer has the op, and the table of ops does not."""
    with pytest.raises(ExampleIsolationError, match="SparseTensorDenseMatMul"):
        step_of(Model(), normalised, dpc.FixedClip(1.0))(features())


TRAINED = {
    "a factor": lambda model, x: product(
        model, tf.sparse.map_values(lambda v: v * model.head[0, 0], x)
    ),
    "a factor of each column": lambda model, x: product(
        model,
        tf.sparse.map_values(
            lambda v: v * tf.gather(model.table[:, 0], x.indices[:, 1]), x
        ),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_that_change_the_entries_are_clipped_by_example(name):
    """The first batch has equally many entries of each example, the second has not."""
    model, hidden = Model(), TRAINED[name]

    @tf.function(input_signature=[tf.SparseTensorSpec([None, V], tf.float32)])
    def norms(x):
        return per_example_norms(model.losses(hidden(model, x)), model.variables)

    rng = np.random.default_rng(2)
    for counts in ([2, 2, 2, 2], [1, 3, 1, 3], [4, 0, 0, 4]):
        places = [[i, j] for i, n in enumerate(counts) for j in range(n)]
        values = tf.constant(rng.normal(size=len(places)), tf.float32)
        x = tf.SparseTensor(places, values, [4, V])
        found = norms(x).numpy()
        for i in range(4):
            with tf.GradientTape() as tape:
                one = tf.sparse.slice(x, [i, 0], [1, V])
                loss = tf.reduce_sum(model.losses(hidden(model, one)))
            gradients = tape.gradient(loss, model.variables)
            gradients = [tf.convert_to_tensor(g) for g in gradients if g is not None]
            norm = tf.linalg.global_norm(gradients)
            np.testing.assert_allclose(found[i], norm, rtol=1e-4, atol=1e-6)


def with_values(change):
    def hidden(model, x):
        return product(model, tf.SparseTensor(x.indices, change(x), x.dense_shape))

    return hidden


MIXERS = {
    "total": with_values(lambda x: x.values / tf.reduce_sum(x.values)),
    "largest": with_values(lambda x: x.values - tf.reduce_max(x.values)),
    "count": with_values(lambda x: x.values / tf.cast(tf.size(x.values), tf.float32)),
    "place": with_values(
        lambda x: x.values * tf.cast(tf.range(tf.size(x.values)), tf.float32)
    ),
    "reversed": with_values(lambda x: tf.reverse(x.values, [0])),
    "sorted": with_values(lambda x: tf.sort(x.values)),
    "rolled": with_values(lambda x: tf.roll(x.values, 1, 0)),
    "summed up": with_values(lambda x: tf.cumsum(x.values)),
    "first entry": with_values(lambda x: x.values * x.values[0]),
    "by column": lambda model, x: tf.math.unsorted_segment_sum(
        tf.gather(model.table, x.indices[:, 1]), x.indices[:, 1], B
    ),
    "widest": lambda model, x: (
        product(model, x) * tf.cast(x.dense_shape[1], tf.float32)
    ),
    "among examples": lambda model, x: tf.sparse.sparse_dense_matmul(
        tf.sparse.slice(x, [0, 0], [B, B]), product(model, x)
    ),
    "empty rows at the end": lambda model, x: tf.math.segment_sum(
        tf.gather(model.table, x.indices[:, 1]) * x.values[:, tf.newaxis],
        x.indices[:, 0],
    ),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MIXERS)
def test_entries_that_meet_other_examples_are_refused(name):
    """From the graph: nothing has to happen in the batch at hand."""
    with pytest.raises((ExampleIsolationError, LossStructureError)):
        step_of(Model(), MIXERS[name], dpc.FixedClip(1.0)).get_concrete_function(
            tf.SparseTensorSpec([None, V], tf.float32)
        )


def test_one_batch_with_the_row_numbers_of_another_is_refused():
    """The batches may count differently, so entries would go to wrong examples."""
    model = Model()

    @tf.function
    def step(a, b):
        mixed = tf.SparseTensor(a.indices, b.values, a.dense_shape)
        losses = model.losses(product(model, mixed))
        return clipped_sum(losses, model.variables, dpc.FixedClip(1.0))

    with pytest.raises(ExampleIsolationError):
        step(features(), features())


def test_the_weights_of_ids_come_with_the_ids():
    """A second sparse batch is not known to have the same entries."""

    def hidden(model, x):
        return tf.nn.safe_embedding_lookup_sparse(
            model.table, x, tf.sparse.map_values(tf.ones_like, features())
        )

    with pytest.raises(ExampleIsolationError):
        step_of(Model(), hidden, dpc.FixedClip(1.0))(ids())


def sparse_model():
    tf.keras.utils.set_random_seed(3)
    inputs = tf.keras.Input((V,), sparse=True)
    hidden = tf.keras.layers.Dense(4, activation="tanh")(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))


@pytest.mark.parametrize("how", ["arrays", "data set"])
@pytest.mark.slow
def test_keras_trains_on_sparse_features_as_on_dense_ones(how):
    x, y = features(), np.arange(B, dtype=np.float32)[:, np.newaxis]
    wide = tf.keras.Sequential(
        [tf.keras.layers.Dense(4, activation="tanh"), tf.keras.layers.Dense(1)]
    )
    wide.build((None, V))
    model = sparse_model()
    wide.set_weights(model.get_weights())
    before = model.get_weights()
    for trained in (model, wide):
        optimizer = dpc.keras.DPSGD(
            0.5, clip=dpc.FixedClip(0.3), noise_multiplier=0, expected_batch_size=2
        )
        trained.compile(optimizer, "mse")
    data = [x, y]
    if how == "data set":
        data = [tf.data.Dataset.from_tensor_slices((x, y)).batch(2)]
    model.fit(*data, batch_size=None if how == "data set" else 2, shuffle=False)
    wide.fit(tf.sparse.to_dense(x), y, batch_size=2, shuffle=False)
    for found, expected, start in zip(
        model.get_weights(), wide.get_weights(), before, strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        assert np.abs(found - start).max() > 1e-4


def with_lengths(*places):
    def change(x):
        lengths = tf.unstack(x.dense_shape, num=2)
        shape = tf.stack([lengths[i] for i in places])
        return tf.SparseTensor(x.indices, x.values, shape)

    return change


CHANGES = {
    "nothing": (lambda x: x, False),
    "the other order": (with_lengths(1, 0), True),
    "one length twice": (with_lengths(0, 0), True),
    "a length of the data": (
        lambda x: tf.SparseTensor(
            x.indices, x.values, tf.stack([x.dense_shape[0], tf.reduce_max(x.indices)])
        ),
        True,
    ),
    "centred": (lambda x: x.with_values(x.values - tf.reduce_mean(x.values)), True),
    "the next row": (
        lambda x: tf.SparseTensor(x.indices[::-1], x.values, x.dense_shape),
        True,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sparse_batch_goes_unchanged_into_a_function_with_the_step(name):
    """Around its step, Keras 3 writes static lengths into the shape of the batch."""
    change, refused = CHANGES[name]
    model = Model()
    optimizer = dpc.keras.DPSGD(
        0.5, clip=dpc.FixedClip(0.3), noise_multiplier=0, expected_batch_size=2
    )

    @tf.function
    def step(x):
        losses = lambda: model.losses(product(model, x))  # noqa: E731
        optimizer.minimize(losses, model.variables)

    @tf.function
    def around(iterator):
        for _ in tf.range(2):
            step(change(next(iterator)))

    data = iter(tf.data.Dataset.from_tensor_slices(features()).batch(2))
    if refused:
        with pytest.raises(PrivacyMismatchError, match="gets more than data"):
            around(data)
    else:
        around(data)


@pytest.mark.every_check
@pytest.mark.slow
def test_looked_up_bags_pass_the_check_of_their_own_step():
    """Its gradient is an op of its own, which the check computes again."""
    model = Model()
    for combiner in ("sum", "mean", "sqrtn"):
        _, norms = step_of(model, looked_up(combiner), dpc.FixedClip(1.0))(ids())
        assert np.all(np.isfinite(norms)) and np.any(norms > 0)
