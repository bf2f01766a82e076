"""Batches: fixed shapes, honest draws, at home in `model.fit`."""

import collections
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests import stack
from tests.sampling.numbered import RECORDS, numbered
from tfdpclip import accounting, sampling
from tfdpclip.sampling.base import DrawKey
from tfdpclip.sampling.drawer import DrawObserver, IteratorState


def _drawn(element):
    x, _, weights = element
    return [
        int(row[0]) - 1 for row, w in zip(x.numpy(), weights.numpy(), strict=True) if w
    ]


def _steps(batches):
    """The indices drawn in each logical step of an iteration."""
    elements = [_drawn(element) for element in batches]
    k = batches.accumulation_steps
    return [sum(elements[i : i + k], []) for i in range(0, len(elements), k)]


class TestShape:
    def test_is_static_and_padded_with_zeros(self):
        batches = sampling.Poisson(0.1).batches(numbered())
        rows = batches.physical_batch_size
        x_spec, y_spec, w_spec = batches.element_spec
        assert x_spec == tf.TensorSpec((rows, 2), tf.float32)
        assert y_spec == tf.TensorSpec((rows,), tf.int64)
        assert w_spec == tf.TensorSpec((rows,), tf.float32)
        for x, y, weights in batches:
            real = weights.numpy() > 0
            assert np.all(x.numpy()[~real] == 0)
            assert np.all(y.numpy()[~real] == 0)
            np.testing.assert_array_equal(x.numpy()[real, 0], y.numpy()[real])

    def test_an_empty_draw_is_a_step(self):
        batches = sampling.Poisson(1e-9).batches(numbered(), steps=5)
        elements = list(batches)
        assert len(elements) == 5
        assert all(float(tf.reduce_sum(weights)) == 0 for _, _, weights in elements)

    def test_default_number_of_steps(self):
        assert len(sampling.Poisson(0.1).batches(numbered())) == 10
        assert len(sampling.Poisson(0.3).batches(numbered())) == 4
        assert len(sampling.FixedSize(7, 60).batches(numbered())) == 9
        assert len(sampling.ShuffledEpochs(7, 60).batches(numbered())) == 9
        assert len(sampling.FullBatch().batches(numbered())) == 1
        assert len(sampling.FullBatch().batches(numbered(), steps=4)) == 4

    def test_own_sample_weights_are_kept(self):
        x, y = numbered()
        weights = np.linspace(1, 2, RECORDS)
        batches = sampling.FullBatch().batches((x, y, weights))
        np.testing.assert_allclose(next(iter(batches))[2], weights, rtol=1e-6)


class TestDraws:
    def test_no_draw_is_ever_repeated(self):
        batches = sampling.Poisson(0.5).batches(numbered())
        seen = [tuple(sorted(s)) for _ in range(5) for s in _steps(batches)]
        # Two of ten draws of 60 coins agree with probability below 1e-16.
        assert len(set(seen)) == len(seen) == 10

    def test_fresh_entropy_by_default(self):
        first, second = (sampling.Poisson(0.5).batches(numbered()) for _ in range(2))
        assert _steps(first) != _steps(second)

    def test_a_seed_fixes_draws(self):
        scheme = sampling.Poisson(0.2)
        whole = scheme.batches(numbered(), seed=3, steps=10)
        expected = _steps(whole)
        again = scheme.batches(numbered(), seed=3, steps=5)
        assert _steps(again) + _steps(again) == expected
        assert whole.seed == 3

    @pytest.mark.slow
    def test_frequencies_reach_the_batches(self):
        batches = sampling.Poisson(0.25).batches(numbered(), steps=1000)
        counts = np.bincount(sum(_steps(batches), []), minlength=RECORDS)
        # Hoeffding: P[|count - 250| > 0.13 * 1000] < 2 exp(-2 * 1000 * 0.13^2) < 1e-14
        # for each of 60 records, so the false-alarm rate is below 1e-12.
        assert np.all(np.abs(counts - 250) < 130)

    def test_fixed_size(self):
        for step in _steps(sampling.FixedSize(7, 60).batches(numbered())):
            assert len(set(step)) == len(step) == 7

    def test_with_replacement(self):
        scheme = sampling.FixedSize(50, 60, replacement=True)
        steps = _steps(scheme.batches(numbered()))
        assert all(len(step) == 50 for step in steps)
        # All distinct in both steps with probability below 1e-20.
        assert any(len(set(step)) < 50 for step in steps)

    def test_an_epoch_is_shuffled_once(self, monkeypatch):
        made = []
        rng = DrawKey.rng

        def counted(key, step, purpose=None):
            made.append(step)
            return rng(key, step, purpose)

        monkeypatch.setattr(DrawKey, "rng", counted)
        batches = sampling.ShuffledEpochs(7, 60).batches(numbered())
        for _ in range(2):
            collections.deque(batches, maxlen=0)
        assert made == [0, 1]

    def test_shuffled_epochs(self):
        batches = sampling.ShuffledEpochs(7, 60).batches(numbered())
        first, second = (sum(_steps(batches), []) for _ in range(2))
        assert sorted(first) == sorted(second) == list(range(60))
        assert first != second

    def test_full_batch(self):
        assert _steps(sampling.FullBatch().batches(numbered())) == [list(range(60))]


class TestAccumulation:
    @pytest.mark.parametrize("pieces", [1, 2, 3, 7])
    def test_a_step_is_cut_into_pieces(self, pieces):
        options = {"seed": 5, "steps": 6}
        whole = sampling.Poisson(0.4).batches(numbered(), **options)
        cut = sampling.Poisson(0.4).batches(
            numbered(),
            accumulation_steps=pieces,
            physical_batch_size=-(-60 // pieces),
            **options,
        )
        assert len(cut) == 6 * pieces
        assert _steps(cut) == _steps(whole)

    def test_stopping_within_a_step_does_not_mix_steps(self):
        batches = sampling.FullBatch().batches(
            numbered(), accumulation_steps=4, physical_batch_size=15
        )
        stream = iter(batches)
        begun = _drawn(next(stream)) + _drawn(next(stream))
        rest = iter(batches)
        assert sorted(begun + _drawn(next(rest)) + _drawn(next(rest))) == list(
            range(60)
        )

    def test_a_step_that_another_iterator_took_from_is_not_finished(self):
        """The next draw would fill up the rest of the step."""
        batches = sampling.FullBatch().batches(numbered(), accumulation_steps=3)
        stream, other = iter(batches.repeat()), iter(batches.repeat())
        for _ in range(4):
            next(stream)
        for _ in range(2):
            next(other)
        with pytest.raises(Exception, match="iterated elsewhere in the middle"):
            next(stream)

    def test_another_iterator_between_two_steps_takes_steps_of_its_own(self):
        batches = sampling.FullBatch().batches(numbered(), accumulation_steps=3)
        stream, other = iter(batches.repeat()), iter(batches.repeat())
        for _ in range(3):
            next(stream)
        next(other)
        step = [record for _ in range(3) for record in _drawn(next(stream))]
        assert sorted(step) == list(range(60))
        with pytest.raises(Exception, match="iterated elsewhere in the middle"):
            next(other)

    def test_iterators_that_gather_ahead_take_whole_steps(self):
        batches = sampling.FullBatch().batches(numbered(), accumulation_steps=3)
        batches._drawer.runs_ahead = True
        streams = [iter(batches.repeat()) for _ in range(2)]
        taken = [[], []]
        for which in (0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1):
            taken[which] += _drawn(next(streams[which]))
        for records in taken:
            assert sorted(records) == sorted([*range(60), *range(60)])

    def test_iterators_in_threads_never_get_the_same_element(self):
        class Slow:
            def __len__(self):
                return 8

            def __getitem__(self, index):
                time.sleep(0.001)
                return np.array([index], np.float32)

        batches = sampling.FullBatch().batches(Slow(), accumulation_steps=8)
        drawer, seen = batches._drawer, []
        drawer.runs_ahead = True

        def take(iterator):
            for _ in range(24):
                seen.extend(np.ravel(drawer.next_element(iterator)[0]).tolist())

        threads = [
            threading.Thread(target=take, args=(IteratorState(),)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Six whole steps, of all eight records.
        assert sorted(seen) == sorted(list(range(8)) * 6)
        assert batches._drawer.steps_drawn() == 6

    def test_what_could_not_be_read_is_not_skipped(self):
        class Fails:
            broken = False

            def __len__(self):
                return 6

            def __getitem__(self, index):
                if self.broken:
                    raise OSError("gone")
                return np.array([index], np.float32)

        def read(stream):
            return next(stream)[0].numpy().ravel().tolist()

        source = Fails()
        batches = sampling.FullBatch().batches(source, accumulation_steps=3)
        seen = read(iter(batches))
        source.broken = True
        with pytest.raises(Exception, match="could not be read .OSError"):
            next(iter(batches))
        source.broken = False
        stream = iter(batches)
        seen += read(stream) + read(stream)
        assert sorted(seen) == list(range(6))

    def test_nothing_is_gathered_ahead(self):
        batches = sampling.Poisson(0.4).batches(numbered(), accumulation_steps=2)
        stream = iter(batches.repeat())
        for expected in range(1, 8):
            next(stream)
            assert batches._drawer.delivered == expected

    def test_full_batch_needs_enough_pieces(self):
        with pytest.raises(ValueError, match="accumulation_steps=4"):
            sampling.FullBatch().batches(numbered(), physical_batch_size=16)


class TestCapacity:
    def test_the_drawn_scheme_knows_its_capacity(self):
        scheme = sampling.Poisson(0.1)
        x = np.zeros((2000, 1))
        batches = scheme.batches(x)
        assert batches.scheme == sampling.Poisson(
            0.1, batches.physical_batch_size, 2000
        )
        assert scheme.accounts_for(batches.scheme)
        # By default the difference cannot be seen ...
        arguments = (1.0, 100)
        ideal = accounting.epsilon(*arguments, scheme, 1e-5)
        assert accounting.epsilon(*arguments, batches, 1e-5) == pytest.approx(
            ideal, rel=1e-5
        )
        # ... and with a tight capacity epsilon is larger.
        with pytest.warns(UserWarning, match="drops some"):
            tight = scheme.batches(x, physical_batch_size=230)
        assert accounting.epsilon(*arguments, tight, 1e-5) > 1.01 * ideal

    def test_a_capacity_that_cannot_be_exceeded_is_none(self):
        batches = sampling.Poisson(0.5).batches(numbered(), physical_batch_size=60)
        assert batches.scheme == sampling.Poisson(0.5)

    def test_draws_respect_it(self):
        with pytest.warns(UserWarning, match="drops some"):
            batches = sampling.Poisson(0.5).batches(
                numbered(), physical_batch_size=31, steps=200
            )
        assert max(map(len, _steps(batches))) <= 31

    def test_less_than_the_expected_batch_is_refused(self):
        with pytest.raises(ValueError, match="accumulation_steps="):
            sampling.Poisson(0.5).batches(numbered(), physical_batch_size=29)


class TestFit:
    def _model(self, **options):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile("sgd", "mse", **options)
        return model

    def test_epochs(self):
        batches = sampling.Poisson(0.1).batches(numbered())
        self._model().fit(batches, epochs=3, verbose=0)
        assert batches._drawer.delivered >= 30
        assert batches._drawer.steps_drawn() == batches._drawer.delivered

    @pytest.mark.parametrize("steps_per_execution", [1, 3])
    def test_steps_per_epoch(self, steps_per_execution):
        batches = sampling.Poisson(0.1).batches(numbered())
        model = self._model(steps_per_execution=steps_per_execution)
        model.fit(batches.repeat(), steps_per_epoch=7, epochs=3, verbose=0)
        # Keras 3 rounds an epoch up to whole executions.
        steps = 27 if stack.KERAS_3 and steps_per_execution == 3 else 21
        assert model.optimizer.iterations.numpy() == steps
        assert batches._drawer.steps_drawn() >= steps

    def test_one_trace_for_all_sizes(self):
        traces = []

        class Model(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = tf.keras.layers.Dense(1)

            def call(self, x):
                traces.append(x.shape)
                return self.dense(x)

        model = Model()
        model.compile("sgd", "mse")
        batches = sampling.Poisson(0.1).batches(numbered())
        model.fit(batches, verbose=0)
        before = len(traces)
        model.fit(batches, epochs=3, verbose=0)
        assert len(traces) == before

    def test_features_alone(self):
        class Model(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = tf.keras.layers.Dense(1)

            def call(self, x):
                y = self.dense(x)
                self.add_loss(tf.reduce_mean(y**2))
                return y

        model = Model()
        model.compile("sgd")
        batches = sampling.Poisson(0.1).batches(numbered()[0])
        model.fit(batches, verbose=0)
        assert int(model.optimizer.iterations) == int(batches.cardinality()) > 0


def test_arrays_stay_as_they_are_while_a_step_is_made_of_them():
    """A record that moved in between would be in both parts of the step."""
    x = np.arange(40, dtype=np.float32)[:, np.newaxis]
    batches = sampling.FullBatch().batches((x, x), accumulation_steps=2, steps=2)
    elements = iter(batches)
    for _ in range(3):  # A step, and the first part of the next.
        next(elements)
    x[:] = x[::-1].copy()
    with pytest.raises(Exception, match="changed since the step began"):
        next(elements)


def test_between_two_steps_they_may_be_changed():
    x = np.arange(40, dtype=np.float32)[:, np.newaxis]
    batches = sampling.FullBatch().batches((x, x), accumulation_steps=2, steps=2)
    elements = iter(batches)
    for _ in range(2):
        next(elements)
    x[:] = x[::-1].copy()
    assert sum(len(next(elements)[0]) for _ in range(2)) >= 40


@pytest.mark.parametrize("scheme", ["people", "examples"])
def test_arrays_stay_as_they_are_while_ids_say_whose_they_are(scheme):
    x = np.arange(40, dtype=np.float32)[:, np.newaxis]
    ids = np.repeat(np.arange(10), 4)
    if scheme == "people":
        batches = sampling.Poisson(0.5).batches((x, x), people=ids, per_person=2)
    else:
        batches = sampling.CappedPoisson(0.5, 2).batches((x, x), people=ids)
    next(iter(batches))
    order = np.random.default_rng(0).permutation(40)
    x[:] = x[order]
    ids[:] = ids[order]
    with pytest.raises(Exception, match="changed since ids were given"):
        next(iter(batches))


def test_observer_sees_draws_through_transformations():
    batches = sampling.Poisson(0.1).batches(numbered(), seed=1)
    other = sampling.Poisson(0.1).batches(numbered(), seed=2)
    observer = DrawObserver()
    for _ in batches.map(lambda *element: element):
        pass
    counts = dict(observer.drawn())
    assert counts == {batches._drawer: 10}
    assert other._drawer not in counts


def test_data_are_let_go():
    x = np.ones((10, 2), np.float32)
    batches = sampling.Poisson(0.5).batches(x)
    list(batches)
    drawer = weakref.ref(batches._drawer)
    del batches
    gc.collect()
    assert drawer() is None


@pytest.mark.parametrize(
    "changed",
    [
        lambda batches: batches,
        lambda batches: batches.map(lambda x, y: (x + 1, y)).repeat().prefetch(2),
        lambda batches: batches.with_options(tf.data.Options()).take(2),
    ],
)
def test_no_thread_tunes_an_iterator_whose_end_would_wait_for_it(changed):
    data = np.ones((8, 3), np.float32), np.arange(8)
    batches = changed(sampling.Poisson(0.5).batches(data))
    assert batches.options().autotune.enabled is False


def test_a_mapped_data_set_keeps_its_batches():
    def mapped():
        return sampling.Poisson(0.5).batches(numbered()).map(lambda *e: e)

    dataset = mapped()
    gc.collect()
    assert len(list(dataset)) == 2
    stream = iter(mapped())
    gc.collect()
    next(stream)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"physical_batch_size": 0}, "physical_batch_size"),
        ({"physical_batch_size": 2.5}, "physical_batch_size"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"accumulation_steps": float("nan")}, "accumulation_steps"),
        ({"steps": 0}, "steps"),
        ({"steps": float("inf")}, "steps"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_hostile_options(options, match):
    with pytest.raises(ValueError, match=match):
        sampling.Poisson(0.1).batches(numbered(), **options)
