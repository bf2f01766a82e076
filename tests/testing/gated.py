"""A layer of a model where a bug may scale gradients and keep the values."""

from __future__ import annotations

import tensorflow as tf

L = tf.keras.layers


def gate(x):
    """The layer's function: the identity, unless a bug is planted."""
    return tf.identity(x)


class Gate(L.Layer):
    """A layer that calls `gate` when the model runs."""

    def call(self, x):
        return gate(x)


def _norms(x):
    return tf.norm(x, axis=-1)


def _damped(x, scale):
    scale = tf.stop_gradient(scale)
    return scale * x + tf.stop_gradient((1 - scale) * x)


def damped(x):
    """The largest row of the batch scales everybody's gradient."""
    return _damped(x, tf.minimum(1.0, 3.0 / tf.sort(_norms(x))[-1]))


def masked(x):
    """Rows far above the median get no gradient."""
    size = _norms(x)
    median = tf.sort(size)[tf.shape(size)[0] // 2]
    return tf.where((size < 2 * median)[:, tf.newaxis], x, tf.stop_gradient(x))


def outlying(x):
    """A row far above the median stops every example's gradient."""
    size = tf.sort(_norms(x))
    alone = size[-1] > 20 * size[tf.shape(size)[0] // 2]
    return tf.cond(alone, lambda: tf.stop_gradient(x), lambda: tf.identity(x))


def scaled_backwards(x):
    """The first row scales everybody's gradient, in a custom gradient."""
    scale = tf.stop_gradient(1 / (1 + _norms(x)[0]))

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda dy: scale * dy

    return identity(x)


def hardest(real):
    """A bug in a loss's `call`: only losses near the largest get a gradient."""

    def call(self, labels, outputs):
        losses = real(self, labels, outputs)
        largest = tf.math.top_k(losses, 1).values[0]
        return tf.where(losses >= 0.5 * largest, losses, tf.stop_gradient(losses))

    return call
