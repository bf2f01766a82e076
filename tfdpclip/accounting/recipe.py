"""How large a cohort a privacy target needs: the recipe of the adaptive-clip paper."""

import dataclasses
import math
from typing import Any

from scipy import optimize

from tfdpclip.accounting import _validate, calibration, noise_split

# The paper's choice for the noise on the unclipped count: a twentieth of the cohort.
_COUNT_FRACTION = 1 / 20


@dataclasses.dataclass(frozen=True)
class CohortPlan:
    """What `cohort_for` answers.

    Attributes:
      clients_per_round: Expected clients per round (or records per step), m.
      noise_multiplier: z, what the accountant is given.
      count_stddev: Noise on the sum of unclipped indicators, m / 20.
      gradient_noise_multiplier: z_g, what the sum of updates gets.
      scale: alpha: how many times larger than the trial everything is.
      epsilon: What the rounds spend.
      delta: At this delta.
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
    multiplier that does not hurt with a small cohort. What utility feels is the noise
    on the *average*, z / m. Multiplying m, z and the count's noise by the same alpha
    keeps it and buys privacy; take the smallest alpha that reaches the target.

    Args:
      epsilon: The target; positive.
      delta: In (0, 1).
      population: Number of clients (or records).
      rounds: Number of rounds (or steps).
      noise_multiplier: z of the trial.
      clients_per_round: m of the trial.
      sampling: `"poisson"` (add or remove one) or `"fixed_size"` (replace one).
      accountant: `"pld"` or `"rdp"`.
      sensitivity: Overrides the sensitivity, in clip norms; 1.0 with `"fixed_size"`
        and `"rdp"` is the paper's own convention.

    Returns:
      The plan.

    Raises:
      ValueError: If an argument is out of range, if the trial's noise leaves no room
        for the count, or if the population is too small: then the message says about
        how many would do.

    >>> plan = cohort_for(2.0, 1e-6, 1_000_000, 1000, 0.1, 100)
    >>> plan.clients_per_round, round(plan.noise_multiplier, 2)
    (564, 0.56)
    """
    epsilon = _validate.positive("epsilon", epsilon)
    delta = _validate.delta(delta)
    population = _validate.integer("population", population, minimum=1)
    rounds = _validate.integer("rounds", rounds, minimum=1)
    z = _validate.positive("noise_multiplier", noise_multiplier)
    m = _validate.integer("clients_per_round", clients_per_round, minimum=1)
    _validate.choice("sampling", sampling, ("poisson", "fixed_size"))
    _validate.choice("accountant", accountant, ("pld", "rdp"))
    if m > population:
        raise ValueError(
            f"clients_per_round must be at most the population, got {m} of "
            f"{population}."
        )
    noise_split.split_noise_multiplier(z, [m * _COUNT_FRACTION])  # Is it feasible?

    def spent(scale: float, people: int, how: str) -> float:
        scheme = _scheme(sampling, math.ceil(scale * m - 1e-9), people)
        if scheme is None or scale * z < 1e-3:
            return math.inf
        return calibration.epsilon(
            scale * z, rounds, scheme, delta, how, sensitivity=sensitivity
        )

    upper = _enough(lambda a: spent(a, population, "rdp"), epsilon, population / m)
    if upper is None:
        upper = _enough(
            lambda a: spent(a, population, accountant), epsilon, population / m
        )
    if upper is None:
        raise ValueError(_too_small(spent, epsilon, population, m))
    scale = _smallest(
        lambda a: spent(a, population, accountant), epsilon, upper, population / m
    )
    cohort = math.ceil(scale * m - 1e-9)
    stddev = cohort * _COUNT_FRACTION
    return CohortPlan(
        clients_per_round=cohort,
        noise_multiplier=scale * z,
        count_stddev=stddev,
        gradient_noise_multiplier=noise_split.split_noise_multiplier(
            scale * z, [stddev]
        ),
        scale=scale,
        epsilon=spent(scale, population, accountant),
        delta=delta,
        population=population,
        rounds=rounds,
        sampling=_scheme(sampling, cohort, population),
        accountant=accountant,
    )


def _scheme(sampling: str, cohort: int, population: int) -> Any:
    # The schemes live one level up, in the package that draws.
    from tfdpclip.sampling import schemes

    if cohort > population:
        return None
    if sampling == "poisson":
        return schemes.Poisson(cohort / population)
    return schemes.FixedSize(cohort, population)


def _enough(spent, epsilon: float, largest: float) -> float | None:
    """Returns the first power of two (or the largest scale) that is enough."""
    scale = 2.0**-10
    while scale < largest:
        if spent(scale) <= epsilon:
            return scale
        scale *= 2
    return largest if spent(largest) <= epsilon else None


def _smallest(spent, epsilon: float, upper: float, largest: float) -> float:
    """Returns the smallest scale that reaches the target, given one that does."""
    lower = upper / 2
    while spent(lower) <= epsilon and lower > 2.0**-12:
        lower, upper = lower / 2, lower

    def gap(log_scale: float) -> float:
        value = spent(math.exp(log_scale))
        return 50.0 if value == math.inf else math.log(value / epsilon)

    root = optimize.brentq(gap, math.log(lower), math.log(upper), xtol=1e-5)
    scale = math.exp(root)
    while spent(scale) > epsilon:  # The cohort is a whole number: small jumps.
        scale = min(scale * (1 + 2e-5), largest)
    return scale


def _too_small(spent, epsilon: float, population: int, m: int) -> str:
    best = min(
        (spent(2.0**k, population, "rdp"), 2.0**k)
        for k in range(-10, max(1, math.ceil(math.log2(population / m))))
    )
    message = (
        f"population = {population} is too small for epsilon = {epsilon}: scaling the "
        f"cohort up, with the noise, reaches no less than about {best[0]:.3g}."
    )
    people = population
    for _ in range(40):
        people *= 2
        if (
            _enough(lambda a, n=people: spent(a, n, "rdp"), epsilon, people / m)
            is not None
        ):
            low, high = people // 2, people
            while high > 1.05 * low:
                middle = (low + high) // 2
                reached = _enough(
                    lambda a, n=middle: spent(a, n, "rdp"), epsilon, middle / m
                )
                low, high = (low, middle) if reached is not None else (middle, high)
            return f"{message} A population of about {high:.2g} would do."
    return message
