"""Schedules of clip norm, noise and quantile through `fit`, and the ledger's counts.

dp_accounting itself composes the expected epsilons here, each step with its own noise.
"""

import collections
import json
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import pld

from tests.keras.helpers import DPSGD, DPRecorder, L, flat, mostly_slow, some_data
from tfdpclip import sampling
from tfdpclip.accounting import Ledger, PrivacyMismatchError
from tfdpclip.clipping import FixedClip, LayerwiseClip, QuantileClip
from tfdpclip.keras import PrivacyBudget

pytestmark = pytest.mark.unchecked

schedules = tf.keras.optimizers.schedules
DELTA = 1e-5
RATE = 0.2
COUNT = 60


class Register(schedules.LearningRateSchedule):
    """A user's schedule: z for even steps, z + 1 for odd steps."""

    def __init__(self, z):
        super().__init__()
        self.z = z

    def __call__(self, step):
        return self.z + tf.cast(step % 2, tf.float32)

    def get_config(self):
        return {"z": self.z}


STEPWISE = schedules.PiecewiseConstantDecay([3, 6], [2.0, 3.0, 1.5])
SCHEDULES = {
    "stepwise": STEPWISE,
    "exponential": schedules.ExponentialDecay(3.0, 10, 0.5),
    "rising": schedules.PolynomialDecay(1.5, 10, 4.0),
    "own": Register(1.5),
}


class Of(schedules.LearningRateSchedule):
    """A schedule of any function of the step."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __call__(self, step):
        return self.function(step)

    def get_config(self):
        return {}


def composed(multipliers, rate=RATE):
    """Epsilon of Poisson-sampled Gaussian steps of these noise multipliers.

    The grid is ten times coarser than the library's, which is ten times as fast and
    changes epsilon by a relative 1e-5.
    """
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for z, count in collections.Counter(multipliers).items():
        event = dp_accounting.GaussianDpEvent(z)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event), count)
    return accountant.get_epsilon(DELTA)


def batches(k=1, **options):
    data = some_data(COUNT, 3)
    scheme = sampling.Poisson(RATE)
    return scheme.batches(data, accumulation_steps=k, **options)


def model_with(z, k=1, clip=1.0, rate=0.01, spe=1, **options):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(
        rate,
        clip=clip,
        noise_multiplier=z,
        expected_batch_size=RATE * COUNT,
        accumulation_steps=k,
        **options,
    )
    model.compile(optimizer, "mse", steps_per_execution=spe)
    return model


def values(schedule, steps):
    return [float(schedule(step)) for step in range(steps)]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", mostly_slow(["stepwise", "own"], SCHEDULES))
@pytest.mark.slow
def test_epsilon_is_that_of_every_steps_own_noise(name, k):
    """Exact for noise that stays; within 5% of the noise, on the safe side, if not."""
    schedule = SCHEDULES[name]
    drawn = batches(k)
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    model = model_with(schedule, k)
    history = model.fit(drawn, epochs=2, verbose=0, callbacks=[budget])
    steps = int(model.optimizer.iterations)
    assert steps == budget.ledger.steps == 10
    exact = composed(values(schedule, steps))
    found = history.history["epsilon"][-1]
    assert found == budget.ledger.epsilon()
    if name == "stepwise":
        assert found == pytest.approx(exact, rel=1e-3)
    else:
        assert (
            exact * (1 - 1e-3)
            <= found
            <= composed([z * 0.95 for z in values(schedule, steps)]) * (1 + 1e-3)
        )
    phases = budget.ledger.phases
    for step in range(steps):
        within, counted = step, None
        for phase in phases:
            if within < phase.steps:
                counted = phase.noise_multiplier
                break
            within -= phase.steps
        true = float(schedule(step))
        assert true * 0.951 * (1 - 1e-6) <= counted <= true * (1 + 1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_the_noise_that_is_drawn_is_that_of_the_step(k):
    """Six standard errors of 20,000 draws: a false alarm in 2e-9 each."""
    w = tf.Variable(tf.zeros([20_000]))
    optimizer = DPRecorder(
        clip=0.5,
        noise_multiplier=STEPWISE,
        expected_batch_size=4,
        accumulation_steps=k,
    )

    @tf.function
    def step():
        optimizer.minimize(tf.zeros([2]) * w[0], [w])

    for i in range(8):
        z = float(STEPWISE(i))
        assert optimizer.noise_multiplier == z
        assert optimizer.noise_multiplier_at(i) == z
        for _ in range(k):
            step()
        noise = np.std(optimizer.seen[0].numpy())
        assert noise == pytest.approx(z * 0.5 / 4, rel=6 / math.sqrt(40_000))
    assert optimizer.noise_schedule is not None


def test_a_scheduled_noise_leaves_room_for_the_counts():
    """The gradient noise z_g of each step; the count's noise is constant."""
    rule = LayerwiseClip(QuantileClip(count_stddev=4.0))
    model = model_with(STEPWISE, clip=rule)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    assert optimizer.count_stddevs == (4.0,)
    for step in (0, 3, 4, 9):
        optimizer.iterations.assign(step)
        z = float(STEPWISE(step))
        total = optimizer.gradient_noise_multiplier**-2 + (2 * 4.0) ** -2
        assert total == pytest.approx(z**-2)


def test_counts_too_precise_for_the_first_step_are_refused():
    with pytest.raises(ValueError, match="count_stddev"):
        model_with(STEPWISE, clip=QuantileClip(count_stddev=0.9))


def test_counts_too_precise_for_a_later_step_release_nothing():
    """Noise that rises beyond the limit set by the counts' noise releases only NaN."""
    rising = schedules.PiecewiseConstantDecay([1], [1.0, 5.0])
    model = model_with(rising, clip=QuantileClip(count_stddev=1.0))
    x, y = some_data(12, 3)
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    assert np.all(np.isfinite(flat(model.trainable_variables)))
    before = float(model.optimizer.clip_norm)
    model.train_on_batch(x, y)
    assert np.all(np.isnan(flat(model.trainable_variables)))
    assert float(model.optimizer.clip_norm) == before


@pytest.mark.parametrize("clip", [QuantileClip(count_stddev=0.0), 1.0], ids=str)
def test_a_schedule_that_starts_without_noise_is_not_private_and_runs_or_is_refused(
    clip,
):
    starts = schedules.PiecewiseConstantDecay([0], [0.0, 1.0])
    try:
        model = model_with(starts, clip=clip)
        model.train_on_batch(*some_data(12, 3))
    except ValueError as error:
        assert "count_stddev" in str(error) or "noise_multiplier" in str(error)
        return
    assert np.all(np.isfinite(flat(model.trainable_variables)))


@pytest.mark.slow
def test_noise_that_becomes_nothing_costs_everything():
    ends = schedules.PiecewiseConstantDecay([3], [2.0, 0.0])
    drawn = batches()
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    model_with(ends).fit(drawn, epochs=2, verbose=0, callbacks=[budget])
    assert budget.ledger.epsilon() == math.inf
    assert "not private" in str(budget.statement())


def test_noise_below_nothing_is_refused():
    below = schedules.PiecewiseConstantDecay([3], [2.0, -1.0])
    drawn = batches()
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    with pytest.raises(ValueError, match="noise_multiplier"):
        model_with(below).fit(drawn, epochs=2, verbose=0, callbacks=[budget])


@pytest.mark.parametrize("spe, k", [(3, 1), (4, 1), (6, 3)])
@pytest.mark.slow
def test_an_execution_of_several_steps_counts_its_least_noise(spe, k):
    drawn = batches(k)
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    model = model_with(Register(1.5), k, spe=spe)
    model.fit(
        drawn.repeat(), epochs=1, steps_per_epoch=12, verbose=0, callbacks=[budget]
    )
    steps = int(model.optimizer.iterations)
    assert steps == 12 // k == budget.ledger.steps
    multipliers = {phase.noise_multiplier for phase in budget.ledger.phases}
    assert max(multipliers) <= 1.5
    assert budget.ledger.epsilon() >= composed([1.5] * steps) * (1 - 1e-3)


@pytest.mark.parametrize("spe", [1, 2])
@pytest.mark.parametrize("name", mostly_slow(["stepwise"], ["stepwise", "own"]))
@pytest.mark.slow
def test_the_budget_stops_before_the_step_that_exceeds_it(name, spe):
    """The expected number of steps comes from composing a step more each time."""
    schedule = SCHEDULES[name]
    z = values(schedule, 40)
    target = composed(z[:7]) + 1e-6
    drawn = batches()
    budget = PrivacyBudget(target, DELTA, drawn)
    model = model_with(schedule, spe=spe)
    model.fit(drawn, epochs=4, verbose=0, callbacks=[budget])
    steps = int(model.optimizer.iterations)
    assert steps == budget.ledger.steps
    assert budget.ledger.epsilon() <= target
    assert composed(z[:steps]) <= target * (1 + 1e-3)
    if name == "stepwise":
        # Executions of two steps may stop one or (near a change) two steps early.
        assert 7 - 2 * (spe - 1) - (spe > 1) <= steps <= 7


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_the_noise_of_its_step(tmp_path):
    """The schedule, the clip and the ledger go on where they were."""
    path = tmp_path / "ledger.json"
    clip = FixedClip(schedules.PiecewiseConstantDecay([4], [1.0, 0.5]))
    model = model_with(STEPWISE, clip=clip)
    drawn = batches()
    budget = PrivacyBudget(math.inf, DELTA, drawn, ledger=path)
    model.fit(drawn, epochs=1, verbose=0, callbacks=[budget])
    model.save(str(tmp_path / "m.keras"))
    loaded = tf.keras.models.load_model(str(tmp_path / "m.keras"))
    again = PrivacyBudget(math.inf, DELTA, drawn, ledger=path)
    loaded.fit(drawn, epochs=1, verbose=0, callbacks=[again])
    assert int(loaded.optimizer.iterations) == 10
    assert float(loaded.optimizer.clip_norm) == pytest.approx(0.5)
    assert loaded.optimizer.noise_multiplier == 1.5
    exact = composed(values(STEPWISE, 10))
    assert again.ledger.epsilon() == pytest.approx(exact, rel=1e-3)
    assert Ledger.load(path).epsilon() == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_steps_that_nobody_saw_count_with_their_least_noise(tmp_path):
    """A checkpoint of a run without the callback: steps 0 to 4 had 2 and 3."""
    model = model_with(STEPWISE)
    drawn = batches()
    model.fit(drawn, epochs=1, verbose=0)
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    model.fit(drawn, epochs=1, verbose=0, callbacks=[budget])
    assert budget.ledger.steps == 10
    at_least = composed(values(STEPWISE, 10))
    assert budget.ledger.epsilon() >= at_least * (1 - 1e-3)


@pytest.mark.slow
def test_another_schedule_is_not_accounted_as_the_old_one(tmp_path):
    path = tmp_path / "ledger.json"
    drawn = batches()
    for schedule in (STEPWISE, schedules.PiecewiseConstantDecay([3], [2.0, 1.0])):
        model = model_with(schedule)
        budget = PrivacyBudget(math.inf, DELTA, drawn, ledger=path)
        model.fit(drawn, epochs=1, verbose=0, callbacks=[budget])
    expected = composed([2.0] * 4 + [3.0] + [2.0] * 4 + [1.0])
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
def test_a_clip_schedule_goes_by_logical_steps(k, jit):
    clip = schedules.PiecewiseConstantDecay([0, 1], [4.0, 2.0, 1.0])
    w = tf.Variable([0.0])
    optimizer = DPRecorder(
        clip=clip, noise_multiplier=0, expected_batch_size=k, accumulation_steps=k
    )

    @tf.function(jit_compile=jit)
    def step(x):
        optimizer.minimize(100.0 * x * w[0], [w])

    for expected in (4.0, 2.0, 1.0, 1.0):
        assert float(optimizer.clip_norm) == expected
        for _ in range(k):
            step(tf.ones([1]))
        assert float(optimizer.seen[0][0]) == pytest.approx(expected, rel=1e-5)


def test_the_noise_follows_the_clip_schedule():
    """Six standard errors: a false alarm in 2e-9 each."""
    clip = schedules.PiecewiseConstantDecay([0], [4.0, 0.25])
    w = tf.Variable(tf.zeros([20_000]))
    optimizer = DPRecorder(clip=clip, noise_multiplier=1.5, expected_batch_size=4)

    @tf.function
    def step():
        optimizer.minimize(tf.zeros([2]) * w[0], [w])

    for expected in (4.0, 0.25, 0.25):
        step()
        noise = np.std(optimizer.seen[0].numpy())
        assert noise == pytest.approx(1.5 * expected / 4, rel=6 / math.sqrt(40_000))


def test_a_quantile_schedule_moves_the_clip():
    """All norms are 1, noise off: the clip goes up for q = 1 and down for q = 0."""
    target = schedules.PiecewiseConstantDecay([3], [1.0, 0.0])
    optimizer = DPSGD(
        clip=QuantileClip(target, 0.1, 0.5), noise_multiplier=0, expected_batch_size=1
    )
    w = tf.Variable([0.0])

    @tf.function
    def step():
        optimizer.minimize(tf.ones([1]) * w[0], [w])

    path = [0.1]
    for _ in range(6):
        step()
        path.append(float(optimizer.clip_norm))
    expected = 0.1 * np.exp(0.5 * np.array([0, 1, 2, 3, 4, 4, 4]))
    np.testing.assert_allclose(path, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "argument, schedule, text",
    [
        ("noise_multiplier", Register(-5.0), "noise_multiplier at step 0"),
        ("noise_multiplier", Register(math.nan), "noise_multiplier at step 0"),
        ("clip", Register(0.0), "clip at step 0"),
        ("clip", lambda step: 1.0, "clip must be a number or a schedule"),
        ("noise_multiplier", lambda step: 1.0, "noise_multiplier must be a number"),
    ],
)
def test_schedules_that_start_out_of_range_are_refused(argument, schedule, text):
    options = {"clip": 1.0, "noise_multiplier": 1.0, argument: schedule}
    with pytest.raises(ValueError, match=text):
        DPSGD(expected_batch_size=4, **options)


VARIABLE = tf.Variable(2.0)
READS_MORE = {
    "variable": lambda step: VARIABLE + 0.0,
    "branch": lambda step: tf.cond(step > 3, lambda: VARIABLE + 0.0, lambda: 1.0),
    "random": lambda step: tf.random.uniform([]) + 1.0,
    "python": lambda step: tf.numpy_function(lambda: np.float32(2), [], tf.float32),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("reads", READS_MORE)
@pytest.mark.parametrize("argument", ["noise_multiplier", "clip", "learning_rate"])
def test_a_schedule_that_reads_more_than_the_step_is_refused(argument, reads):
    """Else the noise differs from the accounting, or a metric scales a release."""
    given = {"learning_rate": 0.1, "clip": 1.0, "noise_multiplier": 1.0}
    given[argument] = Of(READS_MORE[reads])
    text = f"{argument}=Of.* reads more than the step.*{argument}="
    with pytest.raises(ValueError, match=text):
        optimizer = DPSGD(expected_batch_size=4, **given)
        model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
        model.compile(optimizer, "mse")
        model.fit(*some_data(8, 3), verbose=0)


def test_a_quantile_that_reads_a_variable_is_refused():
    with pytest.raises(ValueError, match="target_quantile=Of"):
        QuantileClip(Of(lambda step: VARIABLE / 4))


def test_a_learning_rate_of_the_optimizers_own_counter_is_none():
    model = model_with(1.0, rate=Of(lambda step: 1.0 / tf.cast(step + 1, tf.float32)))
    model.fit(*some_data(8, 3), verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_a_table_of_the_steps_is_no_more_than_the_step():
    numbers = tf.linspace(4.0, 2.0, 500)
    z = model_with(Of(lambda step: numbers[step])).optimizer.noise_multiplier_at
    assert z(0) == 4.0 and z(499) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("allow_change", [False, True])
def test_a_schedule_that_was_changed_is_refused(allow_change):
    """The trace of the step still has the old noise, which must be counted."""
    schedule, drawn = Register(0.5), batches()
    budget = PrivacyBudget(math.inf, DELTA, drawn, allow_change=allow_change)
    model = model_with(schedule)
    model.fit(drawn, verbose=0, callbacks=[budget])
    schedule.z = 8.0
    with pytest.raises(PrivacyMismatchError, match="when the optimizer was made"):
        model.fit(drawn, verbose=0, callbacks=[budget])
    assert budget.ledger.steps == 5
    assert model.optimizer.noise_multiplier_at(0) == 0.5


class SetsCounter(tf.keras.callbacks.Callback):
    """Sets the step counter before a batch."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 4:
            self.model.optimizer.iterations.assign(0)


@pytest.mark.slow
def test_a_step_counter_that_is_put_back_before_a_step_is_found():
    """The noise is read before the step and accounted; the step has no less noise."""
    rising = schedules.PiecewiseConstantDecay([1], [0.5, 8.0])
    drawn, model = batches(), model_with(rising)
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    with pytest.raises(PrivacyMismatchError, match="noise of step 4.*is 0 now"):
        model.fit(drawn, verbose=0, callbacks=[budget, SetsCounter()])
    assert budget.ledger.steps >= 4
    # A callback before the budget sets the counter back: the step is counted with the
    # noise that it has.
    drawn, model = batches(), model_with(rising)
    budget = PrivacyBudget(math.inf, DELTA, drawn)
    model.fit(drawn, verbose=0, callbacks=[SetsCounter(), budget])
    found = [(phase.noise_multiplier, phase.steps) for phase in budget.ledger.phases]
    assert found == [(0.5, 2), (8.0, 2), (0.5, 1)]


def test_a_step_counter_that_is_put_back_within_the_step_is_found():
    """The step is counted with the noise that it had."""
    rising = schedules.PiecewiseConstantDecay([1], [0.5, 8.0])

    class Model(tf.keras.Sequential):
        def train_step(self, data):
            self.optimizer.iterations.assign(self.optimizer.iterations % 3)
            return super().train_step(data)

    model = Model([tf.keras.Input((3,)), L.Dense(1)])
    model.compile(model_with(rising).optimizer, "mse")
    drawn = batches()
    budget = PrivacyBudget(math.inf, DELTA, drawn, allow_outside_updates=True)
    with pytest.raises(PrivacyMismatchError, match="noise_multiplier 0.5"):
        model.fit(drawn, verbose=0, callbacks=[budget])
    assert budget.ledger.steps == 4
    # The refused step is counted as a full batch.
    assert (0.5, 1) in [
        (phase.noise_multiplier, phase.steps) for phase in budget.ledger.phases
    ]


def test_a_quantile_schedule_out_of_range_is_refused():
    with pytest.raises(ValueError, match="target_quantile at step 0"):
        QuantileClip(Register(1.5))


def test_schedules_come_back_from_json():
    optimizer = DPSGD(
        0.1,
        clip=LayerwiseClip({"a": QuantileClip(STEPWISE_QUANTILE), "b": STEPWISE}),
        noise_multiplier=STEPWISE,
        expected_batch_size=4,
    )
    config = json.loads(json.dumps(tf.keras.optimizers.serialize(optimizer)))
    again = tf.keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    assert again.clip == optimizer.clip and str(again.clip) == str(optimizer.clip)
    assert [again.noise_multiplier_at(i) for i in range(9)] == values(STEPWISE, 9)


STEPWISE_QUANTILE = schedules.PiecewiseConstantDecay([3], [0.9, 0.1])


def test_two_settings_that_follow_schedules_are_told_apart():
    first = FixedClip(STEPWISE)
    assert first == FixedClip(schedules.PiecewiseConstantDecay([3, 6], [2.0, 3.0, 1.5]))
    assert first != FixedClip(schedules.PiecewiseConstantDecay([3, 6], [2.0, 3.0, 1.0]))
    assert first != FixedClip(2.0)
