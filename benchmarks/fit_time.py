"""Epochs of a private `fit` and of plain `fit`, in one process and in turn."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from benchmarks import models

#: Each variant adds a part to the variant before; see `benchmarks.whole_fit`. The last
#: is plain `fit` in the executions of the variant before.
VARIANTS = ("plain", "unchecked", "step", "batches", "plan", "executions", "several")
_EPSILON = 3.0


class _Clock(tf.keras.callbacks.Callback):
    """The seconds of each epoch, from the end of the epoch before."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        del epoch, logs
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now


def _fit(
    variant: str, task, data, size: int, epochs: int, xla: bool
) -> tuple[list[float], float]:
    """Trains a model of its own; the seconds of each epoch, and epsilon or NaN."""
    model = task.build()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plan = dpc.keras.PrivacyPlan(
        epsilon=_EPSILON,
        delta=0.1 / len(data[1]),
        examples=len(data[1]),
        batch_size=size,
        epochs=epochs,
    )
    if variant in ("plain", "several"):
        optimizer = tf.keras.optimizers.SGD(0.1)
    elif variant in ("plan", "executions"):
        optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1)
    else:
        optimizer = dpc.keras.DPSGD(
            0.1,
            noise_multiplier=plan.noise_multiplier,
            expected_batch_size=size,
            check_gradients="never" if variant == "unchecked" else "first",
        )
    executed = plan.steps_per_execution if variant in ("executions", "several") else 1
    # By default Keras 3 would compile only some of them by XLA.
    model.compile(optimizer, loss, jit_compile=xla, steps_per_execution=executed)
    clock = _Clock()
    told = {"epochs": epochs, "verbose": 0}
    if variant in ("plain", "several", "unchecked", "step"):
        model.fit(*data, batch_size=size, callbacks=[clock], **told)
        return clock.seconds, math.nan
    if variant == "batches":
        batches = plan.batches(data)
        batches.take_as_drawn(not xla)
        model.fit(batches, callbacks=[clock], **told)
        return clock.seconds, math.nan
    told["steps_per_execution"] = executed
    plan.fit(model, data, callbacks=[clock], **told)
    return clock.seconds, plan.statement().epsilon


def measure(
    name: str,
    size: int,
    examples: int,
    epochs: int = 4,
    turns: int = 2,
    xla: bool = False,
    fit: Callable[..., tuple[list[float], float]] = _fit,
    variants: Sequence[str] = VARIANTS,
) -> list[dict]:
    """The rows of one model, batch size and number of examples.

    Args:
      name: of `benchmarks.models`.
      size: examples of a batch, expected ones where they are drawn.
      examples: the number of examples.
      epochs: of each call of `fit`, at least 2.
      turns: the number of calls of each variant, in turn.
      xla: whether XLA compiles the steps, for which batches are filled up.
      fit: trains once.
      variants: of `VARIANTS`, "plain" first.

    >>> rows = measure("mlp", 32, 64, fit=lambda kind, *_: (
    ...     [5.0, {"plain": 1.0, "step": 1.5}.get(kind, 2.0)], 3.0))
    >>> [row["ratio"] for row in rows]
    [1.0, 2.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    """
    task = models.make(name)
    data = task.batch(np.random.default_rng(0), examples)
    best = dict.fromkeys(variants, math.inf)
    first = dict(best)
    epsilon = {}
    for _ in range(turns):
        for variant in variants:
            tf.keras.backend.clear_session()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds, epsilon[variant] = fit(variant, task, data, size, epochs, xla)
            best[variant] = min(best[variant], *seconds[1:])
            first[variant] = min(first[variant], seconds[0])
    place = {"model": name, "batch_size": size, "examples": examples, "xla": xla}
    return [
        {
            **place,
            "variant": variant,
            "epoch_s": best[variant],
            "first_epoch_s": first[variant],
            "ratio": best[variant] / best["plain"],
            "epsilon": epsilon[variant],
        }
        for variant in variants
    ]
