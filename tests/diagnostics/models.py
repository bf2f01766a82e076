"""Softmax regression on digits in double precision, and the same as a Keras model."""

import functools

import numpy as np
import tensorflow as tf
from sklearn import datasets

L = tf.keras.layers


@functools.cache
def digits():
    """Inputs `[1797, 65]` with a constant 1, and labels."""
    data = datasets.load_digits()
    x = np.hstack([data.data / 16, np.ones((len(data.data), 1))])
    return x, data.target


@functools.cache
def regression(steps):
    """Weights after `steps` of gradient descent from zero, step 1, and the residuals.

    Returns:
      `[65, 10]` weights and `[1797, 10]` predictions less labels.
    """
    x, y = digits()
    w = np.zeros((65, 10))

    def residuals():
        z = x @ w
        p = np.exp(z - z.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True) - np.eye(10)[y]

    for _ in range(steps):
        w = w - x.T @ residuals() / len(x)
    return w, residuals()


def keras_regression(steps):
    """The same as a compiled model."""
    head = L.Dense(10, use_bias=False, name="head")
    model = tf.keras.Sequential([tf.keras.Input((65,)), head])
    head.kernel.assign(regression(steps)[0].astype("float32"))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(True))
    return model


def network():
    """A small convolutional network, not compiled."""
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            L.Conv2D(4, 3, activation="relu", name="conv"),
            L.Flatten(),
            L.Dropout(0.5),
            L.Dense(10, name="head"),
        ]
    )


def images(count):
    x, y = digits()
    return x[:count, :64].reshape(-1, 8, 8, 1).astype("float32"), y[:count]
