"""Variables that a loss reads: public, constant, or refused."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.keras import DPAdam, PrivateStateWarning

pytestmark = pytest.mark.every_check

rng = np.random.default_rng(0)
X = rng.standard_normal((8, 3)).astype("float32")
Y = rng.standard_normal((8, 1)).astype("float32")
OPTIONS = {"clip": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 8}


class Trainer(tf.keras.Model):
    """Subclasses define which state a step's loss reads and which state it writes."""

    jit = False

    def __init__(self, **options):
        super().__init__()
        self.dense = L.Dense(1)
        self.state = tf.Variable(tf.zeros([8, 1]), name="bank")
        self.copy = tf.Variable(tf.zeros([8, 1]), name="copy")
        self.large = tf.Variable(tf.zeros([70000, 2]), name="large_bank")
        self.total = tf.keras.metrics.Mean(name="seen")
        self.build((None, 3))
        self.compile(DPSGD(0.1, **OPTIONS, **options), jit_compile=self.jit)

    def call(self, x):
        return self.dense(x)

    def each(self, x, y):
        return tf.reduce_sum(tf.square(self(x) - y), 1)

    def train_step(self, data):
        x, y = data[:2]
        self.before(x)
        loss = self.each(x, y) * self.read()
        self.optimizer.minimize(loss, self.dense.trainable_variables)
        self.after(x)
        return {"loss": tf.reduce_mean(loss)}

    def before(self, x):
        pass

    def read(self):
        return 1 + tf.reduce_sum(self.state)

    def after(self, x):
        pass


class MetricsResult(Trainer):
    def before(self, x):
        self.total.update_state(x)

    def read(self):
        return self.total.result()


class BankBefore(Trainer):
    def before(self, x):
        self.state.assign(x[:, :1])


class BankInAFunction(Trainer):
    def before(self, x):
        tf.function(lambda x: self.state.assign(x[:, :1]))(x)


class BankInABranch(Trainer):
    def before(self, x):
        tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: self.state.assign(tf.ones([8, 1])),
            lambda: self.state.read_value(),
        )


class CountOfExamples(Trainer):
    def before(self, x):
        count = tf.cast(tf.shape(x)[0], tf.float32)
        self.state.assign_add(count * tf.ones([8, 1]))


class ReadInAFunction(BankBefore):
    def read(self):
        return tf.function(lambda: 1 + tf.reduce_sum(self.state))()


class RowsOfABank(BankBefore):
    def read(self):
        return 1 + tf.reduce_sum(tf.gather(self.state, [0, 1]))


class OfAnother(BankBefore):
    """The loss reads a copy of the written state."""

    def read(self):
        self.copy.assign(self.state)
        return 1 + tf.reduce_sum(self.copy)


WRITTEN = [
    MetricsResult,
    BankBefore,
    BankInAFunction,
    BankInABranch,
    CountOfExamples,
    ReadInAFunction,
    RowsOfABank,
    OfAnother,
]


def fit(model, epochs=3):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return model.fit(data, epochs=epochs, verbose=0)


def assert_trains(model):
    """Every step of a run is taken, and none refused."""
    before = int(model.optimizer.iterations)
    losses = fit(model).history["loss"]
    assert np.isfinite(losses).all()
    assert int(model.optimizer.iterations) == before + 6


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_step_writes_from_its_batch_is_not_read(kind):
    with pytest.raises(ExampleIsolationError, match="reads the variable"):
        fit(kind())


def test_a_stateful_recurrent_layer_is_refused_by_name():
    layers = [L.LSTM(2, stateful=True), L.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.build((4, 5, 3))
    model.compile(DPSGD(0.1, **{**OPTIONS, "expected_batch_size": 4}), "mse")
    with pytest.raises(ExampleIsolationError, match="stateful=False"):
        model.train_on_batch(np.zeros((4, 5, 3), "float32"), Y[:4])


class BankAfter(Trainer):
    def after(self, x):
        self.state.assign(tf.tile(x[:4, :1], [2, 1]))


class LargeBankAfter(BankAfter):
    def read(self):
        return 1 + tf.reduce_sum(self.large)

    def after(self, x):
        self.large.scatter_nd_update([[17]], x[:1, :2])


@pytest.mark.parametrize("kind", [BankAfter, LargeBankAfter])
@pytest.mark.slow
def test_what_is_written_after_the_step_is_found_in_the_next(kind):
    model = kind()
    with pytest.raises(tf.errors.InvalidArgumentError, match="bank:0"):
        fit(model)
    assert int(model.optimizer.iterations) <= 2


@pytest.mark.slow
def test_what_a_callback_writes_is_found_too():
    model = Trainer()
    write = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.state.assign(X[:, :1])
    )
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bank:0"):
        model.fit(data, epochs=2, verbose=0, callbacks=[write])


@pytest.mark.parametrize("before, after", [(1.0, -1.0), (0.0, -0.0), (2.0, 4.0)])
@pytest.mark.slow
def test_a_sign_that_changes_is_found(before, after):
    """The first bit changes; a sum modulo 2^32 loses an even number of changes."""
    model = Trainer()
    model.state.assign(tf.fill([8, 1], 0.5))
    model.state[3].assign([before])
    write = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.state[3].assign([after])
    )
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bank:0"):
        model.fit(data, epochs=2, verbose=0, callbacks=[write])


class Compiled(BankAfter):
    jit = True


@pytest.mark.slow
def test_compiled_steps_give_noise_only_and_raise_in_the_end():
    model = Compiled()
    model.train_on_batch(X[:4], Y[:4])
    before = model.dense.kernel.numpy()
    model.train_on_batch(X[:4], Y[:4])
    np.testing.assert_array_equal(model.dense.kernel, before)
    with pytest.raises(ExampleIsolationError, match="bank:0"):
        fit(model, epochs=1)


@pytest.mark.parametrize("declared", [["bank"], "variable"])
@pytest.mark.slow
def test_what_is_declared_public_may_change(declared):
    class Declared(BankAfter):
        def __init__(self):
            tf.keras.Model.__init__(self)
            self.dense = L.Dense(1)
            self.state = tf.Variable(tf.zeros([8, 1]), name="bank")
            self.build((None, 3))
            public = [self.state] if declared == "variable" else declared
            optimizer = DPSGD(0.1, **OPTIONS, public_variables=public)
            self.compile(optimizer)

    model = Declared()
    fit(model)
    config = model.optimizer.get_config()
    assert config["public_variables"] == ["bank"]
    again = DPSGD.from_config(config)
    assert again.get_config()["public_variables"] == ["bank"]


@pytest.mark.slow
def test_between_runs_anything_may_be_assigned():
    model = Trainer()
    assert_trains(model)
    model.state.assign(X[:, :1])
    assert_trains(model)


# No false alarms.


class Counter(Trainer):
    def before(self, x):
        self.state.assign_add(0.1 * tf.ones([8, 1]))


class OfTheWeights(Trainer):
    def __init__(self):
        super().__init__()
        self(X)

    def before(self, x):
        self.state.assign(0.9 * self.state + tf.reduce_sum(self.dense.kernel))


class Unread(Trainer):
    def read(self):
        return 1.0

    def after(self, x):
        self.total.update_state(x)


class Schedule(Trainer):
    """The loss reads the optimizer's own variables."""

    def read(self):
        step = tf.cast(self.optimizer.iterations, tf.float32)
        return 1 / (1 + step) + self.optimizer.learning_rate


@pytest.mark.parametrize("kind", [Counter, OfTheWeights, Unread, Schedule, Trainer])
@pytest.mark.slow
def test_public_state_is_none_of_that(kind):
    assert_trains(kind())


LAYERS = {
    "frozen_backbone": lambda: [
        L.Dense(3, trainable=False),
        L.BatchNormalization(trainable=False),
    ],
    "adapted": lambda: [adapted()],
    "frozen_table": lambda: [
        L.Lambda(lambda x: tf.cast(x > 0, tf.int32)),
        L.Embedding(50000, 3, trainable=False),
        L.Flatten(),
    ],
    "dropout": lambda: [L.Dropout(0.3)],
    "generator": lambda: [Noise()],
}


class Noise(L.Layer):
    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


def adapted():
    layer = L.Normalization()
    layer.adapt(X)
    return layer


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slow
def test_ordinary_layers_need_no_declaration(name, jit):
    if jit and name in ("adapted", "frozen_table", "dropout"):
        pytest.skip("nothing that the others do not show")
    layers = [tf.keras.Input((3,)), *LAYERS[name](), L.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile(DPAdam(0.1, **OPTIONS), "mse", jit_compile=jit)
    assert_trains(model)


@pytest.mark.slow
def test_two_private_optimizers_of_one_model():
    """Each optimizer's loss reads the layer that the other trains."""
    first, second = L.Dense(2), L.Dense(1)
    second(first(X))
    optimizers = [DPSGD(0.1, **OPTIONS) for _ in range(2)]

    @tf.function
    def step(x, y):
        for optimizer, layer in zip(optimizers, (first, second), strict=True):
            loss = tf.reduce_sum(tf.square(second(first(x)) - y), 1)
            optimizer.minimize(loss, layer.trainable_variables)

    with warnings.catch_warnings():
        # The first one's own counters are no state that a layer keeps.
        warnings.simplefilter("error", PrivateStateWarning)
        for _ in range(3):
            step(X, Y)
    assert [int(optimizer.iterations) for optimizer in optimizers] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["the step", "a function"])
def test_what_another_private_optimizer_trains_changes_by_its_releases_alone(kind):
    """The scale is trained by an optimizer that takes a step now and then."""
    weight, scale = tf.Variable(tf.ones([3, 1])), tf.Variable(1.0, name="scale")
    ours, other = (DPSGD(0.1, **OPTIONS) for _ in range(2))
    other.build([scale])

    @tf.function
    def step(x, y):
        h = x @ weight
        loss = tf.reduce_sum(tf.square(h * scale - y), 1)
        ours.minimize(loss, [weight])
        if kind == "the step":
            scale.assign(tf.reduce_max(h))

    @tf.function
    def step_of_scale(x, y):
        loss = tf.reduce_sum(tf.square(x @ weight * scale - y), 1)
        other.minimize(loss, [scale])

    with pytest.raises(tf.errors.InvalidArgumentError, match="scale:0"):
        for _ in range(3):
            step(X, Y)
            if kind != "the step":
                step_of_scale(X, Y)
        step(X, Y)
        scale.assign(2.0)
        step(X, Y)
    done = 1 if kind == "the step" else 4
    assert int(ours.iterations) <= done + 1
