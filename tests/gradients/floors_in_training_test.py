"""Floors of norms hardly ever decide in training: where parts of a gradient cancel."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn import datasets

from tfdpclip.clipping import QuantileClip
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.gradients.forms import floors
from tfdpclip.keras import DPAdam

L = tf.keras.layers
BATCH = 64


def convolutional():
    layers = [
        L.Reshape((8, 8, 1)),
        L.Conv2D(8, 3, padding="same", activation="relu"),
        L.MaxPool2D(),
        L.Conv2D(16, 3, padding="same", activation="relu"),
        L.Flatten(),
        L.Dense(10),
    ]
    return tf.keras.Sequential([L.Input((64,)), *layers])


def recurrent():
    layers = [L.Reshape((8, 8)), L.LSTM(16), L.Dense(10)]
    return tf.keras.Sequential([L.Input((64,)), *layers])


def attending():
    """Attends to the eight rows of an image, whose grey levels are used as tokens."""
    given = L.Input((64,))
    tokens = L.Lambda(lambda x: tf.cast(8 * (x + 1), tf.int32))(given)
    h = L.AveragePooling1D(8)(L.Embedding(17, 16)(tokens))
    h = h + L.MultiHeadAttention(2, 8, name="attention")(h, h)
    h = h + L.Dense(16)(L.Dense(32, "gelu")(L.LayerNormalization()(h)))
    return tf.keras.Model(given, L.Dense(10)(L.Flatten()(h)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [convolutional, recurrent, attending])
def test_no_example_is_clipped_harder_for_its_floor(build, monkeypatch):
    """From the first step to the end of training, by less than 1e-3 of its norm."""
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = (images[:1024] / 8 - 1).astype(np.float32), labels[:1024]
    model = build()
    variables = model.trainable_variables
    options = {"noise_multiplier": 1.0, "expected_batch_size": BATCH}
    optimizer = DPAdam(2e-3, clip=QuantileClip(0.5), check_gradients="never", **options)

    def losses(x, y):
        return tf.keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )

    @tf.function(autograph=False)
    def step(x, y):
        optimizer.minimize(losses(x, y), variables)

    @tf.function(autograph=False)
    def measured(x, y):
        found = PerExampleGradients(losses(x, y), variables, check_gradients="never")
        return found.squares_by_variable(), found.terms_by_variable()

    with monkeypatch.context() as without_floors:
        without_floors.setattr(floors, "FLOOR", 1e-12)
        squares_of = measured.get_concrete_function(x[:BATCH], y[:BATCH])
    paths = [getattr(v, "path", v.name) for v in variables]
    below = set()
    for at in range(6 * len(x) // BATCH):
        rows = slice(at * BATCH % len(x), at * BATCH % len(x) + BATCH)
        if rows.start == 0:
            found = squares_of(tf.constant(x[rows]), tf.constant(y[rows]))
            squares, parts = (np.array(part) for part in found)
            with_floors = np.maximum(squares, parts / 16).sum(0)
            assert np.all(with_floors <= squares.sum(0) * 1.002)
            below |= {paths[i] for i in np.flatnonzero((squares < parts / 16).any(1))}
        step(x[rows], y[rows])
    # Keys' biases have no gradient, as a softmax is the same with them; nor, nearly,
    # have queries while all keys are alike. The few entries of a bias may cancel by
    # chance in one example, as the noise of the training is fresh.
    assert all("attention" in path or "bias" in path for path in below), below
    assert any("key" in path for path in below) == (build is attending)
