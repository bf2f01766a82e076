"""The noise split of `tfdpclip.kernel.noise_split`, with errors that say what to do."""

import math
from collections.abc import Sequence
from typing import Any

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.kernel.noise_split import (
    count_share,
    enlarged_stddevs,
    remaining_multiplier,
)


class SmallBatchError(ValueError):
    """A step has too few records for the noise that hides a clip rule's counts.

    Args:
      message: the remedy.

    Attributes:
      rule: the clip rule that counts, if known.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.rule: Any = None


def split_noise_multiplier(
    noise_multiplier: float, count_stddevs: Sequence[float] = ()
) -> float:
    """Returns the noise multiplier left for the gradient sum beside noised counts.

    *Formal guarantees*

    * A step that adds noise of standard deviation `z_g * C` to a sum of sensitivity
      C, and of `s_k` to the k-th sum of indicators in [-1/2, 1/2], where
      z_g^-2 = z^-2 - sum_k (2 s_k)^-2, is one Gaussian mechanism with noise
      multiplier z for adding or removing a record (Andrew et al. 2021, Theorem 1;
      several counts by the same argument: divide every part by its noise, and the
      record's joint vector has norm at most 1/z). Under replace-one neighbours both
      the sum and the counts move by up to twice as much, so the rule is the same with
      z/2 for z.

    Args:
      noise_multiplier: z, as given to the accountant. 0 means no noise anywhere.
      count_stddevs: Noise standard deviation of each sum of indicators.

    Returns:
      z_g, at least `noise_multiplier`. 0 if `noise_multiplier` is 0.

    Raises:
      ValueError: If an argument is out of range, or if the counts alone reveal more
        than z allows. The message names the count that is too precise and the
        smallest standard deviation and cohort that would work.

    >>> round(split_noise_multiplier(1.0, [5.0]), 6)
    1.005038
    >>> split_noise_multiplier(1.0, [0.5])
    Traceback (most recent call last):
        ...
    ValueError: count_stddevs[0] = 0.5 is too precise for noise_multiplier 1.0: ...
    """
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    stddevs = [
        _arguments.positive(f"count_stddevs[{k}]", s)
        for k, s in enumerate(_arguments.items("count_stddevs", count_stddevs))
    ]
    remaining = remaining_multiplier(z, stddevs)
    if math.isnan(remaining):
        raise ValueError(_infeasible(z, stddevs))
    return _arguments.finite("what noise_multiplier leaves", remaining)


def count_stddevs(
    rule: Any, records_per_step: float, noise_multiplier: float
) -> tuple[float, ...]:
    """Returns the noise on a clip rule's counts that leaves enough for the sum.

    Returns `rule.count_stddevs`, unless counts with default noise
    (`rule.default_counts`) would take more than half of the z^-2 that the counts with
    chosen noise leave, as in small batches: then the default noise grows until the
    share is half. K default counts thus have a stddev of at least ``z * sqrt(K / 2)``,
    and the sum has at most sqrt(2) times the noise of a sum without counts.

    *Formal guarantees*: none of its own. `split_noise_multiplier` accounts for these
    numbers as for all count noise.

    Args:
      rule: A `ClipRule`, bound to its variables if it has groups.
      records_per_step: The public expected number of records in a step.
      noise_multiplier: z, as given to the accountant. 0 means a run without privacy,
        where the default is an exact count.

    Returns:
      The noise standard deviation of each of the K sums of indicators, in records.

    Raises:
      ValueError: If an argument is out of range, or default noise would be more than
        half of `records_per_step`, too much for a clip norm to follow the count.

    >>> from tfdpclip.clipping import QuantileClip
    >>> count_stddevs(QuantileClip(), 100, 1.0)
    (5.0,)
    >>> [round(stddev, 4) for stddev in count_stddevs(QuantileClip(), 8, 1.0)]
    [0.7071]
    """
    # A check by class would import TensorFlow.
    if not hasattr(rule, "default_counts"):
        raise ValueError(
            "rule must be a clip rule, such as dpc.QuantileClip(), got "
            f"{_arguments.shown(rule)}."
        )
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    records = _arguments.positive("records_per_step", records_per_step)
    counts = rule.count_stddevs(records, z > 0)
    try:
        return enlarge_default_noise(counts, rule.default_counts, records, z)
    except SmallBatchError as error:
        error.rule = rule
        raise


def enlarge_default_noise(
    stddevs: Sequence[float], free: Sequence[bool], records: float, z: float
) -> tuple[float, ...]:
    """As `count_stddevs`, for given counts, all of them checked."""
    enlarged = enlarged_stddevs(stddevs, free, z)
    if enlarged == tuple(stddevs):
        return enlarged
    largest = max(s for s, is_free in zip(enlarged, free, strict=True) if is_free)
    if not largest <= records / 2:
        raise SmallBatchError(_unfollowable(z, records, largest))
    return enlarged


def effective_noise_multiplier(
    gradient_noise_multiplier: float | Sequence[float],
    count_stddevs: Sequence[float] = (),
) -> float:
    """Returns the noise multiplier to account for, given the noise of all parts.

    The inverse of `split_noise_multiplier`: z^-2 = sum_h z_h^-2 + sum_k (2 s_k)^-2.

    Args:
      gradient_noise_multiplier: z_g of the gradient sum, or one z_h per group.
      count_stddevs: Noise standard deviation of each sum of indicators.

    Returns:
      z, at most `gradient_noise_multiplier`. 0 if any part has no noise.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(effective_noise_multiplier(split_noise_multiplier(1.0, [5.0]), [5.0]), 12)
    1.0
    >>> effective_noise_multiplier([2.0, 2.0, 2.0, 2.0])
    1.0
    """
    if isinstance(gradient_noise_multiplier, Sequence):
        parts = list(gradient_noise_multiplier)
    else:
        parts = [gradient_noise_multiplier]
    if not parts:
        raise ValueError("gradient_noise_multiplier must not be empty.")
    parts = [_arguments.non_negative("gradient_noise_multiplier", z) for z in parts]
    parts += [
        2 * _arguments.non_negative(f"count_stddevs[{k}]", s)
        for k, s in enumerate(_arguments.items("count_stddevs", count_stddevs))
    ]
    smallest = min(parts)
    if smallest == 0:
        return 0.0
    # Scaling by the smallest keeps the squares in range.
    return smallest / math.sqrt(math.fsum((smallest / z) ** 2 for z in parts))


def _infeasible(z: float, stddevs: list[float]) -> str:
    """The message that names the most precise count, and sufficient noise."""
    worst = min(range(len(stddevs)), key=stddevs.__getitem__)
    count = len(stddevs)
    common = z * math.sqrt(count) / 2
    least = min(10 * z * math.sqrt(count), 1e300)
    cohort = f"{math.floor(least) + 1}" if least < 1e15 else f"{least:.6g}"
    rest = 1 - math.fsum(count_share(z, s) for k, s in enumerate(stddevs) if k != worst)
    if count > 1 and rest > 0:
        alone = f"it would have to be above {z / (2 * math.sqrt(rest)):.6g}, or all "
        alone += f"{count} counts above {common:.6g}"
    elif count > 1:
        alone = f"all {count} counts would have to be above {common:.6g}"
    else:
        alone = f"it must be above {common:.6g}"
    return (
        f"count_stddevs[{worst}] = {stddevs[worst]:.6g} is too precise for "
        f"noise_multiplier {z}: the noised counts alone reveal more than z allows; "
        f"{alone}. A twentieth of the records suffices from {cohort} records per step "
        "(or clients per round) on; dpc.QuantileClip() without count_stddev chooses "
        "sufficient noise." + see("counts-that-cost-privacy")
    )


def _unfollowable(z: float, records: float, stddev: float) -> str:
    """The message that the noise on a count is too large for a clip norm to follow."""
    least = f"{math.ceil(2 * stddev)}" if stddev < 1e15 else f"{2 * stddev:.6g}"
    return (
        f"noise_multiplier {z:g} is too large for counts of {records:g} records per "
        f"step (or clients per round): the required count_stddev, {stddev:.4g}, is "
        "over half of the records, and no clip norm can follow that count. With "
        f"this noise take at least {least} records (records_per_step={least}), or a "
        "clip without counts, such as dpc.AutomaticClip(), or choose count_stddev "
        "yourself." + see("counts-that-cost-privacy")
    )
