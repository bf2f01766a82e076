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

import attr
import dp_accounting
import numpy as np
from scipy import stats

from tfdpclip.accounting import _allocation, _profiles, gdp
from tfdpclip.accounting._losses import BothOrders, Losses, compose_orders
from tfdpclip.accounting._profiles import Profile
from tfdpclip.sampling import events

# Width of the cells of a distribution, unless the step's own privacy loss is so small
# that cells this wide would overstate it, or so large that wider ones tell as much.
_WIDEST_CELL = 1e-4
_CELLS_PER_DEVIATION = 25
_MOST_CELLS_PER_DEVIATION = 2500
# An epoch is composed so seldom that the widths of its cells hardly add up.
_MOST_CELLS_PER_EPOCH = 400
_NARROWEST_CELL = 1e-8
# No distribution gets more cells than this. Wider cells remain an upper bound.
_MAX_STEP_CELLS = 200_000
_MAX_CELLS = 4_000_000

# Composition by fast Fourier transforms rounds. Against closed forms, from 10 to 10^7
# steps, delta came out at most 1.1e-16 per step too small; more than twice that is
# taken off.
_ROUNDING_PER_STEP = 3e-16

# Losses this large are no privacy, and e to the power of them overflows.
_WIDEST_USEFUL_CELL = 100.0
# Squares of larger noise multipliers, and of their inverses, leave the range of floats.
_MOST_NOISE = 1e100


def epsilon(
    leaves: Mapping[dp_accounting.DpEvent, int],
    delta: float,
    coarseness: float = 1.0,
) -> float:
    """Returns the epsilon of a composition of elementary events."""
    # A plan has asked before for the epsilon at the end of a run.
    return _epsilon(tuple(leaves.items()), delta, coarseness)


@functools.lru_cache(maxsize=1024)
def _epsilon(events_and_counts: tuple, delta: float, coarseness: float) -> float:
    leaves = dict(events_and_counts)
    mu = gaussian_mu(leaves)
    if mu is not None:
        return gdp.gdp_epsilon(mu, delta)
    composed = _compose(leaves, coarseness)
    if composed is None:
        return math.inf
    rounding = _rounding(leaves)
    if not delta > 2 * rounding:
        return math.inf
    return composed.epsilon(delta - rounding)


def delta(
    leaves: Mapping[dp_accounting.DpEvent, int],
    epsilon: float,
) -> float:
    """Returns the delta of a composition of elementary events."""
    mu = gaussian_mu(leaves)
    if mu is not None:
        return 1.0 if mu == math.inf else gdp.gdp_delta(mu, epsilon)
    composed = _compose(leaves)
    if composed is None:
        return 1.0
    return min(1.0, max(0.0, composed.delta(epsilon)) + _rounding(leaves))


def attacks(
    leaves: Mapping[dp_accounting.DpEvent, int],
    rates: tuple[float, ...],
    coarseness: float = 1.0,
) -> tuple[tuple[float, ...], float]:
    """Returns the best power of tests at a false positive rate, and the advantage."""
    mu = gaussian_mu(leaves)
    positives = np.asarray(rates, float)
    composed = None
    if mu is None:
        composed = _compose(leaves, coarseness)
    elif mu < math.inf:
        powers = stats.norm.sf(stats.norm.isf(positives) - mu)
        return tuple(map(float, powers)), gdp.gdp_delta(mu, 0.0)
    if composed is None:
        return (1.0,) * len(rates), 1.0
    rounding = _rounding(leaves)
    powers = np.minimum(1.0, composed.power(positives) + rounding)
    advantage = min(1.0, max(0.0, composed.delta(0.0)) + rounding)
    return tuple(map(float, powers)), advantage


def _rounding(leaves) -> float:
    return _ROUNDING_PER_STEP * (10 + sum(leaves.values()))


def gaussian_mu(leaves: Mapping[dp_accounting.DpEvent, int]) -> float | None:
    """Returns the exact mu if every event is an unsampled Gaussian, else None."""
    for event in leaves:
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return math.inf
        if not isinstance(event, dp_accounting.GaussianDpEvent):
            return None
        if event.noise_multiplier == 0:
            return math.inf
    return _composed_mu(leaves)


def _composed_mu(gaussians: Mapping[dp_accounting.DpEvent, int]) -> float:
    return math.hypot(
        *(math.sqrt(n) / event.noise_multiplier for event, n in gaussians.items())
    )


def coarseness_of(leaves: Mapping[dp_accounting.DpEvent, int], cells: int) -> float:
    """How much wider cells are of which there are so many: at least 1."""
    if gaussian_mu(leaves) is not None:
        return 1.0
    leaves = _in_range(leaves)
    return max(1.0, _cell_width(leaves, cells) / _cell_width(leaves))


def _compose(
    leaves: Mapping[dp_accounting.DpEvent, int], coarseness: float = 1.0
) -> BothOrders | None:
    """Composes all events, or returns None if an event is not private at all."""
    # With so little noise nothing is private; its square would underflow.
    if any(noise_multiplier(event) < 1 / _MOST_NOISE for event in leaves):
        return None
    leaves = _in_range(leaves)
    discretization = _cell_width(leaves) * coarseness
    if discretization > _WIDEST_USEFUL_CELL:
        return None
    parts, gaussians = [], {}
    for event, count in leaves.items():
        if isinstance(event, dp_accounting.GaussianDpEvent):
            gaussians[event] = count
        else:
            # A coarse bound is worked out of coarse ratios, where there are some.
            spacing = _allocation.SPACING * min(3.0, math.sqrt(coarseness))
            parts.append((_single(event, discretization, spacing), count))
    if gaussians:
        mu = _composed_mu(gaussians)
        profile = functools.partial(_profiles.gaussian, mu)
        upper = mu * mu / 2 + 10 * mu
        losses = _discretize(profile, profile, upper, discretization)
        parts.append((BothOrders((losses,)), 1))
    return compose_orders(parts)


def _in_range(leaves):
    """The same events, with less noise where its square would overflow: a bound."""

    def less(event):
        if not hasattr(event, "event"):
            return type(event)(_MOST_NOISE)
        return attr.evolve(event, event=less(event.event))

    bounds: dict[dp_accounting.DpEvent, int] = {}
    for event, count in leaves.items():
        event = less(event) if noise_multiplier(event) > _MOST_NOISE else event
        bounds[event] = bounds.get(event, 0) + count
    return bounds


def noise_multiplier(event: dp_accounting.DpEvent) -> float:
    """Returns the multiplier of the noise of an elementary event."""
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return 0.0
    if isinstance(event, dp_accounting.LaplaceDpEvent):
        return event.noise_multiplier
    while not isinstance(event, dp_accounting.GaussianDpEvent):
        inner = getattr(event, "event", None)
        if inner is None:
            raise dp_accounting.UnsupportedEventError(
                f"No accountant here understands {event}."
            )
        event = inner
    return event.noise_multiplier


def _cell_width(leaves, most: int = _MAX_CELLS) -> float:
    """Chooses cells narrow enough to be exact and wide enough to fit in memory.

    Connect-the-Dots overstates a privacy loss that is small against a cell, step
    after step, so the width follows the standard deviation of one step's loss, about
    q sqrt(e^(1/z^2) - 1). The spread of the composed loss bounds it from below.
    """
    width, total_spread, widest_step = math.inf, 0.0, 0.0
    for event, count in leaves.items():
        deviation, step = _spread(event)
        epoch = isinstance(event, events.RandomAllocationDpEvent)
        most_cells = _MOST_CELLS_PER_EPOCH if epoch else _MOST_CELLS_PER_DEVIATION
        width = min(
            width,
            deviation / _CELLS_PER_DEVIATION,
            max(_WIDEST_CELL, deviation / most_cells),
        )
        mu = deviation * math.sqrt(count)
        total_spread += mu * mu / 2 + 12 * mu + step
        widest_step = max(widest_step, step)
    return max(
        width,
        widest_step / _MAX_STEP_CELLS if width < _WIDEST_CELL else 0.0,
        total_spread / most,
        _NARROWEST_CELL,
    )


def _spread(event) -> tuple[float, float]:
    """Returns about the deviation of a step's loss, and the largest deviation."""
    z = noise_multiplier(event)
    if isinstance(event, events.CappedPoissonSampledDpEvent):
        return _profiles.mixture_spread(
            1 / z, event.sampling_probability, event.per_person
        )
    if isinstance(event, events.RandomAllocationDpEvent):
        return _allocation.spread(z, event.steps, event.steps_per_epoch)
    q, x = _sampling_rate(event), 1 / z**2
    sampled = q * math.exp(x / 2) * math.sqrt(-math.expm1(-x)) if x < 600 else 1e300
    return min(1 / z, sampled), _largest_loss(z, q)


def _largest_loss(z: float, q: float) -> float:
    """Returns about the largest privacy loss of a step."""
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


@functools.lru_cache(maxsize=64)
def _single(event, discretization, spacing=_allocation.SPACING) -> BothOrders:
    """The losses of a step, or of an epoch whose steps depend on each other."""
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        remove, add, upper = _poisson(
            1 / noise_multiplier(event), event.sampling_probability
        )
    elif isinstance(event, events.TruncatedPoissonSampledDpEvent):
        rate = event.sampling_probability
        remove, add, upper = _truncated(event, lambda mu: _poisson(mu, rate))
    elif isinstance(event, events.CappedPoissonSampledDpEvent):
        rate, most = event.sampling_probability, event.per_person
        remove, add, upper = _truncated(
            event, lambda mu: _profiles.mixture(mu, rate, most)
        )
    elif isinstance(event, events.RandomAllocationDpEvent):
        remove, add, upper = _truncated(event, _epoch(event, spacing))
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        remove, upper = _without_replacement(event)
        add = None
    elif isinstance(event, dp_accounting.LaplaceDpEvent):
        upper, add = 1 / noise_multiplier(event), None
        remove = functools.partial(_profiles.laplace, upper)
    elif isinstance(event, dp_accounting.SampledWithReplacementDpEvent):
        remove, upper = _with_replacement(event)
        add = None
    else:
        raise dp_accounting.UnsupportedEventError(
            f"The PLD accountant does not understand {event}."
        )
    orders = [(remove, remove)] if add is None else [(remove, add), (add, remove)]
    return BothOrders(
        tuple(_discretize(*order, upper, discretization) for order in orders)
    )


def _poisson(mu: float, rate: float) -> tuple[Profile, Profile, float]:
    """Profiles of (1-q) N(0, 1) + q N(mu, 1) against N(0, 1), and the reverse.

    With D the profile of N(mu, 1) against N(0, 1), the first is
    q D(log(1 + (e^eps - 1)/q)) (Balle et al. 2018, Theorem 8), the second
    (1 - (1-q) e^eps) D(eps + log q - log(1 - (1-q) e^eps)), or 0 once that factor is.
    """

    def remove(eps):
        return rate * _profiles.gaussian(mu, _unamplified(eps, rate))

    def add(eps):
        log_rest = math.log1p(-rate) if rate < 1 else -math.inf
        left = -np.expm1(np.minimum(eps + log_rest, 1.0))
        positive = left > 0
        safe = np.where(positive, left, 1.0)
        value = safe * _profiles.gaussian(mu, eps + math.log(rate) - np.log(safe))
        return np.where(positive, value, 0.0)

    return remove, add, mu * mu / 2 + 10 * mu


def _truncated(
    event, profiles: Callable[[float], tuple[Profile, Profile, float]]
) -> tuple[Profile, Profile, float]:
    """Mixes the losses of steps with room and of steps without."""
    tau = event.overflow_probability
    mu = 1 / noise_multiplier(event)
    usual_remove, usual_add, upper = profiles(mu)
    if tau == 0:
        return usual_remove, usual_add, upper
    remove, add, upper = profiles(2 * mu)

    def mixed(usual: Profile, overflowed: Profile) -> Profile:
        return lambda eps: (1 - tau) * usual(eps) + tau * overflowed(eps)

    return mixed(usual_remove, remove), mixed(usual_add, add), upper


def _epoch(event, spacing: float) -> Callable[[float], tuple[Profile, Profile, float]]:
    """Profiles of an epoch of random allocation, of 1/z."""
    usual = 1 / noise_multiplier(event)

    def profiles(mu: float):
        # Nothing is lost where hardly a step is cut by bounding that coarsely.
        rare = mu != usual and event.overflow_probability < 1e-3
        return _allocation.profiles(
            1 / mu, event.steps, event.steps_per_epoch, spacing * (3 if rare else 1)
        )

    return profiles


def _without_replacement(event) -> tuple[Profile, float]:
    """The profile q D(log(1 + (e^eps - 1)/q)) (Balle et al. 2018, Theorem 9)."""
    remove, _, upper = _poisson(
        1 / noise_multiplier(event), event.sample_size / event.source_dataset_size
    )
    return remove, upper


def _with_replacement(event) -> tuple[Profile, float]:
    """Mixture over how often the record was drawn (Balle et al. 2018, Theorem 10).

    With p = 1 - (1 - 1/n)^m and epsilon = log(1 + p (e^eps0 - 1)), delta is at most
    sum_k P[Binomial(m, 1/n) = k] delta_k(eps0), where delta_k belongs to a record
    that occurs k times: a Gaussian with k times the sensitivity.
    """
    size, population = event.sample_size, event.source_dataset_size
    mu = 1 / noise_multiplier(event)
    drawn = stats.binom(size, 1 / population)
    included = float(drawn.sf(0))
    # Being drawn more often than `most` is taken to reveal everything.
    most = 1
    while most < size and drawn.sf(most) > _profiles.TAIL:
        most += 1
    beyond = float(drawn.sf(most))

    def profile(eps):
        base = _unamplified(eps, included)
        parts = (
            drawn.pmf(k) * _profiles.gaussian(k * mu, base) for k in range(1, most + 1)
        )
        return sum(parts) + beyond

    return profile, (most * mu) ** 2 / 2 + 10 * most * mu


def _discretize(
    forward: Profile, backward: Profile, upper: float, discretization: float
) -> Losses:
    """Connects the dots of a profile and its reverse.

    The mass at eps > 0 is a second difference of the forward profile; the mass at
    -eps is e^-eps times what the backward profile has at eps; the rest sits at 0. So
    all differences are taken where delta is small, and none cancels.
    """
    positive, infinite = _masses(forward, upper, discretization)
    mirrored, _ = _masses(backward, upper, discretization)
    losses = np.arange(1, len(mirrored) + 1) * discretization
    negative = (mirrored * np.exp(-losses))[::-1]
    rest = max(0.0, 1 - infinite - positive.sum() - negative.sum())
    masses = np.concatenate([negative, [rest], positive])
    return Losses(discretization, -len(negative), masses, infinite)


def _masses(profile: Profile, upper: float, discretization: float):
    """Returns the masses at 1, 2, ... cells above 0, and at infinity."""
    upper = _upper_end(profile, discretization, max(upper, 2 * discretization))
    size = max(2, math.ceil(upper / discretization))
    deltas = profile(np.arange(size + 1) * discretization)
    # Rounding may break the order in the last digit.
    deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    steps = np.diff(deltas)
    masses = np.empty(size)
    masses[:-1] = steps[1:] - steps[:-1] * math.exp(discretization)
    masses[:-1] /= math.expm1(discretization)
    masses[-1] = steps[-1] / math.expm1(-discretization)
    return np.maximum(masses, 0.0), float(deltas[-1])


def _upper_end(profile: Profile, low: float, high: float) -> float:
    """Returns a loss in [low, high] above which the profile is negligible."""
    grid = np.linspace(low, high, 257)
    negligible = profile(grid) <= _profiles.TAIL
    return float(grid[np.argmax(negligible)]) if negligible.any() else float(high)


def _unamplified(eps: np.ndarray, rate: float) -> np.ndarray:
    """Returns log(1 + (e^eps - 1)/rate) for eps >= 0, without overflow."""
    small = np.log1p(np.expm1(np.minimum(eps, 30.0)) / rate)
    large = eps - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-eps))
    return np.where(eps < 30.0, small, large)
