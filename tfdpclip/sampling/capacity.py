"""How many rows physical batches have, and whether what a scheme draws has room."""

from __future__ import annotations

import warnings

from tfdpclip import _arguments
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import CappedPoisson, FullBatch, Poisson

# What TensorFlow counts in 32 bits.
MOST_ROWS = 2**31 - 1


def room_for(
    scheme: SamplingScheme,
    population: int,
    physical_batch_size: int | None,
    accumulation_steps: int,
    by_group: bool,
) -> tuple[SamplingScheme, int]:
    """Returns the scheme that describes what the rows can hold, and rows per element.

    Args:
      scheme: The scheme that was asked for.
      population: Number of records.
      physical_batch_size: Rows per element; None for enough of them.
      accumulation_steps: Elements per logical step.
      by_group: Whether records go to random elements of their step.

    Raises:
      ValueError: If the rows are too few for the scheme, or it has no such groups.
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
    # What a group cannot hold is the group's affair: it is clipped as one.
    drawn = scheme if by_group else scheme._for_data(population, capacity)
    _check_capacity(drawn, population, capacity, wanted, rows)
    return drawn, rows


def _group_capacity(scheme, population: int, groups: int) -> int:
    """Rows that a group exceeds less than once in 10^10 steps."""
    if isinstance(scheme, CappedPoisson):
        raise ValueError(
            "independent_groups is for examples that are clipped with their group: "
            f"{type(scheme).__name__} is for those that are clipped on their own."
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
            "there and in the optimizer."
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
