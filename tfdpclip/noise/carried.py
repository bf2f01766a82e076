"""Correlated noise of rounds without variables, with its memory in a server's state.

`CarriedNoise` makes the noise of a round from the memory in the state, and makes the
memory of the next round. `NoiseMemory` is the memory apart from the rest of a state.
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
from tfdpclip.accounting.noise_place import (
    NOISE_KEY,
    PARTS,
    noise_of,
    unnamed,
    with_noise,
)
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.noise.steps import (
    HeldTensor,
    KeptStream,
    advance,
    rows_kept,
    stream_of,
)


class CarriedNoise:
    """The noise of a step of a matrix, for callers that carry the memory themselves.

    Graphs without variables need this class, for example federated rounds. It replaces
    a `GaussianNoise` for a single draw; then `kept` is the memory of the next step.

    *Formal guarantees*

    * Those of `MatrixNoise`, as long as each step gets the memory of the step before.
    * Every step has fresh draws, whatever memory it is given: two steps that continue
      from the same memory have different noise. Together they cost no more than two
      matrices (docs/guarantees.md).
    * `kept` is as secret as the data.

    Args:
      run: the matrix and its sensitivity.
      source: draws independent noise, any number of times.
      step: t, an int32 scalar, counted from the beginning of this matrix.
      kept: the memory of the step before, of `first`'s shape; step 0 ignores it.

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
        #: The memory for the next step; before the draw, the memory for this step.
        self.kept = tf.convert_to_tensor(kept)
        self._drawn = False

    @staticmethod
    def first(run: CorrelatedNoise, size: int, dtype: Any = tf.float32) -> tf.Tensor:
        """The memory before the first step.

        Args:
          run: the matrix.
          size: the number of coordinates that are noised in a step.
          dtype: float32 or float64.
        """
        return tf.zeros([rows_kept(stream_of(run.matrix), run.steps), size], dtype)

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence
    ) -> list[tf.Tensor]:
        """The step's noise; see `MatrixNoise.sample_all`.

        Args:
          shapes: static shapes, with as many coordinates in total as `kept`.
          stddevs: the standard deviations of independent noise, a number or a scalar
            tensor for each.
          dtypes: a floating type for each.

        Raises:
          ValueError: if the noise was drawn before, or the shapes do not fit.
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
    """The memory of correlated noise between rounds: as secret as the data.

    With this memory and the released models, the noise can be subtracted. `split_noise`
    makes it.

    *Formal guarantees*

    * `save` writes a file that only its owner can read (mode 0600); `load` refuses a
      file that further users can read.
    * The memory goes back only into the state that it was taken from. The ledger knows
      whether the memory was used since: `RoundBudget(..., continued=memory.steps)`.
    * The memory cannot be pickled, and its `repr` does not show its content.

    Args:
      content: the noise's part of a state.

    Attributes:
      steps: the number of rounds of the matrix that had their noise.

    Raises:
      ValueError: if the content is not the noise's part of a state.
    """

    def __init__(self, content: Any):
        noise = noise_of({NOISE_KEY: content}) or {}
        self._content = collections.OrderedDict(
            (name, np.asarray(noise[name])) for name in PARTS
        )
        kinds = {name: part.dtype.kind for name, part in self._content.items()}
        if "".join(kinds[name] for name in PARTS) != "iiiif":
            raise ValueError(
                "content must be whole numbers and floating-point memory, got "
                f"{_arguments.shown(content)}."
            )

    @property
    def steps(self) -> int:
        """The number of rounds of the matrix that had their noise."""
        return int(self._content["step"])

    def __repr__(self) -> str:
        return f"<NoiseMemory of {self.steps} rounds>"

    def __reduce__(self):
        raise TypeError(
            "The memory of correlated noise is a secret: use its save(path), which "
            "writes a file for the owner alone."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that only its owner can read.

        Args:
          path: the file.

        Raises:
          OSError: if the file cannot be written.
        """
        content = io.BytesIO()
        np.savez(content, **self._content)
        files.write_atomically(path, content.getvalue(), private=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NoiseMemory:
        """Reads a file that `save` wrote.

        Args:
          path: the file.

        Raises:
          ValueError: if the file holds no memory, or further users can read it.
          OSError: if the file cannot be read.
        """
        if os.name != "nt" and stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise ValueError(
                f"{path} can be read or written by others, and with its content noise "
                "can be subtracted. Begin another matrix without it; or, if you are "
                f"sure that only you have read it: chmod 600 {path}"
            )
        content = io.BytesIO(files.read_bytes(path))
        try:
            with np.load(content, allow_pickle=False) as arrays:
                return cls({name: arrays[name] for name in PARTS})
        except Exception as error:  # Damaged archives raise a dozen kinds of errors.
            raise ValueError(
                f"{path} is cut or damaged, or holds no memory of noise: {error}."
            ) from error


def split_noise(state: Any) -> tuple[Any, NoiseMemory]:
    """Splits a server's state into a state without memory of noise, and the memory.

    The state can be saved like a model, and trained on: then a new matrix begins, with
    noise of its own, and a `dpc.accounting.RoundBudget` counts it. A budget accepts the
    state once, like every state: split the first state again to begin from it again.

    Args:
      state: the state of a `clipped_mean` with correlated noise, or of a learning
        process.

    Returns:
      The state at the beginning of a matrix, and the memory.

    Raises:
      ValueError: if the state has no correlated noise.
    """
    memory = NoiseMemory(_noise_in(state))
    content = memory._content
    name = np.frombuffer(os.urandom(content["ticket"].size * 8), np.int64)
    fresh = collections.OrderedDict(
        content,
        step=np.zeros_like(content["step"]),
        ticket=name.reshape(content["ticket"].shape),
        # `join_noise` matches the state and the memory by this ticket.
        before=content["ticket"],
        # The new matrix may have another noise multiplier.
        run=unnamed(content["run"]),
        kept=np.zeros_like(content["kept"]),
    )
    return with_noise(state, fresh), memory


def join_noise(state: Any, memory: NoiseMemory) -> Any:
    """Puts the memory of noise back into the state that it was split from.

    Args:
      state: a state that `split_noise` returned, for example from a checkpoint.
      memory: the memory that `split_noise` returned with the state.

    Raises:
      ValueError: if the memory was split from a different state.
    """
    wanted = "the second result of split_noise(state), or NoiseMemory.load(path)"
    _arguments.instance("memory", memory, NoiseMemory, wanted)
    ours, theirs = _noise_in(state), memory._content
    if (
        any(np.shape(ours[name]) != theirs[name].shape for name in theirs)
        or not np.array_equal(ours["before"], theirs["ticket"])
        or not np.array_equal(unnamed(ours["run"]), unnamed(theirs["run"]))
        or np.any(ours["step"])
        or np.any(ours["kept"])
    ):
        raise ValueError(
            "memory was taken from another state than this one: its noise belongs to "
            "another round or run. Without this memory a new matrix begins."
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
