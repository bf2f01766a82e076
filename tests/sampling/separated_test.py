"""Schemes that keep a record's steps apart keep them apart, at the stated cost."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tfdpclip import accounting, correlated, sampling
from tfdpclip.sampling.base import DrawKey

_Relation = accounting.NeighboringRelation


def _draws(scheme, steps, entropy=0):
    """A [steps, population] matrix of how often each record was drawn."""
    key = DrawKey(entropy)
    return np.array(
        [
            np.bincount(
                scheme._draw(key, scheme.population, step),
                minlength=scheme.population,
            )
            for step in range(steps)
        ]
    )


class TestMinSeparation:
    @pytest.mark.parametrize("population", [7, 10, 12])
    @pytest.mark.parametrize("size", [1, 3, 5, 7])
    def test_steps_of_a_record_are_apart(self, population, size):
        scheme = sampling.MinSeparation(population, size)
        draws = _draws(scheme, 60)
        assert np.all(draws.sum(axis=1) == size) and draws.max() == 1
        gaps = [np.diff(np.flatnonzero(draws[:, i])).min() for i in range(population)]
        assert min(gaps) == scheme.separation

    @pytest.mark.parametrize("population", [7, 12])
    @pytest.mark.parametrize("size", [1, 3, 5])
    def test_no_stretch_has_a_record_more_often(self, population, size):
        scheme = sampling.MinSeparation(population, size)
        draws = np.cumsum(_draws(scheme, 60), axis=0)
        for steps in range(1, 30):
            counts = (draws[steps:] - draws[:-steps]).max()
            most = scheme.participation(steps)
            assert counts <= most.participations <= counts + 1
            assert most.most(steps) == scheme.event(1.0, steps).count or (
                # The separation may say that not all of them fit.
                most.most(steps) <= scheme.event(1.0, steps).count
            )

    def test_the_order_is_the_same_in_every_process(self):
        """Known answers: a run that goes on elsewhere keeps its separation."""
        first = sampling.MinSeparation(10, 4)._draw(DrawKey.fresh(), 10, 0)
        assert first.tolist() == _ORDER_0[:4]
        other = sampling.MinSeparation(10, 4, order=1)._draw(None, 10, 0)
        assert other.tolist() != _ORDER_0[:4]

    def test_one_time_too_often_is_refused(self):
        scheme = sampling.MinSeparation(10, 4, participations=2)
        assert _draws(scheme, 5).sum(axis=0).max() == 2
        with pytest.raises(
            ValueError, match="more than participations = 2 times: there are 5"
        ):
            scheme._draw(None, 10, 5)
        assert scheme.participation(100) == correlated.MinSeparation(2, 2)

    def test_costs_one_release_for_each_time(self):
        scheme = sampling.MinSeparation(10, 4)
        for steps, releases in ((1, 1), (2, 1), (3, 2), (5, 2), (6, 3)):
            assert scheme.event(2.0, steps).count == releases
        assert scheme.event(2.0, 1).event.noise_multiplier == 1.0
        zero_out = sampling.MinSeparation(10, 4, relation="zero_out")
        assert zero_out.event(2.0, 1).event.noise_multiplier == 2.0
        assert zero_out.neighboring_relation is _Relation.REPLACE_SPECIAL


# Of 10 records, by the order 0.
_ORDER_0 = [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


class TestCyclicPoisson:
    def test_records_come_in_their_turn_only(self):
        scheme = sampling.CyclicPoisson(21, rate=0.2, separation=4)
        draws = _draws(scheme, 400)
        for record in range(21):
            assert len(set(np.flatnonzero(draws[:, record]) % 4)) == 1

    def test_they_enter_at_the_rate_of_a_turn(self):
        # 21 records, each a binomial of 1000 turns: false alarms below 1e-6.
        scheme = sampling.CyclicPoisson(21, rate=0.1, separation=4)
        draws = _draws(scheme, 4000).sum(axis=0)
        low, high = stats.binom.ppf([2e-8, 1 - 2e-8], 1000, 0.4)
        assert np.all((low <= draws) & (draws <= high))

    def test_they_enter_independently(self):
        # 30 pairs of one group and 16 lags, at 1e-8 each.
        scheme = sampling.CyclicPoisson(16, rate=0.1, separation=4)
        draws = _draws(scheme, 8000)
        groups = [np.flatnonzero(draws[turn::4].any(axis=0)) for turn in range(4)]
        for turn, group in enumerate(groups):
            own = draws[turn::4]
            for i, j in itertools.combinations(group, 2):
                both = np.sum(own[:, i] * own[:, j])
                low, high = stats.binom.ppf([5e-9, 1 - 5e-9], 2000, 0.4**2)
                assert low <= both <= high
            for i in group:
                again = np.sum(own[:-1:2, i] * own[1::2, i])
                low, high = stats.binom.ppf([5e-9, 1 - 5e-9], 1000, 0.4**2)
                assert low <= again <= high

    def test_is_accounted_by_turns(self):
        scheme = sampling.CyclicPoisson(100, rate=0.05, separation=4)
        gaussian = dp_accounting.GaussianDpEvent(2.0)
        for steps, turns in ((1, 1), (4, 1), (5, 2), (12, 3)):
            assert scheme.event(2.0, steps) == dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.2, gaussian), turns
            )
        assert scheme.neighboring_relation is _Relation.REPLACE_SPECIAL

    def test_with_one_group_it_is_poisson(self):
        cyclic = sampling.CyclicPoisson(100, rate=0.05, separation=1)
        assert cyclic.event(1.0, 9) == sampling.Poisson(0.05).event(1.0, 9)

    def test_a_draw_without_room_is_dropped(self):
        scheme = sampling.CyclicPoisson(400, rate=0.1, separation=2, capacity=59)
        assert 0 < scheme.overflow_probability < 1e-3
        sizes = _draws(scheme, 6000).sum(axis=1)
        unlimited = sampling.CyclicPoisson(400, rate=0.1, separation=2)
        without = _draws(unlimited, 6000).sum(axis=1)
        assert np.all(sizes == np.where(without > 59, 0, without))
        assert np.any(without > 59)
        with pytest.raises(ValueError, match="capacity must be at least 58"):
            sampling.CyclicPoisson(400, rate=0.1, separation=2, capacity=50)

    @pytest.mark.parametrize("capacity", [1, 2, 3])
    def test_dropping_costs_nothing(self, capacity):
        """The sum with a record and with its zero, enumerated: the Poisson pair.

        The group has four further records, each worth a power of two; given which of
        them entered, the two distributions differ at most in the record's contribution.
        """
        rate = 0.3
        for others in itertools.product([0, 1], repeat=4):
            with_it, zeroed = {}, {}
            for enters, chance in ((0, 1 - rate), (1, rate)):
                size = sum(others) + enters
                total = np.dot(others, [2, 4, 8, 16])
                for found, worth in ((with_it, 1), (zeroed, 0)):
                    value = total + enters * worth if size <= capacity else 0
                    found[value] = found.get(value, 0) + chance
            if sum(others) < capacity:
                assert zeroed == {total: pytest.approx(1)}
                assert with_it == {total: 1 - rate, total + 1: rate}
            else:
                assert with_it == zeroed

    def test_batches_have_room(self):
        data = np.arange(400, dtype=np.float32)[:, np.newaxis]
        scheme = sampling.CyclicPoisson(400, rate=0.1, separation=2)
        batches = scheme.batches(data, seed=0)
        assert batches.scheme.capacity == batches.physical_batch_size
        assert batches.scheme.overflow_probability <= 1e-10
        assert scheme.accounts_for(batches.scheme)
        key = DrawKey(0)
        for step, (x, _, weight) in enumerate(batches):
            expected = batches.scheme._draw(key, 400, step)
            kept = x.numpy()[weight.numpy() > 0, 0]
            np.testing.assert_array_equal(kept, expected)


_SCHEMES = [
    sampling.MinSeparation(100, 5),
    sampling.MinSeparation(100, 5, 10, participations=3, relation="zero_out"),
    sampling.CyclicPoisson(100, 0.05, 4),
    sampling.CyclicPoisson(100, 0.05, 4, capacity=20, order=3),
]


@pytest.mark.parametrize("scheme", _SCHEMES, ids=repr)
class TestBoth:
    def test_settings_survive(self, scheme):
        assert sampling.from_dict(scheme.to_dict()) == scheme
        assert scheme.accounts_for(scheme)

    def test_another_population_is_refused(self, scheme):
        with pytest.raises(ValueError, match="100 but there are 99"):
            scheme.batches(np.zeros((99, 1)))
        with pytest.raises(ValueError, match="100 but there are 99"):
            scheme.cohorts(range(99))

    def test_nothing_is_gathered_ahead(self, scheme):
        """A draw that is not run would bring records together."""
        with pytest.raises(ValueError, match="prefetch"):
            scheme.batches(np.zeros((100, 1))).prefetch(2)

    def test_cohorts_keep_the_separation(self, scheme):
        cohorts = scheme.cohorts(range(100), seed=1)
        last = {}
        for round_num in range(50):
            for client in cohorts(round_num):
                gap = round_num - last.get(client, -math.inf)
                assert gap >= scheme.separation
                last[client] = round_num
        assert len(last) > 20

    def test_steps_nobody_saw_may_have_used_everybody(self, scheme):
        worst = scheme.at_worst()
        assert worst.neighboring_relation is scheme.neighboring_relation
        factor = accounting.sensitivity_factor(scheme.neighboring_relation)
        event = worst.event(1.0, 7)
        assert event.count == 7
        assert event.event == dp_accounting.GaussianDpEvent(1.0 / factor)

    def test_keras_counts_what_was_drawn(self, scheme):
        assert not scheme.independent_steps


class TestOthers:
    def test_epochs_may_meet(self):
        scheme = sampling.ShuffledEpochs(5, 20)
        draws = np.array(
            [
                np.bincount(scheme._draw(DrawKey(0), 20, t), minlength=20)
                for t in range(400)
            ]
        )
        counts = np.cumsum(draws, axis=0)
        for steps in (1, 2, 4, 5, 6, 9):
            found = (counts[steps:] - counts[:-steps]).max()
            assert scheme.participation(steps) == correlated.MinSeparation(1, found)

    def test_full_batches_have_everybody_always(self):
        assert sampling.FullBatch().participation(9) == correlated.MinSeparation(1, 9)

    @pytest.mark.parametrize(
        "scheme", [sampling.Poisson(0.1), sampling.FixedSize(5, 20)], ids=repr
    )
    def test_sampling_that_keeps_nothing_apart_is_refused(self, scheme):
        with pytest.raises(ValueError, match="CyclicPoisson"):
            scheme.participation(10)
        with pytest.raises(ValueError, match="MinSeparation"):
            correlated.Tree().sensitivity(10, scheme)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: sampling.MinSeparation(10, 0), "batch_size"),
        (lambda: sampling.MinSeparation(10, 11), "at most 10"),
        (lambda: sampling.MinSeparation(100, 30, 4), "batch_size must be at most 25"),
        (lambda: sampling.MinSeparation(10, 2, 0), "min_separation"),
        (lambda: sampling.MinSeparation(10, 2, participations=0), "participations"),
        (lambda: sampling.MinSeparation(10, 2, relation="add"), "relation"),
        (lambda: sampling.MinSeparation(10, 2, order=-1), "order"),
        (lambda: sampling.CyclicPoisson(10, 0.3, 4), "1 / separation"),
        (lambda: sampling.CyclicPoisson(10, 0.0, 4), "rate"),
        (lambda: sampling.CyclicPoisson(10, math.nan, 4), "rate"),
        (lambda: sampling.CyclicPoisson(3, 0.1, 4), "at most the population"),
        (lambda: sampling.CyclicPoisson(10, 0.1, 4, capacity=0), "capacity"),
    ],
)
def test_hostile_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()
