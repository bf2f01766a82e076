"""A model that mixes the examples of a batch does not get past the check."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L, Scatter, flat, mostly_slow, some_data
from tests.stack import MEAN, keras2_only
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.keras import check_isolation

pytestmark = pytest.mark.every_check

SETTINGS = {"clip": 1.0, "noise_multiplier": 0, "expected_batch_size": 8}
X, Y = some_data(8, 3)


class Roll(L.Layer):
    def call(self, x):
        return x + tf.roll(x, 1, axis=0)


class Sorted(L.Layer):
    def call(self, x):
        return tf.sort(x, axis=0)


class Mean(L.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, axis=0)


class Attend(L.Layer):
    """Attention over the batch in place of over time."""

    def call(self, x):
        return tf.nn.softmax(x @ tf.transpose(x)) @ x


class Detached(L.Layer):
    """A statistic of the batch behind a stopped gradient."""

    def call(self, x):
        return x - tf.stop_gradient(tf.reduce_mean(x, axis=0))


class Cumulative(L.Layer):
    def call(self, x):
        return tf.cumsum(x, axis=0)


class Reshaped(L.Layer):
    """Rows that hold parts of two examples."""

    def call(self, x):
        return tf.reshape(tf.transpose(x), tf.shape(x))


class OnTheWayBack(L.Layer):
    """Adds the neighbour's gradient: nothing that the graph of the losses shows."""

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda dy: dy + tf.roll(dy, 1, axis=0)

        return identity(x)


MIXING = {
    kind.__name__: kind
    for kind in (
        Scatter,
        Roll,
        Sorted,
        Mean,
        Attend,
        Cumulative,
        Reshaped,
        OnTheWayBack,
    )
}


def model_with(layer, **options):
    tf.keras.utils.set_random_seed(3)
    parts = [tf.keras.Input((3,)), L.Dense(4, "tanh"), layer, L.Dense(4), L.Dense(1)]
    model = tf.keras.Sequential(parts)
    optimizer = DPSGD(1.0, **{**SETTINGS, **options.pop("settings", {})})
    model.compile(optimizer, options.pop("loss", "mse"), **options)
    return model


def assert_refused(act):
    """By its own error, or where only the run shows it, by one that names it."""
    errors = ExampleIsolationError, tf.errors.InvalidArgumentError, ValueError
    with pytest.raises(errors) as caught:
        act()
    if not isinstance(caught.value, ExampleIsolationError):
        assert "Isolation" in str(caught.value) or "examples" in str(caught.value)


@pytest.mark.parametrize("when", mostly_slow(["first"], ["first", "always"]))
@pytest.mark.parametrize("reduction", mostly_slow([MEAN], [MEAN, "none"]))
@pytest.mark.parametrize("kind", MIXING.values(), ids=MIXING)
@pytest.mark.thinned(2)
def test_a_mixing_layer_is_refused_and_nothing_moves(kind, reduction, when):
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    model = model_with(kind(), loss=loss, settings={"check_isolation": when})
    before = flat(model.trainable_variables)
    assert_refused(lambda: model.fit(X, Y, batch_size=8, verbose=0))
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.parametrize("name", mostly_slow(["OnTheWayBack", "Attend"], MIXING))
def test_under_jit_a_mixing_layer_releases_noise_only_and_raises_at_the_end(name):
    """Compiled code cannot raise in the middle of a step."""
    model = model_with(MIXING[name](), jit_compile=True)
    before = flat(model.trainable_variables)
    assert_refused(lambda: model.fit(X, Y, batch_size=4, epochs=2, verbose=0))
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


def test_the_error_names_the_variable_and_the_op():
    model = model_with(OnTheWayBack())
    with pytest.raises(tf.errors.InvalidArgumentError, match="dense.*MatMul"):
        model.train_on_batch(X, Y)


def test_never_is_never():
    model = model_with(OnTheWayBack(), settings={"check_isolation": "never"})
    before = flat(model.trainable_variables)
    model.train_on_batch(X, Y)
    assert np.any(flat(model.trainable_variables) != before)


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("start", ["padding", "one", "one_real"])
@pytest.mark.thinned(4)
def test_a_first_batch_that_proves_nothing_does_not_settle_it(start, jit):
    model = model_with(OnTheWayBack(), jit_compile=jit)
    weight = np.ones(8, np.float32)
    if start == "one":
        model.train_on_batch(X[:1], Y[:1])
    else:
        first = np.zeros(8, np.float32)
        first[:1] = start == "one_real"
        try:
            model.train_on_batch(X, Y, sample_weight=first)
        except tf.errors.InvalidArgumentError:
            return
    before = flat(model.trainable_variables)
    assert_refused(lambda: model.fit(X, Y, batch_size=8, sample_weight=weight))
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


def test_an_empty_first_batch_does_not_settle_it():
    model = model_with(OnTheWayBack())
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])]

    @tf.function(input_signature=signature)
    def step(x, y):
        loss = tf.square(model(x, training=True) - y)[:, 0]
        model.optimizer.minimize(loss, model.trainable_variables)

    step(X[:0], Y[:0])
    assert_refused(lambda: step(X, Y))


def test_a_head_that_starts_at_zero_does_not_hide_what_is_below_it():
    layers = [
        L.Dense(4),
        OnTheWayBack(),
        L.Dense(4),
        L.Dense(1, kernel_initializer="zeros"),
    ]
    model = tf.keras.Sequential([tf.keras.Input((3,)), *layers])
    model.compile(DPSGD(1.0, **SETTINGS), "mse")

    def three_steps():
        for _ in range(3):
            model.train_on_batch(X, Y)

    assert_refused(three_steps)


def test_a_model_that_is_traced_again_is_checked_again():
    class Changing(tf.keras.Model):
        mixes = False

        def __init__(self):
            super().__init__()
            self.a, self.mix, self.b = L.Dense(4), Scatter(), L.Dense(1)

        def call(self, x):
            hidden = self.a(x)
            return self.b(self.mix(hidden) if self.mixes else hidden)

    model = Changing()
    model.compile(DPSGD(1.0, **SETTINGS), "mse")
    model.train_on_batch(X, Y)
    model.mixes = True
    model.compile(model.optimizer, "mse")
    assert_refused(lambda: model.train_on_batch(X, Y))


class SelfAttention(L.Layer):
    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 3)

    def call(self, x):
        steps = tf.reshape(x, [-1, 2, 2])
        return tf.reshape(self.attention(steps, steps), [-1, 4])


ISOLATED = {
    "dense": lambda: L.Dense(4),
    "layer_norm": lambda: L.LayerNormalization(),
    "group_norm": lambda: L.GroupNormalization(2),
    "frozen_batch_norm": lambda: L.BatchNormalization(trainable=False),
    "dropout": lambda: L.Dropout(0.5),
    "noise": lambda: L.GaussianNoise(1.0),
    "attention": SelfAttention,
}


@pytest.mark.parametrize(
    "name", mostly_slow(["dropout", "group_norm", "attention"], ISOLATED)
)
@pytest.mark.thinned(3)
def test_a_model_that_keeps_examples_apart_passes(name):
    model = model_with(ISOLATED[name](), settings={"check_isolation": "always"})
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    check_isolation(model, X, Y)


@pytest.mark.parametrize(
    "kind",
    # It compares losses only.
    [
        *(kind for kind in MIXING.values() if kind is not OnTheWayBack),
        Detached,
        L.BatchNormalization,
    ],
)
def test_the_test_on_data_finds_what_mixes(kind):
    model = model_with(kind())
    before = [w.copy() for w in model.get_weights()]
    with pytest.raises(ExampleIsolationError, match="example"):
        check_isolation(model, X, Y)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_test_on_data_takes_a_loss_and_nests():
    x = {"a": tf.keras.Input((3,)), "b": tf.keras.Input((3,))}
    model = tf.keras.Model(x, L.Dense(1)(x["a"] + x["b"]))
    check_isolation(model, {"a": X, "b": X}, Y, loss=tf.keras.losses.mse)
    bad = tf.keras.Model(x, L.Dense(1)(Detached()(x["a"]) + x["b"]))
    with pytest.raises(ExampleIsolationError):
        check_isolation(bad, {"a": X, "b": X}, Y, loss=tf.keras.losses.mse)


def test_the_test_on_data_says_what_it_needs():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    with pytest.raises(ValueError, match="loss"):
        check_isolation(model, X, Y)
    with pytest.raises(ValueError, match="two"):
        check_isolation(model, X[:1], Y[:1], loss="mse")


EAGER = keras2_only("run_eagerly=True is refused, see held_loss_test.py")


@EAGER
@pytest.mark.xfail(strict=True, reason="eager code leaves no graph to check")
@pytest.mark.filterwarnings("ignore:Eager steps")
def test_eager_code_that_mixes_is_refused():
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model = model_with(L.BatchNormalization(), loss=loss, run_eagerly=True)
    assert_refused(lambda: model.train_on_batch(X, Y))


@EAGER
def test_eager_code_warns_that_it_is_not_checked():
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model = model_with(L.Dense(4), loss=loss, run_eagerly=True)
    with pytest.warns(UserWarning, match="check_isolation"):
        model.train_on_batch(X, Y)
