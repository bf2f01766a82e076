"""A privacy plan for federated rounds, from the budget and the public facts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfdpclip import _arguments
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.plan import BudgetPlan
from tfdpclip.accounting.plan_arguments import (
    check_accountant,
    check_facts,
    check_noise,
    named_matrix,
)
from tfdpclip.accounting.rounds import RoundBudget
from tfdpclip.correlated import NoiseMatrix
from tfdpclip.correlated.matrices import MOST_STEPS
from tfdpclip.federated.aggregators import ClippedMeanFactory, clipped_mean
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.available import AvailableClients, AvailableCohorts
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.poisson import Poisson
from tfdpclip.sampling.schemes import FixedSize
from tfdpclip.sampling.separated import MinSeparation

#: Ways to draw cohorts, by name.
SAMPLING = ("poisson", "random_allocation", "fixed_size", "fixed_order", "available")
# The options of an aggregator that the plan sets.
_PLANNED = ("noise_multiplier", "clients_per_round")


class PrivacyPlan(BudgetPlan):
    """The noise of federated training, from a budget and the public facts.

        plan = dpc.federated.PrivacyPlan(
            epsilon=5, delta=1e-7, population=10**6, clients_per_round=1000, rounds=500)
        process = tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn, ..., model_aggregator=plan.aggregator(secure=True))
        budget = plan.budget(client_ids)
        while budget.rounds_left:
            with budget.round() as cohort:
                state = process.next(state, [data[c] for c in cohort]).state
        print(plan)

    *Formal guarantees*

    * The noise multiplier is the least with which all rounds stay within (epsilon,
      delta) for adding or removing a client (`"poisson"`), replacing a client
      (`"fixed_size"`), or replacing a client's contributions by zero (`"fixed_order"`,
      `"available"`), if cohorts are drawn as planned. The clip rule's counts are
      included.
    * `budget` draws the cohorts as planned, and counts a round before it runs; all
      budgets of a plan share its ledger. Rounds without the budget are not counted.
    * With correlated noise the rounds are one matrix, and `budget.round(state)` makes
      sure that each round continues from the state of the round before.
    * Noise is the server's. With `noise="distributed"` the server knows the cohort, so
      that sampling does not lower the cost: such an aggregator is refused.

    Args:
      epsilon: The budget.
      delta: In (0, 1 / population).
      population: Number of clients to draw from.
      clients_per_round: Expected clients per round: the divisor.
      rounds: Number of rounds.
      sampling: `"poisson"` by default. `"random_allocation"`: each client in one random
        round of each epoch, with the number of rounds in an epoch that comes nearest to
        `clients_per_round`; less noise, most of all in few short epochs.
        `"fixed_size"`: cohorts of one size, which are faster with TensorFlow Federated
        and need about twice the noise.
        `"fixed_order"`: clients take turns, the default with correlated noise.
        `"available"`: a cohort from the available clients, with `separation` rounds
        from one round of a client to the next. The last two have no amplification.
      noise: `"independent"`, or correlated over the rounds, for the last two ways to
        draw: `"buffered"` (3 buffers), `"toeplitz"` (16 bands), `"tree"`, or a matrix
        of `dpc.correlated`.
      momentum: The momentum of the server's optimizer, for `"buffered"` and
        `"toeplitz"`, which are optimized for it; 0 by default. It costs no privacy, and
        leaves less noise in the models.
      separation: For `"available"`: the smallest number of rounds from one round of
        a client to the next.
      participations: For `"available"`: how often a client takes part, at most. By
        default as often as the separation allows.
      accountant: `"pld"` or `"rdp"`.
      ledger: A `Ledger`, or the path of its file, so that it outlives the process.
      allow_change: Whether the ledger may have earlier phases with different settings:
        of an earlier plan, or a different clip rule. All phases are counted: `epsilon`
        then covers the earlier phases and this run, and the noise is the least with
        which both stay within it.

    Attributes:
      epsilon: As given.
      delta: As given.
      population: As given.
      clients_per_round: As given.
      rounds: As given.
      noise_multiplier: z of every round.
      scheme: The scheme that draws the cohorts.
      ledger: The ledger of the rounds.

    Raises:
      ValueError: If an argument is out of range, or arguments contradict each other.

    >>> plan = PrivacyPlan(2, 1e-7, population=10**6, clients_per_round=500, rounds=100)
    >>> round(plan.noise_multiplier, 2)
    0.55
    >>> plan = plan.replace(
    ...     noise="toeplitz", sampling="available", separation=50, participations=2)
    >>> round(plan.noise_multiplier, 2)
    2.45
    """

    _RECORDS, _SIZE, _LENGTH, _STEP = "clients", "clients_per_round", "rounds", "round"

    def __init__(
        self,
        epsilon: float,
        delta: float,
        population: int,
        clients_per_round: int,
        rounds: int,
        *,
        sampling: str | None = None,
        noise: str | NoiseMatrix = "independent",
        momentum: float = 0.0,
        separation: int | None = None,
        participations: int | None = None,
        accountant: str = "pld",
        ledger: Ledger | str | os.PathLike[str] | None = None,
        allow_change: bool = False,
    ):
        arguments = dict(locals())
        momentum = check_noise(noise, momentum)
        if sampling is None:
            sampling = "poisson" if noise == "independent" else "fixed_order"
        epsilon, delta, population = check_facts(
            epsilon, delta, "population", population
        )
        most = None if noise == "independent" else MOST_STEPS
        rounds = _arguments.integer("rounds", rounds, 1, most)
        clients = _arguments.integer("clients_per_round", clients_per_round, 1)
        _arguments.choice("sampling", sampling, SAMPLING)
        check_accountant(accountant)
        if clients > population:
            raise ValueError(
                f"clients_per_round must be at most population ({population}), got "
                f"{clients}."
            )
        self.population, self.clients_per_round = population, clients
        self.rounds = rounds
        # The divisor of sums follows from the aggregator, once there is one.
        self._aggregator: ClippedMeanFactory | None = None
        scheme = _scheme(sampling, clients, population, separation, participations)
        # An epoch has an integer number of rounds, so the cohort size may differ a bit.
        self._expected: float = clients
        if isinstance(scheme, RandomAllocation):
            self._expected = scheme.expected_batch_size(population)
        self._divisor = float(self._expected)
        matrix = named_matrix(noise, rounds, scheme, momentum)
        #: The correlated noise of all rounds; None for independent noise.
        self.noise = None if matrix is None else CorrelatedNoise(matrix, rounds, scheme)
        super().__init__(
            arguments,
            epsilon=epsilon,
            delta=delta,
            population=population,
            size=self._expected,
            steps=rounds,
            scheme=scheme,
            unit="client",
            matrix=matrix,
        )

    def aggregator(self, **options: Any) -> ClippedMeanFactory:
        """A `dpc.federated.clipped_mean` with the noise of the plan.

        Args:
          **options: Arguments of `clipped_mean`: `clip`, `secure`, `variable_names`,
            `inner`; `weight_cap` and `weight_per_round` for `build_weighted_fed_avg`.

        Raises:
          ValueError: If an option contradicts the plan, or voids its guarantee.
        """
        for name in _PLANNED:
            if name in options:
                raise ValueError(
                    f"{name} follows from the plan: leave it out, or make a plan with "
                    "different settings."
                )
        asked = options.pop("noise", "central")
        if asked != "central":
            raise ValueError(
                "noise follows from the plan: PrivacyPlan(..., noise=...). "
                'noise="distributed" cannot be planned: the server knows the cohort, '
                "so that sampling does not lower the cost. Use clipped_mean(z, ..., "
                'noise="distributed") with the z for which its epsilon(delta, rounds) '
                "is the budget."
            )
        if options.get("seed") is not None:
            raise ValueError(
                "seed must be None: noise that can be repeated is not private. For "
                "experiments use dpc.federated.clipped_mean(..., seed=...)."
            )
        if "clip" in options and options["clip"] is None:
            raise ValueError(
                "clip must not be None: a client's update would have no bound. Leave "
                "clip out, or give a clip rule or a clip norm."
            )
        with self._counting():
            made = clipped_mean(
                self.noise_multiplier,
                float(self._expected),
                noise=self.noise or "central",
                **options,
            )
            self._check_counts(made.clip)
        self._aggregator = made
        self._clip, self._divisor = str(made.clip), made.divisor
        return made

    def budget(
        self,
        client_ids: Sequence[Any] | Callable[[int], Iterable[Any]],
        *,
        continued: int | None = None,
        **options: Any,
    ) -> RoundBudget:
        """Returns the budget: it draws the cohorts, and stops before epsilon is spent.

        Args:
          client_ids: The clients, `population` of them. For `"available"`, a function
            of the round that returns the ids of the available clients.
          continued: For restored correlated noise: the number of rounds it has made;
            see `RoundBudget`.
          **options: `seed` of the cohorts, for experiments only; for `"available"`,
            `state` of the cohorts of an earlier process.

        Raises:
          ValueError: If there are more or fewer clients than planned, or no
            `aggregator` was made; the budget counts the aggregator's noise.
        """
        if self._aggregator is None:
            raise ValueError(
                "The budget counts the rounds of plan.aggregator(...), which was not "
                "called yet: make the aggregator first, and give it to the process."
            )
        if isinstance(self.scheme, AvailableClients):
            cohorts = AvailableCohorts(
                self.scheme,
                _arguments.function("client_ids", client_ids, 1),
                **options,
            )
        else:
            cohorts = self.scheme.cohorts(client_ids, **options)
            self._refuse_others(cohorts)
        return RoundBudget(
            self.epsilon,
            self.delta,
            cohorts,
            aggregator=self._aggregator,
            accountant=self.accountant,
            ledger=self.ledger,
            allow_change=self._allow_change,
            continued=continued,
        )

    def _refuse_others(self, cohorts: Any) -> None:
        if cohorts.population != self.population:
            raise ValueError(
                f"client_ids has {cohorts.population} clients, the plan is for "
                f"{self.population}: PrivacyPlan(..., population={cohorts.population})."
            )

    def _refuse_unseen(self) -> None:
        """Does nothing: TFF's processes keep no count of rounds to compare with."""

    def _facts(self) -> list[tuple[str, str]]:
        noise = self.noise_multiplier / self._divisor
        facts = [
            (
                "draws",
                f"{self.scheme.describe()}: {self._expected:,.6g} clients "
                "expected in a round",
            ),
            ("runs", f"{self.rounds:,} rounds"),
            (
                "noise",
                f"multiplier {self.noise_multiplier:.4g}, {noise:.3g} clip norms on "
                f"the mean: as long as the clip with {noise**-2:,.0f} weights",
            ),
        ]
        return facts + self._facts_of_release()


def _scheme(
    sampling: str,
    clients: int,
    population: int,
    separation: int | None,
    participations: int | None,
) -> SamplingScheme:
    if sampling == "available":
        if separation is None:
            raise ValueError(
                'separation must be given for sampling="available": the smallest '
                "number of rounds from one round of a client to the next, such as "
                f"separation={max(1, population // (2 * clients))}."
            )
        return AvailableClients(clients, separation, participations)
    if separation is not None or participations is not None:
        raise ValueError(
            'separation and participations are for sampling="available"; '
            f"sampling={sampling!r} determines how often a client takes part."
        )
    if sampling == "fixed_order":
        return MinSeparation(population, clients, relation="zero_out")
    if sampling == "fixed_size":
        return FixedSize(clients, population)
    if sampling == "random_allocation":
        return RandomAllocation(max(1, round(population / clients)))
    return Poisson(clients / population)
