"""A network, trained with noise that is correlated over the steps, or independent.

All runs have equal epsilon. Batches come in a fixed order, without amplification, or,
as references, at random.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import settings
from driver_kit.lazy import tf
from keras_examples import image_data, networks, training
from keras_examples.class_weights import class_accuracy
from tfdpclip import correlated

#: Without amplification, and with it.
FIXED_ORDER = ("independent", "tree", "toeplitz", "buffered")
AMPLIFIED = ("poisson", "cyclic")
_SHAPE = (28, 28, 1)
_WORKLOAD = correlated.Workload(momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Data:
    """Images and labels: to train on, to choose by, and to report on."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def load(used: Any) -> Data:
    """The images; the held-out images are the same in every run.

    Args:
      used: the settings of `correlated_noise`.

    Raises:
      UsageError: if there are fewer than a batch.
    """
    images = image_data.load(used.dataset, used.data_dir, _SHAPE)
    x, y = training.scaled(images.train[0]), images.train[1]
    order = np.random.default_rng(0).permutation(len(y))
    train, rest = np.split(order, [len(y) - max(1, round(used.held_out * len(y)))])
    training.check_batch_size(used.batch_size, len(train))
    test = (training.scaled(images.test[0]), images.test[1])
    return Data(images.name, (x[train], y[train]), (x[rest], y[rest]), test)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sampling and noise of the runs of a noise kind.

    Attributes:
      scheme: draws the batches.
      steps: of a run.
      matrix: of the noise; None for independent noise.
      noise_multiplier: of the optimizer.
    """

    scheme: dpc.sampling.SamplingScheme
    steps: int
    matrix: correlated.NoiseMatrix | None
    noise_multiplier: float

    @property
    def noise(self) -> dpc.CorrelatedNoise | None:
        """For an optimizer."""
        if self.matrix is None:
            return None
        return dpc.CorrelatedNoise(self.matrix, self.steps, self.scheme)

    @property
    def deviation(self) -> float:
        """Root mean square, over the steps, of the noise in a weight.

        In clip norms over the batch size, times the learning rate.
        """
        matrix, noise = self.matrix or correlated.Independent(), self.noise
        rows = matrix.deviations(self.steps, _WORKLOAD)
        scale = self.noise_multiplier * (1.0 if noise is None else noise.sensitivity)
        return float(scale * math.sqrt(np.mean(rows**2)))


def planned(name: str, epsilon: float, size: int, used: Any) -> Plan:
    """Batches, matrix and noise multiplier: a function of public numbers.

    Args:
      name: one of `FIXED_ORDER` or `AMPLIFIED`.
      epsilon: of a run.
      size: the number of images to train on.
      used: the settings of `correlated_noise`.
    """
    rate = used.batch_size / size
    ordered = dpc.sampling.MinSeparation(size, used.batch_size, relation="zero_out")
    steps = used.epochs * ordered.steps_per_epoch(size)

    def plan(scheme, matrix=None):
        z = dpc.accounting.noise_multiplier(
            epsilon, used.delta, steps, scheme, matrix=matrix
        )
        return Plan(scheme, steps, matrix, z)

    def banded(bands, scheme):
        matrix = correlated.OptimizedToeplitz(
            min(bands, steps), steps, scheme, workload=_WORKLOAD
        )
        return plan(scheme, matrix)

    if name == "poisson":
        return plan(dpc.sampling.Poisson(rate))
    if name == "cyclic":
        most = ordered.separation
        bands = sorted({min(2**k, most) for k in range(most.bit_length() + 1)})
        plans = [banded(b, dpc.sampling.CyclicPoisson(size, rate, b)) for b in bands]
        return min(plans, key=lambda one: one.deviation)
    if name == "toeplitz":
        return banded(used.bands or ordered.separation, ordered)
    if name == "tree":
        return plan(ordered, correlated.Tree())
    if name == "buffered":
        matrix = correlated.BufferedToeplitz(
            used.buffers, steps, ordered, workload=_WORKLOAD
        )
        return plan(ordered, matrix)
    return plan(ordered)


def trained(
    data: Data,
    how: Plan,
    rule: dpc.ClipRule,
    learning_rate: float,
    epsilon: float,
    part: str,
    used: Any,
) -> dict[str, Any]:
    """Trains from new weights; returns the accuracy and the privacy cost.

    Args:
      data: the images.
      how: batches and noise.
      rule: the clip rule.
      learning_rate: of plain descent with momentum 0.9.
      epsilon: the budget of the run.
      part: of the data to be accurate on, "validation" or "test".
      used: the settings of `correlated_noise`.

    Raises:
      UsageError: if the clip rule needs larger batches.
    """
    began = time.monotonic()
    # Graphs of runs that are over.
    tf.keras.backend.clear_session()
    batches = how.scheme.batches(data.train)
    model = networks.dense_network(data.train[0].shape[1:])
    try:
        optimizer = dpc.keras.DPSGD(
            learning_rate,
            momentum=_WORKLOAD.momentum,
            clip=rule,
            noise_multiplier=how.noise_multiplier,
            expected_batch_size=float(used.batch_size),
            noise=how.noise,
        )
    except ValueError as error:
        raise settings.UsageError(
            f"flag --batch_size={used.batch_size}: {rule} cannot do with so few "
            f"images per step; for example --batch_size=1000. {error}"
        ) from error
    model.compile(optimizer, training.LOSS)
    budget = dpc.keras.PrivacyBudget(epsilon, used.delta, batches)
    epochs = how.steps // batches.steps_per_epoch
    model.fit(batches, epochs=epochs, callbacks=[budget], verbose=0)
    x, y = getattr(data, part)
    found = np.argmax(model(x, training=False), axis=1)
    return {
        "accuracy": class_accuracy(y, found == y).macro,
        "spent": budget.statement().epsilon,
        "last_clip_norm": optimizer.clip_norms["all"],
        "statement": str(budget.statement()),
        "seconds": round(time.monotonic() - began, 1),
    }
