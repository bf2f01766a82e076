"""Data, a model and an optimizer for fits whose steps a budget counts.

The optimizer has the attributes that the callback reads and no privacy: these tests are
about the counting.
"""

import numpy as np
import tensorflow as tf

from tfdpclip import sampling

RECORDS = 100
DELTA = 1e-5


class Optimizer(tf.keras.optimizers.SGD):
    """Counts a step per `accumulation_steps` gradients, as private optimizers do."""

    def __init__(self, z=2.0, expected_batch_size=10, accumulation_steps=1, seed=None):
        super().__init__(0.01)
        self.noise_multiplier = z
        self.expected_batch_size = expected_batch_size
        self.accumulation_steps = accumulation_steps
        self.seed = seed
        self.clip = "FixedClip(norm=1.0)"
        self._seen = tf.Variable(0, dtype=tf.int64, trainable=False)

    def apply_gradients(self, grads_and_vars, **kwargs):
        self.build([variable for _, variable in grads_and_vars])
        self._seen.assign_add(1)
        whole = tf.cast(self._seen % self.accumulation_steps == 0, tf.int64)
        return self.iterations.assign_add(whole)


def model_of(optimizer, **compile_options):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    model.compile(optimizer, "mse", **compile_options)
    return model


def small_data():
    x = np.linspace(0, 1, 2 * RECORDS, dtype=np.float32).reshape(-1, 2)
    return x, x[:, :1]


def poisson(rate=0.1, **options):
    return sampling.Poisson(rate).batches(small_data(), **options)
