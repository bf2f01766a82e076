"""Federated averaging in this process: two clients at a time, each in one graph.

The mechanism is the same as in TensorFlow Federated's process (a test compares them),
without shipping computations and data, which dominates small networks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip.accounting.noise_place import NOISE_KEY
from tfdpclip.mechanism import Mechanism, Unclipped
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.carried import CarriedNoise, NoiseMemory, join_noise, split_noise
from tfdpclip.noise.runs import CorrelatedNoise
from tff_tasks import cost
from tff_tasks.client_data import Arrays
from tff_tasks.config import RunConfig
from tff_tasks.streams import stream_seed
from tff_tasks.task import Task

# The number of clients trained at the same time. Fixed, because a sum of floats depends
# on it, to the last bit.
LANES = 2


def divided(sizes: Sequence[int], lanes: int) -> list[list[int]]:
    """Which clients each lane trains: about as many examples in all of them.

    >>> divided([1, 7, 3, 3], 2)
    [[1], [0, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(lanes)]
    filled = [0] * lanes
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = filled.index(min(filled))
        shares[least].append(i)
        filled[least] += sizes[i]
    return [sorted(share) for share in shares]


class _Lane:
    """Trains clients in turn, and keeps the sums of their updates.

    Args:
      task: the benchmark.
      config: the settings.
      model: this lane's model.
    """

    def __init__(self, task: Task, config: RunConfig, model: tf.keras.Model):
        self._task, self._config, self._model = task, config, model
        self._loss = task.loss()
        self._variables = model.trainable_variables
        self._initial = [tf.Variable(v, trainable=False) for v in self._variables]
        #: Of the weights.
        self.names = [variable.name for variable in self._variables]
        #: Of this lane's clients in a round.
        self.sums = [tf.Variable(tf.zeros_like(v)) for v in self._variables]
        #: Adds a client's arrays' update to the sums, given the clip state.
        self.train = tf.function(self._train_client, reduce_retracing=True)

    def bind(self, mechanism: Mechanism) -> None:
        """Sets the mechanism that clips this lane's clients."""
        self._mechanism = mechanism
        groups = mechanism.rule.assignment
        self._flat = groups is None
        self._groups = (0,) * len(self._variables) if groups is None else groups
        #: The sums of its clients' indicators.
        self.counts = tf.Variable(tf.zeros([len(mechanism.count_stddevs)]))

    def trace(self, arrays: Arrays, clip_state: Any) -> None:
        """Traces for clients of any size: otherwise each new size would be traced."""
        specs = tuple(
            tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in arrays
        )
        self.train.get_concrete_function(specs, clip_state)

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Before a round: sets the clients' initial weights and zero sums."""
        for variable, value in zip(self._initial, weights, strict=True):
            variable.assign(value)
        for total in (*self.sums, self.counts):
            total.assign(tf.zeros_like(total))

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
        squares = [0.0] * self._mechanism.groups
        for group, update in zip(self._groups, updates, strict=True):
            squares[group] += tf.reduce_sum(tf.square(update))
        # A client whose update is not finite sends zeros, as in the learning process.
        finite = tf.math.is_finite(tf.add_n(squares))
        norms = tf.sqrt(tf.where(finite, tf.stack(squares), 0.0))
        rows = norms if self._flat else norms[tf.newaxis]
        weights, indicators = self._mechanism.clip(rows, clip_state)
        factors = tf.reshape(weights, [-1])
        self.counts.assign_add(tf.reduce_sum(indicators, axis=0))
        for total, group, update in zip(self.sums, self._groups, updates, strict=True):
            factor = tf.where(finite, factors[group], 0.0)
            total.assign_add(tf.math.multiply_no_nan(update, factor))


class LocalEngine:
    """Runs rounds in this process. Noise is central.

    Args:
      task: the benchmark.
      config: the settings.
      weights: initial trainable weights.
      spec: the type of a client's batch; not needed here.
      correlated: correlated noise; None for independent noise.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        weights: Sequence[np.ndarray],
        spec: Any = None,
        correlated: CorrelatedNoise | None = None,
    ):
        del spec
        self._config = config
        self._lanes = [_Lane(task, config, task.build_model()) for _ in range(LANES)]
        self._weights = [np.array(w) for w in weights]
        self._velocity = [np.zeros_like(w) for w in self._weights]
        rule = config.clip_rule() or Unclipped()
        self._mechanism = Mechanism(
            rule.bind(self._lanes[0].names),
            config.noise_multiplier,
            config.clients_per_round,
        )
        self._rule = self._mechanism.rule
        self._clip_state = self._rule.initial_state()
        self._flat = self._rule.assignment is None
        self._noise = GaussianNoise() if config.seed is None else None
        self._correlated = correlated
        #: The memory of correlated noise, as in the aggregators: a secret.
        self._kept: dict[str, Any] = {}
        if correlated is not None:
            coordinates = sum(w.size for w in self._weights)
            coordinates += len(self._mechanism.count_stddevs)
            first = CarriedNoise.first(correlated, coordinates)
            self._keep(0, np.zeros(2, np.int64), first)
        for lane in self._lanes:
            lane.bind(self._mechanism)
        self._traced = False

    @property
    def weights(self) -> list[np.ndarray]:
        """The current trainable weights."""
        return self._weights

    @property
    def sum_multiplier(self) -> float:
        """z_g: the noise multiplier of the sum."""
        return self._mechanism.gradient_noise_multiplier()

    @property
    def count_stddevs(self) -> tuple[float, ...]:
        """Noise on the sums of indicators."""
        return self._mechanism.count_stddevs

    def run_round(self, clients: Sequence[Arrays], round_num: int) -> dict[str, Any]:
        """Runs a round.

        Args:
          clients: every client's arrays.
          round_num: counted from 1.

        Returns:
          Measurements by name, as `dpc.federated.clipped_mean` has them.
        """
        self._train(clients)
        return self._finish(round_num)

    def _train(self, clients):
        for lane in self._lanes:
            lane.begin(self._weights)
            if clients and not self._traced:
                lane.trace(clients[0], self._clip_state)
        self._traced |= bool(clients)
        shares = divided([len(arrays[0]) for arrays in clients], LANES)

        def work(lane, share):
            for i in share:
                arrays = tuple(tf.convert_to_tensor(a) for a in clients[i])
                lane.train(arrays, self._clip_state)

        with futures.ThreadPoolExecutor(LANES) as pool:
            for done in [
                pool.submit(work, *both)
                for both in zip(self._lanes, shares, strict=True)
            ]:
                done.result()

    def round_seconds(self, arrays: Arrays, clients: int) -> float:
        """About how long a round takes, after tracing; nothing is released.

        Args:
          arrays: the assumed data of each client; of no protected client.
          clients: the number of clients.
        """
        cohort = [arrays] * LANES
        self._train(cohort)
        return cost.timed(lambda: self._train(cohort)) * clients / LANES

    def _finish(self, round_num):
        sums = zip(*(lane.sums for lane in self._lanes), strict=True)
        noise, larger = self._noise_of(round_num), 1.0
        if self._correlated is not None:
            larger, kept = self._correlated.sensitivity, self._kept
            noise = CarriedNoise(self._correlated, noise, kept["step"], kept["kept"])
        release = self._mechanism.release(
            self._clip_state,
            [tf.add_n([tf.convert_to_tensor(p) for p in parts]) for parts in sums],
            tf.add_n([tf.convert_to_tensor(lane.counts) for lane in self._lanes]),
            noise,
        )
        if self._correlated is not None:
            step = (int(kept["step"]) + 1) % self._correlated.steps
            self._keep(step, kept["ticket"], noise.kept)
        momentum = self._config.server_momentum
        rate = self._config.server_learning_rate
        if self._config.momentum_damping:
            rate *= 1 - momentum
        for i, mean in enumerate(release.means):
            velocity = np.float32(momentum) * self._velocity[i] + mean.numpy()
            self._weights[i] = self._weights[i] - np.float32(rate) * velocity
            self._velocity[i] = velocity
        norms = self._norms(self._clip_state)
        self._clip_state = release.next_state
        fractions = release.fractions.numpy()
        return {
            "clip_norm": norms,
            "next_clip_norm": self._norms(self._clip_state),
            "unclipped_fraction": fractions if len(fractions) else np.array([np.nan]),
            "sum_noise_stddev": larger * release.stddevs.numpy(),
        }

    def _noise_of(self, round_num):
        """A round's source of noise; with a seed, the same if run again."""
        if self._noise is not None:
            return self._noise
        return GaussianNoise(stream_seed(self._config.seed, "noise", round_num))

    def _norms(self, state):
        if self._flat:
            return np.reshape(self._rule.clip_norm(state), [-1])
        return np.reshape(self._rule.clip_norms(state), [-1])

    def _keep(self, step, before, kept):
        ticket = np.frombuffer(os.urandom(16), np.int64)
        named = self._correlated.name_with(self._config.noise_multiplier)
        run = np.array(named, np.int64)
        self._kept = dict(step=step, ticket=ticket, before=before, run=run, kept=kept)

    def memory(self) -> NoiseMemory | None:
        """The memory of correlated noise, a secret; None for independent noise."""
        return NoiseMemory(self._kept) if self._kept else None

    def state(self) -> list[np.ndarray]:
        """Everything but the data and the noise, for a checkpoint."""
        return [np.asarray(part) for part in tf.nest.flatten(self._whole_state())]

    def _whole_state(self):
        state = [self._weights, self._velocity, self._clip_state]
        if self._kept:
            state.append(split_noise({NOISE_KEY: self._kept})[0])
        return state

    def restore(self, arrays: Sequence[np.ndarray]) -> None:
        """Continues from a result of `state`; correlated noise begins anew."""
        weights, velocity, clip, *noise = tf.nest.pack_sequence_as(
            self._whole_state(), list(arrays)
        )
        self._weights, self._velocity = map(list, (weights, velocity))
        self._clip_state = tf.nest.map_structure(tf.constant, clip)
        for state in noise:
            self._kept = state[NOISE_KEY]

    def restore_memory(self, memory: NoiseMemory) -> None:
        """Continues with the noise that belongs to the restored state."""
        self._kept = join_noise({NOISE_KEY: self._kept}, memory)[NOISE_KEY]
