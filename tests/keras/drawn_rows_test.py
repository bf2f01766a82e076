"""In `fit`, batches have the rows that were drawn, where a scheme's draws vary."""

import collections
import warnings

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdpclip as dpc
from tests.stack import keras2_only
from tfdpclip import sampling
from tfdpclip.keras import _compat
from tfdpclip.sampling.capacity import few_lengths

RECORDS = 200
SCHEMES = {
    "poisson": (sampling.Poisson(0.1), True),
    "capacity": (sampling.Poisson(0.1, 22, RECORDS), True),
    "fixed": (sampling.FixedSize(20, RECORDS), False),
    "shuffled": (sampling.ShuffledEpochs(20, RECORDS), False),
    "full": (sampling.FullBatch(), False),
}


VARYING = [
    sampling.Poisson(0.1),
    sampling.Poisson(0.1, 22, RECORDS),
    sampling.CyclicPoisson(RECORDS, rate=0.1, separation=4),
]


def data():
    x = np.random.default_rng(0).normal(size=(RECORDS, 3)).astype(np.float32)
    return x, np.arange(RECORDS) % 3


def rows_in(batches, steps=None):
    """How many rows elements have, and how many of them are records."""
    return [(len(w), int(np.sum(w))) for *_, w in batches.take(steps or 10)]


class Rows(tf.keras.callbacks.Callback):
    """Looks at the batches while `fit` is under way."""

    def __init__(self, batches):
        super().__init__()
        self.batches, self.shapes = batches, []

    def on_epoch_begin(self, epoch, logs=None):
        self.shapes.append(self.batches.element_spec[-1].shape[0])


def compiled(optimizer, **options):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **{"jit_compile": False, **options})
    return model


def private(size=20, z=0.0, **options):
    return dpc.keras.DPSGD(
        0.5,
        clip=dpc.clipping.FixedClip(1.0),
        noise_multiplier=z,
        expected_batch_size=size,
        **options,
    )


def fit(batches, optimizer, epochs=2, **options):
    model = compiled(optimizer, **options)
    tf.keras.utils.set_random_seed(5)
    model.layers[-1].kernel.assign(tf.ones((3, 3)) / 4)
    watch = Rows(batches)
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-3, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(
            batches, epochs=epochs, verbose=0, callbacks=[budget, watch]
        )
    return model, history.history, watch.shapes, budget


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.slow
def test_schemes_are_trained_on_what_they_drew_and_nothing_else(name, pieces):
    scheme, varies = SCHEMES[name]
    made = dict(seed=3, accumulation_steps=pieces)
    batches, same = (scheme.batches(data(), **made) for _ in range(2))
    rows = batches.physical_batch_size
    size = batches.expected_batch_size
    _, _, shapes, budget = fit(batches, private(size, accumulation_steps=pieces))
    assert shapes == [None if varies and pieces == 1 else rows] * 2
    # Later iterations see the usual shape again; the draws went on.
    assert batches.element_spec[-1].shape[0] == rows
    assert (
        batches._drawer.steps_drawn()
        == 2 * len(batches) // pieces
        == budget.ledger.steps
    )
    for _ in range(2):
        collections.deque(same, maxlen=0)
    for ours, other in zip(batches, same, strict=True):
        np.testing.assert_array_equal(ours[0], other[0])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("change", ["plain", "map", "map_batches", "repeat", "take"])
def test_elements_are_those_of_filled_batches_without_what_fills_them(change):
    changes = {
        "plain": lambda made: made,
        "map": lambda made: made.map(lambda x, y: (2 * x[:2], y)),
        "map_batches": lambda made: made.map_batches(lambda x, y: (x + 1, y)),
        "repeat": lambda made: made.repeat(2),
        "take": lambda made: made.take(7),
    }
    made = [
        changes[change](sampling.Poisson(0.05).batches(data(), seed=1))
        for _ in range(2)
    ]
    made[0].take_as_drawn(True)
    seen = set()
    for drawn, filled in zip(*made, strict=True):
        count = int(np.sum(filled[2]))
        seen.add(count)
        assert len(drawn[2]) == max(1, count)
        for ours, other in zip(drawn, filled, strict=True):
            np.testing.assert_array_equal(ours, other[: max(1, count)])
    assert len(seen) > 3


def test_nobody_drawn_is_a_row_of_weight_zero():
    batches = sampling.Poisson(0.002).batches(data(), steps=40, seed=0)
    batches.take_as_drawn(True)
    found = rows_in(batches, 40)
    assert set(found) >= {(1, 0), (1, 1)}
    model, history, *_ = fit(
        sampling.Poisson(0.002).batches(data(), steps=40, seed=0),
        private(0.4),
        epochs=1,
    )
    assert int(model.optimizer.iterations) == 40
    assert np.isfinite(history["loss"]).all()


@pytest.mark.parametrize("executions", [1, 3])
@pytest.mark.slow
def test_the_weights_are_those_of_filled_batches(executions, monkeypatch):
    found = []
    for varies in (True, False):
        with monkeypatch.context() as patched:
            if not varies:
                patched.setattr(sampling.drawer.Drawer, "varies", False)
            batches = sampling.Poisson(0.1).batches(data(), seed=4)
            model, _, shapes, _ = fit(
                batches, private(), steps_per_execution=executions
            )
            assert (shapes[0] is None) == varies
            found.append(model.layers[-1].kernel.numpy())
    assert np.abs(found[0] - 0.25).max() > 0.01
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_one_trace_has_all_numbers_of_rows():
    model, *_ = fit(sampling.Poisson(0.1).batches(data()), private(), epochs=3)
    function = _compat.step_function_of(model.train_function)
    assert function.experimental_get_tracing_count() <= 2


@pytest.mark.parametrize("scheme", VARYING)
def test_of_few_lengths_each_draw_has_the_least_with_room(scheme):
    made = [scheme.batches(data(), seed=1, steps=40) for _ in range(2)]
    made[0].take_as_drawn(True, few=True)
    lengths = made[0]._drawer.few_lengths
    assert len(lengths) <= 3 and lengths[-1] == made[0].physical_batch_size
    seen = set()
    for drawn, filled in zip(*made, strict=True):
        count = int(np.sum(filled[2]))
        seen.add(len(drawn[2]))
        assert len(drawn[2]) == min(n for n in lengths if n >= count)
        for ours, other in zip(drawn, filled, strict=True):
            np.testing.assert_array_equal(ours, other[: len(ours)])
        assert not np.any(filled[2][len(drawn[2]) :])
    assert len(seen) > 1


@pytest.mark.parametrize(("size", "most"), [(64, 1.18), (256, 1.1), (1024, 1.05)])
def test_few_lengths_have_few_rows_more_and_hardly_use_the_last(size, most):
    """By the distribution of the draws, with nothing drawn."""
    for population in (20 * size, 1000 * size):
        scheme = sampling.Poisson(size / population)
        rows = scheme.default_capacity(population)
        lengths = np.array(few_lengths(scheme, population, rows))
        drawn = np.arange(rows + 1)
        chances = stats.binom.pmf(drawn, population, scheme.rate)
        chances[-1] += stats.binom.sf(rows, population, scheme.rate)
        expected = np.sum(chances * lengths[np.searchsorted(lengths, drawn)])
        assert len(lengths) == 3 and 1.0 <= expected / size <= most
        assert np.sum(chances[lengths[1] + 1 :]) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("executions", [1, 3])
def test_steps_that_xla_compiles_are_those_of_filled_batches(executions, monkeypatch):
    """A single trace is used: XLA compiles a separate program for each length."""
    found = []
    for varies in (True, False):
        with monkeypatch.context() as patched:
            if not varies:
                patched.setattr(sampling.drawer.Drawer, "varies", False)
            batches = sampling.Poisson(0.1).batches(data(), seed=4)
            options = {"jit_compile": True, "steps_per_execution": executions}
            model, _, shapes, budget = fit(batches, private(), epochs=1, **options)
            assert (shapes[0] is None) == varies and budget.ledger.steps == 10
            function = _compat.step_function_of(model.train_function)
            assert function.experimental_get_tracing_count() <= 2
            found.append(model.layers[-1].kernel.numpy())
    assert np.abs(found[0] - 0.25).max() > 0.01
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_what_is_gathered_ahead_stays_filled():
    batches = sampling.Poisson(0.1).batches(data()).prefetch(2)
    batches.take_as_drawn(True)
    for rows, count in rows_in(batches):
        assert rows == max(1, count)
    with tf.device("cpu:0"):
        strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    batches.distribute(strategy)
    batches.take_as_drawn(True)
    assert batches.element_spec[-1].shape[0] == batches.physical_batch_size


@pytest.mark.slow
def test_metrics_count_examples_alone():
    plan = dpc.keras.PrivacyPlan(
        epsilon=9, delta=1e-3, examples=RECORDS, batch_size=20, epochs=1
    )
    model = compiled(
        plan.optimizer(dpc.keras.DPSGD, 0.0),
        metrics=["accuracy"],
        weighted_metrics=[tf.keras.metrics.SparseCategoricalAccuracy("weighed")],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*weight 0")
        history = model.fit(
            plan.batches(data()), epochs=1, verbose=0, callbacks=plan.callbacks
        ).history
    assert history["accuracy"] == pytest.approx(history["weighed"])


@pytest.mark.slow
def test_metrics_that_count_draws_of_nobody_are_warned_of():
    optimizer = private(1.0, z=1.0)
    batches = sampling.Poisson(1 / RECORDS).batches(data(), steps=2)
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-3, batches)
    with pytest.warns(
        UserWarning, match=r"\(accuracy\).* empty draws, about 36.8% of all"
    ):
        compiled(optimizer, metrics=["accuracy"]).fit(
            batches, verbose=0, callbacks=[budget]
        )


def test_functions_of_batches_that_lose_rows_are_found():
    batches = sampling.Poisson(0.1).batches(data())
    batches = batches.map_batches(lambda x, y: (tf.boolean_mask(x, x[:, 0] > 0), y))
    batches.take_as_drawn(True)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="must keep the batch.* rows"
    ):
        collections.deque(batches, maxlen=0)


class Interrupts(tf.keras.callbacks.Callback):
    """Ends `fit` by an error."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        if self.at == "batch":
            raise KeyboardInterrupt

    def on_epoch_end(self, epoch, logs=None):
        if self.at == "epoch":
            raise OSError("No space left on device")


@pytest.mark.parametrize("at", ["batch", "epoch"])
@pytest.mark.slow
def test_after_an_error_in_fit_batches_are_filled_again(at):
    batches = sampling.Poisson(0.1).batches(data(), steps=3)
    changed = batches.map(lambda x, y: (2 * x, y))
    model, rows = compiled(private()), Rows(batches)
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-5, batches)
    with pytest.raises((KeyboardInterrupt, OSError)):
        model.fit(
            batches, epochs=2, verbose=0, callbacks=[budget, rows, Interrupts(at)]
        )
    assert rows.shapes == [None]
    for left in (batches, changed):
        assert left.element_spec[-1].shape[0] == batches.physical_batch_size
        elements = [len(w) for *_, w in left]
        assert elements == [batches.physical_batch_size] * 3


@pytest.mark.slow
def test_where_a_size_would_be_static_batches_are_filled():
    """A loss divided by the static size would change with every record."""
    sizes = []

    class Retraced(tf.keras.Sequential):
        def make_train_function(self, force=False):
            @tf.function(autograph=False)
            def step(x, y, w):
                sizes.append(x.shape[0])
                with tf.GradientTape() as tape:
                    found = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
                    loss = found * w / x.shape[0]
                self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
                return {"loss": tf.reduce_mean(loss)}

            self.train_function = lambda iterator: step(*next(iterator))
            return self.train_function

    model = Retraced([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
    model.compile(private(), jit_compile=False)
    batches = sampling.Poisson(0.1).batches(data(), steps=3)
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-5, batches)
    model.fit(batches, verbose=0, callbacks=[budget])
    assert set(sizes) == {batches.physical_batch_size}


@pytest.mark.slow
@keras2_only("run_eagerly=True is refused, see held_loss_test.py")
@pytest.mark.filterwarnings("ignore")
def test_eager_steps_get_filled_batches():
    sizes = []

    class Eager(tf.keras.Sequential):
        def train_step(self, data):
            x, y, w = data
            sizes.append(x.shape[0])
            with tf.GradientTape(persistent=True) as tape:
                found = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
                loss = found * w / x.shape[0]
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            return {"loss": tf.reduce_mean(loss)}

    model = Eager([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
    model.compile(private(), run_eagerly=True)
    batches = sampling.Poisson(0.1).batches(data(), steps=3)
    budget = dpc.keras.PrivacyBudget(np.inf, 1e-5, batches)
    model.fit(batches, verbose=0, callbacks=[budget])
    assert set(sizes) == {batches.physical_batch_size}
