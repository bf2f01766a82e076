"""The benchmark models, each with a maker of random batches of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

L = tf.keras.layers


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to time.

    Attributes:
      build: makes the model.
      batch: `batch(rng, size)` -> (x, y).
      parameters: how many trainable parameters it must have.
    """

    build: Callable[[], tf.keras.Model]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    parameters: int


def _images(*shape: int, classes: int = 10):
    def batch(rng, size):
        x = rng.standard_normal((size, *shape)).astype(np.float32)
        return x, rng.integers(classes, size=size)

    return batch


def _tokens(length: int, vocabulary: int, classes: int):
    def batch(rng, size):
        x = rng.integers(vocabulary, size=(size, length))
        return x, rng.integers(classes, size=size)

    return batch


def mnist_cnn() -> tf.keras.Model:
    """The MNIST network of the TensorFlow Privacy tutorials."""
    return tf.keras.Sequential(
        [
            L.Input((28, 28, 1)),
            L.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
            L.MaxPool2D(2, 1),
            L.Conv2D(32, 4, strides=2, activation="relu"),
            L.MaxPool2D(2, 1),
            L.Flatten(),
            L.Dense(32, activation="relu"),
            L.Dense(10),
        ]
    )


def convnet() -> tf.keras.Model:
    """Nguyen et al. (2023), Table 1, without batch normalisation."""
    layers = [L.Input((32, 32, 3))]
    for filters in (32, 64, 64, 128):
        layers.append(L.Conv2D(filters, 3, padding="same", activation="relu"))
        layers.append(L.AvgPool2D() if filters != 128 else L.GlobalAveragePooling2D())
    return tf.keras.Sequential([*layers, L.Dense(10)])


def mlp() -> tf.keras.Model:
    """784-512-512-10."""
    return tf.keras.Sequential(
        [
            L.Input((784,)),
            L.Dense(512, activation="relu"),
            L.Dense(512, activation="relu"),
            L.Dense(10),
        ]
    )


def embedding() -> tf.keras.Model:
    """A 10,000 x 16 embedding, averaged over 256 tokens, and two dense layers."""
    return tf.keras.Sequential(
        [
            L.Input((256,), dtype="int32"),
            L.Embedding(10_000, 16),
            L.GlobalAveragePooling1D(),
            L.Dense(16, activation="relu"),
            L.Dense(2),
        ]
    )


def transformer() -> tf.keras.Model:
    """Two pre-norm blocks, width 128, 4 heads, 64 tokens of 1,000."""
    tokens = L.Input((64,), dtype="int32")
    x = L.Embedding(1_000, 128)(tokens)
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(4, 32)(y, y)])
        y = L.LayerNormalization()(x)
        y = L.Dense(128)(L.Dense(512, activation="gelu")(y))
        x = L.Add()([x, y])
    x = L.GlobalAveragePooling1D()(L.LayerNormalization()(x))
    return tf.keras.Model(tokens, L.Dense(10)(x))


def lstm() -> tf.keras.Model:
    """A word model: embedding 1,000 x 64, LSTM of 128 over 32 tokens."""
    return tf.keras.Sequential(
        [
            L.Input((32,), dtype="int32"),
            L.Embedding(1_000, 64),
            L.LSTM(128),
            L.Dense(10),
        ]
    )


TASKS = {
    "mnist_cnn": Task(mnist_cnn, _images(28, 28, 1), 26_010),
    "convnet": Task(convnet, _images(32, 32, 3), 131_466),
    "mlp": Task(mlp, _images(784), 669_706),
    "embedding": Task(embedding, _tokens(256, 10_000, 2), 160_306),
    "transformer": Task(transformer, _tokens(64, 1_000, 10), 526_090),
    "lstm": Task(lstm, _tokens(32, 1_000, 10), 164_106),
}
