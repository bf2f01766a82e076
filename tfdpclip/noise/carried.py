"""Correlated noise of rounds without variables: what a server's state carries of it.

`CarriedNoise` makes the noise of one round from what the state holds, and leaves what
the next one needs. `NoiseMemory` is that, apart from the rest of a state.
"""

from __future__ import annotations

import collections
import io
import math
import os
import stat
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, files
from tfdpclip.accounting.noise_place import NOISE_KEY, PARTS, noise_of, with_noise
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.noise.steps import (
    HeldTensor,
    KeptStream,
    advance,
    rows_kept,
    stream_of,
)


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

    >>> from tfdpclip import correlated, sampling
    >>> from tfdpclip.noise import GaussianNoise
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
        scale = tf.constant(self.run.sensitivity, dtype)
        (noise,) = advance([kept], self._step, draw, [scale])
        self.kept = held.read_value()
        parts = zip(tf.split(noise, sizes), shapes, stddevs, dtypes, strict=True)
        return [
            tf.cast(tf.reshape(part, shape) * tf.cast(stddev, dtype), kind)
            for part, shape, stddev, kind in parts
        ]


class NoiseMemory:
    """What correlated noise keeps between rounds: as secret as the data.

    Whoever knows it and the released models can take noise off. `split_noise` makes it.

    *Formal guarantees*

    * `save` writes a file that nobody but its owner can read (mode 0600); `load`
      refuses one that others can.
    * It goes back only into the state that it was taken from. That it has not been used
      since, the ledger knows: `RoundBudget(..., continued=memory.steps)`.
    * It cannot be pickled, and does not show what it holds.

    Args:
      content: the noise's part of a state.

    Attributes:
      steps: Rounds of its matrix that had their noise.

    Raises:
      ValueError: if the content is something else.
    """

    def __init__(self, content: Any):
        noise = noise_of({NOISE_KEY: content}) or {}
        self._content = collections.OrderedDict(
            (name, np.asarray(noise[name])) for name in PARTS
        )
        kinds = {name: part.dtype.kind for name, part in self._content.items()}
        if "".join(kinds[name] for name in PARTS) != "iiiif":
            raise ValueError(
                "content must be whole numbers and what is kept in floating point, "
                f"got {_arguments.shown(content)}."
            )

    @property
    def steps(self) -> int:
        """Rounds of its matrix that had their noise."""
        return int(self._content["step"])

    def __repr__(self) -> str:
        return f"<NoiseMemory of {self.steps} rounds>"

    def __reduce__(self):
        raise TypeError(
            "What correlated noise keeps is a secret: use its save(path), which writes "
            "a file for the owner alone."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that only its owner can read.

        Args:
          path: the file.

        Raises:
          OSError: if it cannot be written.
        """
        content = io.BytesIO()
        np.savez(content, **self._content)
        files.write_atomically(path, content.getvalue(), private=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NoiseMemory:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Raises:
          ValueError: if it is something else, or others can read it.
          OSError: if it cannot be read.
        """
        if os.name != "nt" and stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise ValueError(
                f"{path} can be read or written by others, and holds what takes noise "
                "off. Begin another matrix without it; or, if you are sure that nobody "
                f"has read it: chmod 600 {path}"
            )
        return cls(files.read_npz(path, PARTS))


def split_noise(state: Any) -> tuple[Any, NoiseMemory]:
    """A server's state without what correlated noise keeps, and that.

    The state can be saved like a model, and trained on: then another matrix begins,
    with noise of its own, and a `dpc.accounting.RoundBudget` counts it. A budget takes
    it once, as every state: split it again to begin from it again.

    Args:
      state: of a `clipped_mean` with correlated noise, or of a learning process.

    Returns:
      The state at the beginning of a matrix, and the memory.

    Raises:
      ValueError: if it has no correlated noise.
    """
    memory = NoiseMemory(_noise_in(state))
    content = memory._content
    name = np.frombuffer(os.urandom(content["ticket"].size * 8), np.int64)
    fresh = collections.OrderedDict(
        content,
        step=np.zeros_like(content["step"]),
        ticket=name.reshape(content["ticket"].shape),
        # By which the two are put together again.
        before=content["ticket"],
        kept=np.zeros_like(content["kept"]),
    )
    return with_noise(state, fresh), memory


def join_noise(state: Any, memory: NoiseMemory) -> Any:
    """A server's state that goes on with the noise that it had.

    Args:
      state: what `split_noise` returned, for example from a checkpoint.
      memory: what it returned beside it.

    Raises:
      ValueError: if the memory is that of another state.
    """
    if not isinstance(memory, NoiseMemory):
        raise ValueError(
            "memory must be what split_noise(state) returned, or NoiseMemory.load("
            f"path), got {_arguments.shown(memory)}."
        )
    ours, theirs = _noise_in(state), memory._content
    if (
        any(np.shape(ours[name]) != theirs[name].shape for name in theirs)
        or not np.array_equal(ours["before"], theirs["ticket"])
        or not np.array_equal(ours["run"], theirs["run"])
        or np.any(ours["step"])
        or np.any(ours["kept"])
    ):
        raise ValueError(
            "memory was taken from another state than this one: its noise belongs to "
            "another round or run. Without it another matrix begins."
        )
    return with_noise(state, theirs)


def _noise_in(state: Any) -> Any:
    noise = noise_of(state)
    if noise is None:
        raise ValueError(
            "state has no correlated noise. It must be the state of a "
            "clipped_mean(..., noise=dpc.CorrelatedNoise(...)), or of a learning "
            "process with one as its model_aggregator."
        )
    return noise
