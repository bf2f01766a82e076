"""Several phases: layers are frozen or unfrozen, and optimizers meet further models."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.watched import DELTA, RECORDS, private, small_data
from tests.stack import KERAS_3
from tfdpclip import sampling
from tfdpclip._variables import unwrapped
from tfdpclip.accounting import Ledger, PrivacyMismatchError
from tfdpclip.keras import PrivacyBudget

pytestmark = pytest.mark.unchecked

L = tf.keras.layers
RULES = {"fixed": 1.0, "groups": dpc.LayerwiseClip()}


def two_layers():
    layers = [tf.keras.Input((2,)), L.Dense(3, name="first"), L.Dense(1, name="last")]
    return tf.keras.Sequential(layers)


def new_optimizer(clip=1.0):
    return dpc.keras.DPSGD(0.1, clip=clip, noise_multiplier=2.0, expected_batch_size=5)


@pytest.fixture(scope="module", name="batches")
def _drawn():
    return sampling.Poisson(0.1).batches(small_data())


def fit(model, batches, ledger, callbacks=()):
    budget = PrivacyBudget(math.inf, DELTA, batches, "rdp", ledger=ledger)
    model.fit(batches, verbose=0, callbacks=[budget, *callbacks])


class TestALayerThatIsUnfrozen:
    @pytest.mark.parametrize("clip", RULES.values(), ids=RULES)
    def test_needs_a_new_optimizer_and_the_ledger_goes_on(self, clip, batches):
        model, ledger = two_layers(), Ledger(DELTA, "rdp")
        model.layers[0].trainable = False
        model.compile(new_optimizer(clip), "mse")
        fit(model, batches, ledger)
        model.layers[0].trainable = True
        model.compile(model.optimizer, "mse")
        with pytest.raises(ValueError, match="first/kernel.* and 1 more.*new optimi"):
            fit(model, batches, ledger)
        assert ledger.steps == 10
        model.compile(new_optimizer(clip), "mse")
        fit(model, batches, ledger)
        assert ledger.steps == 20

    def test_is_an_error_without_a_budget_too(self):
        model, (x, y) = two_layers(), small_data()
        model.layers[0].trainable = False
        model.compile(new_optimizer(), "mse")
        model.fit(x, y, batch_size=RECORDS, verbose=0)
        model.layers[0].trainable = True
        model.compile(model.optimizer, "mse")
        with pytest.raises(ValueError, match="unfrozen.*model.compile"):
            model.fit(x, y, batch_size=RECORDS, verbose=0)

    @pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no LoRA")
    @pytest.mark.slow
    def test_and_low_rank_updates_need_one_too(self, batches):
        model, ledger = two_layers(), Ledger(DELTA, "rdp")
        model.compile(new_optimizer(), "mse")
        fit(model, batches, ledger)
        model.layers[0].enable_lora(2)
        model.compile(model.optimizer, "mse")
        with pytest.raises(ValueError, match="first/lora.*LoRA"):
            fit(model, batches, ledger)


class TestAUsedOptimizer:
    @pytest.mark.parametrize("clip", RULES.values(), ids=RULES)
    def test_is_refused_by_a_second_model(self, clip, batches):
        first, second, ledger = two_layers(), two_layers(), Ledger(DELTA, "rdp")
        first.compile(new_optimizer(clip), "mse")
        fit(first, batches, ledger)
        second.compile(first.optimizer, "mse")
        with pytest.raises(ValueError, match="[nN]ew optimizer"):
            fit(second, batches, ledger)
        assert ledger.steps == 10
        # The steps are none of the second model's: a ledger of its own has its own.
        second.compile(new_optimizer(clip), "mse")
        own = Ledger(DELTA, "rdp")
        fit(second, batches, own)
        assert own.steps == 10

    @pytest.mark.slow
    def test_is_refused_in_a_loop(self):
        first, second = L.Dense(1), L.Dense(1)
        optimizer, (x, y) = new_optimizer(), small_data()

        def step_of(layer):
            layer.build((None, 2))

            @tf.function
            def step():
                losses = tf.square(layer(x) - y)[:, 0]
                optimizer.minimize(losses, layer.trainable_variables)

            return step

        step_of(first)()
        with pytest.raises(ValueError, match="used with another model"):
            step_of(second)()


class Coded(tf.keras.Model):
    """A model whose step may set a frozen kernel from the batch's activations."""

    def __init__(self):
        super().__init__()
        self.first, self.code, self.last = L.Dense(2), L.Dense(2), L.Dense(1)
        self.sets = False

    def call(self, x):
        return self.last(self.code(self.first(x)))

    def train_step(self, data):
        logs = super().train_step(data)
        if self.sets:
            hidden = self.first(data[0])
            code = tf.matmul(hidden, hidden, transpose_a=True) / RECORDS
            unwrapped(self.code.kernel).assign(code)
        return logs


class _Sets(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        kernel = unwrapped(self.model.code.kernel)
        kernel.assign(kernel * np.float32(0.9))


class TestALayerThatIsFrozen:
    """A frozen layer that the same optimizer trained before."""

    @staticmethod
    def _frozen(batches):
        model, ledger = Coded(), Ledger(DELTA, "rdp")
        model(small_data()[0])
        model.compile(private(), "mse")
        fit(model, batches, ledger)
        model.code.trainable = False
        return model, ledger

    def test_trains_on(self, batches):
        model, ledger = self._frozen(batches)
        model.compile(model.optimizer, "mse")
        before = model.code.get_weights()
        fit(model, batches, ledger)
        assert ledger.steps == 20
        for value, was in zip(model.code.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, was)

    @pytest.mark.filterwarnings("ignore::tfdpclip.keras.PrivateStateWarning")
    def test_is_not_set_by_the_step(self, batches):
        model, ledger = self._frozen(batches)
        model.sets = True
        model.compile(model.optimizer, "mse")
        with pytest.raises(PrivacyMismatchError, match="updated by the training step"):
            fit(model, batches, ledger)

    def test_is_not_set_by_a_callback(self, batches):
        model, ledger = self._frozen(batches)
        model.compile(model.optimizer, "mse")
        with pytest.raises(PrivacyMismatchError, match="updated between two steps"):
            fit(model, batches, ledger, [_Sets()])
