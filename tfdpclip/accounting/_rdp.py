"""Renyi differential privacy of elementary events, on dp_accounting's accountant."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from tfdpclip.sampling import events

ORDERS = tuple(rdp_lib.DEFAULT_RDP_ORDERS)
# The orders to evaluate, from coarse to fine, near the best order so far: the least
# order, which bounds a divergence close to 0, and powers of two; integers, with moments
# that are finite sums; and all orders, most of which need series.
_POWERS = (ORDERS[0], *(o for o in ORDERS if math.frexp(o)[0] == 0.5))
_FINER = (tuple(o for o in ORDERS if float(o).is_integer()), ORDERS)
_RELATION = events.NeighboringRelation
# The accountant takes logarithms of sums close to 1: the divergence of a sampled step
# has an error up to about 1e-12, and may come out as 0 or less below that.
_RESOLUTION = 1e-10
# Squares of larger noise multipliers overflow. The bound for this value holds for them.
_MOST_NOISE = 1e100


def epsilon(leaves: Mapping[dp_accounting.DpEvent, int], delta: float) -> float:
    """Returns the epsilon of a composition of elementary events.

    Each order alone gives a bound. The least bound is searched among a few orders, and
    then among the neighbours of the best order: the logarithm of a moment is convex in
    its order, so the optimum is nearby.
    """

    def bound(orders):
        return rdp_lib.compute_epsilon(orders, _curve(leaves, orders), delta)

    return _least(bound)


def delta(leaves: Mapping[dp_accounting.DpEvent, int], epsilon: float) -> float:
    """Returns the delta of a composition of elementary events.

    Uses all orders: if a divergence is close to 0, the search for epsilon may fail.
    """
    rdp = curve(leaves)
    if not np.isfinite(rdp).any():
        return 1.0
    # 1 - exp(-rdp) must not round to 0, unless there is no divergence at all.
    rdp = np.where(rdp > 0, np.maximum(rdp, 1e-15), 0.0)
    return float(min(1.0, rdp_lib.compute_delta(ORDERS, rdp, epsilon)[0]))


def _least(bound: Callable[[Sequence[float]], tuple[float, float]]) -> float:
    """Minimizes a bound over orders; `bound` returns the least value and its order."""
    seen: tuple[float, ...] = _POWERS
    least, best = bound(seen)
    for finer in _FINER:
        below = max((o for o in seen if o < best), default=best)
        above = min((o for o in seen if o > best), default=best)
        near = tuple(o for o in finer if below < o < above and o not in seen)
        if not near:
            continue
        found, place = bound(near)
        if found < least:
            least, best = found, place
        seen += near
    return float(least)


def curve(leaves: Mapping[dp_accounting.DpEvent, int]) -> np.ndarray:
    """Returns the Renyi divergence bound at every order of `ORDERS`."""
    return _curve(leaves, ORDERS)


def _curve(leaves, orders: tuple[float, ...]) -> np.ndarray:
    total = np.zeros(len(orders))
    for event, count in leaves.items():
        total = total + count * _single(event, orders)
    return total


@functools.lru_cache(maxsize=256)
def _single(event: dp_accounting.DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    if isinstance(event, events.TruncatedPoissonSampledDpEvent):
        return _truncated_poisson(event, orders)
    if isinstance(event, events.CappedPoissonSampledDpEvent):
        raise dp_accounting.UnsupportedEventError(
            "The RDP accountant has no bound for single examples of a person "
            '(CappedPoisson); use accountant="pld".'
        )
    if isinstance(event, events.RandomAllocationDpEvent):
        raise dp_accounting.UnsupportedEventError(
            "The RDP accountant has no bound for random allocation "
            '(RandomAllocation); use accountant="pld".'
        )
    relation = _RELATION.ADD_OR_REMOVE_ONE
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        relation = _RELATION.REPLACE_ONE
    if isinstance(event, dp_accounting.SampledWithReplacementDpEvent):
        raise dp_accounting.UnsupportedEventError(
            "The RDP accountant has no bound for sampling with replacement; "
            'use accountant="pld".'
        )
    z = _noise(event)
    if z == 0:
        return np.full(len(orders), math.inf)
    accountant = dp_accounting.rdp.RdpAccountant(orders, relation)
    if z is None:
        with np.errstate(all="ignore"):
            return np.maximum(accountant.compose(event).rdp, 0.0)
    with np.errstate(divide="ignore"):
        unsampled = np.asarray(orders) / (2 * np.float64(min(z, _MOST_NOISE)) ** 2)
    closed = isinstance(event, dp_accounting.GaussianDpEvent) or z > _MOST_NOISE
    if closed or unsampled.max() <= _RESOLUTION:
        return unsampled
    try:
        with np.errstate(all="ignore"):
            found = accountant.compose(event).rdp
    except (ArithmeticError, ValueError):  # Rounding made the moment invalid.
        return unsampled
    # Sampling never increases the divergence, and a divergence too small to compute is
    # at most the resolution.
    found = np.where(np.isnan(found), unsampled, found)
    least = np.minimum(_RESOLUTION, unsampled)
    return np.minimum(np.where(found < _RESOLUTION, least, found), unsampled)


def _noise(event: dp_accounting.DpEvent) -> float | None:
    """The noise multiplier of the Gaussian inside `event`; None without a Gaussian."""
    while hasattr(event, "event"):
        event = event.event
    return getattr(event, "noise_multiplier", None)


def _truncated_poisson(event, orders: tuple[float, ...]) -> np.ndarray:
    """Mixes the two cases of `TruncatedPoissonSampledDpEvent` at every order.

    E[(dP/dQ)^(a-1)] is jointly convex like the hockey-stick divergence, so the
    moment of the mixture is at most the mixture of the moments.
    """
    tau = event.overflow_probability
    gaussian = event.event
    overflowed = dp_accounting.GaussianDpEvent(gaussian.noise_multiplier / 2)
    usual, doubled = (
        _single(
            dp_accounting.PoissonSampledDpEvent(event.sampling_probability, inner),
            orders,
        )
        for inner in (gaussian, overflowed)
    )
    scale = np.asarray(orders) - 1
    if tau == 1:
        return doubled
    with np.errstate(all="ignore"):
        return (
            np.logaddexp(
                math.log1p(-tau) + scale * usual, math.log(tau) + scale * doubled
            )
            / scale
        )
