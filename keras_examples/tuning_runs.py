"""Runs of a task: without privacy, with settings of a grid, and by the plan alone.

The runs of a grid share traces: a `Trainer` makes the graphs once, and trains from
fresh weights at any rate. A seed chooses the first weights; draws and noise are fresh
in every private run.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit.lazy import tf
from keras_examples import tracking
from keras_examples.tuning_tasks import Task

DELTA = 1e-5
MOMENTUM = 0.9


def _fixed(norm: float) -> dpc.ClipRule:
    return dpc.FixedClip(norm, normalize=True)


def _quantile(quantile: float) -> dpc.ClipRule:
    return dpc.QuantileClip(
        quantile, initial_norm=1.0, normalize=True, minimum_norm=0.1
    )


#: Makers of clip rules by name; None: the default of the optimizers.
CLIPS: dict[str, Callable[[], dpc.ClipRule | None]] = {
    "default": lambda: None,
    "fixed 0.1": lambda: _fixed(0.1),
    "fixed 0.3": lambda: _fixed(0.3),
    "fixed 1": lambda: _fixed(1.0),
    "fixed 3": lambda: _fixed(3.0),
    "fixed 10": lambda: _fixed(10.0),
    "quantile 0.95": lambda: _quantile(0.95),
    "automatic": lambda: dpc.AutomaticClip(),
}
#: Optimizers by name: their class in `tfdpclip.keras`, and options.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("DPSGD", {"momentum": MOMENTUM}),
    "adam": ("DPAdam", {}),
}
#: The course of the rate: equal in all steps, or by half a cosine to 0.
DECAYS = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The settings of a private run: what a user would have to choose.

    Attributes:
      clip: one of `CLIPS`.
      optimizer: one of `OPTIMIZERS`.
      learning_rate: of the first step.
      batch_size: the expected records of a step; a step has the whole data if they are
        fewer.
      epochs: how often to go through the data, on average.
      decay: one of `DECAYS`.
      weighted: whether `class_weight` makes classes equal.
    """

    clip: str = "default"
    optimizer: str = "momentum"
    learning_rate: float = 0.25
    batch_size: int = 300
    epochs: int = 15
    decay: str = "constant"
    weighted: bool = False

    @property
    def name(self) -> str:
        """The clip, the optimizer and the rate."""
        return f"{self.clip}, {self.optimizer} {self.learning_rate:g}"


def grid(
    clips: tuple[str, ...],
    momentum_rates: tuple[float, ...],
    adam_rates: tuple[float, ...],
    **common: Any,
) -> Iterator[Cell]:
    """Every clip with every optimizer and rate; cells that share a trace in a row.

    >>> cells = list(grid(("default", "fixed 3"), (0.05, 0.25, 1.0), (0.003, 0.015)))
    >>> len(cells), cells[0].name, cells[-1].name
    (10, 'default, momentum 0.05', 'fixed 3, adam 0.015')
    """
    rates = {"momentum": momentum_rates, "adam": adam_rates}
    for clip, optimizer in itertools.product(clips, OPTIMIZERS):
        for rate in rates[optimizer]:
            yield Cell(clip, optimizer, rate, **common)


@dataclasses.dataclass(frozen=True)
class Run:
    """The score of a run on the test records, in percent, and its duration."""

    score: float
    seconds: float


def balancing_weights(task: Task) -> dict[int, float] | None:
    """The weights with which all classes count alike; None for a task without classes.

    The counts of these classes are public: the data are.
    """
    labels = task.train[1]
    if task.metric == "R2" or labels.shape[1:] > (1,):
        return None
    counts = np.bincount(labels.reshape(-1).astype(int))
    return {k: len(labels) / (len(counts) * c) for k, c in enumerate(counts)}


class Trainer:
    """Trains a task privately, many times over with one trace.

    Args:
      task: the task.
      epsilon: the budget of every run, at `DELTA`.
      cell: the settings; its rate is the default of `run`.
    """

    def __init__(self, task: Task, epsilon: float, cell: Cell):
        self._task, self._cell = task, cell
        batch_size = min(cell.batch_size, task.examples)
        self.plan = dpc.keras.PrivacyPlan(
            epsilon, DELTA, task.examples, batch_size, cell.epochs
        )
        kind, options = OPTIMIZERS[cell.optimizer]
        # One optimizer makes many runs, each of which would spend the plan's budget.
        # Ordinary gradients are compared by the tests, and once a run costs a trace.
        self._optimizer = getattr(dpc.keras, kind)(
            cell.learning_rate,
            clip=CLIPS[cell.clip](),
            noise_multiplier=self.plan.noise_multiplier,
            expected_batch_size=batch_size,
            check_gradients="never",
            **options,
        )
        self._model = task.build(0)
        self._optimizer.build(self._model.trainable_variables)
        self._fresh = [v.numpy() for v in self._optimizer.variables]
        self._model.compile(
            self._optimizer,
            task.loss(),
            steps_per_execution=self.plan.steps_per_execution,
        )
        self._batches = self.plan.scheme.batches(task.train)
        self._weights = balancing_weights(task) if cell.weighted else None

    def run(self, seed: int, learning_rate: float | None = None) -> Run:
        """Trains from the weights of a seed, and scores.

        Args:
          seed: of the first weights.
          learning_rate: another rate than the cell's.
        """
        started = time.monotonic()
        self._model.set_weights(self._task.build(seed).get_weights())
        for variable, value in zip(self._optimizer.variables, self._fresh, strict=True):
            variable.assign(value)
        rate = learning_rate or self._cell.learning_rate
        self._optimizer.learning_rate = rate
        cosine = self._cell.decay == "cosine"
        self._model.fit(
            self._batches,
            epochs=self._cell.epochs,
            shuffle=False,
            class_weight=self._weights,
            callbacks=[tracking.Cosine(rate, self.plan.steps)] if cosine else [],
            verbose=0,
        )
        score = self._task.scored(self._model)
        return Run(score, time.monotonic() - started)


def train_privately(task: Task, epsilon: float, seed: int, **settings: Any) -> Run:
    """One private run with settings that somebody chose.

    Args:
      task: the task.
      epsilon: its budget, at `DELTA`.
      seed: of the first weights.
      **settings: the fields of `Cell`.
    """
    return Trainer(task, epsilon, Cell(**settings)).run(seed)


def train_plainly(task: Task, seed: int, batch_size: int = 64) -> Run:
    """A run without privacy: Adam, whose rate falls to 0 in some 3,000 steps.

    Args:
      task: the task.
      seed: of the first weights and the order of the records.
      batch_size: of every step.
    """
    started = time.monotonic()
    epochs = int(np.clip(3000 * batch_size // task.examples, 3, 60))
    steps = epochs * -(-task.examples // batch_size)
    rate = tf.keras.optimizers.schedules.CosineDecay(task.plain_rate, steps)
    model = task.build(seed)
    model.compile(tf.keras.optimizers.Adam(rate), task.loss())
    model.fit(*task.train, batch_size=batch_size, epochs=epochs, verbose=0)
    return Run(task.scored(model), time.monotonic() - started)


def plan_settings(task: Task, epsilon: float) -> dict[str, Any]:
    """Every number that the plan chooses for a task, from public facts."""
    plan, model = _plan(task, epsilon), task.build(0)
    optimizer = plan.optimizer()
    optimizer.build(model.trainable_variables)
    rate = optimizer.get_config()["learning_rate"]
    return {
        "batch_size": plan.batch_size,
        "epochs": plan.epochs,
        "optimizer": optimizer.name,
        "clip": str(optimizer.clip),
        "decay": rate["class_name"],
        "learning_rate": float(f"{rate['config']['initial_learning_rate']:.4g}"),
    }


def _plan(task: Task, epsilon: float) -> dpc.keras.PrivacyPlan:
    return dpc.keras.PrivacyPlan(epsilon, DELTA, task.examples)


def train_by_plan(task: Task, epsilon: float, seed: int) -> Run:
    """A private run in which a user chooses epsilon and delta alone.

    Args:
      task: the task.
      epsilon: its budget, at `DELTA`.
      seed: of the first weights.
    """
    started = time.monotonic()
    plan, model = _plan(task, epsilon), task.build(seed)
    model.compile(plan.optimizer(), task.loss())
    plan.fit(model, task.train, verbose=0)
    return Run(task.scored(model), time.monotonic() - started)
