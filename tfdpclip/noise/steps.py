"""One step of correlated noise in graphs: what is kept, and what a step makes of it.

`tfdpclip.correlated.streams` has the same in NumPy, and what each of them is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import correlated
from tfdpclip._devices import in_xla, on_cpus
from tfdpclip.correlated import streams

# Of a tensor, so many coordinates tell whether draws are the same as before: others
# are farther away in one of 10^3 cases, for each of them and each that is kept.
_LOOKED_AT, _NEAR = 8, 1e-3
# Of so many coordinates a step is compiled, on CPUs: a loop over the coordinates reads
# what is kept once or twice, ten operations several times.
_COMPILED_FROM = 2**16


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
        # Worth the time that compiling takes; code that XLA compiles as a whole is. A
        # function writes to variables only.
        large = self.shape.num_elements() >= _COMPILED_FROM
        self.compiled = large and on_cpus() and not isinstance(kept, HeldTensor)

    def some(self) -> np.ndarray:
        """What is kept of some coordinates. Not for use in graphs."""
        size = self.shape.num_elements()
        places = np.linspace(0, size - 1, min(size, _LOOKED_AT)).astype(int)
        flat = tf.reshape(self.kept.read_value(), [-1, size])
        return tf.gather(flat, places, axis=1).numpy().astype(float)

    def is_like(self, before: Any) -> bool:
        """Whether what is kept is what `some` gave before, to rounding."""
        now, before = self.some(), np.asarray(before, float)
        return now.shape == before.shape and bool(
            np.all(np.abs(now - before) <= _NEAR * (1 + np.abs(before)))
        )


def rows_kept(stream: Any, steps: int) -> int:
    """How many vectors as long as the noise are kept between steps; 1 at least."""
    count = stream.buffers
    if isinstance(stream, streams.TreeSums):
        # A level for each power of 2 up to the steps, and the last prefix sum.
        count = steps.bit_length() + 1
    return max(1, count)


Draw = Callable[[], list[tf.Tensor]]


def advance(
    kept: list[KeptStream], step: tf.Tensor, draw: Draw, scales: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The noise of a step, each part times its scale; moves what is kept on."""
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
    # What is kept of an earlier matrix is finite, and counts for nothing.
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
    """The last noises (or draws), in a ring, with a coefficient each."""
    stream = kept.stream
    solved = isinstance(stream, streams.Recursive)
    column = stream.coefficients if solved else stream.weights
    first, rest = column[0], np.asarray(column[1:])
    if solved:
        first, rest = 1 / first, -rest / first
    count = len(rest)
    weights = tf.zeros([1], kept.dtype)
    if count:
        # The one of k steps ago is at (step - k) modulo the length of the ring. What is
        # of an earlier matrix is finite, and counts for nothing.
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
    # Not in there: XLA would copy all that is kept.
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
    # One loop over the coordinates, on all cores; a product with a vector is made by
    # one of them, and takes four times as long.
    return sum(weights[i] * parts[i] for i in range(parts.shape[0]))


_compiled_buffered = tf.function(_plain_buffered, jit_compile=True, autograph=False)
_compiled_banded = tf.function(_plain_banded, jit_compile=True, autograph=False)


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
