"""Per-example filter gradients of convolutions in 1, 2 and 3 dimensions."""

from __future__ import annotations

import contextlib
import itertools
import math

import tensorflow as tf

from tfdpclip.gradients.forms import floors
from tfdpclip.gradients.forms.base_form import (
    Budget,
    Form,
    Measured,
    cut_rows,
    in_chunks,
    keep_gradients,
    merge_steps,
    rows_per_example,
    sum_squares,
)
from tfdpclip.gradients.forms.geometry import Geometry, size_of

# For few channels, the fastest way to cut patches is a convolution with an identity
# filter, at a cost that grows with the square of the patch; for many channels, to
# gather rows (measured on CPU).
_SMALL_PATCH = 96
_FEW_CHANNELS = 8
# Patches up to this size may be cut before they are needed, which is a little faster.
_EARLY_BYTES = 2**24


class Convolution(Form):
    """g_i[offset] = sum over positions of big_i[position + offset] (outer) small_i.

    For a convolution `big` is the image and `small` the gradient at the output; for a
    transposed convolution `big` is the gradient and `small` the image.

    Args:
      big: `[B * rows, *image, C]`.
      small: `[B * rows, *positions, U]`.
      geometry: the settings.
      shape: the filter's static shape.
      batch_size: B.
      rows: the rows of an example, if known.
    """

    def __init__(self, big, small, geometry: Geometry, shape, batch_size, rows=None):
        self.big, self.small = big, small
        self.geometry = geometry
        self.shape = list(shape)
        self.batch_size = batch_size
        self._rows = rows

    @property
    def dtype(self):
        return self.small.dtype

    @property
    def rows(self):
        return self._rows

    def _rows_per_example(self):
        return self._rows or rows_per_example(self.small, self.batch_size)

    # Costs, from static shapes.

    def _positions(self) -> int:
        dims = self.small.shape[1:-1].as_list()
        return 64 if None in dims else math.prod(dims)

    def _patch(self) -> int:
        """How many inputs contribute to a place of the output."""
        return math.prod(self.geometry.kernel) * self.big.shape[-1]

    def _by_gram(self) -> bool:
        """Whether inner products of places are cheaper than products of channels."""
        patch, channels = self._patch(), self.small.shape[-1]
        fewer = 1.5 * self._positions() * (patch + channels) < patch * channels
        return fewer and self._cuts_patches()

    def measured(self, budget: Budget) -> Measured:
        if self._by_gram():
            return super().measured(budget)
        size = math.prod(self.shape)
        inputs = math.prod(self.big.shape[1:]) if self._static() else 0
        outputs = self._positions() * self.small.shape[-1]
        # Kept products take the place of the op's input and gradient in memory.
        if size > 2 * (inputs + outputs) and not budget.reserve(4 * size):
            return super().measured(budget)
        at_once = budget.fits(4 * self._positions() * self._patch())
        with self._not_early(budget):
            if at_once and self._cuts_patches():
                products, finish = [self._patch_products()], _from_patches
            else:
                products = [self._product(offset) for offset in self._offsets()]
                finish = tf.stack
            return keep_gradients(
                products, lambda sums: tf.reshape(finish(sums), self.shape)
            )

    def squared_norms(self, budget: Budget) -> tf.Tensor:
        with self._not_early(budget):
            if self._by_gram():
                positions = self._positions()
                memory = 4 * positions * (2 * positions + self._patch())
                return self._chunked(Convolution._gram_norms, memory, budget)
            memory = 4 * math.prod(self.shape) // math.prod(self.geometry.kernel)
            return self._chunked(Convolution._product_norms, memory, budget)

    def _not_early(self, budget: Budget) -> contextlib.AbstractContextManager:
        """Delays the cutting of large patches until the backward pass.

        TensorFlow would cut the patches as soon as the forward pass reaches the image,
        and keep them until the backward pass.
        """
        few = 4 * self._positions() * self._patch() * budget.batch_size <= _EARLY_BYTES
        return tf.control_dependencies([] if few else [self.small])

    def _static(self) -> bool:
        return None not in (*self.big.shape[1:-1], *self.small.shape[1:-1])

    def _chunked(self, compute, memory, budget):
        if budget.fits(memory):
            return compute(self)
        return in_chunks(
            lambda start, size: compute(self.part(start, size)),
            self.batch_size,
            budget.chunk(memory),
        )

    def _cuts_patches(self) -> bool:
        """Whether all patches can be cut at once."""
        plain = self.geometry.groups == 1 and not self.geometry.depthwise
        return plain and (self._static() or self._by_identity())

    def _by_identity(self) -> bool:
        geometry, channels = self.geometry, self.big.shape[-1]
        patch = math.prod(geometry.kernel) * channels
        return (
            geometry.spatial == 2
            and isinstance(geometry.padding, str)
            and channels < _FEW_CHANNELS
            and patch <= _SMALL_PATCH
        )

    def _product_norms(self):
        # The products of the offsets are made in turn, so that only one is in memory.
        total = tf.zeros([self.batch_size], tf.float32)
        for offset in self._offsets():
            with tf.control_dependencies([total]):
                total += tf.cast(sum_squares(self._product(offset)), tf.float32)
        # The sum over the batch is made of the terms of these products.
        terms = self._rows_per_example() * math.prod(
            size_of(self.small, axis + 1) for axis in range(self.geometry.spatial)
        )
        return floors.floored(total, tf.cast(self.part_squares(), tf.float32), terms)

    def _gram_norms(self):
        return floors.gram_norms(self._patches(), self._flat_small())

    def part_squares(self):
        # The squares of the outer product of patch and output gradient, by position.
        groups = self.geometry.groups
        if self.geometry.depthwise:
            groups = self.big.shape[-1]
        big, big_size = floors.scaled(self.big)
        small, small_size = floors.scaled(self.small)
        big, small = (_squares_by_group(part, groups) for part in (big, small))
        # The convolution of an empty batch has another shape on some processors: oneDNN
        # returns the shape of the image.
        sums = tf.reshape(self._sums_over_patches(big), tf.shape(small))
        found = tf.reduce_sum(sums * small, axis=list(range(1, small.shape.rank)))
        found *= tf.cast(tf.square(big_size * small_size), found.dtype)
        rows = self._rows_per_example()
        return tf.reduce_sum(tf.reshape(found, [self.batch_size, rows]), axis=1)

    def _sums_over_patches(self, big: tf.Tensor) -> tf.Tensor:
        """Sums over each patch of `[B, *image, G]`: `[B, *positions, G]`."""
        geometry, groups = self.geometry, big.shape[-1]
        padded, spatial = self._padded(big), geometry.spatial
        if groups > 1:  # Each group becomes an image of its own.
            moved = tf.transpose(padded, [0, spatial + 1, *range(1, spatial + 1)])
            sizes = tf.shape(moved)
            padded = tf.reshape(moved, tf.concat([[-1], sizes[2:], [1]], 0))
        convolve = tf.nn.conv3d if spatial == 3 else tf.nn.conv2d
        sums = convolve(
            padded,
            tf.ones([*geometry.kernel, 1, 1], big.dtype),
            [1, *geometry.strides, 1],
            "VALID",
            dilations=[1, *geometry.dilations, 1],
        )
        if groups == 1:
            return sums
        places = tf.shape(sums)[1:-1]
        sums = tf.reshape(sums, tf.concat([[-1, groups], places], 0))
        return tf.transpose(sums, [0, *range(2, spatial + 2), 1])

    # The products.

    def _offsets(self):
        return itertools.product(*(range(k) for k in self.geometry.kernel))

    def _padded(self, big: tf.Tensor) -> tf.Tensor:
        geometry = self.geometry
        if geometry.padding == "VALID":
            return big
        axes = range(geometry.spatial)
        pads = [geometry.pads(axis, self.big, self.small) for axis in axes]
        return tf.pad(big, [[0, 0], *(list(pair) for pair in pads), [0, 0]])

    def _shift(self, padded, offset) -> tf.Tensor:
        slices = (
            self.geometry.places(axis, place, self.small)
            for axis, place in enumerate(offset)
        )
        return padded[(slice(None), *slices)]

    def _flat_shift(self, offset) -> tf.Tensor:
        if not hasattr(self, "_padded_big"):
            self._padded_big = self._padded(self.big)
        shifted = self._shift(self._padded_big, offset)
        return merge_steps(
            shifted, self.batch_size, self.big.shape[-1], rows=self._rows
        )

    def _flat_small(self) -> tf.Tensor:
        if not hasattr(self, "_merged_small"):
            self._merged_small = merge_steps(
                self.small, self.batch_size, self.small.shape[-1], rows=self._rows
            )
        return self._merged_small

    def _product(self, offset) -> tf.Tensor:
        """`[B, C / groups, U]` (`[B, C, multiplier]` when depthwise)."""
        x, z, geometry = self._flat_shift(offset), self._flat_small(), self.geometry
        if geometry.depthwise:
            channels = self.big.shape[-1]
            z = tf.reshape(z, [*_steps(z), channels, self.shape[-1]])
            return tf.reduce_sum(x[..., tf.newaxis] * z, axis=1)
        if geometry.groups == 1:
            return tf.matmul(x, z, transpose_a=True)
        groups = geometry.groups
        x = tf.reshape(x, [*_steps(x), groups, self.big.shape[-1] // groups])
        z = tf.reshape(z, [*_steps(z), groups, self.small.shape[-1] // groups])
        product = tf.einsum("btgc,btgu->bcgu", x, z)
        return tf.reshape(product, [self.batch_size, *self.shape[-2:]])

    def _patches(self) -> tf.Tensor:
        """`[B, T, kernel * C]`."""
        geometry, channels = self.geometry, self.big.shape[-1]
        patch = math.prod(geometry.kernel) * channels
        if self._by_identity():
            identity = tf.eye(patch, dtype=self.big.dtype)
            patches = tf.nn.conv2d(
                self.big,
                tf.reshape(identity, [*geometry.kernel, channels, patch]),
                [1, *geometry.strides, 1],
                geometry.padding,
                dilations=[1, *geometry.dilations, 1],
            )
            axes = 1
        else:
            cells = math.prod(self.big.shape[1:-1])
            flat = tf.reshape(self.big, [-1, cells, channels])
            places = geometry.patch_cells(self.big, self.small)
            if places.max() == cells:
                flat = tf.pad(flat, [[0, 0], [0, 1], [0, 0]])
            patches, axes = tf.gather(flat, places, axis=1), 2
        return merge_steps(patches, self.batch_size, patch, axes, self._rows)

    def _patch_products(self) -> tf.Tensor:
        """`[B, U, kernel * C]`."""
        return tf.matmul(self._flat_small(), self._patches(), transpose_a=True)

    # The methods of a form.

    def weighted_sum(self, weights):
        small = self.small * self._by_row(weights)
        geometry = self.geometry
        if geometry.groups == 1 and not (geometry.depthwise and geometry.spatial != 2):
            return self._filter_gradient(small)
        whole = self._with(self.big, small, self.batch_size)
        totals = [
            tf.reduce_sum(whole._product(offset), axis=0) for offset in self._offsets()
        ]
        return tf.reshape(tf.stack(totals), self.shape)

    def _filter_gradient(self, small):
        """The framework's own filter gradient: the fastest sum over examples."""
        geometry = self.geometry
        explicit = not isinstance(geometry.padding, str)
        settings = {
            "strides": [1, *geometry.strides, 1],
            "dilations": [1, *geometry.dilations, 1],
            "padding": "EXPLICIT" if explicit else geometry.padding,
            "out_backprop": small,
            "input": self.big,
            "filter_sizes": tf.constant(self.shape, tf.int32),
        }
        if explicit:
            pairs = [(0, 0), *geometry.padding, (0, 0)]
            settings["explicit_paddings"] = [p for pair in pairs for p in pair]
        if geometry.spatial == 3:
            return tf.raw_ops.Conv3DBackpropFilterV2(**settings)
        if geometry.depthwise:
            return tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(**settings)
        return tf.raw_ops.Conv2DBackpropFilter(**settings)

    def _by_row(self, values: tf.Tensor) -> tf.Tensor:
        """`[B]` spread over the rows of `small`, ready to multiply."""
        spread = values
        if self._rows != 1:
            spread = tf.repeat(values, self._rows_per_example())
        return tf.reshape(spread, [-1] + [1] * (self.small.shape.rank - 1))

    def part(self, start, size):
        rows = self._rows_per_example()
        return self._with(
            cut_rows(self.big, start * rows, size * rows),
            cut_rows(self.small, start * rows, size * rows),
            size,
        )

    def gradients(self):
        products = [self._product(offset) for offset in self._offsets()]
        stacked = tf.stack(products, axis=1)
        return tf.reshape(stacked, [self.batch_size, *self.shape])

    def saved(self):
        return [self.big, self.small]

    def replaced(self, saved):
        return self._with(*saved, self.batch_size)

    def _with(self, big, small, batch_size):
        return Convolution(
            big, small, self.geometry, self.shape, batch_size, self._rows
        )


def _squares_by_group(tensor: tf.Tensor, groups: int) -> tf.Tensor:
    """`[..., C]` -> `[..., groups]`: summed squares of the channels of each group."""
    if tensor.dtype.size < 4:
        tensor = tf.cast(tensor, tf.float32)
    squares = tf.square(tensor)
    if groups > 1:
        width = squares.shape[-1] // groups
        shape = tf.concat([tf.shape(squares)[:-1], [groups, width]], 0)
        return tf.reduce_sum(tf.reshape(squares, shape), axis=-1)
    return tf.reduce_sum(squares, axis=-1, keepdims=True)


def _from_patches(sums: list[tf.Tensor]) -> tf.Tensor:
    """`[U, kernel * C]` -> `[kernel * C, U]`."""
    return tf.transpose(sums[0])


def _steps(tensor: tf.Tensor) -> tf.Tensor:
    return tf.unstack(tf.shape(tensor)[:2])
