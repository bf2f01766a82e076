"""References, models and steps for the tests of the Keras optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.stack import OwnOptimizer
from tfdpclip.clipping import AutomaticClip, FixedClip, QuantileClip
from tfdpclip.keras import (
    DPSGD,
    DPAdagrad,
    DPAdam,
    DPAdamW,
    DPRMSprop,
    privatize,
)

L = tf.keras.layers
DPNadam = privatize(tf.keras.optimizers.Nadam)

OPTIMIZERS = {
    "sgd": DPSGD,
    "adam": DPAdam,
    "adamw": DPAdamW,
    "adagrad": DPAdagrad,
    "rmsprop": DPRMSprop,
    "nadam": DPNadam,
}


class Opaque(tf.keras.layers.Layer):
    """A recurrence without a rule: its weights change at every step, by name."""

    def build(self, shape):
        size = [shape[-1], shape[-1]]
        self.kernel = self.add_weight(name="kernel", shape=size)

    def call(self, inputs):
        def body(t, h):
            same = tf.cast(t >= 0, h.dtype)
            return t + 1, tf.tanh((h + inputs[:, t]) @ (self.kernel * same))

        steps, start = inputs.shape[1], tf.zeros_like(inputs[:, 0])
        return tf.while_loop(lambda t, h: t < steps, body, (0, start))[1]


def mostly_slow(quick, every):
    """Parameters: the names in `quick`, and the rest of `every` marked as slow."""
    return [
        pytest.param(
            name, marks=[] if name in quick else pytest.mark.slow, id=str(name)
        )
        for name in every
    ]


def numpy_weights(rule, norms, clip_norm):
    """The weights of the papers, in double precision."""
    norms = np.asarray(norms, np.float64)
    with np.errstate(divide="ignore"):
        if isinstance(rule, AutomaticClip):
            return np.where(norms > 0, 1 / (norms + rule.stability), 0.0)
        weights = np.minimum(1.0, clip_norm / norms)
    if isinstance(rule, (FixedClip, QuantileClip)) and rule.normalize:
        weights = weights / clip_norm
    return weights


def flat(tensors, variables=None):
    """Tensors (None as zeros) as a vector in double precision."""
    parts = []
    for i, tensor in enumerate(tensors):
        if tensor is None:
            parts.append(np.zeros(variables[i].shape).ravel())
        else:
            tensor = tf.convert_to_tensor(tensor)
            parts.append(np.ravel(tf.cast(tensor, tf.float64).numpy()))
    return np.concatenate(parts)


def example(nest, i):
    """Example i of a nest of arrays, as a batch of size 1."""
    return tf.nest.map_structure(lambda t: tf.constant(t[i : i + 1]), nest)


def gradients_one_at_a_time(loss_of, variables, count):
    """`[count, P]`: the gradient of `loss_of(i)` for each example i alone."""
    found = []
    for i in range(count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(i))
        found.append(flat(tape.gradient(loss, variables), variables))
    return np.stack(found)


def expected_sum(rule, gradients, clip_norm=None):
    """The sum of clipped rows of `gradients`."""
    clip_norm = float(rule.clip_norm(rule.initial_state())) or clip_norm
    norms = np.linalg.norm(gradients, axis=1)
    return numpy_weights(rule, norms, clip_norm) @ gradients


def weights_of(model):
    return flat(model.trainable_variables)


def linear(*, units=1, inputs=2, bias=False, kernel="zeros"):
    """A model of a single dense layer."""
    layer = L.Dense(units, use_bias=bias, kernel_initializer=kernel)
    return tf.keras.Sequential([tf.keras.Input((inputs,)), layer])


def some_data(count=8, inputs=2, seed=0, outputs=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, inputs)).astype("float32")
    y = rng.standard_normal((count, outputs)).astype("float32")
    return x, y


def private_gradients(optimizer, variables, signature, loss_of, jit=False):
    """A compiled `f(*data)` that returns the private gradients as a vector.

    They are the gradients that `optimizer` gives its base class, before they become an
    update.
    """

    @tf.function(input_signature=signature, jit_compile=jit)
    def compute(*data):
        loss = loss_of(*data)
        pairs = optimizer.compute_gradients(loss, variables)
        return [gradient for gradient, _ in pairs]

    def run(*data):
        data = [tf.convert_to_tensor(value) for value in data]
        return flat(compute(*data), variables)

    return run


class Recorder(OwnOptimizer):
    """Keeps the gradients it is given, and leaves the variables alone."""

    def update_step(self, gradient, variable, *rate):
        self.seen_of(variable).assign(gradient)


DPRecorder = privatize(Recorder)


class Scatter(L.Layer):
    """Adds the neighbour's row: mixes a batch in a way that only running it shows."""

    def call(self, x):
        count = tf.shape(x)[0]
        places = (tf.range(count) + 1) % tf.maximum(count, 1)
        return tf.tensor_scatter_nd_add(x, places[:, tf.newaxis], x)
