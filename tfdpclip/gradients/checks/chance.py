"""Random choices of the checks, unpredictable before the run."""

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
    """An int64 seed `[2]`, new in every run, for a stream that a run draws twice.

    The seed has 62 random bits.
    """
    drawn = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32, seed=_seed())
    return tf.cast(drawn, tf.int64)


def _seed() -> int:
    """A seed from the operating system, not fixed by `tf.random.set_seed`."""
    return secrets.randbits(31)
