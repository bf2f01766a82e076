"""The number of rows of physical batches, and whether a scheme's draws fit."""

from __future__ import annotations

import warnings

import numpy as np
from scipy import stats

from tfdpclip import _arguments
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import CappedPoisson, FullBatch, Poisson

# The largest size that TensorFlow counts in 32 bits.
MOST_ROWS = 2**31 - 1
# From 64 rows on, processors are faster with multiples of 8.
_FROM, _MULTIPLE = 64, 8
# Draws further above the mean, in standard deviations, get the largest length.
_FAR = 4.0


def fit_capacity(
    scheme: SamplingScheme,
    population: int,
    physical_batch_size: int | None,
    accumulation_steps: int,
    by_group: bool,
) -> tuple[SamplingScheme, int]:
    """Returns the scheme with the capacity of the rows, and the rows per element.

    Args:
      scheme: The requested scheme.
      population: Number of records.
      physical_batch_size: Rows per element; None for enough rows.
      accumulation_steps: Elements per logical step.
      by_group: Whether records go to random elements of their step.

    Raises:
      ValueError: If the rows are too few, or the scheme allows no random groups.
    """
    wanted = scheme._capacity(population)
    if by_group:
        wanted = _group_capacity(scheme, population, accumulation_steps)
        wanted *= accumulation_steps
    if physical_batch_size is None:
        rows = -(-wanted // accumulation_steps)
    else:
        rows = _arguments.integer(
            "physical_batch_size", physical_batch_size, 1, MOST_ROWS
        )
    capacity = rows * accumulation_steps
    # With groups, overflow needs no accounting: a group is clipped as a whole.
    drawn = scheme if by_group else scheme._for_data(population, capacity)
    _check_capacity(drawn, population, capacity, wanted, rows)
    return drawn, rows


def few_lengths(scheme: SamplingScheme, population: int, rows: int) -> tuple[int, ...]:
    """Returns up to three lengths of batches; the last has room for every draw.

    A batch gets the smallest length with room for its draw. The first minimizes the
    expected number of rows. About one draw in 10,000 needs the last: XLA compiles a
    step for a length when the first batch has the length, which takes as long as
    hundreds of steps. The number of drawn records is binomial.

    Args:
      scheme: A scheme with a `rate`.
      population: Number of records.
      rows: The largest number of drawn records.

    >>> from tfdpclip import sampling
    >>> few_lengths(sampling.Poisson(0.01), 6_400, 122)
    (72, 96, 122)
    """
    groups = getattr(scheme, "separation", 1)
    turn = min(1.0, scheme.expected_batch_size(population) * groups / population)
    sizes = stats.binom(-(-population // groups), turn)
    unit = _MULTIPLE if rows >= _FROM else 1
    ends = sizes.mean() + sizes.std() * np.array([-_FAR, _FAR])
    first, last = np.clip(np.ceil(ends / unit) * unit, unit, rows).astype(np.int64)
    lengths = np.arange(first, last + 1, unit)
    # The expected rows that a length saves, for all draws that it has room for.
    shorter = lengths[np.argmax(sizes.cdf(lengths) * (last - lengths))]
    return tuple(sorted({int(shorter), int(last), rows}))


def _group_capacity(scheme, population: int, groups: int) -> int:
    """Rows that a group exceeds less than once in 10^10 steps."""
    if isinstance(scheme, CappedPoisson):
        raise ValueError(
            "independent_groups is for examples that are clipped together, as a group: "
            f"{type(scheme).__name__} clips each example separately."
        )
    rate = getattr(scheme, "rate", None)
    if getattr(scheme, "capacity", None) is not None or (
        rate is None and not isinstance(scheme, FullBatch)
    ):
        raise ValueError(
            "independent_groups is for Poisson(rate) without a capacity, and for "
            f"FullBatch. In {scheme.describe()}, replacing a record changes one group "
            "anyway."
        )
    return Poisson((1.0 if rate is None else rate) / groups).default_capacity(
        population
    )


def _check_capacity(scheme, population, capacity, wanted, rows):
    expected = scheme.expected_batch_size(population)
    minimum = expected if hasattr(scheme, "rate") else wanted
    if capacity < minimum:
        raise ValueError(
            f"A step expects {expected:.6g} records, but {rows} rows "
            f"times {capacity // rows} accumulation steps hold {capacity}. Use "
            f"accumulation_steps={-(-wanted // rows)} with this physical_batch_size, "
            "in the batches and in the optimizer."
        )
    overflow = getattr(scheme, "capacity", None) and scheme.event(1.0, 1)
    probability = getattr(getattr(overflow, "event", None), "overflow_probability", 0.0)
    if probability > 1e-3:
        warnings.warn(
            f"About one step in {1 / probability:.0f} draws more records than the "
            f"{capacity} it can hold and drops some. This is accounted for, and costs "
            f"epsilon; a capacity of {wanted} makes it negligible.",
            stacklevel=5,
        )
