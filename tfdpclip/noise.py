"""Gaussian noise sources; fresh operating-system entropy by default."""

from __future__ import annotations

import tensorflow as tf


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
    floating-point numbers; see docs/pitfalls.md.

    Args:
      seed: an integer makes the stream reproducible, for experiments only. A run with
        a seed is not private.
    """

    def __init__(self, seed: int | None = None):
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be an integer or None, got {seed!r}.")
        self.seed = seed
        with tf.init_scope():
            if seed is None:
                self._generator = tf.random.Generator.from_non_deterministic_state(
                    alg="philox"
                )
            else:
                self._generator = tf.random.Generator.from_seed(seed, alg="philox")

    def sample(self, shape, stddev, dtype=tf.float32) -> tf.Tensor:
        """N(0, stddev^2), independent entries, of `shape`.

        Args:
          shape: the shape to draw.
          stddev: a number or a scalar tensor. 0 gives exact zeros.
          dtype: a floating type; noise is drawn in float32 at least.
        """
        dtype = tf.as_dtype(dtype)
        drawn = dtype if dtype in (tf.float32, tf.float64) else tf.float32
        noise = self._generator.normal(shape, dtype=drawn) * tf.cast(stddev, drawn)
        return tf.cast(noise, dtype)
