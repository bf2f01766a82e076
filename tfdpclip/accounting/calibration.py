"""Answers to privacy questions: which epsilon, which noise, how many steps.

Every function takes a sampling scheme of `tfdpclip.sampling`, with its own event and
neighbouring relation, so that the answer is about the scheme that draws the data.
"""

import math
from typing import Any

import dp_accounting

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.accounting import _pld, accountants, gdp, search
from tfdpclip.accounting.matrix_events import correlated_event
from tfdpclip.correlated import NoiseMatrix
from tfdpclip.sampling import events
from tfdpclip.sampling.base import SamplingScheme


class BudgetSpentError(ValueError):
    """Earlier steps have spent the budget."""


def epsilon(
    noise_multiplier: float,
    steps: int,
    sampling: Any,
    delta: float,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
    matrix: NoiseMatrix | None = None,
) -> float:
    """Returns the epsilon that a training run spends at `delta`.

    *Formal guarantees*

    * With accountant `"pld"` or `"rdp"`, the run is (epsilon, delta)-DP under
      `sampling.neighboring_relation`, if its steps are drawn by `sampling`, objects of
      kind `unit` are clipped, and the noise on a sum of clip norm C has standard
      deviation `noise_multiplier * C` (more generally: `split_noise_multiplier`
      spreads it over several noised quantities). Both are upper bounds; "pld" is
      tighter.
    * `"gdp"` is exact without sampling and a central-limit *approximation* with
      sampling, not a bound.

    Args:
      noise_multiplier: z. 0 means no noise, and an infinite epsilon.
      steps: Number of steps; 0 spends nothing.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by it.
      delta: In (0, 1).
      accountant: `"pld"` (privacy loss distributions), `"rdp"` (Renyi) or `"gdp"`.
      unit: The object that is clipped: `"example"`, `"client"`, `"batch"` or
        `"group"`; with the relation it decides the sensitivity, see
        `sensitivity_factor`.
      sensitivity: Replaces the sensitivity, in clip norms. Fixed-size sampling with
        `sensitivity=1.0` is the convention of Table 1 of Andrew et al. 2021 (a
        replace-one bound with the multiplier of an add-or-remove sum): it reproduces
        their numbers and is not the strict guarantee.
      matrix: C of correlated noise, for all the steps; None for independent noise.

    Returns:
      The epsilon, or infinity.

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import correlated, sampling
    >>> round(epsilon(1.1, 1000, sampling.Poisson(0.01), 1e-5), 2)
    1.52
    >>> fixed = sampling.MinSeparation(1000, 10, relation="zero_out")
    >>> round(epsilon(5.0, 1000, fixed, 1e-5, matrix=correlated.Tree()), 2)
    0.73
    """
    event = _event(noise_multiplier, steps, sampling, unit, sensitivity, matrix)
    return event_epsilon(event, delta, accountant)


def delta(
    noise_multiplier: float,
    steps: int,
    sampling: Any,
    epsilon: float,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
    matrix: NoiseMatrix | None = None,
) -> float:
    """Returns the delta that a training run spends at `epsilon`.

    The same guarantee as `tfdpclip.accounting.epsilon`, solved for delta.

    Args:
      noise_multiplier: z. 0 means no noise, and a delta of 1.
      steps: Number of steps; 0 spends nothing.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by it.
      epsilon: At least 0.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: The object that is clipped.
      sensitivity: Replaces the sensitivity, in clip norms.
      matrix: C of correlated noise, for all the steps; None for independent noise.

    Returns:
      The delta, in [0, 1].

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import sampling
    >>> round(1e6 * delta(1.1, 1000, sampling.Poisson(0.01), 2.0), 2)
    0.08
    """
    event = _event(noise_multiplier, steps, sampling, unit, sensitivity, matrix)
    epsilon = _arguments.non_negative("epsilon", epsilon)
    return accountants.delta(event, epsilon, accountant)


def event_epsilon(
    event: dp_accounting.DpEvent, delta: float, accountant: str = "pld"
) -> float:
    """Returns the epsilon of any composition of events at `delta`.

    For runs in phases: compose the results of the schemes' `event` methods. All parts
    must have the same neighbouring relation.

    Args:
      event: A `dp_accounting` event; nested compositions are allowed.
      delta: In (0, 1).
      accountant: `"pld"`, `"rdp"` or `"gdp"`.

    Returns:
      The epsilon, or infinity.

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the event.

    >>> round(event_epsilon(dp_accounting.GaussianDpEvent(1.0), 1e-5), 4)
    4.3772
    """
    events.check_event("event", event)
    return accountants.epsilon(event, _arguments.delta(delta), accountant)


def noise_multiplier(
    epsilon: float,
    delta: float,
    steps: int,
    sampling: Any,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
    matrix: NoiseMatrix | None = None,
    spent: dp_accounting.DpEvent | None = None,
) -> float:
    """Returns the least noise multiplier with which a run stays within a budget.

    Args:
      epsilon: The budget; positive. Infinity requires no noise.
      delta: In (0, 1).
      steps: Number of steps.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by it.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: The object that is clipped.
      sensitivity: Replaces the sensitivity, in clip norms.
      matrix: C of correlated noise, for all the steps; None for independent noise.
      spent: The event of earlier steps, if any, which must be within the budget.

    Returns:
      z with `epsilon(z, ...) <= epsilon`, never above it and at most a relative 3e-5
      below; if epsilon jumps past the budget, as to 0 for a delta above the sampling
      rate, z is at most a relative 1e-6 above the jump. 0 if `epsilon` is infinite or
      `steps` is 0.

    Raises:
      ValueError: If an argument is out of range, or no noise multiplier below 1e9 is
        enough.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import sampling
    >>> round(noise_multiplier(1.0, 1e-5, 1000, sampling.Poisson(0.01)), 2)
    1.41
    """
    epsilon = _arguments.target_epsilon(epsilon)
    delta = _arguments.delta(delta)
    steps = _arguments.integer("steps", steps)
    _arguments.choice("accountant", accountant, accountants.ACCOUNTANTS)
    if epsilon == math.inf or steps == 0:
        _event(1.0, steps, sampling, unit, sensitivity, matrix)  # Validates arguments.
        return 0.0

    past = _past(spent)
    leaves = events.leaves(_event(1.0, steps, sampling, unit, sensitivity, matrix))
    mu = _pld.gaussian_mu(leaves)
    if mu is not None and accountant != "rdp" and spent is None:
        z = mu / gdp.gdp_mu(epsilon, delta) * (1 + 1e-12)
        if not math.isfinite(z):
            raise ValueError(
                f"epsilon = {epsilon} is out of reach for sensitivity = {sensitivity} "
                f"and steps = {_arguments.shown(steps)}: no finite noise_multiplier is "
                "enough."
            )
        return z

    if spent is not None:
        before = accountants.epsilon(past, delta, accountant, 1.0)
        if not before < epsilon:
            raise BudgetSpentError(
                f"epsilon = {epsilon:g} is spent: the steps that ran took "
                f"{before:.4g} at delta = {delta:g}, and the budget covers these steps "
                f"and the steps to come. Give an epsilon above {before:.4g}."
                + see("a-spent-budget")
            )

    def total(z: float, coarseness: float = 1.0) -> float:
        new = _event(z, steps, sampling, unit, sensitivity, matrix)
        event = new if spent is None else dp_accounting.ComposedDpEvent([past, new])
        return accountants.epsilon(event, delta, accountant, coarseness)

    return search.least_noise(total, epsilon, accountant == "pld")


def steps_for(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling: Any,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
    spent: dp_accounting.DpEvent | None = None,
) -> int:
    """Returns how many steps fit into a budget.

    Args:
      epsilon: The budget; positive.
      delta: In (0, 1).
      noise_multiplier: z, positive.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by it.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: The object that is clipped.
      sensitivity: Replaces the sensitivity, in clip norms.
      spent: The event of earlier steps, if any.

    Returns:
      The largest T such that T steps spend at most `epsilon`, 0 if even one step spends
      more; at most 10^12.

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import sampling
    >>> steps_for(1.0, 1e-5, 5.0, sampling.FullBatch())
    1
    """
    epsilon = _arguments.target_epsilon(epsilon)
    delta = _arguments.delta(delta)
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    _arguments.choice("accountant", accountant, accountants.ACCOUNTANTS)
    past = _past(spent)
    if epsilon == math.inf:
        return search.MAX_STEPS
    if z == 0:
        return 0

    def total(steps: int, coarseness: float = 1.0) -> float:
        new = _event(z, steps, sampling, unit, sensitivity)
        event = dp_accounting.ComposedDpEvent([past, new])
        return accountants.epsilon(event, delta, accountant, coarseness)

    return search.most_steps(total, epsilon)


def _past(spent: dp_accounting.DpEvent | None) -> dp_accounting.DpEvent:
    if spent is None:
        return dp_accounting.NoOpDpEvent()
    return events.check_event("spent", spent)


def _event(noise_multiplier, steps, sampling, unit, sensitivity, matrix=None):
    """Returns the scheme's event of `steps` steps, with the arguments checked."""
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    steps = _arguments.integer("steps", steps)
    scheme = getattr(sampling, "scheme", sampling)
    wanted = "a scheme of tfdpclip.sampling, such as Poisson(rate)"
    _arguments.instance("sampling", scheme, SamplingScheme, wanted)
    sensitivity = _arguments.optional(_arguments.positive, "sensitivity", sensitivity)
    if matrix is not None:
        if sensitivity is not None:
            raise ValueError(
                "sensitivity must be None with a matrix, which has its own sensitivity."
            )
        return correlated_event(matrix, z, steps, scheme, unit=unit)
    return scheme.event(z, steps, unit=unit, sensitivity=sensitivity)
