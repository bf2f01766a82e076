"""Random rotations of vectors: signs, and a Walsh-Hadamard transform."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tfdpclip.noise import philox

# Of the matrices that the transform is made of. Smaller ones take more passes over the
# vector, larger ones more multiplications: 8, 16, 64 and 128 took 1.1 to 1.9 times as
# long for a million coordinates.
_LOG_BLOCK = 5
_BYTE = 8


def hadamard(vector: tf.Tensor) -> tf.Tensor:
    """The orthonormal Walsh-Hadamard transform of a vector; its own inverse.

    Args:
      vector: `[D]`, D a power of 2.
    """
    dimension = int(vector.shape[0])
    left = dimension.bit_length() - 1
    result = vector
    while left:
        size = 2 ** min(left, _LOG_BLOCK)
        left -= min(left, _LOG_BLOCK)
        result = tf.reshape(result, [size, dimension // size])
        # The first axis is transformed and becomes the last.
        result = tf.matmul(result, _matrix(size, vector.dtype), transpose_a=True)
    return tf.reshape(result, [dimension])


def _matrix(size: int, dtype: tf.DType) -> tf.Tensor:
    matrix = np.ones([1, 1])
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return tf.constant(matrix / math.sqrt(size), dtype)


def signs(dimension: int, seed: tf.Tensor, size: float = 1.0) -> tf.Tensor:
    """`[dimension]` independent signs times `size`, float32.

    A random byte chooses a row of eight.
    """
    words = -(-dimension // (4 * _BYTE))
    random = philox.full_integers([words], seed, tf.int32)
    chosen = tf.cast(tf.reshape(tf.bitcast(random, tf.uint8), [-1]), tf.int32)
    bits = np.arange(2**_BYTE)[:, np.newaxis] >> np.arange(_BYTE) & 1
    rows = tf.constant(size * (1 - 2 * bits), tf.float32)
    return tf.reshape(tf.gather(rows, chosen), [-1])[:dimension]
