"""Federated averaging by TensorFlow Federated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpclip import federated
from tfdpclip.mechanism import Mechanism, Unclipped
from tfdpclip.noise.runs import CorrelatedNoise
from tff_tasks import cost
from tff_tasks.client_data import Arrays
from tff_tasks.config import RunConfig
from tff_tasks.streams import stream_seed
from tff_tasks.task import Task


def allow_deep_messages() -> None:
    """Lets protocol buffers nest as deeply as federated computations do.

    The C implementation refuses more than 100 levels unless told otherwise.
    """
    try:
        from google._upb import _message
    except ImportError:
        return
    _message.SetAllowOversizeProtos(True)


def _few_arrays() -> tf.data.Options:
    """Options of data sets that are arrays in memory, read once.

    Their graphs are not rewritten, nor watched while they run: for a client of a few
    batches, that takes longer than reading them.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options


class TffEngine:
    """Runs rounds as a learning process of TensorFlow Federated.

    To be made and used in `dpc.federated.local_context` or `remote_context`. (Secure
    sums are simulated in TensorFlow Federated.)

    Args:
      task: the benchmark.
      config: the settings.
      weights: initial trainable weights.
      spec: the type of a client's batch.
      correlated: correlated noise; None for the noise of the settings.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        weights: Sequence[np.ndarray],
        spec: Any,
        correlated: CorrelatedNoise | None = None,
    ):
        allow_deep_messages()
        self._task, self._config = task, config
        model = task.build_model()
        names = [variable.name for variable in model.trainable_variables]
        seed = config.seed
        self.aggregator = federated.clipped_mean(
            config.noise_multiplier,
            config.clients_per_round,
            clip=config.clip_rule(),
            secure=config.secure,
            noise=correlated or config.noise,
            minimum_clients=config.minimum_clients,
            variable_names=names,
            seed=None if seed is None else stream_seed(seed, "noise"),
        )

        def model_fn():
            # Metrics of training are computed only with --train_metrics.
            metrics = task.metrics() if config.train_metrics else None
            return tff.learning.models.from_keras_model(
                task.build_model(), task.loss(), spec, metrics=metrics
            )

        self._process = tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn,
            tff.learning.optimizers.build_sgdm(config.client_learning_rate),
            federated.server_momentum(
                config.server_learning_rate,
                config.server_momentum,
                damped=config.momentum_damping,
            ),
            model_aggregator=self.aggregator,
            # The loop over `Dataset.reduce` prepares its functions anew for each
            # client, and takes up to seven times as long.
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )
        self._state = self._process.set_model_weights(
            self._process.initialize(),
            tff.learning.models.ModelWeights(list(weights), []),
        )
        mechanism = Mechanism(
            (config.clip_rule() or Unclipped()).bind(names),
            config.noise_multiplier,
            config.clients_per_round,
        )
        #: Noise on the sums of indicators, and z_g of the sum.
        self.count_stddevs = mechanism.count_stddevs
        self.sum_multiplier = mechanism.gradient_noise_multiplier()

    @property
    def weights(self) -> list[np.ndarray]:
        """The current trainable weights."""
        weights = self._process.get_model_weights(self._state)
        return [np.asarray(w) for w in weights.trainable]

    def _next(self, clients):
        batch_size = self._config.client_batch_size
        datasets = [
            self._task.dataset(arrays, batch_size).with_options(_few_arrays())
            for arrays in clients
        ]
        return self._process.next(self._state, datasets)

    def round_seconds(self, arrays: Arrays, clients: int) -> float:
        """About how long a round takes; see `LocalEngine.round_seconds`.

        The results of the timed rounds are discarded.
        """
        step = self._config.client_batch_size
        # A computation is prepared for each size of a cohort.
        self._next([tuple(part[:step] for part in arrays)] * clients)
        return cost.timed(lambda: self._next([arrays] * clients))

    def run_round(self, clients: Sequence[Arrays], round_num: int) -> dict[str, Any]:
        """Runs a round; see `LocalEngine.run_round`."""
        del round_num  # The aggregator counts.
        output = self._next(clients)
        self._state = output.state
        measured = dict(output.metrics["aggregator"])
        kept = ("clip_norm", "next_clip_norm", "unclipped_fraction", "sum_noise_stddev")
        result = {name: np.reshape(measured[name], [-1]) for name in kept}
        if self._config.train_metrics:
            for name, value in output.metrics["client_work"]["train"].items():
                if np.ndim(value) == 0:
                    result[f"unprotected_train_{name}"] = np.reshape(value, [-1])
        return result

    def memory(self) -> federated.NoiseMemory | None:
        """The memory of correlated noise, a secret; see `LocalEngine.memory`."""
        if self.aggregator.correlated is None:
            return None
        return federated.split_noise(self._state)[1]

    def state(self) -> list[np.ndarray]:
        """Everything but the data and the noise, for a checkpoint."""
        state = self._state
        if self.aggregator.correlated is not None:
            state, _ = federated.split_noise(state)
        return [np.asarray(part) for part in tf.nest.flatten(state)]

    def restore(self, arrays: Sequence[np.ndarray]) -> None:
        """Continues from a result of `state`; correlated noise begins anew."""
        self._state = tf.nest.pack_sequence_as(self._state, list(arrays))

    def restore_memory(self, memory: federated.NoiseMemory) -> None:
        """Continues with the noise that belongs to the restored state."""
        self._state = federated.join_noise(self._state, memory)
