"""Steps belong to the optimizer that ran them; unseen steps count as full batches."""

import copy
import gc
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.stack import KERAS_3, keras2_only
from tfdpclip import accounting, sampling
from tfdpclip.accounting import Ledger
from tfdpclip.keras import DPSGD, DPAdam, PrivacyBudget
from tfdpclip.keras.watching.step_history import StepHistory, history_of

pytestmark = pytest.mark.unchecked

_RECORDS = 50
_DELTA = 1e-5
_Z = 2.0


def _data():
    x = np.linspace(0, 1, 2 * _RECORDS, dtype=np.float32).reshape(-1, 2)
    return x, x[:, :1]


@pytest.fixture(scope="module", name="batches")
def _drawn():
    return sampling.Poisson(0.1).batches(_data())


def _model(z=_Z, make=DPSGD, **options):
    optimizer = make(
        0.1, clip=1.0, noise_multiplier=z, expected_batch_size=5, **options
    )
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def _unseen(model, steps):
    """Full batches, without a callback."""
    x, y = _data()
    model.fit(x, y, batch_size=_RECORDS, epochs=steps, verbose=0)


def _seen(model, batches, ledger, epochs=1, callbacks=()):
    budget = PrivacyBudget(
        math.inf, _DELTA, batches, "rdp", ledger=ledger, allow_change=True
    )
    model.fit(batches, epochs=epochs, verbose=0, callbacks=[budget, *callbacks])
    return budget


def _epsilon(batches, seen, *unseen):
    """Of Poisson steps, and of full batches given as (steps, z)."""
    ledger = Ledger(_DELTA, "rdp")
    for steps, z in unseen:
        ledger.begin(noise_multiplier=z, sampling=sampling.FullBatch(), change=True)
        ledger.record(steps)
    ledger.begin(noise_multiplier=_Z, sampling=batches, change=True)
    ledger.record(seen)
    return ledger.epsilon()


class TestUnseenSteps:
    @pytest.mark.slow
    def test_before_a_budgeted_fit_are_full_batches(self, batches):
        model = _model()
        _unseen(model, 50)
        budget = _seen(model, batches, None)
        assert budget.ledger.epsilon() == _epsilon(batches, 10, (50, _Z))
        # In closed form: 50 Gaussians and something.
        assert budget.ledger.epsilon() >= accounting.gdp_epsilon(
            math.sqrt(50) / _Z, _DELTA
        )
        text = str(budget.statement())
        assert "50 steps ran before they were recorded" in text
        assert "full batch; then Poisson" in text

    @pytest.mark.slow
    def test_between_two_budgeted_fits(self, batches):
        model, ledger = _model(), Ledger(_DELTA, "rdp")
        _seen(model, batches, ledger)
        _unseen(model, 3)
        budget = _seen(model, batches, ledger)
        assert ledger.steps == 23
        assert ledger.epsilon() == _epsilon(batches, 20, (3, _Z))
        assert budget.ledger is ledger

    @pytest.mark.slow
    def test_within_a_budgeted_fit(self, batches):
        x, y = _data()

        class More(tf.keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.train_on_batch(x, y)

        model, ledger = _model(), Ledger(_DELTA, "rdp")
        _seen(model, batches, ledger, epochs=3, callbacks=[More()])
        # The last unseen step comes after the last execution.
        _seen(model, batches, ledger)
        assert ledger.steps == 43
        assert ledger.epsilon() == _epsilon(batches, 40, (3, _Z))

    @pytest.mark.parametrize("count", [0, 100, pytest.param(5, marks=pytest.mark.slow)])
    @pytest.mark.slow
    def test_are_not_hidden_by_setting_the_step_counter(self, count, batches):
        model, ledger = _model(), Ledger(_DELTA, "rdp")
        _seen(model, batches, ledger)
        _unseen(model, 7)
        model.optimizer.iterations.assign(count)
        _unseen(model, 2)
        _seen(model, batches, ledger)
        # A counter that was set forward may stand for unknown steps.
        assert ledger.steps == 20 + 9 + max(0, count - 17)

    @pytest.mark.slow
    def test_with_accumulation(self, batches):
        model = _model(accumulation_steps=2)
        _unseen(model, 4)
        pieces = sampling.Poisson(0.1).batches(_data(), accumulation_steps=2)
        budget = _seen(model, pieces, None)
        assert budget.ledger.steps == 12
        assert budget.ledger.epsilon() == _epsilon(pieces, 10, (2, _Z))

    @pytest.mark.slow
    def test_under_replace_one(self):
        drawn = sampling.FixedSize(5, _RECORDS).batches(_data())
        model = _model()
        _unseen(model, 9)
        budget = _seen(model, drawn, None)
        worst = accounting.gdp_epsilon(math.sqrt(9) / (_Z / 2), _DELTA)
        assert worst <= budget.ledger.epsilon() < 2 * worst

    def test_two_private_steps_in_every_step_are_refused(self, batches):
        class Twice(tf.keras.Sequential):
            def train_step(self, data):
                x, y, w = tf.keras.utils.unpack_x_y_sample_weight(data)
                for _ in range(2):
                    with tf.GradientTape() as tape:
                        loss = self.compute_loss(x, y, self(x), w)
                    self.optimizer.minimize(loss, self.trainable_variables, tape)
                return {"loss": loss}

        model = Twice([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(_model().optimizer, "mse")
        ledger = Ledger(_DELTA, "rdp")
        with pytest.raises(ValueError, match="more than once"):
            _seen(model, batches, ledger)
        # No step ran: a step of two releases of one draw costs more than two draws.
        assert model.optimizer.iterations.numpy() == 0


class TestIdentity:
    @pytest.mark.slow
    def test_two_models_add_up_in_one_ledger(self, batches):
        ledger = Ledger(_DELTA, "rdp")
        first, second = _model(), _model()
        _seen(first, batches, ledger, epochs=4)
        _unseen(second, 40)
        _seen(second, batches, ledger, epochs=2)
        assert ledger.steps == 40 + 40 + 20
        assert ledger.epsilon() == _epsilon(batches, 60, (40, _Z))

    @pytest.mark.slow
    def test_going_back_uncounts_nothing(self, batches, tmp_path):
        model, ledger = _model(), Ledger(_DELTA, "rdp")
        checkpoint = tf.train.Checkpoint(model=model)
        _seen(model, batches, ledger, epochs=2)
        path = checkpoint.save(str(tmp_path / "c"))
        _seen(model, batches, ledger, epochs=3)
        checkpoint.restore(path)
        assert model.optimizer.iterations.numpy() == 20
        _unseen(model, 5)
        _seen(model, batches, ledger, epochs=2)
        assert ledger.steps == 70 + 5
        assert ledger.epsilon() == _epsilon(batches, 70, (5, _Z))

    def _restored(self, saved, how, tmp_path):
        if how == "checkpoint":
            path = tf.train.Checkpoint(model=saved).save(str(tmp_path / "c"))
            model = _model(make=type(saved.optimizer))
            tf.train.Checkpoint(model=model).restore(path)
        elif how.startswith("weights"):
            # Keras 3 has a single file format of weights.
            path = str(tmp_path / ("w" if how == "weights" else "w.weights.h5"))
            saved.save_weights(path)
            # An Adam that is not built has fewer variables than the file.
            model = _model(make=type(saved.optimizer))
            if how == "weights, built":
                model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        else:
            saved.save(tmp_path / "model.keras")
            model = tf.keras.models.load_model(tmp_path / "model.keras")
        return model

    @pytest.mark.parametrize(
        "how",
        [
            "checkpoint",
            pytest.param(
                "weights",
                marks=[pytest.mark.slow, keras2_only("it writes .weights.h5 files")],
            ),
            "weights, built",
            "weights, not built",
            "keras",
        ],
    )
    @pytest.mark.slow
    def test_restored_steps_are_recognised(self, how, batches, tmp_path):
        path = tmp_path / "privacy.json"
        first = _model(make=DPAdam)
        _seen(first, batches, path)
        _unseen(first, 4)
        model = self._restored(first, how, tmp_path)
        # The copy and the first model go on separately.
        _unseen(model, 2)
        _unseen(first, 3)
        _seen(model, batches, path)
        ledger = Ledger.load(path)
        assert ledger.steps == 10 + 4 + 2 + 10
        assert ledger.epsilon() == _epsilon(batches, 20, (6, _Z))
        _seen(first, batches, path)
        assert Ledger.load(path).steps == 26 + 3 + 10

    @pytest.mark.slow
    def test_restored_steps_without_their_ledger_are_full_batches(
        self, batches, tmp_path
    ):
        first = _model(z=0.5)
        _seen(first, batches, None)
        model = self._restored(first, "checkpoint", tmp_path)
        budget = _seen(model, batches, None)
        # With the noise that they had.
        assert budget.ledger.epsilon() == _epsilon(batches, 10, (10, 0.5))

    @pytest.mark.slow
    @keras2_only("an optimizer from an HDF5 file cannot train")
    def test_steps_of_unknown_origin_are_full_batches(self, batches, tmp_path):
        first = _model(make=DPAdam)
        ledger = Ledger(_DELTA, "rdp")
        _seen(first, batches, ledger)
        first.save(tmp_path / "model.h5")  # Has the step counter, and no history.
        model = tf.keras.models.load_model(tmp_path / "model.h5")
        assert model.optimizer.iterations.numpy() == 10
        for _ in range(2):
            _seen(model, batches, ledger)
        assert ledger.steps == 10 + 10 + 20
        assert ledger.epsilon() == _epsilon(batches, 30, (10, _Z))

    def test_a_copy_is_another(self, batches):
        first, ledger = _model(), Ledger(_DELTA, "rdp")
        _seen(first, batches, ledger)
        history = history_of(first.optimizer)
        made_again = DPSGD.from_config(first.optimizer.get_config())
        clone = history_of(made_again)
        other = copy.deepcopy(history)
        assert len({history.identity, other.identity, clone.identity}) == 3
        assert clone.known_steps() == {}
        assert other.releases == 0
        assert other.known_steps().keys() == {history.identity}
        of_keras = copy.copy(first.optimizer)  # A history does not keep it alive.
        copied = history_of(of_keras)
        # A copy of Keras 3 has variables of its own.
        assert (copied is history) != KERAS_3
        assert copied.known_steps() == history.known_steps()

    @pytest.mark.slow
    def test_reserved_steps_that_did_not_run_hide_none(self, batches):
        model, ledger = _model(), Ledger(_DELTA, "rdp")

        class Crash(tf.keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 3:
                    raise RuntimeError("crash")

        with pytest.raises(RuntimeError, match="crash"):
            _seen(model, batches, ledger, callbacks=[Crash()])
        assert ledger.reserved
        # A new callback cannot know that the reserved step did not run.
        _seen(model, batches, ledger)
        assert ledger.steps == 3 + 1 + 10
        _unseen(model, 1)
        _seen(model, batches, ledger)
        assert ledger.steps == 14 + 1 + 10

    @pytest.mark.slow
    def test_a_new_optimizer_knows_the_steps_of_the_one_before(self, batches):
        model = _model()
        _unseen(model, 2)
        before = history_of(model.optimizer).identity
        model.compile(_model().optimizer, "mse")
        gc.collect()
        ledger = Ledger(_DELTA, "rdp")
        _seen(model, batches, ledger)
        assert ledger.steps == 2 + 10
        assert ledger.counted[before] == 2

    @pytest.mark.slow
    def test_a_private_model_frozen_in_another_has_its_steps_behind_it(self, batches):
        before = _model()
        _unseen(before, 2)
        before.trainable = False
        head = tf.keras.layers.Dense(1)
        model = tf.keras.Sequential([tf.keras.Input((2,)), before, head])
        model.compile(_model().optimizer, "mse")
        ledger = Ledger(_DELTA, "rdp")
        _seen(model, batches, ledger)
        assert ledger.steps == 2 + 10

    @pytest.mark.slow
    def test_two_optimizers_of_one_model_know_of_each_other(self, batches):
        model = _model()
        _unseen(model, 2)
        first = model.optimizer
        model.compile(_model().optimizer, "mse")
        _unseen(model, 3)
        second = model.optimizer
        model.compile(first, "mse")
        _unseen(model, 4)
        model.compile(second, "mse")
        ledger = Ledger(_DELTA, "rdp")
        _seen(model, batches, ledger)
        assert ledger.steps == 2 + 3 + 4 + 10

    def test_a_damaged_history_is_refused(self):
        history = history_of(_model().optimizer)
        for damage in (b"", b"[]", b'{"steps": {"a": {"steps": -1}}, "counter": 1}'):
            with pytest.raises(ValueError, match="is damaged"):
                history.deserialize(damage)
        assert isinstance(history, StepHistory)
