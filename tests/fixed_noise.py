"""Noise sources whose numbers are known."""

import math

import numpy as np
import tensorflow as tf

STANDARD = np.random.default_rng(6).normal(size=8).astype(np.float32)


class Given:
    """A noise source that returns given numbers, and notes the stddevs."""

    def __init__(self, standard=None):
        self.standard = standard
        self.stddevs = None

    def sample_all(self, shapes, stddevs, dtypes):
        self.stddevs = [float(s) for s in stddevs]
        sizes = [math.prod(tf.TensorShape(shape).as_list()) for shape in shapes]
        standard = np.ones(sum(sizes)) if self.standard is None else self.standard
        parts = np.split(np.asarray(standard), np.cumsum(sizes)[:-1])
        return [
            tf.cast(tf.reshape(tf.constant(part, tf.float32), shape) * s, dtype)
            for part, shape, s, dtype in zip(
                parts, shapes, stddevs, dtypes, strict=True
            )
        ]


class Fixed:
    """A noise source that hands out `STANDARD`, in graphs as well."""

    def sample_all(self, shapes, stddevs, dtypes):
        sizes = [math.prod(tf.TensorShape(shape).as_list()) for shape in shapes]
        parts = np.split(STANDARD[: sum(sizes)], np.cumsum(sizes)[:-1])
        return [
            tf.cast(tf.reshape(part, shape) * s, dtype)
            for part, shape, s, dtype in zip(
                parts, shapes, stddevs, dtypes, strict=True
            )
        ]
