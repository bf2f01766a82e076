"""Lower bounds on epsilon from the guesses of an auditor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

from tfdpclip import _arguments

_MOST = 100.0
#: The largest number of canaries of an audit.
MOST_CANARIES = 10**7


def one_run_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon that guesses about one run refute.

    Steinke, Nasr and Jagielski (2023), "Privacy auditing with one (1) training run",
    Theorem 5.2: m canaries were included independently with probability 1/2 each, and
    of r guesses about their inclusion, v were right. If the run were
    (epsilon, delta)-private for adding or removing a record, then

        P[v or more right] <= P[X >= v] + 2 m delta max_i P[v - i <= X < v] / i

    with X binomial(r, e^epsilon / (1 + e^epsilon)).

    Args:
      correct: v.
      guesses: r, fixed before the scores are seen.
      canaries: m.
      delta: the delta of the claim, in [0, 1).
      confidence: 1 minus the probability that a true claim is refuted.

    Returns:
      The largest epsilon refuted; 0 if no epsilon is.

    Raises:
      ValueError: if an argument is out of range.

    >>> round(one_run_lower_bound(95, 100, 1000, 0.0), 3)
    2.172
    >>> one_run_lower_bound(50, 100, 1000, 1e-5)
    0.0
    """
    canaries = _arguments.integer("canaries", canaries, 1, MOST_CANARIES)
    guesses = _arguments.integer("guesses", guesses)
    correct = _arguments.integer("correct", correct)
    if not correct <= guesses <= canaries:
        raise ValueError(
            f"correct ({correct}) must be at most guesses ({guesses}), and guesses at "
            f"most canaries ({canaries})."
        )
    delta, confidence = check_level(delta, confidence)

    def chance(epsilon: float) -> float:
        right = 1 / (1 + math.exp(-epsilon))
        value = stats.binom.sf(correct - 1, guesses, right)
        if delta > 0 and correct:
            value += 2 * canaries * delta * _densest(correct, guesses, right)
        return float(value)

    return _largest_refuted(chance, 1 - confidence)


def _densest(correct: int, guesses: int, right: float) -> float:
    """The largest mean probability of counts below v: max_i P[v - i <= X < v] / i.

    The probabilities fall on both sides of the mode, so the mean grows while a window
    is extended to the mode, and shrinks again once the next probability is below the
    mean: within 8 standard deviations and 20 below the mode, where probabilities are
    below 1e-12 (Bernstein), and the mean of 10 million counts is not.
    """
    mode = int((guesses + 1) * right)
    if correct <= mode:
        return float(stats.binom.pmf(correct - 1, guesses, right))
    reach = 20 + 8 * math.sqrt(guesses * right * (1 - right))
    first = np.arange(mode, max(-1, mode - reach), -1)
    tails = stats.binom.sf([*(first - 1), correct - 1], guesses, right)
    return float(np.max((tails[:-1] - tails[-1]) / (correct - first)))


def check_level(delta: float, confidence: float) -> tuple[float, float]:
    """Returns both as numbers. Raises ValueError if either is out of range."""
    delta = _arguments.finite("delta", delta)
    confidence = _arguments.finite("confidence", confidence)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence!r}.")
    return delta, confidence


def _largest_refuted(chance: Callable[[float], float], level: float) -> float:
    """The largest epsilon for which the observation has a chance below `level`."""
    if chance(0.0) > level:
        return 0.0
    if chance(_MOST) <= level:
        return _MOST
    return float(optimize.brentq(lambda e: chance(e) - level, 0.0, _MOST, xtol=1e-9))
