"""A linear model, its losses and their norms for the tests of losses."""

import numpy as np
import tensorflow as tf

from tests.gradients.cases import BATCH, one_at_a_time, squash, variable
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    per_example_norms,
)

LOSSES = tf.keras.losses
NOMINAL = 7.0
W = variable(3, 4)
REFUSALS = (LossStructureError, ExampleIsolationError)


def vector(x):
    """A loss per example."""
    return squash(x @ W)


def entries(x):
    """`[B, T]`."""
    return tf.reduce_sum(tf.tanh(x @ W), axis=2)


def cube(x):
    """`[B, T, U]`."""
    return tf.tanh(x @ W)


def batch_of(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def steps_of(x):
    return tf.cast(tf.shape(x)[1], tf.float32)


def reference_norms(per_example, *data):
    return np.linalg.norm(one_at_a_time(per_example, [W], *data), axis=1)


def norms_of(loss, *data, dynamic=True, **options):
    lead = None if dynamic else len(data[0])
    specs = [tf.TensorSpec([lead, *t.shape[1:]], t.dtype) for t in data]

    @tf.function(input_signature=specs, autograph=False)
    def step(*tensors):
        return per_example_norms(loss(*tensors), [W], **options)

    return step(*data).numpy()


def assert_scaled(loss, per_example, data, scale=1.0):
    """Norms are `scale` times those of `per_example`; a callable knows B."""
    expected = reference_norms(per_example, data)
    for dynamic in (True, False):
        for nominal in (None, NOMINAL):
            found = norms_of(loss, data, dynamic=dynamic, nominal_batch_size=nominal)
            factor = scale(nominal or BATCH) if callable(scale) else scale
            np.testing.assert_allclose(found, factor * expected, rtol=1e-5)
