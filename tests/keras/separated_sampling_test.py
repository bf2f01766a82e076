"""Schemes that keep a record's steps apart train, and a budget counts the draws."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.stand_in_aggregator import Aggregator

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
SCHEMES = [
    dpc.sampling.MinSeparation(60, 12, relation="zero_out"),
    dpc.sampling.CyclicPoisson(60, rate=0.2, separation=4),
]


def fitted(scheme, budget, steps, epochs, batches=None, more=()):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    model.compile(
        dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=2.0, expected_batch_size=12),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batches = batches or scheme.batches((X, Y))
    model.fit(
        batches.repeat(),
        steps_per_epoch=steps,
        epochs=epochs,
        callbacks=[budget, *more],
        verbose=0,
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_budget_counts_the_times_of_a_record(scheme):
    budget = dpc.keras.PrivacyBudget(100.0, 1e-5, scheme)
    fitted(scheme, budget, steps=7, epochs=2)
    ledger = budget.ledger
    assert ledger.steps == 14
    expected = dpc.accounting.epsilon(2.0, 14, scheme, 1e-5)
    # Each call of fit may begin anywhere in the order, so the ledger's epsilon is at
    # least the epsilon of a single run.
    assert expected * 0.99999 <= budget.ledger.epsilon() <= 1.5 * expected
    assert "zero" in str(budget.statement())


class DrawsBetween(tf.keras.callbacks.Callback):
    """Takes three steps of the batches after the first epoch, for something else."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            iterator = iter(self.batches.repeat())
            for _ in range(3):
                next(iterator)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_step_for_something_else_moves_the_order(scheme):
    """Draws without training bring a record's steps closer together."""
    batches = scheme.batches((X, Y))
    budget = dpc.keras.PrivacyBudget(100.0, 1e-5, batches)
    fitted(
        scheme, budget, steps=2, epochs=2, batches=batches, more=[DrawsBetween(batches)]
    )
    assert sum(budget.ledger.phases[-1].runs) >= 4 + 3


def test_rounds_are_counted_by_the_times_of_a_client():
    scheme = dpc.sampling.MinSeparation(20, 5)
    rounds = dpc.accounting.RoundBudget(
        50.0, 1e-5, scheme.cohorts(range(20)), Aggregator(5.0)
    )
    for _ in range(9):
        with rounds.round() as cohort:
            assert len(cohort) == 5
    expected = dpc.accounting.epsilon(5.0, 9, scheme, 1e-5, unit="client")
    assert rounds.epsilon == pytest.approx(expected)
