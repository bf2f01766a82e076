"""The cohort that a privacy target requires: the recipe of the adaptive-clip paper."""

import dataclasses
import math
from typing import Any

from tfdpclip import _arguments
from tfdpclip.accounting import accountants, noise_split, search
from tfdpclip.sampling import poisson, schemes

# The paper's choice for the noise on the unclipped count: a twentieth of the cohort.
_COUNT_DIVISOR = 20


@dataclasses.dataclass(frozen=True)
class CohortPlan:
    """The result of `cohort_for`.

    Attributes:
      clients_per_round: Expected clients per round (or records per step), m.
      noise_multiplier: z, as given to the accountant.
      count_stddev: Noise on the sum of unclipped indicators: m / 20, or the noise of
        `dpc.QuantileClip` in a smaller cohort.
      gradient_noise_multiplier: z_g, the noise multiplier of the sum of updates.
      scale: alpha, at least 1: the factor from the trial to the plan. 1 if the trial
        spends no more than the target.
      epsilon: The epsilon of all rounds.
      delta: The delta of the guarantee.
      population: Number of clients.
      rounds: Number of rounds.
      sampling: The scheme that was accounted for.
      accountant: The accountant.
    """

    clients_per_round: int
    noise_multiplier: float
    count_stddev: float
    gradient_noise_multiplier: float
    scale: float
    epsilon: float
    delta: float
    population: int
    rounds: int
    sampling: Any
    accountant: str


def cohort_for(
    epsilon: float,
    delta: float,
    population: int,
    rounds: int,
    noise_multiplier: float,
    clients_per_round: int,
    *,
    sampling: str = "poisson",
    accountant: str = "pld",
    sensitivity: float | None = None,
) -> CohortPlan:
    """Scales a small trial up to a privacy target.

    The recipe of Andrew et al. 2021, section 4: find, without privacy in mind, a noise
    multiplier that does not hurt with a small cohort. Utility depends on the noise
    of the *average*, z / m. Multiplying m, z and the count's noise by the same alpha
    keeps this noise and buys privacy; take the smallest alpha of 1 or more that reaches
    the target. Below 1 the trial is no evidence: smaller cohorts lose more utility than
    by the noise on their average. So if the trial spends no more than the target, the
    trial is the plan, with its own `epsilon`; less noise, or a smaller trial, would use
    the rest of the target.

    Args:
      epsilon: The target; positive.
      delta: In (0, 1).
      population: Number of clients (or records).
      rounds: Number of rounds (or steps).
      noise_multiplier: z of the trial.
      clients_per_round: m of the trial.
      sampling: `"poisson"` (add or remove one) or `"fixed_size"` (replace one).
      accountant: `"pld"` or `"rdp"`.
      sensitivity: Replaces the sensitivity, in clip norms; 1.0 with `"fixed_size"`
        and `"rdp"` is the paper's own convention.

    Returns:
      The plan.

    Raises:
      ValueError: If an argument is out of range, if the trial's noise leaves no room
        for the count, or if the population is too small: then the message gives a
        sufficient population.

    >>> plan = cohort_for(2.0, 1e-6, 10**6, 1000, 0.1, 100, accountant="rdp")
    >>> plan.clients_per_round, round(plan.noise_multiplier, 2)
    (685, 0.68)
    >>> enough = cohort_for(2.0, 1e-6, 10**6, 1000, 1.0, 2000, accountant="rdp")
    >>> enough.clients_per_round, enough.scale, enough.epsilon < 2.0
    (2000, 1.0, True)
    """
    epsilon = _arguments.positive("epsilon", epsilon)
    delta = _arguments.delta(delta)
    population = _arguments.integer("population", population, minimum=1)
    rounds = _arguments.integer("rounds", rounds, minimum=1)
    z = _arguments.positive("noise_multiplier", noise_multiplier)
    m = _arguments.integer("clients_per_round", clients_per_round, minimum=1)
    _arguments.choice("sampling", sampling, ("poisson", "fixed_size"))
    _arguments.choice("accountant", accountant, ("pld", "rdp"))
    if m > population:
        raise ValueError(
            f"clients_per_round must be at most the population, got {m} of "
            f"{population}."
        )
    noise_split.split_noise_multiplier(z, _count_stddevs(m, z))  # Raises if infeasible.

    def spent(scale: float, people: int, how: str, coarseness: float = 1.0) -> float:
        scheme = _scheme(sampling, math.ceil(scale * m - 1e-9), people)
        if scheme is None or scale * z < 1e-3:
            return math.inf
        event = scheme.event(scale * z, rounds, sensitivity=sensitivity)
        return accountants.epsilon(event, delta, how, coarseness)

    scale = 1.0
    if spent(scale, population, accountant) > epsilon:
        scale = _least_scale(spent, epsilon, population, m, accountant)
    cohort = math.ceil(scale * m - 1e-9)
    stddevs = _count_stddevs(cohort, scale * z)
    return CohortPlan(
        clients_per_round=cohort,
        noise_multiplier=scale * z,
        count_stddev=stddevs[0],
        gradient_noise_multiplier=noise_split.split_noise_multiplier(
            scale * z, stddevs
        ),
        scale=scale,
        epsilon=spent(scale, population, accountant),
        delta=delta,
        population=population,
        rounds=rounds,
        sampling=_scheme(sampling, cohort, population),
        accountant=accountant,
    )


def _count_stddevs(cohort: int, z: float) -> tuple[float, ...]:
    """The count noise of `dpc.QuantileClip`."""
    return noise_split.enlarge_default_noise(
        (cohort / _COUNT_DIVISOR,), (True,), cohort, z
    )


def _least_scale(spent, epsilon: float, population: int, m: int, how: str) -> float:
    """Returns the least scale that reaches the target, if scale 1 does not."""
    largest = population / m
    upper = _sufficient_scale(lambda a: spent(a, population, "rdp"), epsilon, largest)
    if upper is None:
        upper = _sufficient_scale(lambda a: spent(a, population, how), epsilon, largest)
    if upper is None:
        raise ValueError(_too_small(spent, epsilon, population, m))
    return search.least_noise(
        lambda a, coarseness=1.0: spent(a, population, how, coarseness),
        epsilon,
        how == "pld",
        bracket=_bracket_scale(
            lambda a: spent(a, population, how, 8.0), epsilon, upper
        ),
    )


def _scheme(sampling: str, cohort: int, population: int) -> Any:
    if cohort > population:
        return None
    if sampling == "poisson":
        return poisson.Poisson(cohort / population)
    return schemes.FixedSize(cohort, population)


def _sufficient_scale(spent, epsilon: float, largest: float) -> float | None:
    """Returns the first doubling of 1 (or `largest`) that is enough."""
    scale = 1.0
    while scale < largest:
        if spent(scale) <= epsilon:
            return scale
        scale *= 2
    return largest if spent(largest) <= epsilon else None


def _bracket_scale(spent, epsilon: float, upper: float):
    """A bracket whose lower end, 1 or more, spends too much."""
    lower = max(1.0, upper / 2)
    while lower > 1 and spent(lower) <= epsilon:
        lower, upper = max(1.0, lower / 2), lower
    return lower, upper


def _too_small(spent, epsilon: float, population: int, m: int) -> str:
    doublings = math.ceil(math.log2(population / m))
    scales = [*(2.0**k for k in range(doublings)), population / m]
    best = min(spent(scale, population, "rdp") for scale in scales)
    message = (
        f"population = {population} is too small for epsilon = {epsilon}: scaling the "
        f"cohort up, with the noise, reaches no less than about {best:.3g}."
    )

    def enough(people: int) -> bool:
        return (
            _sufficient_scale(lambda a: spent(a, people, "rdp"), epsilon, people / m)
            is not None
        )

    people = population
    for _ in range(40):
        people *= 2
        if enough(people):
            low, high = people // 2, people
            while high > 1.05 * low:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            # Two digits, rounded up, so that the number in the message is sufficient.
            unit = 10 ** (len(str(high)) - 2)
            high = -(-int(1.05 * high) // unit) * unit
            return f"{message} A population of about {high} would do."
    return message
