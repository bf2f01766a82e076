"""Epsilon and delta of a composition of events, by each accountant.

Each accountant gives a bound, so a second accountant can take over beyond the rounding
limit of the first.
"""

import math
from collections.abc import Mapping

import dp_accounting

from tfdpclip import _arguments
from tfdpclip.accounting import _pld, _rdp, gdp
from tfdpclip.sampling import events

ACCOUNTANTS = ("pld", "rdp", "gdp")
# Cells of a distribution for a quick epsilon during training: the excess of the bound
# over epsilon goes with the number of steps and with the square of a cell's width.
_QUICK_CELLS, _QUICK_STEPS, _LEAST_CELLS = 40_000, 40_000, 10_000


def epsilon(
    event: dp_accounting.DpEvent,
    delta: float,
    accountant: str,
    coarseness: float = 1.0,
) -> float:
    """Returns the epsilon of an event at `delta`.

    Args:
      event: Any composition of elementary events.
      delta: In (0, 1).
      accountant: One of `ACCOUNTANTS`.
      coarseness: Above 1 for a cheaper upper bound, if the accountant has any.
    """
    _arguments.choice("accountant", accountant, ACCOUNTANTS)
    leaves, thresholds = without_thresholds(events.leaves(event))
    delta -= thresholds
    if delta <= 0:
        return math.inf
    if not leaves:
        return 0.0
    if accountant == "gdp":
        return gdp.gdp_epsilon(_gdp_mu(leaves), delta)
    if accountant == "rdp":
        return _rdp.epsilon(leaves, delta)
    result = _pld.epsilon(leaves, delta, coarseness)
    if result == math.inf and all(map(_pld.noise_multiplier, leaves)):
        # A delta below the rounding of a PLD. RDP has no such limit.
        try:
            return _rdp.epsilon(leaves, delta)
        except dp_accounting.UnsupportedEventError:
            return result
    return result


def quick_coarseness(event: dp_accounting.DpEvent, accountant: str) -> float:
    """The `coarseness` for a bound in a hundredth of a second or two.

    In 98 Poisson runs of 30 to 10^5 steps, epsilon from 0.1 to 10, the bound was at
    most 0.4 % larger, and nine of ten were less than 0.11 % larger; in five runs of
    random allocation, at most 0.8 %.

    Args:
      event: Any composition of elementary events.
      accountant: One of `ACCOUNTANTS`.
    """
    leaves, _ = without_thresholds(events.leaves(event))
    if accountant != "pld" or not leaves or not all(map(_pld.noise_multiplier, leaves)):
        return 1.0
    share = math.sqrt(min(1.0, sum(leaves.values()) / _QUICK_STEPS))
    return _pld.coarseness_of(leaves, max(_LEAST_CELLS, round(_QUICK_CELLS * share)))


def delta(event: dp_accounting.DpEvent, epsilon: float, accountant: str) -> float:
    """Returns the delta of an event at `epsilon`.

    Args:
      event: Any composition of elementary events.
      epsilon: At least 0.
      accountant: One of `ACCOUNTANTS`.
    """
    _arguments.choice("accountant", accountant, ACCOUNTANTS)
    leaves, thresholds = without_thresholds(events.leaves(event))
    return min(1.0, thresholds + _delta(leaves, epsilon, accountant))


def _delta(leaves, epsilon, accountant):
    if not leaves:
        return 0.0
    if accountant == "gdp":
        mu = _gdp_mu(leaves)
        return 1.0 if mu == math.inf else gdp.gdp_delta(mu, epsilon)
    if accountant == "rdp":
        return _rdp.delta(leaves, epsilon)
    result = _pld.delta(leaves, epsilon)
    try:
        # Both are bounds; for tiny deltas, rounding limits a PLD.
        return min(result, _rdp.delta(leaves, epsilon)) if result < 1e-9 else result
    except dp_accounting.UnsupportedEventError:
        return result


def without_thresholds(
    leaves: Mapping[dp_accounting.DpEvent, int],
) -> tuple[dict[dp_accounting.DpEvent, int], float]:
    """Splits off events that only add to delta; returns the rest, and their sum."""
    rest, total = {}, 0.0
    for event, count in leaves.items():
        if isinstance(event, events.AdditiveDeltaDpEvent):
            total += count * event.delta
        else:
            rest[event] = count
    return rest, total


def _gdp_mu(leaves: Mapping[dp_accounting.DpEvent, int]) -> float:
    """Returns mu of a composition, by the central limit theorem where sampled."""
    mus = []
    for event, count in leaves.items():
        z = _pld.noise_multiplier(event)
        if z == 0:
            return math.inf
        if isinstance(event, dp_accounting.GaussianDpEvent):
            mus.append(math.sqrt(count) / z)
        elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
            rate = event.sample_size / event.source_dataset_size
            mus.append(gdp.subsampled_gdp_mu(z, rate, count, "fixed_size"))
        elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
            mus.append(
                gdp.subsampled_gdp_mu(z, event.sampling_probability, count, "poisson")
            )
        else:
            raise dp_accounting.UnsupportedEventError(
                f'accountant="gdp" has no formula for {event}; use "pld".'
            )
    return math.inf if math.inf in mus else gdp.gdp_compose(mus)
