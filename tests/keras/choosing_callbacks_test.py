"""A statement names callbacks that decide by a metric, which has no noise."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc

K = tf.keras.callbacks


def stated(*callbacks, **options):
    x = np.linspace(0, 1, 240, dtype="float32").reshape(60, 4)
    plan = dpc.keras.PrivacyPlan(8, 1e-4, 60, batch_size=20, epochs=2)
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    model.fit(
        plan.batches((x, x[:, 0])),
        epochs=2,
        callbacks=[*plan.callbacks, *callbacks],
        verbose=0,
        **options,
    )
    return str(plan.statement())


@pytest.mark.parametrize("kind", [K.EarlyStopping, K.ReduceLROnPlateau])
def test_a_metric_of_private_batches_that_decides_is_not_counted(kind):
    text = stated(kind(monitor="loss", patience=1))
    assert f"not counted: {kind.__name__} decided by 'loss'" in text


def test_an_end_at_the_first_nan_is_a_decision():
    assert "not counted: TerminateOnNaN decided by 'loss'" in stated(K.TerminateOnNaN())


def test_of_checkpoints_the_best_is_chosen(tmp_path):
    path = str(tmp_path / "best.weights.h5")
    options = dict(monitor="loss", save_weights_only=True)
    best = K.ModelCheckpoint(path, save_best_only=True, **options)
    assert "ModelCheckpoint decided by 'loss'" in stated(best)
    assert "decided" not in stated(K.ModelCheckpoint(path, **options))


def test_validation_data_are_assumed_to_be_public():
    other = np.ones((5, 4), "float32"), np.ones(5, "float32")
    text = stated(K.EarlyStopping(patience=1), validation_data=other)
    assert "'val_loss', by which EarlyStopping decided, is of public data" in text
    assert "not counted: Early" not in text


@pytest.mark.parametrize("monitor", ["epsilon", "clip_norm"])
def test_what_is_released_decides_without_a_word(monitor):
    assert "decided" not in stated(
        K.EarlyStopping(monitor=monitor, patience=5, mode="min")
    )


def test_callbacks_that_decide_nothing_are_not_named():
    assert "decided" not in stated(K.LearningRateScheduler(lambda epoch: 0.1))
