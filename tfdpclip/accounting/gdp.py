"""Gaussian differential privacy in closed form.

A mechanism is mu-GDP if telling two neighbouring data sets apart from its output is
no easier than telling N(0, 1) from N(mu, 1) (Dong, Roth and Su 2022, arXiv
1905.02383). Composition and conversion are exact. Subsampling is not: its mu comes
from a central limit theorem, an approximation that is good for many steps at small
rates and *not a bound* for any finite number of steps. Use it to compare with papers
and for orientation; report the result of `tfdpclip.accounting.epsilon`.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import optimize, special

from tfdpclip import _arguments


def gdp_tradeoff(mu: float, alpha: float | np.ndarray) -> float | np.ndarray:
    """Returns the smallest type II error at type I error `alpha` under mu-GDP.

    G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu) (Dong et al., Definition 2.6).

    Args:
      mu: The GDP parameter, at least 0.
      alpha: Type I error(s), each in [0, 1].

    Returns:
      The trade-off function at `alpha`, with the shape of `alpha`.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(gdp_tradeoff(1.0, 0.5), 6)
    0.158655
    """
    mu = _arguments.non_negative("mu", mu)
    values = _arguments.floats("alpha", alpha)
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"alpha must be in [0, 1], got {_arguments.shown(alpha)}.")
    # Phi^-1(1 - alpha) = -Phi^-1(alpha) does not round small alphas away.
    beta = special.ndtr(-special.ndtri(values) - mu)
    return float(beta) if np.ndim(alpha) == 0 else beta


def gdp_delta(mu: float, epsilon: float) -> float:
    """Returns the delta at which mu-GDP implies (epsilon, delta)-DP.

    delta = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2) (Dong et al., Corollary
    2.13), computed from logarithms so that it neither overflows nor vanishes.

    Args:
      mu: The GDP parameter, at least 0.
      epsilon: At least 0.

    Returns:
      The smallest delta, in [0, 1].

    Raises:
      ValueError: If an argument is out of range.

    >>> round(gdp_delta(1.0, 1.0), 6)
    0.126937
    """
    mu = _arguments.non_negative("mu", mu)
    epsilon = _arguments.non_negative("epsilon", epsilon)
    return math.exp(_log_delta(mu, epsilon))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon at which mu-GDP implies (epsilon, delta)-DP.

    Args:
      mu: The GDP parameter, at least 0; infinity gives infinity.
      delta: In (0, 1).

    Returns:
      The smallest epsilon, at least 0.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(gdp_epsilon(1.0, 1e-5), 6)
    4.377178
    """
    if _arguments.real(mu) == math.inf:
        return math.inf
    mu = _arguments.non_negative("mu", mu)
    delta = _arguments.delta(delta)
    target = math.log(delta)
    if mu == 0 or _log_delta(mu, 0.0) <= target:
        return 0.0
    # The Gaussian tail bound Phi(-t) <= e^(-t^2/2) makes this upper end safe.
    upper = mu * mu / 2 + mu * math.sqrt(-2 * target) + 1e-300
    if not math.isfinite(upper):
        return math.inf
    if _log_delta(mu, upper) > target:  # Possible only by rounding.
        return upper
    root = optimize.brentq(
        lambda e: _log_delta(mu, e) - target, 0.0, upper, xtol=1e-14, rtol=1e-14
    )
    return float(root)


def gdp_mu(epsilon: float, delta: float) -> float:
    """Returns the largest mu for which mu-GDP implies (epsilon, delta)-DP.

    Args:
      epsilon: At least 0 and finite.
      delta: In (0, 1).

    Returns:
      The mu with `gdp_epsilon(mu, delta) == epsilon`. The noise multiplier that
      spends exactly (epsilon, delta) on T unsampled steps is sqrt(T) / mu.

    Raises:
      ValueError: If an argument is out of range.

    >>> round(gdp_mu(1.0, 1e-5), 6)
    0.268051
    """
    epsilon = _arguments.non_negative("epsilon", epsilon)
    target = math.log(_arguments.delta(delta))
    lower, upper = 1e-300, 1.0
    while _log_delta(upper, epsilon) < target:
        lower, upper = upper, 2 * upper
    if lower < 1:
        while _log_delta(upper / 2, epsilon) > target:
            upper /= 2
        lower = upper / 2
    root = optimize.brentq(
        # Far below the root the logarithm is -infinity, which no secant can use.
        lambda m: max(_log_delta(m, epsilon), -1e300) - target,
        lower,
        upper,
        xtol=1e-300,
        rtol=1e-14,
        maxiter=1000,
    )
    return float(root)


def gdp_compose(mus: Iterable[float]) -> float:
    """Returns the mu of several GDP mechanisms in sequence.

    The root of the sum of squares (Dong et al., Corollary 3.3); exact.

    >>> gdp_compose([3.0, 4.0])
    5.0
    """
    mus = _arguments.items("mus", mus)
    return math.hypot(*(_arguments.non_negative("mus", mu) for mu in mus))


def layerwise_gdp_mu(sigma: float, layers: int | Sequence[float]) -> float:
    """Returns the mu of one layerwise step, in the layerwise paper's sigma.

    A step that clips L layers separately, each with noise of standard deviation
    2 C_h sigma, is one joint Gaussian with mu = sqrt(L)/sigma for replace-one
    neighbours (Nguyen et al. 2023, section 3.2). If layer h is given the share p_h
    of its own clip norm, mu = sqrt(sum p_h^2)/sigma.

    Args:
      sigma: The paper's sigma: half a noise multiplier, see
        `noise_multiplier_from_layerwise_sigma`.
      layers: The number of layers, or one weight p_h per layer.

    Returns:
      The GDP parameter of the step; infinity where it exceeds the range of a double.

    Raises:
      ValueError: If an argument is out of range.

    >>> layerwise_gdp_mu(2.0, [1, 2, 2])
    1.5
    >>> layerwise_gdp_mu(2.0, 4)
    1.0
    """
    sigma = _arguments.positive("sigma", sigma)
    if _arguments.real(layers) is not None:
        return math.sqrt(_arguments.integer("layers", layers, minimum=1)) / sigma
    weights = [
        _arguments.non_negative("layers", weight)
        for weight in _arguments.items("layers", layers)
    ]
    if not weights:
        raise ValueError("layers must hold at least one weight, got none.")
    return math.hypot(*weights) / sigma


def noise_multiplier_from_layerwise_sigma(sigma: float, layers: int = 1) -> float:
    """Returns the noise multiplier of a layerwise step with the paper's sigma.

    Noise 2 C_h sigma on each of L layers, each clipped to C_h, is a noise multiplier
    of 2 sigma per layer and of 2 sigma / sqrt(L) for the step as a whole: the number
    that accountants, and `noise_multiplier` everywhere in this library, mean.

    >>> noise_multiplier_from_layerwise_sigma(2.0, layers=4)
    2.0
    """
    sigma = _arguments.non_negative("sigma", sigma)
    layers = _arguments.integer("layers", layers, minimum=1)
    return _arguments.finite("2 * sigma", 2 * sigma) / math.sqrt(layers)


def subsampled_gdp_log_h(sigma: float) -> float:
    """Returns log h(sigma), the central-limit factor of fixed-size sampling.

    h(sigma)^2 = e^(1/sigma^2) Phi(3/(2 sigma)) + 3 Phi(-1/(2 sigma)) - 2 (Dong et
    al., Corollary 5.4), where sigma is the noise standard deviation divided by the
    replace-one sensitivity 2 C. Accurate to about 1e-13 from sigma = 1e-150 to
    sigma = 1e150, although e^(1/sigma^2) overflows at one end and the three terms
    cancel at the other; infinity for a sigma whose square underflows.

    >>> round(math.exp(subsampled_gdp_log_h(2.5)), 6)
    0.33748
    >>> round(subsampled_gdp_log_h(0.01875 / math.sqrt(62)) / math.log(10))
    38295
    """
    sigma = _arguments.positive("sigma", sigma)
    x = 1 / sigma
    if x >= 2:
        log_main = x * x + float(special.log_ndtr(1.5 * x))
        rest = 3 * float(special.ndtr(-0.5 * x)) - 2
        return 0.5 * (log_main + math.log1p(rest * math.exp(-log_main)))
    # h^2 = expm1(x^2) Phi(1.5 x) + E(1.5 x) - 3 E(0.5 x) with E = Phi - 1/2. The
    # linear terms of the two E's cancel; their common series starts at x^3.
    term, series, k = x, 0.0, 0
    while True:
        k += 1
        term *= -x * x / (2 * k)
        odd = 2 * k + 1
        added = term * (1.5**odd - 3 * 0.5**odd) / odd
        series += added
        if abs(added) <= 1e-18 * abs(series) or added == 0:
            break
    series /= math.sqrt(2 * math.pi)
    # Divide by x^2 first, since x^2 may underflow.
    main = math.expm1(x * x) / (x * x) if x * x > 0 else 1.0
    reduced = main * float(special.ndtr(1.5 * x)) + (
        series / x / x if x > 1e-100 else 0
    )
    return math.log(x) + 0.5 * math.log(reduced)


def subsampled_gdp_mu(
    noise_multiplier: float, rate: float, steps: int, sampling: str = "poisson"
) -> float:
    """Returns the central-limit mu of T subsampled Gaussian steps.

    *Not a bound.* The value is the limit for many steps at rate ~ 1/sqrt(steps);
    at finite T the truth lies on either side. In the layerwise paper's setting
    (42,188 steps) it is slightly too large; for few steps, or noise multipliers
    below about 0.5, it can be far too small. Never report it as a guarantee.

    Args:
      noise_multiplier: Noise standard deviation over the sensitivity: for
        `"poisson"` (add or remove) std / C; for `"fixed_size"` (replace one)
        std / (2 C), the sigma of the papers.
      rate: Expected fraction of the records in a step.
      steps: Number of steps T.
      sampling: `"poisson"`: rate sqrt(T (e^(1/sigma^2) - 1)) (Bu et al. 2020);
        `"fixed_size"`: sqrt(2) rate sqrt(T) h(sigma) (Dong et al., Corollary 5.4).

    Returns:
      mu; infinity where it exceeds the range of a double
      (`subsampled_gdp_log_h` has the logarithm).

    Raises:
      ValueError: If an argument is out of range.

    >>> rate = 64 / 54000
    >>> steps = round(50 / rate)
    >>> round(subsampled_gdp_mu(1.5 / math.sqrt(8), rate, steps, "fixed_size"), 4)
    1.9909
    """
    sigma = _arguments.positive("noise_multiplier", noise_multiplier)
    rate = _arguments.rate("rate", rate)
    steps = _arguments.integer("steps", steps)
    _arguments.choice("sampling", sampling, ("poisson", "fixed_size"))
    if steps == 0:
        return 0.0
    if sampling == "fixed_size":
        log_factor = 0.5 * math.log(2) + subsampled_gdp_log_h(sigma)
    else:
        # 0.5 log(e^x - 1) with x = 1 / sigma^2, stable at both ends.
        if sigma < 1e-150:
            return math.inf
        log_factor = -math.log(sigma)
        if sigma < 1e150:
            x = 1 / sigma**2
            log_factor = 0.5 * (x + math.log(-math.expm1(-x)))
    log_mu = math.log(rate) + 0.5 * math.log(steps) + log_factor
    return math.exp(log_mu) if log_mu < 709 else math.inf


def _log_delta(mu: float, epsilon: float) -> float:
    if mu == 0:
        return -math.inf
    if epsilon == 0:  # For a small mu, the difference would lose all its digits.
        return math.log(math.erf(mu / math.sqrt(8)) or 5e-324)
    log_upper = float(special.log_ndtr(-epsilon / mu + mu / 2))
    if log_upper == -math.inf:  # Delta is below the smallest double.
        return -math.inf
    gap = epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2)) - log_upper
    if gap >= 0:  # Below the resolution of doubles: delta is essentially 0.
        return -math.inf
    return log_upper + math.log(-math.expm1(gap))
