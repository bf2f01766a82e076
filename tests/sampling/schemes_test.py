"""Schemes: the draws have the distribution that is accounted for."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tfdpclip import _arguments, accounting, sampling
from tfdpclip.sampling.base import DrawKey, SamplingScheme

_Relation = accounting.NeighboringRelation


def _draws(scheme, population, steps, entropy=0):
    """A [steps, population] matrix of how often each record was drawn."""
    key = DrawKey(entropy)
    return np.array(
        [
            np.bincount(scheme._draw(key, population, step), minlength=population)
            for step in range(steps)
        ]
    )


def _assert_binomial(count, trials, probability, alarm=1e-8):
    """Two-sided; the false-alarm rate is at most `alarm`."""
    low, high = stats.binom.ppf([alarm / 2, 1 - alarm / 2], trials, probability)
    assert low <= count <= high


class TestPoisson:
    # Seeds are fixed, so a test passes always or never; were they not, its false-alarm
    # rate would be below 1e-6 (at most 100 checks at 1e-8 each).

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("rate", [0.02, 0.3, 0.9, 1.0])
    def test_every_record_enters_at_the_rate(self, rate):
        draws = _draws(sampling.Poisson(rate), 40, 4000)
        assert draws.max() <= 1
        for record in range(40):
            _assert_binomial(draws[:, record].sum(), 4000, rate)

    def test_records_enter_independently_of_each_other(self):
        rate, steps = 0.3, 4000
        draws = _draws(sampling.Poisson(rate), 8, steps)
        for i, j in itertools.combinations(range(8), 2):
            both = np.sum(draws[:, i] * draws[:, j])
            _assert_binomial(both, steps, rate**2)

    def test_steps_are_independent_of_each_other(self):
        rate, steps = 0.3, 4001
        draws = _draws(sampling.Poisson(rate), 20, steps)
        for lag in (1, 2):
            for record in range(20):
                # Products at distance 2 * lag apart share no step: independent trials.
                products = draws[:-lag, record] * draws[lag:, record]
                for start in range(lag):
                    chosen = products[start :: 2 * lag]
                    _assert_binomial(chosen.sum(), len(chosen), rate**2)

    def test_sizes_are_binomial(self):
        # Chi-square on the size of the draw; false-alarm rate 1e-7.
        draws = _draws(sampling.Poisson(0.1), 50, 5000)
        sizes = np.bincount(draws.sum(axis=1), minlength=51)
        edges = [range(0, 2), *([k] for k in range(2, 10)), range(10, 51)]
        pmf = stats.binom.pmf(np.arange(51), 50, 0.1)
        seen = [sizes[list(edge)].sum() for edge in edges]
        expected = [5000 * pmf[list(edge)].sum() for edge in edges]
        assert stats.chisquare(seen, expected).pvalue > 1e-7

    def test_a_full_draw_is_cut_uniformly(self):
        scheme = sampling.Poisson(1.0, capacity=5, population=20)
        draws = _draws(scheme, 20, 4000)
        assert np.all(draws.sum(axis=1) == 5)
        for record in range(20):
            _assert_binomial(draws[:, record].sum(), 4000, 0.25)

    def test_default_capacity_is_the_least_that_is_never_exceeded(self):
        for population, rate in ((100, 0.1), (60_000, 256 / 60_000), (10**6, 1e-6)):
            capacity = sampling.Poisson(rate).default_capacity(population)
            binomial = stats.binom(population, rate)
            assert binomial.sf(capacity - 1) <= 1e-10 < binomial.sf(capacity - 2)
        assert sampling.Poisson(1.0).default_capacity(10) == 10

    def test_event(self):
        event = sampling.Poisson(0.1).event(2.0, 7)
        gaussian = dp_accounting.GaussianDpEvent(2.0)
        assert event == dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.1, gaussian), 7
        )
        assert sampling.Poisson(0.1).neighboring_relation is _Relation.ADD_OR_REMOVE_ONE

    def test_accounts_for_the_same_rate_only(self):
        capped = sampling.Poisson(0.1, capacity=9, population=50)
        assert sampling.Poisson(0.1).accounts_for(capped)
        assert not sampling.Poisson(0.2).accounts_for(capped)
        assert not capped.accounts_for(sampling.Poisson(0.1))
        assert not sampling.Poisson(0.1).accounts_for(sampling.FixedSize(5, 50))


class TestFixedSize:
    def test_without_replacement(self):
        draws = _draws(sampling.FixedSize(6, 24), 24, 4000)
        assert draws.max() == 1
        assert np.all(draws.sum(axis=1) == 6)
        for record in range(24):
            _assert_binomial(draws[:, record].sum(), 4000, 0.25)

    def test_with_replacement(self):
        draws = _draws(sampling.FixedSize(6, 24, replacement=True), 24, 4000)
        assert draws.max() > 1
        assert np.all(draws.sum(axis=1) == 6)
        for record in range(24):
            _assert_binomial(draws[:, record].sum(), 6 * 4000, 1 / 24)

    def test_event_has_half_the_noise_multiplier(self):
        scheme = sampling.FixedSize(6, 24)
        gaussian = dp_accounting.GaussianDpEvent(1.5)
        assert scheme.event(3.0, 1).event == (
            dp_accounting.SampledWithoutReplacementDpEvent(24, 6, gaussian)
        )
        assert scheme.event(3.0, 1, sensitivity=1.0).event.event.noise_multiplier == 3
        replaced = dataclasses.replace(scheme, replacement=True)
        assert replaced.event(3.0, 1).event == (
            dp_accounting.SampledWithReplacementDpEvent(24, 6, gaussian)
        )
        assert sampling.FixedSize(24, 24).event(3.0, 1).event == gaussian
        assert scheme.neighboring_relation is _Relation.REPLACE_ONE

    def test_large_batches_with_replacement_only(self):
        assert sampling.FixedSize(30, 24, replacement=True).batch_size == 30
        with pytest.raises(ValueError, match="at most the population"):
            sampling.FixedSize(30, 24)


class TestShuffledEpochs:
    @pytest.mark.parametrize("size", [5, 6, 24])
    def test_every_epoch_has_every_record_once(self, size):
        scheme = sampling.ShuffledEpochs(size, 24)
        per_epoch = scheme.steps_per_epoch(24)
        draws = _draws(scheme, 24, 3 * per_epoch)
        for epoch in range(3):
            total = draws[epoch * per_epoch : (epoch + 1) * per_epoch].sum(axis=0)
            assert np.all(total == 1)

    def test_orders_differ(self):
        key = DrawKey(0)
        scheme = sampling.ShuffledEpochs(24, 24)
        orders = {tuple(scheme._draw(key, 24, epoch)) for epoch in range(10)}
        assert len(orders) == 10

    def test_event_counts_epochs_begun(self):
        scheme = sampling.ShuffledEpochs(10, 95)
        for steps, releases in ((1, 1), (10, 1), (11, 2), (30, 3)):
            assert scheme.event(2.0, steps).count == releases
        assert scheme.event(2.0, 1).event.noise_multiplier == 1.0
        zero_out = sampling.ShuffledEpochs(10, 95, relation="zero_out")
        assert zero_out.event(2.0, 1).event.noise_multiplier == 2.0
        assert zero_out.neighboring_relation is _Relation.REPLACE_SPECIAL

    def test_statement_says_why_there_is_no_amplification(self):
        assert "no amplification" in sampling.ShuffledEpochs(1, 2).assumptions()[0]


def test_full_batch():
    scheme = sampling.FullBatch()
    assert np.all(_draws(scheme, 7, 2) == 1)
    assert scheme.event(2.0, 3) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(2.0), 3
    )


# At least one instance of every scheme; `available_test.py` is about AvailableClients.
_DRAWN = [
    sampling.Poisson(0.1),
    sampling.Poisson(0.1, 12, 100),
    sampling.CappedPoisson(0.1, 2),
    sampling.FixedSize(5, 100),
    sampling.FixedSize(5, 100, replacement=True),
    sampling.ShuffledEpochs(5, 100),
    sampling.FullBatch(),
    sampling.ThresholdedCounts(1e-7),
    sampling.LaplaceRelease(),
    sampling.MinSeparation(100, 5),
    sampling.MinSeparation(100, 5, 10, participations=100),
    sampling.CyclicPoisson(100, 0.05, 4),
    sampling.CyclicPoisson(100, 0.05, 4, capacity=20, order=3),
    sampling.RandomAllocation(20),
    sampling.RandomAllocation(20, 15, 100),
]


def test_every_scheme_has_an_entry_and_a_public_name():
    names = {type(scheme).__name__ for scheme in _DRAWN} | {"AvailableClients"}
    missing = set(_arguments.kinds_of(SamplingScheme)) - names
    assert not missing, f"add an instance of {sorted(missing)} to _DRAWN of {__file__}"
    for name, kind in _arguments.kinds_of(SamplingScheme).items():
        assert name in sampling.__all__ and getattr(sampling, name) is kind


def _draw_too_often(scheme, steps):
    """The records that are in more steps than `scheme.event(1, steps)` says."""
    event = scheme.event(1.0, steps)
    count, each = event.count, event.event
    rate = getattr(each, "sampling_probability", 1.0)
    if hasattr(each, "sample_size"):
        rate = each.sample_size / each.source_dataset_size
    # 13 schemes of 100 records: a false alarm in less than one of 10^6 runs.
    most = count if rate == 1 else stats.binom.isf(1e-9, count, rate)
    return np.flatnonzero(_draws(scheme, 100, steps).sum(axis=0) > most)


@pytest.mark.parametrize("scheme", _DRAWN, ids=repr)
def test_no_record_is_in_more_steps_than_the_event_says(scheme):
    assert not len(_draw_too_often(scheme, 2000))


def test_a_scheme_that_draws_more_than_it_says_is_found():
    class Thrice(sampling.Poisson):
        def _draw(self, key, population, step):
            return sampling.Poisson(3 * self.rate)._draw(key, population, step)

    assert len(_draw_too_often(Thrice(0.1), 2000)) == 100


@pytest.mark.parametrize("scheme", _DRAWN, ids=repr)
def test_a_scheme_is_public_settings_only(scheme):
    assert sampling.from_dict(scheme.to_dict()) == scheme
    assert hash(scheme) == hash(sampling.from_dict(scheme.to_dict()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.anything = 1


# The unit of CappedPoisson is a person, not an example.
_OF_EXAMPLES = [s for s in _DRAWN if not isinstance(s, sampling.CappedPoisson)]


@pytest.mark.parametrize("scheme", _OF_EXAMPLES, ids=repr)
class TestEveryScheme:
    def test_no_noise_is_not_private(self, scheme):
        assert accounting.epsilon(0.0, 1, scheme, 1e-5) == math.inf

    def test_no_steps_are_free(self, scheme):
        assert accounting.epsilon(1.0, 0, scheme, 1e-5) == 0.0

    def test_batch_clipping_has_sensitivity_two(self, scheme):
        batch = accounting.epsilon(2.0, 5, scheme, 1e-5, unit="batch")
        assert batch == accounting.epsilon(2.0, 5, scheme, 1e-5, sensitivity=2.0)
        alone = accounting.epsilon(2.0, 5, scheme, 1e-5)
        replaces = scheme.neighboring_relation is _Relation.REPLACE_ONE
        assert alone == batch if replaces else alone < batch

    def test_hostile_events(self, scheme):
        for z in (-1.0, math.nan, math.inf, None, "1"):
            with pytest.raises(ValueError, match="noise_multiplier"):
                scheme.event(z, 1)
        for steps in (-1, 1.5, math.nan, math.inf):
            with pytest.raises(ValueError, match="steps"):
                scheme.event(1.0, steps)
        with pytest.raises(ValueError, match="unit"):
            scheme.event(1.0, 1, unit="layer")
        with pytest.raises(ValueError, match="sensitivity"):
            scheme.event(1.0, 1, sensitivity=math.nan)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: sampling.Poisson(0.0), "rate"),
        (lambda: sampling.Poisson(1.0001), "rate"),
        (lambda: sampling.Poisson(-0.1), "rate"),
        (lambda: sampling.Poisson(math.nan), "rate"),
        (lambda: sampling.Poisson(math.inf), "rate"),
        (lambda: sampling.Poisson("0.1"), "rate"),
        (lambda: sampling.Poisson(0.1, capacity=3), "population"),
        (lambda: sampling.Poisson(0.1, capacity=0, population=9), "capacity"),
        (lambda: sampling.FixedSize(0, 10), "batch_size"),
        (lambda: sampling.FixedSize(2.5, 10), "batch_size"),
        (lambda: sampling.FixedSize(math.nan, 10), "batch_size"),
        (lambda: sampling.FixedSize(5, 0), "population"),
        (lambda: sampling.FixedSize(11, 10), "batch_size"),
        (lambda: sampling.ShuffledEpochs(11, 10), "batch_size"),
        (lambda: sampling.ShuffledEpochs(1, 10, "add_remove"), "relation"),
        (lambda: sampling.RandomAllocation(0), "steps"),
        (lambda: sampling.RandomAllocation(2.5), "steps"),
        (lambda: sampling.RandomAllocation(math.nan), "steps"),
        (lambda: sampling.RandomAllocation(10, capacity=3), "population"),
        (lambda: sampling.RandomAllocation(10, capacity=0, population=9), "capacity"),
        (lambda: sampling.from_dict({"scheme": "Random"}), "Unknown"),
    ],
)
def test_hostile_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_describe_says_what_matters():
    assert sampling.Poisson(0.1).describe() == "Poisson, rate 0.1"
    assert "5 of 100 without replacement" in sampling.FixedSize(5, 100).describe()
