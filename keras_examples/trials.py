"""A network, trained many times over: clip rules measured at equal privacy.

Clip norm and learning rate of a rule are chosen in separate runs, and then measured in
fresh runs, each with new weights, batches and noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import intervals
from driver_kit.lazy import tf
from driver_kit.settings import UsageError
from keras_examples import training
from keras_examples.class_weights import class_accuracy

_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Data:
    """Private training data, public data (their stand-in, if any) and test data."""

    train: tuple[np.ndarray, np.ndarray]
    public: tuple[np.ndarray, np.ndarray] | None
    test: tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The data, the network, and the length of training.

    Attributes:
      name: for tables.
      data: with integer labels.
      network: makes the model.
      batch_size: expected examples per step.
      epochs: how often to go through the data, on average.
      delta: of the privacy statements.
    """

    name: str
    data: Data
    network: Callable[[], tf.keras.Model]
    batch_size: int
    epochs: int
    delta: float

    @property
    def scheme(self) -> dpc.sampling.Poisson:
        """How examples are drawn.

        Raises:
          UsageError: if a batch is larger than the data.
        """
        size = len(self.data.train[0])
        if self.batch_size > size:
            raise UsageError(
                f"flag --batch_size={self.batch_size}: there are only {size} private "
                f"images, for example --batch_size={max(1, size // 8)}."
            )
        return dpc.sampling.Poisson(self.batch_size / size)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A rule, with the clip norms and learning rates to choose from.

    Attributes:
      name: for tables.
      make: the rule of a clip norm.
      norms: clip norms to choose from; nan for a rule that needs none.
      rates: learning rates to choose from, if they differ from the common rates.
      each: whether to measure every clip norm, and not the best norm alone.
    """

    name: str
    make: Callable[[float], dpc.ClipRule]
    norms: tuple[float, ...] = (math.nan,)
    rates: tuple[float, ...] | None = None
    each: bool = False


class Trainer:
    """Trains the same network many times over, so that its graphs are made once."""

    def __init__(self, rule: dpc.ClipRule, problem: Problem, epsilon: float):
        self._problem = problem
        self._batches, self.steps, self.noise_multiplier = planned(problem, epsilon)
        self.model = problem.network()
        try:
            optimizer = dpc.keras.DPSGD(
                1.0,
                momentum=_MOMENTUM,
                clip=rule,
                noise_multiplier=self.noise_multiplier,
                expected_batch_size=self._batches.expected_batch_size,
            )
            optimizer.build(self.model.trainable_variables)
        except ValueError as error:
            raise UsageError(
                f"flag --batch_size={problem.batch_size}: {rule} cannot do with so few "
                f"examples per step; for example --batch_size=256. {error}"
            ) from error
        self.model.compile(optimizer, training.LOSS)
        self._fresh = [v.numpy() for v in optimizer.variables]
        self._initial = [v.numpy() for v in self.model.trainable_variables]
        self._meter = None
        if rule.takes_public_norms:
            self._meter = dpc.diagnostics.GradientMeter(self.model)
        self._predict = tf.function(lambda x: self.model(x, training=False))

    def __call__(self, learning_rate: float) -> float:
        """Trains from new weights and returns the macro accuracy."""
        optimizer, model = self.model.optimizer, self.model
        for variable, value in zip(
            model.trainable_variables, self._initial, strict=True
        ):
            if len(value.shape) >= 2:
                value = tf.keras.initializers.GlorotUniform()(value.shape)
            variable.assign(value)
        for variable, value in zip(optimizer.variables, self._fresh, strict=True):
            variable.assign(value)
        optimizer.learning_rate = learning_rate

        def measure(epoch, logs=None):
            if self._meter is not None:
                norms = self._meter.norms(self._problem.data.public)
                means = norms.by_group.mean(axis=0)
                optimizer.set_public_norms(dict(zip(norms.groups, means, strict=True)))

        model.fit(
            self._batches,
            epochs=self._problem.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[tf.keras.callbacks.LambdaCallback(on_epoch_begin=measure)],
        )
        x, y = self._problem.data.test
        found = [
            np.argmax(self._predict(x[k : k + 1024]), axis=1)
            for k in range(0, len(x), 1024)
        ]
        return class_accuracy(y, np.concatenate(found) == y).macro


def planned(
    problem: Problem, epsilon: float
) -> tuple[dpc.sampling.Batches, int, float]:
    """The batches of a run, its steps and its noise multiplier."""
    batches = problem.scheme.batches(problem.data.train)
    steps = problem.epochs * batches.steps_per_epoch
    noise = dpc.accounting.noise_multiplier(epsilon, problem.delta, steps, batches)
    return batches, steps, noise


def statement(problem: Problem, epsilon: float) -> Any:
    """The privacy statement of a run, from the same numbers that a `Trainer` uses."""
    batches, steps, noise = planned(problem, epsilon)
    ledger = dpc.accounting.Ledger(problem.delta)
    ledger.begin(noise_multiplier=noise, sampling=batches.scheme)
    ledger.record(steps)
    return ledger.statement()


def compared(
    problem: Problem,
    epsilon: float,
    candidates: Iterable[Candidate],
    learning_rates: Sequence[float],
    *,
    tuning_repeats: int,
    repeats: int,
    done: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Chooses each candidate's clip norm and learning rate, and measures it.

    Args:
      problem: the data and network.
      epsilon: of every run.
      candidates: the rules.
      learning_rates: to choose from.
      tuning_repeats: runs for each choice.
      repeats: fresh runs of each chosen setting.
      done: gets a line for each candidate.

    Returns:
      Rows of the choice, and rows of the results: the mean macro accuracy of each
      candidate, and a 95 % interval.
    """
    tuning: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    place = {"variant": problem.name, "epsilon": epsilon}
    for candidate in candidates:
        tops = []
        for norm in candidate.norms:
            trainer = Trainer(candidate.make(norm), problem, epsilon)
            mine = []
            for rate in candidate.rates or learning_rates:
                score = float(np.mean([trainer(rate) for _ in range(tuning_repeats)]))
                mine.append((score, norm, rate, trainer))
                tuning.append(
                    {
                        **place,
                        "rule": candidate.name,
                        "clip_norm": norm,
                        "learning_rate": rate,
                        "macro_accuracy": score,
                        "runs": tuning_repeats,
                    }
                )
            tops.append(max(mine, key=lambda choice: choice[0]))
            if candidate.each:
                name = f"{candidate.name} {norm:g}"
                results.append(place | measured(name, tops[-1], repeats))
        best = max(tops, key=lambda choice: choice[0])
        results.append(place | measured(candidate.name, best, repeats))
        accuracy = results[-1]["macro_accuracy"]
        done(f"{problem.name}, epsilon {epsilon:g}, {candidate.name}: {accuracy:.3f}")
    return tuning, results


def measured(
    name: str, chosen: tuple[float, float, float, Trainer], repeats: int
) -> dict[str, Any]:
    """A row of results: fresh runs of a chosen setting."""
    _, norm, rate, trainer = chosen
    scores = [trainer(rate) for _ in range(repeats)]
    return {
        "rule": name,
        "clip_norm": norm,
        "learning_rate": rate,
        **intervals.of_mean(scores, "macro_accuracy"),
    }
