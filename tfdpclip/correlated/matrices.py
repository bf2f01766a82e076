"""Matrices C of correlated noise: the noise is z s(C) C^-1 Z instead of z Z.

A matrix is a frozen dataclass of public settings. It provides C and its inverse, the
noise stream, and the cost s(C), which depends on how often one record takes part.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, cast

import numpy as np

from tfdpclip import _arguments
from tfdpclip.correlated import sensitivity, streams, toeplitz
from tfdpclip.correlated.workload import Workload, check_workload

#: The largest accepted number of steps, more than any run has.
MOST_STEPS = 10_000_000


class NoiseMatrix(abc.ABC):
    """A matrix of correlated noise.

    *Formal guarantees*

    * Row t of `noising` uses draws made up to step t only, and a row of `strategy`
      depends on no step after the step that first uses its draw. So the releases
      may be adaptive (docs/guarantees.md).
    * `noising(n) @ strategy(n)` is the identity: with noise z s(C) `noising` Z, a run
      of n steps is one Gaussian mechanism of noise multiplier z.
    """

    @property
    @abc.abstractmethod
    def bandwidth(self) -> int | None:
        """The number of steps in which a contribution is seen in C x; None for all."""

    @abc.abstractmethod
    def strategy(self, steps: int) -> np.ndarray:
        """Returns C, `[draws, steps]`."""

    @abc.abstractmethod
    def noising(self, steps: int) -> np.ndarray:
        """Returns the map from draws to noise, `[steps, draws]`; C^-1 if square."""

    @abc.abstractmethod
    def stream(self) -> streams.Stream:
        """Returns the noise of one coordinate (or vector), step by step."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns the matrix in words, for privacy statements."""

    def sensitivity(self, steps: int, participation: Any) -> float:
        """Returns s(C): how far one record moves C x, if it is clipped to norm 1.

        Args:
          steps: n.
          participation: A participation, or a scheme with a participation.

        Returns:
          The sensitivity, exactly or as an upper bound (`correlated.sensitivity`).

        Raises:
          ValueError: If the matrix does not fit the participation.
        """
        return sensitivity.of_matrix(self.strategy(count(steps)), participation)

    def deviations(self, steps: int, workload: Workload | None = None) -> np.ndarray:
        """Returns the norms of the rows of B = A C^-1.

        Times z s(C), the norms are the standard deviations of the noise in the weights
        after every step.
        """
        workload = check_workload(workload)
        noise = self.noising(count(steps))
        rates = workload.rates(steps)
        weighed = noise if rates is None else rates[:, np.newaxis] * noise
        return np.linalg.norm(workload.applied(weighed), axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON-ready values, with the class name."""
        settings = {
            "matrix": type(self).__name__,
            **dataclasses.asdict(cast(Any, self)),
        }
        found = getattr(self, "participation", None)
        if found is not None:
            settings["participation"]["participation"] = type(found).__name__
        return settings


class ToeplitzMatrix(NoiseMatrix):
    """A square, lower-triangular C whose entries depend on i - j alone."""

    #: The number of products in the rounded sum of a coefficient of C.
    _terms: ClassVar[int] = 1

    @abc.abstractmethod
    def coefficients(self, steps: int) -> np.ndarray:
        """Returns the first column of C, `[steps]`."""

    def inverse_coefficients(self, steps: int) -> np.ndarray:
        """Returns the first column of C^-1, `[steps]`."""
        steps = count(steps)
        column = self.coefficients(steps)[: self.bandwidth]
        return toeplitz.inverse(column, steps)

    def strategy(self, steps: int) -> np.ndarray:
        steps = count(steps)
        return toeplitz.dense(self.coefficients(steps), steps)

    def noising(self, steps: int) -> np.ndarray:
        steps = count(steps)
        return toeplitz.dense(self.inverse_coefficients(steps), steps)

    def stream(self) -> streams.Stream:
        if self.bandwidth is None:
            raise ValueError(
                f"{self.describe()} has no bands: every step would need all noise "
                "before it. Give bands, such as bands=16."
            )
        return streams.Recursive(self.coefficients(self.bandwidth))

    def sensitivity(self, steps: int, participation: Any) -> float:
        column = self.coefficients(count(steps))
        return sensitivity.of_toeplitz(column, steps, participation, self._terms)

    def deviations(self, steps: int, workload: Workload | None = None) -> np.ndarray:
        workload = check_workload(workload)
        if workload.rates(count(steps)) is not None:
            return super().deviations(steps, workload)
        rows = workload.applied(self.inverse_coefficients(steps))
        return np.sqrt(np.cumsum(rows**2))


@dataclasses.dataclass(frozen=True)
class Toeplitz(ToeplitzMatrix):
    """C with given coefficients: c_0 on the diagonal, c_1 below it, and so on.

    Attributes:
      column: c_0, c_1, ..., one for each band. c_0 is above 0.

    >>> Toeplitz((1.0, 0.5)).inverse_coefficients(3)
    array([ 1.  , -0.5 ,  0.25])
    """

    column: tuple[float, ...]

    def __post_init__(self):
        found = toeplitz.column("column", self.column)
        object.__setattr__(self, "column", tuple(map(float, found)))

    @property
    def bandwidth(self) -> int | None:
        return len(self.column)

    def coefficients(self, steps: int) -> np.ndarray:
        return toeplitz.padded(np.array(self.column), count(steps))

    def describe(self) -> str:
        return f"noise correlated by a Toeplitz matrix of {len(self.column)} bands"


@dataclasses.dataclass(frozen=True)
class Independent(ToeplitzMatrix):
    """C = I: the noise of every step is independent.

    >>> Independent().coefficients(3)
    array([1., 0., 0.])
    """

    bandwidth = 1

    def coefficients(self, steps: int) -> np.ndarray:
        return toeplitz.padded(np.ones(1), count(steps))

    def describe(self) -> str:
        return "independent noise"


@dataclasses.dataclass(frozen=True)
class SquareRootToeplitz(ToeplitzMatrix):
    """The first bands of the square root of the workload.

    For prefix sums, c_k = binom(2k, k) / 4^k, so that C C is the matrix of ones. With
    all bands it has the least maximal error of all Toeplitz matrices for one
    participation (Fichtenberger et al. 2023, arXiv 2202.11205; Dvijotham et al. 2024,
    arXiv 2404.16706); cut to bands, it suits several participations (Kalinin and
    Lampert 2024, arXiv 2405.13763, also with momentum).

    Attributes:
      bands: The number of bands; None for all, without a stream.
      momentum: The optimizer's momentum, in [0, 1).

    >>> SquareRootToeplitz(3).coefficients(4)
    array([1.   , 0.5  , 0.375, 0.   ])
    """

    bands: int | None
    momentum: float = 0.0

    def __post_init__(self):
        if self.bands is not None:
            found = _arguments.integer("bands", self.bands, 1, MOST_STEPS)
            object.__setattr__(self, "bands", found)
        object.__setattr__(self, "momentum", Workload(self.momentum).momentum)

    @property
    def bandwidth(self) -> int | None:
        return self.bands

    def coefficients(self, steps: int) -> np.ndarray:
        steps = count(steps)
        kept = steps if self.bands is None else min(steps, self.bands)
        return toeplitz.padded(root_of_workload(kept, self.momentum), steps)

    def describe(self) -> str:
        bands = "" if self.bands is None else f" of {self.bands} bands"
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        return f"noise correlated by a square root{bands}{momentum}"


@dataclasses.dataclass(frozen=True)
class InverseSquareRootToeplitz(ToeplitzMatrix):
    """C^-1 is the first bands of the inverse square root of the workload.

    Each noise is a sum of the last `bands` draws, which need no memory if they can be
    drawn again (Kalinin et al. 2025, arXiv 2505.12128). C itself has no bands, so
    that sampling does not amplify it.

    Attributes:
      inverse_bands: The number of bands of C^-1.
      momentum: The optimizer's momentum, in [0, 1).

    >>> InverseSquareRootToeplitz(3).inverse_coefficients(4)
    array([ 1.   , -0.5  , -0.125,  0.   ])
    """

    inverse_bands: int
    momentum: float = 0.0

    def __post_init__(self):
        _arguments.set_field(self, "inverse_bands", _arguments.integer, 1, MOST_STEPS)
        object.__setattr__(self, "momentum", Workload(self.momentum).momentum)

    @property
    def bandwidth(self) -> int | None:
        return 1 if self.inverse_bands == 1 else None

    @property
    def _terms(self) -> int:  # type: ignore[override]
        return self.inverse_bands + 1

    @property
    def _weights(self) -> np.ndarray:
        root = root_of_workload(self.inverse_bands, self.momentum)
        return toeplitz.inverse(root, self.inverse_bands)

    def coefficients(self, steps: int) -> np.ndarray:
        return toeplitz.inverse(self._weights, count(steps))

    def inverse_coefficients(self, steps: int) -> np.ndarray:
        return toeplitz.padded(self._weights, count(steps))

    def stream(self) -> streams.Stream:
        return streams.Redrawn(self._weights)

    def describe(self) -> str:
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        return (
            f"noise correlated by an inverse square root of {self.inverse_bands} "
            f"bands{momentum}"
        )


@dataclasses.dataclass(frozen=True)
class Tree(NoiseMatrix):
    """Prefix sums from the nodes of a binary tree over the steps.

    Each node holds the sum of its steps with noise of its own; a prefix is a sum of at
    most log2 n nodes (Dwork et al. 2010; Chan et al. 2011; for training, Kairouz et al.
    2021, arXiv 2103.00039). C has a row for every node that n steps complete.

    Attributes:
      honaker: Whether a node's sum is also estimated from all noise below it, weighted
        by the inverse variances (Honaker 2015, the estimate from below, as in Kairouz
        et al. 2021). The nodes, and so the privacy, are the same.

    >>> Tree().strategy(2)
    array([[1., 0.],
           [0., 1.],
           [1., 1.]])
    """

    honaker: bool = True

    def __post_init__(self):
        _arguments.boolean("honaker", self.honaker)

    bandwidth = None

    def strategy(self, steps: int) -> np.ndarray:
        steps = count(steps)
        toeplitz.check_dense(steps)
        rows = []
        for end in range(1, steps + 1):
            # In the order of the draws: the leaf, then the nodes that it completes.
            for level in range((end & -end).bit_length()):
                row = np.zeros(steps)
                row[end - 2**level : end] = 1
                rows.append(row)
        return np.array(rows)

    def noising(self, steps: int) -> np.ndarray:
        steps = count(steps)
        toeplitz.check_dense(steps)
        return streams.written_out(self.stream(), steps)

    def stream(self) -> streams.Stream:
        return streams.TreeSums(self._share)

    def _share(self, level: int) -> float:
        if not self.honaker:
            return 1.0
        # The estimate of a level has variance v, 1 for leaves; the sum of two has 2 v.
        # With a draw of variance 1: v' = 2 v / (2 v + 1) = 2^h / (2^(h+1) - 1).
        return 2.0**level / (2.0 ** (level + 1) - 1)

    def describe(self) -> str:
        estimator = ", Honaker's estimate from below" if self.honaker else ""
        return f"noise from a binary tree{estimator}"


def count(steps: Any) -> int:
    """Returns a number of steps, or raises ValueError."""
    return _arguments.integer("steps", steps, 1, MOST_STEPS)


def root_of_workload(length: int, momentum: float = 0.0) -> np.ndarray:
    """The first coefficients of ((1 - x) (1 - momentum x))^(-1/2).

    >>> root_of_workload(3), root_of_workload(3, 0.5)
    (array([1.   , 0.5  , 0.375]), array([1.     , 0.75   , 0.59375]))
    """
    k = np.arange(1, length)
    plain = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    if momentum == 0:
        return plain
    return np.convolve(plain, plain * momentum ** np.arange(length))[:length]
