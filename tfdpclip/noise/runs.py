"""Correlated noise of a run: which matrix, for how many steps, of which records."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdpclip import _arguments, _sealed, correlated
from tfdpclip.noise.steps import stream_of
from tfdpclip.sampling import schemes
from tfdpclip.sampling.base import SamplingScheme

# Of useful matrices no coefficient of the inverse is above 1.
_MOST_WEIGHT, _LOOKED_AT = 100.0, 10_000
# Of a matrix that is not of the library, so many steps are tried.
_TRIED = 64


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
        if _arguments.foreign(self.matrix, correlated.NoiseMatrix):
            self._try_matrix()
        if isinstance(self.matrix, correlated.ToeplitzMatrix):
            column = self.matrix.inverse_coefficients(min(steps, _LOOKED_AT))
            most = np.max(np.abs(column))
            if not most <= _MOST_WEIGHT:
                raise ValueError(
                    f"matrix has an inverse that grows to {most:.3g}: "
                    "old noise would drown the fresh noise of a step in float32. Use "
                    "coefficients that do not rise, such as SquareRootToeplitz(16)."
                )

    def _try_matrix(self) -> None:
        """Raises if a matrix that is somebody's code contradicts itself.

        Of the library's own, tests know all of this.
        """
        if not dataclasses.is_dataclass(type(self.matrix)):
            raise ValueError(
                f"matrix={_arguments.shown(self.matrix)} must be a dataclass, so that "
                "one matrix can be told from another: @dataclasses.dataclass("
                f"frozen=True) before class {type(self.matrix).__name__}."
            )
        steps = min(self.steps, _TRIED)
        strategy = self.matrix.strategy(steps)
        noising = self.matrix.noising(steps)
        longer = self.matrix.strategy(min(self.steps, 2 * _TRIED))
        square = strategy.shape == (steps, steps)
        fault = None
        if not np.allclose(noising @ strategy, np.eye(steps), atol=1e-6):
            fault = "noising(n) @ strategy(n) is not the identity"
        elif square and not np.allclose(longer[:steps, :steps], strategy, atol=1e-6):
            fault = "strategy of more steps begins in another way"
        elif not np.allclose(_streamed(self.matrix, steps), noising, atol=1e-6):
            fault = "stream() is not what noising(n) says"
        else:
            separation = self.sampling.participation(self.steps).separation
            most = self.sampling.participation(self.steps).most(steps)
            columns = strategy[:, ::separation][:, :most]
            least = max(np.linalg.norm(columns), np.linalg.norm(columns.sum(axis=1)))
            if not self.sensitivity >= least * (1 - 1e-6):
                fault = (
                    f"sensitivity is {self.sensitivity:.4g}, and a record that takes "
                    f"part every {separation} steps moves C x by {least:.4g}"
                )
        if fault is not None:
            raise ValueError(
                f"matrix={self.matrix} breaks what every noise matrix must keep: "
                f"{fault} (of {steps} steps). correlated.Toeplitz(column) makes one of "
                "coefficients of your own."
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


def _streamed(matrix: correlated.NoiseMatrix, steps: int) -> np.ndarray:
    """What the stream makes of each draw, `[steps, draws]`."""
    stream = matrix.stream()
    units = iter(np.eye(sum(stream.draws(step) for step in range(steps))))
    return np.array([stream.next(lambda: next(units)) for _ in range(steps)])


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
