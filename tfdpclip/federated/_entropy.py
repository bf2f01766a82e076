"""Noise inside serialised computations, from fresh entropy at every execution.

A computation of TensorFlow Federated is a graph that runs elsewhere, many times, so
neither a Python object nor a variable can hold the state of a noise stream, and a seed
kept in the server's state would be replayed when that state is restored. The graph
therefore reads the operating system's entropy each time it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip.noise import box_muller, philox

# Reading this file of the Linux kernel gives 122 new bits of its cryptographic
# generator. (TensorFlow Federated runs on Linux only. Where the file is missing, the
# round fails. TensorFlow's own non-deterministic seeds come from a generator that was
# seeded with 32 bits.)
_KERNEL_ENTROPY = "/proc/sys/kernel/random/uuid"

# Keys of a hash from a line of text to 63 bits. Since the text is random, any fixed
# keys are good.
_HASH_KEY = (0x3C6EF372FE94F82B, 0x510E527FADE682D1)


def fresh_seed() -> tf.Tensor:
    """An int64 `[2]` with 126 bits of the operating system's entropy."""
    return fresh_seeds(1)[0]


def fresh_seeds(count: int) -> list[tf.Tensor]:
    """`count` independent fresh seeds, each int64 `[2]`."""
    lines = tf.data.TextLineDataset([_KERNEL_ENTROPY] * (2 * count))
    words = tf.strings.to_hash_bucket_strong(
        lines.batch(2 * count, drop_remainder=True).get_single_element(),
        2**63 - 1,
        _HASH_KEY,
    )
    return tf.unstack(tf.reshape(words, [count, 2]))


def round_seed(seed: int, round_num: tf.Tensor) -> tf.Tensor:
    """A reproducible int64 `[2]`, different for every round; for experiments."""
    words = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    return derive(tf.constant(words.view(np.int64)), round_num)


def derive(seed: tf.Tensor, purpose: int | tf.Tensor) -> tf.Tensor:
    """A seed for one of several uses of `seed`: a permutation of all seeds."""
    return philox.derive(seed, purpose)


def standard_normal(count: int, seed: tf.Tensor) -> tf.Tensor:
    """`[count]` float32 samples of N(0, 1), made by `tfdpclip.noise.box_muller`."""
    half = (count + 1) // 2
    bits = philox.full_integers([2, half], seed, tf.int32)
    return box_muller(*tf.unstack(bits))[:count]


class Draws:
    """One execution's Gaussian noise, for repeated draws; see `Noise`.

    Args:
      seed: int64 `[2]`; every draw gets a derived seed of its own.
    """

    def __init__(self, seed: tf.Tensor):
        self._seed, self._drawn = seed, 0

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence
    ) -> list[tf.Tensor]:
        """N(0, stddev^2) for each shape, stddev and type."""
        self._drawn += 1
        noise = Noise(derive(self._seed, self._drawn))
        return noise.sample_all(shapes, stddevs, dtypes)


class Noise:
    """One execution's Gaussian noise: a `tfdpclip.mechanism.NoiseSource` for graphs.

    *Formal guarantees*: all numbers of a draw are different numbers of one stream; the
    stream is a function of the seed. An object draws once: a second draw would repeat
    the first, and raises.

    Args:
      seed: int64 `[2]`, such as `fresh_seed()`.
    """

    def __init__(self, seed: tf.Tensor):
        self._seed: tf.Tensor | None = seed

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence
    ) -> list[tf.Tensor]:
        """N(0, stddev^2) for each shape, stddev and type."""
        if self._seed is None:
            raise ValueError("This noise has been drawn.")
        seed, self._seed = self._seed, None
        shapes = [tf.TensorShape(shape).as_list() for shape in shapes]
        sizes = [math.prod(shape) for shape in shapes]
        drawn = tf.split(standard_normal(sum(sizes), seed), sizes)
        return [
            tf.reshape(tf.cast(part, dtype) * tf.cast(stddev, dtype), shape)
            for part, shape, stddev, dtype in zip(
                drawn, shapes, stddevs, dtypes, strict=True
            )
        ]
