"""Bounds on attacks that guess whether a record was in the data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import dp_accounting

from tfdpclip import _arguments
from tfdpclip.accounting import _pld, accountants
from tfdpclip.sampling import events

#: Rates of false positives at which attacks are compared (Carlini et al. 2022).
RATES = (0.001, 0.01)


@dataclasses.dataclass(frozen=True)
class AttackBounds:
    """The best possible success of an attack on the membership of a record.

    An attacker sees every release, knows all records but one, and says whether the last
    record was in the data (or was replaced, by the neighbours of the guarantee).

    Attributes:
      false_positive_rates: the shares of absent records that the attack calls present.
      true_positive_rates: for each of these rates, the largest share of present records
        that an attack can call present.
      advantage: the largest difference between an attack's true positive rate and false
        positive rate: the total variation between both releases.
    """

    false_positive_rates: tuple[float, ...]
    true_positive_rates: tuple[float, ...]
    advantage: float

    def __str__(self) -> str:
        return f"find a record that was in the data at most {self.numbers()}"

    def numbers(self) -> str:
        """The rates in words."""
        pairs = zip(self.true_positive_rates, self.false_positive_rates, strict=True)
        found = [f"{percent(p)} at {percent(q)}" for p, q in pairs]
        return (
            f"{' and '.join(found)} false alarms; advantage {percent(self.advantage)}"
        )


def attack_bounds(
    event: dp_accounting.DpEvent,
    false_positive_rates: Sequence[float] = RATES,
) -> AttackBounds:
    """Returns bounds on all attacks on a run, from the run's privacy loss.

    *Formal guarantees*: the rates are those of the best test between the pair of
    distributions that dominates the run (Neyman and Pearson 1933; Dong, Roth and Su
    2022, arXiv 1905.02383; Zhu, Dong and Wang 2022, arXiv 2106.08567), in the worse
    order of both neighbours. The rates are mostly far below the bounds that an epsilon
    and a delta of the same run imply (`attack_bounds_of`), and never above without
    events of `AdditiveDeltaDpEvent`. Let d be the sum of the deltas of these events:
    the profile is at most d above the profile of the remaining events, so a test with
    false positive rate q finds at most power(q + d) + d, with the power of the best
    test on the remaining events.

    Args:
      event: the run, from `scheme.event` or `Ledger.event`.
      false_positive_rates: in [0, 1].

    Raises:
      ValueError: if an argument is out of range.
      UnsupportedEventError: if the event has no privacy loss distribution here.

    >>> from tfdpclip import sampling
    >>> event = sampling.Poisson(0.01).event(1.1, 1000)
    >>> found = attack_bounds(event)
    >>> [round(rate, 4) for rate in found.true_positive_rates]
    [0.0034, 0.0254]
    >>> round(found.advantage, 3)
    0.141
    """
    events.check_event("event", event)
    rates = _checked(false_positive_rates)
    leaves, added = accountants.without_thresholds(events.leaves(event))
    shifted = tuple(min(1.0, rate + added) for rate in rates)
    powers, advantage = shifted, 0.0
    if leaves:
        coarseness = accountants.quick_coarseness(event, "pld")
        powers, advantage = _best_test(tuple(leaves.items()), shifted, coarseness)
    powers = tuple(min(1.0, power + added) for power in powers)
    return AttackBounds(rates, powers, min(1.0, advantage + added))


@functools.lru_cache(maxsize=64)
def _best_test(events_and_counts: tuple, rates: tuple[float, ...], coarseness: float):
    return _pld.attacks(dict(events_and_counts), rates, coarseness)


def attack_bounds_of(
    epsilon: float, delta: float, false_positive_rates: Sequence[float] = RATES
) -> AttackBounds:
    """Returns bounds on all attacks on a run with a known epsilon and delta.

    Args:
      epsilon: at least 0; infinity is allowed.
      delta: in [0, 1].
      false_positive_rates: in [0, 1].

    Raises:
      ValueError: if an argument is out of range.

    >>> attack_bounds_of(math.log(3), 0.0).true_positive_rates
    (0.003, 0.03)
    """
    nothing = _arguments.real(epsilon) == 0
    epsilon = 0.0 if nothing else _arguments.target_epsilon(epsilon)
    delta = _arguments.fraction("delta", delta)
    rates = _checked(false_positive_rates)
    if epsilon > 500:
        return AttackBounds(rates, (1.0,) * len(rates), 1.0)
    grown = math.exp(epsilon)
    # The last bound is the guarantee for the records that the attack calls absent.
    powers = tuple(
        min(1.0, grown * q + delta, 1 - (1 - delta - q) / grown) for q in rates
    )
    advantage = min(1.0, (grown - 1 + 2 * delta) / (grown + 1))
    return AttackBounds(rates, powers, advantage)


def percent(rate: float) -> str:
    """A rate as a percentage of three digits, rounded up.

    >>> percent(0.12345), percent(0.001), percent(1.0)
    ('12.4 %', '0.1 %', '100 %')
    """
    if rate <= 0:
        return "0 %"
    digits = max(0, 2 - math.floor(math.log10(rate * 100)))
    scale = 10.0**digits
    rounded = math.ceil(rate * 100 * scale * (1 - 1e-9)) / scale
    return (
        f"{rounded:.{digits}f}".rstrip("0").rstrip(".") + " %"
        if digits
        else (f"{rounded:.0f} %")
    )


def _checked(rates: Sequence[float]) -> tuple[float, ...]:
    return tuple(
        _arguments.fraction("false_positive_rates", rate)
        for rate in _arguments.items("false_positive_rates", rates)
    )
