"""The preprocessing of images for pre-trained networks, as their first layer."""

from __future__ import annotations

import tensorflow as tf

import tfdpclip as dpc

# The op by which images are resized with antialiasing, one by one.
dpc.gradients.op_flow("ScaleAndTranslate")


class Preprocess(tf.keras.layers.Layer):
    """Images in 0 to 255, of any size, as about [-1, 1] of the network's size.

    Args:
      size: the network's.
      crop: whether to resize to size / 0.9 and take the middle, rather than to size.
      mean: subtracted from pixels.
      scale: the divisor after that.
    """

    def __init__(
        self,
        size: int,
        crop: bool = False,
        mean: float = 127.5,
        scale: float = 127.5,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.size, self.crop, self.mean, self.scale = size, crop, mean, scale

    def call(self, images):
        x = tf.cast(images, tf.float32)
        side = int(self.size / 0.9) if self.crop else self.size
        if x.shape[1:3] != (side, side):
            x = tf.image.resize(x, (side, side), "bicubic", antialias=True)
        if self.crop:
            start = (side - self.size) // 2
            x = x[:, start : start + self.size, start : start + self.size]
        if x.shape[-1] == 1:
            x = tf.repeat(x, 3, axis=-1)
        return (tf.clip_by_value(x, 0.0, 255.0) - self.mean) / self.scale

    def get_config(self):
        own = {name: getattr(self, name) for name in ("size", "crop", "mean", "scale")}
        return {**super().get_config(), **own}
