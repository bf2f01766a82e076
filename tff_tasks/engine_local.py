"""Federated averaging in this process: one client after the other, in one graph.

The same arithmetic as the process of TensorFlow Federated (a test holds them
together), without its shipping of computations and data, which dominates small
networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import accounting
from tff_tasks.client_data import Arrays
from tff_tasks.config import RunConfig
from tff_tasks.streams import stream
from tff_tasks.task import Task


class LocalEngine:
    """Runs rounds in this process. Noise is central.

    Args:
      task: the benchmark.
      config: the settings.
      weights: initial trainable weights.
      spec: the type of a client's batch; not needed here.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        weights: Sequence[np.ndarray],
        spec: Any = None,
    ):
        del spec
        self._task, self._config = task, config
        self._model = task.build_model()
        self._loss = task.loss()
        self._variables = self._model.trainable_variables
        self._weights = [np.array(w) for w in weights]
        self._velocity = [np.zeros_like(w) for w in self._weights]
        rule = config.clip_rule()
        self._rule = rule and rule.bind([v.name for v in self._variables])
        self._clip_state = self._rule.initial_state() if self._rule else ()
        groups = self._rule.assignment if self._rule else None
        self._groups = groups or (0,) * len(self._weights)
        self._flat = groups is None
        z = config.noise_multiplier
        m = config.clients_per_round
        self._count_stddevs = (
            self._rule.count_stddevs(m, private=z > 0) if self._rule else ()
        )
        self._sum_multiplier = (
            accounting.split_noise_multiplier(z, self._count_stddevs) if z else 0.0
        )
        self._initial = [tf.Variable(w, trainable=False) for w in self._weights]
        self._sums = [tf.Variable(tf.zeros_like(w)) for w in self._weights]
        self._counts = tf.Variable(tf.zeros([len(self._count_stddevs)]))
        self._train = tf.function(self._train_client, reduce_retracing=True)

    @property
    def weights(self) -> list[np.ndarray]:
        """The current trainable weights."""
        return self._weights

    @property
    def sum_multiplier(self) -> float:
        """z_g: the noise multiplier of the sum."""
        return self._sum_multiplier

    @property
    def count_stddevs(self) -> tuple[float, ...]:
        """Noise on the sums of indicators."""
        return tuple(self._count_stddevs)

    def _train_client(self, arrays, clip_state):
        batch_size = self._config.client_batch_size
        for variable, start in zip(self._variables, self._initial, strict=True):
            variable.assign(start)
        count = tf.shape(arrays[0])[0]
        for begin in tf.range(0, count, batch_size):
            batch = [part[begin : begin + batch_size] for part in arrays]
            inputs, targets = self._task.to_model(*batch)
            with tf.GradientTape() as tape:
                loss = self._loss(targets, self._model(inputs, training=True))
                loss = tf.add_n([loss, *self._model.losses])
            gradients = tape.gradient(loss, self._variables)
            for variable, gradient in zip(self._variables, gradients, strict=True):
                # Embeddings have sparse gradients.
                step = self._config.client_learning_rate
                variable.assign_sub(step * tf.convert_to_tensor(gradient))
        # The server descends along this, as along a gradient.
        updates = [
            start - variable
            for start, variable in zip(self._initial, self._variables, strict=True)
        ]
        self._add(updates, clip_state)

    def _add(self, updates, clip_state):
        squares = [0.0] * (max(self._groups) + 1)
        for group, update in zip(self._groups, updates, strict=True):
            squares[group] += tf.reduce_sum(tf.square(update))
        # A client whose update is not finite sends zeros, as in the learning process.
        finite = tf.math.is_finite(tf.add_n(squares))
        norms = tf.sqrt(tf.where(finite, tf.stack(squares), 0.0))
        if self._rule is None:
            factors = tf.ones_like(norms)
        else:
            rows = norms if self._flat else norms[tf.newaxis]
            factors = tf.reshape(self._rule.weights(rows, clip_state), [-1])
            indicators = self._rule.indicators(rows, clip_state)
            self._counts.assign_add(tf.reduce_sum(indicators, axis=0))
        for total, group, update in zip(self._sums, self._groups, updates, strict=True):
            factor = tf.where(finite, factors[group], 0.0)
            total.assign_add(tf.math.multiply_no_nan(update, factor))

    def run_round(self, clients: Sequence[Arrays], round_num: int) -> dict[str, Any]:
        """One round.

        Args:
          clients: every client's arrays.
          round_num: counted from 1.

        Returns:
          Measurements by name, as `dpc.federated.clipped_mean` has them.
        """
        for variable, value in zip(self._initial, self._weights, strict=True):
            variable.assign(value)
        for total in (*self._sums, self._counts):
            total.assign(tf.zeros_like(total))
        for arrays in clients:
            self._train(
                tuple(tf.convert_to_tensor(a) for a in arrays), self._clip_state
            )
        return self._finish(round_num)

    def _finish(self, round_num):
        m = self._config.clients_per_round
        rng = stream(self._config.seed, "noise", round_num)
        counts = self._counts.numpy() + rng.normal(size=len(self._count_stddevs)) * (
            np.array(self._count_stddevs)
        )
        scales = np.zeros(1)
        norms = next_norms = np.array([np.nan])
        fractions = np.clip(counts / m + 0.5, 0, 1).astype(np.float32)
        state = self._clip_state
        if self._rule is not None:
            scales = np.reshape(self._rule.noise_scales(state), [-1])
            norms = self._norms(state)
            self._clip_state = self._rule.next_state(state, tf.constant(fractions))
            next_norms = self._norms(self._clip_state)
        stddevs = scales * self._sum_multiplier
        momentum = self._config.server_momentum
        rate = self._config.server_learning_rate
        if self._config.momentum_damping:
            rate *= 1 - momentum
        for i, total in enumerate(self._sums):
            noise = 0.0
            if stddevs.any():
                shape = self._weights[i].shape
                noise = rng.standard_normal(shape, np.float32) * np.float32(
                    stddevs[self._groups[i] if len(stddevs) > 1 else 0]
                )
            mean = (total.numpy() + noise) / np.float32(m)
            self._velocity[i] = np.float32(momentum) * self._velocity[i] + mean
            self._weights[i] = self._weights[i] - np.float32(rate) * self._velocity[i]
        return {
            "clip_norm": norms,
            "next_clip_norm": next_norms,
            "unclipped_fraction": fractions if len(fractions) else np.array([np.nan]),
            "sum_noise_stddev": stddevs,
        }

    def _norms(self, state):
        if self._flat:
            return np.reshape(self._rule.clip_norm(state), [-1])
        return np.reshape(self._rule.clip_norms(state), [-1])

    def state(self) -> list[np.ndarray]:
        """Everything but the data and the noise, for a checkpoint."""
        clip = [np.asarray(part) for part in tf.nest.flatten(self._clip_state)]
        return [*self._weights, *self._velocity, *clip]

    def restore(self, arrays: Sequence[np.ndarray]) -> None:
        """Continues from what `state` returned."""
        size = len(self._weights)
        self._weights = [np.array(a) for a in arrays[:size]]
        self._velocity = [np.array(a) for a in arrays[size : 2 * size]]
        clip = [tf.constant(a) for a in arrays[2 * size :]]
        self._clip_state = tf.nest.pack_sequence_as(self._clip_state, clip)
