"""Gaussian noise sources; fresh operating-system entropy by default."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdpclip.clipping import check_bool, check_non_negative


class GaussianNoise:
    """Draws independent Gaussian noise; every draw moves the stream on.

    *Formal guarantees*

    * Without a seed, the generator's whole state (counter and key) comes from the
      operating system's entropy when the object is made.
    * The state is in no checkpoint: this object is not trackable, on purpose. A
      restored run draws new noise. Noise that was replayed with other data could be
      subtracted away.
    * Draws of one object never overlap: each advances the counter of one
      counter-based (Philox) stream.

    What this is not: Philox is not a cryptographic generator, and the samples are
    floating-point numbers, whose lowest bits can give away the sum they were added to
    (Mironov 2012). With `hardened`, every sample is half the sum of four independent
    ones, so that an attacker who looks for the sums that are possible at all would have
    to go through all combinations of four (Holohan and Braghin 2021, "Secure random
    sampling in differential privacy", section 4). That costs four times the draws.

    Samples come from the Box-Muller transform of 32 random bits each, by vectorised
    operations, at twice the speed of the framework's own normal sampler on a CPU. They
    reach as far as 6.6 standard deviations; mass of 5e-11 lies beyond.

    Args:
      seed: an integer makes the stream reproducible, for experiments only. A run with
        a seed is not private.
      hardened: whether to sum four samples into one.

    Raises:
      ValueError: if `seed` is neither None nor an integer, 0 or above.
    """

    def __init__(self, seed: int | None = None, hardened: bool = False):
        self.hardened = check_bool("hardened", hardened)
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise ValueError(f"seed must be an integer or None, got {seed!r}.")
            check_non_negative("seed", seed)
        self.seed = seed
        with tf.init_scope():
            if seed is None:
                # The framework's own non-deterministic state comes from a generator
                # that was seeded with 32 bits.
                state = np.frombuffer(os.urandom(24), np.int64)
                self._generator = tf.random.Generator.from_state(
                    tf.constant(state), alg="philox"
                )
            else:
                self._generator = tf.random.Generator.from_seed(seed, alg="philox")

    def __deepcopy__(self, memo):
        # A copy of the state would draw the same noise again.
        return GaussianNoise(self.seed, self.hardened)

    def __reduce__(self):
        return GaussianNoise, (self.seed, self.hardened)

    def sample(self, shape, stddev, dtype=tf.float32) -> tf.Tensor:
        """N(0, stddev^2), independent entries, of `shape`.

        Args:
          shape: the static shape to draw.
          stddev: a number or a scalar tensor. 0 gives exact zeros.
          dtype: a floating type; noise is drawn in float32 at least.
        """
        return self.sample_all([shape], [stddev], [dtype])[0]

    def sample_all(
        self, shapes: Sequence, stddevs: Sequence, dtypes: Sequence | None = None
    ) -> list[tf.Tensor]:
        """One draw for several tensors, which is faster than one draw for each.

        Args:
          shapes: static shapes.
          stddevs: a number or scalar tensor for each.
          dtypes: a floating type for each; float32 by default.
        """
        if not shapes:
            return []
        dtypes = [tf.as_dtype(t) for t in dtypes or [tf.float32] * len(shapes)]
        sizes = [math.prod(tf.TensorShape(shape).as_list()) for shape in shapes]
        narrow = [i for i, dtype in enumerate(dtypes) if dtype != tf.float64]
        flat: list = [None] * len(shapes)
        if narrow:
            drawn = self._normal(sum(sizes[i] for i in narrow), tf.float32)
            parts = tf.split(drawn, [sizes[i] for i in narrow])
            for i, part in zip(narrow, parts, strict=True):
                flat[i] = part
        for i, dtype in enumerate(dtypes):
            if flat[i] is None:
                flat[i] = self._normal(sizes[i], dtype)
        return [
            tf.cast(tf.reshape(part * tf.cast(stddev, part.dtype), shape), dtype)
            for part, shape, stddev, dtype in zip(
                flat, shapes, stddevs, dtypes, strict=True
            )
        ]

    def seed_pair(self) -> tf.Tensor:
        """Two fresh int32, `[2]`, for `tf.random.stateless_*` within one step."""
        return tf.bitcast(self._generator.uniform_full_int([2], tf.uint32), tf.int32)

    def _normal(self, count: int, dtype: tf.DType) -> tf.Tensor:
        def draw():
            if dtype == tf.float32:
                return self._standard_normal(count)
            return self._generator.normal([count], dtype=dtype)

        if not self.hardened:
            return draw()
        return 0.5 * tf.add_n([draw() for _ in range(4)])

    def _standard_normal(self, count: int) -> tf.Tensor:
        half = (count + 1) // 2
        bits = [self._generator.uniform_full_int([half], tf.uint32) for _ in range(2)]
        first, second = (
            tf.cast(tf.bitcast(part, tf.int32), tf.float32) * 2.0**-31 for part in bits
        )
        # |first| is uniform on [0, 1], with its finest steps next to 0, where the tail
        # comes from.
        uniform = tf.maximum(tf.abs(first), 2.0**-32)
        radius = tf.sqrt(-2.0 * tf.math.log(uniform))
        angle = second * math.pi
        pairs = [radius * tf.cos(angle), radius * tf.sin(angle)]
        return tf.concat(pairs, 0)[:count]
