"""The least noise and the most steps within a budget, with few evaluations of epsilon.

An exact epsilon of privacy loss distributions may take seconds. Coarse upper bounds
take a fraction of that time and narrow the search, so that few exact epsilons are
needed.
"""

import math
from collections.abc import Callable

from scipy import optimize

from tfdpclip import _progress

# A calibrated epsilon ends up this far, relatively, below its target: a negligible
# distance, but enough that the capacity of a physical batch, which calibration does
# not include, costs no step.
_CLOSEST, _FARTHEST = 1e-5, 3e-5
# Where epsilon jumps past the target, the jump is located to this accuracy in log z.
_JUMP = 1e-6
# How closely the coarse epsilon is solved for log z.
_COARSE = 1e-4
# After this many secant steps, a jump is assumed.
_SECANTS = 12
#: The largest number of steps that the search reports.
MAX_STEPS = 10**12


def least_noise(
    spent: Callable[..., float],
    target: float,
    refine: bool,
    bracket: tuple[float, float] | None = None,
) -> float:
    """Returns the least z with spent(z) <= target, for a decreasing `spent`.

    A cheap, coarse `spent` brackets and solves; a few secant steps with the exact
    `spent` finish, since log spent is close to linear in log z. At a jump, such as to 0
    for a delta above the sampling rate, secant steps become bisections.

    Args:
      spent: Epsilon of z; with a second argument above 1, a cheaper upper bound.
      target: The budget.
      refine: Whether the second argument of `spent` has an effect.
      bracket: Values of z known to spend too much and little enough; searched for
        around 1 by default.
    """
    with _progress.calls(spent, title="least noise", unit="try") as counted:
        return _least_noise(counted, target, refine, bracket)


def _least_noise(spent, target, refine, bracket) -> float:
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
                    "1e9 is enough for these steps, this sampling and this sensitivity."
                )
            low, high = high, high + math.log(2)
    else:
        while gap(low) <= 0:
            if low < math.log(1e-4):
                return math.exp(low)
            low, high = low - math.log(2), low
    # The coarse epsilon is further than that from the exact epsilon.
    log_z = optimize.brentq(gap, low, high, xtol=_COARSE)
    slope = (gap(log_z + 0.01) - gap(log_z)) / 0.01
    slope = min(slope, -1e-3)

    bad, best = -math.inf, math.inf
    previous = None
    for tries in range(50):
        value = spent(math.exp(log_z))
        error = math.log(max(value, 1e-300)) - math.log(target)
        if error <= -_CLOSEST:
            best = min(best, log_z)
            if error >= -_FARTHEST:
                break
        else:
            bad = max(bad, log_z)
        if 0 < best - bad < _JUMP:
            break
        if previous is not None and log_z != previous[0]:
            secant = (error - previous[1]) / (log_z - previous[0])
            flat = secant >= 0 or not math.isfinite(secant)
            slope = slope / 8 if flat else secant
        previous = (log_z, error)
        aim = -(_CLOSEST + _FARTHEST) / 2
        log_z += max(-0.5, min(0.5, (aim - error) / slope))
        between = -math.inf < bad < best < math.inf
        if between and (tries >= _SECANTS or not bad < log_z < best):
            log_z = (bad + best) / 2
    if best == math.inf:
        raise ValueError(f"No noise_multiplier was found for epsilon = {target}.")
    return math.exp(best)


def most_steps(total: Callable[..., float], epsilon: float) -> int:
    """Returns the largest T with `total(T) <= epsilon`.

    Args:
      total: Epsilon as a nondecreasing function of the steps; with a second argument
        above 1, a cheaper upper bound.
      epsilon: The budget.
    """
    with _progress.calls(total, title="most steps", unit="try") as counted:
        return _most_steps(counted, epsilon)


def _most_steps(total, epsilon) -> int:
    known: dict[int, float] = {}

    def fits(steps: int) -> bool:
        if steps not in known:
            known[steps] = total(steps)
        return known[steps] <= epsilon

    if not fits(1):
        return 0
    # Steps that fit by a coarse upper bound fit.
    low, high = 1, 2
    while high <= MAX_STEPS and total(high, 8.0) <= epsilon:
        low, high = high, 2 * high
    while high <= MAX_STEPS and fits(high):
        low, high = high, 2 * high
    if high > MAX_STEPS:
        return MAX_STEPS
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
