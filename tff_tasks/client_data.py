"""The training data of each client in a round, and the data for evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tff_tasks.config import RunConfig
from tff_tasks.ordering import example_order
from tff_tasks.sources import ClientSource
from tff_tasks.streams import stream
from tff_tasks.task import Task

Arrays = tuple[np.ndarray, ...]

# Examples that are kept in memory between evaluations, at most.
_MOST_KEPT = 200_000
# Examples that are made into arrays at once.
_CHUNK = 5000


def training_arrays(
    task: Task,
    config: RunConfig,
    source: ClientSource,
    client_id: str,
    round_num: int,
) -> Arrays:
    """A client's examples in a round: chosen, shuffled, repeated and encoded."""
    rng = stream(config.seed, "client", round_num, client_id)
    order = example_order(
        source.counts[client_id],
        rng,
        shuffle_buffer=task.paper.shuffle_buffer,
        epochs=config.client_epochs,
        max_elements=config.max_elements,
        cap=task.settings.get("cap", "before"),
    )
    examples = source.examples(client_id)
    return task.encode({name: x[order] for name, x in examples.items()}, rng)


def select_clients(client_ids: list[str], part: str) -> list[str]:
    """The test clients of a part: "test" all, "validation" a half, "rest" the other.

    The order, and with it the halves, is the same in every run.
    """
    order = np.random.default_rng(0).permutation(len(client_ids))
    shuffled = [client_ids[i] for i in order]
    half = (len(shuffled) + 1) // 2
    return {
        "test": shuffled,
        "validation": shuffled[:half],
        "rest": shuffled[half:],
    }[part]


class EvaluationData:
    """Examples to evaluate on, client after client in a fixed order.

    Args:
      task: the benchmark.
      source: the clients.
      client_ids: which of them, in order.
      max_examples: take examples until there are so many; None for all.
    """

    def __init__(
        self,
        task: Task,
        source: ClientSource,
        client_ids: list[str],
        max_examples: int | None,
    ):
        self._task, self._source = task, source
        self._plan: list[tuple[str, int]] = []
        self.num_examples = 0
        for client_id in client_ids:
            count = source.counts[client_id]
            if max_examples is not None:
                count = min(count, max_examples - self.num_examples)
            if count <= 0:
                break
            self._plan.append((client_id, count))
            self.num_examples += count
        self._kept: list[Arrays] | None = None

    def same_as(self, other: EvaluationData) -> bool:
        """Whether two objects have the same examples."""
        return self._source is other._source and self._plan == other._plan

    def __iter__(self) -> Iterator[Arrays]:
        if self._kept is not None:
            return iter(self._kept)
        if self.num_examples <= _MOST_KEPT:
            self._kept = list(self._chunks())
            return iter(self._kept)
        return self._chunks()

    def first_chunk(self) -> tuple[Arrays, int]:
        """The first chunk, and its number of examples."""
        size = 0
        for _, count in self._plan:
            size += count
            if size >= _CHUNK:
                break
        return next(iter(self)), size

    def _chunks(self) -> Iterator[Arrays]:
        parts, size = [], 0
        for client_id, count in self._plan:
            examples = self._source.examples(client_id)
            parts.append({name: x[:count] for name, x in examples.items()})
            size += count
            if size >= _CHUNK:
                yield self._join(parts)
                parts, size = [], 0
        if parts:
            yield self._join(parts)

    def _join(self, parts) -> Arrays:
        return self._task.encode(
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        )
