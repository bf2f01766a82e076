"""Seeds of 128 bits, and random numbers from them with no bit of a seed lost.

The framework's own functions lose bits. `stateless_fold_in` leaves 32 bits, if it folds
in an int32. The `stateless_*` functions keep the 128 bits of an int64 seed only in
plain graphs: XLA's default generator reads half of them, and for Philox, XLA mixes them
into 64. An attacker who can enumerate the remaining bits can subtract the noise. So the
generator is named here, and its key and counter are given in full.

*Formal guarantees*

* `derive` is, for each purpose, a permutation of the 2^128 seeds, and so is the step
  from a seed to a key and counter: Philox 4x32-10 with a public key, and the seed as
  the counter. No two seeds give the same result.
* Each purpose has its own key, and so has the stream: seeds that are derived for
  different purposes, and the stream of a seed and seeds derived from the seed, are
  unrelated as far as Philox is a good generator. Philox is not cryptographic: from a
  derived seed, the original seed can be computed.
"""

from __future__ import annotations

import tensorflow as tf

_PHILOX = tf.random.Algorithm.PHILOX.value

# Upper halves of public keys: for derived seeds, and for streams.
_DERIVED, _STREAM = 0x64657269, 0x73747265


def derive(seed: tf.Tensor, purpose: int | tf.Tensor) -> tf.Tensor:
    """A seed for a use of `seed`; all bits of `seed` matter.

    Args:
      seed: int64 `[2]`.
      purpose: at least 0 and below 2^32; an int32 tensor if it is not known yet.

    Returns:
      int64 `[2]`.

    Raises:
      ValueError: if `seed` is of another type, or `purpose` is out of range.
    """
    return _permuted(seed, _DERIVED, purpose)


def full_integers(shape: list, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Uniform among all numbers of an integer type."""
    return _bits(shape, *key_and_counter(seed), dtype)


def uniform(shape: list, seed: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Uniform on [0, 1): 23 random bits in float32, 52 in float64."""
    return tf.raw_ops.StatelessRandomUniformV2(
        shape=shape, **_generator(seed), dtype=dtype
    )


def words(count: int, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """The first 32-bit words of a stream with a fully given key and counter.

    Args:
      count: the number of words.
      key: uint64 `[1]`.
      counter: uint64 `[2]`, the lower half first.

    Returns:
      uint32 `[count]`.
    """
    return _bits([count], key, counter, tf.uint32)


def normal(shape: list, seed: tf.Tensor) -> tf.Tensor:
    """The framework's own normal samples, float32, which end at 5.7."""
    return tf.raw_ops.StatelessRandomNormalV2(
        shape=shape, **_generator(seed), dtype=tf.float32
    )


def key_and_counter(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Philox's key and first counter, of a stream of 2^64 blocks of four words."""
    words = tf.bitcast(_permuted(seed, _STREAM, 0), tf.uint64)
    # Blocks are counted in the lower half of the counter, which comes first.
    return words[:1], tf.stack([tf.zeros([], tf.uint64), words[1]])


def _bits(
    shape: list, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    alg = tf.constant(_PHILOX)
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=alg, dtype=dtype
    )


def _generator(seed):
    key, counter = key_and_counter(seed)
    return {"key": key, "counter": counter, "alg": tf.constant(_PHILOX)}


def _permuted(seed, domain, purpose):
    seed = tf.convert_to_tensor(seed)
    if seed.dtype != tf.int64 or seed.shape != [2]:
        raise ValueError(
            f"seed must be int64 of shape [2], got {seed.dtype.name} of shape "
            f"{seed.shape}: a narrower seed does not have 128 bits. Make it with "
            "tf.cast(seed, tf.int64) if fewer bits are intended."
        )
    if isinstance(purpose, int):
        if not 0 <= purpose < 2**32:
            raise ValueError(
                f"purpose must be at least 0 and below 2^32, got {purpose}."
            )
        key = tf.constant([domain << 32 | purpose], tf.uint64)
    else:
        purpose = tf.convert_to_tensor(purpose)
        if purpose.dtype != tf.int32 or purpose.shape != []:
            raise ValueError(
                "purpose must be an int or an int32 scalar, got "
                f"{purpose.dtype.name} of shape {purpose.shape}: more bits would be "
                "cut off. Use int(purpose), or tf.cast(purpose, tf.int32)."
            )
        purpose = tf.cast(tf.bitcast(purpose, tf.uint32), tf.uint64)
        key = tf.constant([domain << 32], tf.uint64) + purpose
    # A single block of the generator, with the seed as the counter.
    return _bits([2], key, tf.bitcast(seed, tf.uint64), tf.int64)
