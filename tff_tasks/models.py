"""The networks of the benchmarks, as Keras models.

Parameter counts are those of Table 1 in Andrew et al. (2021); tests check them.
"""

from __future__ import annotations

import tensorflow as tf

layers = tf.keras.layers

_BASIC_BLOCKS = 2
_WEIGHT_DECAY = 1e-4


class DropMask(layers.Layer):
    """Passes values on without the mask that an embedding attached to them.

    Keras losses and metrics use such a mask if they find it, which depends on how the
    model is called. Here only explicit weights leave padding out.
    """

    def call(self, inputs):
        return tf.identity(inputs)

    def compute_mask(self, inputs, mask=None):
        del inputs, mask
        return None


def resnet18(
    shape: tuple[int, int, int] = (24, 24, 3),
    classes: int = 100,
    norm: str = "32_groups",
) -> tf.keras.Model:
    """A residual network of 18 layers with normalisation before activation.

    He et al. (2016), *Identity Mappings in Deep Residual Networks*, with group norm
    (Wu & He 2018). As in the published benchmark no stage reduces the resolution: all
    run at a quarter of the images' width.

    Args:
      shape: of one image.
      classes: how many.
      norm: "32_groups", with scale and offset, or "2_groups", without.
    """
    decay = tf.keras.regularizers.L2(_WEIGHT_DECAY)

    def convolve(x, filters, size, strides=1, padding="same"):
        return layers.Conv2D(
            filters,
            size,
            strides,
            padding,
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=decay,
        )(x)

    def normalize(x):
        affine = norm == "32_groups"
        groups = 32 if affine else 2
        return layers.GroupNormalization(
            groups, epsilon=1e-3, center=affine, scale=affine
        )(x)

    def activate(x):
        return layers.ReLU()(normalize(x))

    inputs = layers.Input(shape)
    x = activate(convolve(inputs, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    first = True
    for filters in (64, 128, 256, 512):
        for _ in range(_BASIC_BLOCKS):
            shortcut = x
            if x.shape[-1] != filters:
                shortcut = normalize(convolve(x, filters, 1, padding="valid"))
            residual = x if first else activate(x)
            residual = convolve(residual, filters, 3)
            residual = convolve(activate(residual), filters, 3)
            x = layers.Add()([shortcut, residual])
            first = False
    x = layers.GlobalAveragePooling2D()(activate(x))
    outputs = layers.Dense(
        classes,
        "softmax",
        kernel_initializer=tf.keras.initializers.RandomNormal(stddev=0.01),
        kernel_regularizer=decay,
        bias_regularizer=decay,
    )(x)
    return tf.keras.Model(inputs, outputs)


def character_cnn(classes: int = 62) -> tf.keras.Model:
    """Two convolutions and dropout, for 28 by 28 pixels: EMNIST-CR."""
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, "relu"),
            layers.Dropout(0.5),
            layers.Dense(classes, "softmax"),
        ]
    )


def original_cnn(classes: int = 62) -> tf.keras.Model:
    """The convolutional network of McMahan et al. (2017), for 28 by 28 pixels."""
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(padding="same"),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(padding="same"),
            layers.Flatten(),
            layers.Dense(512, "relu"),
            layers.Dense(classes, "softmax"),
        ]
    )


def two_layer_network(classes: int = 62) -> tf.keras.Model:
    """The "2NN" of McMahan et al. (2017), for 28 by 28 pixels."""
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(200, "relu"),
            layers.Dense(200, "relu"),
            layers.Dense(classes, "softmax"),
        ]
    )


def autoencoder() -> tf.keras.Model:
    """A deep autoencoder of 784 pixels through 30 numbers: EMNIST-AE."""
    widths = (1000, 500, 250, 30, 250, 500, 1000, 784)
    model = tf.keras.Sequential([layers.Input((784,))])
    for width in widths:
        model.add(layers.Dense(width, "linear" if width == 30 else "sigmoid"))
    return model


def character_lstm(
    vocabulary: int = 90, length: int = 80, units: int = 256
) -> tf.keras.Model:
    """Two recurrent layers that predict the next character: SHAKESPEARE."""
    inputs = layers.Input((length,), dtype=tf.int32)
    x = layers.Embedding(vocabulary, 8, mask_zero=True)(inputs)
    for _ in range(2):
        x = layers.LSTM(units, return_sequences=True, kernel_initializer="he_normal")(x)
    return tf.keras.Model(inputs, DropMask()(layers.Dense(vocabulary)(x)))


def word_lstm(vocabulary: int = 10_004, length: int = 20) -> tf.keras.Model:
    """A recurrent layer that predicts the next word: SO-NWP."""
    inputs = layers.Input((length,), dtype=tf.int32)
    x = layers.Embedding(vocabulary, 96, mask_zero=True)(inputs)
    x = layers.LSTM(670, return_sequences=True)(x)
    x = layers.Dense(96)(x)
    return tf.keras.Model(inputs, DropMask()(layers.Dense(vocabulary)(x)))


def tag_regression(words: int = 10_000, tags: int = 500) -> tf.keras.Model:
    """Logistic regression for each tag: SO-LR."""
    return tf.keras.Sequential([layers.Input((words,)), layers.Dense(tags, "sigmoid")])


def digits_network(hidden: int = 32) -> tf.keras.Model:
    """A small network for 64 pixels: 2410 parameters with 32 hidden units."""
    return tf.keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(hidden, "tanh"),
            layers.Dense(10, "softmax"),
        ]
    )
