"""CappedPoisson: few examples of each person, drawn independently."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdpclip as dpc
from tfdpclip import accounting, sampling
from tfdpclip.sampling.base import DrawKey
from tfdpclip.sampling.people import CappedExamples, checked_ids
from tfdpclip.sampling.sources import open_source

pytestmark = pytest.mark.unchecked

_IDS = np.repeat(np.arange(30), np.arange(1, 31))  # Person p has p + 1 examples.
_COUNT = len(_IDS)


def _data():
    """Every example's feature is its number."""
    x = np.arange(_COUNT, dtype=np.float32)[:, np.newaxis]
    return x, _IDS.astype(np.float32)


def _drawn(batches, passes=1):
    """The examples of each step."""
    steps = []
    for _ in range(passes):
        for x, _, weights in batches:
            steps.append(x.numpy()[weights.numpy() > 0, 0].astype(int))
    return steps


class TestScheme:
    @pytest.mark.parametrize(
        "scheme",
        [sampling.CappedPoisson(0.1, 4), sampling.CappedPoisson(0.1, 4, 20, 100)],
        ids=repr,
    )
    def test_is_public_settings_only(self, scheme):
        assert sampling.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
        assert hash(scheme) == hash(sampling.from_dict(scheme.to_dict()))
        with pytest.raises(dataclasses.FrozenInstanceError):
            scheme.anything = 1

    def test_draws_as_poisson_does(self):
        key = DrawKey(3)
        for room in ((None, None), (12, 100)):
            capped = sampling.CappedPoisson(0.1, 4, *room)
            plain = sampling.Poisson(0.1, *room)
            for step in range(5):
                np.testing.assert_array_equal(
                    capped._draw(key, 100, step), plain._draw(key, 100, step)
                )
        assert capped.expected_batch_size(100) == 10
        assert capped.steps_per_epoch(100) == 10
        assert capped.neighboring_relation is plain.neighboring_relation

    def test_its_default_room_is_for_a_person_more(self):
        for k in (1, 8):
            for population, rate in ((100, 0.1), (60_000, 0.004)):
                scheme = sampling.CappedPoisson(rate, k)
                room = scheme.default_capacity(population)
                binomial = stats.binom(population, rate)
                assert binomial.sf(room - k) <= 1e-10 < binomial.sf(room - k - 1)
        assert sampling.CappedPoisson(1.0, 3).default_capacity(10) == 10

    def test_no_noise_is_not_private_and_no_steps_are_free(self):
        scheme = sampling.CappedPoisson(0.1, 4)
        assert accounting.epsilon(0.0, 1, scheme, 1e-5, unit="person") == math.inf
        assert accounting.epsilon(1.0, 0, scheme, 1e-5, unit="person") == 0.0

    def test_sensitivity_is_of_an_example(self):
        scheme = sampling.CappedPoisson(0.1, 4)
        assert scheme.event(3.0, 2, sensitivity=2.0) == scheme.event(1.5, 2)

    @pytest.mark.parametrize("unit", ["example", "client", "batch", "group"])
    def test_is_for_people_only(self, unit):
        scheme = sampling.CappedPoisson(0.1, 4)
        with pytest.raises(ValueError, match="unit must be 'person'"):
            scheme.event(1.0, 1, unit=unit)
        with pytest.raises(ValueError, match="unit must be 'person'"):
            accounting.epsilon(1.0, 1, scheme, 1e-5, unit=unit)

    def test_accounts_for_itself_only(self):
        scheme = sampling.CappedPoisson(0.1, 4)
        assert scheme.accounts_for(sampling.CappedPoisson(0.1, 4, 20, 100))
        for other in (
            sampling.CappedPoisson(0.1, 5),
            sampling.CappedPoisson(0.2, 4),
            sampling.Poisson(0.1),
        ):
            assert not scheme.accounts_for(other)
        # A further example is not a further person.
        assert not sampling.Poisson(0.1).accounts_for(scheme)
        capped = sampling.CappedPoisson(0.1, 4, 20, 100)
        assert not capped.accounts_for(scheme)

    def test_steps_that_nobody_saw_had_every_example(self):
        worst = sampling.CappedPoisson(0.1, 4).at_worst()
        spent = accounting.epsilon(8.0, 3, worst, 1e-5, unit="person")
        assert spent == accounting.epsilon(2.0, 3, sampling.FullBatch(), 1e-5)

    @pytest.mark.parametrize(
        "make, match",
        [
            (lambda: sampling.CappedPoisson(0.0, 4), "rate"),
            (lambda: sampling.CappedPoisson(math.nan, 4), "rate"),
            (lambda: sampling.CappedPoisson(0.1, 0), "per_person"),
            (lambda: sampling.CappedPoisson(0.1, 2.5), "per_person"),
            (lambda: sampling.CappedPoisson(0.1, None), "per_person"),
            (lambda: sampling.CappedPoisson(0.1, 4, capacity=3), "population"),
            (lambda: sampling.CappedPoisson(0.1, 4, 0, 10), "capacity"),
            (lambda: sampling.CappedPoisson(0.1, 4).event(-1.0, 1), "noise_multiplier"),
            (lambda: sampling.CappedPoisson(0.1, 4).event(1.0, -1), "steps"),
            (lambda: sampling.CappedPoisson(0.1, 4).event(1.0, 1, unit=3), "unit"),
            (lambda: sampling.CappedPoisson(0.1, 4).cohorts([1, 2]), "scheme"),
            (lambda: sampling.CappedPoisson(0.1, 4).participation(3), "every step"),
        ],
    )
    def test_hostile_settings(self, make, match):
        with pytest.raises(ValueError, match=match):
            make()


class TestFewOfEach:
    def _kept(self, seed, per_person=4, ids=_IDS):
        source = open_source(_data())
        found = CappedExamples(source, ids, per_person, np.random.default_rng(seed))
        (rows, _) = found.take(np.arange(found.size), found.size)
        return rows[:, 0].astype(int)

    def test_nobody_has_more(self):
        kept = self._kept(0)
        assert len(set(kept)) == len(kept)
        counts = Counter(_IDS[kept])
        assert all(counts[p] == min(4, p + 1) for p in range(30))

    def test_every_set_is_as_likely(self):
        # Of the last person: 30 examples, 4 of them. False-alarm rate 1e-7.
        found = np.zeros(30)
        for seed in range(3000):
            kept = self._kept(seed)
            found[kept[_IDS[kept] == 29] - (_COUNT - 30)] += 1
        assert stats.chisquare(found).pvalue > 1e-7

    def test_ids_are_in_any_order_and_of_any_kind(self):
        mixed = np.random.default_rng(1).permutation(_IDS)
        for ids in (mixed, mixed.astype(str), mixed.astype(str).astype(object)):
            counts = Counter(mixed[self._kept(2, ids=ids)])
            assert all(counts[p] == min(4, p + 1) for p in range(30))

    def test_digests_tell_the_ids_and_the_records(self):
        def digest(ids, seed=0):
            source = open_source(_data())
            return CappedExamples(source, ids, 4, np.random.default_rng(seed)).digest()

        assert digest(_IDS) == digest(_IDS)
        assert len({digest(_IDS), digest(_IDS, 1), digest(_IDS[::-1])}) == 3


class TestBatches:
    @pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3}])
    def test_nobody_has_more_over_many_epochs(self, options):
        batches = sampling.CappedPoisson(0.5, 4).batches(
            _data(), people=_IDS, **options
        )
        seen = Counter(_IDS[np.unique(np.concatenate(_drawn(batches, 20)))])
        # After 40 draws at 1/2, everything that was kept was there.
        assert all(seen[p] == min(4, p + 1) for p in range(30))

    def test_the_kept_examples_are_the_population(self):
        batches = sampling.CappedPoisson(0.1, 4).batches(_data(), people=_IDS)
        kept = sum(min(4, p + 1) for p in range(30))
        assert batches.population == kept
        assert batches.expected_batch_size == pytest.approx(0.1 * kept)
        assert batches.rows_per_record == 1
        assert batches.scheme == sampling.CappedPoisson(
            0.1, 4, batches.physical_batch_size, kept
        )
        assert batches._drawer.draws_people

    def test_a_step_is_of_single_examples(self):
        batches = sampling.CappedPoisson(0.3, 4).batches(_data(), people=_IDS, seed=0)
        for step in _drawn(batches):
            assert len(set(step)) == len(step)
        for x, y, weights in batches:
            there = weights.numpy() > 0
            own = x.numpy()[there, 0].astype(int)
            np.testing.assert_array_equal(y.numpy()[there], _IDS[own])

    def test_they_are_kept_afresh_unless_there_is_a_seed(self):
        def kept(seed):
            scheme = sampling.CappedPoisson(1.0, 4)
            batches = scheme.batches(_data(), people=_IDS, seed=seed)
            return frozenset(_drawn(batches)[0])

        assert kept(1) == kept(1) != kept(2)
        assert kept(None) != kept(None)

    def test_cut_draws_are_accounted_for(self):
        with pytest.warns(UserWarning, match="more records than the 20"):
            batches = sampling.CappedPoisson(0.15, 4).batches(
                _data(), people=_IDS, physical_batch_size=20
            )
        assert max(len(step) for step in _drawn(batches, 5)) <= 20
        cut = accounting.epsilon(1.0, 10, batches, 1e-5, unit="person")
        scheme = sampling.CappedPoisson(0.15, 4)
        assert cut > 1.1 * accounting.epsilon(1.0, 10, scheme, 1e-5, unit="person")

    def test_ids_may_be_a_list_of_the_texts_of_an_array(self):
        texts = np.array([f"user {name}" for name in _IDS])
        for made in (texts, np.char.encode(texts)):
            ids = checked_ids(list(made))
            assert ids.tolist() == made.tolist() == checked_ids(made).tolist()
        with pytest.raises(ValueError, match="'nan' as a text"):
            checked_ids(list(np.array(["user", "nan"])))
        with pytest.raises(ValueError, match="integers or texts"):
            checked_ids([np.str_("user"), None])

    def test_others_are_refused(self):
        scheme = sampling.CappedPoisson(0.1, 4)
        with pytest.raises(ValueError, match="per_person must be left out"):
            scheme.batches(_data(), people=_IDS, per_person=4)
        with pytest.raises(ValueError, match="people must be given"):
            scheme.batches(_data())
        with pytest.raises(ValueError, match="people must have one id"):
            scheme.batches(_data(), people=_IDS[:-1])
        with pytest.raises(ValueError, match="people must be integers or texts"):
            scheme.batches(_data(), people=_IDS.astype(float))
        with pytest.raises(ValueError, match="independent_groups"):
            scheme.batches(
                _data(), people=_IDS, independent_groups=True, accumulation_steps=2
            )
        with pytest.raises(ValueError, match="less than"):
            sampling.CappedPoisson(0.1, 4, 60, 100).batches(_data(), people=_IDS)


def _model(batches, **options):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    settings = {
        "clip": 1.0,
        "noise_multiplier": 2.0,
        "expected_batch_size": batches.expected_batch_size,
        "unit": "person",
    } | options
    model.compile(dpc.keras.DPSGD(learning_rate=0.01, **settings), "mse")
    return model


class TestFit:
    @pytest.mark.slow
    def test_the_statement_says_person(self):
        batches = sampling.CappedPoisson(0.1, 4).batches(_data(), people=_IDS)
        budget = dpc.keras.PrivacyBudget(50.0, 1e-5, batches)
        model = _model(batches)
        model.fit(batches, epochs=2, verbose=0, callbacks=[budget])
        said = budget.statement()
        assert said.epsilon == accounting.epsilon(2.0, 20, batches, 1e-5, unit="person")
        assert (
            said.unit == "one person, whose examples are drawn and clipped one by one"
        )
        assert "at most 4 of a person" in said.sampling[0]
        assert any(
            "a person, with all of at most 4 examples, by the ids" in text
            for text in said.assumptions
        )
        for form in ("text", "markdown", "json"):
            assert "person" in said.render(form)

    @pytest.mark.slow
    def test_the_budget_of_people_stops_it(self):
        batches = sampling.CappedPoisson(0.1, 4).batches(_data(), people=_IDS)
        allowed = accounting.steps_for(4.0, 1e-5, 2.0, batches, unit="person")
        assert 0 < allowed < 60
        budget = dpc.keras.PrivacyBudget(4.0, 1e-5, batches)
        _model(batches).fit(batches, epochs=10, verbose=0, callbacks=[budget])
        assert budget.ledger.steps == allowed
        assert budget.ledger.epsilon() <= 4.0

    @pytest.mark.parametrize(
        "options, match",
        [({"unit": "example"}, "person"), ({"rows_per_record": 4}, "4")],
    )
    def test_an_optimizer_that_does_not_fit_is_refused(self, options, match):
        batches = sampling.CappedPoisson(0.1, 4).batches(_data(), people=_IDS)
        budget = dpc.keras.PrivacyBudget(50.0, 1e-5, batches)
        with pytest.raises((accounting.PrivacyMismatchError, ValueError), match=match):
            _model(batches, **options).fit(batches, verbose=0, callbacks=[budget])
        assert budget.ledger.steps == 0

    def test_other_draws_are_refused(self):
        batches = sampling.CappedPoisson(0.1, 4).batches(_data(), people=_IDS)
        plain = sampling.Poisson(0.1)
        budget = dpc.keras.PrivacyBudget(50.0, 1e-5, plain)
        with pytest.raises(accounting.PrivacyMismatchError):
            _model(batches).fit(batches, verbose=0, callbacks=[budget])


def test_steps_for_people_and_for_examples_do_not_add_up():
    ledger = accounting.Ledger(1e-5)
    ledger.begin(noise_multiplier=2.0, sampling=sampling.Poisson(0.1))
    ledger.record(1)
    for scheme in (sampling.Poisson(0.1), sampling.CappedPoisson(0.1, 4)):
        with pytest.raises(accounting.PrivacyMismatchError, match="person"):
            ledger.begin(
                noise_multiplier=2.0, sampling=scheme, unit="person", change=True
            )
