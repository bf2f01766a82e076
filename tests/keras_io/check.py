"""The result of private training of an example: it trains, or an error explains."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdpclip as dpc
from tests.keras_io.examples import Example
from tests.keras_io.setup import BATCH, RECORDS, Setup
from tfdpclip.gradients import engine
from tfdpclip.gradients.proof.isolation_proof import Verdict

EPSILON = 50.0
STEPS_PER_EPOCH = RECORDS // BATCH


class NotRefusedAsSaid(AssertionError):
    """The published form trains, or the error lacks the expected text."""


def trained(setup: Setup, steps: int) -> str:
    """Trains an example by plans and `fit`; returns the verdict on its loss."""
    verdicts = []
    prove = engine.prove

    def proven(*arguments):
        found = prove(*arguments)
        verdicts.append(found.verdict)
        return found

    def fit(model, **options):
        return _fit(setup, model, steps, **options)

    with mock.patch.object(engine, "prove", proven):
        if setup.search is None:
            fit(setup.model, **setup.options)
        else:
            setup.search(fit)
    return "proven" if set(verdicts) == {Verdict.PROVEN} else "unknown"


def _fit(setup: Setup, model, steps: int, callbacks=(), **options):
    """Trains a model of an example by a plan; returns what `fit` returns."""
    plan = dpc.keras.PrivacyPlan(
        EPSILON,
        1e-3,
        examples=RECORDS,
        batch_size=BATCH,
        epochs=math.ceil(steps / STEPS_PER_EPOCH),
    )
    setup.compile(model, plan.optimizer(dpc.keras.DPAdam, 1e-2))
    history = model.fit(
        plan.batches(setup.data),
        epochs=plan.epochs,
        steps_per_epoch=min(steps, STEPS_PER_EPOCH),
        callbacks=[*plan.callbacks, *callbacks],
        verbose=0,
        **options,
    )
    if plan.ledger.steps != min(steps, plan.steps):
        raise ValueError(f"{plan.ledger.steps} of {steps} steps were counted.")
    if not 0 < plan.statement().epsilon <= EPSILON:
        raise ValueError(f"The statement says epsilon {plan.statement().epsilon}.")
    if not all(np.isfinite(np.float32(w)).all() for w in model.trainable_variables):
        raise ValueError("Some weights are not finite.")
    return history


def refusal(setup: Setup) -> str:
    """The error that refuses an example."""
    try:
        trained(setup, 2)
    except (
        ValueError,
        RuntimeError,
        TypeError,
        tf.errors.InvalidArgumentError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    raise NotRefusedAsSaid("The form of keras.io trains.")


def outcome(example: Example, steps: int) -> str:
    """The cell of docs/keras_examples.md."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(1)
    said = ""
    if example.published is not None:
        text = refusal(example.published())
        missing = [part for part in example.error if part not in text]
        if missing:
            raise NotRefusedAsSaid(f"No {missing} in: {text}")
        said = "refused"
        if example.trains is None:
            return said
    found = trained(example.trains(), steps)
    works = "works" if found == "proven" else "works slowly"
    return f"{works} after the change" if said else works
