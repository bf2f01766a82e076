"""Models with layers that normalise, and images for them."""

import numpy as np
import tensorflow as tf

from tests.keras.helpers import L


class ClassToken(L.Layer):
    """Puts a trained token in front, and adds trained positions."""

    def build(self, shape):
        self.token = self.add_weight(name="token", shape=(1, 1, shape[-1]))
        self.positions = self.add_weight(
            name="positions", shape=(1, shape[1] + 1, shape[-1])
        )

    def call(self, x):
        token = tf.tile(self.token, [tf.shape(x)[0], 1, 1])
        return tf.concat([token, x], 1) + self.positions


class First(L.Layer):
    def call(self, x):
        return x[:, 0]


def vision_transformer(size, patch, width, depth, heads, classes):
    """The architecture of Dosovitskiy et al. (2021), without dropout."""
    inputs = tf.keras.Input((size, size, 3))
    x = L.Conv2D(width, patch, patch, name="embedding")(inputs)
    x = ClassToken(name="tokens")(L.Reshape((-1, width))(x))
    for i in range(depth):
        y = L.LayerNormalization(epsilon=1e-6, name=f"norm{i}a")(x)
        x = x + L.MultiHeadAttention(heads, width // heads, name=f"attention{i}")(y, y)
        y = L.LayerNormalization(epsilon=1e-6, name=f"norm{i}b")(x)
        y = L.Dense(4 * width, tf.nn.gelu, name=f"in{i}")(y)
        x = x + L.Dense(width, name=f"out{i}")(y)
    x = First()(L.LayerNormalization(epsilon=1e-6, name="norm")(x))
    return tf.keras.Model(inputs, L.Dense(classes, name="head")(x))


def small_vit():
    return vision_transformer(8, 2, 16, 2, 2, 3)


class Block(L.Layer):
    """A layer with a variable of its own around a normalisation layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.LayerNormalization()
        self.dense = L.Dense(4)

    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=(), initializer="ones")
        self.count = self.add_weight(name="count", shape=(), trainable=False)

    def call(self, x):
        return self.dense(self.norm(x)) * self.gain


def batchnorm_model(last="softmax"):
    inputs = tf.keras.Input((6, 6, 3))
    x = L.Conv2D(32, 3, use_bias=False, name="conv")(inputs)
    x = L.BatchNormalization(name="bn")(x)
    x = L.ReLU()(x)
    x = L.GlobalAveragePooling2D()(x)
    x = L.Dense(4, name="dense")(x)
    return tf.keras.Model(inputs, L.Activation(last)(x) if last else x)


def images(count=8, size=6, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, size, size, 3)).astype("float32")
    return x, rng.integers(3, size=count)
