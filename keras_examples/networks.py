"""The networks of the geometry paper (Chen, Wu and Hong 2020), and a small one."""

from __future__ import annotations

import tensorflow as tf

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


def small_resnet(shape: tuple[int, int, int] = (28, 28, 1)) -> tf.keras.Model:
    """A residual network of nine convolutions, group normalised: 77,562 parameters.

    Pre-activation blocks of 16, 32 and 64 filters; no batch normalisation, so that
    every example has a gradient of its own.
    """

    def conv(x, filters, size=3, strides=1):
        layer = _L.Conv2D(filters, size, strides, padding="same", use_bias=False)
        return layer(x)

    inputs = x = _L.Input(shape)
    x = conv(x, 16, strides=2)
    for filters in (16, 32, 64):
        strides = 1 if filters == 16 else 2
        y = _L.ReLU()(_L.GroupNormalization(8)(x))
        shortcut = x if strides == 1 else conv(y, filters, 1, strides)
        y = conv(y, filters, strides=strides)
        y = _L.ReLU()(_L.GroupNormalization(8)(y))
        x = _L.Add()([conv(y, filters), shortcut])
    x = _L.ReLU()(_L.GroupNormalization(8)(x))
    return tf.keras.Model(inputs, _L.Dense(10)(_L.GlobalAveragePooling2D()(x)))


class StandardizedConv2D(_L.Conv2D):
    """A convolution whose kernel is standardised before it is used (Qiao et al. 2019).

    Each filter has mean 0 and variance 1 / (its number of inputs). Unlike batch
    normalisation, this uses no statistic of the batch.
    """

    def call(self, inputs):
        mean, variance = tf.nn.moments(self.kernel, [0, 1, 2], keepdims=True)
        count = float(self.kernel.shape[0] * self.kernel.shape[1])
        scale = tf.math.rsqrt(tf.maximum(variance * count * inputs.shape[-1], 1e-4))
        outputs = tf.nn.conv2d(
            inputs,
            (self.kernel - mean) * scale,
            self.strides,
            self.padding.upper(),
        )
        return outputs + self.bias if self.use_bias else outputs


def wide_resnet(
    shape: tuple[int, int, int] = (32, 32, 3),
    depth: int = 16,
    width: int = 4,
    groups: int = 16,
    classes: int = 10,
) -> tf.keras.Model:
    """The wide residual network of De et al. (2022): WRN-16-4 has 2,751,146 parameters.

    Group normalisation and standardised convolutions in place of batch normalisation.

    Args:
      shape: of an image.
      depth: 6 n + 4, for n blocks at each of three sizes.
      width: times how many filters as the narrowest, 16, 32 and 64.
      groups: of the normalisation, which divide 16 * `width`.
      classes: of the labels.
    """
    blocks, rest = divmod(depth - 4, 6)
    if blocks < 1 or rest:
        raise ValueError(f"depth must be 6 n + 4, such as 10 or 16, got {depth}.")

    def conv(x, filters, size=3, strides=1):
        return StandardizedConv2D(filters, size, strides, padding="same")(x)

    def normalised(x):
        return _L.ReLU()(_L.GroupNormalization(groups)(x))

    inputs = _L.Input(shape)
    x = conv(inputs, 16)
    for k, filters in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range(blocks):
            first = block == 0
            strides = 2 if first and k else 1
            y = normalised(x) if x.shape[-1] % groups == 0 else _L.ReLU()(x)
            shortcut = conv(y, filters, 1, strides) if first else x
            y = normalised(conv(y, filters, strides=strides))
            x = _L.Add()([shortcut, conv(y, filters)])
    x = _L.GlobalAveragePooling2D()(normalised(x))
    return tf.keras.Model(inputs, _L.Dense(classes)(x))


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


def dense_network(shape: tuple[int, ...], hidden: int = 64) -> tf.keras.Model:
    """A hidden layer for ten classes: 50,890 parameters for 28 by 28 pixels."""
    return tf.keras.Sequential(
        [
            _L.Input(shape),
            _L.Flatten(),
            _L.Dense(hidden, activation="relu", name="hidden"),
            _L.Dense(10, name="head"),
        ]
    )
