"""Which places of an image are multiplied with which place of a filter."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A convolution's static settings, channels last.

    Attributes:
      kernel: kernel sizes, one for each spatial axis.
      strides: strides, one for each spatial axis.
      dilations: dilations, one for each spatial axis.
      padding: "SAME", "VALID", or explicit (before, after) pairs.
      groups: feature groups.
      depthwise: whether every input channel has filters of its own.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    groups: int = 1
    depthwise: bool = False

    @property
    def spatial(self) -> int:
        return len(self.kernel)

    def pads(self, axis: int, big: tf.Tensor, small: tf.Tensor) -> tuple:
        """The padding before and after the image along a spatial axis."""
        if self.padding == "VALID":
            return 0, 0
        if self.padding != "SAME":
            return tuple(self.padding[axis])
        size, out = size_of(big, axis + 1), size_of(small, axis + 1)
        reach = (self.kernel[axis] - 1) * self.dilations[axis] + 1
        total = (out - 1) * self.strides[axis] + reach - size
        total = max(total, 0) if isinstance(total, int) else tf.maximum(total, 0)
        return total // 2, total - total // 2

    def places(self, axis: int, place: int, small: tf.Tensor) -> slice:
        """The inputs that are multiplied with a place of the kernel, along an axis."""
        start, stride = place * self.dilations[axis], self.strides[axis]
        out = size_of(small, axis + 1)
        return slice(start, start + (out - 1) * stride + 1, stride)

    def patch_cells(self, big: tf.Tensor, small: tf.Tensor) -> np.ndarray:
        """The number of the image's cell behind each place of each patch.

          Args:
        big: the image; the sizes of the image and of `small` are static.
            small: has a place for each patch.

          Returns:
            `[positions, kernel]`; padding has the number one past the last cell.
        """
        image = big.shape[1:-1].as_list()
        axes = []
        for axis in range(len(image)):
            out = small.shape[axis + 1]
            before, _ = self.pads(axis, big, small)
            starts = np.arange(out) * self.strides[axis] - before
            taps = np.arange(self.kernel[axis]) * self.dilations[axis]
            axes.append(starts[:, np.newaxis] + taps)
        rank = len(image)
        number = np.zeros([1] * (2 * rank), np.int64)
        inside = np.ones([1] * (2 * rank), bool)
        for axis, (places, size) in enumerate(zip(axes, image, strict=True)):
            shape = [1] * (2 * rank)
            shape[axis], shape[rank + axis] = places.shape
            places = places.reshape(shape)
            number = number * size + places
            inside = inside & (places >= 0) & (places < size)
        cells = math.prod(image)
        number = np.where(inside, number, cells)
        positions = math.prod(places.shape[0] for places in axes)
        return number.reshape(positions, -1).astype(np.int32)


def size_of(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
    """A tensor's size along an axis: a number, where it is static."""
    static = tensor.shape[axis]
    return tf.shape(tensor)[axis] if static is None else static
