"""Helpers for tests of seeds: Philox both ways, and tests for uniform words."""

import numpy as np
from scipy import stats

_ROUNDS, _MASK = 10, 2**32 - 1
_MULTIPLIERS, _KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)

# Seeds that the framework's `stateless_fold_in` makes [s, purpose] of, s below 4096.
SCANNED = [
    (1105267619802528554, 6403050020948026623),
    (3935860721731763565, 8308323147862842238),
    (4561262401775724231, 8759455436359528202),
]

# Pairs of seeds that `stateless_fold_in` cannot tell apart, for any purpose.
COLLIDING = [
    (
        (5480092529665986414, 4935468809768888168),
        (1676473254530414608, 1192618381621559972),
    ),
    (
        (660868974760937356, 876128774692739185),
        (4927624205249147399, 2347321831745295252),
    ),
]


def philox_block(counter, key):
    """A block of Philox 4x32-10, the lowest word first; all are 32-bit integers."""
    a, b, c, d = (int(word) for word in counter)
    for turn in range(_ROUNDS):
        first, second = (
            (int(k) + turn * step) & _MASK
            for k, step in zip(key, _KEY_STEPS, strict=True)
        )
        by_a, by_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = by_c >> 32 ^ b ^ first, by_c & _MASK
        c, d = by_a >> 32 ^ d ^ second, by_a & _MASK
    return [a, b, c, d]


def philox_backwards(words, key):
    """The counter of a block of Philox 4x32-10; all are lists of 32-bit integers."""
    inverses = [pow(factor, -1, 2**32) for factor in _MULTIPLIERS]
    a, b, c, d = words
    for turn in reversed(range(_ROUNDS)):
        first, second = (
            (k + turn * step) % 2**32 for k, step in zip(key, _KEY_STEPS, strict=True)
        )
        # Forwards: a' = high(c M1) ^ b ^ k0, b' = low(c M1), c' = high(a M0) ^ d ^ k1,
        # d' = low(a M0).
        old_a, old_c = d * inverses[0] % 2**32, b * inverses[1] % 2**32
        a, b, c, d = (
            old_a,
            a ^ (old_c * _MULTIPLIERS[1] >> 32) ^ first,
            old_c,
            c ^ (old_a * _MULTIPLIERS[0] >> 32) ^ second,
        )
    return [a, b, c, d]


def opened(seed, purpose, domain=None):
    """The two unsigned words of the parent of a derived seed."""
    from tfdpclip.noise import philox

    domain = philox._DERIVED if domain is None else domain
    words = [int(word) % 2**64 for word in seed]
    split = [part for word in words for part in (word % 2**32, word >> 32)]
    a, b, c, d = philox_backwards(split, [purpose, domain])
    return a | b << 32, c | d << 32


def assert_random_words(words, bits=64):
    """Accepts `[n, 2]` integers that could be random numbers of `bits` bits.

    Every bit is as often set as not, every pair of bits agrees as often as not, and no
    more 32-bit halves repeat than chance allows. False alarms: 1e-7 of calls.
    """
    count = len(words)
    shifts = np.arange(bits, dtype=np.uint64)
    wide = np.ascontiguousarray(words, np.int64).view(np.uint64)
    found = (wide[:, :, None] >> shifts) & np.uint64(1)
    signs = 2.0 * found.reshape(count, -1) - 1
    accepted = stats.norm.isf(1e-8 / signs.shape[1])
    assert np.abs(signs.sum(0)).max() < accepted * count**0.5
    pairs = np.triu(signs.T @ signs, 1)
    accepted = stats.norm.isf(1e-8 / signs.shape[1] ** 2)
    assert np.abs(pairs).max() < accepted * count**0.5
    for column in wide.T:
        for half in (column & np.uint64(2**32 - 1), column >> np.uint64(bits - 32)):
            repeated = count - len(np.unique(half))
            expected = count**2 / 2**33
            assert repeated <= stats.poisson.isf(1e-9, expected)
