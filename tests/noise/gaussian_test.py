"""Gaussian noise: its distribution, its independence and its sources."""

import copy
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.noise import GaussianNoise

COUNT = 200_000
# Six standard errors: a false alarm in 2e-9 of tests.
SIGMAS = 6.0


def assert_stddev(sample, expected):
    error = SIGMAS / np.sqrt(2 * sample.size)
    assert np.std(sample) == pytest.approx(expected, rel=error)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("stddev", [1e-3, 1.0, 250.0])
def test_samples_are_normal_with_the_stddev_asked_for(stddev, dtype, hardened):
    noise = GaussianNoise(hardened=hardened).sample([COUNT], stddev, dtype)
    assert noise.dtype == dtype
    values = noise.numpy().astype("float64") / stddev
    assert_stddev(values, 1.0)
    assert abs(values.mean()) < SIGMAS / np.sqrt(COUNT)
    # Third and fourth moments: variances 15 and 96 over the count.
    assert abs(np.mean(values**3)) < SIGMAS * np.sqrt(15 / COUNT)
    assert abs(np.mean(values**4) - 3) < SIGMAS * np.sqrt(96 / COUNT)
    # Tails are not cut: P(|x| > 4) = 6.33e-5, 12.7 expected; none has odds 3e-6,
    # and of |x| > 3 (540 expected) six standard deviations are 139.
    assert abs(np.sum(np.abs(values) > 3) - 540) < 139


def test_coarse_types_get_noise_drawn_in_float32():
    noise = GaussianNoise().sample([COUNT], 1.0, tf.bfloat16)
    assert noise.dtype == tf.bfloat16
    assert_stddev(noise.numpy().astype("float32"), 1.0)


def test_stddev_zero_gives_exact_zeros():
    assert np.all(GaussianNoise().sample([1000], 0.0).numpy() == 0)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_draws_are_independent_of_each_other(jit):
    source = GaussianNoise()
    draw = tf.function(lambda: source.sample([COUNT], 1.0), jit_compile=jit)
    first, second = draw().numpy(), draw().numpy()
    assert_stddev(first, 1.0)
    assert abs(np.corrcoef(first, second)[0, 1]) < SIGMAS / np.sqrt(COUNT)
    # Adjacent entries of the same draw as well.
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < SIGMAS / np.sqrt(COUNT)
    assert not np.intersect1d(first[:100], second[:100]).size


def test_draws_of_many_sizes_never_overlap():
    source = GaussianNoise()
    drawn = np.concatenate([source.sample([n], 1.0).numpy() for n in range(1, 60)])
    # Of 1770 floats with 2**23 or so values each, coincidences are rare, runs of two
    # equal neighbours rarer: a replayed counter would repeat whole runs.
    pairs = list(zip(drawn[:-1], drawn[1:], strict=True))
    assert len(set(pairs)) == len(pairs)


def test_two_sources_are_independent():
    a, b = (GaussianNoise().sample([COUNT], 1.0).numpy() for _ in range(2))
    assert abs(np.corrcoef(a, b)[0, 1]) < SIGMAS / np.sqrt(COUNT)


def test_a_seed_reproduces_the_stream():
    a, b = GaussianNoise(seed=7), GaussianNoise(seed=7)
    for _ in range(3):
        assert np.array_equal(a.sample([5], 1.0).numpy(), b.sample([5], 1.0).numpy())
    other = GaussianNoise(seed=8).sample([5], 1.0).numpy()
    assert not np.array_equal(other, GaussianNoise(seed=7).sample([5], 1.0).numpy())


def test_without_a_seed_global_seeds_do_not_matter():
    drawn = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(3)
        drawn.append(GaussianNoise().sample([5], 1.0).numpy())
    assert not np.array_equal(*drawn)


@pytest.mark.parametrize("seed", [True, 1.5, "7", [1]])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        GaussianNoise(seed=seed)


def test_noise_is_in_no_checkpoint(tmp_path):
    module = tf.Module()
    module.noise = GaussianNoise()
    module.kept = tf.Variable(1.0)
    path = tf.train.Checkpoint(module=module).save(str(tmp_path / "c"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert [n for n in names if "noise" in n] == []
    assert any("kept" in n for n in names)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda noise: pickle.loads(pickle.dumps(noise))]
)
def test_a_copy_does_not_replay_the_noise(duplicate):
    source = GaussianNoise()
    other = duplicate(source)
    drawn = source.sample([5], 1.0).numpy()
    assert not np.array_equal(drawn, other.sample([5], 1.0).numpy())


def test_a_shallow_copy_continues_the_one_stream():
    source = GaussianNoise()
    other = copy.copy(source)
    drawn = source.sample([5], 1.0).numpy()
    assert not np.array_equal(drawn, other.sample([5], 1.0).numpy())


def test_the_state_comes_from_the_operating_systems_entropy(monkeypatch):
    """With os.urandom pinned the streams agree, so nothing weaker is the source."""
    asked = []

    def pinned(count):
        asked.append(count)
        return bytes(range(count))

    monkeypatch.setattr(os, "urandom", pinned)
    a, b = (GaussianNoise().sample([5], 1.0).numpy() for _ in range(2))
    assert np.array_equal(a, b)
    # A 64-bit key, and a 128-bit counter.
    assert min(asked) >= 24


def test_hardened_noise_uses_four_draws_for_each_value():
    plain, hardened = GaussianNoise(7), GaussianNoise(7, hardened=True)
    four = [plain.sample([5], 1.0).numpy() for _ in range(4)]
    np.testing.assert_allclose(
        hardened.sample([5], 1.0), 0.5 * np.sum(four, axis=0), rtol=1e-5
    )
    copied = copy.deepcopy(hardened), pickle.loads(pickle.dumps(hardened))
    assert all(noise.hardened for noise in copied)


def test_hardened_must_be_a_bool():
    with pytest.raises(ValueError, match="hardened"):
        GaussianNoise(hardened="yes")
