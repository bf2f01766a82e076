"""Correlated noise in TensorFlow graphs: the noise of a matrix, step by step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, correlated
from tfdpclip._matrix_steps import (
    HeldTensor,
    KeptStream,
    advance,
    rows_kept,
    stream_of,
)
from tfdpclip._outside import outside_of_functions
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
        stream_of(self.matrix)  # Refuses what cannot be made step by step.
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
        self._streams: list[KeptStream] | None = None
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
        noise = advance(kept, step, draw)
        with tf.control_dependencies(noise):
            self._position.assign(step + 1)
        return _scaled(self.run, noise, stddevs, dtypes)

    def _make(self, shapes, kinds) -> None:
        stream = stream_of(self.run.matrix)

        rows = rows_kept(stream, self.run.steps)

        def make():
            self._streams = [
                KeptStream(
                    stream,
                    tf.Variable(
                        tf.zeros([rows, *tf.TensorShape(shape)], kind), trainable=False
                    ),
                )
                for shape, kind in zip(shapes, kinds, strict=True)
            ]

        outside_of_functions(make, [], in_strategy=False)


class CarriedNoise:
    """The noise of one step of a matrix, for whoever carries what is kept himself.

    For graphs without variables, such as a federated round. In the place of a
    `GaussianNoise`, for one draw; what the next step needs is there afterwards.

    *Formal guarantees*

    * Those of `MatrixNoise`, as long as each step gets what the one before left.
    * Every step has fresh draws, whatever it is given: of two steps that go on from the
      same place, each has noise of its own. Together they cost no more than two
      matrices (docs/guarantees.md).
    * `kept` is as secret as the data.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise, as often as it is asked.
      step: t, an int32 scalar, counted from the beginning of this matrix.
      kept: what the step before left, `first`'s shape; counts for nothing in step 0.

    >>> from tfdpclip import sampling
    >>> scheme = sampling.MinSeparation(1000, 100)
    >>> run = CorrelatedNoise(correlated.SquareRootToeplitz(4), 20, scheme)
    >>> noise = CarriedNoise(run, GaussianNoise(), 0, CarriedNoise.first(run, 5))
    >>> drawn = noise.sample_all([[2], [3]], [1.0, 2.0], [tf.float32] * 2)
    >>> [part.shape.as_list() for part in drawn], noise.kept.shape.as_list()
    ([[2], [3]], [3, 5])
    """

    def __init__(self, run: CorrelatedNoise, source: Any, step: Any, kept: tf.Tensor):
        self.run, self._source = run, source
        self._step = tf.convert_to_tensor(step, tf.int32)
        #: What the next step needs; of this one until it is drawn.
        self.kept = tf.convert_to_tensor(kept)
        self._drawn = False

    @staticmethod
    def first(run: CorrelatedNoise, size: int, dtype: Any = tf.float32) -> tf.Tensor:
        """What there is before the first step.

        Args:
          run: the matrix.
          size: coordinates of all that is noised in a step.
          dtype: float32 or float64.
        """
        return tf.zeros([rows_kept(stream_of(run.matrix), run.steps), size], dtype)

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence
    ) -> list[tf.Tensor]:
        """The step's noise; see `MatrixNoise.sample_all`.

        Args:
          shapes: static shapes, whose sizes add up to that of what is kept.
          stddevs: of independent noise, a number or a scalar tensor for each.
          dtypes: a floating type for each.

        Raises:
          ValueError: if it was drawn before, or the shapes do not fit.
        """
        if self._drawn:
            raise ValueError("This step's noise has been drawn.")
        self._drawn = True
        sizes = [math.prod(tf.TensorShape(shape).as_list()) for shape in shapes]
        count, dtype = self.kept.shape[1], self.kept.dtype
        if sum(sizes) != count:
            raise ValueError(
                f"kept is of {count} coordinates, and the noise of a step has "
                f"{sum(sizes)}."
            )
        held = HeldTensor(self.kept)

        def draw():
            return self._source.sample_all([[count]], [tf.ones([])], [dtype])

        kept = KeptStream(stream_of(self.run.matrix), held)
        (noise,) = advance([kept], self._step, draw)
        self.kept = held.read_value()
        parts = [
            tf.reshape(part, shape)
            for part, shape in zip(tf.split(noise, sizes), shapes, strict=True)
        ]
        return _scaled(self.run, parts, stddevs, dtypes)


def _scaled(run, noise, stddevs, dtypes):
    """Noise of a matrix with the deviations that independent noise should have."""
    return [
        tf.cast(part * tf.cast(run.sensitivity * _wide(stddev), part.dtype), dtype)
        for part, stddev, dtype in zip(noise, stddevs, dtypes, strict=True)
    ]


def _wide(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else tf.convert_to_tensor(value)
