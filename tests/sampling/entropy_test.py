"""Draws of batches and cohorts: all of their entropy reaches the generator."""

import numpy as np
import pytest

from tfdpclip import sampling
from tfdpclip.sampling.base import DrawKey

_MASK = 2**32 - 1
# Of `numpy.random.SeedSequence`, after O'Neill's seed_seq_fe.
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_LEFT, _RIGHT = 0xCA01F9DD, 0x4973F715


class _Hash:
    """The hashes of a sequence in their order, forwards and backwards."""

    def __init__(self, start, factor):
        self._start, self._factor = start, factor

    def _constants(self, place):
        return (
            self._start * pow(self._factor, place + i, 2**32) & _MASK for i in (0, 1)
        )

    def forwards(self, value, place):
        first, second = self._constants(place)
        value = (value ^ first) * second & _MASK
        return value ^ value >> 16

    def backwards(self, value, place):
        first, second = self._constants(place)
        value ^= value >> 16
        return value * pow(second, -1, 2**32) & _MASK ^ first


def _opened(state, further):
    """Computes the entropy, 8 words, from 8 words of state.

    Args:
      state: the result of `generate_state(8)`.
      further: the words of the place, which come after the entropy.
    """
    last, hashed = _Hash(_INIT_B, _MULT_B), _Hash(_INIT_A, _MULT_A)
    pool = [last.backwards(int(word), i) for i, word in enumerate(state)]
    pairs = [(i, j) for i in range(8) for j in range(8) if i != j]
    steps = [(None, i, j) for i, j in pairs]
    steps += [(word, None, j) for word in further for j in range(8)]
    for place, (word, source, j) in reversed(list(enumerate(steps, 8))):
        mixed = hashed.forwards(pool[source] if word is None else word, place)
        value = pool[j] ^ pool[j] >> 16
        pool[j] = (value + _RIGHT * mixed) * pow(_LEFT, -1, 2**32) & _MASK
    return [hashed.backwards(value, i) for i, value in enumerate(pool)]


def _keys():
    records = np.arange(20.0)[:, None]
    yield sampling.Poisson(0.5).batches((records, records))._drawer._key
    yield sampling.FixedSize(3, 20).cohorts(list(range(20)))._key
    yield DrawKey.fresh()


@pytest.mark.parametrize("place", [(0,), (7,), (7, 1)])
def test_the_entropy_can_be_computed_from_what_seeds_the_generator(place):
    """So two different entropies of 256 bits never make the same state."""
    for key in _keys():
        state = key.sequence(*place).generate_state(8)
        words = _opened(state, place)
        assert sum(word << 32 * i for i, word in enumerate(words)) == key.entropy
        # PCG64 is made of these words, except for a bit that must be 1.
        same = np.random.PCG64(key.sequence(*place)).state
        assert key.rng(*place).bit_generator.state == same | {"has_uint32": 0}


def test_entropy_is_256_bits_and_new():
    keys = [key.entropy for _ in range(30) for key in _keys()]
    assert len(set(keys)) == len(keys)
    # Bits that are never set, or always: 512 of probability 2^-90.
    assert np.bitwise_or.reduce(np.array(keys, object)) == 2**256 - 1
    assert np.bitwise_and.reduce(np.array(keys, object)) == 0


def test_steps_and_purposes_have_generators_of_their_own():
    key = DrawKey.fresh()
    places = [*((step,) for step in range(50)), *((step, 1) for step in range(50))]
    drawn = [int(key.rng(*place).integers(2**63)) for place in places]
    assert len(set(drawn)) == len(drawn)
