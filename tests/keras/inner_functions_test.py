"""The private step in a function, or a branch, within the training step."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD
from tfdpclip import sampling
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.keras import PrivacyBudget

pytestmark = pytest.mark.unchecked

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.zeros((20, 1), np.float32)


class Inner(tf.keras.Sequential):
    """Minimises in a function, or a branch, that the training step calls."""

    how, prepare = "function", staticmethod(lambda x: (x, 1.0))

    def update(self, x, y, scale):
        loss = scale * tf.reduce_sum((self(x, training=True) - y) ** 2, axis=-1)
        self.optimizer.minimize(loss, self.trainable_variables)
        return tf.reduce_mean(loss)

    def train_step(self, data):
        x, y = data[:2]
        x, scale = self.prepare(x)
        scale = tf.convert_to_tensor(scale)
        if self.how == "function":
            loss = tf.function(self.update)(x, y, scale)
        elif self.how == "branch":
            loss = tf.cond(
                tf.constant(True), lambda: self.update(x, y, scale), lambda: 0.0
            )
        else:  # Which of two losses, the batch decides.
            loss = tf.cond(
                tf.reduce_max(x) > 2.0,
                lambda: self.update(x, -y, 1.0),
                lambda: self.update(x, y, 1.0),
            )
        return {"loss": loss}


def fit(how, prepare, kind=Inner, **options):
    model = kind([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.how, model.prepare = how, prepare
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=20)
    model.compile(optimizer, **{"jit_compile": False, **options})
    batches = sampling.FullBatch().batches((X, Y))
    budget = PrivacyBudget(float("inf"), 1e-5, batches)
    model.fit(batches, epochs=2, verbose=0, callbacks=[budget])
    return budget


MIXED = {
    "standardised": lambda x: ((x - tf.reduce_mean(x, 0)) / 2.0, 1.0),
    "turned": lambda x: (0.7 * x + 0.3 * tf.reverse(x, [0]), 1.0),
    "a scale": lambda x: (x, 1 / (1 + tf.reduce_max(x))),
}


@pytest.mark.parametrize("how", ["function", "branch"])
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.thinned(3)
def test_what_is_made_of_a_batch_outside_is_refused(name, how):
    with pytest.raises(PrivacyMismatchError, match="more than data"):
        fit(how, MIXED[name])


def test_a_batch_does_not_choose_its_loss():
    with pytest.raises(PrivacyMismatchError, match="more than data"):
        fit("chosen", lambda x: (x, 1.0))


class Remembering(Inner):
    """Trains on data of a variable, a metric or the last pass."""

    def __init__(self, layers):
        super().__init__(layers)
        self.buffer = tf.Variable(tf.zeros([20, 3]), trainable=False)
        self.seen = tf.keras.metrics.Mean()
        self.count = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data[:2]
        update = tf.function(self.update)
        turned = tf.reverse(x, [0])
        if self.how == "a variable":
            self.buffer.assign(turned)
            loss = update(self.buffer.read_value(), y, tf.constant(1.0))
        elif self.how == "a metric":
            loss = update(x, y, 1 / (1 + self.seen.result()))
            self.seen.update_state(tf.reduce_max(x))
        elif self.how == "a metric chooses":
            self.seen.update_state(tf.reduce_max(x))
            loss = tf.cond(
                self.seen.result() > 2.0,
                lambda: self.update(x, -y, 1.0),
                lambda: self.update(x, y, 1.0),
            )
        elif self.how == "a count chooses":
            self.count.assign_add(1)
            loss = tf.cond(
                tf.logical_and(self.count % 2 == 0, self.optimizer.iterations < 100),
                lambda: self.update(x, y, 1.0),
                lambda: self.update(x, y, 0.5),
            )
        else:

            def one(i, x, last):
                last = tf.cond(i > 0, lambda: self.update(x, y, 1.0), lambda: last)
                return i + 1, (turned if self.how == "a pass" else x), last

            loss = tf.while_loop(lambda i, *_: i < 2, one, (0, x, 0.0))[2]
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a variable", "more than data"),
        ("a metric", "more than data"),
        ("a metric chooses", "more than data"),
        ("a pass", "minimize more than once, or in a loop"),
    ],
)
def test_what_the_step_remembers_is_more_than_data(how, message):
    with pytest.raises(PrivacyMismatchError, match=message):
        fit(how, None, Remembering)


@pytest.mark.slow
def test_a_count_of_steps_may_choose():
    assert fit("a count chooses", None, Remembering).ledger.steps == 2


SOUND = {
    "as they came": lambda x: (x, 1.0),
    "by a constant": lambda x: (tf.cast(x, tf.float32) / 255.0 - 0.5, 0.5),
}


@pytest.mark.parametrize("how", ["function", "branch"])
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.thinned(2)
def test_data_as_they_came_may_be_handed_on(name, how):
    assert fit(how, SOUND[name]).ledger.steps == 2


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"steps_per_execution": 2}])
@pytest.mark.thinned(2)
def test_what_keras_compiles_or_repeats_is_handed_data_as_they_came(options):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=20)
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    batches = sampling.FullBatch().batches((X, Y), steps=4)
    budget = PrivacyBudget(float("inf"), 1e-5, batches)
    model.fit(batches, verbose=0, callbacks=[budget])
    assert budget.ledger.steps == 4
