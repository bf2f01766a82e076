"""s(C) is the effect of the worst record, and never less."""

import itertools
import math

import numpy as np
import pytest

from tests.correlated.patterns import patterns
from tfdpclip import correlated
from tfdpclip.correlated import sensitivity, toeplitz

_PATTERNS = [
    correlated.SingleEpoch(),
    correlated.MinSeparation(1),
    correlated.MinSeparation(1, 2),
    correlated.MinSeparation(2),
    correlated.MinSeparation(3, 2),
    correlated.MinSeparation(4),
    correlated.MinSeparation(20),
]


def brute_force(matrix, participation, signs=True):
    """The worst record of all patterns, contributing +-1 in each of its steps."""
    worst = 0.0
    for pattern in patterns(participation, matrix.shape[1]):
        columns = matrix[:, list(pattern)]
        choices = itertools.product([1, -1], repeat=max(0, len(pattern) - 1))
        for choice in choices if signs else [()]:
            weights = np.ones(len(pattern))
            weights[1 : 1 + len(choice)] = choice
            worst = max(worst, float(np.linalg.norm(columns @ weights)))
    return worst


def all_patterns(steps, participation):
    """The same patterns by their definition, from all subsets."""
    for chosen in itertools.product([0, 1], repeat=steps):
        places = np.flatnonzero(chosen)
        most = participation.participations
        if np.all(np.diff(places) >= participation.separation) and (
            most is None or len(places) <= most
        ):
            yield tuple(int(place) for place in places)


@pytest.mark.parametrize("participation", _PATTERNS, ids=str)
def test_patterns_are_those_of_the_definition(participation):
    expected = sorted(all_patterns(9, participation))
    assert sorted(patterns(participation, 9)) == expected
    assert max(map(len, expected)) == participation.most(9)


def _falling(rng, length):
    column = np.sort(rng.uniform(0, 1, length))[::-1]
    column[0] = max(column[0], 0.5)
    return column


@pytest.mark.slow
@pytest.mark.parametrize("participation", _PATTERNS, ids=str)
@pytest.mark.parametrize("steps", [1, 5, 10])
def test_is_exact_where_coefficients_do_not_rise(participation, steps):
    rng = np.random.default_rng(0)
    for bands in (1, 2, 3, steps, 30):
        column = _falling(rng, bands)
        expected = brute_force(toeplitz.dense(column, steps), participation)
        found = sensitivity.of_toeplitz(column, steps, participation)
        assert expected * (1 - 1e-13) <= found <= expected * (1 + 1e-11)


@pytest.mark.parametrize("participation", _PATTERNS, ids=str)
def test_is_exact_for_banded_matrices_that_rise(participation):
    """Columns a separation apart are orthogonal: the longest columns are the worst."""
    rng = np.random.default_rng(1)
    steps = 9
    for _ in range(5):
        matrix = rng.normal(size=(steps, steps))
        matrix = np.tril(np.triu(matrix.T, 1 - participation.separation).T)
        matrix = np.tril(matrix) - np.tril(matrix, -participation.separation)
        expected = brute_force(matrix, participation)
        found = sensitivity.of_matrix(matrix, participation)
        assert expected * (1 - 1e-13) <= found <= expected * (1 + 1e-11)


@pytest.mark.parametrize("participation", _PATTERNS, ids=str)
def test_is_a_bound_for_every_matrix(participation):
    rng = np.random.default_rng(2)
    for trial in range(10):
        rows, steps = rng.integers(5, 9, 2)
        matrix = rng.normal(size=(rows, steps))
        if trial % 2:
            matrix = np.abs(matrix)
        found = sensitivity.of_matrix(matrix, participation)
        assert found >= brute_force(matrix, participation) * (1 - 1e-15)
        column = np.concatenate([[1.0], rng.normal(size=4)])
        found = sensitivity.of_toeplitz(column, 8, participation)
        assert found >= brute_force(toeplitz.dense(column, 8), participation)


def test_records_that_turn_do_not_get_past_the_bound():
    """Contributions are vectors: signs are not the worst there is."""
    # Three columns at 120 degrees: their signed sums are shorter than the sum of three
    # contributions at 120 degrees in the plane.
    angles = 2 * np.pi * np.arange(3) / 3
    matrix = np.array([np.cos(angles), np.sin(angles)])
    participation = correlated.MinSeparation(1)
    turned = np.einsum(
        "rs,sd->rd", matrix, np.array([[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    )
    assert np.linalg.norm(turned) > brute_force(matrix, participation) + 0.1
    found = sensitivity.of_matrix(matrix, participation)
    assert found >= np.linalg.norm(turned)


@pytest.mark.parametrize("honaker", [True, False])
@pytest.mark.parametrize("participation", _PATTERNS, ids=str)
def test_trees_cost_what_the_worst_record_does_or_more(honaker, participation):
    matrix = correlated.Tree(honaker)
    for steps in (1, 4, 7, 8):
        expected = brute_force(matrix.strategy(steps), participation, signs=False)
        found = matrix.sensitivity(steps, participation)
        assert found >= expected
        if participation.most(steps) == 1:
            assert found == pytest.approx(expected, rel=1e-12)


def test_a_cyclic_record_pays_for_one_turn():
    column = np.array([1.0, 0.5, 0.25])
    cyclic = correlated.CyclicPoisson(3, 0.1)
    expected = np.linalg.norm(column)
    assert sensitivity.of_toeplitz(column, 12, cyclic) == pytest.approx(expected)
    matrix = toeplitz.dense(column, 12)
    assert sensitivity.of_matrix(matrix, cyclic) == pytest.approx(expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_more_bands_than_groups_are_not_amplified(groups):
    cyclic = correlated.CyclicPoisson(groups, 0.1)
    column = np.array([1.0, 0.5, 0.25])
    with pytest.raises(ValueError, match="bands"):
        sensitivity.of_toeplitz(column, 12, cyclic)
    with pytest.raises(ValueError, match="bands"):
        sensitivity.of_matrix(toeplitz.dense(column, 12), cyclic)
    with pytest.raises(ValueError, match="at most separation"):
        correlated.OptimizedToeplitz(3, 12, cyclic)


def test_columns_that_only_miss_each_other_are_not_amplified():
    """Orthogonality is not enough: a turn's rows must end before the next turn."""
    cyclic = correlated.CyclicPoisson(2, 0.1)
    matrix = np.eye(7, 6)  # The last row comes after all steps.
    assert sensitivity.of_matrix(matrix, cyclic) == pytest.approx(1.0)
    matrix[6, 0] = 1.0
    once = correlated.SingleEpoch()
    assert sensitivity.of_matrix(matrix, once) == pytest.approx(2**0.5)
    with pytest.raises(ValueError, match="bands"):
        sensitivity.of_matrix(matrix, cyclic)
    matrix = np.eye(6)
    matrix[1, 0] = 1.0
    assert sensitivity.of_matrix(matrix, cyclic) == pytest.approx(2**0.5)


def test_rounding_is_upwards():
    """Against the same sums in exact arithmetic."""
    from fractions import Fraction

    rng = np.random.default_rng(3)
    for _ in range(20):
        column = _falling(rng, 50)
        participation = correlated.MinSeparation(7, 9)
        exact = [Fraction(0)] * 60
        for start in range(0, 9 * 7, 7):
            for k, value in enumerate(column):
                if start + k < 60:
                    exact[start + k] += Fraction(float(value))
        squared = sum(value * value for value in exact)
        found = Fraction(sensitivity.of_toeplitz(column, 60, participation))
        assert found * found >= squared


def test_one_band_of_one_costs_exactly_one():
    for participation in (correlated.SingleEpoch(), correlated.CyclicPoisson(4, 0.1)):
        assert correlated.Independent().sensitivity(1000, participation) == 1.0


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: correlated.MinSeparation(0), "separation"),
        (lambda: correlated.MinSeparation(2, 0), "participations"),
        (lambda: correlated.MinSeparation(2.5), "separation"),
        (lambda: correlated.CyclicPoisson(4, 0.3), "1 / separation"),
        (lambda: correlated.CyclicPoisson(4, math.nan), "rate"),
        (lambda: sensitivity.of_matrix([[1.0, math.nan]], _PATTERNS[0]), "finite"),
        (lambda: sensitivity.of_matrix([1.0], _PATTERNS[0]), "strategy"),
        (lambda: sensitivity.of_matrix([[1.0]], "once"), "participation"),
        (lambda: sensitivity.of_toeplitz([0.0, 1.0], 3, _PATTERNS[0]), "above 0"),
        (lambda: sensitivity.of_toeplitz([1, 2], 5000, _PATTERNS[1]), "4096"),
    ],
)
def test_hostile_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()
