"""A model that mixes the examples of a batch does not get past the check."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
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
    """Expects ExampleIsolationError; an error while running must name the examples."""
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
    model = model_with(kind(), loss=loss, settings={"check_gradients": when})
    before = flat(model.trainable_variables)
    assert_refused(lambda: model.fit(X, Y, batch_size=8, verbose=0))
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["OnTheWayBack", "Attend"], MIXING))
def test_under_jit_a_mixing_layer_releases_noise_only_and_raises_at_the_end(name):
    """Compiled code cannot raise in the middle of a step."""
    model = model_with(MIXING[name](), jit_compile=True)
    before = flat(model.trainable_variables)
    assert_refused(lambda: model.fit(X, Y, batch_size=4, epochs=2, verbose=0))
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.slow
def test_the_error_names_the_op_that_mixes_gradients():
    model = model_with(OnTheWayBack())
    with pytest.raises(tf.errors.InvalidArgumentError, match="way_back.*IdentityN"):
        model.train_on_batch(X, Y)


class ClippedOnTheWayBack(L.Layer):
    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda dy: tf.clip_by_value(dy, -1.0, 1.0)

        return identity(x)


@pytest.mark.slow
def test_a_layer_that_clips_gradients_trains():
    model = model_with(ClippedOnTheWayBack())
    model.fit(X, 40 * Y, batch_size=8, verbose=0)
    dpc.testing.assert_exact(model, (X, 40 * Y))


class InTraining(L.Layer):
    """Runs the given layer always as in training."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x, training=True)


# AugMix is left out: each trace draws whether it contains the histogram.
@pytest.mark.parametrize("name", ["Equalization", "RandAugment"])
def test_a_histogram_of_all_images_is_refused_by_name(name):
    if not hasattr(L, name):
        pytest.skip("a layer of Keras 3")
    model = tf.keras.Sequential(
        [
            tf.keras.Input((4, 4, 3)),
            InTraining(getattr(L, name)(value_range=(0, 255))),
            L.Flatten(),
            L.Dense(1),
        ]
    )
    model.compile(DPSGD(1.0, **SETTINGS), "mse")
    images = np.random.default_rng(0).uniform(0, 255, (8, 4, 4, 3))
    with pytest.raises(ExampleIsolationError, match="histogram of all"):
        model.fit(images.astype("float32"), Y, batch_size=8, verbose=0)


@pytest.mark.slow
def test_a_sampled_softmax_trains():
    table = L.Embedding(20, 4)
    table.build(None)

    class Sampled(L.Layer):
        def __init__(self):
            super().__init__()
            self.table = table

        def call(self, inputs):
            hidden, label = inputs
            bias = tf.zeros([20])
            classes = tf.convert_to_tensor(self.table.embeddings)
            return tf.nn.sampled_softmax_loss(classes, bias, label, hidden, 6, 20)

    x, label = tf.keras.Input((3,)), tf.keras.Input((1,), dtype="int64")
    model = tf.keras.Model([x, label], Sampled()([L.Dense(4)(x), label]))
    settings = {**SETTINGS, "check_gradients": "always"}
    model.compile(DPSGD(1.0, **settings), lambda y, loss: loss)
    before = flat(model.trainable_variables)
    labels = np.arange(8)[:, np.newaxis]
    model.fit([X, labels], Y, batch_size=8, epochs=2, verbose=0)
    assert len(model.trainable_variables) == 3
    assert np.any(flat(model.trainable_variables) != before)


def test_never_is_never():
    model = model_with(OnTheWayBack(), settings={"check_gradients": "never"})
    before = flat(model.trainable_variables)
    model.train_on_batch(X, Y)
    assert np.any(flat(model.trainable_variables) != before)


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("start", ["padding", "one", "one_real"])
@pytest.mark.slow
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


@pytest.mark.slow
def test_an_empty_first_batch_does_not_settle_it():
    model = model_with(OnTheWayBack())
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])]

    @tf.function(input_signature=signature)
    def step(x, y):
        loss = tf.square(model(x, training=True) - y)[:, 0]
        model.optimizer.minimize(loss, model.trainable_variables)

    step(X[:0], Y[:0])
    assert_refused(lambda: step(X, Y))


@pytest.mark.slow
def test_behind_a_head_that_starts_at_zero_an_example_moves_its_own_gradient_alone():
    """The first step shows no gradient below the head, and passes the comparison."""

    def weights_after_a_step_on(x):
        tf.keras.utils.set_random_seed(3)
        head = L.Dense(1, kernel_initializer="zeros")
        layers = [L.Dense(4), OnTheWayBack(), L.Dense(4), head]
        model = tf.keras.Sequential([tf.keras.Input((3,)), *layers])
        model.compile(DPSGD(1.0, **SETTINGS), "mse")
        for batch in (X, X, x):
            model.train_on_batch(batch, Y)
        return flat(model.trainable_variables)

    moved = np.concatenate([X[:-1], 100 * X[-1:]])
    change = weights_after_a_step_on(moved) - weights_after_a_step_on(X)
    sensitivity = 2 * SETTINGS["clip"] / SETTINGS["expected_batch_size"]
    assert 0 < np.linalg.norm(change) <= sensitivity + 1e-5


@pytest.mark.slow
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
@pytest.mark.slow
def test_a_model_that_keeps_examples_apart_passes(name):
    model = model_with(ISOLATED[name](), settings={"check_gradients": "always"})
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    check_isolation(model, X, Y)


class Damped(L.Layer):
    """The largest row scales every example's gradient; the value is unchanged."""

    def call(self, x):
        largest = tf.sort(tf.norm(x, axis=-1))[-1]
        gate = tf.stop_gradient(tf.minimum(1.0, 0.5 / largest))
        return gate * x + tf.stop_gradient((1 - gate) * x)


class Masked(L.Layer):
    """Rows far above the median get no gradient."""

    def call(self, x):
        size = tf.norm(x, axis=-1)
        median = tf.sort(size)[tf.shape(size)[0] // 2]
        return tf.where((size < 1.5 * median)[:, None], x, tf.stop_gradient(x))


class ScaledBackwards(L.Layer):
    """The first row scales everybody's gradient, on the way back only."""

    def call(self, x):
        gate = tf.stop_gradient(tf.sigmoid(x[0, 0]))

        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda dy: gate * dy

        return identity(x)


class ClippedTogether(L.Layer):
    """Clips the gradients of the whole batch together."""

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 0.01)

        return identity(x)


class Outlying(L.Layer):
    """Nothing happens, but in a batch with an outlier."""

    def call(self, x):
        size = tf.norm(x, axis=-1)
        outlying = tf.reduce_max(size) > 20.0
        return tf.cond(outlying, lambda: tf.stop_gradient(x), lambda: tf.identity(x))


class Lone(L.Layer):
    """Nothing happens, but in a batch of rows that are nearly equal."""

    def call(self, x):
        size = tf.norm(x, axis=-1)
        alike = tf.reduce_max(size) < 1.1 * tf.reduce_min(size)
        gate = tf.where(alike, 0.5, 1.0)
        return gate * x + tf.stop_gradient((1 - gate) * x)


GATED = Damped, Masked, ScaledBackwards, ClippedTogether, Lone


def hardest(labels, outputs):
    losses = tf.reduce_mean(tf.square(labels - outputs), axis=-1)
    hardest = tf.math.top_k(losses, 1)[0][0]
    return tf.where(losses >= 0.5 * hardest, losses, tf.stop_gradient(losses))


@pytest.mark.parametrize(
    "kind", [*MIXING.values(), *GATED, Detached, L.BatchNormalization]
)
@pytest.mark.slow
def test_the_test_on_data_finds_what_mixes(kind):
    model = model_with(kind())
    before = [w.copy() for w in model.get_weights()]
    with pytest.raises(ExampleIsolationError, match="example"):
        check_isolation(model, X, Y)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_test_on_data_finds_what_an_outlier_does():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(4), Outlying()])
    with pytest.raises(ExampleIsolationError, match="gradient of the other"):
        check_isolation(model, X, np.zeros([8, 4]), loss=tf.keras.losses.mse)


def test_the_test_on_data_finds_a_loss_of_the_hardest():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    with pytest.raises(ExampleIsolationError, match="gradient of the other"):
        check_isolation(model, X, Y, loss=hardest)


class OwnGate(L.Layer):
    """An example's own norm scales its gradient."""

    def call(self, x):
        gate = tf.stop_gradient(1 / (1 + tf.norm(x, axis=-1, keepdims=True)))
        return gate * x + tf.stop_gradient((1 - gate) * x)


class OwnLargest(L.Layer):
    """The largest features of an example get a gradient."""

    def call(self, x):
        least = tf.math.top_k(x, 2).values[..., -1:]
        return tf.where(x >= least, x, tf.stop_gradient(x))


class Rounded(L.Layer):
    """A straight-through estimator."""

    def call(self, x):
        return x + tf.stop_gradient(tf.round(4 * x) / 4 - x)


class ClippedAlone(L.Layer):
    """The gradient of each example is clipped."""

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 0.01, axes=[1])

        return identity(x)


class Unused(L.Layer):
    """A variable without a gradient, and one whose gradient is rounding errors."""

    def build(self, shape):
        self.a = self.add_weight(name="a", shape=(shape[-1],))
        self.b = self.add_weight(name="b", shape=())

    def call(self, x):
        x = x + self.b
        return x - tf.reduce_mean(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", [OwnGate, OwnLargest, Rounded, ClippedAlone, Unused])
@pytest.mark.slow
def test_the_test_on_data_passes_gates_of_each_example(kind):
    check_isolation(model_with(kind()), X, Y)


def test_the_test_on_data_passes_a_loss_with_a_fixed_threshold():
    def above(labels, outputs):
        losses = tf.reduce_mean(tf.square(labels - outputs), axis=-1)
        return tf.where(losses > 0.5, losses, tf.stop_gradient(losses))

    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    check_isolation(model, X, Y, loss=above)


@pytest.mark.slow
def test_the_test_on_data_passes_inputs_that_have_a_range():
    ids = np.random.default_rng(0).integers(0, 10, (8, 3)).astype(np.float32)
    model = tf.keras.Sequential(
        [tf.keras.Input((3,)), L.Embedding(10, 2), L.Flatten(), L.Dense(1)]
    )
    check_isolation(model, ids, Y, loss=tf.keras.losses.mse)
    check_isolation(model, ids.astype(np.int32), Y, loss=tf.keras.losses.mse)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_test_on_data_passes_coarse_numbers(policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = tf.keras.Sequential(
            [tf.keras.Input((3,)), L.Dense(64, "relu"), L.Dense(64, "relu"), L.Dense(1)]
        )
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    check_isolation(model, X, Y, loss=tf.keras.losses.mse)


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
    with pytest.raises(ValueError, match="one loss per example"):
        check_isolation(model, X, Y, loss=lambda y, p: tf.reduce_mean(y - p))


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


class ByPlace(L.Layer):
    def call(self, x):
        places = tf.range(tf.shape(x)[0])[:, tf.newaxis]
        return x * (1.0 + tf.cast(places, x.dtype))


class ByNumber(L.Layer):
    def call(self, x):
        return x / tf.cast(tf.shape(x)[0], x.dtype)


class ByPlaceOnTheWayBack(L.Layer):
    def call(self, x):
        @tf.custom_gradient
        def scaled(x):
            places = tf.cast(tf.range(tf.shape(x)[0])[:, tf.newaxis], x.dtype)
            return tf.identity(x), lambda dy: dy * places

        return scaled(x)


@pytest.mark.parametrize("kind", [ByPlace, ByNumber, ByPlaceOnTheWayBack])
def test_the_place_of_an_example_is_found(kind):
    """One record less gives the others other places."""
    layers = [tf.keras.Input((2,)), L.Dense(3), kind(), L.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((8, 2)).astype("float32")
    with pytest.raises(AssertionError, match="Leaving out example 0 changed"):
        dpc.testing.assert_isolated(model, x, x[:, :1])


def test_random_masks_by_place_are_no_finding():
    layers = [tf.keras.Input((2,)), L.Dense(30), L.Dropout(0.5), L.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((8, 2)).astype("float32")
    dpc.testing.assert_isolated(model, x, x[:, :1])
