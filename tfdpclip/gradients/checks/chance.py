"""Random choices of the checks, which nobody can foresee."""

from __future__ import annotations

import secrets

import tensorflow as tf


def uniform(shape) -> tf.Tensor:
    """float32 in [0, 1)."""
    return tf.random.uniform(shape, seed=_seed())


def shuffled(tensor: tf.Tensor) -> tf.Tensor:
    """The rows of `tensor` in random order."""
    return tf.random.shuffle(tensor, seed=_seed())


def run_seed() -> tf.Tensor:
    """int64 `[2]`: 62 bits, new in every run, for streams that a run draws twice."""
    drawn = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32, seed=_seed())
    return tf.cast(drawn, tf.int64)


def _seed() -> int:
    """From the operating system, so that `tf.random.set_seed` does not fix it."""
    return secrets.randbits(31)
