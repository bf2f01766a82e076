"""Private training of a linear head on features, many times over."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples.features import Features
from tfdpclip.diagnostics import ClassAccuracy, GradientMeter, class_accuracy

CLIPS = ("normalized", "auto_s")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one run is private."""

    rate: float
    steps: int
    noise_multiplier: float

    @property
    def scheme(self) -> dpc.sampling.SamplingScheme:
        if self.rate == 1:
            return dpc.sampling.FullBatch()
        return dpc.sampling.Poisson(self.rate)


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


class HeadTrainer:
    """Trains a head from zero with normalised DP-Adam; its graphs are made once.

    Args:
      features: the data.
      how: rate, steps and noise.
      clip: a clip norm, for clipping divided by it, or "auto_s".
    """

    def __init__(self, features: Features, how: Plan, clip: float | str):
        self.features, self.plan = features, how
        x, _ = features.train
        self._batches = how.scheme.batches(features.train, steps=how.steps)
        self.model = tf.keras.Sequential(
            [
                tf.keras.Input((x.shape[1],)),
                tf.keras.layers.Dense(features.classes, kernel_initializer="zeros"),
            ]
        )
        # Keras adds epsilon before the bias correction, so it must be smaller.
        optimizer = dpc.keras.DPAdam(
            0.01,
            epsilon=1e-10,
            clip=clip_rule(clip),
            noise_multiplier=how.noise_multiplier,
            expected_batch_size=self._batches.expected_batch_size,
        )
        optimizer.build(self.model.trainable_variables)
        self.model.compile(
            optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        self._fresh = [v.numpy() for v in optimizer.variables]
        self._meter = GradientMeter(self.model)

    def __call__(self, learning_rate: float) -> ClassAccuracy:
        """Trains and returns the test accuracy by class."""
        optimizer = self.model.optimizer
        for variable in self.model.trainable_variables:
            variable.assign(tf.zeros_like(variable))
        for variable, value in zip(optimizer.variables, self._fresh, strict=True):
            variable.assign(value)
        optimizer.learning_rate = learning_rate
        self.model.fit(self._batches, epochs=1, shuffle=False, verbose=0)
        x, y = self.features.test
        kernel, bias = (v.numpy() for v in self.model.trainable_variables)
        return class_accuracy(y, np.argmax(x @ kernel + bias, axis=1) == y)

    def norms(self) -> np.ndarray:
        """Gradient norms of the training examples, without noise: private."""
        return self._meter.norms(self.features.train, batch_size=512).norms
