"""Norms and clipped sums of every layer against one example at a time."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import mostly_slow
from tests.stack import KERAS_3
from tfdpclip.clipping import QuantileClip
from tfdpclip.gradients import JacobianFallbackWarning, clipped_sum

L = tf.keras.layers


def per_example(model, x, y, loss_fn, weights=None):
    """Gradients by running the model on one example at a time: the reference."""
    gradients = []
    for i in range(len(y)):
        xi = tf.nest.map_structure(lambda t, i=i: t[i : i + 1], x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(y[i : i + 1], model(xi, training=True)))
            if weights is not None:
                loss *= weights[i]
        found = tape.gradient(loss, model.trainable_variables)
        gradients.append(
            np.concatenate(
                [
                    np.zeros(v.shape).ravel()
                    if g is None
                    else tf.convert_to_tensor(g).numpy().astype("float64").ravel()
                    for g, v in zip(found, model.trainable_variables, strict=True)
                ]
            )
        )
    return np.stack(gradients)


def squared_error(y, p):
    p = tf.reshape(tf.cast(p, tf.float32), [tf.shape(p)[0], -1])
    return tf.reduce_mean(tf.square(p - tf.reshape(y, [-1, 1])), axis=1)


def make_step(model, loss_fn, inputs, jit=False, dynamic=True, **options):
    """A traced `clipped_sum` with a fixed clip norm, for any batch size."""
    signature = None
    if dynamic:
        signature = tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), inputs
        ) + (tf.TensorSpec([], tf.float32),)

    @tf.function(input_signature=signature, jit_compile=jit, autograph=False)
    def step(x, y, clip):
        loss = loss_fn(y, model(x, training=True))
        rule = QuantileClip()
        return clipped_sum(loss, model.trainable_variables, rule, clip, **options)

    return step


def check_model(
    model, x, y, loss_fn=squared_error, rtol=1e-5, sizes=None, reference=None, **options
):
    """Runs the engine and the reference; the clip norm is the median norm."""
    model(x)
    for v in model.trainable_variables:
        v.assign(v + 0.1 * tf.random.stateless_normal(v.shape, [1, 2], dtype=v.dtype))
    expected = per_example(model, x, y, loss_fn) if reference is None else reference()
    norms = np.linalg.norm(expected, axis=1)
    clip = float(np.median(norms))
    weights = np.minimum(1, clip / np.maximum(norms, 1e-30))
    step = make_step(model, loss_fn, (x, y), **options)
    for size in sizes or (len(y), 1):
        part = tf.nest.map_structure(lambda t, n=size: t[:n], (x, y))
        sums, found = step(*part, tf.constant(clip))
        sums = np.concatenate([np.ravel(s.numpy()).astype("float64") for s in sums])
        np.testing.assert_allclose(found, norms[:size], rtol=rtol, atol=1e-7)
        total = weights[:size] @ expected[:size]
        atol = rtol * np.abs(total).max()
        np.testing.assert_allclose(sums, total, rtol=rtol, atol=atol)


def images(*shape, batch=5, seed=0):
    rng = np.random.default_rng(seed)
    x = tf.constant(rng.standard_normal((batch, *shape)), tf.float32)
    return x, tf.constant(rng.standard_normal(batch), tf.float32)


def tokens(length, vocabulary, batch=5, seed=0):
    rng = np.random.default_rng(seed)
    x = tf.constant(rng.integers(vocabulary, size=(batch, length)), tf.int32)
    return x, tf.constant(rng.standard_normal(batch), tf.float32)


class Masking(L.Layer):
    """Masks steps by the sign of their first entry, holes and first steps too."""

    def compute_mask(self, inputs, mask=None):
        return inputs[..., 0] > -0.3

    def call(self, inputs):
        return inputs


def head(*layers):
    return tf.keras.Sequential([*layers, L.Flatten(), L.Dense(3)])


LAYERS = {
    "dense": ((7,), lambda: [L.Dense(5, "tanh")]),
    "dense_no_bias": ((7,), lambda: [L.Dense(5, "tanh", use_bias=False)]),
    "dense_3d": ((4, 7), lambda: [L.Dense(5, "tanh")]),
    "dense_4d": ((3, 4, 7), lambda: [L.Dense(5, "tanh")]),
    "dense_long": ((40, 3), lambda: [L.Dense(2, "tanh")]),
    "einsum_dense": (
        (4, 6),
        lambda: [L.EinsumDense("abc,cde->abde", (4, 2, 5), bias_axes="de")],
    ),
    "einsum_grouped": (
        (4, 6),
        lambda: [L.EinsumDense("abc,bcd->abd", (4, 5), bias_axes="d")],
    ),
    "conv1d": ((9, 3), lambda: [L.Conv1D(4, 3, activation="tanh")]),
    "conv1d_causal": ((9, 3), lambda: [L.Conv1D(4, 3, padding="causal")]),
    "conv1d_dilated": ((9, 3), lambda: [L.Conv1D(4, 3, dilation_rate=2)]),
    "conv2d": ((7, 6, 3), lambda: [L.Conv2D(4, 3, activation="tanh")]),
    "conv2d_same": ((7, 6, 3), lambda: [L.Conv2D(4, 3, padding="same")]),
    "conv2d_strided": ((9, 8, 3), lambda: [L.Conv2D(4, (3, 2), strides=2)]),
    "conv2d_strided_same": (
        (9, 8, 3),
        lambda: [L.Conv2D(4, (3, 2), strides=2, padding="same")],
    ),
    "conv2d_wide_strided": (
        (9, 8, 16),
        lambda: [L.Conv2D(4, 3, strides=2, padding="same")],
    ),
    "conv2d_dilated": ((9, 8, 3), lambda: [L.Conv2D(4, 3, dilation_rate=2)]),
    "conv2d_dilated_same": (
        (9, 8, 3),
        lambda: [L.Conv2D(4, 3, dilation_rate=(2, 1), padding="same")],
    ),
    "conv2d_deep": ((4, 4, 24), lambda: [L.Conv2D(64, 3, padding="same")]),
    "conv2d_1x1": ((5, 5, 4), lambda: [L.Conv2D(6, 1)]),
    "conv3d": ((5, 6, 4, 2), lambda: [L.Conv3D(3, (2, 3, 2), activation="tanh")]),
    "conv3d_strided_same": (
        (5, 6, 4, 2),
        lambda: [L.Conv3D(3, 3, strides=2, padding="same")],
    ),
    "conv3d_dilated": ((6, 6, 5, 2), lambda: [L.Conv3D(3, 2, dilation_rate=2)]),
    "conv1d_transpose": ((5, 3), lambda: [L.Conv1DTranspose(4, 3, strides=2)]),
    "conv2d_transpose": ((4, 5, 3), lambda: [L.Conv2DTranspose(4, 3, strides=2)]),
    "conv2d_transpose_same": (
        (4, 5, 3),
        lambda: [L.Conv2DTranspose(4, 3, strides=2, padding="same")],
    ),
    "conv3d_transpose": ((3, 3, 2, 2), lambda: [L.Conv3DTranspose(3, 2, strides=2)]),
    "depthwise": (
        (7, 6, 3),
        lambda: [L.DepthwiseConv2D(3, depth_multiplier=2, activation="tanh")],
    ),
    "depthwise_strided": (
        (7, 6, 3),
        lambda: [L.DepthwiseConv2D(3, strides=2, padding="same")],
    ),
    "depthwise_dilated": ((8, 8, 3), lambda: [L.DepthwiseConv2D(3, dilation_rate=2)]),
    "depthwise1d": ((8, 3), lambda: [L.DepthwiseConv1D(3, depth_multiplier=2)]),
    "separable2d": ((7, 6, 3), lambda: [L.SeparableConv2D(4, 3)]),
    "separable1d": ((9, 3), lambda: [L.SeparableConv1D(4, 3)]),
    "layer_norm": ((4, 6), lambda: [L.Dense(6), L.LayerNormalization()]),
    "layer_norm_axes": (
        (4, 6),
        lambda: [L.Dense(6), L.LayerNormalization(axis=[1, 2])],
    ),
    "group_norm": (
        (4, 5, 6),
        lambda: [L.Conv2D(6, 2), L.GroupNormalization(groups=3)],
    ),
    "unit_norm": ((6,), lambda: [L.Dense(6), L.UnitNormalization()]),
    "prelu": ((4, 6), lambda: [L.Dense(6), L.PReLU()]),
    "prelu_shared": ((4, 6), lambda: [L.Dense(6), L.PReLU(shared_axes=[1])]),
    "time_distributed": ((4, 6, 6, 2), lambda: [L.TimeDistributed(L.Conv2D(3, 2))]),
    "pooling": (
        (8, 8, 2),
        lambda: [L.Conv2D(3, 3), L.MaxPool2D(), L.Conv2D(3, 2), L.AvgPool2D(2)],
    ),
    "upsampling": (
        (3, 3, 2),
        lambda: [L.Conv2D(3, 2), L.UpSampling2D(), L.Conv2D(2, 2)],
    ),
    "simple_rnn": ((4, 5), lambda: [L.SimpleRNN(3)]),
    "lstm_relu": ((4, 5), lambda: [L.LSTM(3, activation="relu")]),
    "gru_reset_before": ((4, 5), lambda: [L.GRU(3, reset_after=False)]),
    "simple_rnn_unrolled": ((4, 5), lambda: [L.SimpleRNN(3, unroll=True)]),
    "lstm_unrolled": ((4, 5), lambda: [L.LSTM(3, unroll=True)]),
    "lstm_unrolled_1": ((4, 5), lambda: [L.LSTM(3, unroll=True, implementation=1)]),
    "gru_unrolled": ((4, 5), lambda: [L.GRU(3, unroll=True, return_sequences=True)]),
    "gru_unrolled_1": (
        (4, 5),
        lambda: [L.GRU(3, unroll=True, implementation=1, reset_after=False)],
    ),
    "permuted": ((4, 6), lambda: [L.Permute((2, 1)), L.Dense(3), L.Permute((2, 1))]),
    "noise_free_dropout": ((4, 6), lambda: [L.Dense(6), L.Dropout(0.0), L.Dense(5)]),
}
LAYERS |= {
    "lstm": ((4, 5), lambda: [L.LSTM(3)]),
    "lstm_sequences": ((4, 5), lambda: [L.LSTM(3, return_sequences=True)]),
    "lstm_stacked": ((4, 5), lambda: [L.LSTM(3, return_sequences=True), L.LSTM(2)]),
    "lstm_backwards": (
        (4, 5),
        lambda: [L.LSTM(3, return_sequences=True, go_backwards=True)],
    ),
    "lstm_long": ((30, 2), lambda: [L.LSTM(3)]),
    "gru": ((4, 5), lambda: [L.GRU(3)]),
    "gru_sequences": ((4, 5), lambda: [L.GRU(3, return_sequences=True)]),
    "gru_backwards": ((4, 5), lambda: [L.GRU(3, go_backwards=True)]),
    "bidirectional": ((4, 5), lambda: [L.Bidirectional(L.LSTM(3))]),
    "masked_lstm": ((4, 5), lambda: [Masking(), L.LSTM(3)]),
    "masked_lstm_sequences": (
        (6, 5),
        lambda: [Masking(), L.LSTM(3, return_sequences=True)],
    ),
    "masked_bidirectional_gru": (
        (6, 5),
        lambda: [Masking(), L.Bidirectional(L.GRU(3, return_sequences=True))],
    ),
}

if not KERAS_3:  # Which has none.
    LAYERS["locally_connected"] = ((6, 2), lambda: [L.LocallyConnected1D(3, 2)])


def check_without_fallback(layers, x, y, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", JacobianFallbackWarning)
        check_model(head(*layers), x, y, **options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.thinned(80)
def test_layer_matches_one_example_at_a_time(name):
    shape, layers = LAYERS[name]
    tf.keras.utils.set_random_seed(3)
    check_without_fallback(layers(), *images(*shape))


@pytest.mark.parametrize(
    "name", mostly_slow([n for n in LAYERS if "unrolled" in n], LAYERS)
)
@pytest.mark.thinned(6)
def test_layer_matches_in_a_batch_of_static_size(name):
    """In a static batch, sizes and numbers computed from them are constants."""
    shape, layers = LAYERS[name]
    tf.keras.utils.set_random_seed(3)
    x, y = images(*shape)
    check_without_fallback(layers(), x, y, dynamic=False, sizes=[len(y)])


@pytest.mark.parametrize("layer", [L.SimpleRNN, L.LSTM, L.GRU])
@pytest.mark.thinned(3)
def test_large_initial_states_of_a_static_batch_are_known(layer):
    """Constants of more than a thousand entries are filled when the step runs."""
    x, y = images(3, 4, batch=12)
    layers = [layer(90, unroll=True)]
    check_without_fallback(layers, x, y, dynamic=False, sizes=[len(y)])
