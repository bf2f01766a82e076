"""Random allocation: a record is in one step of an epoch, independently of others."""

import itertools

import numpy as np
import pytest
from scipy import stats

from tests.sampling.numbered import RECORDS, numbered
from tests.stand_in_aggregator import Aggregator
from tfdpclip import accounting, correlated, sampling
from tfdpclip.sampling import distributed
from tfdpclip.sampling.allocation import allocate
from tfdpclip.sampling.base import DrawKey

# Seeds are fixed, so a test passes always or never; were they not, its false-alarm rate
# would be below 1e-6.


def _places(scheme, population, epochs, entropy=0):
    """Each record's step by epoch, `[epochs, population]`; -1 for cut records."""
    key, places = DrawKey(entropy), np.full((epochs, population), -1)
    for step in range(epochs * scheme.steps):
        epoch, place = divmod(step, scheme.steps)
        found = scheme._draw(key, population, step)
        assert np.all(places[epoch, found] == -1)
        assert len(set(found)) == len(found)
        places[epoch, found] = place
    return places


def _assert_binomial(count, trials, probability, alarm=1e-9):
    low, high = stats.binom.ppf([alarm / 2, 1 - alarm / 2], trials, probability)
    assert low <= count <= high


@pytest.mark.parametrize("steps, population", [(1, 5), (2, 40), (7, 40), (50, 20)])
def test_every_record_is_in_one_step_of_every_epoch(steps, population):
    assert np.all(_places(sampling.RandomAllocation(steps), population, 6) >= 0)


def test_every_step_is_as_likely_for_every_record():
    places = _places(sampling.RandomAllocation(5), 20, 2000)
    for record, step in itertools.product(range(20), range(5)):
        _assert_binomial(np.sum(places[:, record] == step), 2000, 0.2)


def test_the_step_of_a_record_tells_of_no_other_and_of_no_other_epoch():
    places = _places(sampling.RandomAllocation(3), 8, 2000)
    for i, j in itertools.combinations(range(8), 2):
        for a, b in itertools.product(range(3), repeat=2):
            both = (places[:, i] == a) & (places[:, j] == b)
            _assert_binomial(both.sum(), 2000, 1 / 9)
    for record in range(8):
        _assert_binomial(
            np.sum(places[::2, record] == places[1::2, record]), 1000, 1 / 3
        )


def test_sizes_are_those_of_balls_in_bins():
    rng = np.random.default_rng(3)
    sizes = np.array([allocate(30, 5, rng) for _ in range(6000)])
    assert np.all(sizes.sum(axis=1) == 30)
    for step in range(5):
        seen = np.bincount(sizes[:, step], minlength=31)
        edges = [range(0, 3), *([k] for k in range(3, 10)), range(10, 31)]
        pmf = stats.binom.pmf(np.arange(31), 30, 0.2)
        expected = [6000 * pmf[list(edge)].sum() for edge in edges]
        seen = [seen[list(edge)].sum() for edge in edges]
        assert stats.chisquare(seen, expected).pvalue > 1e-8
    # The covariance of two steps' sizes is that of a multinomial: -n / t^2.
    found = np.cov(sizes.T)[np.triu_indices(5, 1)]
    assert np.all(np.abs(found + 30 / 25) < 6 * 30 * 0.16 / np.sqrt(6000))


@pytest.mark.parametrize("steps", [1, 2, 3, 64, 1000, 99_999])
def test_all_records_are_dealt(steps):
    sizes = allocate(12_345, steps, np.random.default_rng(0))
    assert sizes.shape == (steps,) and sizes.min() >= 0 and sizes.sum() == 12_345


def test_a_full_step_is_cut_uniformly():
    places = _places(sampling.RandomAllocation(2, 5, 20), 20, 2000)
    kept = (places >= 0).sum(axis=0)
    assert np.all((places == 0).sum(axis=1) <= 5)
    whole = _places(sampling.RandomAllocation(2), 20, 2000)
    sizes = (whole == 0).sum(axis=1)
    expected = np.minimum(sizes, 5).mean() + np.minimum(20 - sizes, 5).mean()
    # All records have the same probability to be kept: 20 intervals of 1e-8.
    for record in range(20):
        _assert_binomial(kept[record], 2000, expected / 20, 1e-8)


@pytest.mark.parametrize("capacity, steps", [(None, 10), (6, 20)])
def test_draws_follow_from_the_key(capacity, steps):
    scheme = sampling.RandomAllocation(steps, capacity, 60 if capacity else None)
    forwards = [scheme._draw(DrawKey(7), 60, step) for step in range(3 * steps)]
    key = DrawKey(7)
    for step in reversed(range(3 * steps)):
        np.testing.assert_array_equal(scheme._draw(key, 60, step), forwards[step])
    assert any(
        len(scheme._draw(DrawKey(8), 60, step)) != len(forwards[step])
        for step in range(steps)
    )


def test_an_epoch_is_dealt_once(monkeypatch):
    made = []
    rng = DrawKey.rng

    def counted(key, step, purpose=None):
        made.append(step)
        return rng(key, step, purpose)

    monkeypatch.setattr(DrawKey, "rng", counted)
    batches = sampling.RandomAllocation(6).batches(numbered())
    for _ in range(2):
        list(batches)
    assert made == [0, 0, 1, 1]


def _steps(batches, elements=None):
    found = []
    for number, (x, _, weights) in enumerate(batches):
        found.append([int(row[0]) - 1 for row in x.numpy()[weights.numpy() > 0]])
        if number + 1 == elements:
            break
    k = batches.accumulation_steps
    return [sum(found[i : i + k], []) for i in range(0, len(found), k)]


def test_batches_have_every_record_once_in_every_iteration():
    batches = sampling.RandomAllocation(6).batches(numbered())
    first, second = (sum(_steps(batches), []) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(RECORDS))
    assert first != second


def test_batches_of_pieces_are_the_same_steps():
    options = dict(data=numbered(), seed=5)
    whole = sampling.RandomAllocation(6).batches(**options)
    cut = sampling.RandomAllocation(6).batches(
        **options, accumulation_steps=3, physical_batch_size=10
    )
    assert _steps(cut) == _steps(whole)


def test_a_run_of_a_ledger_begins_an_epoch():
    batches = sampling.RandomAllocation(6).batches(numbered())
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=1.0, sampling=batches)
    drawer = batches._drawer
    for _ in range(4):
        drawer.next_element()
    ledger.record(4)
    ledger.begin(noise_multiplier=2.0, sampling=batches, change=True)
    assert batches._drawer.steps_drawn() == 6
    ledger.record(7)
    events = [
        batches.scheme.event(z, steps) for z, steps in ((1.0, 4), (2.0, 6), (2.0, 1))
    ]
    import dp_accounting

    together = accounting.event_epsilon(dp_accounting.ComposedDpEvent(events), 1e-5)
    assert ledger.epsilon() == pytest.approx(together)


def test_two_runs_of_half_an_epoch_are_two_allocations():
    ledger = accounting.Ledger(delta=1e-5)
    scheme = sampling.RandomAllocation(6)
    for _ in range(2):
        ledger.begin(noise_multiplier=1.0, sampling=scheme)
        ledger.record(3)
    assert ledger.phases[0].runs == [3, 3]
    assert ledger.epsilon() > accounting.epsilon(1.0, 6, scheme, 1e-5)


def test_a_ledger_keeps_the_scheme_in_its_file(tmp_path):
    path = tmp_path / "privacy.json"
    ledger = accounting.Ledger(delta=1e-5, path=path)
    ledger.begin(
        noise_multiplier=1.0, sampling=sampling.RandomAllocation(6, 30, RECORDS)
    )
    ledger.record(20)
    again = accounting.Ledger.load(path)
    assert again.epsilon() == ledger.epsilon()
    assert again.phases[0].sampling == sampling.RandomAllocation(6, 30, RECORDS)
    text = str(again.statement())
    assert "each record in one random step of each epoch of 6" in text
    assert "add or remove one record" in text


def test_people_come_with_all_their_rows():
    x, y = numbered()
    ids = np.arange(RECORDS) // 3
    batches = sampling.RandomAllocation(4).batches((x, y), people=ids, per_person=3)
    seen = [sorted(step) for step in _steps(batches)]
    assert sorted(sum(seen, [])) == list(range(RECORDS))
    for step in seen:
        assert len(step) == 3 * len({record // 3 for record in step})


def test_cohorts_have_every_client_once_in_every_epoch():
    cohorts = sampling.RandomAllocation(5).cohorts(range(30))
    for epoch in range(3):
        clients = sum((cohorts(5 * epoch + place) for place in range(5)), [])
        assert sorted(clients) == list(range(30))
    assert cohorts.expected_cohort_size == 6
    assert cohorts(2) == cohorts(2)


def test_another_budget_of_the_same_cohorts_begins_an_epoch():
    scheme = sampling.RandomAllocation(5)
    cohorts, ledger = scheme.cohorts(range(30)), accounting.Ledger(delta=1e-5)
    for rounds in (3, 5):
        budget = accounting.RoundBudget(
            50.0, 1e-5, cohorts, Aggregator(2.0), ledger=ledger
        )
        seen = []
        for _ in range(rounds):
            with budget.round() as cohort:
                seen += cohort
        assert len(set(seen)) == len(seen)
    assert sorted(seen) == list(range(30))
    assert ledger.phases[0].runs == [3, 5]
    with pytest.raises(ValueError, match="round_num must be 3"):
        budget.cohorts(2)


def test_parts_of_several_machines_are_allocated_apart():
    seen = []
    for part in range(2):
        batches = sampling.RandomAllocation(4).batches(np.arange(40)[:, None])
        drawer = distributed._drawer_of_part(batches, part, 2)
        assert drawer.scheme.steps == 4
        epoch = []
        for _ in range(4):
            rows, weights = drawer.next_element()
            epoch += list(rows[weights > 0].ravel())
        assert sorted(epoch) == list(range(part, 40, 2))
        seen.append(epoch)
    assert [r // 2 for r in seen[0]] != [r // 2 for r in seen[1]]


def test_correlated_noise_is_refused():
    scheme = sampling.RandomAllocation(5)
    with pytest.raises(ValueError, match="MinSeparation"):
        accounting.epsilon(1.0, 10, scheme, 1e-5, matrix=correlated.Tree())
    with pytest.raises(ValueError, match="MinSeparation"):
        scheme.participation(5)


def test_a_small_capacity_is_warned_of():
    with pytest.warns(UserWarning, match="more records than the 12"):
        batches = sampling.RandomAllocation(6).batches(
            numbered(), physical_batch_size=12
        )
    assert batches.scheme == sampling.RandomAllocation(6, 12, RECORDS)
    with pytest.raises(ValueError, match="expects 10 records"):
        sampling.RandomAllocation(6).batches(numbered(), physical_batch_size=9)


def test_accounts_for_the_same_steps_only():
    capped = sampling.RandomAllocation(6, 20, 60)
    assert sampling.RandomAllocation(6).accounts_for(capped)
    assert not sampling.RandomAllocation(7).accounts_for(capped)
    assert not capped.accounts_for(sampling.RandomAllocation(6))
    assert not sampling.Poisson(1 / 6).accounts_for(capped)
    assert not sampling.RandomAllocation(6).accounts_for(sampling.Poisson(1 / 6))


@pytest.mark.slow
def test_ten_million_records_are_dealt_and_each_is_in_a_step():
    population, steps = 10**7, 10_000
    scheme, key = sampling.RandomAllocation(steps), DrawKey.fresh()
    seen = np.zeros(population, np.int8)
    for step in range(steps):
        seen[scheme._draw(key, population, step)] += 1
    assert seen.min() == seen.max() == 1
    kept = sum(part.nbytes for _, part in key._kept.values())
    assert kept <= 8 * (population + steps + 1)
