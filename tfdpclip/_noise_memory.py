"""What correlated noise keeps between rounds, apart from the rest of a state."""

from __future__ import annotations

import collections
import io
import os
import stat
from typing import Any

import numpy as np

from tfdpclip import _arguments, files
from tfdpclip.accounting.noise_place import NOISE_KEY, PARTS, noise_of, with_noise


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
