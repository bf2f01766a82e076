"""The estimated time of a run, told before its first round.

A client's steps are timed, after everything is compiled, on test clients' examples,
which no guarantee covers; their results are not used.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from scipy import stats

from driver_kit import progress
from tff_tasks.client_data import Arrays, EvaluationData
from tff_tasks.config import RunConfig

# The most batches that are timed of a client: enough to extrapolate from.
_TIMED_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Cost:
    """The estimated time of the remaining rounds.

    Attributes:
      rounds: the remaining rounds.
      round_seconds: of a round.
      evaluations: the remaining evaluations.
      evaluation_seconds: of an evaluation, accounting apart.
      accounting_seconds: of computing epsilon once; 0 where it is not computed.
      preparation_seconds: of preparing the graphs, of which a part is over when the
        estimate is told.
    """

    rounds: int
    round_seconds: float
    evaluations: int
    evaluation_seconds: float
    accounting_seconds: float = 0.0
    preparation_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """In all."""
        each = self.evaluation_seconds + self.accounting_seconds
        rounds = self.rounds * self.round_seconds + self.evaluations * each
        return self.preparation_seconds + rounds

    def lines(self) -> list[str]:
        """The estimate in words.

        >>> for line in Cost(100, 0.5, 10, 20.0).lines():
        ...     print(line)
        About 4 min: 100 rounds of 0.5 s, 10 evaluations of 20 s.
        Evaluation takes longer than training: use --rounds_per_eval=40, or fewer
        examples (--max_eval_examples).
        """
        text = (
            f"About {progress.duration(self.seconds)}: {self.rounds} rounds of "
            f"{self.round_seconds:.2g} s, {self.evaluations} evaluations of "
            f"{self.evaluation_seconds:.2g} s"
        )
        if self.accounting_seconds >= 0.05:
            text += f", each with {self.accounting_seconds:.2g} s for its epsilon"
        if self.preparation_seconds >= 0.05:
            text += f", {self.preparation_seconds:.2g} s to prepare graphs"
        return [f"{text}.", *self._notice()]

    def _notice(self) -> list[str]:
        training = self.rounds * self.round_seconds
        evaluation = self.evaluations * self.evaluation_seconds
        if evaluation <= training or self.evaluations < 1:
            return []
        apart = math.ceil(self.evaluation_seconds / self.round_seconds)
        return [
            f"Evaluation takes longer than training: use --rounds_per_eval={apart}, or "
            "fewer",
            "examples (--max_eval_examples).",
        ]


def mean_batches(
    config: RunConfig, counts: Mapping[str, int], rows: float, cap: str
) -> float:
    """The mean number of batches that a client trains on in a round.

    Args:
      config: the settings.
      counts: examples of every client.
      rows: of the model, made of one example.
      cap: how max_elements is applied; see `tff_tasks.ordering`.
    """

    def batches(count):
        most = config.max_elements
        if cap == "before" and most is not None:
            count = min(count, most)
        count *= config.client_epochs
        if cap == "after" and most is not None:
            count = min(count, most)
        return math.ceil(count * rows / config.client_batch_size)

    return sum(map(batches, counts.values())) / max(1, len(counts))


def sample(
    config: RunConfig, data: EvaluationData, batches: float
) -> tuple[Arrays, int]:
    """Arrays to time a client with, and how many batches they are."""
    arrays, _ = data.first_chunk()
    wanted = max(1, min(_TIMED_BATCHES, round(batches)))
    size = config.client_batch_size
    rows = min(len(arrays[0]), wanted * size)
    return tuple(part[:rows] for part in arrays), math.ceil(rows / size)


def cohort_sizes(clients: int, rounds: int) -> float:
    """The expected number of different sizes of Poisson cohorts.

    Args:
      clients: in a round, on average.
      rounds: how many.

    >>> round(cohort_sizes(100, 1), 6), round(cohort_sizes(100, 1000))
    (1.0, 58)
    """
    chances = stats.poisson.pmf(range(3 * clients + 30), clients)
    return float(sum(1 - (1 - chances) ** rounds))


def timed(work: Callable[[], Any]) -> float:
    """The seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
