"""Evaluates weights on test examples, in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_tasks.client_data import EvaluationData
from tff_tasks.task import Task

_BATCH_SIZE = 256


class Evaluator:
    """Loss and metrics of a benchmark's network.

    Args:
      task: the benchmark.
      model: its network; evaluation overwrites its weights.
    """

    def __init__(self, task: Task, model: tf.keras.Model):
        self._task, self._model = task, model
        self._loss, self._metrics = task.loss(), task.metrics()
        self._step = tf.function(self._evaluate_batch, reduce_retracing=True)

    def _evaluate_batch(self, inputs, targets):
        predictions = self._model(inputs, training=False)
        for metric in self._metrics:
            metric.update_state(targets, predictions)
        return self._loss(targets, predictions)

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
            for batch in self._task.dataset(arrays, _BATCH_SIZE):
                count = len(batch[1])
                loss = float(self._step(*batch))
                total += loss if self._task.summed_loss else loss * count
                examples += count
        results = {metric.name: float(metric.result()) for metric in self._metrics}
        return {**results, "loss": total / max(examples, 1)}
