"""The networks of the geometry paper (Chen, Wu and Hong 2020), and a small one."""

from __future__ import annotations

import tensorflow as tf

#: After how many epochs the paper divides the learning rate of CIFAR-10 by 10.
CIFAR10_DECAY_EPOCHS = 20

_L = tf.keras.layers


def mnist_network(
    kind: str, shape: tuple[int, int, int] = (28, 28, 1)
) -> tf.keras.Model:
    """The MNIST network: 26,010 ("tutorial") or 12,938 ("literal") parameters.

    The paper says "two conv layers with 16 4x4 kernels, then 32 nodes", and the
    tutorial with its learning rate, clip norm and noise has other layers.
    """
    if kind == "tutorial":
        body = [
            _L.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
            _L.MaxPool2D(2, 1),
            _L.Conv2D(32, 4, strides=2, padding="valid", activation="relu"),
            _L.MaxPool2D(2, 1),
        ]
    else:
        body = [
            _L.Conv2D(16, 4, activation="relu"),
            _L.MaxPool2D(2),
            _L.Conv2D(16, 4, activation="relu"),
            _L.MaxPool2D(2),
        ]
    return tf.keras.Sequential(
        [
            _L.Input(shape),
            *body,
            _L.Flatten(),
            _L.Dense(32, activation="relu"),
            _L.Dense(10),
        ]
    )


def cifar10_network(
    padding: str = "same",
    dropout: float = 0.5,
    shape: tuple[int, int, int] = (32, 32, 3),
    dense: int = 1500,
) -> tf.keras.Model:
    """The CIFAR-10 network: 6,179,902 parameters ("same") or 3,491,902 ("valid").

    Where the dropout "at each layer" sits is not in the paper: here after both pools
    and after the dense layer.
    """
    layers = [_L.Input(shape)]
    for filters in (32, 64):
        layers += [
            _L.Conv2D(filters, 3, padding=padding, activation="relu"),
            _L.MaxPool2D(2),
            _L.Dropout(dropout),
        ]
    layers += [
        _L.Flatten(),
        _L.Dense(dense, activation="relu"),
        _L.Dropout(dropout),
        _L.Dense(10),
    ]
    return tf.keras.Sequential(layers)


def digits_network() -> tf.keras.Model:
    """Three dense layers for 64 pixels, 2778 parameters."""
    return tf.keras.Sequential(
        [
            _L.Input((64,)),
            _L.Dense(32, activation="tanh", name="first"),
            _L.Dense(16, activation="tanh", name="second"),
            _L.Dense(10, name="head"),
        ]
    )
