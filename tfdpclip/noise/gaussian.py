"""Gaussian noise sources; fresh operating-system entropy by default."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import boolean, integer, optional
from tfdpclip._constants import vector
from tfdpclip._devices import on_cpus
from tfdpclip._outside import outside_of_functions
from tfdpclip.noise import threefry

# Compiling takes a quarter of a second, which pays from this many samples on. Above the
# second number, an int32 cannot count the samples.
_COMPILED_FROM, _COMPILED_TO = 2**16, 2**32
# Parts of a draw that start at multiples of this number are sliced without a copy.
_ALIGNMENT = 16


class GaussianNoise:
    """Draws independent Gaussian noise; every draw moves the stream on.

    *Formal guarantees*

    * Without a seed, the generator's whole state (counter and key) comes from the
      operating system's entropy when the object is made.
    * The state is in no checkpoint: this object is not trackable, on purpose. A
      restored run draws new noise. Noise that is replayed with different data could be
      subtracted.
    * Draws of an object never overlap: each draw advances the counter of a
      counter-based (Philox) stream. Draws of 65,536 float32 samples or more on a CPU,
      which are compiled, are separate streams of a second generator (Threefry), with
      keys that Philox makes of that counter.

    Limits: Philox is not a cryptographic generator, and the samples are floating-point
    numbers, with lowest bits that can reveal the sum they were added to (Mironov 2012).
    With `hardened`, every sample is half the sum of four independent samples, so that
    an attacker who searches for the possible sums would have to go through all
    combinations of four (Holohan and Braghin 2021, "Secure random sampling in
    differential privacy", section 4). That costs four times the draws.

    Samples come from the Box-Muller transform, at up to four times the speed of the
    framework's own normal sampler on a CPU. They reach as far as 7.4 standard
    deviations, or 9.4 in float64 and 14.8 when hardened; docs/guarantees.md bounds the
    effect of the missing tail.

    Args:
      seed: an integer makes the stream reproducible, for experiments only. A run with
        a seed is not private.
      hardened: whether to sum four samples into each sample.
      replica: the number of a replica that draws a share of the same noise; with a
        seed, every replica has its own stream. `of_replica` sets it.

    Raises:
      ValueError: if `seed` or `replica` is neither None nor an integer, 0 or above.
    """

    def __init__(
        self,
        seed: int | None = None,
        hardened: bool = False,
        replica: int | None = None,
    ):
        self.hardened = boolean("hardened", hardened)
        self.seed = seed = optional(integer, "seed", seed)
        self.replica = replica = optional(integer, "replica", replica)
        place = () if replica is None else (replica,)
        with tf.init_scope():
            if seed is None:
                # The framework's own non-deterministic state comes from a generator
                # that was seeded with 32 bits.
                state = np.frombuffer(os.urandom(24), np.int64)
            else:
                # The framework would use the seed as the counter, so that the streams
                # of neighbouring seeds would differ only by a block.
                words = np.random.SeedSequence(seed, spawn_key=place).generate_state(
                    3, np.uint64
                )
                state = words.view(np.int64)
            self._generator = tf.random.Generator.from_state(
                tf.constant(state), alg="philox"
            )

    def of_replica(self, place: int) -> GaussianNoise:
        """A source for a replica, independent of the sources of further replicas.

        Args:
          place: the number of the replica. With a seed, every replica has its own
            stream.
        """
        made: list[GaussianNoise] = []

        def make():
            made.append(GaussianNoise(self.seed, self.hardened, place))

        # A strategy would give all replicas the state of the first.
        outside_of_functions(make, [], in_strategy=False)
        return made[0]

    @property
    def state(self) -> list[int]:
        """The state of the stream: a secret, from which all later draws follow.

        Not for use in graphs.
        """
        return [int(word) for word in self._generator.state.numpy()]

    def go_on_from(self, state: Sequence[int]) -> None:
        """Sets the state of the stream. The caller must not release noise twice.

        Args:
          state: an earlier `state` of any source.
        """
        self._generator.state.assign(np.array(state, np.int64))

    def renew(self) -> None:
        """Starts a new stream of fresh entropy, unless there is a seed."""
        if self.seed is None:
            self._generator.state.assign(np.frombuffer(os.urandom(24), np.int64))

    def __deepcopy__(self, memo):
        # A copy of the state would draw the same noise again.
        return GaussianNoise(self.seed, self.hardened, self.replica)

    def __reduce__(self):
        return GaussianNoise, (self.seed, self.hardened, self.replica)

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
        """A single draw for several tensors, which is faster than a draw for each.

        Args:
          shapes: static shapes.
          stddevs: a number or scalar tensor for each.
          dtypes: a floating type for each; float32 by default.
        """
        if not shapes:
            return []
        dtypes = [tf.as_dtype(t) for t in dtypes or [tf.float32] * len(shapes)]
        sizes = [math.prod(tf.TensorShape(shape).as_list()) for shape in shapes]
        drawn: list = [None] * len(shapes)
        for wide in (False, True):
            dtype = tf.float64 if wide else tf.float32
            places = []
            for i, t in enumerate(dtypes):
                if _is_zero(stddevs[i]) or not sizes[i]:
                    drawn[i] = tf.zeros(shapes[i], t)
                elif (t == tf.float64) == wide:
                    places.append(i)
            if not places:
                continue
            scale = stddevs[places[0]]
            scaled = [i for i in places if stddevs[i] is scale]
            others = [i for i in places if stddevs[i] is not scale]
            count, standard = (
                sum(_aligned(sizes[i]) for i in part) for part in (scaled, others)
            )
            flat = self._normal(count, standard, tf.cast(scale, dtype))
            order = (*scaled, *others)
            # Aligned sizes, so that no part is copied.
            parts = tf.split(flat, [*(_aligned(sizes[i]) for i in order), -1])
            for i, part in zip(order, parts, strict=False):
                if _aligned(sizes[i]) > sizes[i]:
                    part = tf.slice(part, vector(0), vector(sizes[i]))
                if i in others:
                    part *= tf.cast(stddevs[i], dtype)
                shape = vector(*tf.TensorShape(shapes[i]))
                drawn[i] = tf.cast(tf.reshape(part, shape), dtypes[i])
        return drawn

    def seed_pair(self) -> tf.Tensor:
        """Two fresh int32, `[2]`: 64 bits, for uses that need no secret in a step."""
        return tf.bitcast(self._generator.uniform_full_int([2], tf.uint32), tf.int32)

    def _normal(self, count: int, standard: int, stddev: tf.Tensor) -> tf.Tensor:
        """`count` samples of N(0, stddev^2), then `standard` samples of N(0, 1)."""
        draw = self._draw
        # On devices other than CPUs the framework's own generator is fast.
        large = _COMPILED_FROM <= count + standard < _COMPILED_TO
        if large and stddev.dtype == tf.float32 and on_cpus():
            draw = self._draw_compiled
        if not self.hardened:
            return draw(count, standard, stddev)
        return 0.5 * tf.add_n([draw(count, standard, stddev) for _ in range(4)])

    def _draw(self, count, standard, stddev):
        half = (count + standard + 1) // 2
        wide = stddev.dtype == tf.float64
        word, signed = (tf.uint64, tf.int64) if wide else (tf.uint32, tf.int32)
        bits = self._generator.uniform_full_int([2, half], word)
        flat = box_muller(*tf.unstack(tf.bitcast(bits, signed)))
        if not standard:
            return flat * stddev
        return tf.concat([flat[:count] * stddev, flat[count : count + standard]], 0)

    def _draw_compiled(self, count, standard, stddev):
        state = tf.raw_ops.RngReadAndSkip(
            resource=self._generator.state.handle,
            alg=tf.constant(tf.random.Algorithm.PHILOX.value),
            delta=tf.constant(1, tf.uint64),
        )
        return threefry.normals(count, standard, state, stddev)


def _is_zero(stddev: Any) -> bool:
    """Whether the stddev is known to be 0 while the graph is made."""
    return isinstance(stddev, (int, float)) and stddev == 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def box_muller(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Standard normal samples, two for each pair of random words.

    The radius of a pair is sqrt(-2 log u); `threefry.uniform_and_angle` tells how u
    comes from 32-bit words, and how far samples reach. (The framework's samplers stop
    at u = 1e-7, 5.7 standard deviations, float64 included.)

    Args:
      first: `[n]` uniform int32 (for float32 samples) or int64 (for float64).
      second: of the same shape and type, independent of `first`.

    Returns:
      `[2 n]`: first the cosine, then the sine half.
    """
    if first.dtype == tf.int64:
        # Near 0, where the radius is large, float64 keeps all of the 63 bits.
        whole = tf.bitwise.bitwise_and(first, 2**63 - 1)
        uniform = (tf.cast(whole, tf.float64) + 0.5) * 2.0**-63
        angle = tf.cast(second, tf.float64) * (math.pi * 2.0**-63)
    else:
        uniform, half_turns = threefry.uniform_and_angle(first, second)
        angle = half_turns * math.pi
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
