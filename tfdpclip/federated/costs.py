"""The privacy cost of rounds of a clipped mean."""

from __future__ import annotations

from typing import Any

import dp_accounting

from tfdpclip import _arguments, accounting
from tfdpclip.accounting.round_noise import RoundNoise
from tfdpclip.federated import discrete
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.sampling.available import AvailableClients


class RoundCosts:
    """Base of aggregators: the privacy cost that follows from their noise.

    Attributes:
      noise_multiplier: z.
      noise: `"central"`, `"distributed"`, or correlated noise.
      correlated: Correlated noise; None for independent noise.
      clip: The clip rule.
      minimum_clients: For distributed noise: the number of shares that suffice.
      seed: The seed of reproducible noise, or None.
    """

    noise_multiplier: float
    noise: str | CorrelatedNoise
    correlated: CorrelatedNoise | None
    clip: Any
    minimum_clients: int | None
    seed: int | None

    @property
    def private(self) -> bool:
        """Whether results are private: there is noise, and no seed to repeat it."""
        return self.noise_multiplier > 0 and self.seed is None

    @property
    def round_noise(self) -> RoundNoise:
        """The noise of a round, as far as its cost depends on it."""
        run = None if self.correlated is None else tuple(self.correlated.digest)
        place = "distributed" if self.noise == "distributed" else "central"
        return RoundNoise(self.noise_multiplier, place, run, self.seed is not None)

    @property
    def accountant(self) -> str | None:
        """The only accountant with a bound for the noise; None if there are several."""
        return "rdp" if self.noise == "distributed" else None

    def of_a_phase(self, cohorts: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The settings of a ledger's phase for such cohorts, and its assumptions.

        Correlated noise has its own `of_a_phase`.

        Args:
          cohorts: `scheme.cohorts(client_ids)`, or `AvailableCohorts`.
        """
        scheme = cohorts.scheme
        seed = getattr(cohorts, "seed", None) if self.seed is None else self.seed
        told = dict(noise_multiplier=self.noise_multiplier, clip=self.clip, seed=seed)
        if self.noise != "distributed":
            return {**told, "sampling": scheme}, ()
        assumed = (
            f"shares of discrete noise of at least {self.minimum_clients} honest "
            "clients are in every sum, which is secure",
        )
        relation = scheme.neighboring_relation
        added = relation is accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        if scheme.amplified or added:
            drawn = f"cohorts ({scheme.describe()}) are known to the server"
            assumed += (f"{drawn}: sampling does not lower the cost",)
            scheme = AvailableClients(cohorts.population, separation=1)
        return {**told, "sampling": scheme}, assumed

    def event(self, rounds: int = 1) -> dp_accounting.DpEvent:
        """The privacy event of rounds, without amplification by sampling of clients.

        With correlated noise, the event of its matrix and scheme. For the sampled event
        with independent central noise, give `noise_multiplier` and the sampling scheme
        to the functions of `dpc.accounting`, or the factory to `RoundBudget`. With
        distributed noise, privacy is against a server that knows the sample, as in
        the accounting of `RoundBudget`.

        Args:
          rounds: the number of rounds.

        Returns:
          A `DpEvent`: Gaussian for central noise, `ZeroConcentratedDpEvent` for
          distributed noise; `NonPrivateDpEvent` if the factory is not private.
        """
        rounds = _arguments.integer("rounds", rounds)
        if not self.private:
            single = dp_accounting.NonPrivateDpEvent()
        elif self.correlated is not None:
            run = self.correlated
            return accounting.correlated_event(
                run.matrix,
                self.noise_multiplier,
                rounds,
                run.sampling,
                horizon=run.steps,
                unit="client",
            )
        else:
            single = self._private_event()
        return dp_accounting.SelfComposedDpEvent(single, rounds)

    def _private_event(self):
        if self.noise == "distributed":
            return discrete.ZeroConcentratedDpEvent(1 / (2 * self.noise_multiplier**2))
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def epsilon(self, delta: float, rounds: int = 1) -> float:
        """The epsilon of rounds, without amplification by sampling of clients.

        For adding or removing a client with central noise; for replacing a client's
        contribution by zeros with distributed noise; for the neighbours of its scheme
        with correlated noise.

        Args:
          delta: in (0, 1).
          rounds: the number of rounds.

        Returns:
          The epsilon; infinity if the factory is not private.
        """
        rounds = _arguments.integer("rounds", rounds)
        if self.private and self.noise == "distributed":
            rho = rounds / (2 * self.noise_multiplier**2)
            return discrete.zcdp_epsilon(rho, delta)
        return accounting.event_epsilon(self.event(rounds), delta)
