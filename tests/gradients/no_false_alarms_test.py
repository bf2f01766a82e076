"""Models whose examples are kept apart pass the check."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    IDS,
    SEQUENCE,
    Block,
    flat,
    norms_of,
    randoms,
    squash,
    transformer,
    variable,
)
from tests.gradients.layers_test import LAYERS as ORDINARY
from tests.gradients.layers_test import head, images
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import PerExampleGradients, clipped_sum, per_example_norms

L = tf.keras.layers
X = randoms(4, 3)
pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]


# Slow to trace, and of the same kinds as the rest.
_VARIANTS = ("lstm_unrolled_1", "gru_unrolled_1", "lstm_stacked", "gru_sequences")


@pytest.mark.parametrize("name", [n for n in ORDINARY if n not in _VARIANTS])
@pytest.mark.slow
def test_ordinary_layers_pass(name):
    """Batches of several sizes pass, also of one example or with a NaN."""
    shape, layers = ORDINARY[name]
    tf.keras.utils.set_random_seed(3)
    x, _ = images(*shape, batch=8)
    model = head(*layers())
    model(x)

    @tf.function(input_signature=[tf.TensorSpec([None, *shape])])
    def step(x):
        loss = squash(model(x, training=True))
        gradients = PerExampleGradients(
            loss, model.trainable_variables, check_gradients="always"
        )
        return gradients.norms, gradients.checks_passed

    bad = tf.tensor_scatter_nd_update(x, [[1]], [tf.fill(shape, np.nan)])
    recurrent = any(word in name for word in ("lstm", "gru", "rnn", "bidirectional"))
    for batch in (x, x[:3], x[:1], x if recurrent else bad, 1e-6 * x, 1e3 * x):
        norms, isolated = step(batch)
        assert norms.shape == [len(batch)] and bool(isolated)


@pytest.mark.parametrize("padding, strides", [("valid", 2), ("same", 1)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_pool_over_a_constant_background_passes(axes, padding, strides):
    """Of equal entries, kernels for graphs and for calls choose differently."""
    convolution = getattr(L, f"Conv{axes}D")
    pool = getattr(L, f"MaxPooling{axes}D")
    shape = (6,) * axes + (1,)
    x = np.zeros((8, *shape), "float32")
    x[(slice(None), *(slice(2, 4),) * axes)] = randoms(8, *(2,) * axes, 1)
    model = head(
        convolution(3, 3, padding="same", bias_initializer="ones"),
        pool(2, strides, padding),
        L.Flatten(),
    )
    model(x)

    @tf.function(input_signature=[tf.TensorSpec([None, *shape])])
    def step(x):
        loss = squash(model(x, training=True))
        gradients = PerExampleGradients(
            loss, model.trainable_variables, check_gradients="always"
        )
        return gradients.checks_passed

    assert bool(step(x)) and bool(step(x[:3]))


RANDOM = {
    "dropout": lambda: [L.Dense(6), L.Dropout(0.5), L.Dense(5)],
    "spatial_dropout": lambda: [L.Dense(6), L.SpatialDropout1D(0.5), L.Dense(5)],
    "gaussian_noise": lambda: [L.Dense(6), L.GaussianNoise(1.0), L.Dense(5)],
    "gaussian_dropout": lambda: [L.Dense(6), L.GaussianDropout(0.5), L.Dense(5)],
    "alpha_dropout": lambda: [L.Dense(6, "selu"), L.AlphaDropout(0.3), L.Dense(5)],
    "attention_dropout": lambda: [L.Dense(6), Dropped(), L.Dense(5)],
    "recurrent_dropout": lambda: [L.LSTM(3, dropout=0.3, unroll=True)],
    "transformer_block": lambda: [L.Dense(6), Block()],
    "standardised": lambda: [L.Normalization(mean=0.5, variance=2.0), L.Dense(4)],
    "unit_norm": lambda: [L.Dense(4), L.UnitNormalization()],
    "sorted_features": lambda: [L.Dense(4), L.Lambda(lambda h: tf.sort(h, axis=-1))],
    "best_features": lambda: [
        L.Dense(6),
        L.Lambda(lambda h: tf.math.top_k(h, 2).values),
    ],
    "rolled_in_time": lambda: [L.Dense(4), L.Lambda(lambda h: tf.roll(h, 1, axis=1))],
    "reversed_in_time": lambda: [L.Dense(4), L.Lambda(lambda h: h[:, ::-1])],
    "patches": lambda: [
        L.Reshape((4, 3, 1)),
        L.Lambda(
            lambda h: tf.image.extract_patches(
                h, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID"
            )
        ),
        L.Dense(3),
    ],
    "resized": lambda: [
        L.Reshape((4, 3, 1)),
        L.Conv2D(2, 2),
        L.Resizing(5, 5),
        L.Conv2D(2, 2),
    ],
    "cumulative_in_time": lambda: [L.Dense(4), L.Lambda(lambda h: tf.cumsum(h, 1))],
    "random_scale": lambda: [
        L.Lambda(lambda h: h * tf.random.uniform(tf.shape(h)[:1])[:, None, None]),
        L.Dense(4),
    ],
}


class Dropped(L.Layer):
    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 3, dropout=0.4)

    def call(self, x, training=None):
        return x + self.attention(x, x, training=training)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.slow
def test_random_and_odd_layers_pass(name, dynamic):
    tf.keras.utils.set_random_seed(2)
    data = randoms(8, 4, 3)
    model = head(*RANDOM[name]())
    model(data)
    options = {"dynamic": dynamic}
    per_example = lambda x: squash(model(x, training=True))  # noqa: E731
    norms = norms_of(per_example, model.trainable_variables, data, **options)
    assert np.all(norms.numpy() > 0)


@pytest.mark.slow
def test_a_transformer_and_its_lengths_pass():
    model = transformer()
    for dynamic in (True, False):
        norms = norms_of(
            lambda i: squash(model(i)), model.trainable_variables, IDS, dynamic=dynamic
        )
        assert np.all(norms.numpy() > 0)


@pytest.mark.slow
def test_positions_of_a_dynamic_length_pass():
    """Also where there are as many steps as examples."""
    positions, kernel = variable(8, 3), variable(3, 4)

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3])])
    def step(x):
        where = tf.range(tf.shape(x)[1])
        loss = squash((x + tf.gather(positions, where)) @ kernel)
        return per_example_norms(loss, [positions, kernel], check_gradients="always")

    for steps in (4, 6, 8):
        x = randoms(4, steps, 3)
        one = [step(x[i : i + 1])[0] for i in range(4)]
        np.testing.assert_allclose(step(x), one, rtol=1e-5)


SQUARES = {
    "positions": lambda x, v: squash(x @ v + v),
    "table": lambda x, v: squash((x + tf.constant(TABLE.numpy())) @ v),
    "captured_table": lambda x, v: squash((x + TABLE) @ v),
    "products_in_time": lambda x, v: squash(tf.matmul(x @ v, x, transpose_b=True)),
    "zeros": lambda x, v: squash(x @ v + tf.zeros([4, 4])),
    "causal": lambda x, v: squash(tf.linalg.band_part(tf.ones([4, 4]), -1, 0) @ x @ v),
}
TABLE = randoms(4, 4, seed=7)
UNIFORM = pytest.mark.xfail(strict=True, reason="a uniform constant looks like a batch")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=UNIFORM if n == "zeros" else ()) for n in SQUARES],
)
@pytest.mark.slow
def test_a_batch_as_long_as_the_other_axes_passes(name):
    """B = T = D, static: nothing tells the axes apart but the graph."""
    data, v = randoms(4, 4, 4), variable(4, 4)
    per_example = lambda x: SQUARES[name](x, v)  # noqa: E731
    one = [norms_of(per_example, [v], data[i : i + 1])[0] for i in range(4)]
    found = norms_of(per_example, [v], data, dynamic=False)
    np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.slow
def test_two_views_of_each_example_pass():
    """A model run on both halves at once, as siamese networks do."""
    v = variable(3, 4)

    def per_example(x):
        both = tf.tanh(tf.concat([x, x[:, ::-1]], 0) @ v)
        left, right = tf.split(both, 2, axis=0)
        return tf.reduce_sum(left * right, 1)

    try:
        norms = norms_of(per_example, [v], X)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        assert "Isolation" in str(error)
        return
    expected = [norms_of(per_example, [v], X[i : i + 1])[0] for i in range(4)]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["dense_3d", "conv2d_same", "layer_norm", "lstm"],
)
@pytest.mark.slow
def test_ordinary_layers_pass_when_compiled(name):
    shape, layers = ORDINARY[name]
    x, _ = images(*shape)
    model = head(*layers())
    model(x)

    @tf.function(jit_compile=True)
    def step(x):
        return clipped_sum(
            squash(model(x)),
            model.trainable_variables,
            FixedClip(1.0),
            check_gradients="always",
        )

    sums, _ = step(x)
    assert np.any(flat(sums, model.trainable_variables) != 0)


@pytest.mark.slow
def test_large_and_tiny_examples_side_by_side_pass():
    model = head(L.Dense(6, "tanh"), L.LayerNormalization(), L.Dense(5))
    data = SEQUENCE * tf.constant([1e-6, 1.0, 1e4, 0.0, 30.0])[:, None, None]
    model(data)
    norms = norms_of(lambda x: squash(model(x)), model.trainable_variables, data)
    assert np.all(np.isfinite(norms)) and np.all(norms.numpy() > 0)


@tf.custom_gradient
def _shown(h):
    def gradient(dh):
        tf.print("gradient of", tf.shape(dh))
        return dh

    return tf.identity(h), gradient


@tf.custom_gradient
def _asserted(h):
    def gradient(dh):
        finite = tf.reduce_all(tf.math.is_finite(dh))
        with tf.control_dependencies([tf.debugging.Assert(finite, [dh])]):
            return tf.identity(dh)

    return tf.identity(h), gradient


@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning")
@pytest.mark.parametrize(
    "checked",
    [lambda h: tf.debugging.check_numerics(h, "not finite"), _shown, _asserted],
    ids=["check_numerics", "print", "assert"],
)
def test_ops_with_effects_in_a_gradient_pass(checked):
    """TensorFlow runs them in the order of the trace, before the comparison."""
    w = variable(3, 5)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return clipped_sum(squash(checked(x @ w)), [w], FixedClip(1e6))

    sums, _ = step(X)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(squash(X @ w))
    np.testing.assert_allclose(sums[0], tape.gradient(loss, w), rtol=1e-5, atol=1e-6)
