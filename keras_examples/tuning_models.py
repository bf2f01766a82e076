"""Small models of many kinds, and scores, for tasks that are trained many times.

Every function returns an untrained model with logits (or a number to predict) as its
output; whoever calls sets the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn import metrics

from driver_kit.lazy import layers as _L
from driver_kit.lazy import tf
from keras_examples import tiny_language

Build = Callable[[], Any]
Score = Callable[[np.ndarray, np.ndarray], float]


def dense(
    inputs: int, units: tuple[int, ...], outputs: int, activation: str = "relu"
) -> Build:
    """Dense layers; none but the last for a linear model."""
    return lambda: tf.keras.Sequential(
        [_L.Input((inputs,)), *(_L.Dense(n, activation) for n in units)]
        + [_L.Dense(outputs)]
    )


def convolutions(
    shape: tuple[int, int, int], filters: tuple[int, ...], outputs: int, activation: str
) -> Build:
    """Convolutions with a stride of 2 each, a dense layer, and the outputs."""
    return lambda: tf.keras.Sequential(
        [_L.Input(shape)]
        + [_L.Conv2D(n, 4, 2, "same", activation=activation) for n in filters]
        + [_L.Flatten(), _L.Dense(32, activation), _L.Dense(outputs)]
    )


def pooled_embedding(length: int, words: int, width: int, outputs: int) -> Build:
    """The mean of embedded words, and a linear layer."""
    return lambda: tf.keras.Sequential(
        [
            _L.Input((length,), dtype="int32"),
            _L.Embedding(words, width),
            _L.GlobalAveragePooling1D(),
            _L.Dense(outputs),
        ]
    )


def lstm(length: int, symbols: int, width: int, outputs: int) -> Build:
    """Embedded symbols, an LSTM, and a linear layer."""
    return lambda: tf.keras.Sequential(
        [
            _L.Input((length,), dtype="int32"),
            _L.Embedding(symbols, width),
            _L.LSTM(2 * width),
            _L.Dense(outputs),
        ]
    )


def gru(shape: tuple[int, int], width: int, outputs: int) -> Build:
    """A GRU over a series, and a linear layer."""
    return lambda: tf.keras.Sequential(
        [_L.Input(shape), _L.GRU(width), _L.Dense(outputs)]
    )


def low_rank_layers(
    inputs: int, units: tuple[int, ...], outputs: int, train: str
) -> Build:
    """Dense layers by name, whose kernels may be frozen with LoRA beside them.

    Args:
      inputs: the width of the inputs.
      units: the widths of the hidden layers.
      outputs: the number of outputs.
      train: "full" for all weights; "lora" for updates of rank 4 and the last layer.
    """
    return lambda: tf.keras.Sequential(
        [_L.Input((inputs,))]
        + [
            tiny_language.Linear(n, train, 4, "relu", name=f"hidden{k}")
            for k, n in enumerate(units)
        ]
        + [tiny_language.Linear(outputs, "full", name="classifier")]
    )


def from_public(build: Build, values: dict[str, np.ndarray]) -> Build:
    """The models of `build`, with public weights in place of random ones."""

    def start() -> tf.keras.Model:
        model = build()
        tiny_language.assign(model, values)
        return model

    return start


def wavelets(images: np.ndarray) -> np.ndarray:
    """Features of images `[n, 28, 28, 1]` by fixed wavelets: nothing is learned.

    The sizes of the images' oscillations in eight directions and two widths, and the
    images, are averaged over a grid of 4 by 4: `[n, 16 * 17]`.
    """
    waves = []
    places = np.arange(11) - 5.0
    row, column = np.meshgrid(places, places, indexing="ij")
    for width in (1.2, 2.4):
        window = np.exp(-(row**2 + column**2) / (2 * width**2))
        for angle in np.arange(8) * np.pi / 8:
            phase = (row * np.cos(angle) + column * np.sin(angle)) * 1.6 / width
            wave = window * np.exp(1j * phase)
            wave -= window * wave.sum() / window.sum()
            waves.append(wave / np.abs(wave).sum())
    kernel = np.stack(waves, axis=-1)[:, :, None]
    parts = [
        tf.constant(part.astype(np.float32)) for part in (kernel.real, kernel.imag)
    ]
    pooled = []
    for k in range(0, len(images), 1000):
        x = tf.constant(images[k : k + 1000])
        real, imaginary = (tf.nn.conv2d(x, part, 1, "SAME") for part in parts)
        sizes = tf.sqrt(tf.square(real) + tf.square(imaginary) + 1e-12)
        maps = tf.concat([10 * sizes, x], axis=-1)
        pooled.append(tf.nn.avg_pool2d(maps, 7, 7, "VALID").numpy())
    features = np.concatenate(pooled)
    return features.reshape(len(images), -1)


def accuracy(labels: np.ndarray, outputs: np.ndarray) -> float:
    """The share of right classes, in percent.

    >>> accuracy(np.array([0, 1]), np.array([[1.0, 0.0], [1.0, 0.0]]))
    50.0
    """
    return 100 * float(np.mean(outputs.argmax(axis=1) == labels))


def macro_recall(labels: np.ndarray, outputs: np.ndarray) -> float:
    """The mean over classes of the share of right answers, in percent.

    >>> macro_recall(np.array([0, 0, 0, 1]), np.array([[1.0, 0.0]] * 4))
    50.0
    """
    right = outputs.argmax(axis=1) == labels
    return 100 * float(np.mean([right[labels == k].mean() for k in np.unique(labels)]))


def area(labels: np.ndarray, outputs: np.ndarray) -> float:
    """The area under the ROC curve, in percent; of several labels, the mean.

    >>> area(np.array([[0.0], [1.0], [1.0]]), np.array([[0.1], [0.3], [0.2]]))
    100.0
    """
    return 100 * float(metrics.roc_auc_score(labels, outputs))


def explained(labels: np.ndarray, outputs: np.ndarray) -> float:
    """The explained share of the variance (R2), in percent; 0 for less than none.

    >>> explained(np.array([[1.0], [3.0]]), np.array([[1.0], [3.0]]))
    100.0
    """
    return 100 * max(0.0, float(metrics.r2_score(labels, outputs)))
