"""The networks of the batch clipping paper (Nguyen et al. 2023), and its augmentation.

Images are 32 by 32. `norm` is "batch" or "none".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from driver_kit.lazy import layers as _L
from driver_kit.lazy import tf

SIDE, CLASSES = 32, 10

#: Mean and standard deviation of the pixels in [0, 1], by number of channels.
PIXELS = {
    1: ((0.1307,), (0.3081,)),
    3: ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}


def convnet(channels: int, norm: str = "batch", bias: bool = True) -> tf.keras.Model:
    """Four convolutions with average pools: 132,042 parameters, 131,466 without norm.

    131,754 with batch normalisation and without `bias` of the convolutions.
    """
    layers = [_L.Input((SIDE, SIDE, channels))]
    for filters in (32, 64, 64, 128):
        last = filters == 128
        layers.append(_L.Conv2D(filters, 3, padding="same", use_bias=bias))
        layers.append(_L.ReLU())
        layers += _norm(norm)
        layers.append(_L.GlobalAveragePooling2D() if last else _L.AveragePooling2D(2))
    return tf.keras.Sequential([*layers, _L.Dense(CLASSES)])


def bn_lenet5(channels: int, norm: str = "batch", bias: bool = True) -> tf.keras.Model:
    """LeNet-5 with batch normalisation: 61,990 parameters; 61,706 without norm."""
    layers = [_L.Input((SIDE, SIDE, channels))]
    for filters, pooled in ((6, True), (16, True), (120, False)):
        layers.append(_L.Conv2D(filters, 5, activation="tanh", use_bias=bias))
        layers += _norm(norm)
        if pooled:
            layers.append(_L.AveragePooling2D(2))
    layers += [_L.Flatten(), _L.Dense(84, activation="tanh"), _L.Dense(CLASSES)]
    return tf.keras.Sequential(layers)


def resnet18(channels: int, norm: str = "batch", bias: bool = False) -> tf.keras.Model:
    """ResNet-18 for small images: 11,173,962 parameters; 11,164,362 without norm."""

    def conv(x, filters, size, strides=1):
        x = _L.Conv2D(filters, size, strides, padding="same", use_bias=bias)(x)
        for layer in _norm(norm):
            x = layer(x)
        return x

    inputs = tf.keras.Input((SIDE, SIDE, channels))
    x = _L.ReLU()(conv(inputs, 64, 3))
    for stage, filters in enumerate((64, 128, 256, 512)):
        for block in range(2):
            strides = 2 if stage and not block else 1
            shortcut = conv(x, filters, 1, strides) if strides == 2 else x
            y = _L.ReLU()(conv(x, filters, 3, strides))
            x = _L.ReLU()(_L.Add()([conv(y, filters, 3), shortcut]))
    x = _L.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, _L.Dense(CLASSES)(x))


NETWORKS: dict[str, Callable[..., Any]] = {
    "convnet": convnet,
    "bn_lenet5": bn_lenet5,
    "resnet18": resnet18,
}


def _norm(norm: str) -> list[tf.keras.layers.Layer]:
    return [_L.BatchNormalization()] if norm == "batch" else []


def normalized(images: np.ndarray) -> np.ndarray:
    """uint8 images, padded to 32 by 32 around the middle, with mean 0 and stddev 1."""
    missing = SIDE - images.shape[1]
    before = missing // 2
    edges = ((0, 0), (before, missing - before), (before, missing - before), (0, 0))
    mean, deviation = PIXELS[images.shape[-1]]
    padded = np.pad(images, edges).astype(np.float32) / 255
    return (padded - np.float32(mean)) / np.float32(deviation)


def augment(x: tf.Tensor) -> tf.Tensor:
    """Random crops of images padded by 4, to 32 by 32, and random mirror images.

    Args:
      x: `[batch, height, width, channels]`, in [0, 1].

    Returns:
      `[batch, 32, 32, channels]`, normalised. Each image has its own crop, so that
      examples stay independent.
    """
    channels = x.shape[-1]
    padded = tf.pad(x, [[0, 0], [4, 4], [4, 4], [0, 0]])
    count = tf.shape(x)[0]
    # Rows first, then, with both axes exchanged, columns.
    for _ in range(2):
        room = padded.shape[1] - SIDE + 1
        start = tf.random.uniform([count, 1], 0, room, tf.int32)
        rows = tf.gather(padded, start + tf.range(SIDE), axis=1, batch_dims=1)
        padded = tf.transpose(rows, [0, 2, 1, 3])
    mirrored = tf.random.uniform([count, 1, 1, 1]) < 0.5
    padded = tf.where(mirrored, padded[:, :, ::-1], padded)
    padded = tf.ensure_shape(padded, [None, SIDE, SIDE, channels])
    mean, deviation = PIXELS[channels]
    return (padded - tf.constant(mean)) / tf.constant(deviation)
