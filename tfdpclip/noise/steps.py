"""A step of correlated noise in graphs: from the memory to noise and the next memory.

`tfdpclip.correlated.streams` has the same steps in NumPy, and explains each stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import correlated
from tfdpclip._devices import in_xla, on_cpus
from tfdpclip.correlated import streams

# This many coordinates of a tensor tell whether draws are repeated: different draws are
# as near in one of 10^3 cases, for each of these coordinates and each kept vector.
_LOOKED_AT, _NEAR = 8, 1e-3
# From this many coordinates on, a step is compiled on CPUs: a loop over the coordinates
# reads the memory once or twice, ten separate operations read it several times.
_COMPILED_FROM = 2**16


class HeldTensor:
    """A replacement of a variable for a step in a graph without variables.

    Args:
      value: the first value.
    """

    def __init__(self, value: tf.Tensor):
        self._value = value

    def read_value(self) -> tf.Tensor:
        """The present value."""
        return self._value

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the value."""
        self._value = value

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Replaces some rows of the value."""
        places = rows.indices[:, tf.newaxis]
        self._value = tf.tensor_scatter_nd_update(self._value, places, rows.values)


class KeptStream:
    """The memory of earlier steps for the noise of a tensor.

    Args:
      stream: the stream of the matrix.
      kept: a variable, or a `HeldTensor`, of `rows_kept` rows.
    """

    def __init__(self, stream: Any, kept: Any):
        self.stream, self.kept = stream, kept
        value = kept.read_value()
        self.shape, self.dtype = value.shape[1:], value.dtype
        # Compiling pays for large tensors; in a step that XLA compiles as a whole, it
        # changes nothing. A compiled function writes to variables, not to a
        # `HeldTensor`.
        large = self.shape.num_elements() >= _COMPILED_FROM
        self.compiled = large and on_cpus() and not isinstance(kept, HeldTensor)

    def probe(self) -> np.ndarray:
        """The memory of a few coordinates. Not for use in graphs."""
        size = self.shape.num_elements()
        places = np.linspace(0, size - 1, min(size, _LOOKED_AT)).astype(int)
        flat = tf.reshape(self.kept.read_value(), [-1, size])
        return tf.gather(flat, places, axis=1).numpy().astype(float)

    def matches(self, before: Any) -> bool:
        """Whether the memory equals an earlier result of `probe`, up to rounding."""
        now, before = self.probe(), np.asarray(before, float)
        return now.shape == before.shape and bool(
            np.all(np.abs(now - before) <= _NEAR * (1 + np.abs(before)))
        )


def rows_kept(stream: Any, steps: int) -> int:
    """How many vectors of the noise's length are kept between steps; at least 1."""
    count = stream.buffers
    if isinstance(stream, streams.TreeSums):
        # A level for each power of 2 up to the steps, and the last prefix sum.
        count = steps.bit_length() + 1
    return max(1, count)


Draw = Callable[[], list[tf.Tensor]]


def advance(
    kept: list[KeptStream], step: tf.Tensor, draw: Draw, scales: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The noise of a step, each part times its scale; moves the memory on."""
    stream = kept[0].stream
    if isinstance(stream, streams.TreeSums):
        noise = _tree(kept, step, draw)
        return [part * scale for part, scale in zip(noise, scales, strict=True)]
    part_of = _buffered if isinstance(stream, streams.Buffered) else _banded
    return [
        part_of(one, step, fresh, scale)
        for one, fresh, scale in zip(kept, draw(), scales, strict=True)
    ]


def _buffered(kept: KeptStream, step, fresh, factor) -> tf.Tensor:
    """w = z - sum_i scale_i s_i; s_i = decay_i s_i + w."""
    # The memory of an earlier matrix is finite, and has weight 0.
    goes_on = tf.cast(step > 0, kept.dtype)
    scale, decay = (
        goes_on * tf.constant(part, kept.dtype)
        for part in (kept.stream.scale, kept.stream.decay)
    )
    update = _plain_buffered if not kept.compiled else _compiled_buffered
    return update(kept.kept, scale, decay, fresh) * factor


def _plain_buffered(kept, scale, decay, fresh):
    before = kept.read_value()
    noise = fresh - _weighted(scale, before)
    decayed = tf.reshape(decay, [-1] + [1] * (before.shape.rank - 1)) * before
    kept.assign(decayed + noise)
    return noise


def _banded(kept: KeptStream, step, fresh, factor) -> tf.Tensor:
    """Weighs the last noises (or draws) in a ring, each by its coefficient."""
    stream = kept.stream
    solved = isinstance(stream, streams.Recursive)
    column = stream.coefficients if solved else stream.weights
    first, rest = column[0], np.asarray(column[1:])
    if solved:
        first, rest = 1 / first, -rest / first
    count = len(rest)
    weights = tf.zeros([1], kept.dtype)
    if count:
        # The noise of k steps ago is at (step - k) modulo the length of the ring. The
        # memory of an earlier matrix is finite, and has weight 0.
        age = (step - 1 - tf.range(count)) % count + 1
        weights = tf.gather(tf.constant(rest, kept.dtype), age - 1)
        weights = tf.where(age <= step, weights, tf.zeros([], kept.dtype))
    make = _plain_banded if not kept.compiled else _compiled_banded
    noise, scaled = make(
        kept.kept, weights, tf.constant(first, kept.dtype), fresh, factor
    )
    if not count:
        return scaled
    newest, place = noise if solved else fresh, step % count
    # The update is not compiled: XLA would copy the whole memory.
    with tf.control_dependencies([noise]):
        kept.kept.scatter_update(
            tf.IndexedSlices(newest[tf.newaxis], place[tf.newaxis])
        )
    return scaled


def _plain_banded(kept, weights, first, fresh, factor):
    noise = first * fresh + _weighted(weights, kept.read_value())
    return noise, noise * factor


def _weighted(weights: tf.Tensor, parts: tf.Tensor) -> tf.Tensor:
    if not in_xla():
        return tf.tensordot(weights, parts, 1)
    # A single loop over the coordinates, on all cores; XLA computes a product with a
    # vector on a single core, which takes four times as long.
    return sum(weights[i] * parts[i] for i in range(parts.shape[0]))


_compiled_buffered = tf.function(_plain_buffered, jit_compile=True, autograph=False)
_compiled_banded = tf.function(_plain_banded, jit_compile=True, autograph=False)


def _tree(kept: list[KeptStream], step: tf.Tensor, draw: Draw) -> list[tf.Tensor]:
    """Differences of prefix sums, with tree nodes kept by level; see `TreeSums`."""
    stream = kept[0].stream
    levels = kept[0].kept.read_value().shape[0] - 1
    before = [k.kept.read_value() for k in kept]
    estimates, carried = draw(), tf.constant(True)
    top = tf.zeros([], tf.int32)
    for level in range(levels - 1):
        # For tensors of a plain graph, `==` compares the objects, not the values.
        carried = tf.logical_and(carried, tf.equal(step // 2**level % 2, 1))
        share = stream._share(level + 1)

        def merged(estimates=estimates, level=level, share=share):
            return [
                share * own + (1 - share) * (kept_[level] + part)
                for own, kept_, part in zip(draw(), before, estimates, strict=True)
            ]

        estimates = tf.cond(carried, merged, lambda parts=estimates: list(parts))
        top += tf.cast(carried, tf.int32)
    # The next prefix has step + 1 steps: the levels below `top` are merged.
    index = np.arange(levels, dtype=np.int32)
    part_of = tf.logical_and(
        tf.equal((step + 1) // 2**index % 2, 1), tf.not_equal(index, top)
    )
    noise = []
    for one, was, estimate in zip(kept, before, estimates, strict=True):
        mask = tf.reshape(part_of, [-1] + [1] * one.shape.rank)
        others = tf.where(mask, was[:levels], tf.zeros([], one.dtype))
        now = tf.reduce_sum(others, 0) + estimate
        last = tf.where(step > 0, was[levels], tf.zeros([], one.dtype))
        one.kept.scatter_update(
            tf.IndexedSlices(
                tf.stack([estimate, now]), tf.stack([top, tf.constant(levels)])
            )
        )
        noise.append(now - last)
    return noise


def stream_of(matrix: correlated.NoiseMatrix) -> streams.Stream:
    stream = matrix.stream()
    known = (
        streams.Buffered,
        streams.Recursive,
        streams.Redrawn,
        streams.TreeSums,
    )
    if not isinstance(stream, known):
        raise ValueError(
            f"matrix makes its noise by {type(stream).__name__}, which is not known "
            "in graphs; use a matrix of tfdpclip.correlated."
        )
    return stream
