"""Ops that combine examples are refused with a line to write for that op or layer."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import L
from tests.stack import KERAS_3
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    per_example_norms,
)
from tfdpclip.gradients.loss import advice
from tfdpclip.keras import DPSGD
from tfdpclip.keras.isolation import check_isolation

REFUSALS = (ExampleIsolationError, LossStructureError)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype("float32")
Y = RNG.integers(2, size=8)
WORDS = np.array(list("abcdabcd"))[:, np.newaxis]


def logits(classes=2):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(loss, *before):
    layers = [tf.keras.Input((6,)), *before, L.Dense(4)]
    return tf.keras.Sequential(layers), X, Y, loss


class Recommender(tf.keras.Model):
    """As on keras.io, "Collaborative Filtering for Movie Recommendations"."""

    def __init__(self):
        super().__init__()
        self.user, self.movie = L.Embedding(20, 4), L.Embedding(20, 4)

    def call(self, ids):
        product = tf.tensordot(self.user(ids[:, 0]), self.movie(ids[:, 1]), 2)
        return tf.nn.sigmoid(product + tf.zeros([tf.shape(ids)[0], 1]))


class Moe(L.Layer):
    """A layer of experts whose router balances the batch."""

    def __init__(self):
        super().__init__(name="sparse_moe_block")
        self.router, self.expert = L.Dense(3), L.Dense(6)

    def call(self, x):
        shares = tf.nn.softmax(self.router(x))
        chosen = tf.one_hot(tf.argmax(shares, -1), 3)
        balance = tf.reduce_mean(shares, 0) * tf.reduce_mean(chosen, 0)
        self.add_loss(3.0 * tf.reduce_sum(balance))
        return self.expert(x) * tf.reduce_max(shares, -1, keepdims=True)


class InTraining(L.Layer):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x, training=True)


def recommender():
    ids, ratings = RNG.integers(20, size=(8, 2)), RNG.random((8, 1))
    return Recommender(), ids, ratings.astype("float32"), "binary_crossentropy"


def in_batch(labels, z):
    del labels
    pairs = tf.matmul(z, z, transpose_b=True)
    places = tf.range(tf.shape(z)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(places, pairs)


def barlow_twins(labels, z):
    del labels
    return tf.reduce_sum((tf.matmul(z, z, transpose_a=True) / 8.0 - tf.eye(4)) ** 2)


def spread(labels, z):
    del labels
    return tf.reduce_mean(z**2, -1) + tf.math.reduce_std(z, 0)[0]


def images():
    layers = [InTraining(L.Equalization((0, 255))), L.Flatten(), L.Dense(2)]
    x = RNG.uniform(0, 255, (8, 4, 4, 3)).astype("float32")
    return tf.keras.Sequential([tf.keras.Input((4, 4, 3)), *layers]), x, Y, logits()


def characters(loss):
    layers = [tf.keras.Input((6, 1)), L.Dense(5, activation="softmax")]
    labels = RNG.integers(4, size=(8, 3))
    return tf.keras.Sequential(layers), X[..., np.newaxis], labels, loss


def ctc_batch_cost(y, y_pred):
    ones = tf.ones([tf.shape(y_pred)[0], 1], tf.int32)
    return tf.keras.backend.ctc_batch_cost(y, y_pred, 6 * ones, 3 * ones)


def segments(x):
    rows = tf.repeat(tf.range(tf.shape(x)[0]), 6)
    return tf.math.segment_sum(tf.reshape(x, [-1, 1]), rows)


def neighbours(x):
    """The nodes of one graph that is made of the graphs of all examples."""
    nodes = tf.reshape(x, [-1, 1])
    senders = tf.cast(tf.clip_by_value(nodes[:, 0], 0, 3), tf.int32)
    messages = tf.gather(nodes, senders)
    return tf.reshape(tf.math.segment_sum(messages, tf.range(48)), [-1, 6])


CASES = {
    "batch normalisation": (
        lambda: dense(logits(), L.BatchNormalization()),
        r"convert_batchnorm\(model\)",
    ),
    "collaborative filtering": (recommender, r"reduce_sum\(a \* b, axis=-1, keepdims"),
    "contrast": (lambda: dense(in_batch), r"in-batch contrastive .*candidates that"),
    "correlations": (lambda: dense(barlow_twins), r"Barlow Twins.*reduce_sum\(a \* b"),
    "deviation": (lambda: dense(spread), r"one number of the whole batch.*axis=-1"),
    "largest": (
        lambda: dense(lambda y, z: tf.reduce_mean(z, -1) / tf.reduce_max(z)),
        r"one number of the whole batch.*axis=-1",
    ),
    "mixup": (
        lambda: dense(logits(), L.Lambda(lambda x: x + tf.roll(x, 1, 0))),
        "as MixUp and CutMix do.*own views",
    ),
    "segments of rows": (
        lambda: dense(logits(), L.Lambda(segments, output_shape=(1,))),
        r"an axis of their own.*tf.reduce_sum\(x, axis=1\)",
    ),
    "graphs": (
        lambda: dense(logits(), L.Lambda(neighbours, output_shape=(6,))),
        r"an axis of their own.*tf.gather\(x, places, batch_dims=1\)",
    ),
    "router": (lambda: dense(logits(), Moe()), "load-balancing loss.*add_loss out"),
    "images": (images, "Equalization takes one histogram.*single images"),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES)
def test_an_op_that_combines_examples_is_refused_with_advice_of_its_own(case):
    made, expected = CASES[case]
    if case == "images" and not KERAS_3:
        pytest.skip("Equalization is a layer of Keras 3")
    model, x, y, loss = made()
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, loss)
    with pytest.raises(REFUSALS) as found:
        model.fit(x, y, batch_size=8, verbose=0)
    text = re.sub(r"\s+", " ", str(found.value))
    assert re.search(expected, text)
    if case != "batch normalisation":
        assert "convert_batchnorm" not in text and "atch normalisation" not in text


@pytest.mark.slow
def test_what_is_said_of_indices_trains():
    places, receivers, nodes = tf.constant([[1, 0, 2]]), tf.constant([[0, 0, 1]]), 3

    def message_passing(x):
        x, many = tf.reshape(x, [-1, 3, 2]), tf.shape(x)[0]
        messages = tf.gather(x, tf.tile(places, [many, 1]), batch_dims=1)
        written = tf.one_hot(tf.tile(receivers, [many, 1]), nodes)
        received = tf.matmul(written, messages, transpose_a=True)
        return tf.reduce_sum(received, axis=1)

    layer = L.Lambda(message_passing, output_shape=(2,))
    model, x, y, loss = dense(logits(), L.Dense(6), layer)
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["StringLookup", "IntegerLookup", "Hashing"])
def test_what_is_said_of_lookups_trains(layer):
    """`output_mode="int"`, followed by a layer that encodes the integers."""
    x = tf.keras.Input((1,), dtype="int64" if layer == "IntegerLookup" else "string")
    made = {
        "StringLookup": lambda: L.StringLookup(vocabulary=[*"abcd"]),
        "IntegerLookup": lambda: L.IntegerLookup(vocabulary=[0, 1, 2, 3]),
        "Hashing": lambda: L.Hashing(5),
    }[layer]
    coded = L.CategoryEncoding(5, output_mode="multi_hot")(made()(x))
    model = tf.keras.Model(x, L.Dense(2)(coded))
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, logits())
    data = np.arange(8)[:, np.newaxis] % 4 if layer == "IntegerLookup" else WORDS
    model.fit(tf.constant(data), Y, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning")
@pytest.mark.parametrize("name", ["written", "of Keras"])
def test_ctc_trains(name):
    def written(y, y_pred):
        lengths = tf.fill([tf.shape(y_pred)[0]], 6)
        logits, each = tf.math.log(y_pred + 1e-7), tf.fill(tf.shape(lengths), 3)
        options = {"logits_time_major": False, "blank_index": -1}
        return tf.nn.ctc_loss(tf.cast(y, tf.int32), logits, each, lengths, **options)

    of_keras = tf.keras.losses.CTC() if KERAS_3 else ctc_batch_cost
    model, x, y, loss = characters(of_keras if name == "of Keras" else written)
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 1


class Endpoint(L.Layer):
    """The layer of Keras's example of captchas."""

    def call(self, y, y_pred):
        self.add_loss(ctc_batch_cost(y, y_pred))
        return y_pred


@pytest.mark.slow
@pytest.mark.skipif(KERAS_3, reason="ctc_batch_cost is of Keras 2")
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning")
def test_the_layer_of_captchas_trains():
    x, y = tf.keras.Input((6, 1)), tf.keras.Input((3,))
    found = L.Dense(5, activation="softmax")(x)
    model = tf.keras.Model((x, y), Endpoint()(y, found))
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer)
    labels = RNG.integers(4, size=(8, 3)).astype("float32")
    model.fit((X[..., np.newaxis], labels), batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning")
def test_a_recurrent_layer_before_ctc_trains_one_by_one():
    loss = tf.keras.losses.CTC() if KERAS_3 else ctc_batch_cost
    _, x, y, _ = characters(loss)

    def fit(layer):
        layers = [layer, L.Dense(5, activation="softmax")]
        model = tf.keras.Sequential([tf.keras.Input((6, 1)), *layers])
        optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=8, verbose=0)
        assert int(optimizer.iterations) == 1

    fit(L.LSTM(3, return_sequences=True))


class Normalised(tf.keras.Model):
    """`convert_batchnorm` cannot rebuild a model whose structure is in its code."""

    def __init__(self, norm):
        super().__init__()
        self.hidden, self.norm, self.head = L.Dense(16), norm, L.Dense(5)

    def call(self, x, training=False):
        return self.head(self.norm(self.hidden(x), training=training))


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_a_subclassed_model_is_told_a_line_that_works_there(unit):
    def fit(norm):
        model = Normalised(norm)
        options = {"expected_batch_size": 8} if unit == "example" else {"unit": unit}
        optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, **options)
        model.compile(optimizer, "mse")
        model.fit(X, X[:, :5], batch_size=8, verbose=0)
        return optimizer

    with pytest.raises(ValueError, match="subclass of tf.keras.Model") as found:
        fit(L.BatchNormalization())
    line = r"tf\.keras\.layers\.GroupNormalization\(\d\)"
    norm = eval(re.search(line, str(found.value))[0])
    assert int(fit(norm).iterations) == len(X) // 8


def test_each_advice_is_short_and_is_of_one_op_or_layer():
    """Texts have fewer than 60 words, so that people read them."""
    texts = [row.text for row in advice._TABLE] + [advice.OTHERWISE]
    assert len(texts) > 10
    for text in texts:
        assert len(text.split()) < 60 and text.endswith(".") and "  " not in text


def test_the_check_of_a_model_names_what_the_model_has():
    x, y = X[:6], X[:6]
    normalised = tf.keras.Sequential([tf.keras.Input((6,)), L.BatchNormalization()])
    with pytest.raises(ExampleIsolationError, match="convert_batchnorm"):
        check_isolation(normalised, x, y, loss=tf.keras.losses.mse)
    mixed = tf.keras.Sequential([tf.keras.Input((6,)), L.Lambda(lambda x: x - x[:1])])
    with pytest.raises(ExampleIsolationError) as found:
        check_isolation(mixed, x, y, loss=tf.keras.losses.mse)
    assert "convert_batchnorm" not in str(found.value)
    assert "of that example alone" in str(found.value)


def test_what_is_said_of_masks_keeps_the_gradients_of_the_rows_that_count():
    weights = tf.Variable(tf.ones([6, 1]))
    x = X[:4].astype("float32")
    counts = x[:, 0] > np.sort(x[:, 0])[1]  # Two of four rows.

    def losses(rows):
        return tf.square(rows @ weights)[:, 0]

    @tf.function
    def masked(x, counts):
        kept = tf.boolean_mask(losses(x), counts)
        return per_example_norms(tf.reduce_sum(kept), [weights])

    @tf.function
    def written(x, counts):
        each = losses(x)
        return per_example_norms(each * tf.cast(counts, each.dtype), [weights])

    with pytest.raises(REFUSALS, match=r"loss \* tf.cast\(condition, loss.dtype\)"):
        masked(x, counts)
    alone = []
    for row in x[:, np.newaxis]:
        with tf.GradientTape() as tape:
            loss = losses(row)
        alone.append(tf.norm(tape.gradient(loss, weights)))
    found = written(x, counts)
    np.testing.assert_allclose(found, np.where(counts, alone, 0.0), rtol=1e-5)
