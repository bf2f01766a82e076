"""Private training of heads and pre-trained networks, many times over."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import pretrained, training, transfer_data
from keras_examples.class_weights import ClassAccuracy, class_accuracy
from keras_examples.features import Features


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sampling and noise of a run."""

    rate: float
    steps: int
    noise_multiplier: float

    @property
    def scheme(self) -> dpc.sampling.SamplingScheme:
        if self.rate == 1:
            return dpc.sampling.FullBatch()
        return dpc.sampling.Poisson(self.rate)


@dataclasses.dataclass(frozen=True)
class Norms:
    """Gradient norms by example.

    Attributes:
      every: over all trained weights, which are clipped together.
      head: over the head alone.
    """

    every: np.ndarray
    head: np.ndarray


@functools.cache
def plan(
    size: int, batch_size: int | str, epochs: float, epsilon: float, delta: float
) -> Plan:
    """Rate, steps T = ceil(E N / B) and noise for a budget.

    >>> plan(1000, "full", 8, 1.0, 1e-5).steps
    8
    """
    batch = size if batch_size == "full" else int(batch_size)
    if batch > size:
        raise settings.UsageError(
            f"A batch of {batch} is larger than the {size} training examples; use full."
        )
    steps = math.ceil(epochs * size / batch)
    unbound = Plan(batch / size, steps, 0.0)
    z = 0.0
    if math.isfinite(epsilon):
        z = dpc.accounting.noise_multiplier(epsilon, delta, steps, unbound.scheme)
    return dataclasses.replace(unbound, noise_multiplier=z)


def clip_rule(clip: float | str) -> dpc.ClipRule:
    """The rule for a clip norm, which it divides by, or for "auto_s"."""
    if clip == "auto_s":
        return dpc.AutomaticClip(0.01)
    return dpc.FixedClip(float(clip), normalize=True)


class Trainer:
    """Trains a model from the same weights, many times over; its graphs are made once.

    *Formal guarantees*

    * A run makes exactly the plan's steps, or ends in an error. The caller accounts for
      the cost: each run is a further cost.

    Args:
      model: a built model with its trained weights chosen; it gets compiled.
      batches: drawn by the plan's scheme, for one run.
      how: rate, steps and noise.
      clip: a clip norm, for clipping divided by it, or "auto_s".
      rows: how many examples are measured at a time.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        batches: dpc.sampling.Batches,
        how: Plan,
        clip: float | str,
        rows: int,
    ):
        self._rows = rows
        self.model, self.plan, self._batches = model, how, batches
        # Keras adds epsilon before the bias correction, so it must be smaller.
        optimizer = dpc.keras.DPAdam(
            0.01,
            epsilon=1e-10,
            clip=clip_rule(clip),
            noise_multiplier=how.noise_multiplier,
            expected_batch_size=batches.expected_batch_size,
            accumulation_steps=batches.accumulation_steps,
        )
        optimizer.build(model.trainable_variables)
        model.compile(
            optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        trained = [*model.trainable_variables, *optimizer.variables]
        self._fresh = [(v, v.numpy()) for v in trained]
        self._meter = dpc.diagnostics.GradientMeter(model)

    def __call__(self, learning_rate: float) -> ClassAccuracy:
        """Trains and returns the test accuracy by class."""
        optimizer = self.model.optimizer
        for variable, value in self._fresh:
            variable.assign(value)
        optimizer.learning_rate = learning_rate
        self.model.fit(self._batches, epochs=1, shuffle=False, verbose=0)
        steps = int(optimizer.iterations.numpy())
        if steps != self.plan.steps:
            raise RuntimeError(
                f"The run made {steps} steps, not the {self.plan.steps} that are "
                "accounted for."
            )
        return self.accuracy()

    def accuracy(self) -> ClassAccuracy:
        """The test accuracy by class."""
        raise NotImplementedError

    def examples(self, count: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The first training examples, or all."""
        raise NotImplementedError

    def norms(self, count: int | None = None) -> Norms:
        """Gradient norms of the first training examples, without noise: private."""
        found = self._meter.norms(self.examples(count), batch_size=self._rows)
        return Norms(found.norms, found.by_group[:, found.groups.index("head")])

    def gradients(self, count: int) -> np.ndarray:
        """`[count, d]`, unclipped gradients of the first examples: private."""
        return self._meter.gradients(self.examples(count), batch_size=self._rows)


class HeadTrainer(Trainer):
    """Trains a head from zero on features.

    Args:
      features: the data.
      how: rate, steps and noise.
      clip: a clip norm, for clipping divided by it, or "auto_s".
    """

    def __init__(self, features: Features, how: Plan, clip: float | str):
        self.features = features
        x, _ = features.train
        model = tf.keras.Sequential(
            [
                tf.keras.Input((x.shape[1],)),
                tf.keras.layers.Dense(
                    features.classes, kernel_initializer="zeros", name="head"
                ),
            ]
        )
        batches = how.scheme.batches(features.train, steps=how.steps)
        super().__init__(model, batches, how, clip, rows=512)

    def accuracy(self) -> ClassAccuracy:
        x, y = self.features.test
        kernel, bias = (v.numpy() for v in self.model.trainable_variables)
        return class_accuracy(y, np.argmax(x @ kernel + bias, axis=1) == y)

    def examples(self, count: int | None) -> tuple[np.ndarray, np.ndarray]:
        x, y = self.features.train
        return x[:count], y[:count]


class NetworkTrainer(Trainer):
    """Trains a pre-trained network's scales and offsets, say, and its head.

    Args:
      network: before training; trainers of a network share its variables, so each runs
        and is measured before the next runs.
      how: rate, steps and noise.
      clip: a clip norm, for clipping divided by it, or "auto_s".
      physical: most images at a time.
    """

    def __init__(
        self, network: pretrained.Network, how: Plan, clip: float | str, physical: int
    ):
        self.network = network
        network.reset()
        # A model of the same layers, compiled separately.
        model = tf.keras.Model(network.model.inputs, network.model.outputs)
        batches = training.draw(
            how.scheme, network.data.train, physical, None, steps=how.steps
        )
        super().__init__(model, batches, how, clip, rows=physical)

    def accuracy(self) -> ClassAccuracy:
        test = self.network.data.test
        labels = transfer_data.labels_of(test)
        found = [
            self.network.predict(transfer_data.images_of(test, k, k + 256)).numpy()
            for k in range(0, len(labels), 256)
        ]
        return class_accuracy(labels, np.concatenate(found) == labels)

    def examples(self, count: int | None) -> tuple[np.ndarray, np.ndarray]:
        train = self.network.data.train
        labels = transfer_data.labels_of(train)[:count]
        return transfer_data.images_of(train, 0, len(labels)), labels
