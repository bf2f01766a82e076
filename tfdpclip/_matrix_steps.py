"""One step of correlated noise in a graph: what is kept, and what becomes of draws.

`tfdpclip.correlated.streams` has the same in NumPy, and what each of them is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import correlated
from tfdpclip.correlated import streams


def rows_kept(stream: Any, steps: int) -> int:
    """How many vectors as long as the noise are kept between steps; 1 at least."""
    count = stream.buffers
    if isinstance(stream, streams.TreeSums):
        # A level for each power of 2 up to the steps, and the last prefix sum.
        count = steps.bit_length() + 1
    return max(1, count)


class HeldTensor:
    """What a variable is to a step, for graphs that have none: written to, then read.

    Args:
      value: what the variable would hold.
    """

    def __init__(self, value: tf.Tensor):
        self._value = value

    def read_value(self) -> tf.Tensor:
        """What it holds now."""
        return self._value

    def assign(self, value: tf.Tensor) -> None:
        """Holds something else."""
        self._value = value

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Holds other values in some rows."""
        places = rows.indices[:, tf.newaxis]
        self._value = tf.tensor_scatter_nd_update(self._value, places, rows.values)


class KeptStream:
    """What the noise of one tensor needs of the steps before.

    Args:
      stream: of the matrix.
      kept: a variable, or a `HeldTensor`, of `rows_kept` rows.
    """

    def __init__(self, stream: Any, kept: Any):
        self.stream, self.kept = stream, kept
        value = kept.read_value()
        self.shape, self.dtype = value.shape[1:], value.dtype


Draw = Callable[[], list[tf.Tensor]]


def advance(kept: list[KeptStream], step: tf.Tensor, draw: Draw) -> list[tf.Tensor]:
    """The noise of a step; moves what is kept on."""
    stream = kept[0].stream
    if isinstance(stream, streams.Buffered):
        return [_buffered(k, step, z) for k, z in zip(kept, draw(), strict=True)]
    if isinstance(stream, (streams.Recursive, streams.Redrawn)):
        return [_banded(k, step, z) for k, z in zip(kept, draw(), strict=True)]
    return _tree(kept, step, draw)


def _buffered(kept: KeptStream, step: tf.Tensor, fresh: tf.Tensor) -> tf.Tensor:
    """w = z - sum_i scale_i s_i; s_i = decay_i s_i + w."""
    # What is kept of an earlier matrix is finite, and counts for nothing.
    goes_on = tf.cast(step > 0, kept.dtype)
    scale, decay = (
        goes_on * tf.constant(part, kept.dtype)
        for part in (kept.stream.scale, kept.stream.decay)
    )
    before = kept.kept.read_value()
    noise = fresh - tf.tensordot(scale, before, 1)
    decayed = tf.reshape(decay, [-1] + [1] * kept.shape.rank) * before
    kept.kept.assign(decayed + noise)
    return noise


def _banded(kept: KeptStream, step: tf.Tensor, fresh: tf.Tensor) -> tf.Tensor:
    """The last noises (or draws), in a ring, with a coefficient each."""
    stream = kept.stream
    solved = isinstance(stream, streams.Recursive)
    column = stream.coefficients if solved else stream.weights
    first, rest = column[0], np.asarray(column[1:])
    if solved:
        first, rest = 1 / first, -rest / first
    count = len(rest)
    noise = fresh * tf.constant(first, kept.dtype)
    if count:
        # The one of k steps ago is at (step - k) modulo the length of the ring. What is
        # of an earlier matrix is finite, and counts for nothing.
        age = (step - 1 - tf.range(count)) % count + 1
        there = age <= step
        weights = tf.gather(tf.constant(rest, kept.dtype), age - 1)
        weights = tf.where(there, weights, tf.zeros([], kept.dtype))
        noise += tf.tensordot(weights, kept.kept.read_value(), 1)
        newest, place = noise if solved else fresh, step % count
        kept.kept.scatter_update(
            tf.IndexedSlices(newest[tf.newaxis], place[tf.newaxis])
        )
    return noise


def _tree(kept: list[KeptStream], step: tf.Tensor, draw: Draw) -> list[tf.Tensor]:
    """Differences of prefix sums, whose nodes are kept by level; see `TreeSums`."""
    stream = kept[0].stream
    levels = kept[0].kept.read_value().shape[0] - 1
    before = [k.kept.read_value() for k in kept]
    estimates, carried = draw(), tf.constant(True)
    top = tf.zeros([], tf.int32)
    for level in range(levels - 1):
        # Of tensors of a plain graph, `==` asks whether they are the same object.
        carried = tf.logical_and(carried, tf.equal(step // 2**level % 2, 1))
        share = stream._share(level + 1)

        def merged(estimates=estimates, level=level, share=share):
            return [
                share * own + (1 - share) * (kept_[level] + part)
                for own, kept_, part in zip(draw(), before, estimates, strict=True)
            ]

        estimates = tf.cond(carried, merged, lambda parts=estimates: list(parts))
        top += tf.cast(carried, tf.int32)
    # Of the next prefix, of step + 1 steps: the levels below `top` are merged.
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
            "in graphs; use one of tfdpclip.correlated."
        )
    return stream
