"""The two benchmark models that take more than a screen: ResNet-18 and ViT-Tiny."""

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
