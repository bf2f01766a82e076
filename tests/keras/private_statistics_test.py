"""Statistics for preprocessing are noised, bounded, accounted for, and asked for."""

import itertools
import math
import warnings

import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize, stats

import tfdpclip as dpc
from tests.testing.many_runs import many_runs_lower_bound
from tfdpclip import accounting, sampling
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras import _compat
from tfdpclip.keras.private_statistics import PrivateStatistics, threshold_of

DELTA = 1e-5
# How often a statistical test here fails by chance, at most.
FALSE_ALARM = 1e-6


def exact(statistics, value=0.0):
    """Replaces the noise by a constant; returns the list of stddevs asked for."""
    asked = []

    class Source:
        def sample(self, shape, stddev, dtype):
            asked.append(stddev)
            return tf.fill(shape, tf.constant(value * stddev, dtype))

    statistics._noise = Source()
    return asked


def made(examples=100, releases=1, epsilon=1.0, **options):
    return PrivateStatistics(epsilon, DELTA, examples, releases, **options)


def gaussian_delta(mu, epsilon):
    """Balle and Wang (2018), Theorem 8."""
    cdf = stats.norm.cdf
    return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)


class TestWhatItCosts:
    def test_no_later_step_counts_with_its_noise(self):
        ledger = accounting.Ledger(DELTA)
        scheme = sampling.Poisson(0.5)
        ledger.begin(noise_multiplier=1.0, sampling=scheme)
        made(epsilon=0.1, ledger=ledger).moments(np.zeros(100), low=0, high=1)
        with pytest.raises(ValueError, match=r"Call ledger.begin"), ledger.step():
            pytest.fail("a step without settings ran")
        ledger.begin(noise_multiplier=1.0, sampling=scheme, change=True)
        with ledger.step():
            pass
        assert ledger.epsilon() > accounting.epsilon(1.0, 1, scheme, DELTA)

    def test_all_releases_are_one_gaussian_and_a_delta_that_adds(self):
        statistics = made(releases=3, epsilon=0.7)
        statistics.moments(np.ones([100, 2]), low=0, high=2)
        statistics.vocabulary(["a"] * 100)
        statistics.vocabulary([["a", "b"]] * 100, per_record=2)
        mu = math.sqrt(3) / statistics.noise_multiplier
        thresholds = 2 * DELTA / 10 / 3
        expected = optimize.brentq(
            lambda e: gaussian_delta(mu, e) - (DELTA - thresholds), 1e-3, 5
        )
        assert statistics.epsilon == pytest.approx(expected, rel=1e-6)
        assert statistics.ledger.epsilon() == pytest.approx(expected, rel=1e-6)
        assert 0.69 < expected <= 0.7
        worst = optimize.brentq(lambda e: gaussian_delta(mu, e) - DELTA * 0.9, 1e-3, 5)
        assert worst == pytest.approx(0.7, rel=1e-6)

    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    def test_a_plan_spends_what_they_left(self, accountant):
        statistics = made(1000, 2, 0.5, accountant=accountant)
        statistics.moments(np.ones(1000), low=0, high=2)
        statistics.vocabulary(["a"] * 1000)
        told = dict(examples=1000, batch_size=100, epochs=1, accountant=accountant)
        alone = dpc.keras.PrivacyPlan(2.0, DELTA, **told)
        plan = dpc.keras.PrivacyPlan(2.0, DELTA, ledger=statistics.ledger, **told)
        assert plan.noise_multiplier > alone.noise_multiplier * 1.005
        assert 1.99 < plan.planned_epsilon <= 2
        event = statistics.ledger.event()
        leaves = sampling.events.leaves(event)
        deltas = [e.delta for e in leaves if hasattr(e, "delta")]
        assert deltas == [pytest.approx(DELTA / 20)]

    def test_a_plan_after_statistics_continues_and_a_changed_plan_is_refused(
        self, tmp_path
    ):
        statistics = made(1000, 1, 0.5, ledger=tmp_path / "ledger.json")
        statistics.moments(np.ones(1000), low=0, high=2)
        told = dict(examples=1000, batch_size=100, ledger=tmp_path / "ledger.json")
        x = np.ones([1000, 1], "float32"), np.ones(1000, "float32")

        def train(plan):
            model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
            model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
            plan.fit(model, x, epochs=1, verbose=0)

        plan = dpc.keras.PrivacyPlan(2.0, DELTA, epochs=2, **told)
        train(plan)
        again = dpc.keras.PrivacyPlan(2.0, DELTA, epochs=2, **told)
        assert again.noise_multiplier == plan.noise_multiplier
        # The steps of a training phase are no release: a change needs consent.
        with pytest.raises(PrivacyMismatchError, match="allow_change=True"):
            dpc.keras.PrivacyPlan(2.0, DELTA, epochs=3, **told)
        train(again)
        assert 1.99 < again.statement().epsilon <= 2
        assert again.finished

    def test_a_budget_after_statistics_counts_them(self):
        statistics = made(1000, 1, 0.5)
        statistics.moments(np.ones(1000), low=0, high=2)
        x = np.ones([1000, 1], "float32"), np.ones(1000, "float32")
        batches = sampling.Poisson(0.1).batches(x)
        budget = dpc.keras.PrivacyBudget(5.0, DELTA, batches, ledger=statistics.ledger)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        optimizer = dpc.keras.DPSGD(
            0.1, clip=1.0, noise_multiplier=2.0, expected_batch_size=100
        )
        model.compile(optimizer, "mse")
        model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
        alone = dpc.accounting.epsilon(2.0, 10, batches.scheme, delta=DELTA)
        assert budget.statement().epsilon > alone

    def test_another_release_than_planned_is_refused_and_draws_nothing(self):
        statistics = made()
        statistics.moments(np.ones(100), low=0, high=2)
        asked = exact(statistics)
        with pytest.raises(ValueError, match="All 1 releases are spent"):
            statistics.vocabulary(["a"] * 100)
        assert not asked and statistics.ledger.steps == 1

    def test_a_release_is_counted_before_its_noise_is_drawn(self, tmp_path):
        path = tmp_path / "ledger.json"
        statistics = made(ledger=path)

        class Fails:
            def sample(self, *_):
                raise RuntimeError("stopped")

        statistics._noise = Fails()
        with pytest.raises(RuntimeError, match="stopped"):
            statistics.vocabulary(["a"] * 100)
        again = accounting.Ledger.load(path)
        assert again.steps + again.reserved == 1
        assert again.epsilon() == pytest.approx(statistics.epsilon)
        assert isinstance(again.phases[0].sampling, sampling.ThresholdedCounts)

    def test_the_statement_names_each_with_its_share(self):
        statistics = made(releases=2)
        statistics.moments(np.ones([100, 3]), low=0, high=2)
        statistics.vocabulary(["a"] * 100)
        stated = str(statistics.ledger.statement())
        assert "mean and variance of 3 columns (epsilon 0." in stated
        assert "vocabulary of one value of each record (epsilon 0." in stated
        assert "0 of 2 releases left" in str(statistics)

    def test_neighbours_of_another_kind_do_not_add_up(self):
        ledger = accounting.Ledger(DELTA)
        fixed = sampling.FixedSize(10, 100)
        ledger.begin(noise_multiplier=1.0, sampling=fixed)
        with pytest.raises(PrivacyMismatchError, match="neighbouring relations"):
            made(ledger=ledger).moments(np.ones(100), low=0, high=1)


class TestThresholds:
    """That the delta of a threshold adds, against both orders of a toy release."""

    # The record has one of two shared values, and a value that is its own.
    Z, K, COST = 1.3, 2, 0.01

    def _passes(self):
        threshold = threshold_of(self.Z * math.sqrt(self.K), self.K, self.COST)
        return stats.norm.sf((threshold - 1) / (self.Z * math.sqrt(self.K)))

    def test_a_threshold_is_passed_as_rarely_as_it_says(self):
        p = self._passes()
        assert -self.K * math.log1p(-p) == pytest.approx(self.COST, rel=1e-9)
        assert 1 - (1 - p) ** self.K < self.COST

    @pytest.mark.parametrize("shared", [0, 1, 2])
    @pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 3.0])
    def test_both_orders_are_within_the_sum(self, shared, epsilon):
        """Exact divergences of the release: a Gaussian, and whether any value is new.

        A new value that is seen gives the record away.
        """
        seen = 1 - (1 - self._passes()) ** (self.K - shared)
        mu = math.sqrt(shared / self.K) / self.Z
        event = sampling.ThresholdedCounts(self.COST).event(self.Z, 1)
        bound = accounting.accountants.delta(event, epsilon, "pld")

        def profile(e):
            if mu:
                return gaussian_delta(mu, e)
            return max(0.0, 1 - math.exp(e))

        added = seen + (1 - seen) * profile(epsilon - math.log1p(-seen))
        removed = profile(epsilon + math.log1p(-seen))
        assert max(added, removed) <= bound * (1 + 1e-9)

    def test_more_of_them_than_delta_leaves_nothing(self):
        scheme = sampling.ThresholdedCounts(1e-6)
        assert accounting.epsilon(5.0, 9, scheme, DELTA) < 10
        assert accounting.epsilon(5.0, 11, scheme, DELTA) == math.inf
        assert accounting.epsilon(0.0, 1, scheme, DELTA) == math.inf

    @pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp"])
    def test_every_accountant_takes_it_off(self, accountant):
        scheme, full = sampling.ThresholdedCounts(1e-6), sampling.FullBatch()
        found = accounting.epsilon(2.0, 3, scheme, DELTA, accountant)
        assert found == accounting.epsilon(2.0, 3, full, DELTA - 3e-6, accountant)
        deltas = [accounting.delta(2.0, 3, s, 1.0, accountant) for s in (scheme, full)]
        assert deltas[0] == pytest.approx(deltas[1] + 3e-6)

    def test_noise_that_is_shared_with_other_steps_is_refused(self):
        with pytest.raises(ValueError, match="correlated noise"):
            sampling.ThresholdedCounts(1e-6).participation(3)


class TestABlock:
    """`with PrivateStatistics(...) as statistics:` counts its calls."""

    @pytest.mark.parametrize("calls", [1, 2, 5])
    def test_costs_what_as_many_releases_cost(self, calls):
        with PrivateStatistics(0.7, DELTA, 100) as statistics:
            for _ in range(calls):
                statistics.vocabulary(["a"] * 100)
        counted = made(releases=calls, epsilon=0.7)
        for _ in range(calls):
            counted.vocabulary(["a"] * 100)
        assert statistics.noise_multiplier == counted.noise_multiplier
        assert statistics.left == 0
        assert statistics.epsilon == counted.epsilon <= 0.7
        assert statistics.ledger.epsilon() == counted.ledger.epsilon()
        with pytest.raises(ValueError, match="one block, or write .*releases="):
            statistics.vocabulary(["a"] * 100)
        assert statistics.ledger.steps == calls

    def test_answers_like_calls_that_were_counted(self):
        found = []
        for releases in (None, 2):
            statistics = PrivateStatistics(1.0, DELTA, 100, releases)
            exact(statistics, 0.5)
            with statistics:
                ages = np.linspace(20, 40, 100)
                age = statistics.moments(ages, low=0, high=60)
                town = statistics.vocabulary(["a"] * 60 + ["b"] * 40)
                ages[:] = 0  # The values are those of the call.
            found.append((age.mean, age.variance, town.tokens, *town.counts, len(town)))
        assert found[0] == found[1]

    def test_has_no_results_and_no_ledger_before_its_end(self):
        with PrivateStatistics(1.0, DELTA, 100) as statistics:
            age = statistics.moments(np.ones(100), low=0, high=2)
            town = statistics.vocabulary(["a"] * 100)
            for read in (
                lambda: age.mean,
                lambda: age.variance,
                lambda: town.counts,
                lambda: len(town),
                lambda: print(town),
            ):
                with pytest.raises(AttributeError, match="Read it below"):
                    read()
            for use in (lambda: statistics.ledger, lambda: statistics.plan(3)):
                with pytest.raises(ValueError, match="plan below the block"):
                    use()
        assert age.mean.shape == () and statistics.ledger.steps == 2
        with pytest.raises(AttributeError, match="no attribute 'median'"):
            age.median  # noqa: B018

    def test_that_raises_releases_nothing(self):
        statistics = PrivateStatistics(1.0, DELTA, 100)
        asked = exact(statistics)
        with pytest.raises(ValueError, match="99 records"), statistics:
            statistics.moments(np.ones(100), low=0, high=2)
            statistics.vocabulary(["a"] * 99)
        assert not asked and not statistics.ledger.phases
        with statistics:  # The corrected block has the whole budget.
            statistics.vocabulary(["a"] * 100)
        assert len(asked) == 1

    def test_counts_a_release_before_its_noise_is_drawn(self, tmp_path):
        class Fails:
            def sample(self, *_):
                raise RuntimeError("stopped")

        path = tmp_path / "ledger.json"
        with (
            pytest.raises(RuntimeError, match="stopped"),
            PrivateStatistics(1.0, DELTA, 100, ledger=path) as statistics,
        ):
            statistics._noise = Fails()
            statistics.vocabulary(["a"] * 100)
        again = accounting.Ledger.load(path)
        assert again.steps + again.reserved == 1

    def test_is_asked_for_where_nothing_says_the_number(self):
        statistics = PrivateStatistics(1.0, DELTA, 100)
        asked = exact(statistics)
        with pytest.raises(ValueError, match=r"in a block, `with .*releases=2"):
            statistics.moments(np.ones(100), low=0, high=2)
        assert not asked and not statistics.ledger.phases


class TestItsPlan:
    def test_needs_the_public_facts_once(self):
        ids = np.arange(3000) // 3
        with PrivateStatistics(0.5, DELTA, people=ids, accountant="rdp") as statistics:
            statistics.moments(np.ones(3000), low=0, high=2)
        plan = statistics.plan(2, batch_size=100, epochs=2, per_person=3)
        told = dict(accountant="rdp", ledger=statistics.ledger, per_person=3)
        long = dpc.keras.PrivacyPlan(2, DELTA, 1000, 100, 2, **told)
        assert plan.noise_multiplier == long.noise_multiplier
        assert plan.ledger is statistics.ledger and plan.examples == 1000
        assert 1.99 < plan.planned_epsilon <= 2

    @pytest.mark.parametrize("people", [False, True])
    def test_is_for_the_same_records(self, people):
        facts = {"people": np.arange(100)} if people else {"examples": 100}
        statistics = PrivateStatistics(0.5, DELTA, releases=1, **facts)
        statistics.vocabulary(["a"] * 100)
        other = {} if people else {"per_person": 2}
        with pytest.raises(PrivacyMismatchError, match=r"PrivacyPlan\(.*per_person=8"):
            statistics.plan(2, batch_size=10, epochs=1, **other)

    def test_cannot_leave_the_releases_out(self):
        statistics = made()
        statistics.vocabulary(["a"] * 100)
        with pytest.raises(TypeError, match="ledger"):
            statistics.plan(2, ledger=None)
        with pytest.raises(PrivacyMismatchError, match="0.001"):
            statistics.plan(2, delta=0.001)


@pytest.mark.parametrize("examples", [None, 25])
def test_the_number_of_people_follows_from_their_ids(examples):
    ids = np.arange(100) // 4
    statistics = PrivateStatistics(1.0, DELTA, examples, releases=1, people=ids)
    assert statistics.noise_multiplier == made(25).noise_multiplier
    exact(statistics)
    assert statistics.moments(np.ones(100), low=0, high=2).mean == 1
    with pytest.raises(ValueError, match=r"examples=len\(x\)\).*people=ids"):
        PrivateStatistics(1.0, DELTA, releases=1)
    with pytest.raises(ValueError, match="delta must be below 1 / examples"):
        PrivateStatistics(1.0, 0.04, releases=1, people=ids)


class TestSensitivity:
    @pytest.mark.parametrize("columns", [1, 3])
    def test_one_record_moves_the_sums_by_the_square_root_of_the_columns(self, columns):
        """For infinite values, values at the bounds, and values between them."""
        seen = []

        def sums(rows):
            statistics = made(len(rows))
            asked = exact(statistics)
            draw = statistics._draw

            def note(what, scheme, exact, square):
                seen.append(exact)
                return draw(what, scheme, exact, square)

            statistics._draw = note
            statistics.moments(rows, low=-1, high=3)
            assert asked == [statistics.noise_multiplier * math.sqrt(columns)]
            return seen.pop()

        rng = np.random.default_rng(0)
        before = rng.normal(size=[20, columns])
        values = [-math.inf, -1, 0, 1, 1 + math.sqrt(2), 2.3, 3, 1e300]
        moved = []
        for value in itertools.product(values, repeat=columns):
            after = np.concatenate([before, [value]])
            moved.append(np.linalg.norm(sums(after) - sums(before)))
        assert max(moved) <= math.sqrt(columns) * (1 + 1e-12)
        assert max(moved) == pytest.approx(math.sqrt(columns))

    @pytest.mark.parametrize("per_record", [1, 4])
    def test_one_record_moves_few_counts_by_one(self, per_record):
        base = [["a", "b", "c", "d"]] * 50 + [["e"]] * 49

        def counts(records):
            statistics = made(len(records))
            asked = exact(statistics, value=100.0)  # Above every threshold.
            found = statistics.vocabulary(records, per_record=per_record)
            stddev = statistics.noise_multiplier * math.sqrt(per_record)
            assert asked == [stddev]
            return dict(zip(found.tokens, found.counts - 100 * stddev, strict=True))

        before = counts(base)
        for record in (["a"] * 99, list("edcba"), list("xyzuvw"), [], [None, "a"]):
            after = counts([*base, record])
            moved = [after[t] - before.get(t, 0) for t in after]
            assert np.linalg.norm(moved) <= math.sqrt(per_record) + 1e-9
            assert np.allclose(np.abs(moved).max(initial=0), bool(record))


@pytest.mark.slow
def test_neighbours_are_not_told_apart_better_than_it_says():
    """An audit by 1,000 releases of each of two neighbours, of values and of moments.

    The neighbour has one record more: of a value of its own, and at the bound. The
    delta is so large that thresholds are passed. A true epsilon is refuted with
    probability 1e-6 at most.
    """
    runs, n, delta, epsilon = 1000, 4, 0.2, 1.0

    def released(more):
        statistics = PrivateStatistics(epsilon, delta, n, 2 * runs)
        # The audit is of a single release, so the noise is that of one release.
        alone = PrivateStatistics(epsilon, delta, n, 1)
        statistics.noise_multiplier = alone.noise_multiplier
        statistics._releases, statistics._examples = 1, n + more
        values, numbers = ["a"] * n + ["b"] * more, [-1.0] * n + [1.0] * more
        words, sums = [], []
        for _ in range(runs):
            words.append("b" in statistics.vocabulary(values).tokens)
            mean = statistics.moments(numbers, low=-5, high=5).mean
            sums.append(float(mean) * (n + more))
            statistics.ledger.phases.clear()  # Thousands of phases take their time.
        return np.array(words, float), np.array(sums)

    inside, outside = released(True), released(False)
    # Each run passes with probability 0.02: all of 1,000 fail in less than one of 10^8
    # audits.
    assert inside[0].any()
    for scores in zip(inside, outside, strict=True):
        found = many_runs_lower_bound(*scores, delta, 1 - FALSE_ALARM / 2)
        assert found <= epsilon


class TestAnswers:
    def test_moments_are_those_of_the_data_within_the_noise(self):
        rng = np.random.default_rng(0)
        n = 20_000
        x = np.stack([rng.normal(40, 12, n), rng.uniform(0, 1, n)], axis=1)
        statistics = made(n)
        found = statistics.moments(x, low=[0, 0], high=[100, 1])
        clipped = np.clip(x, 0, [100, 1])
        half = np.array([50, 0.5])
        # Six columns of noise: fails less than once in 10^6 runs.
        error = 6 * statistics.noise_multiplier * math.sqrt(2) / n
        assert np.all(np.abs(found.mean - clipped.mean(axis=0)) < half * error)
        wide = half**2 * 3 * error
        assert np.all(np.abs(found.variance - clipped.var(axis=0)) < wide)
        layer = tf.keras.layers.Normalization(mean=found.mean, variance=found.variance)
        y = layer(tf.constant(x, tf.float32)).numpy()
        np.testing.assert_allclose(y.std(axis=0), 1, atol=0.1)

    def test_a_variance_is_positive_and_a_mean_within_the_bounds(self):
        for value in (-30.0, 30.0):
            statistics = made()
            exact(statistics, value)
            found = statistics.moments(np.full(100, 1.0), low=0, high=2)
            assert 0 <= found.mean <= 2 and 0 < found.variance <= 1
            assert found.mean.shape == ()

    def test_the_frequent_values_come_in_their_order(self):
        statistics = made(3000)
        exact(statistics)
        words = ["b"] * 1000 + ["a"] * 1500 + ["c"] * 499 + ["rare"]
        found = statistics.vocabulary(words)
        assert found.tokens == ["a", "b", "c"] and len(found) == 3
        assert found.counts.tolist() == [1500, 1000, 499]
        again = made(3000)
        exact(again)
        assert again.vocabulary(words, most=2).tokens == ["a", "b"]

    @pytest.mark.parametrize("kind", [str, np.str_, bytes, int, np.int64])
    def test_values_of_every_kind_make_a_lookup(self, kind):
        as_is = {bytes: lambda v: str(v).encode()}.get(kind, kind)
        statistics = made()
        found = statistics.vocabulary([as_is(v) for v in [7] * 50 + [8] * 50]).tokens
        layers = tf.keras.layers
        numbers = issubclass(kind, (int, np.integer))
        lookup = layers.IntegerLookup if numbers else layers.StringLookup
        assert lookup(vocabulary=found)(tf.constant(found)).numpy().tolist() == [1, 2]

    def test_columns_of_pandas_are_data(self):
        pandas = pytest.importorskip("pandas")
        table = pandas.DataFrame({"age": [20, 40] * 50, "city": ["Rome", None] * 50})
        statistics = made(releases=2)
        exact(statistics)
        assert statistics.moments(table["age"], low=0, high=60).mean == 30
        assert statistics.vocabulary(table["city"]).tokens == ["Rome"]


def gaps(values, kind):
    pandas = pytest.importorskip("pandas")
    return pandas.Series(values, dtype=kind)


@pytest.mark.parametrize(
    "values, kind, token",
    [
        (["a", None] * 50, "string", "a"),
        (["a", None] * 50, "category", "a"),
        ([7, None] * 50, "Int64", 7),
        (["a", math.nan] * 50, object, "a"),
    ],
)
def test_missing_values_of_any_type_are_no_token(values, kind, token):
    statistics = made()
    exact(statistics)
    assert statistics.vocabulary(gaps(values, kind)).tokens == [token]


@pytest.mark.parametrize(
    "column, words",
    [
        ("age", r"values\['age'\] has gaps.*values\['age'\].fillna\("),
        ("whole", r"values\['whole'\] has gaps.*values\['whole'\].fillna\("),
        ("city", r"values\['city'\] holds .*Leave .*vocabulary\(values\['city'\]\)"),
        ("day", r"values\['day'\] holds dates.*\(values\['day'\] - .*timedelta64"),
    ],
)
def test_a_column_without_a_mean_is_named_with_the_line(column, words):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {
            "ok": [1.0, 2.0] * 50,
            "age": [20, math.nan] * 50,
            "whole": pandas.array([1, None] * 50, dtype="Int64"),
            "city": ["Rome", "Oslo"] * 50,
            "day": pandas.to_datetime(["2020-01-01"] * 100),
        }
    )
    statistics = made()
    with pytest.raises(ValueError, match=words):
        statistics.moments(table[["ok", column]], low=0, high=1)
    with pytest.raises(ValueError, match=r"2 numbers \(values\['ok'\], values\['two"):
        statistics.moments(table[["ok"]].assign(two=1), low=[0] * 3, high=1)
    with pytest.raises(ValueError, match=r"one column, got a frame.*\(frame\['ok'\]\)"):
        statistics.vocabulary(table)
    assert statistics.left == 1 and not statistics.ledger.phases
    statistics.moments(table[["ok"]].assign(two=1), low=[0, 0], high=9)


@pytest.mark.parametrize("frame", [False, True])
def test_a_nan_that_pandas_calls_no_gap_is_refused(frame):
    pandas = pytest.importorskip("pandas")
    column = pandas.Series([0.0] + [1.0] * 99, dtype="Float64")
    column /= column  # 0 / 0, which is a gap in pandas 3 alone.
    statistics = made()
    with pytest.raises(ValueError, match="holds NaN.*np.nan_to_num|has gaps"):
        statistics.moments(column.to_frame("a") if frame else column, low=0, high=2)
    assert statistics.left == 1


def test_masked_entries_are_no_data():
    statistics = made()
    values = np.ma.masked_array(np.ones(100), mask=[True] + [False] * 99)
    with pytest.raises(ValueError, match=r"masked entries.*filled\("):
        statistics.moments(values, low=0, high=2)
    statistics.moments(np.ma.masked_array(np.ones(100)), low=0, high=2)


class TestPeople:
    """A person with several rows is one record."""

    def people(self):
        return made(4, people=[3, 1, 1, 1, 2, 2, 5, 5])

    def test_a_person_adds_the_mean_over_the_rows(self):
        ids = np.array([3, 1, 1, 1, 2, 2, 5, 5]) + 10 * np.arange(1000)[:, np.newaxis]
        statistics = made(4000, people=ids.ravel())
        exact(statistics)
        values = np.array([0.0, 3, 6, 9, 1, 5, 10, 10])
        weights = np.array([1, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5, 0.5, 0.5]) / 4
        found = statistics.moments(np.tile(values, 1000), low=0, high=10)
        mean = weights @ values
        assert found.mean == pytest.approx(mean)
        assert found.variance == pytest.approx(weights @ values**2 - mean**2)

    @pytest.mark.parametrize("d", [1, 3])
    def test_all_rows_of_a_person_move_the_sums_by_no_more_than_one_record(self, d):
        rng = np.random.default_rng(0)
        for _ in range(20):
            rows = int(rng.integers(1, 6))
            values = rng.choice([-50.0, -1, 0, 0.5, 1, 50], size=(rows + 1, d))
            ids = np.array([0] + [1] * rows)
            sums = []
            for kept in (slice(None), slice(0, 1)):
                own = ids[kept]
                statistics = made(len(set(own)), people=own)
                drawn = []

                def draw(what, scheme, exact, square, drawn=drawn):
                    drawn.append(exact)
                    return exact, 1.0

                statistics._draw = draw
                statistics.moments(values[kept], low=-1, high=1)
                sums.append(drawn[0])
            assert np.linalg.norm(sums[0] - sums[1]) <= math.sqrt(d) * (1 + 1e-12)

    def test_a_person_counts_once_for_each_of_the_first_k_values(self):
        values = ["a", "b", "b", "c", "b", "b", "b", "a"]
        expected = {1: {"a": 1, "b": 3}, 2: {"a": 2, "b": 3, "c": 1}}
        for k, counts in expected.items():
            statistics = self.people()
            seen = []
            statistics._draw = lambda what, scheme, exact, *_, seen=seen: (
                seen.append(exact),
                (np.full(exact.shape, 1e9), 1.0),
            )[1]
            found = statistics.vocabulary(values, per_record=k)
            assert sorted(found.tokens) == sorted(counts)
            assert seen[0].tolist() == [counts[token] for token in sorted(counts)]

    def test_their_cost_is_that_of_records_and_adds_to_a_plan_for_people(self):
        ids = np.repeat(np.arange(1000), 3)
        statistics = PrivateStatistics(0.5, DELTA, 1000, 2, people=ids)
        alone = PrivateStatistics(0.5, DELTA, 1000, 2)
        assert statistics.noise_multiplier == alone.noise_multiplier
        statistics.moments(np.ones(3000), low=0, high=2)
        statistics.vocabulary(["a"] * 3000)
        assert statistics.epsilon <= 0.5
        told = dict(examples=1000, batch_size=100, epochs=1, ledger=statistics.ledger)
        plan = dpc.keras.PrivacyPlan(2.0, DELTA, per_person=2, **told)
        assert 1.99 < plan.planned_epsilon <= 2
        assert statistics.ledger.statement().unit.startswith("one person")
        assert "of each person" in str(statistics.ledger.statement())
        plan.batches((np.ones([3000, 2]), np.ones(3000)), people=ids)

    HOUSES = np.arange(100) // 4

    @pytest.mark.parametrize("ids", [HOUSES * 7 + 1, HOUSES.astype(str), HOUSES[::-1]])
    def test_ids_of_the_same_people_by_another_name_share_a_ledger(self, ids):
        statistics = made(25, people=self.HOUSES)
        made(25, people=ids, ledger=statistics.ledger)
        assert not statistics.ledger.notes

    @pytest.mark.parametrize("ids", [np.arange(100) // 2, np.arange(2, 102) // 4])
    def test_ids_that_tell_people_apart_in_another_way_are_stated(self, ids):
        """A person of four rows would be two people, or a part of several."""
        batches = sampling.Poisson(0.5).batches(
            np.ones([100, 2]), people=ids, per_person=4
        )
        people = len(set(ids.tolist()))
        for count in (True, False):
            ledger = made(25, people=self.HOUSES).ledger
            if count:
                made(people, people=ids, ledger=ledger)
            else:
                ledger.begin(noise_multiplier=1.0, sampling=batches, unit="person")
            assert "is not covered as a whole" in " ".join(ledger.notes)

    def test_so_are_they_in_a_fit(self):
        ledger = made(25, people=self.HOUSES).ledger
        plan = dpc.keras.PrivacyPlan(
            8, DELTA, 50, batch_size=10, epochs=1, per_person=2, ledger=ledger
        )
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
        data = np.ones([100, 2]), np.ones([100, 1])
        batches = plan.batches(data, people=np.arange(100) // 2)
        model.fit(batches, callbacks=plan.callbacks, verbose=0)
        assert "is not covered as a whole" in str(plan.statement())

    def test_statistics_of_rows_and_a_plan_for_people_name_the_line(self):
        statistics = made(100)
        statistics.moments(np.ones(100), low=0, high=1)
        plan = dpc.keras.PrivacyPlan(
            2.0,
            DELTA,
            examples=50,
            batch_size=10,
            epochs=1,
            per_person=2,
            ledger=statistics.ledger,
            allow_change=True,
        )
        ids = np.repeat(np.arange(50), 2)
        batches = plan.batches((np.ones([100, 2]), np.ones(100)), people=ids)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(plan.optimizer(dpc.keras.DPAdam), "mse")
        with pytest.raises(
            PrivacyMismatchError, match=r"PrivateStatistics\(..., people=ids\)"
        ):
            model.fit(batches, verbose=0, callbacks=plan.callbacks)

    @pytest.mark.parametrize(
        "ids, words",
        [
            ([1, 2, 3], r"people has 3 people.*PrivateStatistics\(\.\.\., examples=3"),
            ([1.5, 2.0], "integers or texts"),
            (["a", "nan"], "missing id"),
            ("person_id", "one id for each"),
            (np.ones([2, 1], int), "one id for each"),
        ],
    )
    def test_ids_that_name_no_people_are_refused(self, ids, words):
        with pytest.raises(ValueError, match=words):
            made(2, people=ids)

    def test_a_value_for_each_row(self):
        with pytest.raises(ValueError, match="7 rows, but people has 8"):
            self.people().moments(np.ones(7), low=0, high=1)
        with pytest.raises(ValueError, match=r"8 records.*people=ids"):
            made(4).moments(np.ones(8), low=0, high=1)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda s: s.moments([1.0] * 99, low=0, high=1), "99 records"),
        (lambda s: s.moments([math.nan] * 100, low=0, high=1), "values holds NaN"),
        (lambda s: s.moments(["a"] * 100, low=0, high=1), "values must be an array"),
        (lambda s: s.moments([1.0] * 100, low=1, high=1), "low must be below high"),
        (lambda s: s.moments([1.0] * 100, low=0, high=math.inf), "high must be a fin"),
        (lambda s: s.moments([1.0] * 100, low=[0, 1], high=3), "low must be a finite"),
        (lambda s: s.vocabulary("words"), "values must be a list"),
        (lambda s: s.vocabulary(["a"] * 101), "101 records"),
        (lambda s: s.vocabulary([1.5] * 100), "strings or whole numbers"),
        (lambda s: s.vocabulary(["a", 1] * 50), "got both"),
        (lambda s: s.vocabulary(["a"] * 100, per_record=0), "per_record"),
        (lambda s: s.vocabulary(["a"] * 100, most=0), "most"),
    ],
)
def test_bad_input_is_refused_and_spends_nothing(call, words):
    statistics = made()
    with pytest.raises(ValueError, match=words):
        call(statistics)
    assert statistics.left == 1 and not statistics.ledger.phases


@pytest.mark.parametrize(
    "options, words",
    [
        ({"epsilon": 0}, "epsilon"),
        ({"examples": 10**6}, "delta must be below 1 / examples"),
        ({"releases": 0}, "releases"),
        ({"accountant": "gdp"}, "accountant"),
    ],
)
def test_a_bad_budget_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        made(**options)


L = tf.keras.layers
NUMBERS = np.arange(20.0, dtype=np.float32)[:, None]
WORDS = np.array([["Rome"], ["Oslo"]] * 10)
GIVEN = {
    "Normalization": lambda: L.Normalization(mean=1.0, variance=2.0),
    "Discretization": lambda: L.Discretization(bin_boundaries=[1.0, 5.0]),
    "StringLookup": lambda: L.StringLookup(vocabulary=["Rome"]),
    "IntegerLookup": lambda: L.IntegerLookup(vocabulary=[1, 2]),
    "TextVectorization": lambda: L.TextVectorization(vocabulary=["Rome"]),
    "Dense": lambda: L.Dense(3),
}
ADAPTED = {
    "Normalization": (L.Normalization, NUMBERS),
    "Discretization": (lambda: L.Discretization(num_bins=3), NUMBERS),
    "StringLookup": (L.StringLookup, WORDS),
    "IntegerLookup": (L.IntegerLookup, NUMBERS.astype(np.int64)),
    "TextVectorization": (L.TextVectorization, WORDS[:, 0]),
}


class TestAdaptedLayers:
    @pytest.mark.parametrize("name", ADAPTED)
    def test_is_found(self, name):
        make, data = ADAPTED[name]
        layer = make()
        assert not _compat.is_adapted(layer)
        layer.adapt(data)
        assert _compat.is_adapted(layer)

    @pytest.mark.parametrize("name", GIVEN)
    def test_what_is_given_is_not(self, name):
        assert not _compat.is_adapted(GIVEN[name]())

    def _fit(self, public):
        layer = L.Normalization(name="scaling")
        layer.adapt(NUMBERS)
        if public:
            assert dpc.keras.public_statistics(layer) is layer
        plan = dpc.keras.PrivacyPlan(8, 1e-3, 20, batch_size=10, epochs=1)
        # Within a nested model, which is allowed.
        inner = tf.keras.Sequential([tf.keras.Input((1,)), layer, L.Dense(2)])
        model = tf.keras.Sequential([tf.keras.Input((1,)), inner, L.Dense(1)])
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
        batches = plan.batches((NUMBERS, NUMBERS))
        model.fit(batches, callbacks=plan.callbacks, verbose=0)
        return plan

    @pytest.mark.slow
    def test_a_plan_warns_of_it_and_says_the_line_to_write(self):
        with pytest.warns(dpc.keras.PrivateStateWarning, match="'scaling'") as found:
            plan = self._fit(public=False)
        text = " ".join(str(warning.message) for warning in found)
        assert "Normalization(mean=m.mean" in text and "public_statistics" in text
        assert "layers 'scaling' were adapted to public data" in str(plan.statement())

    @pytest.mark.slow
    def test_public_data_are_said_and_stated(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", dpc.keras.PrivateStateWarning)
            plan = self._fit(public=True)
        assert "layers 'scaling' were adapted to public data" in str(plan.statement())

    def test_what_is_no_layer_is_refused(self):
        with pytest.raises(ValueError, match="must be a Keras layer"):
            dpc.keras.public_statistics("scaling")
