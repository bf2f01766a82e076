"""Records of several rows: exact against a backward pass for each, and kept apart."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import integers, randoms, variable
from tests.stack import MEAN
from tfdpclip import sampling
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    clipped_sum,
    per_example_norms,
)

L = tf.keras.layers
EACH = 4
W, U = variable(5, 3), variable(3)
X = randoms(6 * EACH, 5)


def attention():
    tokens = tf.keras.Input([6], dtype="int32")
    hidden = L.Embedding(11, 8)(tokens)
    hidden = L.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = L.GlobalAveragePooling1D()(L.LayerNormalization()(hidden))
    return tf.keras.Model(tokens, L.Dense(3)(hidden))


MODELS = {
    "dense": (lambda: tf.keras.Sequential([L.Dense(7, "tanh"), L.Dense(3)]), (6,)),
    "convolution": (
        lambda: tf.keras.Sequential(
            [
                L.Conv2D(4, 3, activation="relu"),
                L.GroupNormalization(2),
                L.MaxPool2D(2),
                L.Flatten(),
                L.LayerNormalization(),
                L.Dense(3),
            ]
        ),
        (8, 8, 2),
    ),
    "fused": (
        lambda: tf.keras.Sequential([L.Embedding(11, 5), L.LSTM(4), L.Dense(3)]),
        6,
    ),
    "masked": (
        lambda: tf.keras.Sequential(
            [L.Embedding(11, 5, mask_zero=True), L.GRU(4), L.Dense(3)]
        ),
        6,
    ),
    "attention": (attention, 6),
    "loop": (
        lambda: tf.keras.Sequential([L.SimpleRNN(4), L.Dense(3)]),
        (5, 3),
    ),
    "separable": (
        lambda: tf.keras.Sequential(
            [
                L.DepthwiseConv2D(3),
                L.Conv2DTranspose(3, 2, strides=2),
                L.GlobalAveragePooling2D(),
                L.PReLU(),
                L.Dense(3),
            ]
        ),
        (8, 8, 2),
    ),
}


def norms_by_record(model, losses, x, y):
    """The norm of the gradient of each record's mean loss, record by record."""
    found = []
    for start in range(0, len(x), EACH):
        with tf.GradientTape() as tape:
            rows = slice(start, start + EACH)
            loss = tf.reduce_mean(losses(y[rows], model(x[rows], training=False)))
        gradients = tape.gradient(loss, model.trainable_variables)
        squares = [np.sum(np.square(tf.convert_to_tensor(g))) for g in gradients]
        found.append(np.sqrt(sum(squares)))
    return found


@pytest.mark.every_check
@pytest.mark.parametrize("static", [False, True], ids=["any", "static"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_record_is_the_mean_of_its_rows(name, static):
    make, shape = MODELS[name]
    model, count = make(), 5 * EACH
    x = integers(count, shape, below=11) if isinstance(shape, int) else None
    x = randoms(count, *shape) if x is None else x
    y = integers(count, below=3)
    model(x)
    scalar, vector = (
        tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
        for reduction in (MEAN, "none")
    )
    length = count if static else None
    spec = [
        tf.TensorSpec([length, *x.shape[1:]], x.dtype),
        tf.TensorSpec([length], tf.int32),
    ]

    @tf.function(input_signature=spec, autograph=False)
    def norms(x, y):
        loss = (scalar if static else vector)(y, model(x, training=False))
        variables = model.trainable_variables
        return per_example_norms(loss, variables, rows_per_record=EACH)

    expected = norms_by_record(model, vector, x, y)
    np.testing.assert_allclose(norms(x, y), expected, rtol=1e-5)
    if not static:
        few = norms(x[: 2 * EACH], y[: 2 * EACH])
        np.testing.assert_allclose(few, expected[:2], rtol=1e-5)


def summed(change, x=X, length=None, **options):
    @tf.function(
        input_signature=[tf.TensorSpec([length, 5])],
        autograph=False,
        jit_compile=options.pop("compiled", False),
    )
    def step(x):
        hidden = change(tf.tanh(x @ W))
        loss = tf.reduce_sum(tf.square(hidden) * U, axis=1)
        options.setdefault("rows_per_record", EACH)
        return clipped_sum(loss, [W, U], FixedClip(1.0), **options)[0]

    return step(x)


def mean_of(rows, axis):
    return tf.reshape(rows + tf.reduce_mean(rows, axis, keepdims=True), [-1, 3])


def by_place(hidden):
    place = tf.range(tf.shape(hidden)[0]) % EACH
    return hidden * tf.cast(place + 1, tf.float32)[:, tf.newaxis]


@pytest.mark.every_check
@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
    "change",
    [
        lambda h: mean_of(tf.reshape(h, [-1, EACH, 3]), 1),
        by_place,
        lambda h: tf.nn.dropout(h, 0.3),
    ],
    ids=["mean of a record", "by view", "dropout"],
)
@pytest.mark.slow
def test_rows_of_one_record_may_mix(change, compiled):
    sums = summed(change, compiled=compiled)
    assert float(tf.linalg.global_norm(sums)) > 0.1


MIXERS = {
    "the next row": lambda h: h + 0.1 * tf.roll(h, 1, axis=0),
    "two records": lambda h: mean_of(tf.reshape(h, [-1, 2 * EACH, 3]), 1),
    "the other order": lambda h: mean_of(tf.reshape(h, [EACH, -1, 3]), 0),
    "from a place on": lambda h: tf.roll(
        mean_of(tf.reshape(tf.roll(h, 1, 0), [-1, EACH, 3]), 1), -1, 0
    ),
    "first views": lambda h: h + tf.reduce_max(tf.reshape(h, [-1, EACH, 3])[:, 0], 0),
    "scan": lambda h: tf.scan(lambda before, row: row + 0.01 * before, h),
    "gradients only": lambda h: (
        tf.stop_gradient(1.5 / tf.sort(tf.norm(h, axis=1))[-1]) * h
        + tf.stop_gradient((1 - 1.5 / tf.sort(tf.norm(h, axis=1))[-1]) * h)
    ),
}


@pytest.mark.every_check
@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("length", [None, len(X)], ids=["any", "static"])
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.slow
def test_rows_of_two_records_never_meet(name, length, compiled):
    """The step is refused, or each record's gradient is made of its own rows alone."""

    @tf.function(
        input_signature=[tf.TensorSpec([length, 5])],
        autograph=False,
        jit_compile=compiled,
    )
    def norms(x):
        hidden = MIXERS[name](tf.tanh(x @ W))
        loss = tf.reduce_sum(tf.square(hidden) * U, axis=1)
        return per_example_norms(loss, [W, U], rows_per_record=EACH)

    try:
        before = norms(X)
    except (ExampleIsolationError, tf.errors.InvalidArgumentError):
        return
    after = norms(tf.concat([-3 * X[:EACH], X[EACH:]], axis=0))
    np.testing.assert_allclose(after[1:], before[1:], rtol=1e-5)


BY_RECORD = {
    "max of the views": lambda rows: tf.reduce_max(rows, axis=1),
    "mean of the views": lambda rows: tf.reduce_mean(rows, axis=1),
    "first view": lambda rows: rows[:, 0],
}


@pytest.mark.parametrize("length", [None, len(X)], ids=["any", "static"])
@pytest.mark.parametrize("name", BY_RECORD)
@pytest.mark.thinned(2)
def test_a_loss_may_have_one_entry_for_each_record(name, length):
    def losses(x):
        rows = tf.reduce_sum(tf.square(tf.tanh(x @ W)) * U, axis=1)
        return BY_RECORD[name](tf.reshape(rows, [-1, EACH]))

    @tf.function(input_signature=[tf.TensorSpec([length, 5])], autograph=False)
    def norms(x):
        return per_example_norms(losses(x), [W, U], rows_per_record=EACH)

    expected = []
    for start in range(0, len(X), EACH):
        with tf.GradientTape() as tape:
            loss = losses(X[start : start + EACH])[0]
        expected.append(tf.linalg.global_norm(tape.gradient(loss, [W, U])))
    np.testing.assert_allclose(norms(X), expected, rtol=1e-5)


@pytest.mark.parametrize("length", [None, len(X)], ids=["any", "static"])
def test_rows_of_sparse_records_are_no_records(length):
    def norms(losses, x, spec):
        @tf.function(input_signature=[spec], autograph=False)
        def found(x):
            return per_example_norms(losses(x), [W, U], rows_per_record=EACH)

        return found(x)

    def losses(x):
        if isinstance(x, tf.SparseTensor):
            hidden = tf.sparse.sparse_dense_matmul(x, W)
        else:
            hidden = x @ W
        return tf.reduce_sum(tf.square(tf.tanh(hidden)) * U, axis=1)

    x = X * tf.cast(X > 0.2, tf.float32)
    sparse = norms(
        losses, tf.sparse.from_dense(x), tf.SparseTensorSpec([length, 5], tf.float32)
    )
    dense = norms(losses, x, tf.TensorSpec([length, 5]))
    assert sparse.shape == [len(X) // EACH]
    np.testing.assert_allclose(sparse, dense, rtol=1e-5)


@pytest.mark.parametrize("length", [None, len(X)], ids=["any", "static"])
def test_an_entry_for_two_records_is_no_loss_of_a_record(length):
    @tf.function(input_signature=[tf.TensorSpec([length, 5])], autograph=False)
    def norms(x):
        rows = tf.reduce_sum(tf.square(tf.tanh(x @ W)) * U, axis=1)
        pairs = tf.reduce_mean(tf.reshape(rows, [-1, 2 * EACH]), axis=1)
        return per_example_norms(pairs, [W, U], rows_per_record=EACH)

    with pytest.raises((LossStructureError, ExampleIsolationError)):
        norms(X)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.thinned(3)
def test_a_record_moves_the_sum_by_the_clip_at_most(rows):
    steep = tf.concat([X[:16], 1e3 * X[16:]], axis=0)
    with_it = summed(lambda h: h, steep, rows_per_record=rows)
    without = summed(lambda h: h, steep[: len(X) - rows], rows_per_record=rows)
    moved = tf.linalg.global_norm(
        [a - b for a, b in zip(with_it, without, strict=True)]
    )
    assert float(moved) <= 1.0 + 1e-4


@pytest.mark.parametrize("length", [None, len(X) - 1])
def test_a_batch_holds_whole_records(length):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        summed(lambda h: h, X[:-1], length)
    assert "rows_per_record=4" in str(caught.value)


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, None, "2"])
def test_bad_numbers_of_rows(rows):
    with pytest.raises(ValueError, match="rows_per_record must be"):
        summed(lambda h: h, rows_per_record=rows)


@pytest.mark.parametrize(
    "more",
    [{"views": 3}, {"people": np.arange(60) // 3, "per_person": 3}],
    ids=["views", "people"],
)
@pytest.mark.parametrize("function", [per_example_norms, clipped_sum])
def test_rows_of_batches_with_several_for_a_record_are_no_records(function, more):
    # A number of rows of no other test, whose batches may still exist.
    x, rows = randoms(60, 2) * 100, 53 if "views" in more else 19
    w, rule = variable(2), [FixedClip(1.0)] * (function is clipped_sum)
    batches = sampling.Poisson(0.5).batches(x, physical_batch_size=rows, **more)

    def gradients(batch, weights, **options):
        loss = tf.linalg.matvec(batch, w) * weights
        return function(loss, [w], *rule, **options)

    x, _, weights = next(iter(batches))
    with pytest.raises(ValueError, match="rows_per_record=batches.rows_per_record .3"):
        tf.function(gradients)(x, weights)
    found = tf.function(gradients)(x, weights, rows_per_record=3)
    assert (found if function is per_example_norms else found[1]).shape == [rows]
    assert tf.function(gradients)(x, weights, rows_per_record=1) is not None
    other = tf.function(gradients)(x[:7], weights[:7])
    assert (other if function is per_example_norms else other[1]).shape == [7]
