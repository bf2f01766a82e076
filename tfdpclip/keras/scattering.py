"""Features of images by fixed wavelets, which learn nothing from the data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip.keras import _compat

# Filters end where their envelope has fallen to exp(-4.5).
_DEVIATIONS = 3.0


@_compat.saving.register_keras_serializable("tfdpclip")
class Scattering(tf.keras.layers.Layer):
    """Wavelet scattering of images: fixed features for a small private model.

    The layer has no weights. It averages the image, the moduli of its wavelet
    coefficients, and the moduli of the wavelet coefficients of these moduli (Bruna and
    Mallat 2013), with the Morlet wavelets of Kymatio (Andreux et al. 2020). A linear
    model on such features is the private model of Tramèr and Boneh (2021) for small
    images. Outside of the image, pixels count as 0.

    *Formal guarantees*: the output for an image depends on this image alone, for any
    value of `training`; the filters are functions of the arguments.

    Args:
      scales: Octaves of the wavelets, 1 or above. Each side of the output has a
        2**`scales`-th of the image's pixels, rounded up.
      angles: Orientations of the wavelets in half a turn, 1 or above.
      **options: Arguments of `tf.keras.layers.Layer`, such as `name`.

    The input has shape `[batch, height, width, channels]`, and the output has, at each
    position, 1 + `scales` * `angles` + `angles`**2 * `scales` * (`scales` - 1) / 2
    numbers for each channel.

    Raises:
      ValueError: If an argument is out of range, or inputs are not images.

    >>> layer = Scattering(scales=2, angles=8)
    >>> layer(tf.zeros([5, 28, 28, 1])).shape
    TensorShape([5, 7, 7, 81])
    """

    def __init__(self, scales: int = 2, angles: int = 8, **options: Any):
        super().__init__(**options)
        self.scales = _arguments.integer("scales", scales, 1)
        self.angles = _arguments.integer("angles", angles, 1)

    def get_config(self) -> dict[str, Any]:
        sizes = {"scales": self.scales, "angles": self.angles}
        return {**super().get_config(), **sizes}

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        if len(input_shape) != 4 or None in input_shape[1:]:
            raise ValueError(
                "Scattering needs images of shape [batch, height, width, channels] of "
                f"a fixed size, got {input_shape}. For images without channels, write "
                "tf.keras.layers.Reshape((height, width, 1)) before the layer."
            )
        batch, height, width, channels = input_shape
        step, pairs = 2**self.scales, self.scales * (self.scales - 1) // 2
        count = 1 + self.scales * self.angles + self.angles**2 * pairs
        return batch, -(-height // step), -(-width // step), channels * count

    def call(self, inputs: Any) -> Any:
        # Keras 3 asks for the shape before it calls, and Keras 2 does not ask.
        self.compute_output_shape(inputs.shape)
        channels = inputs.shape[3]
        images = _one_channel_each(inputs)
        averages = [_average(images, self.scales)]
        second = []
        for scale in range(self.scales):
            first = self._moduli(images, scale)
            averages.append(_average(first, self.scales - scale))
            rows = _one_channel_each(first)
            for more in range(1, self.scales - scale):
                moduli = _channels_of(self._moduli(rows, more), self.angles)
                second.append(_average(moduli, self.scales - scale - more))
        return _channels_of(tf.concat(averages + second, axis=-1), channels)

    def _moduli(self, images, scale):
        """Moduli of the wavelet coefficients, at every 2**`scale`-th pixel."""
        waves = np.stack(
            [wavelet(scale, angle, self.angles) for angle in range(self.angles)], -1
        )
        parts = np.concatenate([waves.real, waves.imag], -1)[:, :, np.newaxis]
        kernel = tf.constant(parts, images.dtype)
        coefficients = tf.nn.conv2d(images, kernel, 2**scale, _around(parts))
        real, imaginary = tf.split(coefficients, 2, axis=-1)
        # The square root has no derivative at 0.
        return tf.sqrt(tf.maximum(tf.square(real) + tf.square(imaginary), 1e-12))


def wavelet(scale: int, angle: int, angles: int) -> np.ndarray:
    """A Morlet wavelet: a wave in a window, whose values sum to 0."""
    sigma, slant, frequency = 0.8 * 2**scale, 4 / angles, 0.75 * math.pi / 2**scale
    radius = math.ceil(_DEVIATIONS * sigma * max(1, 1 / slant))
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    turn = math.pi * angle / angles
    along = math.cos(turn) * x + math.sin(turn) * y
    across = math.cos(turn) * y - math.sin(turn) * x
    window = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    window *= slant / (2 * math.pi * sigma**2)
    wave = window * np.exp(1j * frequency * along)
    return wave - wave.sum() / window.sum() * window


def _average(images, scale):
    """Gaussian averages at every 2**`scale`-th pixel."""
    sigma = 0.4 * 2**scale
    radius = math.ceil(_DEVIATIONS * sigma)
    window = np.exp(-np.square(np.arange(-radius, radius + 1)) / (2 * sigma**2))
    kernel = np.outer(window, window)[:, :, np.newaxis, np.newaxis] / window.sum() ** 2
    kernel = np.repeat(kernel, images.shape[3], axis=2)
    strides = [1, 2**scale, 2**scale, 1]
    kernel, around = tf.constant(kernel, images.dtype), _around(kernel)
    return tf.nn.depthwise_conv2d(images, kernel, strides, around)


def _around(kernel):
    """Zeros around an image, such that the kernel is centred on its first pixel."""
    rows, columns = kernel.shape[0] // 2, kernel.shape[1] // 2
    return [[0, 0], [rows, rows], [columns, columns], [0, 0]]


def _one_channel_each(images):
    """Every channel as an image of its own."""
    _, height, width, _ = images.shape
    return tf.reshape(tf.transpose(images, [0, 3, 1, 2]), [-1, height, width, 1])


def _channels_of(images, channels):
    """Features of one-channel images as the channels of the images they were."""
    _, height, width, count = images.shape
    rows = tf.reshape(images, [-1, channels, height, width, count])
    rows = tf.transpose(rows, [0, 2, 3, 1, 4])
    return tf.reshape(rows, [-1, height, width, channels * count])
