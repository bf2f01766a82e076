"""Times rounds of a federated task, and `fit` on the same batches, in one process.

    python -m benchmarks.federated_tasks_worker spec.json results.json

`benchmarks.federated_tasks` starts it; `benchmarks.timing` documents the files. "plain"
is `fit` of the task's network on the batches of a round, with the same losses and no
metrics; "local" and "tff" are rounds of the two engines, from the clients' arrays to
the new model; "tff_own" is a round of TensorFlow Federated's own weighted averaging,
without clipping or noise; "evaluation" evaluates as many examples as the round trains
on.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import tfdpclip as dpc
from benchmarks import task_data, timing
from driver_kit import command_line
from driver_kit.lazy import tf
from tff_tasks import client_data, command, engine_local, evaluation
from tff_tasks.client_data import Arrays
from tff_tasks.config import RunConfig
from tff_tasks.registry import task_class
from tff_tasks.task import Task

_SMALL_RATE = 1e-3  # No divergence: numbers that are not finite take a different time.


class Round:
    """A cohort of a task and the variants of a round.

    Args:
      spec: the measurement.
    """

    def __init__(self, spec: timing.Spec):
        clients, examples = spec.batch_size, spec.options["examples"]
        with tempfile.TemporaryDirectory() as folder:
            flags = task_data.write(spec.model, pathlib.Path(folder), clients, examples)
            flags += [
                f"--clients_per_round={clients}",
                f"--client_learning_rate={_SMALL_RATE}",
                "--seed=1",
            ]
            self.config: RunConfig = command.config_from(spec.model, flags)
            self.task: Task = task_class(spec.model)(self.config.options)
            source = self.task.load(self.config.data_dir)["train"]
            self.clients: list[Arrays] = [
                client_data.training_arrays(self.task, self.config, source, client, 1)
                for client in source.client_ids[:clients]
            ]
            self._source = source
            self._examples = sum(source.counts[c] for c in source.client_ids[:clients])
            self._data = client_data.EvaluationData(
                self.task, source, source.client_ids, self._examples
            )
            for _ in self._data:  # Read while the files are there.
                pass

    @functools.cached_property
    def _initial(self) -> list[Any]:
        return [v.numpy() for v in self.task.build_model().trainable_variables]

    def datasets(self) -> list[tf.data.Dataset]:
        """Every client's batches."""
        size = self.config.client_batch_size
        return [self.task.dataset(arrays, size) for arrays in self.clients]

    @property
    def parameters(self) -> int:
        """How many the network has."""
        return sum(int(w.size) for w in self._initial)

    def fit(self) -> Callable[[], None]:
        """An epoch of the same batches."""
        model = self.task.build_model()
        model.compile(tf.keras.optimizers.SGD(_SMALL_RATE), self.task.loss())
        joined = functools.reduce(tf.data.Dataset.concatenate, self.datasets())
        batches = joined.cache().prefetch(tf.data.AUTOTUNE)
        return lambda: model.fit(batches, verbose=0)

    def engine(self, kind: Any) -> Callable[[], None]:
        """A round of an engine."""
        made = kind(self.task, self.config, self._initial, self._spec)
        return lambda: made.run_round(self.clients, 1)

    @property
    def _spec(self):
        return self.datasets()[0].element_spec

    def tff_own(self) -> Callable[[], None]:
        """A round of TensorFlow Federated's weighted averaging."""
        import tensorflow_federated as tff

        def model_fn():
            return tff.learning.models.from_keras_model(
                self.task.build_model(),
                self.task.loss(),
                self._spec,
                metrics=self.task.metrics(),
            )

        process = tff.learning.algorithms.build_weighted_fed_avg(
            model_fn,
            tff.learning.optimizers.build_sgdm(_SMALL_RATE),
            tff.learning.optimizers.build_sgdm(1.0, 0.9),
        )
        state = [process.initialize()]

        def step():
            state[0] = process.next(state[0], self.datasets()).state

        return step

    def evaluation(self) -> Callable[[], None]:
        """An evaluation of as many examples."""
        evaluator = evaluation.Evaluator(self.task, self.task.build_model())
        return lambda: evaluator(self._initial, self._data)


def makers(spec: timing.Spec) -> tuple[dict[str, Callable], int]:
    """The functions that make a step, by variant, and the number of parameters."""
    made = Round(spec)

    def tff_engine():
        from tff_tasks.engine_tff import TffEngine

        return made.engine(TffEngine)

    known = {
        "plain": made.fit,
        "local": lambda: made.engine(engine_local.LocalEngine),
        "tff": tff_engine,
        "tff_own": made.tff_own,
        "evaluation": made.evaluation,
    }
    unknown = set(spec.variants) - set(known)
    if unknown:
        raise ValueError(
            f"variants must be of {', '.join(known)}, got {', '.join(unknown)}."
        )
    # Building a network within a federated computation makes existing networks
    # unusable, so these variants come first.
    first = {
        name: known[name]() for name in ("tff", "tff_own") if name in spec.variants
    }

    def maker(name):
        return (lambda: first[name]) if name in first else known[name]

    return {name: maker(name) for name in spec.variants}, made.parameters


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        if not command_line.wants_help(sys.argv):
            stack.enter_context(dpc.federated.local_context())
        timing.work(sys.argv[1:], makers, __doc__)
