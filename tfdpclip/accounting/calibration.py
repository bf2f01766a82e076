"""The questions users ask: what epsilon, what noise, how many steps.

Every function takes a sampling scheme of `tfdpclip.sampling`, which knows its own
event and neighbouring relation, so an answer cannot assume another scheme than the
one that draws the data.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import dp_accounting
import numpy as np
from scipy import optimize

from tfdpclip import _arguments
from tfdpclip.accounting import _pld, _rdp, gdp
from tfdpclip.sampling import events

ACCOUNTANTS = ("pld", "rdp", "gdp")

# A calibrated epsilon ends up this far, relatively, below its target: near enough not
# to matter, far enough that the capacity of a physical batch, which calibration does
# not know, costs no step.
_CLOSEST, _FARTHEST = 1e-5, 3e-5
_MAX_STEPS = 10**12


def epsilon(
    noise_multiplier: float,
    steps: int,
    sampling: Any,
    delta: float,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
) -> float:
    """Returns the epsilon that a training run spends at `delta`.

    *Formal guarantees*

    * With accountant `"pld"` or `"rdp"`, the run is (epsilon, delta)-DP under
      `sampling.neighboring_relation`, if its steps are drawn by `sampling`, what is
      clipped is `unit`, and the noise on a sum of clip norm C has standard deviation
      `noise_multiplier * C` (less exactly: `split_noise_multiplier` spreads it over
      several noised quantities). Both are upper bounds; "pld" is the tighter one.
    * `"gdp"` is exact without sampling and a central-limit *approximation* with it,
      not a bound.

    Args:
      noise_multiplier: z. 0 means no noise, and an infinite epsilon.
      steps: Number of steps; 0 spends nothing.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by one.
      delta: In (0, 1).
      accountant: `"pld"` (privacy loss distributions), `"rdp"` (Renyi) or `"gdp"`.
      unit: What is clipped: `"example"`, `"client"`, `"batch"` or `"group"`; with the
        relation it decides the sensitivity, see `sensitivity_factor`.
      sensitivity: Overrides the sensitivity, in clip norms. Fixed-size sampling with
        `sensitivity=1.0` is the convention of Table 1 of Andrew et al. 2021 (a
        replace-one bound with the multiplier of an add-or-remove sum): it reproduces
        their numbers and is not the strict guarantee.

    Returns:
      The epsilon, or infinity.

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import sampling
    >>> round(epsilon(1.1, 1000, sampling.Poisson(0.01), 1e-5), 2)
    1.52
    """
    event = _event(noise_multiplier, steps, sampling, unit, sensitivity)
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
) -> float:
    """Returns the delta that a training run spends at `epsilon`.

    The same guarantee as `tfdpclip.accounting.epsilon`, read the other way.

    Args:
      noise_multiplier: z. 0 means no noise, and a delta of 1.
      steps: Number of steps; 0 spends nothing.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by one.
      epsilon: At least 0.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: What is clipped.
      sensitivity: Overrides the sensitivity, in clip norms.

    Returns:
      The delta, in [0, 1].

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import sampling
    >>> round(1e6 * delta(1.1, 1000, sampling.Poisson(0.01), 2.0), 2)
    0.08
    """
    event = _event(noise_multiplier, steps, sampling, unit, sensitivity)
    epsilon = _arguments.non_negative("epsilon", epsilon)
    _arguments.choice("accountant", accountant, ACCOUNTANTS)
    leaves = events.leaves(event)
    if not leaves:
        return 0.0
    if accountant == "gdp":
        mu = _gdp_mu(leaves)
        return 1.0 if mu == math.inf else gdp.gdp_delta(mu, epsilon)
    if accountant == "rdp":
        return _rdp.delta(leaves, epsilon)
    result = _pld.delta(leaves, epsilon)
    try:
        # Both are bounds; far out, a PLD ends at its rounding.
        return min(result, _rdp.delta(leaves, epsilon)) if result < 1e-9 else result
    except dp_accounting.UnsupportedEventError:
        return result


def event_epsilon(
    event: dp_accounting.DpEvent, delta: float, accountant: str = "pld"
) -> float:
    """Returns the epsilon of any composition of events at `delta`.

    For runs in phases: compose what the schemes' `event` methods return. All parts
    must be meant under one neighbouring relation.

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
    return _leaves_epsilon(event, _arguments.delta(delta), accountant, 1.0)


def _leaves_epsilon(event, delta, accountant, coarseness):
    _arguments.choice("accountant", accountant, ACCOUNTANTS)
    leaves = events.leaves(event)
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


def noise_multiplier(
    epsilon: float,
    delta: float,
    steps: int,
    sampling: Any,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
) -> float:
    """Returns the least noise multiplier with which a run stays within a budget.

    Args:
      epsilon: The budget; positive. Infinity asks for no noise.
      delta: In (0, 1).
      steps: Number of steps.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by one.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: What is clipped.
      sensitivity: Overrides the sensitivity, in clip norms.

    Returns:
      z with `epsilon(z, ...) <= epsilon`, never above it and at most a relative 3e-5
      below. 0 if `epsilon` is infinite or `steps` is 0.

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
    _arguments.choice("accountant", accountant, ACCOUNTANTS)
    if epsilon == math.inf or steps == 0:
        _event(1.0, steps, sampling, unit, sensitivity)  # Validates the rest.
        return 0.0

    leaves = events.leaves(_event(1.0, steps, sampling, unit, sensitivity))
    mu = _pld.gaussian_mu(leaves)
    if mu is not None and accountant != "rdp":
        z = mu / gdp.gdp_mu(epsilon, delta) * (1 + 1e-12)
        if not math.isfinite(z):
            raise ValueError(
                f"epsilon = {epsilon} is out of reach for sensitivity = {sensitivity} "
                f"and steps = {_arguments.shown(steps)}: no finite noise_multiplier is "
                "enough."
            )
        return z

    def spent(z: float, coarseness: float = 1.0) -> float:
        event = _event(z, steps, sampling, unit, sensitivity)
        return _leaves_epsilon(event, delta, accountant, coarseness)

    return _least(spent, epsilon, accountant == "pld")


def _least(
    spent: Callable[..., float],
    target: float,
    refine: bool,
    bracket: tuple[float, float] | None = None,
) -> float:
    """Returns the least z with spent(z) <= target, for a decreasing `spent`.

    A cheap, coarse `spent` brackets and solves; a few secant steps with the exact one
    finish, since log spent is close to linear in log z.

    Args:
      spent: Epsilon of z; with a second argument above 1, a cheaper upper bound.
      target: The budget.
      refine: Whether `spent` takes that second argument to any effect.
      bracket: Values of z known to spend too much and little enough; searched for
        around 1 by default.
    """
    coarseness = 8.0 if refine else 1.0

    def gap(log_z: float) -> float:
        value = spent(math.exp(log_z), coarseness)
        return math.log(max(value, 1e-300)) - math.log(target) if value < 1e300 else 700

    low = high = 0.0
    if bracket is not None:
        low, high = map(math.log, bracket)
        if gap(high) > 0:  # Too coarse to see that the upper end is enough.
            coarseness = 1.0
    elif gap(0.0) > 0:
        while gap(high) > 0:
            if high > math.log(1e9):
                raise ValueError(
                    f"epsilon = {target} is out of reach: no noise_multiplier below "
                    "1e9 is enough for these steps and this sampling."
                )
            low, high = high, high + math.log(2)
    else:
        while gap(low) <= 0:
            if low < math.log(1e-4):
                return math.exp(low)
            low, high = low - math.log(2), low
    log_z = optimize.brentq(gap, low, high, xtol=1e-6)
    slope = (gap(log_z + 0.01) - gap(log_z)) / 0.01
    slope = min(slope, -1e-3)

    best = math.inf
    previous = None
    for _ in range(40):
        value = spent(math.exp(log_z))
        error = math.log(max(value, 1e-300)) - math.log(target)
        if error <= -_CLOSEST:
            best = min(best, log_z)
            if error >= -_FARTHEST:
                break
        if previous is not None and log_z != previous[0]:
            secant = (error - previous[1]) / (log_z - previous[0])
            if secant < 0 and math.isfinite(secant):
                slope = secant
        previous = (log_z, error)
        aim = -(_CLOSEST + _FARTHEST) / 2
        log_z += max(-0.5, min(0.5, (aim - error) / slope))
    if best == math.inf:
        raise ValueError(f"No noise_multiplier was found for epsilon = {target}.")
    return math.exp(best)


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
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by one.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: What is clipped.
      sensitivity: Overrides the sensitivity, in clip norms.
      spent: What has already run, if anything.

    Returns:
      The largest T such that T steps spend at most `epsilon`, 0 if not even one does;
      10^12 stands for more than that.

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
    _arguments.choice("accountant", accountant, ACCOUNTANTS)
    past = dp_accounting.NoOpDpEvent()
    if spent is not None:
        past = events.check_event("spent", spent)
    if epsilon == math.inf:
        return _MAX_STEPS
    if z == 0:
        return 0

    def total(steps: int, coarseness: float = 1.0) -> float:
        new = _event(z, steps, sampling, unit, sensitivity)
        event = dp_accounting.ComposedDpEvent([past, new])
        return _leaves_epsilon(event, delta, accountant, coarseness)

    return most_steps(total, epsilon)


def most_steps(total: Callable[..., float], epsilon: float) -> int:
    """Returns the largest T with `total(T) <= epsilon`.

    Args:
      total: Epsilon as a nondecreasing function of the steps; with a second argument
        above 1, a cheaper upper bound of it.
      epsilon: The budget.
    """
    known: dict[int, float] = {}

    def fits(steps: int) -> bool:
        if steps not in known:
            known[steps] = total(steps)
        return known[steps] <= epsilon

    if not fits(1):
        return 0
    # What fits by a coarse upper bound fits.
    low, high = 1, 2
    while high <= _MAX_STEPS and total(high, 8.0) <= epsilon:
        low, high = high, 2 * high
    while high <= _MAX_STEPS and fits(high):
        low, high = high, 2 * high
    if high > _MAX_STEPS:
        return _MAX_STEPS
    # Interpolate in (log T, log epsilon), where the curve is nearly straight, then
    # step a little past the guess, so that both ends of the interval close in.
    while high - low > 1:
        fits(low)
        width = high - low
        middle = low + width // 2
        below, above = known[low], known.get(high, math.inf)
        if 0 < below < above < math.inf:
            t = math.log(epsilon / below) / math.log(above / below)
            guess = int(math.exp(math.log(low) + t * math.log(high / low)))
            middle = min(max(guess, low + 1), high - 1)
        stride = max(1, width // 64)
        if fits(middle):
            low, probe = middle, min(middle + stride, high - 1)
        else:
            high, probe = middle, max(middle - stride, low + 1)
        if low < probe < high:
            if fits(probe):
                low = probe
            else:
                high = probe
    return low


def epsilon_profile(
    noise_multiplier: float,
    steps: Iterable[int],
    sampling: Any,
    delta: float,
    accountant: str = "pld",
    *,
    unit: str = "example",
    sensitivity: float | None = None,
) -> np.ndarray:
    """Returns epsilon after each of several numbers of steps, for plots and logs.

    Much cheaper than as many calls of `epsilon` elsewhere: the distribution of one
    step is built once and only composed anew.

    Args:
      noise_multiplier: z.
      steps: The numbers of steps.
      sampling: A scheme of `tfdpclip.sampling`, or batches drawn by one.
      delta: In (0, 1).
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      unit: What is clipped.
      sensitivity: Overrides the sensitivity, in clip norms.

    Returns:
      An array like `steps`.

    Raises:
      ValueError: If an argument is out of range.
      UnsupportedEventError: If the accountant cannot measure the scheme.

    >>> from tfdpclip import sampling
    >>> epsilon_profile(5.0, [0, 1, 2], sampling.FullBatch(), 1e-5).round(3)
    array([0.   , 0.726, 1.061])
    """
    delta = _arguments.delta(delta)
    return np.array(
        [
            event_epsilon(
                _event(noise_multiplier, count, sampling, unit, sensitivity),
                delta,
                accountant,
            )
            for count in _arguments.items("steps", steps)
        ]
    )


def _event(noise_multiplier, steps, sampling, unit, sensitivity):
    """Asks the scheme for its event."""
    z = _arguments.non_negative("noise_multiplier", noise_multiplier)
    steps = _arguments.integer("steps", steps)
    scheme = getattr(sampling, "scheme", sampling)
    if not hasattr(scheme, "event"):
        raise ValueError(
            f"sampling must be a scheme of tfdpclip.sampling, such as Poisson(rate); "
            f"got {_arguments.shown(sampling)}."
        )
    if sensitivity is not None:
        sensitivity = _arguments.positive("sensitivity", sensitivity)
    return scheme.event(z, steps, unit=unit, sensitivity=sensitivity)


def _gdp_mu(leaves) -> float:
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
