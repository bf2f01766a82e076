"""The benchmark models that take more than a screen."""

from __future__ import annotations

import tensorflow as tf

import tfdpclip as dpc

L = tf.keras.layers


def residual_network(classes: int = 10) -> tf.keras.Model:
    """ResNet-18 (He et al. 2016) for 32 x 32 images; 16 groups (Wu and He 2018)."""

    def convolution(x, filters, size, strides=1):
        x = L.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return L.GroupNormalization(16)(x)

    images = L.Input((32, 32, 3))
    x = L.ReLU()(convolution(images, 64, 3))
    for filters in (64, 128, 256, 512):
        for strides in (1 if filters == 64 else 2, 1):
            y = L.ReLU()(convolution(x, filters, 3, strides))
            y = convolution(y, filters, 3)
            if strides != 1:
                x = convolution(x, filters, 1, strides)
            x = L.ReLU()(L.Add()([x, y]))
    x = L.GlobalAveragePooling2D()(x)
    return tf.keras.Model(images, L.Dense(classes)(x))


class Positions(L.Layer):
    """Adds a learned vector to every position."""

    def build(self, input_shape):
        self.table = self.add_weight(
            name="table", shape=input_shape[1:], initializer="random_normal"
        )

    def call(self, inputs):
        return inputs + self.table


def vision_transformer(size: int = 224, classes: int = 10) -> tf.keras.Model:
    """ViT-Tiny (Touvron et al. 2021), its patches averaged instead of a class token.

    Width 192, 12 blocks, 3 heads, patches of 16 x 16. All is frozen but the scales and
    offsets of the normalisation layers and the head.
    """
    images = L.Input((size, size, 3))
    x = L.Reshape((-1, 192))(L.Conv2D(192, 16, 16)(images))
    x = Positions()(x)
    for _ in range(12):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(3, 64)(y, y)])
        y = L.LayerNormalization()(x)
        y = L.Dense(192)(L.Dense(768, activation="gelu")(y))
        x = L.Add()([x, y])
    x = L.GlobalAveragePooling1D()(L.LayerNormalization()(x))
    model = tf.keras.Model(images, L.Dense(classes)(x))
    # A head of zeros would make all other gradients zero.
    dpc.keras.film(model, zero_head=False)
    return model


class LowRank(L.Layer):
    """A frozen dense layer, to which a product of low rank is added (Hu et al. 2021).

    Args:
      units: the width of the output.
      rank: of the trained product.
    """

    def __init__(self, units: int, rank: int):
        super().__init__()
        self._units, self._rank = units, rank

    def build(self, input_shape):
        width = input_shape[-1]
        self.kernel = self._weight("kernel", width, self._units, trainable=False)
        self.down = self._weight("down", width, self._rank)
        # Zeros in practice; but then the gradient of the first factor would be zero.
        self.up = self._weight("up", self._rank, self._units)

    def _weight(self, name, *shape, **options):
        made = "random_normal"
        return self.add_weight(name=name, shape=shape, initializer=made, **options)

    def call(self, inputs):
        return inputs @ self.kernel + (inputs @ self.down) @ self.up


class CausalAttention(L.Layer):
    """Attention to earlier positions; queries and values train, at low rank."""

    def __init__(self, heads: int, rank: int):
        super().__init__()
        self._heads, self._rank = heads, rank

    def build(self, input_shape):
        width = input_shape[-1]
        self.query, self.value = (LowRank(width, self._rank) for _ in range(2))
        self.key, self.out = (L.Dense(width, use_bias=False) for _ in range(2))
        for layer in (self.query, self.key, self.value, self.out):
            layer.build(input_shape)

    def _split(self, x):
        rows = tf.reshape(x, [-1, x.shape[1], self._heads, x.shape[2] // self._heads])
        return tf.transpose(rows, [0, 2, 1, 3])

    def call(self, inputs):
        query, key, value = (
            self._split(layer(inputs)) for layer in (self.query, self.key, self.value)
        )
        scores = tf.matmul(query, key, transpose_b=True) / query.shape[-1] ** 0.5
        seen = tf.linalg.band_part(tf.ones(scores.shape[2:]), -1, 0)
        weights = tf.nn.softmax(scores - 1e9 * (1 - seen))
        found = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
        return self.out(tf.reshape(found, [-1, inputs.shape[1], inputs.shape[2]]))


def decoder(
    length: int, rank: int = 8, blocks: int = 6, width: int = 256, words: int = 1_000
) -> tf.keras.Model:
    """A causal language model of which only the products of `LowRank` are trained."""
    tokens = L.Input((length,), dtype="int32")
    x = Positions()(L.Embedding(words, width)(tokens))
    for _ in range(blocks):
        x = L.Add()([x, CausalAttention(4, rank)(L.LayerNormalization()(x))])
        y = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dense(width)(y)])
    x = L.Dense(words)(L.LayerNormalization()(x))
    model = tf.keras.Model(tokens, x)
    for layer in model.layers:
        if isinstance(layer, CausalAttention):
            layer.key.trainable = layer.out.trainable = False
        else:
            layer.trainable = False
    return model
