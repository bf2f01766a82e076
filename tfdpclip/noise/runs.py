"""Correlated noise of a run: the matrix, the steps, and the scheme of the records."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdpclip import _arguments, _sealed, correlated
from tfdpclip.correlated import streams
from tfdpclip.noise.steps import stream_of
from tfdpclip.sampling import schemes
from tfdpclip.sampling.base import SamplingScheme

# Useful matrices have no coefficient of the inverse above 1.
_MOST_WEIGHT, _LOOKED_AT = 100.0, 10_000
# The number of steps in the test of a user's own matrix.
_TRIED = 64


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise:
    """The noise of a run: a matrix, the number of steps, and the drawing of records.

        scheme = dpc.sampling.MinSeparation(60_000, 500)
        noise = dpc.CorrelatedNoise(
            dpc.correlated.BufferedToeplitz(3, 1200, scheme), 1200, scheme)
        optimizer = dpc.keras.DPSGD(0.1, noise_multiplier=2.0,
                                    expected_batch_size=500, noise=noise)

    *Formal guarantees*

    * With noise of standard deviation z s(C) C_t (C^-1 Z)_t on a sum that is clipped to
      C_t, all steps together are a Gaussian mechanism of noise multiplier z, if
      records are drawn by `sampling` (docs/guarantees.md has the proof).
    * After `steps` steps another matrix begins with fresh noise, and is accounted for.

    Attributes:
      matrix: C, a matrix of `tfdpclip.correlated`.
      steps: the number of steps.
      sampling: the scheme that draws the records, and decides how often a record takes
        part.

    Raises:
      ValueError: if the matrix does not fit the scheme.

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
        wanted = "a noise matrix of tfdpclip.correlated, such as SquareRootToeplitz(16)"
        _arguments.instance("matrix", self.matrix, correlated.NoiseMatrix, wanted)
        scheme = getattr(self.sampling, "scheme", self.sampling)
        wanted = "a scheme, such as MinSeparation(population, batch_size), or batches"
        _arguments.instance("sampling", scheme, SamplingScheme, wanted)
        object.__setattr__(self, "sampling", scheme)
        _arguments.set_field(self, "steps", _arguments.integer, 1)
        stream_of(self.matrix)  # Raises if no step of the matrix is known.
        if not math.isfinite(self.sensitivity):
            raise ValueError(f"{self.matrix} has no finite sensitivity.")
        if _arguments.foreign(self.matrix, correlated.NoiseMatrix):
            self._try_matrix()
        if isinstance(self.matrix, correlated.ToeplitzMatrix):
            column = self.matrix.inverse_coefficients(min(self.steps, _LOOKED_AT))
            most = np.max(np.abs(column))
            if not most <= _MOST_WEIGHT:
                raise ValueError(
                    f"matrix has an inverse that grows to {most:.3g}: "
                    "old noise would drown the fresh noise of a step in float32. Use "
                    "coefficients that do not rise, such as SquareRootToeplitz(16)."
                )

    def _try_matrix(self) -> None:
        """Raises if a user's own matrix contradicts itself.

        Tests cover the same for the library's matrices.
        """
        if not dataclasses.is_dataclass(type(self.matrix)):
            raise ValueError(
                f"matrix={_arguments.shown(self.matrix)} must be a dataclass, so that "
                "matrices can be told apart: @dataclasses.dataclass("
                f"frozen=True) before class {type(self.matrix).__name__}."
            )
        steps = min(self.steps, _TRIED)
        strategy = self.matrix.strategy(steps)
        noising = self.matrix.noising(steps)
        written = streams.written_out(self.matrix.stream(), steps)
        longer = self.matrix.strategy(min(self.steps, 2 * _TRIED))
        square = strategy.shape == (steps, steps)
        fault = None
        if not np.allclose(noising @ strategy, np.eye(steps), atol=1e-6):
            fault = "noising(n) @ strategy(n) is not the identity"
        elif square and not np.allclose(longer[:steps, :steps], strategy, atol=1e-6):
            fault = "strategy(n) changes its first entries with n"
        elif not np.allclose(written, noising, atol=1e-6):
            fault = "stream() differs from noising(n)"
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
                f"matrix={self.matrix} breaks a guarantee of noise matrices: "
                f"{fault} (of {steps} steps). correlated.Toeplitz(column) makes a "
                "matrix of coefficients of your own."
            )

    @functools.cached_property
    def sensitivity(self) -> float:
        """s(C): the largest move of C x by a record that is clipped to norm 1."""
        return self.matrix.sensitivity(
            self.steps, self.sampling.participation(self.steps)
        )

    @property
    def of_a_phase(self) -> dict[str, Any]:
        """The arguments of a ledger's phase for this noise."""
        return {"noise": self.matrix, "horizon": self.steps}

    @functools.cached_property
    def digest(self) -> tuple[int, int]:
        """A public name of the settings, the same in every process."""
        return _words_of(self.to_dict())

    def name_with(self, noise_multiplier: float) -> tuple[int, int]:
        """A public name of the noise with one noise multiplier, as `digest`.

        Args:
          noise_multiplier: z.

        Returns:
          The first word of `digest`, and a word that depends on z as well.

        >>> from tfdpclip import correlated, sampling
        >>> run = CorrelatedNoise(
        ...     correlated.SquareRootToeplitz(4), 8, sampling.MinSeparation(64, 8))
        >>> run.name_with(1.0) == run.name_with(2.0)
        False
        """
        settings = {**self.to_dict(), "noise_multiplier": float(noise_multiplier)}
        return self.digest[0], _words_of(settings)[1]

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
          ValueError: if the settings do not describe correlated noise.
        """
        names = {"matrix", "steps", "sampling"}
        if not isinstance(settings, Mapping) or set(settings) != names:
            raise ValueError(
                "noise must be a CorrelatedNoise(matrix, steps, sampling), got "
                f"{_arguments.shown(settings)}."
            )
        return cls(
            correlated.from_dict(settings["matrix"]),
            settings["steps"],
            schemes.from_dict(settings["sampling"]),
        )


def _words_of(settings: Mapping[str, Any]) -> tuple[int, int]:
    words = _sealed.digest(settings).removeprefix("sha256:")
    first, second = np.frombuffer(bytes.fromhex(words)[:16], "<i8").tolist()
    return first, second


def as_run(noise: Any, noise_multiplier: Any) -> CorrelatedNoise | None:
    """The correlated noise that an argument stands for; None for independent noise.

    Args:
      noise: a `CorrelatedNoise`, its `to_dict`, or None.
      noise_multiplier: z, or a schedule of it.

    Raises:
      ValueError: if `noise` is of a further type, or z follows a schedule.
    """
    if noise is None:
        return None
    run = noise
    if not isinstance(run, CorrelatedNoise):
        run = CorrelatedNoise.from_dict(noise)
    if callable(noise_multiplier):
        raise ValueError(
            "noise_multiplier must be a number with correlated noise: a matrix has the "
            "same noise multiplier in all of its steps."
        )
    return run
