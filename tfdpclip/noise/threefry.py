"""Gaussian noise in a compiled loop: generator, transform and scale.

The framework draws words by an operation and transforms them by a dozen operations,
each of which reads and writes the whole array. Here XLA makes a single vectorised loop,
which takes about a third of the time on a CPU.

The generator is Threefry 2x32-20 under a key for each draw, which comes from Philox
4x32-10, the framework's own (both are of Salmon, Moraes, Dror and Shaw 2011, "Parallel
random numbers: as easy as 1, 2, 3"). Threefry adds, turns and xors words of 32 bits; a
processor computes twice as many of these at a time as 64-bit products of Philox.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip.noise import philox

# Keeps this stream apart from every further stream with the same key.
_DOMAIN = 0x746664_70636C6970

# How far Threefry turns its second word, in turn, and the constant in its key.
_TURNS, _PARITY = ((13, 15, 26, 6), (17, 29, 16, 24)), 0x1BD11BDA
# Pairs of a draw in a row: a table of a row and a table of the row numbers stay in the
# nearest cache; a table of all pairs would be as long as a quarter of the noise.
_ROW = 256

# Polynomials in r^2 of sin(pi r) / r and cos(pi r), with the least relative errors on
# |r| <= 1/4: 3.2e-9 and 3.3e-8, where float32 rounds by 6e-8.
_SINE = (3.1415926434166805, -5.167707681865394, 2.5497610485864435, -0.58901220950996)
_COSINE = (0.9999999673862839, -4.934786649424108, 4.05751914703107, -1.30550923344104)


def threefry(
    counter: Sequence[tf.Tensor], key: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Two random words for each counter: Threefry 2x32 of 20 rounds.

    Args:
      counter: two uint32 tensors, which broadcast.
      key: two uint32 scalars.

    Returns:
      Two uint32 tensors.
    """
    xor, either = tf.bitwise.bitwise_xor, tf.bitwise.bitwise_or
    up, down = tf.bitwise.left_shift, tf.bitwise.right_shift
    keys = [*key, xor(xor(*key), _word(_PARITY))]
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    turns = [[(_word(t), _word(32 - t)) for t in part] for part in _TURNS]
    for group in range(1, 6):
        for left, right in turns[(group - 1) % 2]:
            a = a + b
            b = xor(either(up(b, left), down(b, right)), a)
        a = a + keys[group % 3]
        b = b + (keys[(group + 1) % 3] + _word(group))
    return a, b


def _word(value):
    return tf.constant(value, tf.uint32)


def _polynomial(coefficients, x):
    total = tf.constant(coefficients[-1], x.dtype)
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


def _flip(value, bit):
    """`value`, with its sign changed where bit 1 of `bit` is set."""
    sign = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bit, 2), 30)
    return tf.bitcast(
        tf.bitwise.bitwise_xor(tf.bitcast(value, tf.int32), sign), tf.float32
    )


def cosine_and_sine(half_turns: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The cosine and sine of pi times a float32 in [-1, 1], to within 1.5e-7.

    In compiled code, the framework's own functions are calls for each number.
    """
    quarter = tf.round(2 * half_turns)
    rest = half_turns - 0.5 * quarter
    square = rest * rest
    sine, cosine = rest * _polynomial(_SINE, square), _polynomial(_COSINE, square)
    turns = tf.cast(quarter, tf.int32)
    odd = tf.bitwise.bitwise_and(turns, 1) > 0
    return (
        _flip(tf.where(odd, sine, cosine), turns + 1),
        _flip(tf.where(odd, cosine, sine), turns),
    )


def uniform_and_angle(
    first: tf.Tensor, second: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The arguments of the Box-Muller transform, from two random int32 for each pair.

    Returns:
      u in (0, 1), with the radius sqrt(-2 log u), and the angle in half turns. The
      least u decides how far samples reach, so u gets all available bits: 31 bits of
      `first` and the 8 low bits of `second`, which float32 could not keep in the angle:
      u >= 2^-40. Angles are odd multiples of 2^-24, and u < 1, so that no sample is
      exactly 0.
    """
    whole = tf.cast(tf.bitwise.bitwise_and(first, 2**31 - 1), tf.float32)
    fraction = tf.cast(tf.bitwise.bitwise_and(second, 0xFF), tf.float32)
    # The scale keeps u below 1 where the sum rounds up, so that no radius is 0.
    scale = 2.0**-31 * (1 - 2.0**-24)
    uniform = (whole + (fraction * 2.0**-8 + 2.0**-9)) * scale
    # Exact in float32: 24 bits and a sign.
    odd = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(second, -0x100), 0x80)
    return uniform, tf.cast(odd, tf.float32) * 2.0**-31


def two_normals(first, second, stddev):
    """The Box-Muller transform of two uint32 words, times `stddev`."""
    first, second = (tf.bitcast(word, tf.int32) for word in (first, second))
    uniform, angle = uniform_and_angle(first, second)
    radius = stddev * tf.sqrt(-2.0 * tf.math.log(uniform))
    cosine, sine = cosine_and_sine(angle)
    return radius * cosine, radius * sine


def secrets_of(state: tf.Tensor) -> tf.Tensor:
    """The secret words of a draw: eight uint32, which are two blocks of Philox.

    Args:
      state: int64 `[3]`: counter and key of the framework's generator, which has set
        256 blocks aside for the draw. All of its 192 bits matter.
    """
    state = tf.bitcast(state, tf.uint64)
    key = tf.bitwise.bitwise_xor(state[2:], tf.constant([_DOMAIN], tf.uint64))
    return philox.words(8, key, state[:2])


def _pairs(scaled, standard, secrets, stddev):
    """`[rows, _ROW]` pairs of samples, as two tensors."""
    k0, k1, number, start, mask0, mask1, _, _ = tf.unstack(secrets)
    rows = -(-(scaled + standard) // _ROW)
    index = (tf.range(rows) * _ROW)[:, tf.newaxis] + tf.range(_ROW)
    if standard:
        stddev = tf.where(index < scaled, stddev, 1.0)
    first, second = threefry([tf.bitcast(index, tf.uint32) + start, number], [k0, k1])
    xor = tf.bitwise.bitwise_xor
    return two_normals(xor(first, mask0), xor(second, mask1), stddev)


# XLA computes an output element by element, and would run the generator again for each
# of two outputs: a pair leaves the loop as a single complex number.
_compiled_pairs = tf.function(
    lambda *draw: tf.complex(*_pairs(*draw)), jit_compile=True, autograph=False
)


def _packed(low, high):
    """Two float32 in the bits of a float64."""
    low, high = (
        tf.cast(tf.bitcast(part, tf.uint32), tf.uint64) for part in (low, high)
    )
    high = tf.bitwise.left_shift(high, tf.constant(32, tf.uint64))
    return tf.bitcast(tf.bitwise.bitwise_or(low, high), tf.float64)


def normals(
    count: int, standard: int, state: tf.Tensor, stddev: tf.Tensor
) -> tf.Tensor:
    """Independent samples of N(0, stddev^2), then samples of N(0, 1), in float32.

    Args:
      count: how many samples of N(0, stddev^2), an even number; `count` + `standard` is
        at most 2^32.
      standard: how many samples of N(0, 1), an even number.
      state: int64 `[3]`, which must never be the same for two draws; see `secrets_of`.
        Of its eight secret words, the first two are the draw's key. Pair i has the
        counter (i + fourth, third), and its words are xored with the fifth and sixth.
      stddev: a float32 scalar.

    Returns:
      `[count + standard]`. Entries 2 k and 2 k + 1 are a pair.
    """
    draw = (count // 2, standard // 2, secrets_of(state), stddev)
    if in_xla():
        # XLA does not reinterpret complex numbers. It would run the generator again for
        # each reader of a part; a concatenation is computed once.
        made = tf.concat([_packed(*_pairs(*draw)), tf.zeros([1, _ROW], tf.float64)], 0)
    else:
        made = _compiled_pairs(*draw)
    return tf.reshape(tf.bitcast(made, tf.float32), [-1])[: count + standard]
