"""Training that is noise says so."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.keras.random_walk import RandomWalk

_SCHEDULE = tf.keras.optimizers.schedules.PolynomialDecay(0.1, 30, 0.0)
_STEPPED = tf.keras.optimizers.schedules.PiecewiseConstantDecay([10], [0.1, 0.02])


def _linear(*inputs):
    return tf.keras.Sequential([*inputs, tf.keras.layers.Dense(40, use_bias=False)])


def _fit(x, y, optimizer=None, *, epsilon=2.0, epochs=30, built=True, **options):
    """The history and the model of a fit of a linear model."""
    plan = dpc.keras.PrivacyPlan(
        epsilon, 1e-5, len(x), batch_size=len(x), epochs=epochs
    )
    model = _linear(tf.keras.Input(x.shape[1:])) if built else _linear()
    made = plan.optimizer(optimizer, seed=1, **options)
    model.compile(made, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = plan.fit(model, (x, y), verbose=0)
    said = [str(w.message) for w in caught if "told from noise" in str(w.message)]
    return history.history, said, plan


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (None, {}),
        (dpc.keras.DPSGD, {"learning_rate": _SCHEDULE}),
        (dpc.keras.DPSGD, {"learning_rate": 0.1, "momentum": 0.8, "nesterov": True}),
        (dpc.keras.DPSGD, {"learning_rate": _STEPPED, "momentum": 0.5}),
        (dpc.keras.DPAdam, {"learning_rate": _SCHEDULE}),
        (dpc.keras.DPAdam, {"learning_rate": 0.01, "beta_1": 0.5, "clip": 1.0}),
        (None, {"built": False}),
        (dpc.keras.DPAdam, {"built": False}),
    ],
)
def test_weights_that_only_noise_moves_are_said(optimizer, options):
    # Inputs of zero have gradients of zero. The noise has a seed: no false alarms.
    history, said, plan = _fit(
        np.zeros([20, 25], "float32"), np.zeros(20), optimizer, **options
    )
    walk = plan._budget._metrics._walk
    assert len(history["signal"]) == 30
    assert len(said) == 1 and "#training-that-is-noise" in said[0]
    signal, deviations = walk.measure()
    assert deviations < 3.5 and signal < 0.2


@pytest.mark.parametrize("built", [True, False])
def test_a_run_that_learns_says_nothing_and_has_a_signal(built):
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 2000)
    x = rng.normal(size=(2000, 25)).astype("float32") + 2.0 * y[:, None]
    history, said, _ = _fit(x, y, built=built)
    assert not said
    assert history["signal"][-1] > 0.3


class _Restores(tf.keras.callbacks.Callback):
    """Like BackupAndRestore: the state of a model that had trained, when fit begins."""

    def __init__(self, trained):
        super().__init__()
        self._trained = trained

    def on_train_begin(self, logs=None):
        self.model.set_weights(self._trained.get_weights())
        self.model.optimizer.iterations.assign(self._trained.optimizer.iterations)


@pytest.mark.parametrize("restored", [True, False])
def test_a_run_that_goes_on_knows_no_signal_and_has_the_same_logs(restored):
    data = np.zeros([20, 25], "float32"), np.zeros([20, 40], "float32")
    plan = dpc.keras.PrivacyPlan(2.0, 1e-5, 20, batch_size=20, epochs=80)
    model, again = [_linear(tf.keras.Input([25])) for _ in range(2)]
    for made in (model, again):
        made.compile(plan.optimizer(seed=1), "mse")
    with pytest.warns(UserWarning, match="told from noise"):
        first = plan.fit(model, data, verbose=0, epochs=25).history
    calls = [_Restores(model)] if restored else []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*told from noise")
        run = plan.fit(
            again if restored else model, data, verbose=0, epochs=25, callbacks=calls
        )
    assert run.history.keys() == first.keys()
    assert len(first["signal"]) == 25 and np.all(np.isfinite(first["signal"]))
    assert np.all(np.isnan(run.history["signal"]))


def test_a_walk_follows_sgd_and_adam_only():
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    plan = dpc.keras.PrivacyPlan(3, 1e-5, 100, 10, 1)
    for optimizer, options, follows in [
        (dpc.keras.DPSGD, {}, True),
        (dpc.keras.DPAdam, {}, True),
        (dpc.keras.DPAdam, {"amsgrad": True}, False),
        (dpc.keras.DPAdamW, {}, False),
        (dpc.keras.DPSGD, {"use_ema": True}, False),
        (tf.keras.optimizers.Nadam, {}, False),
        (tf.keras.optimizers.Adagrad, {"learning_rate": 0.1}, False),
    ]:
        made = plan.optimizer(optimizer, **options)
        made.build(model.trainable_variables)
        assert RandomWalk(made, model.trainable_variables).follows is follows, optimizer


def test_a_clip_norm_at_its_bound_is_said():
    clip = dpc.QuantileClip(0.9, initial_norm=0.5, maximum_norm=0.5, normalize=True)
    rng = np.random.default_rng(1)
    x = 50 * rng.normal(size=(200, 25)).astype("float32")
    with pytest.warns(UserWarning, match="maximum_norm=0.5"):
        plan = dpc.keras.PrivacyPlan(3, 1e-5, 200, batch_size=200, epochs=5)
        model = tf.keras.Sequential([tf.keras.Input([25]), tf.keras.layers.Dense(1)])
        model.compile(plan.optimizer(learning_rate=0.1, clip=clip), "mse")
        plan.fit(model, (x, x[:, :1]), verbose=0)


def test_an_optimizer_of_more_groups_than_the_model_trains_is_not_followed():
    parts = [tf.keras.layers.Dense(2), tf.keras.layers.Dense(2)]
    for part in parts:
        part.build((None, 2))
    variables = [v for part in parts for v in part.trainable_variables]
    plan = dpc.keras.PrivacyPlan(3, 1e-5, 100, 10, 1)
    clip = dpc.LayerwiseClip(dpc.FixedClip(1.0))
    made = plan.optimizer(learning_rate=0.1, clip=clip)
    made.build(variables)
    assert RandomWalk(made, variables).follows
    assert not RandomWalk(made, parts[0].trainable_variables).follows
