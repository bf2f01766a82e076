"""Discrete Gaussian noise keeps its guarantee: its constants, and its draws."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfdpclip.federated import _discrete_noise

STDDEVS = [0.5, 1.0, 3.7, 31.9, 127.9, 128.1, 1000.3, 12345.6]
# Chance that a test of good noise fails.
FALSE_ALARM = 1e-7


def _seed(name):
    rng = np.random.default_rng(int(name))
    return tf.constant(rng.integers(2**60, size=2), tf.int64)


def _probabilities(stddev, values):
    """Of N_Z(0, stddev^2), in the precision of numpy's longdouble."""
    reach = math.ceil(14 * stddev)
    everything = np.arange(-reach, reach + 1)
    weights = [
        np.exp(-((np.asarray(x) / np.longdouble(stddev)) ** 2) / 2)
        for x in (values, everything)
    ]
    return weights[0] / np.sum(weights[1])


def _numbers(cells):
    """The numbers in each cell, `[A, K]`: the number nearest to 0 first."""
    offsets = np.arange(cells.width)
    return cells.nearest[:, np.newaxis] + cells.away[:, np.newaxis] * offsets


def _shares(cells):
    """How many of 2^16 slots each cell has."""
    owned = cells.numbers[: cells.direct].astype(np.int64)
    number = cells.nearest // cells.width
    lowest = np.min(number)
    return np.bincount(owned - lowest, minlength=len(number))[number - lowest]


def _proposals(cells):
    """The chance of each cell to be proposed, times 2^63."""
    bounds = [0, *cells.bounds.tolist(), 2**63]
    return np.diff(np.array(bounds, np.uint64))


def _kept(cells):
    """The chance of each number, once proposed, to be kept: in float64, as drawn."""
    distance = np.arange(cells.width, dtype=np.float64)
    fall = distance * (2 * np.abs(cells.nearest[:, np.newaxis]) + distance)
    fall = np.expm1(fall * (-0.5 / cells.stddev**2))
    return 1 + fall * cells.excess[:, np.newaxis]


def _rest(cells):
    """The probabilities of the numbers drawn by `by_rejection`, `[A, K]`."""
    proposed = _proposals(cells).astype(np.longdouble)
    chances = proposed[:, np.newaxis] * _kept(cells)
    return chances / np.sum(chances)


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("stddev", STDDEVS)
def test_constants_are_those_of_the_discrete_gaussian(stddev, table):
    cells = _discrete_noise.cells_for(stddev, table)
    shares = _shares(cells) / np.longdouble(2**16)
    made = shares[:, np.newaxis] / cells.width
    made = made + (1 - np.sum(shares)) * _rest(cells)
    expected = _probabilities(stddev, _numbers(cells))
    distance = np.sum(np.abs(made - expected)) / 2
    # At most a tenth of the guarantee of `sample`: 52 bits of a chance add to it.
    assert distance < (1e-17 if table else 5e-16)
    assert len(cells.nearest) < 3000
    if table:
        assert 1 - np.sum(shares) < 0.012
        # No rectangle is higher than the distribution.
        assert np.all(made * cells.width >= shares[:, np.newaxis])
        assert np.all(_kept(cells) > -1e-15)


@pytest.mark.parametrize("stddev", [*STDDEVS, 2.3e5, 1e8])
def test_every_number_within_the_reach_can_come_out(stddev):
    for table in (True, False):
        cells = _discrete_noise.cells_for(stddev, table)
        number = np.sort(cells.nearest // cells.width)
        np.testing.assert_array_equal(number, number[0] + np.arange(len(number)))
        assert number[0] * cells.width <= -10 * stddev
        assert 10 * stddev <= (number[-1] + 1) * cells.width <= cells.furthest + 1
        # The guarantee of `sample`.
        within = np.abs(cells.nearest) <= 8.6 * stddev
        assert np.all((_proposals(cells) > 0)[within])


def test_little_is_left_to_rejection_whatever_the_stddev():
    for stddev in np.geomspace(0.5, 1e8, 60):
        cells = _discrete_noise.cells_for(float(stddev), True)
        assert 1 - cells.direct / 2**16 < 0.012 and len(cells.nearest) < 3000


def _chi_square(counts, chances):
    """Asserts that counts fit chances; bins below 20 expected are put together."""
    expected = np.asarray(chances, np.float64) * np.sum(counts)
    few = expected < 20
    counts = [*counts[~few], np.sum(counts[few])]
    expected = [*expected[~few], np.sum(expected[few])]
    if expected[-1] < 20:
        counts[-2:] = [sum(counts[-2:])]
        expected[-2:] = [sum(expected[-2:])]
    _, chance = scipy.stats.chisquare(counts, expected)
    assert chance > FALSE_ALARM


@pytest.mark.parametrize("stddev", [3.7, 31.9, 128.1, 1000.3])
@pytest.mark.parametrize("table", [True, False])
def test_what_is_drawn_by_rejection_is_what_is_left_over(stddev, table):
    cells = _discrete_noise.cells_for(stddev, table)
    found = _discrete_noise.by_rejection(cells, 400_000, _seed(stddev)).numpy()
    assert found.dtype == np.int64 and len(found) == 400_000
    numbers, rest = np.ravel(_numbers(cells)), np.ravel(_rest(cells))
    order = np.argsort(numbers)
    counts = np.bincount(found - numbers[order[0]], minlength=len(numbers))
    _chi_square(counts, rest[order])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("stddev", [0.5, 1.0, 3.7, 31.9, 128.1, 12345.6, 1e8])
@pytest.mark.parametrize("count", [8_000, 1_000_000])
def test_samples_are_discrete_gaussian(stddev, count):
    x = _discrete_noise.sample(count, stddev, _seed(stddev)).numpy()
    assert x.shape == (count,) and x.dtype == np.int64
    if stddev < 1000:
        reach = math.ceil(9 * stddev)
        chances = _probabilities(stddev, np.arange(-reach, reach + 1))
        _chi_square(np.bincount(x + reach, minlength=2 * reach + 1), chances)
        variance = float(np.sum(chances * np.arange(-reach, reach + 1.0) ** 2))
    else:
        edges = np.floor(stddev * scipy.stats.norm.ppf(np.arange(1, 100) / 100))
        below = scipy.stats.norm.cdf((edges + 0.5) / stddev)
        bins = np.diff(below, prepend=0, append=1)
        _chi_square(np.bincount(np.searchsorted(edges, x), minlength=100), bins)
        # Where in its cell a number is.
        low = x % 64
        _chi_square(np.bincount(low, minlength=64), np.full(64, 1 / 64))
        variance = stddev**2
    # Five standard deviations.
    assert np.mean(x) == pytest.approx(0, abs=5 * math.sqrt(variance / count))
    assert np.var(x) == pytest.approx(variance, rel=5 * math.sqrt(2.3 / count))
    if stddev > 2:
        for lag in (1, 2, 3, 8):
            pairs = x[lag:].astype(np.float64), x[:-lag].astype(np.float64)
            assert abs(np.corrcoef(*pairs)[0, 1]) < 5.5 / math.sqrt(count)


@pytest.mark.parametrize("stddev", [20.0, 2.3e5])
def test_the_type_does_not_change_the_numbers(stddev):
    narrow, wide = (
        _discrete_noise.sample(50_000, stddev, _seed(1), dtype)
        for dtype in (tf.int32, tf.int64)
    )
    assert narrow.dtype == tf.int32 and wide.dtype == tf.int64
    np.testing.assert_array_equal(narrow, wide)


def test_a_type_that_samples_do_not_fit_is_refused():
    assert _discrete_noise.sample(2, 2e8, _seed(1), tf.int32).shape == [2]
    with pytest.raises(ValueError, match=r"dtype is int32.*use tf\.int64"):
        _discrete_noise.sample(2, 2.2e8, _seed(1), tf.int32)


def test_no_noise_is_zeros():
    for dtype in (tf.int32, tf.int64):
        zeros = _discrete_noise.sample(5, 0.0, _seed(1), dtype)
        assert zeros.dtype == dtype and not np.any(zeros.numpy())
