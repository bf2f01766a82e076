"""Correlated noise in TensorFlow graphs, kept from step to step in variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._outside import outside_of_functions
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.noise.steps import KeptStream, advance, rows_kept, stream_of

# Where randomness that is no noise comes from, beside the noise of so many replicas.
_MOST_REPLICAS = 2**31
_APART = (
    "Correlated noise: a step was cut short on one of the replicas, whose noise is of "
    "another step than that of the others. Begin another matrix, as every call of fit "
    "with PrivacyBudget does."
)


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
    * On R replicas, each draws for itself (`of_replica`). R^(-1/2) of what they draw
      adds up to the noise of one. Where they are not all at the same step, the step
      raises before any sum leaves a replica.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise.
      begun: of one of several replicas, the steps that all of them began.
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
            # One, whatever the strategy has of other variables.
            outside_of_functions(self._count, [], in_strategy=False)
        else:
            self._count()

    def _count(self) -> None:
        with tf.init_scope():
            self._position = tf.Variable(0, trainable=False, dtype=tf.int32)

    def of_replica(self, place: int) -> MatrixNoise:
        """What draws for one of several replicas, independently of all others.

        It is the same object whenever it is asked for, and begins another matrix
        whenever this one does.

        Args:
          place: which replica.
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
        for replica in self._replicas.values():
            replica._clear()

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
