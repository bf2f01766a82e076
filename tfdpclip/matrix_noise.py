"""Correlated noise in TensorFlow graphs: the noise of a matrix, step by step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, correlated
from tfdpclip._outside import outside_of_functions
from tfdpclip.correlated import streams
from tfdpclip.noise import GaussianNoise
from tfdpclip.sampling import schemes
from tfdpclip.sampling.base import SamplingScheme

# Of useful matrices no coefficient of the inverse is above 1.
_MOST_WEIGHT, _LOOKED_AT = 100.0, 10_000


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise:
    """The noise of a run: a matrix, for so many steps, of records drawn so.

        scheme = dpc.sampling.MinSeparation(60_000, 500)
        noise = dpc.CorrelatedNoise(
            dpc.correlated.BufferedToeplitz(3, 1200, scheme), 1200, scheme)
        optimizer = dpc.keras.DPSGD(0.1, noise_multiplier=2.0,
                                    expected_batch_size=500, noise=noise)

    *Formal guarantees*

    * With noise of standard deviation z s(C) C_t (C^-1 Z)_t on a sum that is clipped to
      C_t, all steps together are one Gaussian mechanism of noise multiplier z, if
      records are drawn by `sampling` (docs/guarantees.md has the proof).
    * After `steps` steps another matrix begins with fresh noise, and is accounted for.

    Attributes:
      matrix: C, one of `tfdpclip.correlated`.
      steps: For how many steps.
      sampling: The scheme that draws the records; it says how often one takes part.

    Raises:
      ValueError: If the matrix does not fit the scheme.

    >>> from tfdpclip import sampling
    >>> scheme = sampling.MinSeparation(1000, 100)
    >>> run = CorrelatedNoise(correlated.SquareRootToeplitz(4), 20, scheme)
    >>> round(run.sensitivity, 3)
    1.725
    """

    matrix: correlated.NoiseMatrix
    steps: int
    sampling: SamplingScheme

    def __post_init__(self):
        if not isinstance(self.matrix, correlated.NoiseMatrix):
            raise ValueError(
                "matrix must be a noise matrix of tfdpclip.correlated, such as "
                f"SquareRootToeplitz(16), got {_arguments.shown(self.matrix)}."
            )
        scheme = getattr(self.sampling, "scheme", self.sampling)
        if not isinstance(scheme, SamplingScheme):
            raise ValueError(
                "sampling must be a scheme of tfdpclip.sampling, such as "
                "MinSeparation(population, batch_size), or its batches; got "
                f"{_arguments.shown(self.sampling)}."
            )
        steps = _arguments.integer("steps", self.steps, 1)
        object.__setattr__(self, "sampling", scheme)
        object.__setattr__(self, "steps", steps)
        _stream_of(self.matrix)  # Refuses what cannot be made step by step.
        if not math.isfinite(self.sensitivity):
            raise ValueError(f"{self.matrix} has no finite sensitivity.")
        if isinstance(self.matrix, correlated.ToeplitzMatrix):
            column = self.matrix.inverse_coefficients(min(steps, _LOOKED_AT))
            most = np.max(np.abs(column))
            if not most <= _MOST_WEIGHT:
                raise ValueError(
                    f"matrix has an inverse that grows to {most:.3g}: "
                    "old noise would drown the fresh noise of a step in float32. Use "
                    "coefficients that do not rise, such as SquareRootToeplitz(16)."
                )

    @functools.cached_property
    def sensitivity(self) -> float:
        """s(C): how far one record moves C x, if it is clipped to norm 1."""
        return self.matrix.sensitivity(
            self.steps, self.sampling.participation(self.steps)
        )

    @property
    def of_a_phase(self) -> dict[str, Any]:
        """What a ledger's phase is told of it."""
        return {"noise": self.matrix, "horizon": self.steps}

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values."""
        return {
            "matrix": self.matrix.to_dict(),
            "steps": self.steps,
            "sampling": self.sampling.to_dict(),
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> CorrelatedNoise:
        """The noise that `to_dict` described.

        Raises:
          ValueError: If the settings are of something else.
        """
        if not isinstance(settings, Mapping) or set(settings) != {
            "matrix",
            "steps",
            "sampling",
        }:
            raise ValueError(
                "noise must be a CorrelatedNoise(matrix, steps, sampling), got "
                f"{_arguments.shown(settings)}."
            )
        return cls(
            correlated.from_dict(settings["matrix"]),
            settings["steps"],
            schemes.from_dict(settings["sampling"]),
        )


def as_run(noise: Any, noise_multiplier: Any) -> CorrelatedNoise | None:
    """The correlated noise that an argument stands for; None for independent noise.

    Args:
      noise: a `CorrelatedNoise`, its `to_dict`, or None.
      noise_multiplier: z, or a schedule of it.

    Raises:
      ValueError: if it is something else, or z follows a schedule.
    """
    if noise is None:
        return None
    run = noise
    if not isinstance(run, CorrelatedNoise):
        run = CorrelatedNoise.from_dict(noise)
    if callable(noise_multiplier):
        raise ValueError(
            "noise_multiplier must be a number with correlated noise: one matrix has "
            "one, for all of its steps."
        )
    return run


class MatrixNoise:
    """Draws the noise of a matrix, step by step, in the place of a `GaussianNoise`.

    *Formal guarantees*

    * Step t's noise is the standard deviation that is asked for, times s(C), times row
      t of C^-1 Z, with fresh Gaussians Z for every coordinate; the noised counts among
      them.
    * What is kept between steps is as secret as the data: whoever knows it and the
      released numbers can take the noise off. It is in no checkpoint and in no file:
      plain objects are invisible to them. So a run that is restored in another process
      begins another matrix.
    * A step that fails after its noise was drawn has moved the noise on, and is never
      noised again with the same draws.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise.
    """

    def __init__(self, run: CorrelatedNoise, source: GaussianNoise):
        self.run, self.source = run, source
        self._streams: list[_KeptStream] | None = None
        with tf.init_scope():
            self._position = tf.Variable(0, trainable=False, dtype=tf.int32)

    def __deepcopy__(self, memo):
        # A copy of what is kept would be used for other data.
        return MatrixNoise(self.run, self.source.__deepcopy__(memo))

    def __reduce__(self):
        return MatrixNoise, (self.run, self.source)

    def restart(self) -> None:
        """Begins another matrix, with noise of its own. Not for use in graphs."""
        self._position.assign(0)

    @property
    def made(self) -> int:
        """Steps of the current matrix that had their noise. Not for use in graphs."""
        return int(self._position.numpy())

    def seed_pair(self) -> tf.Tensor:
        """As of `GaussianNoise`: fresh randomness that is no noise of a step."""
        return self.source.seed_pair()

    @tf.autograph.experimental.do_not_convert
    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence | None = None
    ) -> list[tf.Tensor]:
        """The noise of the next step, for several tensors.

        Args:
          shapes: static shapes, the same in every step.
          stddevs: of independent noise, a number or a scalar tensor for each.
          dtypes: a floating type for each; float32 by default.

        Raises:
          ValueError: if the shapes are others than before.
        """
        dtypes = [tf.as_dtype(t) for t in dtypes or [tf.float32] * len(shapes)]
        kinds = [t if t.size >= 4 else tf.float32 for t in dtypes]
        if self._streams is None:
            self._make(shapes, kinds)
        kept = self._streams or []
        if [(k.shape, k.dtype) for k in kept] != [
            (tf.TensorShape(shape), kind)
            for shape, kind in zip(shapes, kinds, strict=True)
        ]:
            raise ValueError(
                "Correlated noise was made for other variables: those of one step must "
                "be those of all. Use a new optimizer for another model, or after "
                "layers were frozen."
            )
        # One for each coordinate, drawn at once.
        one = tf.ones([])

        def draw():
            return self.source.sample_all(shapes, [one] * len(shapes), kinds)

        step = self._position % self.run.steps
        noise = _advance(kept, step, draw)
        with tf.control_dependencies(noise):
            self._position.assign(step + 1)
        return [
            tf.cast(
                part * tf.cast(self.run.sensitivity * _wide(stddev), part.dtype), dtype
            )
            for part, stddev, dtype in zip(noise, stddevs, dtypes, strict=True)
        ]

    def _make(self, shapes, kinds) -> None:
        stream = _stream_of(self.run.matrix)

        def make():
            self._streams = [
                _KeptStream(stream, tf.TensorShape(shape), kind, self.run.steps)
                for shape, kind in zip(shapes, kinds, strict=True)
            ]

        outside_of_functions(make, [], in_strategy=False)


class _KeptStream:
    """What the noise of one tensor needs of the steps before."""

    def __init__(self, stream: Any, shape, dtype, steps: int):
        self.stream, self.shape, self.dtype = stream, shape, dtype
        count = stream.buffers
        if isinstance(stream, streams.TreeSums):
            # A level for each power of 2 up to the steps, and the last prefix sum.
            count = steps.bit_length() + 1
        self.kept = tf.Variable(
            tf.zeros([max(1, count), *shape], dtype), trainable=False
        )


Draw = Callable[[], list[tf.Tensor]]


def _advance(kept: list[_KeptStream], step: tf.Tensor, draw: Draw) -> list[tf.Tensor]:
    """The noise of a step; moves what is kept on."""
    stream = kept[0].stream
    if isinstance(stream, streams.Buffered):
        return [_buffered(k, step, z) for k, z in zip(kept, draw(), strict=True)]
    if isinstance(stream, (streams.Recursive, streams.Redrawn)):
        return [_banded(k, step, z) for k, z in zip(kept, draw(), strict=True)]
    return _tree(kept, step, draw)


def _buffered(kept: _KeptStream, step: tf.Tensor, fresh: tf.Tensor) -> tf.Tensor:
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


def _banded(kept: _KeptStream, step: tf.Tensor, fresh: tf.Tensor) -> tf.Tensor:
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
    newest = noise if solved else fresh
    place = step % max(1, count)
    kept.kept.scatter_update(tf.IndexedSlices(newest[tf.newaxis], place[tf.newaxis]))
    return noise


def _tree(kept: list[_KeptStream], step: tf.Tensor, draw: Draw) -> list[tf.Tensor]:
    """Differences of prefix sums, whose nodes are kept by level; see `TreeSums`."""
    stream = kept[0].stream
    levels = kept[0].kept.shape[0] - 1
    before = [k.kept.read_value() for k in kept]
    estimates, carried = draw(), tf.constant(True)
    top = tf.zeros([], tf.int32)
    for level in range(levels - 1):
        carried = tf.logical_and(carried, step // 2**level % 2 == 1)
        share = stream._share(level + 1)

        def merged(estimates=estimates, level=level, share=share):
            return [
                share * own + (1 - share) * (kept_[level] + part)
                for own, kept_, part in zip(draw(), before, estimates, strict=True)
            ]

        estimates = tf.cond(carried, merged, lambda parts=estimates: list(parts))
        top += tf.cast(carried, tf.int32)
    # Of the next prefix, of step + 1 steps: the levels below `top` are merged.
    index = np.arange(levels)
    part_of = tf.logical_and((step + 1) // 2**index % 2 == 1, index != top)
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


def _stream_of(matrix: correlated.NoiseMatrix) -> streams.Stream:
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


def _wide(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else tf.convert_to_tensor(value)
