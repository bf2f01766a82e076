"""Discrete Gaussian noise inside TensorFlow graphs."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tfdpclip import _streams
from tfdpclip.federated import _entropy

# Up to here, a table; from here on, a continuous Gaussian is close enough to accept
# most of its proposals.
_TABLE_STDDEV = 32.0
# Mass of 1e-17 lies beyond: less than 52 random bits can tell.
_REACH = 8.5


def sample(count: int, stddev: float, seed: tf.Tensor) -> tf.Tensor:
    """`[count]` int64 samples of the discrete Gaussian N_Z(0, stddev^2).

    The probability of k is proportional to exp(-k^2 / (2 stddev^2)), to the precision
    of float64 and of uniform numbers of 52 bits.

    Args:
      count: how many.
      stddev: the parameter; 0 gives zeros.
      seed: int64 `[2]`.
    """
    if stddev == 0:
        return tf.zeros([count], tf.int64)
    if stddev <= _TABLE_STDDEV:
        return _from_table(count, stddev, seed)
    return _by_rejection(count, stddev, seed)


def _from_table(count, stddev, seed):
    reach = math.ceil(_REACH * stddev) + 1
    support = np.arange(-reach, reach + 1)
    weights = np.exp(-(support**2) / (2 * stddev**2))
    # Up to, not including, the last: a uniform number above all of them means it.
    bounds = np.cumsum(weights)[:-1] / math.fsum(weights)
    uniform = _streams.uniform([count], seed, tf.float64)
    found = tf.searchsorted(tf.constant(bounds), uniform, side="right")
    return tf.cast(found, tf.int64) - reach


def _by_rejection(count, stddev, seed):
    """Accepts the rounding k of a continuous sample y in proportion to p(k) / p(y).

    With y = k + u, that is exp((2 k u + u^2) / (2 stddev^2)), over its largest value.
    What is accepted has k with probability proportional to p(k), for each u alike.
    """
    variance = stddev**2
    largest = _REACH * stddev + 1
    log_most = (largest + 0.25) / (2 * variance)
    # Twelve standard deviations of the number accepted (it fails once in 10^32 times;
    # the shape of the result is then wrong, and the round fails).
    accepted = math.exp(-log_most)
    proposals = math.ceil(count / accepted + 12 * math.sqrt(count) / accepted) + 64
    half = (proposals + 1) // 2
    uniform = _streams.uniform([2, half], _entropy.derive(seed, 0), tf.float64)
    # One minus what is in [0, 1), exactly: the logarithm of 0 is not wanted.
    radius = stddev * tf.sqrt(-2.0 * tf.math.log(1.0 - uniform[0]))
    angle = 2.0 * math.pi * uniform[1]
    proposed = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
    rounded = tf.round(proposed)
    log_ratio = (tf.square(proposed) - tf.square(rounded)) / (2 * variance) - log_most
    chance = _streams.uniform([2 * half], _entropy.derive(seed, 1), tf.float64)
    kept = tf.boolean_mask(rounded, tf.math.log(chance) < log_ratio)
    return tf.cast(tf.reshape(kept[:count], [count]), tf.int64)
