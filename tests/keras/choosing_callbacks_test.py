"""A statement names callbacks that decide by a metric, which has no noise."""

import types

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.keras import _compat
from tfdpclip.keras.watching import choosing_callbacks

K = tf.keras.callbacks


X = np.linspace(0, 1, 240, dtype="float32").reshape(60, 4)


def stated(*callbacks, sampling="poisson", on_batches=False, **options):
    x = X
    plan = dpc.keras.PrivacyPlan(
        8, 1e-4, 60, batch_size=20, epochs=2, sampling=sampling
    )
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    batches = plan.batches((x, x[:, 0]))
    if on_batches:
        options["validation_data"] = batches
    model.fit(
        batches,
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


@pytest.mark.parametrize(
    ("callbacks", "reads"), [((), 0), ((K.CSVLogger,), 0), ((K.LambdaCallback,), 6)]
)
def test_the_rate_is_read_in_each_step_for_callbacks_of_the_user_alone(
    callbacks, reads, monkeypatch, tmp_path
):
    read, rate_of = [], _compat.own_rate

    def own_rate(optimizer):
        read.append(rate_of(optimizer))
        return read[-1]

    reader = types.SimpleNamespace(own_rate=own_rate)
    monkeypatch.setattr(choosing_callbacks, "_compat", reader)
    made = [kind(*[tmp_path / "log.csv"] * (kind is K.CSVLogger)) for kind in callbacks]
    assert "set the learning rate" not in stated(*made)
    assert len(read) >= reads and (reads or not read)


def test_validation_data_are_assumed_to_be_public():
    other = np.ones((5, 4), "float32"), np.ones(5, "float32")
    text = stated(K.EarlyStopping(patience=1), validation_data=other)
    assert "'val_loss', by which EarlyStopping decided, is of public data" in text
    assert "not counted: Early" not in text


@pytest.mark.parametrize("sampling", ["poisson", "random_allocation", "fixed_order"])
def test_validation_data_that_are_in_the_private_batches_are_not_public(sampling):
    text = stated(
        K.EarlyStopping(patience=1),
        sampling=sampling,
        validation_data=(X[40:], X[40:, 0].copy()),
    )
    assert "not counted: EarlyStopping decided by 'val_loss' of validation data" in text
    assert "is of public data" not in text


def test_nor_are_private_batches_as_validation_data():
    text = stated(K.EarlyStopping(patience=1), on_batches=True)
    assert "not counted: EarlyStopping decided by 'val_loss' of validation data" in text


def test_a_name_of_a_file_that_shows_a_metric_is_not_counted(tmp_path):
    def named(path, **options):
        save = K.ModelCheckpoint(str(tmp_path / path), save_weights_only=True)
        return stated(save, **options)

    text = named("{epoch}-{loss:.3f}.weights.h5")
    assert "not counted: ModelCheckpoint named files by 'loss' of the private" in text
    assert "named files" not in named("{epoch:02d}-{epsilon:.2f}.weights.h5")
    other = np.ones((5, 4), "float32"), np.ones(5, "float32")
    text = named("{val_loss:.2f}.weights.h5", validation_data=other)
    assert "'val_loss', by which ModelCheckpoint named files, is of public" in text


@pytest.mark.parametrize("monitor", ["epsilon", "clip_norm"])
def test_what_is_released_decides_without_a_word(monitor):
    assert "decided" not in stated(
        K.EarlyStopping(monitor=monitor, patience=5, mode="min")
    )


def test_callbacks_that_decide_nothing_are_not_named():
    assert "decided" not in stated(K.LearningRateScheduler(lambda epoch: 0.1))


class Halves(K.Callback):
    """Sets the learning rate by a metric, as `ReduceLROnPlateau` does."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self._set)

    def _set(self, step, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(0.01 + 0.001 * float((logs or {}).get("loss", 1.0)))


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
def test_a_rate_that_a_callback_of_ones_own_sets_is_stated(hook):
    """The saved rate is an exact function of the private loss."""
    text = stated(Halves(hook))
    assert "a callback (Halves) set the learning rate between two steps" in text
    assert text.count("set the learning rate") == 1
    assert "ended fit" not in text


def test_a_rate_that_is_set_in_the_last_epoch_alone_is_stated():
    def late(epoch, logs):
        if epoch == 1:
            budget.model.optimizer.learning_rate = 0.1 * float(logs["loss"])

    budget = K.LambdaCallback(on_epoch_end=late)
    assert "a callback (LambdaCallback) set the learning rate" in stated(budget)


class Ends(K.Callback):
    """Ends `fit` by a metric."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = logs["loss"] < 1e9


class EndsWithinAnEpoch(K.Callback):
    """Ends `fit` by a metric of a batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = logs["loss"] < 1e9


@pytest.mark.parametrize("kind", [Ends, EndsWithinAnEpoch])
def test_an_end_that_a_callback_of_ones_own_sets_is_stated(kind):
    text = stated(kind())
    assert f"a callback ({kind.__name__}) ended fit" in text
    assert "learning rate" not in text


def test_a_subclass_of_a_stopping_callback_is_ones_own():
    class Early(K.EarlyStopping):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    assert "a callback (Early) ended fit" in stated(Early(monitor="epsilon"))


class Reads(K.Callback):
    """Decides nothing."""

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])


def test_rates_of_schedules_and_of_epochs_are_not_named():
    text = stated(K.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)))
    assert "learning rate" not in text and "ended fit" not in text
    text = stated(Reads())
    assert "learning rate" not in text and "ended fit" not in text


def test_the_end_of_the_budget_is_no_decision():
    plan = dpc.keras.PrivacyPlan(8, 1e-4, 60, batch_size=20, epochs=1)
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    model.fit(
        plan.batches((X, X[:, 0])),
        epochs=5,
        callbacks=[*plan.callbacks, Reads()],
        verbose=0,
    )
    assert model.stop_training
    assert "ended fit" not in str(plan.statement())
