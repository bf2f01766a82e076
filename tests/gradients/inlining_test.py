"""Called functions, grouped convolutions and recomputed gradients."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.layers_test import check_model, images
from tests.keras.helpers import mostly_slow
from tests.stack import KERAS_3
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import (
    ExampleIsolationError,
    JacobianFallbackWarning,
    clipped_sum,
    per_example_norms,
)
from tfdpclip.gradients.flows.inlining import inline_calls
from tfdpclip.keras import DPSGD

L = tf.keras.layers


class Called(L.Layer):
    """Runs layers inside `depth` nested functions."""

    def __init__(self, *layers, depth=1, jit=None):
        super().__init__()
        self.inner = list(layers)
        self._call = self._run
        for _ in range(depth):
            self._call = tf.function(
                lambda x, f=self._call: f(x), autograph=False, jit_compile=jit
            )

    # `build` and `compute_output_shape` are defined so that Keras 3 does not trace the
    # function for them: it would keep a trace without the weights that do not exist
    # yet.
    def build(self, shape):
        for layer in self.inner:
            if not layer.built:
                layer.build(shape)
            shape = layer.compute_output_shape(shape)
        self.built = True

    def compute_output_shape(self, shape):
        for layer in self.inner:
            shape = layer.compute_output_shape(shape)
        return shape

    def _run(self, x):
        for layer in self.inner:
            x = layer(x, training=True)
        return x

    def call(self, x):
        return self._call(x)


class Recomputed(Called):
    """Runs layers, and once more on the way back."""

    def __init__(self, *layers, depth=0):
        super().__init__(*layers, depth=depth)
        self._again = tf.recompute_grad(self._call)

    def call(self, x):
        return self._again(x)


@tf.custom_gradient
def straight_through(x):
    return tf.sign(x), lambda dz: dz


@tf.custom_gradient
def reversal(x):
    return tf.identity(x), lambda dz: -2 * dz


@tf.custom_gradient
def remembers(x):
    """The gradient is of tensors that the output does not depend on."""
    slope = tf.cos(x)
    return tf.sin(x), lambda dz: dz * slope * tf.exp(-slope)


class Scale(L.Layer):
    """Reads its weight inside the function."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=shape[-1:], initializer="ones")

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return x * self.scale


def convolution(layer, **options):
    return layer(8, 3, groups=2, activation="tanh", **options)


INLINED = {
    "function": ((7,), lambda: [Called(L.Dense(5, "tanh"))]),
    "depth_3": ((7,), lambda: [Called(L.Dense(5, "tanh"), depth=3)]),
    "nested": (
        (7,),
        lambda: [Called(Called(L.Dense(5)), L.Dense(4, "tanh"), Scale())],
    ),
    "swish": ((7,), lambda: [Called(L.Dense(5, "swish"), L.Dense(3, "swish"))]),
    "compiled": ((7,), lambda: [Called(L.Dense(5, "tanh"), jit=True)]),
    "lstm": ((4, 5), lambda: [Called(L.LSTM(3, return_sequences=True), L.Dense(2))]),
    "convolution": ((7, 6, 3), lambda: [Called(L.Conv2D(4, 3), L.MaxPool2D(2))]),
    "straight_through": (
        (7,),
        lambda: [Called(L.Dense(5), L.Lambda(straight_through))],
    ),
    "reversal": ((7,), lambda: [Called(L.Dense(5), L.Lambda(reversal), Scale())]),
    "remembers": (
        (7,),
        lambda: [Called(L.Dense(5), L.Lambda(remembers), depth=2), L.Dense(4, "tanh")],
    ),
    "branch": (
        (7,),
        lambda: [
            Called(
                L.Dense(5),
                L.Lambda(
                    lambda x: tf.cond(
                        tf.shape(x)[1] > 3, lambda: tf.sin(x), lambda: x * x
                    )
                ),
            )
        ],
    ),
    "loop": (
        (7,),
        lambda: [
            Called(
                L.Dense(5),
                L.Lambda(
                    lambda x: tf.while_loop(
                        lambda i, y: i < tf.shape(x)[1],
                        lambda i, y: (i + 1, tf.sin(y + x)),
                        (0, x),
                    )[1]
                ),
            )
        ],
    ),
    "recomputed": ((7,), lambda: [Recomputed(L.Dense(5, "tanh"), L.Dense(4, "tanh"))]),
    "function_recomputed": ((7,), lambda: [Called(Recomputed(L.Dense(5, "swish")))]),
    "recomputed_twice": ((7,), lambda: [Recomputed(Recomputed(L.Dense(5, "tanh")))]),
    "grouped_conv1d": ((9, 4), lambda: [convolution(L.Conv1D)]),
    "grouped_conv1d_causal": (
        (9, 4),
        lambda: [convolution(L.Conv1D, padding="causal")],
    ),
    "grouped_conv1d_dilated": (
        (9, 4),
        lambda: [convolution(L.Conv1D, dilation_rate=2)],
    ),
    "grouped_conv2d": ((7, 6, 4), lambda: [convolution(L.Conv2D)]),
    "grouped_conv2d_strided_same": (
        (9, 8, 4),
        lambda: [convolution(L.Conv2D, strides=2, padding="same")],
    ),
    "grouped_conv2d_dilated_same": (
        (9, 8, 4),
        lambda: [convolution(L.Conv2D, dilation_rate=2, padding="same")],
    ),
    "grouped_conv2d_four": ((7, 6, 8), lambda: [L.Conv2D(8, 3, groups=4)]),
    "grouped_conv2d_each": ((7, 6, 4), lambda: [L.Conv2D(4, 3, groups=4)]),
    "grouped_conv2d_each_strided": (
        (9, 8, 4),
        lambda: [L.Conv2D(8, 3, 2, "same", groups=4, activation="tanh")],
    ),
    "grouped_conv2d_each_dilated": (
        (9, 8, 4),
        lambda: [L.Conv2D(8, 3, groups=4, dilation_rate=2, activation="tanh")],
    ),
    "grouped_conv2d_each_oblong": (
        (9, 8, 4),
        lambda: [L.Conv2D(8, 3, (1, 2), groups=4, activation="tanh")],
    ),
    "grouped_conv3d": ((4, 5, 4, 4), lambda: [convolution(L.Conv3D, padding="same")]),
    "grouped_twice": (
        (7, 6, 4),
        lambda: [Called(convolution(L.Conv2D)), convolution(L.Conv2D)],
    ),
}


def model_of(layers):
    return tf.keras.Sequential([*layers(), L.Flatten(), L.Dense(3)])


def check_exactly(layers, x, y, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", JacobianFallbackWarning)
        check_model(model_of(layers), x, y, **options)


QUICK = [
    "depth_3",
    "nested",
    "lstm",
    "remembers",
    "recomputed",
    "function_recomputed",
    "grouped_conv1d_causal",
    "grouped_conv2d_each_strided",
    "grouped_conv2d_strided_same",
    "grouped_conv3d",
]


@pytest.mark.parametrize("name", mostly_slow(QUICK, INLINED))
@pytest.mark.thinned(6)
def test_called_functions_match_one_example_at_a_time(name):
    shape, layers = INLINED[name]
    x, y = images(*shape)
    check_exactly(layers, x, y, sizes=[len(y)])


@pytest.mark.slow
@pytest.mark.parametrize("name", INLINED)
def test_called_functions_match_in_a_batch_of_static_size(name):
    shape, layers = INLINED[name]
    x, y = images(*shape)
    check_exactly(layers, x, y, dynamic=False, sizes=[len(y)])


def test_as_many_ops_for_many_channels_as_for_few():
    """ConvNeXt has up to 768 groups, and took an hour with an op for each."""

    def ops_of(channels):
        layer = L.Conv2D(channels, 3, groups=channels)
        x = tf.zeros([2, 5, 5, channels])
        layer(x)

        @tf.function
        def step(x):
            losses = tf.reduce_sum(tf.square(layer(x)), [1, 2, 3])
            return per_example_norms(losses, layer.trainable_variables)

        return len(step.get_concrete_function(x).graph.get_operations())

    assert ops_of(24) == ops_of(6)


# XLA needs the number of steps of a loop within a function: it raises an error, and
# nothing is trained, or the loop takes the Jacobian.
UNCOMPILED = pytest.mark.xfail(
    raises=(tf.errors.InvalidArgumentError, JacobianFallbackWarning),
    reason="XLA needs the number of steps",
)
COMPILED = [n for n in INLINED if n not in ("branch", "loop", "lstm")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMPILED, pytest.param("lstm", marks=UNCOMPILED)])
def test_called_functions_match_when_compiled(name):
    shape, layers = INLINED[name]
    x, y = images(*shape)
    check_exactly(layers, x, y, jit=True, dynamic=False, sizes=[len(y)])


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", JacobianFallbackWarning)
        yield


def function(body):
    return tf.function(body, autograph=False)


def test_one_forward_pass_for_everything_that_sees_it(no_fallback):
    """Tensors computed before and after the engine come from the same forward pass."""
    w = tf.Variable(tf.ones([6]))
    inner = function(lambda x: tf.nn.dropout(x * w, 0.5))

    @tf.function
    def step(x):
        h = inner(x)
        before = tf.reduce_sum(h, axis=1)
        norms = per_example_norms(tf.reduce_sum(h, axis=1), [w])
        return before, norms, h, tf.reduce_sum(h, axis=1)

    before, norms, h, after = step(tf.ones([64, 6]))
    np.testing.assert_allclose(norms, tf.norm(h, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(before, tf.reduce_sum(h, axis=1))


def test_a_recomputed_function_has_one_dropout_mask(no_fallback):
    w = tf.Variable(tf.ones([6]))
    again = tf.recompute_grad(lambda x: tf.nn.dropout(x * w, 0.5))

    @tf.function
    def step(x):
        h = again(x)
        sums, norms = clipped_sum(tf.reduce_sum(h, axis=1), [w], FixedClip(1e6))
        return sums, norms, h

    (total,), norms, h = step(tf.ones([64, 6]))
    np.testing.assert_allclose(norms, tf.norm(h, axis=1), rtol=1e-5)
    np.testing.assert_allclose(total, tf.reduce_sum(h, axis=0), rtol=1e-5)


@pytest.mark.slow
def test_assignments_happen_once(no_fallback):
    w, count = tf.Variable(tf.ones([6])), tf.Variable(0.0, trainable=False)

    @tf.function(autograph=False)
    def inner(x):
        count.assign_add(1.0)
        return tf.reduce_sum(x * w, axis=1)

    @tf.function
    def step(x):
        return per_example_norms(inner(x), [w])  # the loss is the call's output

    x = tf.random.normal([4, 6])
    np.testing.assert_allclose(step(x), tf.norm(x, axis=1), rtol=1e-5)
    assert float(count) == 1.0


def test_a_variable_assigned_after_the_call_is_read_before_it(no_fallback):
    """The function would see the new value if its ops came later."""
    w, scale = tf.Variable(tf.ones([6])), tf.Variable(2.0, trainable=False)
    inner = function(lambda x: x * scale)

    @tf.function
    def step(x):
        h = inner(x)
        scale.assign(100.0)
        loss = tf.reduce_sum(h * w, axis=1)
        return per_example_norms(loss, [w], check_gradients="never")

    x = tf.random.normal([4, 6])
    np.testing.assert_allclose(step(x), 2 * tf.norm(x, axis=1), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
def test_a_function_that_reads_what_it_assigned_is_refused():
    w, scale = tf.Variable(tf.ones([6])), tf.Variable(2.0, trainable=False)

    @tf.function(autograph=False)
    def inner(x):
        scale.assign_add(1.0)
        return x * w * scale

    @tf.function
    def step(x):
        return per_example_norms(tf.reduce_sum(inner(x), axis=1), [w])

    x = tf.random.normal([4, 6])
    # The function could write data of the batch, and it reads the variable again.
    with pytest.raises(ExampleIsolationError, match="writes"):
        step(x)


@pytest.mark.slow
def test_an_iterator_moves_on_once():
    """A copy of the op would draw a batch of its own."""
    w = tf.Variable(tf.ones([6]))
    data = tf.random.normal([8, 6])
    iterator = iter(tf.data.Dataset.from_tensor_slices(data).batch(4))
    inner = function(lambda: next(iterator))

    @tf.function
    def step():
        x = inner()
        inline_calls(tf.reduce_sum(x * w, axis=1))
        return x

    np.testing.assert_array_equal(step(), data[:4])
    np.testing.assert_array_equal(step(), data[4:])


def test_a_tape_that_recorded_the_call_differentiates_what_was_used(no_fallback):
    w = tf.Variable(tf.ones([6]))
    inner = function(lambda x: tf.nn.dropout(tf.exp(x * w), 0.5))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = inner(x)
            loss = tf.reduce_sum(h, axis=1)
        per_example_norms(loss, [w])
        return h, tape.gradient(loss, w)

    x = tf.random.normal([16, 6])
    h, gradient = step(x)
    expected = tf.reduce_sum(x * h, axis=0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_random_numbers_of_a_generator(no_fallback):
    w = tf.Variable(tf.ones([6]))
    generator = tf.random.Generator.from_seed(1)
    inner = function(lambda x: x * w * generator.normal([6]))

    @tf.function
    def step(x):
        h = inner(x)
        return per_example_norms(tf.reduce_sum(h, axis=1), [w]), h

    norms, h = step(tf.random.normal([4, 6]))
    np.testing.assert_allclose(norms, tf.norm(h, axis=1), rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.slow
def test_fit_trains_a_model_of_functions(no_fallback, steps):
    x, y = images(6, batch=12)
    # Random layers of Keras 3 count in a variable: within a function that is refused,
    # or, if the variable is declared public, takes the Jacobian.
    inner = [L.Dense(8, "tanh")] if KERAS_3 else [L.Dense(8, "tanh"), L.Dropout(0.2)]
    model = tf.keras.Sequential(
        [
            Called(*inner, depth=2),
            Recomputed(L.Dense(4, "tanh")),
            L.Dense(1),
        ]
    )
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=0.0, expected_batch_size=4)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps)
    before = model.evaluate(x, y, verbose=0)[0]
    model.fit(x, y, batch_size=4, epochs=5, verbose=0)
    assert model.evaluate(x, y, verbose=0)[0] < before
