"""Privacy events of runs with correlated noise, as `dp_accounting` events."""

from __future__ import annotations

import functools
from typing import Any

import dp_accounting

from tfdpclip import _arguments
from tfdpclip.correlated import NoiseMatrix, ToeplitzMatrix
from tfdpclip.correlated.matrices import MOST_STEPS
from tfdpclip.sampling import events
from tfdpclip.sampling.base import SamplingScheme


def correlated_event(
    matrix: NoiseMatrix,
    noise_multiplier: float,
    steps: int,
    sampling: Any,
    *,
    horizon: int | None = None,
    unit: str = "example",
) -> dp_accounting.DpEvent:
    """Returns the privacy event of `steps` steps with correlated noise.

    In step t of a matrix C of `horizon` steps, a sum clipped to norm C_t got the noise
    C_t z s(C) (C^-1 Z)_t, where s(C) is `matrix.sensitivity(horizon, sampling)`. After
    `horizon` steps a new matrix begins, with new draws.

    *Formal guarantees*

    * Without amplification a matrix is one Gaussian of noise multiplier z over the
      sensitivity factor of relation and unit, for every number of steps and every
      sequence C_t. If a matrix ended early, the cost is by s(C) of the steps that ran.
    * With `CyclicPoisson` of b groups and at most b bands, it is ceil(n/b) steps of the
      Poisson-sampled Gaussian at rate b q. More bands are refused.
    * The scheme determines how often a record takes part; a scheme that does not keep
      a record's steps apart is refused. docs/guarantees.md has the proofs.

    Args:
      matrix: C.
      noise_multiplier: z.
      steps: How many steps ran.
      sampling: The scheme that drew the records, or batches or cohorts drawn by it.
      horizon: The number of steps of a matrix; `steps` by default.
      unit: The object that is clipped.

    Raises:
      ValueError: If an argument is out of range, or the matrix does not fit the scheme.

    >>> from tfdpclip import correlated, sampling
    >>> scheme = sampling.MinSeparation(1000, 50, relation="zero_out")
    >>> matrix = correlated.BufferedToeplitz(2, 100, scheme)
    >>> correlated_event(matrix, 2.0, 100, scheme)
    GaussianDpEvent(noise_multiplier=2.0)
    """
    scheme = getattr(sampling, "scheme", sampling)
    wanted = "a noise matrix of tfdpclip.correlated, such as BufferedToeplitz(...)"
    _arguments.instance("matrix", matrix, NoiseMatrix, wanted)
    wanted = "a scheme, such as MinSeparation(population, batch_size)"
    _arguments.instance("sampling", scheme, SamplingScheme, wanted)
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    steps = _arguments.integer("steps", steps)
    if horizon is None:
        horizon = max(1, _arguments.integer("steps", steps, 0, MOST_STEPS))
    horizon = _arguments.integer("horizon", horizon, 1, MOST_STEPS)
    factor = events.sensitivity_factor(scheme.neighboring_relation, unit)
    # Refuses a matrix that does not fit, even if no step has run.
    whole = _sensitivity(matrix, horizon, scheme)
    matrices, rest = divmod(steps, horizon)
    parts = []
    if matrices:
        one = _of_one_matrix(z / factor, horizon, scheme)
        parts.append(one if matrices == 1 else events.repeated(one, matrices))
    if rest:
        # Rows that were never released do not matter. Without known coefficients, the
        # sensitivity of the whole matrix is an upper bound.
        part = whole
        if isinstance(matrix, ToeplitzMatrix):
            part = min(whole, _sensitivity(matrix, rest, scheme))
        parts.append(_of_one_matrix(z / factor * (whole / part), rest, scheme))
    if not parts:
        return dp_accounting.NoOpDpEvent()
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def _of_one_matrix(z, steps, scheme) -> dp_accounting.DpEvent:
    if z == 0:
        return dp_accounting.NonPrivateDpEvent()
    gaussian = dp_accounting.GaussianDpEvent(z)
    found = scheme.participation(steps)
    if found.amplified_rate is None:
        return gaussian
    sampled = dp_accounting.PoissonSampledDpEvent(found.amplified_rate, gaussian)
    return events.repeated(sampled, found.most(steps))


@functools.lru_cache(maxsize=256)
def _sensitivity(matrix, steps, scheme) -> float:
    return matrix.sensitivity(steps, scheme.participation(steps))
