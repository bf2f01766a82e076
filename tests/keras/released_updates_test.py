"""A step's writes beside the private optimizer depend on releases alone, or raise."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.keras.watching.fit_watch import OUTSIDE_UPDATES
from tfdpclip.keras.watching.step_labels import StepLabels
from tfdpclip.keras.watching.step_search import made_of_releases

pytestmark = pytest.mark.unchecked
L = tf.keras.layers


class Step:
    """A generator's step, whose parts cases override; the critic is constant."""

    def __init__(self):
        self.critic = tf.Variable(tf.ones([6, 1]), name="critic")
        self.generator = tf.Variable(tf.ones([3, 6]), name="generator")
        self.slot = tf.Variable(tf.zeros([3, 6]), trainable=False, name="slot")
        self.rate = tf.Variable(0.1, trainable=False, name="rate")
        self.seen = tf.Variable(0.0, trainable=False, name="seen")
        self.bank = tf.Variable(tf.zeros([40, 6]), trainable=False, name="bank")
        self.moment = tf.Variable(tf.zeros([6, 1]), trainable=False, name="moment")
        self.draws = tf.random.Generator.from_seed(1)

    def gradient(self, x):
        noise = tf.random.normal([5, 3])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sigmoid(noise @ self.generator @ self.critic))
        return tape.gradient(loss, self.generator)

    def update(self, gradient):
        """As an optimizer with momentum does."""
        self.slot.assign(0.9 * self.slot + gradient)
        self.generator.assign_sub(self.rate * self.slot)

    def step(self, x):
        self.update(self.gradient(x))

    def released(self):
        """Whether the generator's update is shown to be of releases alone."""
        step = tf.function(lambda iterator: self.step(next(iterator)))
        data = tf.data.Dataset.from_tensor_slices(tf.ones([20, 6])).batch(5)
        concrete = step.get_concrete_function(iter(data))
        found = made_of_releases(
            StepLabels(concrete.graph, "private"),
            [self.generator],
            [self.generator, self.critic],
            [self.moment],
        )
        return found == [self.generator]


class InAFunction(Step):
    def step(self, x):
        tf.function(super().step)(x)


class InTurns(Step):
    def step(self, x):
        for _ in tf.range(3):
            self.update(self.gradient(x))


class EverySecond(Step):
    """The generator learns in every second step, by a counter."""

    def step(self, x):
        self.seen.assign_add(1.0)
        tf.cond(self.seen % 2 > 0, lambda: self.update(self.gradient(x)), lambda: None)


class OwnGenerator(Step):
    def gradient(self, x):
        return self.draws.normal([3, 6]) * tf.reduce_sum(self.critic)


class Average(Step):
    """An average of past weights."""

    def step(self, x):
        self.slot.assign(0.9 * self.slot + 0.1 * self.critic[:3])
        self.generator.assign(self.slot)


class BesideAMetric(Step):
    def step(self, x):
        self.seen.assign_add(tf.reduce_sum(x))
        super().step(x)


class ReadsSmallConstants(Step):
    def gradient(self, x):
        kernel = tf.constant(np.arange(16.0).reshape(4, 4), tf.float32)
        return super().gradient(x) * tf.ones([3, 6]) + tf.reduce_mean(kernel)


OF_RELEASES = [
    ReadsSmallConstants,
    Step,
    InAFunction,
    InTurns,
    EverySecond,
    OwnGenerator,
    Average,
    BesideAMetric,
]


class ReadsRecords(Step):
    def gradient(self, x):
        return super().gradient(x) + tf.reduce_mean(x)


class ReadsTheirMean(Step):
    """Feature matching with a mean of all records, which is computed before."""

    mean = np.random.default_rng(0).random([3, 6]).astype("float32")

    def gradient(self, x):
        return super().gradient(x) + self.mean


class ReadsTheirMeanOutside(ReadsTheirMean):
    def __init__(self):
        super().__init__()
        self.mean = tf.constant(self.mean)


class ReadsTheirMeanInAFunction(ReadsTheirMean):
    def step(self, x):
        tf.function(super().step)(x)


class ReadsThemInAFunction(Step):
    def gradient(self, x):
        return super().gradient(x) + tf.function(lambda: tf.reduce_mean(x))()


class ReadsAMetric(Step):
    def gradient(self, x):
        self.seen.assign_add(tf.reduce_sum(x))
        return super().gradient(x) * self.seen


class ReadsTheLastMetric(Step):
    """The read comes before the write, so it reads the last step's records."""

    def step(self, x):
        self.update(self.gradient(x) * self.seen)
        self.seen.assign(tf.reduce_sum(x))


class ReadsABank(Step):
    def gradient(self, x):
        return super().gradient(x) + tf.reduce_mean(self.bank)


class ReadsTheMoments(Step):
    """The private optimizer's sums are no releases."""

    def gradient(self, x):
        return super().gradient(x) + tf.reduce_mean(self.moment)


class SlotOfRecords(Step):
    def step(self, x):
        self.slot.assign_add(tf.ones([3, 6]) * tf.reduce_mean(x))
        super().step(x)


class RateOfRecords(Step):
    def step(self, x):
        self.rate.assign(tf.reduce_mean(x))
        super().step(x)


class ChosenByRecords(Step):
    def step(self, x):
        tf.cond(
            tf.reduce_sum(x) > 0, lambda: self.update(self.gradient(x)), lambda: None
        )


class TurnsOfRecords(Step):
    def step(self, x):
        i = tf.constant(0.0)
        while i < tf.reduce_sum(x):
            self.generator.assign_sub(tf.ones([3, 6]))
            i += 1.0


class TurnsOfLearned(Step):
    """A turn of the loop writes the value that the next turn reads."""

    def step(self, x):
        value, other = tf.zeros([]), tf.zeros([])
        for _ in tf.range(3):
            self.generator.assign_sub(value * tf.ones([3, 6]))
            value, other = other, tf.reduce_sum(x)


class AsManyAsRecords(Step):
    """How many records Poisson sampling draws is data."""

    def gradient(self, x):
        noise = tf.random.normal([tf.shape(x)[0], 3])
        return tf.reduce_mean(noise) * super().gradient(x)


class LikeTheRecords(Step):
    def gradient(self, x):
        return super().gradient(x) * tf.reduce_sum(tf.ones_like(x[:, :2]))


class SeedOfRecords(Step):
    def gradient(self, x):
        seed = tf.cast(tf.reduce_sum(x), tf.int32)
        return tf.random.stateless_normal([3, 6], [seed, 0])


class GeneratorOfRecords(Step):
    def gradient(self, x):
        self.draws.skip(tf.cast(tf.reduce_sum(x), tf.int64))
        return self.draws.normal([3, 6])


class ReadsATable(Step):
    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def gradient(self, x):
        key = tf.constant([1], tf.int64)
        self.table.insert(key, [tf.reduce_sum(x)])
        return super().gradient(x) * self.table.lookup(key)[0]


class ReadsPython(Step):
    def gradient(self, x):
        found = tf.py_function(lambda: 1.0, [], tf.float32)
        return super().gradient(x) * found


class ReadsAFile(Step):
    def gradient(self, x):
        text = tf.io.read_file(tf.constant("numbers"))
        return super().gradient(x) * tf.strings.to_number(text)


OF_DATA = [
    ReadsTheirMean,
    ReadsTheirMeanOutside,
    ReadsTheirMeanInAFunction,
    ReadsRecords,
    ReadsThemInAFunction,
    ReadsAMetric,
    ReadsTheLastMetric,
    ReadsABank,
    ReadsTheMoments,
    SlotOfRecords,
    RateOfRecords,
    ChosenByRecords,
    TurnsOfRecords,
    TurnsOfLearned,
    AsManyAsRecords,
    LikeTheRecords,
    SeedOfRecords,
    GeneratorOfRecords,
    ReadsATable,
    ReadsPython,
    ReadsAFile,
]


@pytest.mark.parametrize("kind", OF_RELEASES)
def test_what_reads_no_data_is_of_releases(kind):
    assert kind().released()


@pytest.mark.parametrize("kind", OF_DATA)
def test_what_may_read_data_is_not(kind):
    assert not kind().released()


class GAN(tf.keras.Model):
    """As in Keras's guide, but for `minimize` and the generator's batch size."""

    matches = generator_first = counts = False

    def __init__(self):
        super().__init__()
        self.critic = tf.keras.Sequential([tf.keras.Input((2,)), L.Dense(1)])
        self.generator = tf.keras.Sequential(
            [tf.keras.Input((3,)), L.Dense(4, "relu"), L.Dense(2)]
        )

    def compile(self, d_optimizer, g_optimizer):
        super().compile(d_optimizer)
        self.g_optimizer = g_optimizer

    def call(self, x):
        return self.critic(x)

    def train_step(self, real):
        parts = [self.train_critic, self.train_generator]
        logs = {}
        for part in reversed(parts) if self.generator_first else parts:
            own = part == self.train_generator and not self.counts
            count = 8 if own else tf.shape(real)[0]
            logs |= part(real, tf.random.normal([count, 3]))
        return logs

    def train_critic(self, real, noise):
        both = tf.concat([self.generator(noise, training=True), real], axis=0)
        signs = tf.concat([tf.ones_like(noise[:, :1]), -tf.ones_like(real[:, :1])], 0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.critic(both) - signs))
        self.optimizer.minimize(loss, self.critic.trainable_variables, tape=tape)
        return {"d_loss": loss}

    def train_generator(self, real, noise):
        with tf.GradientTape() as tape:
            made = self.generator(noise, training=True)
            loss = tf.reduce_mean(tf.square(self.critic(made) + 1.0))
            if self.matches:
                loss += tf.reduce_sum(
                    (tf.reduce_mean(made, 0) - tf.reduce_mean(real, 0)) ** 2
                )
        weights = self.generator.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"g_loss": loss}


class Matching(GAN):
    matches = True


class Counting(GAN):
    """The generator learns from as many random numbers as there are records."""

    counts = True


class GeneratorFirst(GAN):
    generator_first = True


def fitted(model, *callbacks):
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    plan = dpc.keras.PrivacyPlan(20, 1e-3, examples=40, batch_size=8, epochs=2)
    model.compile(plan.optimizer(dpc.keras.DPAdam, 0.1), tf.keras.optimizers.Adam(0.1))
    model.fit(
        plan.batches(x), epochs=2, callbacks=[*plan.callbacks, *callbacks], verbose=0
    )
    return plan.statement()


def test_a_generator_that_sees_the_critic_alone_needs_no_word():
    model = GAN()
    before = model.generator.get_weights()
    statement = fitted(model)
    assert statement.steps == 10
    assert OUTSIDE_UPDATES not in statement.assumptions
    assert (model.generator.get_weights()[0] != before[0]).all()


@pytest.mark.slow
def test_the_generator_may_learn_before_the_critic():
    assert fitted(GeneratorFirst()).steps == 10


@pytest.mark.parametrize("kind", [Matching, Counting])
@pytest.mark.slow
def test_a_generator_that_sees_data_is_refused(kind):
    with pytest.raises(PrivacyMismatchError, match="was updated by the training step"):
        fitted(kind())


@pytest.mark.slow
def test_a_generator_that_a_callback_writes_to_is_found():
    model = GAN()
    write = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.generator.set_weights(
            [w + 1 for w in model.generator.get_weights()]
        )
    )
    with pytest.raises(PrivacyMismatchError, match="updated between two steps"):
        fitted(model, write)


@pytest.mark.slow
def test_after_fit_the_generator_is_compared_again():
    model = GAN()
    fitted(model)
    real = tf.zeros([8, 2])

    @tf.function
    def step(real):
        model.train_critic(real, tf.zeros([8, 3]))

    step(real)
    step(real)
    weight = model.generator.trainable_variables[0]
    weight.assign(weight + 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="changed since the last"):
        step(real)
