"""Evaluates weights on test examples, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tff_tasks import cost
from tff_tasks.client_data import Arrays, EvaluationData
from tff_tasks.task import Task

#: Rows of the model that are evaluated at once.
BATCH_SIZE = 256


def _any_length(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


class Evaluator:
    """Loss and metrics of a benchmark's network.

    Args:
      task: the benchmark.
      model: its network; evaluation overwrites its weights.
    """

    def __init__(self, task: Task, model: tf.keras.Model):
        self._task, self._model = task, model
        self._loss, self._metrics = task.loss(), task.metrics()
        self._step: Callable | None = None

    def _evaluate_batch(self, inputs, targets):
        predictions = self._model(inputs, training=False)
        for metric in self._metrics:
            metric.update_state(targets, predictions)
        return self._loss(targets, predictions)

    def batch_seconds(self, arrays: Arrays) -> float:
        """The seconds of a batch with the current weights; metrics are lost.

        Args:
          arrays: the data of the batch.
        """
        some = tuple(part[:BATCH_SIZE] for part in arrays)
        (batch,) = self._task.dataset(some, BATCH_SIZE)
        self._run(batch)  # Compiles, if nothing has yet.
        return cost.timed(lambda: self._run(batch)) * BATCH_SIZE / len(some[0])

    def _run(self, batch) -> float:
        if self._step is None:
            # Once, for batches of any size.
            specs = tf.nest.map_structure(_any_length, batch)
            self._step = tf.function(self._evaluate_batch, input_signature=specs)
        return float(self._step(*batch))

    def __call__(
        self, weights: Sequence[np.ndarray], data: EvaluationData
    ) -> dict[str, float]:
        """Loss (per example) and metrics by name; the first metric comes first."""
        for variable, value in zip(
            self._model.trainable_variables, weights, strict=True
        ):
            variable.assign(value)
        for metric in self._metrics:
            metric.reset_state()
        total, examples = 0.0, 0
        for arrays in data:
            for batch in self._task.dataset(arrays, BATCH_SIZE):
                count = len(batch[1])
                loss = self._run(batch)
                total += loss if self._task.summed_loss else loss * count
                examples += count
        results = {metric.name: float(metric.result()) for metric in self._metrics}
        return {**results, "loss": total / max(examples, 1)}
