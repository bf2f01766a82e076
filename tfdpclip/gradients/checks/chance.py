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


def _seed() -> int:
    """A seed from the operating system, not fixed by `tf.random.set_seed`."""
    return secrets.randbits(31)
