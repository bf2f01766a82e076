"""Rows that fill a batch up are no records, whatever the step's loss reads.

Every row has a gradient of norm 1 in the same direction, so a step moves the bias by
exactly the number of its records.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip import sampling
from tfdpclip.gradients import LossStructureError

pytestmark = pytest.mark.unchecked
RECORDS, RATE, SIZE = 60, 0.1, 6.0
WEIGHTS = np.array([1.0, 3.0], np.float32)


def data(labels=True):
    x = np.zeros((RECORDS, 3), np.float32)
    return (x, np.arange(RECORDS) % 2) if labels else x


def outputs(y_true, y_pred):
    """Each example's loss: its gradient by the bias is 1."""
    return tf.reduce_mean(y_pred, axis=-1)


class Plain(tf.keras.Model):
    """The inputs are zeros, so the loss is the dense layer's bias."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1, bias_initializer="ones")

    def call(self, x, training=False):
        return self.dense(x)

    def loss_of(self, x, y, w):
        return tf.reduce_mean(outputs(y, self(x, training=True)))

    def take_step(self, x, y, w):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, w)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class Three(Plain):
    """As in Keras's guides, with the weights left out of the loss."""

    def train_step(self, data):
        return self.take_step(*data)


class Two(Plain):
    """As in Keras's guides, of data without weights."""

    def train_step(self, data):
        x, y = data
        return self.take_step(x, y, None)


class One(Plain):
    """As in Keras's guides, of data without labels."""

    def train_step(self, data):
        return self.take_step(self.dense(data) * 0.0, None, None)


class OwnLoss(Plain):
    """Its compute_loss leaves the weights out."""

    def compute_loss(self, x=None, y=None, y_pred=None, *others, **named):
        return tf.reduce_mean(outputs(y, y_pred))


class ClassWeights(Three):
    """Class weights in the place of the weights."""

    def loss_of(self, x, y, w):
        losses = outputs(y, self(x, training=True))
        return tf.reduce_mean(losses * tf.gather(WEIGHTS, tf.cast(y, tf.int32)))


class TwoTerms(Three):
    """The weights are in one of the loss's two terms."""

    def loss_of(self, x, y, w):
        losses = outputs(y, self(x, training=True))
        return tf.reduce_mean(losses * w) + tf.reduce_mean(losses)


class PerExample(Three):
    """A loss for each example, as eager steps need."""

    def loss_of(self, x, y, w):
        return outputs(y, self(x, training=True))


class Activity(Plain):
    """A term of the activities, beside the weighted loss of Keras."""

    def call(self, x, training=False):
        z = self.dense(x)
        self.add_loss(tf.reduce_mean(z))
        return z


class Inner(Three):
    """A function of its own within the training step."""

    def __init__(self):
        super().__init__()
        self.inner = tf.function(self.take_step)

    def train_step(self, data):
        return self.inner(*data)


class Retraced(Inner):
    """The function within is traced again in each step."""

    count = 0

    def train_step(self, data):
        self.count += 1
        return self.inner(*data, self.count)

    def take_step(self, x, y, w, count=0):
        return super().take_step(x, y, w)


class Halves(Inner):
    """A private step of half of the rows."""

    def train_step(self, data):
        return self.inner(*(part[: part.shape[0] // 2] for part in data))


STEPS = {
    step.__name__: step
    for step in (
        *(Plain, Three, Two, OwnLoss, ClassWeights, TwoTerms, Activity),
        Inner,
    )
}


def private(pieces=1, size=SIZE, **options):
    """With the learning rate by which records are counted by SIZE."""
    return dpc.keras.DPSGD(
        size / SIZE,
        clip=dpc.FixedClip(1.0),
        noise_multiplier=0.0,
        expected_batch_size=size,
        accumulation_steps=pieces,
        **options,
    )


def drawn_by(batches):
    """How many records the elements of an iteration have."""
    each = batches.rows_per_record
    return sum(
        int(np.any(np.reshape(w, [-1, each]) != 0, axis=1).sum()) for *_, w in batches
    )


def moved(model):
    """The number of records of norm 1 by which the bias moved from its start."""
    return float((1.0 - model.dense.bias.numpy()[0]) * SIZE)


def fit(make, scheme=None, of=None, options=None, rows=None, people=None, **compiled):
    """Trains an epoch; returns how many records moved the bias, and were drawn."""
    scheme = sampling.Poisson(RATE) if scheme is None else scheme
    options = {} if options is None else options
    pieces = options.get("accumulation_steps", 1)
    unit = {"unit": "person"} if people is not None else {}
    made = dict(seed=3, **options)
    if people is not None:
        made |= dict(people=people, per_person=2)
    of = data() if of is None else of
    batches, same = (scheme.batches(of, **made) for _ in range(2))
    model = make()
    if batches.rows_per_record > 1:
        unit["rows_per_record"] = batches.rows_per_record
    size = batches.expected_batch_size
    model.compile(private(pieces, size, **unit), outputs, **compiled)
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-3, batches)
    model.fit(batches, epochs=1, verbose=0, callbacks=[budget])
    return moved(model), drawn_by(same)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "compiled"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.thinned(3)
def test_only_records_move_the_sum_whatever_the_loss_reads(name, jit):
    found, drawn = fit(STEPS[name], jit_compile=jit)
    assert found == pytest.approx(drawn, abs=1e-3)


OPTIONS = {
    "accumulated": dict(options={"accumulation_steps": 2, "physical_batch_size": 9}),
    "several": dict(steps_per_execution=2),
    "views": dict(options={"views": 2}),
    "people": dict(people=np.arange(RECORDS) // 2, scheme=sampling.Poisson(0.2)),
    "empty": dict(scheme=sampling.Poisson(0.01)),
    "full": dict(scheme=sampling.FixedSize(6, RECORDS)),
}


class Decorated(Three):
    """A `train_step` that is a function of its own."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def test_a_decorated_step_is_traced_anew_after_compile():
    batches = sampling.FixedSize(6, RECORDS).batches(data())
    model = Decorated()
    model(data()[0])
    for _ in range(2):
        model.compile(private(), outputs)
        budget = dpc.keras.PrivacyBudget(np.inf, 1e-5, batches)
        before = moved(model)
        model.fit(batches, epochs=1, verbose=0, callbacks=[budget])
        assert moved(model) - before == pytest.approx(RECORDS, abs=1e-3)


def test_a_function_within_the_step_that_was_traced_before_says_so():
    batches = sampling.FixedSize(6, RECORDS).batches(data())
    model = Inner()
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-5, batches)
    model.compile(private(), outputs)
    model.fit(batches, epochs=1, verbose=0, callbacks=[budget])
    model.compile(model.optimizer, outputs)
    with pytest.raises(LossStructureError, match="tf.function anew after each compile"):
        model.fit(batches, epochs=1, verbose=0, callbacks=[budget])


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "compiled"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_nor_however_the_batches_come(name, jit):
    found, drawn = fit(Three, jit_compile=jit, **OPTIONS[name])
    assert found == pytest.approx(drawn, abs=1e-3)


@pytest.mark.parametrize(
    "make", [Inner, pytest.param(Retraced, marks=pytest.mark.slow)]
)
def test_nor_within_functions_that_eager_steps_call(make):
    found, drawn = fit(make, sampling.Poisson(0.4), run_eagerly=True)
    assert found == pytest.approx(drawn, abs=1e-3)


@pytest.mark.slow
def test_functions_of_other_rows_than_an_eager_step_was_given_are_refused():
    with pytest.raises(
        dpc.gradients.LossStructureError, match="differ in their number of rows"
    ):
        fit(Halves, sampling.Poisson(0.4), run_eagerly=True)
