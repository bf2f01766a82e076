"""Correlated noise in TensorFlow graphs: the noise of a matrix, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, _sealed, correlated
from tfdpclip._noise_steps import KeptStream, advance, rows_kept, stream_of
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

    @functools.cached_property
    def digest(self) -> tuple[int, int]:
        """A public name of the settings, the same in every process."""
        words = _sealed.digest(self.to_dict()).removeprefix("sha256:")
        first, second = np.frombuffer(bytes.fromhex(words)[:16], "<i8").tolist()
        return first, second

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
      released numbers can take the noise off. It is in no checkpoint and in no saved
      model: plain objects are invisible to them. A run that is restored in another
      process begins another matrix, unless it is given the `secret` of this one.
    * Noise that goes on from a secret is that of the same matrix, to rounding: all
      draws before are drawn again, and compared with what was kept. The steps that are
      skipped are never drawn for other data.
    * A step that fails after its noise was drawn has moved the noise on, and is never
      noised again with the same draws.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise.
    """

    def __init__(self, run: CorrelatedNoise, source: GaussianNoise):
        self.run, self.source = run, source
        self._others = GaussianNoise(source.seed, source.hardened, replica=0)
        self._streams: list[KeptStream] | None = None
        self._began_at: list[int] | None = None  # before the first draw
        self._left_at: list[int] | None = None
        with tf.init_scope():
            self._position = tf.Variable(0, trainable=False, dtype=tf.int32)

    def __deepcopy__(self, memo):
        # A copy of what is kept would be used for other data.
        return MatrixNoise(self.run, self.source.__deepcopy__(memo))

    def __reduce__(self):
        return MatrixNoise, (self.run, self.source)

    def restart(self, keep: bool = False) -> None:
        """Begins another matrix, with noise of its own. Not for use in graphs.

        Args:
          keep: whether `secret` will be asked for.
        """
        self._clear()
        self._began_at = self.source.state if keep else None
        self._left_at = None
        if keep:
            self._leave()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within, steps draw what a `secret` would; outside, draws of their own."""
        if self._left_at is None:
            yield
            return
        self.source.go_on_from(self._left_at)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._left_at = self.source.state
        self.source.renew()

    def _clear(self) -> None:
        self._position.assign(0)
        for one in self._streams or []:
            one.kept.assign(tf.zeros_like(one.kept))

    @property
    def made(self) -> int:
        """Steps that had their noise since the last restart. Not for use in graphs."""
        return int(self._position.numpy())

    def seed_pair(self) -> tf.Tensor:
        """As of `GaussianNoise`: fresh randomness that is no noise of a step."""
        return self._others.seed_pair()

    def secret(self) -> dict[str, Any]:
        """What `go_on` needs, JSON-ready: whoever has it can take off all noise.

        Raises:
          ValueError: if no noise was made, or `restart` was not told to keep it.
        """
        if self._began_at is None or not self._streams:
            raise ValueError(
                "There is nothing to keep: call restart(keep=True) before the first "
                "step, and make the noise of one."
            )
        return {
            "source": self._began_at,
            "hardened": self.source.hardened,
            "shapes": [one.shape.as_list() for one in self._streams],
            "kinds": [one.dtype.name for one in self._streams],
            "made": self.made,
            "kept": [one.some().tolist() for one in self._streams],
        }

    def go_on(self, secret: Mapping[str, Any], steps: int) -> None:
        """Goes on with the noise of a `secret`. Not for use in graphs.

        All steps before are drawn again, which takes as long as their noise took.

        Args:
          secret: what it gave, of a matrix of these settings.
          steps: how many steps were released, or may have been: the next one is the
            first that gets new noise.

        Raises:
          ValueError: if the secret is of other noise, or of more steps, or what is
            drawn again is not what was kept.
        """
        _check_secret(secret, self.source.hardened)
        steps = _arguments.integer("steps", steps)
        made, kept = secret["made"], secret["kept"]
        if made > steps:
            raise ValueError(
                f"it has made the noise of {made} steps, and {steps} are to be gone on "
                "from: noise that was released would be used again."
            )
        shapes, kinds = secret["shapes"], [tf.as_dtype(t) for t in secret["kinds"]]
        self._check_shapes(shapes, kinds)
        # Draws that XLA compiles need not be those of other code.
        for compiled in (False, True):
            self._clear()
            self._left_at = None
            self.source.go_on_from(secret["source"])
            again = tf.function(
                lambda: self._next(shapes, kinds, [tf.ones([], t) for t in kinds]),
                jit_compile=compiled,
                autograph=False,
            )
            for _ in range(made):
                again()
            if all(
                one.is_like(part)
                for one, part in zip(self._streams or [], kept, strict=True)
            ):
                break
        else:
            self._clear()
            raise ValueError(
                "what is drawn again is not what was kept, as with another version of "
                "TensorFlow or another device."
            )
        for _ in range(made, steps):
            again()
        self._began_at = list(secret["source"])
        self._leave()

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
        scales = [
            tf.cast(self.run.sensitivity * stddev, kind)
            for stddev, kind in zip(stddevs, kinds, strict=True)
        ]
        noise = self._next(shapes, kinds, scales)
        return [tf.cast(part, t) for part, t in zip(noise, dtypes, strict=True)]

    def _next(
        self, shapes: Sequence, kinds: Sequence, scales: Sequence
    ) -> list[tf.Tensor]:
        """The noise of the next step, times the scales."""
        self._check_shapes(shapes, kinds)
        # One for each coordinate, drawn at once.
        one = tf.ones([])

        def draw():
            return self.source.sample_all(shapes, [one] * len(shapes), kinds)

        made = self._position.read_value()
        step = made % self.run.steps
        noise = advance(self._streams or [], step, draw, list(scales))
        with tf.control_dependencies(noise):
            self._position.assign(made + 1)
        return noise

    def _check_shapes(self, shapes: Sequence, kinds: Sequence) -> None:
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


def _check_secret(secret: Any, hardened: bool) -> None:
    """Raises if it is not what `MatrixNoise.secret` gives."""
    names = {"source", "hardened", "shapes", "kinds", "made", "kept"}
    if not isinstance(secret, Mapping) or set(secret) != names:
        raise ValueError("it is no secret of correlated noise.")
    if secret["hardened"] is not hardened:
        raise ValueError("it is of another hardened_noise.")
    _arguments.integer("made", secret["made"], 1)
    sizes = {len(secret[name]) for name in ("shapes", "kinds", "kept")}
    if len(sizes) != 1 or len(secret["source"]) != 3:
        raise ValueError("its parts do not fit together.")
