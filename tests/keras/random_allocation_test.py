"""Random allocation in `fit`: the statement is true, wherever a run ends."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc

N = 60
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 3


class StopAfter(tf.keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.model.stop_training = True


def plan_of(**options):
    settings = dict(
        epsilon=4,
        delta=1e-3,
        examples=N,
        batch_size=10,
        epochs=2,
        sampling="random_allocation",
    )
    return dpc.keras.PrivacyPlan(**settings | options)


def model_of(plan):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    model.compile(
        plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def test_a_plan_ends_with_the_stated_epsilon_and_all_steps():
    plan = plan_of()
    assert plan.steps == 12
    assert plan.noise_multiplier < plan_of(sampling="poisson").noise_multiplier
    model = model_of(plan)
    history = model.fit(
        plan.batches((X, Y)),
        epochs=plan.epochs,
        callbacks=plan.callbacks,
        verbose=0,
    )
    assert plan.ledger.steps == 12
    assert int(model.optimizer.iterations.numpy()) == 12
    assert 3.99 < history.history["epsilon"][-1] <= 4
    assert plan.ledger.epsilon() == history.history["epsilon"][-1]
    text = str(plan)
    assert "each record in one random step of each epoch of 6" in text
    assert "add or remove one record" in text


@pytest.mark.slow
@pytest.mark.parametrize("again", ["same batches", "another process"])
def test_a_run_that_stopped_within_an_epoch_goes_on_with_another(tmp_path, again):
    plan = plan_of(epochs=3, ledger=tmp_path / "privacy.json")
    batches = plan.batches((X, Y))
    model = model_of(plan)
    model.fit(batches, epochs=3, callbacks=[*plan.callbacks, StopAfter(8)], verbose=0)
    assert plan.ledger.phases[-1].runs == [8]
    assert batches._drawer.steps_drawn() == 8
    if again == "another process":
        plan = plan_of(epochs=3, ledger=tmp_path / "privacy.json")
        batches, model = plan.batches((X, Y)), model_of(plan)
    model.fit(batches, epochs=1, callbacks=plan.callbacks, verbose=0)
    assert plan.ledger.phases[-1].runs == [8, 6]
    # The new run draws nothing from the rest of the epoch that was cut short.
    assert (batches._drawer.steps_drawn() - batches._drawer._first_step) % 6 == 0
    z, scheme = plan.noise_multiplier, batches.scheme
    parts = [scheme.event(z, steps) for steps in (6, 2, 6)]
    expected = dpc.accounting.event_epsilon(
        dp_accounting.ComposedDpEvent(parts), plan.delta
    )
    assert plan.ledger.epsilon() == pytest.approx(expected)
    assert plan.ledger.epsilon() <= plan.epsilon


def test_batch_sizes_that_divide_nothing_are_met_as_nearly_as_can_be():
    plan = plan_of(batch_size=14)
    assert plan.steps == 2 * 4
    optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0)
    assert optimizer.expected_batch_size == 15.0
    assert "15 examples expected" in str(plan)
    assert plan_of(batch_size=N).scheme == dpc.sampling.RandomAllocation(1)
    assert len(plan.rows()) == 7


@pytest.mark.slow
def test_accumulated_steps_are_whole():
    plan = plan_of(physical_batch_size=8)
    assert plan.accumulation_steps > 1
    model_of(plan).fit(
        plan.batches((X, Y)), epochs=2, callbacks=plan.callbacks, verbose=0
    )
    assert plan.ledger.steps == 12
    assert plan.ledger.epsilon() <= 4


def test_noise_that_changes_within_an_epoch_is_refused():
    batches = dpc.sampling.RandomAllocation(6).batches((X, Y))
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([3], [2.0, 1.0])
    optimizer = dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=schedule, expected_batch_size=10
    )
    model.compile(optimizer, "mse")
    budget = dpc.keras.PrivacyBudget(50.0, 1e-3, batches)
    with pytest.raises(ValueError, match="follows a schedule"):
        model.fit(batches, callbacks=[budget], verbose=0)


def test_correlated_noise_is_refused():
    with pytest.raises(ValueError, match="MinSeparation"):
        plan_of(noise="tree")


@pytest.mark.slow
def test_replicas_train_on_epochs_in_a_row():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    plan = plan_of()
    with strategy.scope():
        model = model_of(plan)
    batches = plan.batches((X, Y))
    for _ in range(2):
        model.fit(
            batches.distribute(strategy),
            steps_per_epoch=4,
            epochs=1,
            callbacks=plan.callbacks,
            verbose=0,
        )
    assert plan.ledger.phases[-1].runs == [4, 4]


# Data that are read once an epoch.


class Reads:
    """A function that gives the records in order, and counts its passes."""

    def __init__(self, count=N):
        self.count, self.passes = count, 0

    def __call__(self):
        self.passes += 1
        return zip(X[: self.count], Y[: self.count], strict=True)


def test_fit_reads_a_stream_once_an_epoch_and_states_what_it_is(tmp_path):
    plan, read = plan_of(), Reads()
    stream = dpc.sampling.Stream(read, plan.examples, tmp_path)
    model = model_of(plan)
    history = model.fit(
        plan.batches(stream),
        epochs=plan.epochs,
        callbacks=plan.callbacks,
        validation_data=(X, Y),
        verbose=0,
    )
    # The shapes took one record's read.
    assert read.passes == 1 + plan.epochs
    assert plan.ledger.steps == 12 and len(history.history["val_loss"]) == 2
    text = str(plan.statement())
    assert "each record in one random step of each epoch of 6" in text
    assert "every pass over the stream gives each record once" in text


@pytest.mark.slow
def test_a_stream_trains_as_data_with_an_index_do(tmp_path):
    plan = plan_of()
    weights = []
    for data in ((X, Y), dpc.sampling.Stream(Reads(), N, tmp_path)):
        tf.keras.utils.set_random_seed(1)
        model = model_of(plan_of())
        model.compile(
            dpc.keras.DPSGD(0.1, noise_multiplier=0.0, expected_batch_size=10),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(plan.batches(data, seed=3), epochs=2, verbose=0)
        weights.append(model.get_weights())
    for got, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_stream_of_another_size_costs_no_step(tmp_path):
    plan, read = plan_of(), Reads(N - 1)
    stream = dpc.sampling.Stream(read, N, tmp_path)
    model = model_of(plan)
    with pytest.raises(ValueError, match="ended after 59 of 60 records"):
        model.fit(plan.batches(stream), callbacks=plan.callbacks, verbose=0)
    assert plan.ledger.steps == plan.ledger.reserved == 0
    other = dpc.sampling.Stream(read, N - 1, tmp_path)
    with pytest.raises(ValueError, match="data has 59 examples, the plan is for 60"):
        plan.batches(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"jit_compile": True}, {"steps_per_execution": 3}], ids=str
)
def test_a_stream_has_few_sizes_under_xla_and_whole_executions(options, tmp_path):
    plan, read = plan_of(), Reads()
    batches = plan.batches(dpc.sampling.Stream(read, N, tmp_path))
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    model.compile(
        plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    model.fit(batches, epochs=2, callbacks=plan.callbacks, verbose=0)
    assert plan.ledger.steps == 12 and read.passes == 3


def test_a_loop_of_ones_own_takes_a_stream(tmp_path):
    read = Reads()
    scheme = dpc.sampling.RandomAllocation(6)
    batches = scheme.batches(dpc.sampling.Stream(read, N, tmp_path))
    ledger = dpc.accounting.Ledger(delta=1e-3)
    ledger.begin(noise_multiplier=1.0, sampling=batches)
    steps = iter(batches.repeat())
    rows = []
    for _ in range(12):
        with ledger.step():
            x, _, weights = next(steps)
            rows += [tuple(row) for row in x.numpy()[weights.numpy() > 0]]
    assert ledger.steps == 12 and read.passes == 3
    assert sorted(rows) == sorted(2 * [tuple(row) for row in X])
