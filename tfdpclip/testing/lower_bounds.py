"""Lower bounds on epsilon from the guesses of an auditor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
            below = np.arange(1, correct + 1)
            mass = np.cumsum(stats.binom.pmf(correct - below, guesses, right))
            value += 2 * canaries * delta * np.max(mass / below)
        return float(value)

    return _largest_refuted(chance, 1 - confidence)


def many_runs_lower_bound(
    with_record: Sequence[float],
    without: Sequence[float],
    delta: float,
    confidence: float = 0.95,
) -> float:
    """The epsilon that many runs with and without one record refute.

    Chooses the threshold of the scores that best separates the two kinds in a first
    half of the runs, and bounds the error rates on the second half (Clopper-Pearson):
    a private mechanism has ``1 - fnr <= e^epsilon fpr + delta``, and the same with the
    two exchanged.

    Args:
      with_record: a score for each run with the record; higher should mean "with".
      without: a score for each run without it.
      delta: the delta of the claim.
      confidence: 1 minus the probability that a true claim is refuted.

    Returns:
      The largest epsilon refuted; 0 if no epsilon is.

    Raises:
      ValueError: if there are fewer than 20 runs of either kind.

    >>> rng = np.random.default_rng(0)
    >>> many_runs_lower_bound(rng.normal(size=200), rng.normal(size=200), 1e-5)
    0.0
    """
    inside = _arguments.floats("with_record", with_record).ravel()
    outside = _arguments.floats("without", without).ravel()
    if min(inside.size, outside.size) < 20 or not (
        np.isfinite(inside).all() and np.isfinite(outside).all()
    ):
        raise ValueError(
            "with_record and without need 20 finite scores each, got "
            f"{inside.size} and {outside.size}."
        )
    delta, confidence = check_level(delta, confidence)
    cut_in, cut_out = inside.size // 2, outside.size // 2
    candidates = np.concatenate([inside[:cut_in], outside[:cut_out]])
    best, threshold, above = -math.inf, 0.0, True
    for value in candidates:
        tpr = (np.sum(inside[:cut_in] >= value) + 0.5) / (cut_in + 1)
        fpr = (np.sum(outside[:cut_out] >= value) + 0.5) / (cut_out + 1)
        for ratio, side in (
            (math.log(tpr / fpr), True),
            (math.log((1 - fpr) / (1 - tpr)), False),
        ):
            if ratio > best:
                best, threshold, above = ratio, value, side
    hits, tries = inside[cut_in:] >= threshold, outside[cut_out:] >= threshold
    if not above:
        hits, tries = ~tries, ~hits
    level = (1 - confidence) / 2
    low = _clopper_pearson(int(hits.sum()), hits.size, level)[0]
    high = _clopper_pearson(int(tries.sum()), tries.size, level)[1]
    if low <= delta or high <= 0:
        return 0.0
    return max(0.0, math.log((low - delta) / high))


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


def _clopper_pearson(successes: int, trials: int, level: float) -> tuple[float, float]:
    low = stats.beta.ppf(level, successes, trials - successes + 1) if successes else 0.0
    if successes == trials:
        return float(low), 1.0
    return float(low), float(stats.beta.isf(level, successes + 1, trials - successes))
