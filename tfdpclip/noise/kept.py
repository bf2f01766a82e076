"""Correlated noise in TensorFlow graphs, with a memory in variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip._outside import outside_of_functions
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.noise.steps import KeptStream, advance, rows_kept, stream_of

# The replica number of randomness that is no noise, above the numbers of all replicas.
_MOST_REPLICAS = 2**31
_APART = (
    "Correlated noise: a step was cut short on a replica, so the noise of the replicas "
    "belongs to different steps. Begin another matrix, as every call of fit with "
    "PrivacyBudget does." + see("several-replicas")
)


class MatrixNoise:
    """Draws the noise of a matrix, step by step, in the place of a `GaussianNoise`.

    *Formal guarantees*

    * Step t's noise is the requested standard deviation, times s(C), times row t of
      C^-1 Z, with fresh Gaussians Z for every coordinate; the noised counts are
      coordinates as well.
    * The memory between steps is as secret as the data: with the memory and the
      released numbers, the noise can be subtracted. No checkpoint and no saved model
      contains the memory, because plain objects are invisible to them. A run that is
      restored in another process begins another matrix, unless the run is given the
      `secret` of this matrix.
    * Noise that continues from a secret is the noise of the same matrix, up to
      rounding: all earlier draws are drawn again, and compared with the memory. The
      skipped steps are never drawn for different data.
    * A step that fails after its noise was drawn has moved the noise on, and the same
      draws are never used again.
    * On R replicas, each replica draws for itself (`of_replica`). The draws of all
      replicas times R^(-1/2) add up to the noise of a single device. If the replicas
      are not all at the same step, the step raises before any sum leaves a replica.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise.
      begun: on a replica, the count of steps that all replicas began.
    """

    def __init__(
        self,
        run: CorrelatedNoise,
        source: GaussianNoise,
        begun: tf.Variable | None = None,
    ):
        self.run, self.source, self._begun = run, source, begun
        place = 0 if source.replica is None else _MOST_REPLICAS + source.replica
        self._others = GaussianNoise(source.seed, source.hardened, replica=place)
        self._replicas: dict[int, MatrixNoise] = {}
        self._streams: list[KeptStream] | None = None
        self._began_at: list[int] | None = None  # before the first draw
        self._left_at: list[int] | None = None
        if tf.distribute.has_strategy():
            # A single variable, outside of the strategy.
            outside_of_functions(self._count, [], in_strategy=False)
        else:
            self._count()

    def _count(self) -> None:
        with tf.init_scope():
            self._position = tf.Variable(0, trainable=False, dtype=tf.int32)

    def of_replica(self, place: int) -> MatrixNoise:
        """The noise of a replica, independent of the noise of all further replicas.

        Repeated calls return the same object, and `restart` begins another matrix for
        all replicas.

        Args:
          place: the number of the replica.
        """
        if place not in self._replicas:
            source = self.source.of_replica(place)

            def make():
                self._replicas[place] = MatrixNoise(self.run, source, self._position)

            outside_of_functions(make, [], in_strategy=False)
        return self._replicas[place]

    def begin_step(self) -> None:
        """Counts a step that all replicas take together, in the graph at hand."""
        self._position.assign_add(1)

    def __deepcopy__(self, memo):
        # A copy of the memory would be used for different data.
        return MatrixNoise(self.run, self.source.__deepcopy__(memo))

    def __reduce__(self):
        return MatrixNoise, (self.run, self.source)

    def restart(self, keep: bool = False) -> None:
        """Begins another matrix, with noise of its own. Not for use in graphs.

        Args:
          keep: whether `secret` will be called later.
        """
        self._clear()
        self._began_at = self.source.state if keep else None
        self._left_at = None
        if keep:
            self._leave()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, steps use the draws that a `secret` repeats; outside, new draws."""
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
        for replica in self._replicas.values():
            replica._clear()

    @property
    def made(self) -> int:
        """The steps with noise since the last restart. Not for use in graphs."""
        return int(self._position.numpy())

    def seed_pair(self) -> tf.Tensor:
        """Fresh randomness that is no noise of a step, as in `GaussianNoise`."""
        return self._others.seed_pair()

    def secret(self) -> dict[str, Any]:
        """The argument of `go_on`, JSON-ready: with it all noise can be subtracted.

        Raises:
          ValueError: if no noise was made, or `restart` was called without `keep`.
        """
        if self._began_at is None or not self._streams:
            raise ValueError(
                "There is nothing to keep: call restart(keep=True) before the first "
                "step, and make the noise of a step."
            )
        return {
            "source": self._began_at,
            "hardened": self.source.hardened,
            "shapes": [one.shape.as_list() for one in self._streams],
            "kinds": [one.dtype.name for one in self._streams],
            "made": self.made,
            "kept": [one.probe().tolist() for one in self._streams],
        }

    def go_on(self, secret: Mapping[str, Any], steps: int) -> None:
        """Continues the noise of a `secret`. Not for use in graphs.

        All earlier steps are drawn again, which takes as long as their noise took.

        Args:
          secret: the result of `secret` of a matrix with the same settings.
          steps: how many steps were released, or may have been: the next step is the
            first with new noise.

        Raises:
          ValueError: if the secret belongs to different noise, or to more steps, or the
            repeated draws differ from the memory.
        """
        _check_secret(secret, self.source.hardened)
        steps = _arguments.integer("steps", steps)
        made, kept = secret["made"], secret["kept"]
        if made > steps:
            raise ValueError(
                f"it has made the noise of {made} steps, which is more than the "
                f"{steps} steps to continue from: released noise would be used again."
            )
        shapes, kinds = secret["shapes"], [tf.as_dtype(t) for t in secret["kinds"]]
        self._check_shapes(shapes, kinds)
        # Draws in code compiled by XLA may differ from draws in plain code.
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
                one.matches(part)
                for one, part in zip(self._streams or [], kept, strict=True)
            ):
                break
        else:
            self._clear()
            raise ValueError(
                "the repeated draws differ from the kept memory, as with another "
                "version of TensorFlow or another device."
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
          stddevs: the standard deviations of independent noise, a number or a scalar
            tensor for each.
          dtypes: a floating type for each; float32 by default.

        Raises:
          ValueError: if the shapes differ from the shapes of earlier steps.
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
        # Stddev 1 for every coordinate; all coordinates are drawn at once.
        one = tf.ones([])

        def draw():
            return self.source.sample_all(shapes, [one] * len(shapes), kinds)

        made = self._position.read_value()
        if self._begun is not None:
            alike = tf.debugging.assert_equal(made + 1, self._begun, _APART)
            with tf.control_dependencies([alike] if alike is not None else []):
                made = tf.identity(made)
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
                "Correlated noise was made for other variables: all steps must have "
                "the same variables. Use a new optimizer for a new model, or after "
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
    """Raises if `secret` is no result of `MatrixNoise.secret`."""
    names = {"source", "hardened", "shapes", "kinds", "made", "kept"}
    if not isinstance(secret, Mapping) or set(secret) != names:
        raise ValueError("it is no secret of correlated noise.")
    if secret["hardened"] is not hardened:
        raise ValueError("it is of another hardened_noise.")
    _arguments.integer("made", secret["made"], 1)
    sizes = {len(secret[name]) for name in ("shapes", "kinds", "kept")}
    if len(sizes) != 1 or len(secret["source"]) != 3:
        raise ValueError("its parts do not fit together.")
