"""Seeds of federated noise: no bit of them is lost on the way to the noise."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.federated.helpers import vector_type
from tests.seeds import COLLIDING, SCANNED, assert_random_words, opened
from tfdpclip import federated
from tfdpclip.federated import _discrete_noise, _entropy, distributed

# Cells of a single number, and of several.
STDDEVS = (2.0, 1000.0)
SAMPLERS = {
    "central": lambda seed: _entropy.standard_normal(64, seed),
    "cells": lambda seed: _discrete_noise.sample(64, STDDEVS[0], seed),
    "rejection": lambda seed: _discrete_noise.sample(64, STDDEVS[1], seed),
    "table": lambda seed: _discrete_noise.from_table(
        _discrete_noise.cells_for(STDDEVS[1], True), 64, seed, tf.int64
    ),
    "signs": lambda seed: _discrete_noise.signs(128, seed),
}


@functools.cache
def _plan():
    return distributed.plan(
        noise_multiplier=1.0,
        sum_multiplier=1.0,
        count_stddevs=(),
        size=128,
        bits=20,
        clients=10,
        minimum_clients=10,
    )


def _encoded(seed):
    rotation = tf.constant([3, 4], tf.int64)
    update = tf.ones([128]) / 128**0.5
    return distributed.encode(_plan(), [update], tf.zeros([0]), rotation, seed)


def _each(function, seeds):
    """Applies a function to each of `[n, 2]` seeds."""

    @tf.function
    def run(seeds):
        return tf.map_fn(
            lambda s: tf.cast(function(s), tf.int64),
            seeds,
            fn_output_signature=tf.int64,
        )

    return run(tf.constant(seeds, tf.int64)).numpy()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("seed", SCANNED)
def test_going_through_few_seeds_does_not_find_a_clients_share(seed):
    """An attacker's scan: 4096 seeds that folding to 32 bits could have given."""
    share = _discrete_noise.sample(
        64, STDDEVS[0], _entropy.derive(tf.constant(seed, tf.int64), 1)
    ).numpy()
    scanned = [[guess, 1] for guess in range(4096)]
    found = _each(lambda s: _discrete_noise.sample(64, STDDEVS[0], s), scanned)
    # Two unrelated vectors agree with probability 1e-57.
    assert not np.any(np.all(found == share, axis=1))


@pytest.mark.parametrize("pair", COLLIDING)
def test_parents_that_folding_takes_for_one_have_other_children(pair):
    first, second = (tf.constant(seed, tf.int64) for seed in pair)
    folded = [tf.random.experimental.stateless_fold_in(s, 1) for s in (first, second)]
    np.testing.assert_array_equal(*folded)
    for purpose in (0, 1, 7):
        made = [_entropy.derive(seed, purpose).numpy() for seed in (first, second)]
        assert made[0][0] != made[1][0] and made[0][1] != made[1][1]
    for sample in SAMPLERS.values():
        drawn = [sample(_entropy.derive(s, 1)).numpy() for s in (first, second)]
        assert np.any(drawn[0] != drawn[1])


@pytest.mark.slow
def test_fresh_seeds_are_126_uniform_bits():
    count = 4096
    seeds = tf.function(
        lambda: tf.map_fn(
            lambda _: _entropy.fresh_seed(),
            tf.range(count),
            fn_output_signature=tf.int64,
        )
    )()
    assert np.all(seeds >= 0)
    assert_random_words(seeds.numpy(), bits=63)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("purpose", [0, 1, 2**32 - 1])
def test_derived_seeds_are_128_uniform_bits(purpose):
    parents = np.random.default_rng().integers(-(2**63), 2**63, [4096, 2])
    derived = _each(lambda seed: _entropy.derive(seed, purpose), parents)
    assert_random_words(derived)
    assert_random_words(derived ^ parents)
    other = _each(lambda seed: _entropy.derive(seed, 2), parents)
    assert_random_words(derived ^ other)
    # Parents that are next to each other: a counter, not random at all.
    close = np.stack([np.full(4096, 7), np.arange(4096)], 1)
    assert_random_words(_each(lambda seed: _entropy.derive(seed, purpose), close))


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_bit_of_a_seed_changes_what_is_drawn(name):
    seed = np.random.default_rng().integers(-(2**63), 2**63, 2)
    seeds = [seed]
    for bit in range(128):
        other = seed.copy()
        other[bit // 64] ^= np.int64(1 if bit % 64 < 63 else -1) << np.int64(bit % 64)
        seeds.append(other)
    drawn = _each(lambda s: tf.cast(2**20 * SAMPLERS[name](s), tf.int64), seeds)
    # The least random of them: 8256 pairs of 128 signs agree with probability 1e-34.
    assert len(np.unique(drawn, axis=0)) == 129


def test_rounding_uses_every_bit_of_its_seed():
    seed = np.random.default_rng().integers(0, 2**62, 2)
    flipped = [seed]
    for bit in range(126):
        other = seed.copy()
        other[bit // 63] ^= np.int64(1) << np.int64(bit % 63)
        flipped.append(other)
    # 128 coordinates, each rounded up or down: two agree with probability 1e-20 at
    # the least, and there are 8001 pairs.
    assert len(np.unique(_each(_encoded, flipped), axis=0)) == 127


def test_a_serialised_computation_derives_the_same():
    @tff.tensorflow.computation(tff.TensorType(np.int64, [2]), np.int32)
    def derive(seed, purpose):
        return _entropy.derive(seed, 5), _entropy.derive(seed, purpose)

    for parent in ([1, 2], COLLIDING[0][0], [-1, 2**62]):
        known, given = derive(np.array(parent), 5)
        np.testing.assert_array_equal(known, given)
        np.testing.assert_array_equal(
            known, _entropy.derive(tf.constant(parent, tf.int64), 5)
        )
        assert opened(known, 5) == tuple(w % 2**64 for w in parent)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["server", "distributed"])
def test_rounds_from_entropy_that_folding_takes_for_one_differ(noise, monkeypatch):
    """End to end: a round's draws all come from one of two colliding seeds."""
    options = {}
    if noise == "distributed":
        options = {"secure": True, "noise": noise, "minimum_clients": 5}
    results = []
    for parent in COLLIDING[0]:
        monkeypatch.setattr(
            _entropy, "fresh_seed", lambda p=parent: tf.constant(p, tf.int64)
        )
        factory = federated.clipped_mean(1.0, 10, 1.0, **options)
        process = factory.create(vector_type(100))
        absent = [np.full(100, np.nan, np.float32)] * 5
        results.append(np.asarray(process.next(process.initialize(), absent).result))
    assert abs(np.corrcoef(*results)[0, 1]) < 0.5  # by chance: 1e-7


def test_reproducible_rounds_differ_by_seed_and_round():
    seeds = [0, 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64, 2**70]
    made = [
        tuple(_entropy.round_seed(seed, tf.constant(n)).numpy())
        for seed in seeds
        for n in range(3)
    ]
    assert len(set(made)) == len(made)
