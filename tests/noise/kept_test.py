"""Correlated noise in graphs is that of its matrix, and no draw is used twice."""

import copy
import math
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.covariance import assert_covariance
from tfdpclip import correlated, sampling
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.kept import MatrixNoise
from tfdpclip.noise.runs import CorrelatedNoise, as_run

STEPS = 11
SCHEME = sampling.MinSeparation(400, 100)
MATRICES = {
    "independent": correlated.Independent(),
    "banded": correlated.SquareRootToeplitz(4),
    "one band": correlated.SquareRootToeplitz(1),
    "more bands than steps": correlated.SquareRootToeplitz(20),
    "banded inverse": correlated.InverseSquareRootToeplitz(3),
    "optimized": correlated.OptimizedToeplitz(3, STEPS, SCHEME),
    "buffered": correlated.BufferedToeplitz(2, STEPS, SCHEME),
    "tree": correlated.Tree(),
    "plain tree": correlated.Tree(honaker=False),
}
COUNT = 100_000


def noise_of(matrix, steps=STEPS, **options):
    run = CorrelatedNoise(matrix, steps, SCHEME)
    return run, MatrixNoise(run, GaussianNoise(**options))


def rows_of(source, steps, stddev=0.5, count=COUNT, compiled=False):
    @tf.function(jit_compile=compiled)
    def step():
        return source.sample_all([[count], [2]], [stddev, tf.constant(2.0)])

    return [
        np.array(part) for part in zip(*(step() for _ in range(steps)), strict=True)
    ]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", MATRICES)
def test_the_covariance_is_that_of_the_matrix(name):
    run, source = noise_of(MATRICES[name])
    large, small = rows_of(source, 2 * STEPS)
    noising = run.matrix.noising(STEPS)
    one = (0.5 * run.sensitivity) ** 2 * noising @ noising.T
    # After STEPS steps a new matrix begins, independent of the first.
    expected = np.kron(np.eye(2), one)
    assert_covariance(large, expected)
    # The purpose of a matrix: sums of steps.
    assert_covariance(
        np.cumsum(large[:STEPS], 0),
        np.tril(np.ones([STEPS] * 2)) @ one @ np.tril(np.ones([STEPS] * 2)).T,
    )
    assert small.shape == (2 * STEPS, 2)
    assert np.all(np.abs(small) < 4 * 7 * run.sensitivity * np.sqrt(STEPS))


def test_the_check_of_the_covariance_can_fail():
    run, source = noise_of(correlated.SquareRootToeplitz(4))
    large, _ = rows_of(source, STEPS)
    noising = correlated.SquareRootToeplitz(3).noising(STEPS)
    with pytest.raises(AssertionError):
        assert_covariance(large, (0.5 * run.sensitivity) ** 2 * noising @ noising.T)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["banded", "buffered", "tree", "banded inverse"])
def test_compiled_by_xla_it_is_the_same(name):
    run, source = noise_of(MATRICES[name])
    large, _ = rows_of(source, STEPS, compiled=True)
    noising = run.matrix.noising(STEPS)
    assert_covariance(large, (0.5 * run.sensitivity) ** 2 * noising @ noising.T)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", MATRICES)
def test_it_is_what_the_stream_makes_of_the_same_draws(name):
    """To rounding, and not statistically: NumPy's stream on the graph's own draws."""
    run, source = noise_of(MATRICES[name])
    drawn = []
    own = source.source.sample_all

    def recorded(shapes, stddevs, dtypes):
        found = own(shapes, stddevs, dtypes)
        drawn.append(found[0].numpy().astype(float))
        return found

    source.source.sample_all = recorded
    found = [
        source.sample_all([[5], [1]], [1.0, 1.0])[0].numpy() for _ in range(2 * STEPS)
    ]
    for k in range(2):
        stream = run.matrix.stream()
        for row in found[k * STEPS : (k + 1) * STEPS]:
            expected = run.sensitivity * stream.next(lambda: drawn.pop(0))
            np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)
    assert not drawn


def test_types_and_zeros():
    _, source = noise_of(correlated.BufferedToeplitz(2, STEPS, SCHEME))
    shapes = [[3], [2, 2], []]
    for _ in range(2):
        found = source.sample_all(
            shapes, [1.0, 0.0, tf.constant(2.0)], [tf.float64, tf.bfloat16, tf.float32]
        )
        assert [t.dtype for t in found] == [tf.float64, tf.bfloat16, tf.float32]
        assert not np.any(tf.cast(found[1], tf.float32))
    with pytest.raises(ValueError, match="other variables"):
        source.sample_all([[3], [2, 2], [1]], [1.0] * 3)


def test_copies_and_restarts_never_go_on_with_kept_noise():
    _, source = noise_of(correlated.SquareRootToeplitz(4))
    rows_of(source, 3, count=4)
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert other.made == 0 and other._streams is None
    assert source.made == 3
    source.restart()
    assert source.made == 0
    first, _ = rows_of(source, STEPS, count=4)
    assert np.all(np.isfinite(first))


def test_a_restart_is_independent_of_what_was_kept():
    run, source = noise_of(correlated.SquareRootToeplitz(4))

    @tf.function
    def step():
        return source.sample_all([[COUNT]], [1.0])[0]

    first = [step().numpy() for _ in range(3)]
    source.restart()
    second = [step().numpy() for _ in range(3)]
    noising = run.matrix.noising(3)
    one = run.sensitivity**2 * noising @ noising.T
    assert_covariance(np.array(first + second), np.kron(np.eye(2), one))


@pytest.mark.parametrize("seed", [None, 3])
def test_shares_of_replicas_are_independent_and_add_up(seed):
    run, source = noise_of(correlated.SquareRootToeplitz(4), seed=seed)
    steps = 5

    def drawn(count=COUNT):
        parts = []
        for _ in range(steps):
            source.begin_step()
            shares = [source.of_replica(i) for i in range(2)]
            parts.append([s.sample_all([[count]], [0.5])[0].numpy() for s in shares])
        return np.concatenate(np.swapaxes(parts, 0, 1))

    rows = drawn()
    source.restart()
    rows = np.concatenate([rows, drawn()])
    noising = run.matrix.noising(steps)
    one = (0.5 * run.sensitivity) ** 2 * noising @ noising.T
    # Two replicas, two matrices each, all independent.
    assert_covariance(rows, np.kron(np.eye(4), one))
    first, second = np.split(rows[: 2 * steps], 2)
    assert_covariance((first + second) / np.sqrt(2), one)
    assert source.made == steps
    pairs = [source.of_replica(i).seed_pair().numpy() for i in range(2)]
    assert not np.array_equal(*pairs)


def test_a_replica_that_is_at_another_step_raises():
    _, source = noise_of(correlated.SquareRootToeplitz(4))
    source.begin_step()
    for place in (0, 1):
        source.of_replica(place).sample_all([[3]], [1.0])
    source.begin_step()
    source.of_replica(0).sample_all([[3]], [1.0])  # The second failed.
    source.begin_step()
    source.of_replica(0).sample_all([[3]], [1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="cut short"):
        source.of_replica(1).sample_all([[3]], [1.0])
    source.restart()
    source.begin_step()
    for place in (0, 1):
        source.of_replica(place).sample_all([[3]], [1.0])
    # A copy has shares of its own.
    again = copy.deepcopy(source)
    assert again.made == 0 and again.of_replica(0) is not source.of_replica(0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="matrix must be a noise matrix"):
        CorrelatedNoise("tree", 5, SCHEME)
    with pytest.raises(ValueError, match="sampling must be a scheme"):
        CorrelatedNoise(correlated.Tree(), 5, None)
    with pytest.raises(ValueError, match="steps"):
        CorrelatedNoise(correlated.Tree(), 0, SCHEME)
    with pytest.raises(ValueError, match="no bands"):
        CorrelatedNoise(correlated.SquareRootToeplitz(None), 5, SCHEME)
    with pytest.raises(ValueError, match="an inverse that grows"):
        CorrelatedNoise(correlated.Toeplitz((1.0, 1000.0)), 5, SCHEME)
    # A record of Poisson batches may come in every step.
    with pytest.raises(ValueError):
        CorrelatedNoise(correlated.Tree(), 5, sampling.Poisson(0.1))
    with pytest.raises(ValueError, match="noise must be a CorrelatedNoise"):
        as_run(correlated.Tree(), 1.0)
    run = CorrelatedNoise(correlated.Tree(), 5, SCHEME)
    with pytest.raises(ValueError, match="must be a number"):
        as_run(run, tf.keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.9))


@pytest.mark.parametrize("name", MATRICES)
def test_settings_survive_a_dictionary(name):
    run = CorrelatedNoise(MATRICES[name], STEPS, SCHEME)
    again = CorrelatedNoise.from_dict(run.to_dict())
    assert again == run and again.sensitivity == run.sensitivity
    assert math.isfinite(run.sensitivity) and run.sensitivity >= 1
    assert dpc.CorrelatedNoise is CorrelatedNoise
