"""Federated cohorts: a pure function of the seed and the round."""

import numpy as np
import pytest
from scipy import stats

from tfdpclip import sampling


def _ids(count):
    return [str(index) for index in range(count)]


class TestKnownAnswers:
    def test_three_of_ten(self):
        cohorts = sampling.FixedSize(3, 10).cohorts(_ids(10), seed=1)
        assert cohorts(1) == ["7", "0", "6"]
        assert cohorts(2) == ["8", "2", "7"]
        assert cohorts(3) == ["4", "8", "7"]

    def test_ten_of_five_hundred(self):
        cohorts = sampling.FixedSize(10, 500).cohorts(_ids(500), seed=1)
        expected = "461 105 438 5 437 308 146 6 21 355"
        assert cohorts(1) == expected.split()


@pytest.mark.parametrize(
    "scheme", [sampling.FixedSize(10, 50), sampling.Poisson(0.2)], ids=repr
)
class TestCohorts:
    def test_any_round_can_be_asked_for_first(self, scheme):
        in_order = scheme.cohorts(_ids(50), seed=3)
        rounds = [in_order(round_num) for round_num in range(20)]
        resumed = scheme.cohorts(_ids(50), seed=3)
        assert resumed(17) == rounds[17]
        assert in_order(5) == rounds[5]

    def test_fresh_entropy_without_a_seed(self, scheme):
        first, second = scheme.cohorts(_ids(50)), scheme.cohorts(_ids(50))
        # Two sequences of 20 cohorts agree with probability below 1e-100.
        assert [first(r) for r in range(20)] != [second(r) for r in range(20)]
        assert first(4) == first(4)

    @pytest.mark.parametrize("seed", [None, 5])
    def test_every_client_takes_part_at_the_rate(self, scheme, seed):
        cohorts = scheme.cohorts(_ids(50), seed=seed)
        rounds = 1000
        counts = np.zeros(50, int)
        for round_num in range(rounds):
            cohort = cohorts(round_num)
            assert len(set(cohort)) == len(cohort)
            counts[[int(client) for client in cohort]] += 1
        # 50 clients at 1e-9 each (two-sided): false-alarm rate below 1e-6.
        low, high = stats.binom.ppf([5e-10, 1 - 5e-10], rounds, 0.2)
        assert np.all((low <= counts) & (counts <= high))

    def test_states_its_scheme(self, scheme):
        cohorts = scheme.cohorts(_ids(50))
        assert cohorts.scheme == scheme
        assert cohorts.population == 50
        assert cohorts.expected_cohort_size == 10


def test_poisson_rounds_may_be_empty():
    cohorts = sampling.Poisson(1e-9).cohorts(_ids(3))
    assert cohorts(0) == []


def test_hostile_arguments():
    with pytest.raises(ValueError, match="population = 5 but there are 6"):
        sampling.FixedSize(3, 5).cohorts(_ids(6))
    with pytest.raises(ValueError, match="must not repeat"):
        sampling.FixedSize(1, 2).cohorts(["a", "a"])
    with pytest.raises(ValueError, match="at least one client"):
        sampling.Poisson(0.5).cohorts([])
    with pytest.raises(ValueError, match="FixedSize or Poisson"):
        sampling.FullBatch().cohorts(_ids(3))
    cohorts = sampling.FixedSize(1, 3).cohorts(_ids(3))
    for round_num in (-1, 0.5, float("nan")):
        with pytest.raises(ValueError, match="round_num"):
            cohorts(round_num)
