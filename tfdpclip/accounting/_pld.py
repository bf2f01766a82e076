"""Privacy loss distributions of the events that `dp_accounting` has no PLD for.

A privacy profile (delta as a function of epsilon, negative epsilons included) that
bounds a mechanism for both orders of two neighbours defines a pair of distributions
that dominates it, and dominating pairs compose (Zhu, Dong and Wang 2022, arXiv
2106.08567, Theorems 10 and 11). The profile is discretised pessimistically by
Connect-the-Dots (Doroshenko et al. 2022, arXiv 2207.04380).
"""

import functools
import math
from collections.abc import Callable, Mapping

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from dp_accounting.pld import privacy_loss_mechanism as mechanism
from scipy import special, stats

from tfdpclip.accounting import events, gdp

# Width of the cells of a distribution, unless the step's own privacy loss is so small
# that cells this wide would overstate it.
_WIDEST_CELL = 1e-4
_CELLS_PER_DEVIATION = 25
_NARROWEST_CELL = 1e-8
# No distribution gets more cells than this. Wider cells remain an upper bound.
_MAX_STEP_CELLS = 200_000
_MAX_CELLS = 4_000_000

# Privacy losses above the point where the profile falls below this count as infinite.
_TAIL = 1e-20

Profile = Callable[[np.ndarray], np.ndarray]


def epsilon(
    leaves: Mapping[dp_accounting.DpEvent, int],
    delta: float,
    coarseness: float = 1.0,
) -> float:
    """Returns the epsilon of a composition of elementary events."""
    mu = gaussian_mu(leaves)
    if mu is not None:
        return gdp.gdp_epsilon(mu, delta)
    composed = _compose(leaves, coarseness)
    if composed is None:
        return math.inf
    return float(max(0.0, composed.get_epsilon_for_delta(delta)))


def delta(
    leaves: Mapping[dp_accounting.DpEvent, int],
    epsilon: float,
    coarseness: float = 1.0,
) -> float:
    """Returns the delta of a composition of elementary events."""
    mu = gaussian_mu(leaves)
    if mu is not None:
        return 1.0 if mu == math.inf else gdp.gdp_delta(mu, epsilon)
    composed = _compose(leaves, coarseness)
    if composed is None:
        return 1.0
    return float(min(1.0, max(0.0, composed.get_delta_for_epsilon(epsilon))))


def gaussian_mu(leaves: Mapping[dp_accounting.DpEvent, int]) -> float | None:
    """Returns the exact mu if every event is an unsampled Gaussian, else None."""
    squares = []
    for event, count in leaves.items():
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return math.inf
        if not isinstance(event, dp_accounting.GaussianDpEvent):
            return None
        if event.noise_multiplier == 0:
            return math.inf
        squares.append(math.sqrt(count) / event.noise_multiplier)
    return math.hypot(*squares)


def _compose(leaves, coarseness):
    """Composes all events, or returns None if one of them is not private at all."""
    if any(noise_multiplier(event) == 0 for event in leaves):
        return None
    discretization = _cell_width(leaves) * coarseness
    total = None
    gaussians = {}
    for event, count in leaves.items():
        if isinstance(event, dp_accounting.GaussianDpEvent):
            gaussians[event] = count
            continue
        part = _single(event, discretization).self_compose(count)
        total = part if total is None else total.compose(part)
    if gaussians:
        part = pld_lib.from_gaussian_mechanism(
            1 / gaussian_mu(gaussians), value_discretization_interval=discretization
        )
        total = total.compose(part)
    return total


def noise_multiplier(event: dp_accounting.DpEvent) -> float:
    """Returns the multiplier of the Gaussian inside an elementary event."""
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return 0.0
    while not isinstance(event, dp_accounting.GaussianDpEvent):
        inner = getattr(event, "event", None)
        if inner is None:
            raise dp_accounting.UnsupportedEventError(
                f"No accountant here understands {event}."
            )
        event = inner
    return event.noise_multiplier


def _cell_width(leaves) -> float:
    """Chooses cells narrow enough to be exact and wide enough to fit in memory.

    Connect-the-Dots overstates a privacy loss that is small against a cell, step
    after step, so the width follows the standard deviation of one step's loss, about
    q sqrt(e^(1/z^2) - 1). The spread of the composed loss bounds it from below.
    """
    width, total_spread, widest_step = _WIDEST_CELL, 0.0, 0.0
    for event, count in leaves.items():
        z, q = noise_multiplier(event), _sampling_rate(event)
        x = 1 / z**2
        unsampled = 1 / z
        sampled = q * math.exp(x / 2) * math.sqrt(-math.expm1(-x)) if x < 600 else 1e300
        deviation = min(unsampled, sampled)
        width = min(width, deviation / _CELLS_PER_DEVIATION)
        mu = deviation * math.sqrt(count)
        step = _largest_loss(z, q)
        total_spread += mu * mu / 2 + 12 * mu + step
        widest_step = max(widest_step, step)
    return max(
        width,
        widest_step / _MAX_STEP_CELLS if width < _WIDEST_CELL else 0.0,
        total_spread / _MAX_CELLS,
        _NARROWEST_CELL,
    )


def _largest_loss(z: float, q: float) -> float:
    """Returns about the largest privacy loss one step can have."""
    unsampled = 0.5 / z**2 + 10 / z
    return (
        float(np.logaddexp(math.log1p(-q), math.log(q) + unsampled))
        if (q < 1)
        else unsampled
    )


def _sampling_rate(event) -> float:
    if isinstance(
        event,
        (dp_accounting.PoissonSampledDpEvent, events.TruncatedPoissonSampledDpEvent),
    ):
        return event.sampling_probability
    if isinstance(
        event,
        (
            dp_accounting.SampledWithoutReplacementDpEvent,
            dp_accounting.SampledWithReplacementDpEvent,
        ),
    ):
        return min(1.0, event.sample_size / event.source_dataset_size)
    return 1.0


@functools.lru_cache(maxsize=8)
def _single(event, discretization):
    """Returns the privacy loss distribution of one step."""
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return pld_lib.from_gaussian_mechanism(
            noise_multiplier(event),
            sampling_prob=event.sampling_probability,
            value_discretization_interval=discretization,
        )
    if isinstance(event, events.TruncatedPoissonSampledDpEvent):
        return _truncated_poisson(event, discretization)
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        return _without_replacement(event, discretization)
    if isinstance(event, dp_accounting.SampledWithReplacementDpEvent):
        return _with_replacement(event, discretization)
    raise dp_accounting.UnsupportedEventError(
        f"The PLD accountant does not understand {event}."
    )


def _truncated_poisson(event, discretization):
    tau = event.overflow_probability
    z = noise_multiplier(event)

    def pmf(adjacency):
        usual, overflowed = (
            mechanism.GaussianPrivacyLoss(
                std, sampling_prob=event.sampling_probability, adjacency_type=adjacency
            )
            for std in (z, z / 2)
        )

        def profile(eps):
            return (1 - tau) * usual.get_delta_for_epsilon(
                eps
            ) + tau * overflowed.get_delta_for_epsilon(eps)

        bounds = [m.connect_dots_bounds() for m in (usual, overflowed)]
        lower = min(b.epsilon_lower for b in bounds)
        upper = _upper_end(profile, bounds[0].epsilon_upper, bounds[1].epsilon_upper)
        low = math.floor(max(lower, -upper - 1) / discretization)
        high = math.ceil(upper / discretization)
        deltas = profile(np.arange(low, high + 1) * discretization)
        # Rounding may break the order in the last digit.
        deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            discretization, low, high, deltas
        ).to_dense_pmf()

    adjacency = mechanism.AdjacencyType
    return pld_lib.PrivacyLossDistribution(pmf(adjacency.REMOVE), pmf(adjacency.ADD))


def _without_replacement(event, discretization):
    """The profile q * delta(log(1 + (e^eps - 1)/q)) (Balle et al. 2018, Theorem 9)."""
    rate = event.sample_size / event.source_dataset_size
    mu = 1 / noise_multiplier(event)

    def profile(eps):
        return rate * _gaussian_profile(mu, _unamplified(eps, rate))

    return _symmetric(profile, mu * mu / 2 + 10 * mu, discretization)


def _with_replacement(event, discretization):
    """Mixture over how often the record was drawn (Balle et al. 2018, Theorem 10).

    With p = 1 - (1 - 1/n)^m and epsilon = log(1 + p (e^eps0 - 1)), delta is at most
    sum_k P[Binomial(m, 1/n) = k] delta_k(eps0), where delta_k belongs to a record
    that occurs k times: a Gaussian with k times the sensitivity.
    """
    size, population = event.sample_size, event.source_dataset_size
    base_mu = 1 / noise_multiplier(event)
    included = (
        -math.expm1(size * math.log1p(-1 / population)) if population > 1 else 1.0
    )
    counts = np.arange(1, size + 1)
    weights = stats.binom.pmf(counts, size, 1 / population)
    # Counts beyond the cut are taken to reveal everything.
    kept = (
        int(
            np.argmax(
                np.append(stats.binom.sf(counts, size, 1 / population), 0) < (_TAIL)
            )
        )
        + 1
    )
    counts, weights = counts[:kept], weights[:kept]
    beyond = float(stats.binom.sf(kept, size, 1 / population)) if kept < size else 0.0

    def profile(eps):
        base = _unamplified(eps, included)
        parts = (
            w * _gaussian_profile(k * base_mu, base)
            for k, w in zip(counts, weights, strict=True)
        )
        return np.minimum(sum(parts) + beyond, 1.0)

    mu = kept * base_mu
    return _symmetric(profile, mu * mu / 2 + 10 * mu, discretization)


def _symmetric(profile: Profile, upper: float, discretization: float):
    """Builds the distribution of a profile that is the same in both directions.

    Only epsilons >= 0 are needed: by symmetry the mass at -eps is e^-eps times the
    mass at eps, and what is left over sits at 0. Differences are taken where delta is
    small, so they do not cancel.
    """
    upper = _upper_end(profile, discretization, max(upper, 2 * discretization))
    size = max(2, math.ceil(upper / discretization))
    grid = np.arange(size + 1) * discretization
    deltas = np.minimum.accumulate(profile(grid))
    steps = np.diff(deltas)
    positive = np.empty(size)
    positive[:-1] = (steps[1:] - steps[:-1] * math.exp(discretization)) / math.expm1(
        discretization
    )
    positive[-1] = steps[-1] / math.expm1(-discretization)
    positive = np.maximum(positive, 0.0)
    negative = (positive * np.exp(-grid[1:]))[::-1]
    infinite = float(deltas[-1])
    # The mirror image of the infinite loss, a loss of minus infinity, rounds up to
    # the lowest cell, as does whatever rounding left over below zero.
    rest = max(0.0, 1 - infinite - positive.sum() - negative.sum())
    probabilities = np.concatenate([negative, [rest], positive])
    return pld_lib.PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(discretization, -size, probabilities, infinite, True)
    )


def _upper_end(profile: Profile, low: float, high: float) -> float:
    """Returns a loss in [low, high] above which the profile is negligible."""
    grid = np.linspace(low, high, 257)
    negligible = profile(grid) <= _TAIL
    return float(grid[np.argmax(negligible)]) if negligible.any() else float(high)


def _unamplified(eps: np.ndarray, rate: float) -> np.ndarray:
    """Returns log(1 + (e^eps - 1)/rate) for eps >= 0, without overflow."""
    small = np.log1p(np.expm1(np.minimum(eps, 30.0)) / rate)
    large = eps - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-eps))
    return np.where(eps < 30.0, small, large)


def _gaussian_profile(mu: float, eps: np.ndarray) -> np.ndarray:
    """Returns delta(eps) of N(mu, 1) against N(0, 1) for eps >= 0."""
    log_upper = special.log_ndtr(-eps / mu + mu / 2)
    gap = eps + special.log_ndtr(-eps / mu - mu / 2) - log_upper
    return np.exp(log_upper) * -np.expm1(np.minimum(gap, 0.0))
