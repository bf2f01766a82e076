"""The privacy cost of a run, and its meaning in a larger population."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
from typing import Any

from tfdpclip import accounting, sampling
from tff_tasks.config import RunConfig

LEDGER = "privacy.json"


class Spending:
    """Counts rounds and states their privacy cost.

    Without a seed, the ledger is a file: a round is counted in it before it begins, and
    counts however it ends. A round that is run again, after a crash, counts again and
    has a new cohort. With a seed nothing is private; a round that is run again is the
    same round, and the ledger, in memory, has the cost of the run without the seed.

    With distributed noise, privacy is against a server that sees the secure sums and
    knows the participants, so that sampling of clients does not help; see
    `tfdpclip.federated.distributed`.

    Args:
      config: the settings.
      client_ids: the population.
      directory: of the run.
      aggregator: for distributed noise, which only it can account for.
      kept: the number of rounds that restored correlated noise has made. The noise
        goes on (`goes_on`) if the ledger is at the same round; otherwise a new matrix
        begins.
    """

    def __init__(
        self,
        config: RunConfig,
        client_ids: list[str],
        directory: pathlib.Path,
        aggregator: Any = None,
        kept: int | None = None,
    ):
        self._config = config
        self.population = len(client_ids)
        self.delta = config.delta or min(0.5, self.population**-1.1)
        self.scheme = config.scheme(self.population)
        self.cohorts = self.scheme.cohorts(client_ids, seed=config.seed)
        self._aggregator = aggregator if config.noise == "distributed" else None
        path = None if config.seed is not None else directory / LEDGER
        self.ledger = accounting.Ledger.open(path, self.delta, config.accountant)
        #: Correlated noise; None for independent noise.
        self.correlated = config.correlated(self.population)
        phase = {} if self.correlated is None else self.correlated.of_a_phase
        self._phase = dict(
            noise_multiplier=config.noise_multiplier,
            sampling=self.cohorts,
            unit="client",
            clip=str(config.clip_rule() or "none"),
            seed=config.seed,
            **phase,
        )
        #: Whether correlated noise that was kept goes on.
        self.goes_on = False
        self._begin(kept)

    def _begin(self, kept: int | None) -> None:
        if kept is not None:
            if self._config.seed is None:
                with contextlib.suppress(accounting.PrivacyMismatchError):
                    # The ledger refuses to continue if it has further rounds.
                    self.ledger.begin(**self._phase, continued=kept)
                    self.goes_on = True
                    return
            else:
                self.goes_on = True  # A round that is run again is the same.
        self.ledger.begin(**self._phase)

    def resume(self, rounds: int) -> None:
        """Says that so many rounds are done.

        Raises:
          PrivacyMismatchError: if the ledger knows of fewer.
        """
        if self._config.seed is not None:
            self.ledger.record(rounds)
            if self.correlated is not None and not self.goes_on:
                self.ledger.begin(**self._phase)
        elif self.ledger.steps < rounds:
            raise accounting.PrivacyMismatchError(
                f"{self.ledger.path} counts {self.ledger.steps} rounds, but there is a "
                f"checkpoint of round {rounds}: it is older than the run. Restore the "
                "latest; with this one, privacy that was spent would be forgotten."
            )

    def rounds_left(self) -> int | None:
        """How many rounds the budget still allows; None without a budget."""
        budget = self._config.epsilon_budget
        if budget is None:
            return None
        if self._aggregator is None:
            return self.ledger.steps_left(budget)
        left = 0
        while self._epsilon(self.rounds + left + 1) <= budget:
            left += 1
        return left

    @property
    def rounds(self) -> int:
        """Rounds that count."""
        return self.ledger.steps + self.ledger.reserved

    def cohort(self, round_num: int) -> list[str]:
        """Counts a round and draws its clients.

        Args:
          round_num: counted from 1; decides only with a seed.
        """
        number = round_num if self._config.seed is not None else self.rounds
        self.ledger.reserve()
        return self.cohorts(number)

    def done(self) -> None:
        """Says that the round of the last cohort ended."""
        self.ledger.record()

    @property
    def epsilon(self) -> float:
        """The run's epsilon, even with a seed; infinite without noise."""
        if self._aggregator is None and self._config.seed is None:
            return self.ledger.epsilon()
        # Many runs of a sweep ask the same.
        return self.forecast(0)

    def forecast(self, rounds: int) -> float:
        """Epsilon after so many more rounds; infinite without noise."""
        config, rounds = self._config, self.rounds + rounds
        if self._aggregator is not None and config.noise_multiplier > 0:
            return self._epsilon(rounds)
        settings = self.delta, config.accountant
        return _epsilon(
            self.scheme, config.noise_multiplier, rounds, *settings, self.correlated
        )

    def _epsilon(self, rounds: int) -> float:
        if not rounds:
            return 0.0
        return self._aggregator.epsilon(self.delta, rounds)

    @property
    def private(self) -> bool:
        """Whether there is noise and no seed."""
        return self._config.noise_multiplier > 0 and self._config.seed is None

    def statement(self) -> str:
        """The privacy statement for the actual population."""
        if self._aggregator is None:
            return str(self.ledger.statement())
        if not self.private:
            reason = "a seed was fixed" if self._config.seed is not None else "no noise"
            return f"not private: {reason}."
        return (
            f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy against a "
            "server that sees the secure sums and knows who takes part.\n"
            "  neighbours:  replace one client's update by zeros\n"
            f"  steps:       {self.rounds}\n"
            f"  noise:       {self._config.noise_multiplier:g}, shared by at least "
            f"{self._config.minimum_clients} clients\n"
            "  assuming     the server follows the protocol and sampling does not help"
        )


def check_ledger_is_there(config: RunConfig, directory: pathlib.Path) -> None:
    """Raises if a run that is to continue has lost its ledger.

    Args:
      config: the settings.
      directory: of the run.

    Raises:
      PrivacyMismatchError: if there is no ledger file and there must be one.
    """
    path = directory / LEDGER
    if config.seed is None and not path.exists():
        raise accounting.PrivacyMismatchError(
            f"{path} is missing, so what the run has spent is not known. Restore it, "
            "or begin another run with another --output_dir."
        )


@functools.lru_cache(maxsize=1000)
def _epsilon(scheme, noise_multiplier, rounds, delta, accountant, correlated):
    if correlated is None:
        event = scheme.event(noise_multiplier, rounds, unit="client")
    else:
        event = accounting.correlated_event(
            correlated.matrix,
            noise_multiplier,
            rounds,
            scheme,
            horizon=correlated.steps,
            unit="client",
        )
    return accounting.event_epsilon(event, delta, accountant)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The cost of a run with noise and cohort scaled up in a larger population.

    Attributes:
      population: how many clients.
      delta: population^-1.1.
      scale: the factor on clients per round, z and the noise on counts. The noise on
        the average, and with it utility, stays the same.
      noise_multiplier: z, scaled.
      clients_per_round: m, scaled.
      rounds: how many.
      paper_epsilon: as in Table 1: fixed-size cohorts, replace one, Renyi accounting,
        and sensitivity C, which is that of add or remove.
      epsilon: Poisson cohorts, add or remove one client, the run's accountant.
    """

    population: int
    delta: float
    scale: float
    noise_multiplier: float
    clients_per_round: int
    rounds: int
    paper_epsilon: float
    epsilon: float


@functools.lru_cache(maxsize=1000)
def imagine(
    noise_multiplier: float,
    clients_per_round: int,
    rounds: int,
    population: int,
    *,
    target: float = 5.0,
    accountant: str = "pld",
    scaled_clients: int | None = None,
) -> Reading | None:
    """Scales a run as Table 1 of Andrew et al. (2021) does.

    Args:
      noise_multiplier: z of the run.
      clients_per_round: m of the run.
      rounds: T.
      population: the imagined number of clients.
      target: epsilon to scale to, in the paper's convention.
      accountant: for the reading that is not the paper's.
      scaled_clients: clients per round after scaling; None finds the least for the
        target.

    Returns:
      The reading; None without noise, or if no scale reaches the target.
    """
    if noise_multiplier == 0 or rounds == 0 or clients_per_round > population:
        return None
    delta = population**-1.1
    if scaled_clients is None:
        try:
            scaled_clients = accounting.cohort_for(
                target,
                delta,
                population,
                rounds,
                noise_multiplier,
                clients_per_round,
                sampling="fixed_size",
                accountant="rdp",
                sensitivity=1.0,
            ).clients_per_round
        except ValueError:
            return None
    scale = scaled_clients / clients_per_round
    z = scale * noise_multiplier
    fixed = sampling.FixedSize(scaled_clients, population)
    return Reading(
        population=population,
        delta=delta,
        scale=scale,
        noise_multiplier=z,
        clients_per_round=scaled_clients,
        rounds=rounds,
        paper_epsilon=accounting.event_epsilon(
            fixed.event(z, rounds, unit="client", sensitivity=1.0), delta, "rdp"
        ),
        epsilon=accounting.epsilon(
            z,
            rounds,
            sampling.Poisson(scaled_clients / population),
            delta,
            accountant=accountant,
        ),
    )


def text_of(epsilon: float) -> str:
    """Epsilon for people."""
    return "infinite" if math.isinf(epsilon) else f"{epsilon:.4g}"
