"""The benchmark models, each with a maker of random batches of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.large_models import decoder, residual_network, vision_transformer

L = tf.keras.layers


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to time.

    Attributes:
      build: makes the model.
      batch: `batch(rng, size)` -> (x, y), two arrays.
      parameters: the number of parameters it must have, frozen ones included; None
        where that follows from the options.
    """

    build: Callable[[], tf.keras.Model]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    parameters: int | None = None


def _images(*shape: int, classes: int = 10):
    def batch(rng, size):
        x = rng.standard_normal((size, *shape), np.float32)
        return x, rng.integers(classes, size=size)

    return batch


def tokens(length: int, vocabulary: int, classes: int):
    """Makes batches of random tokens and labels."""

    def batch(rng, size):
        x = rng.integers(vocabulary, size=(size, length))
        return x, rng.integers(classes, size=size)

    return batch


def mnist_cnn() -> Task:
    """The MNIST network of the TensorFlow Privacy tutorials."""

    def build():
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

    return Task(build, _images(28, 28, 1))


def convnet(size: int = 32) -> Task:
    """Nguyen et al. (2023), Table 1, without batch normalisation."""

    def build():
        layers = [L.Input((size, size, 3))]
        for filters in (32, 64, 64, 128):
            layers.append(L.Conv2D(filters, 3, padding="same", activation="relu"))
            last = filters == 128
            layers.append(L.GlobalAveragePooling2D() if last else L.AvgPool2D(2))
        return tf.keras.Sequential([*layers, L.Dense(10)])

    return Task(build, _images(size, size, 3))


def resnet18() -> Task:
    """ResNet-18 for 32 x 32 images, with group normalisation."""
    return Task(residual_network, _images(32, 32, 3))


def mlp(width: int = 512, depth: int = 2) -> Task:
    """784-512-512-10."""

    def build():
        hidden = [L.Dense(width, activation="relu") for _ in range(depth)]
        return tf.keras.Sequential([L.Input((784,)), *hidden, L.Dense(10)])

    return Task(build, _images(784))


def embedding(length: int = 256, vocabulary: int = 10_000) -> Task:
    """A 10,000 x 16 embedding, averaged over 256 tokens, and two dense layers."""

    def build():
        return tf.keras.Sequential(
            [
                L.Input((length,), dtype="int32"),
                L.Embedding(vocabulary, 16),
                L.GlobalAveragePooling1D(),
                L.Dense(16, activation="relu"),
                L.Dense(2),
            ]
        )

    return Task(build, tokens(length, vocabulary, 2))


def _recurrent(layer, unroll: bool, length: int, units: int) -> Task:
    def build():
        return tf.keras.Sequential(
            [
                L.Input((length,), dtype="int32"),
                L.Embedding(1_000, 64),
                layer(units, unroll=unroll),
                L.Dense(10),
            ]
        )

    return Task(build, tokens(length, 1_000, 10))


def lstm(unroll: bool = False, length: int = 32, units: int = 128) -> Task:
    """A word model: embedding 1,000 x 64, LSTM of 128 over 32 tokens."""
    return _recurrent(L.LSTM, unroll, length, units)


def gru(unroll: bool = False, length: int = 32, units: int = 128) -> Task:
    """The same with a GRU."""
    return _recurrent(L.GRU, unroll, length, units)


def transformer(blocks: int = 2, length: int = 64) -> Task:
    """Pre-norm blocks of width 128, 4 heads, 64 tokens of 1,000."""

    def build():
        tokens = L.Input((length,), dtype="int32")
        x = L.Embedding(1_000, 128)(tokens)
        for _ in range(blocks):
            y = L.LayerNormalization()(x)
            x = L.Add()([x, L.MultiHeadAttention(4, 32)(y, y)])
            y = L.LayerNormalization()(x)
            y = L.Dense(128)(L.Dense(512, activation="gelu")(y))
            x = L.Add()([x, y])
        x = L.GlobalAveragePooling1D()(L.LayerNormalization()(x))
        return tf.keras.Model(tokens, L.Dense(10)(x))

    return Task(build, tokens(length, 1_000, 10))


def vit_tiny_film(size: int = 224) -> Task:
    """ViT-Tiny with 16 x 16 patches; scales, offsets and the head train (FiLM)."""

    def build():
        return vision_transformer(size)

    return Task(build, _images(size, size, 3))


def lora(length: int = 128) -> Task:
    """A decoder of six blocks of width 256; low-rank adapters of rank 8 train."""

    def batch(rng, size):
        return tuple(rng.integers(1_000, size=(2, size, length)))

    return Task(lambda: decoder(length), batch)


# For each name the function that makes the model, the options that differ from its
# defaults, and the number of parameters.
_FAMILIES: dict[str, tuple[Callable[..., Task], dict[str, Any], int]] = {
    "mnist_cnn": (mnist_cnn, {}, 26_010),
    "convnet": (convnet, {}, 131_466),
    "resnet18": (resnet18, {}, 11_173_962),
    "mlp": (mlp, {}, 669_706),
    "embedding": (embedding, {}, 160_306),
    "lstm": (lstm, {}, 164_106),
    "lstm_unrolled": (lstm, {"unroll": True}, 164_106),
    "gru": (gru, {}, 139_786),
    "gru_unrolled": (gru, {"unroll": True}, 139_786),
    "transformer": (transformer, {}, 526_090),
    "transformer6": (transformer, {"blocks": 6}, 1_319_178),
    "vit_tiny_film": (vit_tiny_film, {}, 5_525_962),
    "lora": (lora, {}, 5_327_848),
    "lora_512": (lora, {"length": 512}, 5_426_152),
}
NAMES = tuple(_FAMILIES)


def make(name: str, **options: Any) -> Task:
    """Returns a benchmark model by its name.

    Args:
      name: one of `NAMES`.
      options: sizes to change, for scaling studies.

    Returns:
      The task. Without options it knows how many parameters it must have.

    Raises:
      ValueError: if there is no such model.

    >>> make("mlp").build().count_params()
    669706
    """
    if name not in _FAMILIES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}.")
    maker, own, parameters = _FAMILIES[name]
    task = maker(**{**own, **options})
    return task if options else dataclasses.replace(task, parameters=parameters)


def checked_model(task: Task) -> tf.keras.Model:
    """Builds the model; raises ValueError if its number of parameters is wrong."""
    model = task.build()
    if task.parameters not in (None, model.count_params()):
        raise ValueError(
            f"task makes a model of {model.count_params()} parameters, not "
            f"{task.parameters}: correct the model or the number in models.py."
        )
    return model
