"""Networks of the transfer experiments; `checkpoints` loads their published weights.

ViT as in AugReg (Steiner et al. 2022), ResNet v2 as in BiT-M (Kolesnikov et al. 2020),
and EfficientNet-Lite0, for which see `efficientnet_lite`. All are made of ordinary
Keras layers.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from driver_kit.settings import UsageError
from keras_examples import efficientnet_lite
from keras_examples.network_sizes import MODELS, BiT, EfficientNetLite, ViT
from keras_examples.preprocessing import Preprocess

_L = tf.keras.layers


class Tokens(_L.Layer):
    """Puts the class token in front and adds the position embedding."""

    def build(self, shape):
        self.cls = self.add_weight(
            name="cls", shape=(1, 1, shape[-1]), initializer="zeros"
        )
        self.positions = self.add_weight(
            name="pos_embedding",
            shape=(1, shape[1] + 1, shape[-1]),
            initializer=tf.keras.initializers.RandomNormal(stddev=0.02),
        )
        super().build(shape)

    def call(self, x):
        cls = tf.tile(self.cls, [tf.shape(x)[0], 1, 1])
        return tf.concat([cls, x], axis=1) + self.positions


class FirstToken(_L.Layer):
    """The class token."""

    def call(self, x):
        return x[:, 0]


class StdConv2D(_L.Conv2D):
    """A convolution with standardised weights: mean 0 and variance 1 per filter."""

    def convolution_op(self, inputs, kernel):
        mean, variance = tf.nn.moments(kernel, [0, 1, 2], keepdims=True)
        return super().convolution_op(
            inputs, (kernel - mean) / tf.sqrt(variance + 1e-10)
        )


def build_vit(config: ViT, classes: int, crop: bool = False) -> tf.keras.Model:
    """A vision transformer with a linear head of zeros on its class token."""
    norm = functools.partial(_L.LayerNormalization, epsilon=1e-6)
    inputs = tf.keras.Input((None, None, 3))
    x = Preprocess(config.image, crop, name="preprocess")(inputs)
    x = _L.Conv2D(config.width, config.patch, config.patch, name="embedding")(x)
    x = _L.Reshape((config.grid**2, config.width))(x)
    x = Tokens(name="tokens")(x)
    for k in range(config.depth):
        y = norm(name=f"block{k}_norm1")(x)
        attention = _L.MultiHeadAttention(
            config.heads, config.width // config.heads, name=f"block{k}_attention"
        )
        x = _L.Add()([x, attention(y, y)])
        y = norm(name=f"block{k}_norm2")(x)
        # The exact function, as in the experiments, not the checkpoints' approximation.
        y = _L.Dense(config.mlp, activation=tf.nn.gelu, name=f"block{k}_dense1")(y)
        y = _L.Dense(config.width, name=f"block{k}_dense2")(y)
        x = _L.Add()([x, y])
    x = FirstToken(name="features")(norm(name="encoder_norm")(x))
    head = _L.Dense(classes, kernel_initializer="zeros", name="head")
    return tf.keras.Model(inputs, head(x))


def build_bit(config: BiT, classes: int, crop: bool = False) -> tf.keras.Model:
    """A BiT ResNet v2 with a linear head of zeros."""

    def conv(x, filters, size, strides, name):
        # Padding is symmetric, which "same" is not at stride 2.
        if size > 1:
            x = _L.ZeroPadding2D(size // 2)(x)
        layer = StdConv2D(filters, size, strides, use_bias=False, name=name)
        return layer(x)

    def relu_norm(x, name):
        norm = _L.GroupNormalization(config.groups, epsilon=1e-5, name=name)
        return _L.ReLU()(norm(x))

    inputs = tf.keras.Input((None, None, 3))
    x = Preprocess(config.image, crop, name="preprocess")(inputs)
    x = conv(x, config.width, 7, 2, "root")
    x = _L.MaxPool2D(3, 2)(_L.ZeroPadding2D(1)(x))
    for stage, units in enumerate(config.stages):
        inner = config.width * 2**stage
        for unit in range(units):
            name = f"block{stage + 1}_unit{unit + 1:02d}"
            strides = 2 if stage and not unit else 1
            y = relu_norm(x, f"{name}_a_norm")
            if not unit:
                x = conv(y, 4 * inner, 1, strides, f"{name}_a_proj")
            y = conv(y, inner, 1, 1, f"{name}_a_conv")
            y = conv(
                relu_norm(y, f"{name}_b_norm"), inner, 3, strides, f"{name}_b_conv"
            )
            y = conv(relu_norm(y, f"{name}_c_norm"), 4 * inner, 1, 1, f"{name}_c_conv")
            x = _L.Add()([x, y])
    x = relu_norm(x, "final_norm")
    x = _L.GlobalAveragePooling2D(name="features")(x)
    head = _L.Dense(classes, kernel_initializer="zeros", name="head")
    return tf.keras.Model(inputs, head(x))


_BUILDERS = {ViT: build_vit, BiT: build_bit, EfficientNetLite: efficientnet_lite.build}


def image_size(name: str, image: int | None) -> int:
    """The size of a model's images: its own, or a given size.

    Raises:
      UsageError: if a vision transformer has no whole number of patches then.
    """
    config = MODELS[name]
    if image is None:
        return config.image
    if isinstance(config, ViT) and image % config.patch:
        raise UsageError(
            f"flag --image_size={image}: {name} takes multiples of {config.patch}, for "
            f"example --image_size={config.patch * max(1, image // config.patch)}."
        )
    return image


def build(
    name: str, classes: int, crop: bool = False, image: int | None = None
) -> tf.keras.Model:
    """A model of `MODELS`, for images of its own size or of a given size."""
    config = MODELS[name]
    config = dataclasses.replace(config, image=image_size(name, image))
    return _BUILDERS[type(config)](config, classes, crop)
