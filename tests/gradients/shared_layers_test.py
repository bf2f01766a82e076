"""Layers that use a variable in several places, one example at a time."""

import warnings

import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    IDS,
    IMAGE,
    SEQUENCE,
    L,
    batch_of,
    check_engine,
    randoms,
    squash,
    transformer,
    variable,
)
from tests.stack import KERAS_3
from tfdpclip.gradients import JacobianFallbackWarning


def attention(**call):
    def build():
        layer = L.MultiHeadAttention(2, 3, output_shape=5)
        return layer, lambda x: squash(layer(x, x, **call))

    return build


def masked_attention():
    layer = L.MultiHeadAttention(2, 3)
    return layer, lambda x: squash(
        layer(x, x, attention_mask=x[:, tf.newaxis, :, 0] > -0.5)
    )


def cross_attention():
    layer = L.MultiHeadAttention(2, 3)
    return layer, lambda x: squash(layer(x, tf.concat([x, x[:, :2]], 1)))


def of(make, **call):
    def build():
        layer = make()
        return layer, lambda x: squash(layer(x, **call))

    return build


LAYERS = {
    "self_attention": (attention(), SEQUENCE),
    "causal_attention": (attention(use_causal_mask=True), SEQUENCE),
    "causal_as_long_as_the_batch": (
        attention(use_causal_mask=True),
        randoms(BATCH, BATCH, 3),
    ),
    "masked_attention": (masked_attention, SEQUENCE),
    "cross_attention": (cross_attention, SEQUENCE),
    "transformer": (of(transformer), IDS),
    "frozen_normalisation": (of(L.BatchNormalization, training=False), IMAGE),
    "one_layer_in_two_places": (
        of(
            lambda: tf.keras.Sequential(
                [dense := L.Dense(3, "tanh"), L.LayerNormalization(), dense]
            )
        ),
        SEQUENCE,
    ),
}
LOCAL = []
if not KERAS_3:  # Keras 3 has no such layers.
    LAYERS["locally_connected"] = (of(lambda: L.LocallyConnected2D(2, 2)), IMAGE)
    LOCAL = ["locally_connected"]


@pytest.mark.parametrize(
    "name",
    ["self_attention", "frozen_normalisation", "one_layer_in_two_places", *LOCAL],
)
def test_a_static_batch_of_one(name):
    build, data = LAYERS[name]
    layer, per_example = build()
    per_example(data)
    check_engine(per_example, layer.trainable_variables, data[:1], dynamic=False)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slow
def test_layers_that_share_match_one_example_at_a_time(name):
    build, data = LAYERS[name]
    tf.keras.utils.set_random_seed(1)
    layer, per_example = build()
    per_example(data)
    for v in layer.trainable_variables:
        v.assign_add(0.1 * randoms(*v.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error", JacobianFallbackWarning)
        check_engine(per_example, layer.trainable_variables, data)


RECURRENT = {"lstm": L.LSTM, "gru": L.GRU}


def encoder_decoder(kind, first):
    encoder = kind(3, return_state=True)
    decoder = kind(3, return_sequences=True)

    def per_example(x):
        start = [tf.tile(first, [batch_of(x), 1])] * (2 if kind is L.LSTM else 1)
        last, *states = encoder(x, initial_state=start)
        return squash(last) + squash(decoder(tf.tanh(x) * 2, initial_state=states))

    return per_example, [encoder, decoder]


def in_three_places(kind, first):
    layer = kind(3, return_sequences=True)

    def per_example(x):
        once = squash(layer(layer(x), mask=x[..., 0] > -0.3) * layer(x[:, ::-1]))
        return once + 0.1 * squash(x @ layer.cell.kernel) + squash(first * x)

    return per_example, [layer]


@pytest.mark.parametrize("make", [encoder_decoder, in_three_places])
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.slow
def test_fused_recurrent_layers_share_weights_and_states(kind, make):
    first = variable(1, 3)
    per_example, layers = make(RECURRENT[kind], first)
    per_example(SEQUENCE)
    variables = [first, *(v for layer in layers for v in layer.trainable_variables)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", JacobianFallbackWarning)
        check_engine(per_example, variables, SEQUENCE)
