"""Losses of masked sequences and of pictures, one example at a time."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.compile_test import COUNT, check, classes, numbers, tokens
from tests.keras.helpers import DPSGD, L, mostly_slow
from tests.stack import KERAS_3
from tfdpclip.gradients import ExampleIsolationError, LossStructureError
from tfdpclip.keras import PerExampleLoss

REFUSALS = (LossStructureError, ExampleIsolationError)
both_shapes = pytest.mark.parametrize("static", [True, False], ids=["static", "any"])


def masked_ids():
    ids = tokens()
    for i in range(COUNT):
        ids[i, 1 + i % 4 :] = 0
    return ids


def tagger():
    """Predictions that carry the mask of the ids."""
    table = L.Embedding(6, 3, mask_zero=True)
    layers = [table, L.Dense(4, "tanh"), L.Dense(3, "softmax")]
    return tf.keras.Sequential([tf.keras.Input((4,), dtype="int32"), *layers])


def test_the_error_for_a_masked_sequence_shows_this_loss():
    model = tagger()
    options = {"noise_multiplier": 0, "expected_batch_size": COUNT}
    model.compile(DPSGD(0.1, clip=1.0, **options), "sparse_categorical_crossentropy")
    with pytest.raises(REFUSALS, match="PerExampleLoss"):
        model.train_on_batch(masked_ids(), classes(4))


@both_shapes
@pytest.mark.parametrize(
    "weighted", mostly_slow(["example"], [None, "example", "step"])
)
@pytest.mark.parametrize("length", mostly_slow([None], [None, 4.0]))
@pytest.mark.slow
def test_masked_sequences(length, weighted, static):
    weight = None
    if weighted == "example":
        weight = np.linspace(0.2, 3, COUNT).astype("float32")
    elif weighted == "step":
        weight = np.linspace(0, 2, COUNT * 4).reshape(COUNT, 4).astype("float32")
    loss = PerExampleLoss("sparse_categorical_crossentropy", length=length)
    check(tagger(), loss, masked_ids(), classes(4), weight=weight, static=static)


def test_what_it_computes():
    ids, y = masked_ids(), classes(4)
    model = tagger()
    lengths = np.minimum(1 + np.arange(COUNT) % 4, 4)
    each = tf.keras.losses.sparse_categorical_crossentropy(y, model(ids)).numpy()
    kept = each * (np.arange(4) < lengths[:, None])
    for length, divisor in ((None, lengths), (5, 5)):
        loss = PerExampleLoss("sparse_categorical_crossentropy", length)
        expected = np.mean(kept.sum(1) / divisor)
        np.testing.assert_allclose(loss(y, model(ids)), expected, rtol=1e-5)


def painter():
    layers = [L.Conv2D(2, 2, padding="same", activation="tanh"), L.Conv2D(1, 1)]
    return tf.keras.Sequential([tf.keras.Input((4, 5, 2)), *layers])


@both_shapes
@pytest.mark.thinned(2)
def test_pictures_with_a_weight_for_each(static):
    weight = np.array([1, 0, 2, 1, 0, 1, 0.5], np.float32)
    x, y = 3 * numbers(4, 5, 2), numbers(4, 5, 1, seed=1)
    check(painter(), PerExampleLoss("mse"), x, y, weight=weight, static=static)


@pytest.mark.parametrize("loss", ["mse", PerExampleLoss("mae")])
@pytest.mark.parametrize("shape", [(4, 5, 2), (5, 2)])
@pytest.mark.thinned(3)
def test_pictures_from_batches(loss, shape):
    """A weight for each example meets a loss for each pixel."""
    x = np.random.default_rng(0).normal(size=(20, *shape)).astype("float32")
    batches = dpc.sampling.Poisson(0.3).batches((x, x[..., :1]), seed=3)
    model = tf.keras.Sequential([tf.keras.Input(shape), L.Dense(2, "tanh"), L.Dense(1)])
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=6)
    model.compile(optimizer, loss)
    model.fit(batches, verbose=0)
    assert int(optimizer.iterations) == len(batches)


def test_a_single_loss_for_each_example_is_what_it_was():
    x, y = 3 * numbers(3), numbers(1, seed=1)
    weight = np.array([1, 0, 2, 1, 0, 1, 0.5], np.float32)
    layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(1)]
    check(tf.keras.Sequential(layers), PerExampleLoss("mse"), x, y, weight=weight)


@pytest.mark.slow
def test_it_is_saved_with_a_model(tmp_path):
    # Keras 3 does not save a delta.
    huber = tf.keras.losses.Huber() if KERAS_3 else tf.keras.losses.Huber(delta=2.0)
    for inner in ("mse", huber, tf.keras.losses.mae):
        model = painter()
        model.compile("sgd", PerExampleLoss(inner, length=7))
        model.save(tmp_path / "model.keras")
        loaded = tf.keras.models.load_model(tmp_path / "model.keras")
        x, y = numbers(4, 5, 2), numbers(4, 5, 1, seed=1)
        before = model.evaluate(x, y, verbose=0)
        assert loaded.evaluate(x, y, verbose=0) == pytest.approx(before)


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="loss must"):
        PerExampleLoss(3)
    with pytest.raises(ValueError, match="length"):
        PerExampleLoss("mse", length=0)
    with pytest.raises(ValueError, match="sample_weight"):
        PerExampleLoss("mse")(tf.zeros([2, 3]), tf.zeros([2, 3]), tf.ones([2, 3, 4]))
    with pytest.raises(ValueError, match="reduce"):
        PerExampleLoss(lambda y, p: tf.reduce_mean(y - p))(tf.zeros([2]), tf.zeros([2]))
