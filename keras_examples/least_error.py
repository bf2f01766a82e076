"""The clip norm with the least mean squared error, for one batch of gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_examples.error_pieces import Problem

_NOT_FOR_RELEASE = (
    "computed from gradients without noise: as private as they are, and not to be "
    "used in a run that reports an epsilon unless the data are public"
)


@dataclasses.dataclass(frozen=True)
class OptimalClip:
    """The clip norm that `optimal_clip` found.

    Attributes:
      clip_norm: C*, the clip norm with the least mean squared error; 0 if zero is the
        best estimate.
      mse: the error there: the sum of the next three.
      noise: sigma^2 d C^2.
      clipping_error: the squared norm of the part of the sum that clipping removes.
      sampling_noise: the variance of Poisson sampling; 0 unless asked for.
      kind: "stationary" (the derivative is 0), "kink" (the norm of some gradient,
        where the derivative jumps from below to above 0) or "zero".
      stationary_points: every (C, error) where the derivative is 0, ascending: the
        solutions of the paper's equation.
      quantile: the fraction of gradients with norm at most C*.
      count: number of gradients.
      d: dimension of the noise.
      sigma: noise multiplier.
    """

    clip_norm: float
    mse: float
    noise: float
    clipping_error: float
    sampling_noise: float
    kind: str
    stationary_points: tuple[tuple[float, float], ...]
    quantile: float
    count: int
    d: int
    sigma: float

    def __str__(self) -> str:
        return (
            f"optimal clip norm {self.clip_norm:.6g} ({self.kind}), mean squared error "
            f"{self.mse:.6g} = {self.noise:.6g} noise + {self.clipping_error:.6g} "
            f"clipping; {100 * self.quantile:.1f} % of {self.count} gradients are not "
            f"clipped; {_NOT_FOR_RELEASE}"
        )


@dataclasses.dataclass(frozen=True)
class ClipErrors:
    """The mean squared error at several clip norms, in its parts.

    Attributes:
      clip_norms: `[K]`.
      noise: `[K]`, sigma^2 d C^2.
      clipping_error: `[K]`, the squared norm of the part of the sum that clipping
        removes.
      sampling_noise: `[K]`, the variance of Poisson sampling; zeros unless asked for.
    """

    clip_norms: np.ndarray
    noise: np.ndarray
    clipping_error: np.ndarray
    sampling_noise: np.ndarray

    @property
    def mse(self) -> np.ndarray:
        """`[K]`, the sum of the three parts."""
        return self.noise + self.clipping_error + self.sampling_noise


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Where the iteration of the paper's equation ended.

    Attributes:
      clip_norm: the last value.
      mse: the mean squared error there.
      converged: whether the last value solves the equation.
      iterations: how many times the right-hand side was computed.
      path: all values, the initial one first.
    """

    clip_norm: float
    mse: float
    converged: bool
    iterations: int
    path: tuple[float, ...]


def optimal_clip(
    gradients: Any,
    sigma: float,
    d: int | None = None,
    *,
    sampling_rate: float = 1.0,
) -> OptimalClip:
    """The clip norm C with the least mean squared error, exactly.

    The error of the noisy sum of clipped gradients as an estimate of their sum is

        MSE(C) = sigma^2 d C^2 + || sum_{i: |g_i| > C} (1 - C / |g_i|) g_i ||^2

    (Rehn et al. 2025, section 5). Between neighbouring gradient norms it is a quadratic
    in C, with a kink at each norm, and it need not be convex. All pieces are examined.
    The paper's equation for C* is the zero of the derivative: it has no solution when
    the minimum is at a kink, and several where there are several minima
    (`fixed_point_clip` shows both).

    *Formal guarantees*: none of privacy. The result is computed from gradients without
    noise and is as private as they are.

    Args:
      gradients: one gradient per row, `[B, D]`: `GradientMeter.gradients`, say.
      sigma: noise multiplier: the noise's stddev on each coordinate of the sum is
        sigma C.
      d: dimension the noise lives in; D by default. Coordinates in which all gradients
        are zero count here and nowhere else.
      sampling_rate: with a rate q below 1, adds the variance of Poisson sampling,
        (1 - q) / q sum_i min(|g_i|, C)^2.

    Returns:
      The clip norm, the error and the kind of minimum. Of equally good clip norms the
      smallest; without noise the smallest with error 0.

    Raises:
      ValueError: if a gradient is not finite.

    >>> best = optimal_clip([[3.0, 4.0]], sigma=1.0)
    >>> round(best.clip_norm, 6), round(best.mse, 6), best.kind
    (1.666667, 16.666667, 'stationary')
    """
    problem = _problem(gradients, sigma, d, sampling_rate)
    found = problem.search()
    errors = problem.errors(np.array([found.clip_norm]))
    norms = problem.norms
    return OptimalClip(
        clip_norm=found.clip_norm,
        mse=float(sum(part[0] for part in errors)),
        noise=float(errors[0][0]),
        clipping_error=float(errors[1][0]),
        sampling_noise=float(errors[2][0]),
        kind=found.kind,
        stationary_points=tuple(sorted(set(found.stationary))),
        quantile=float(np.mean(norms <= found.clip_norm)) if norms.size else 1.0,
        count=int(norms.size),
        d=problem.d,
        sigma=problem.sigma,
    )


def clip_errors(
    gradients: Any,
    sigma: float,
    clip_norms: Any,
    d: int | None = None,
    *,
    sampling_rate: float = 1.0,
) -> ClipErrors:
    """The mean squared error at given clip norms, for plots and comparisons.

    Args:
      gradients: as for `optimal_clip`.
      sigma: noise multiplier.
      clip_norms: `[K]`, 0 or above.
      d: dimension the noise lives in; D by default.
      sampling_rate: as for `optimal_clip`.

    Returns:
      The error and its parts at every clip norm.

    Raises:
      ValueError: as `optimal_clip`.

    >>> clip_errors([[3.0, 4.0]], 1.0, [0.0, 5.0]).mse.tolist()
    [25.0, 50.0]
    """
    problem = _problem(gradients, sigma, d, sampling_rate)
    clip_norms = np.asarray(clip_norms, np.float64)
    return ClipErrors(clip_norms, *problem.errors(clip_norms))


def fixed_point_clip(
    gradients: Any,
    sigma: float,
    d: int | None = None,
    *,
    initial: float | None = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-12,
) -> FixedPoint:
    """Iterates the equation that Rehn et al. (2025, Theorem 5.1) print for C*.

    C = N.G / (N.N + sigma^2 d), with N the sum of g_i / |g_i| and G the sum of g_i over
    the gradients with norm above C. For comparison only: the iteration may end at
    a solution that is not the minimum, or at none. Use `optimal_clip`.

    Args:
      gradients: as for `optimal_clip`.
      sigma: noise multiplier.
      d: dimension the noise lives in; D by default.
      initial: the first value; half the largest norm by default.
      max_iterations: the largest number of iterations.
      tolerance: the relative change at which the iteration has converged.

    Returns:
      The end of the iteration. If nothing is clipped and there is no noise, the
      equation is 0/0 and the iteration stops without convergence.

    Raises:
      ValueError: as `optimal_clip`.

    >>> bad = fixed_point_clip([[10.0, 0.0], [5.0, 0.0]], 0.5, d=6)
    >>> bad.converged, round(optimal_clip([[10.0, 0.0], [5.0, 0.0]], 0.5, 6).clip_norm)
    (False, 5)
    """
    problem = _problem(gradients, sigma, d, 1.0)
    largest = float(problem.norms.max(initial=0.0))
    clip_norm = largest / 2 if initial is None else float(initial)
    path, converged = [clip_norm], False
    while len(path) <= max_iterations and not converged:
        units, sums = problem.clipped_sums(clip_norm)
        below = float(units @ units) + problem.noise
        if below == 0:
            break
        new = float(units @ sums) / below
        converged = abs(new - clip_norm) <= tolerance * max(abs(new), 1e-300)
        path.append(new)
        clip_norm = new
    at = np.array([max(clip_norm, 0.0)])
    mse = float(sum(part[0] for part in problem.errors(at)))
    return FixedPoint(clip_norm, mse, converged, len(path) - 1, tuple(path))


def _problem(gradients, sigma, d, sampling_rate) -> Problem:
    rows = np.asarray(gradients, np.float64)
    dimension = rows.shape[1] if d is None else d
    return Problem(rows, sigma, dimension, (1 - sampling_rate) / sampling_rate)
