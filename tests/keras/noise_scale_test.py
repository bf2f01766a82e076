"""The noise on the gradient sum: its scale and independence; it never repeats.

False alarms: comparisons of standard deviations allow six standard errors (sd / sqrt(2
n)), which is 2e-9 each; correlations allow 6 / sqrt(n), also 2e-9.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    OPTIMIZERS,
    DPRecorder,
    L,
    flat,
    linear,
    mostly_slow,
    private_gradients,
)
from tests.stack import KERAS_3, MEAN
from tfdpclip.clipping import AutomaticClip, FixedClip, QuantileClip

pytestmark = pytest.mark.unchecked

WIDTH = 20_000
BATCH = 64.0
Z = 1.3

RULES = {
    "fixed": FixedClip(0.7),
    "normalize": FixedClip(0.7, normalize=True),
    "quantile": QuantileClip(initial_norm=0.7, learning_rate=3.0),
    "quantile_linear": QuantileClip(initial_norm=0.7, update="linear"),
    "quantile_normalize": QuantileClip(initial_norm=0.7, normalize=True),
    "automatic": AutomaticClip(),
}


def two_variables():
    return [tf.Variable(tf.zeros([WIDTH])), tf.Variable(tf.zeros([2, WIDTH // 2]))]


SIGNATURE = [tf.TensorSpec([None], tf.float32)]


def tiny_loss(variables):
    """Example i's gradient is x_i in one entry of each variable, else zero."""
    return lambda x: x * (variables[0][0] + variables[1][0, 0])


def z_g(rule, z=Z, batch=BATCH):
    """The split by hand: 1/z^2 = 1/z_g^2 + sum 1/(2 s)^2."""
    rest = z**-2 - sum((2 * s) ** -2 for s in rule.count_stddevs(batch))
    return rest**-0.5


def assert_stddev(sample, expected):
    assert np.std(sample) == pytest.approx(expected, rel=6 / math.sqrt(2 * sample.size))


def assert_independent(a, b):
    assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(a.size)


def every_pair():
    """Every rule with SGD, and every optimizer with one rule; the rest is slow."""
    for kind in OPTIMIZERS:
        for rule in RULES:
            quick = kind == "sgd" or rule == "quantile"
            marks = [] if quick else [pytest.mark.slow]
            pair = OPTIMIZERS[kind], RULES[rule]
            yield pytest.param(*pair, marks=marks, id=f"{kind}-{rule}")


@pytest.mark.parametrize("kind, rule", every_pair())
@pytest.mark.thinned(8)
def test_the_sum_gets_noise_of_z_g_times_the_sensitivity_and_then_the_clip_moves(
    kind, rule
):
    variables = two_variables()
    optimizer = kind(0.1, clip=rule, noise_multiplier=Z, expected_batch_size=BATCH)
    assert optimizer.gradient_noise_multiplier == pytest.approx(z_g(rule))
    step = private_gradients(optimizer, variables, SIGNATURE, tiny_loss(variables))
    drawn = []
    for _ in range(2):
        # Noise scaled by the clip norm after its update would show: a step moves the
        # clip norm by a factor exp(1.5) where the learning rate is 3.
        sensitivity = float(rule.sensitivity(optimizer.clip_state))
        noise = step(np.full([60], 1e-3, np.float32))
        noise = np.delete(noise, [0, WIDTH])
        assert_stddev(noise, z_g(rule) * sensitivity / BATCH)
        assert abs(noise.mean()) < 6 * noise.std() / math.sqrt(noise.size)
        drawn.append(noise)
    assert_independent(*drawn)
    assert_independent(drawn[0][: WIDTH - 1], drawn[0][WIDTH - 1 :])


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("physical", [[10], [8, 2], [2, 8], [10, 0], [3, 3, 4]])
@pytest.mark.thinned(4)
def test_a_logical_step_draws_noise_once_however_it_is_cut_up(physical, jit):
    variables = two_variables()
    optimizer = DPRecorder(
        clip=0.5,
        noise_multiplier=Z,
        expected_batch_size=10,
        accumulation_steps=len(physical),
    )
    loss = tiny_loss(variables)

    @tf.function(input_signature=SIGNATURE, jit_compile=jit)
    def step(x):
        optimizer.minimize(loss(x), variables)

    drawn = []
    for _ in range(2):
        for count in physical:
            step(tf.zeros([count]))
        drawn.append(flat(optimizer.seen))
        assert_stddev(drawn[-1], Z * 0.5 / 10)
    assert_independent(*drawn)
    assert int(optimizer.iterations) == 2


def test_the_base_class_gets_the_noised_gradient_from_minimize_too():
    variables = two_variables()
    optimizer = DPRecorder(clip=0.5, noise_multiplier=Z, expected_batch_size=10)

    @tf.function(input_signature=SIGNATURE)
    def step(x):
        optimizer.minimize(tiny_loss(variables)(x), variables)

    step(tf.ones([4]))
    seen = flat(optimizer.seen)
    assert_stddev(np.delete(seen, [0, WIDTH]), Z * 0.5 / 10)


@pytest.mark.slow
def test_noise_has_mean_zero_and_the_clipped_sum_is_what_remains():
    variables = two_variables()
    optimizer = DPSGD(clip=0.5, noise_multiplier=Z, expected_batch_size=10)
    step = private_gradients(optimizer, variables, SIGNATURE, tiny_loss(variables))
    found = [step(np.full([8], 100.0, np.float32))[0] for _ in range(400)]
    # Each of 8 examples adds 0.5 / sqrt(2) to this entry.
    expected = 8 * 0.5 / math.sqrt(2) / 10
    assert abs(np.mean(found) - expected) < 6 * Z * 0.5 / 10 / math.sqrt(400)


def test_noise_does_not_depend_on_how_many_examples_came():
    variables = two_variables()
    optimizer = DPSGD(clip=0.5, noise_multiplier=Z, expected_batch_size=10)
    step = private_gradients(optimizer, variables, SIGNATURE, tiny_loss(variables))
    for count in (0, 1, 10, 300):
        assert_stddev(step(np.zeros([count], np.float32)), Z * 0.5 / 10)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize(
    "mode",
    mostly_slow(["graph", "eager"], ["graph", "jit"] + ([] if KERAS_3 else ["eager"])),
)
@pytest.mark.thinned(3)
def test_every_way_of_running_adds_the_same_noise(mode, policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = linear(units=WIDTH // 2)
        optimizer = DPSGD(1.0, clip=0.5, noise_multiplier=Z, expected_batch_size=10)
        loss = tf.keras.losses.MeanSquaredError(
            reduction="none" if mode == "eager" else MEAN
        )
        model.compile(
            optimizer, loss, jit_compile=mode == "jit", run_eagerly=mode == "eager"
        )
        zeros = np.zeros([2, WIDTH // 2], np.float32)
        model.train_on_batch(np.zeros([2, 2], np.float32), zeros)
        assert_stddev(flat(model.trainable_variables), Z * 0.5 / 10)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_noise_is_the_same_inside_several_steps_per_execution():
    model = linear(units=WIDTH // 2)
    optimizer = DPSGD(1.0, clip=0.5, noise_multiplier=Z, expected_batch_size=10)
    model.compile(optimizer, "mse", steps_per_execution=4)
    x = np.zeros([8, 2], np.float32)
    model.fit(x, np.zeros([8, WIDTH // 2], np.float32), batch_size=2, verbose=0)
    # Four draws add up, so they were four.
    assert_stddev(flat(model.trainable_variables), 2 * Z * 0.5 / 10)
    assert int(optimizer.iterations) == 4


def test_a_regulariser_and_a_frozen_layer_leave_the_noise_as_it_is():
    frozen = L.Dense(3, trainable=False)
    head = L.Dense(WIDTH // 4, use_bias=False, kernel_regularizer="l2")
    model = tf.keras.Sequential([tf.keras.Input((3,)), frozen, head])
    optimizer = DPRecorder(clip=0.5, noise_multiplier=Z, expected_batch_size=10)
    model.compile(optimizer, "mse")
    head.kernel.assign(tf.zeros_like(head.kernel))
    zeros = np.zeros([2, WIDTH // 4], np.float32)
    model.train_on_batch(np.zeros([2, 3], np.float32), zeros)
    assert_stddev(flat(optimizer.seen), Z * 0.5 / 10)


def test_an_unused_variable_gets_no_gradient_and_a_used_one_its_noise():
    used, unused = tf.Variable(tf.zeros([WIDTH])), tf.Variable(tf.ones([3]))
    optimizer = DPSGD(1.0, clip=0.5, noise_multiplier=Z, expected_batch_size=10)

    @tf.function(input_signature=SIGNATURE)
    def step(x):
        optimizer.minimize(x * used[0], [used, unused])

    step(tf.ones([4]))
    assert_stddev(used.numpy()[1:], Z * 0.5 / 10)
    assert unused.numpy().tolist() == [1, 1, 1]


def steps(optimizer, variables, count=1):
    """Weight changes of `count` steps with learning rate 1: noise alone."""
    step = tf.function(
        lambda x: optimizer.minimize(tiny_loss(variables)(x), variables),
        input_signature=SIGNATURE,
    )
    changes = []
    for _ in range(count):
        before = flat(variables)
        step(tf.zeros([2]))
        changes.append(flat(variables) - before)
    return changes


def make(seed=None, clip=0.5):
    return DPSGD(1.0, clip=clip, noise_multiplier=Z, expected_batch_size=10, seed=seed)


@pytest.mark.slow
def test_noise_does_not_repeat_after_a_checkpoint_is_restored(tmp_path):
    variables, optimizer = two_variables(), make()
    steps(optimizer, variables)
    saved = tf.train.Checkpoint(optimizer=optimizer, v=variables)
    path = saved.save(str(tmp_path / "c"))
    (after,) = steps(optimizer, variables)
    # The same process goes back ...
    saved.restore(path)
    (again,) = steps(optimizer, variables)
    assert_independent(after, again)
    # ... and so does a new process.
    fresh, other = two_variables(), make()
    tf.train.Checkpoint(optimizer=other, v=fresh).restore(path)
    (third,) = steps(other, fresh)
    assert_independent(after, third)
    assert_stddev(third, Z * 0.5 / 10)


@pytest.mark.slow
def test_noise_does_not_repeat_after_a_model_is_loaded(tmp_path):
    x = np.zeros([2, 2], np.float32)
    y = np.zeros([2, 5000], np.float32)
    model = linear(units=5000)
    model.compile(make(), "mse")
    model.train_on_batch(x, y)
    path = str(tmp_path / "model.keras")
    model.save(path)
    changes = []
    for one in (model, *(tf.keras.models.load_model(path) for _ in range(2))):
        before = flat(one.trainable_variables)
        one.train_on_batch(x, y)
        changes.append(flat(one.trainable_variables) - before)
        assert_stddev(changes[-1], Z * 0.5 / 10)
    assert_independent(changes[0], changes[1])
    assert_independent(changes[0], changes[2])
    assert_independent(changes[1], changes[2])


@pytest.mark.slow
def test_noise_does_not_repeat_between_runs_of_one_configuration():
    optimizer = make()
    (first,) = steps(optimizer, two_variables())
    (second,) = steps(DPSGD.from_config(optimizer.get_config()), two_variables())
    assert_independent(first, second)


@pytest.mark.slow
def test_a_seed_reproduces_a_run():
    first, second = (steps(make(seed=3), two_variables(), 2) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert_independent(first[0], first[1])
    assert_independent(first[0], steps(make(seed=4), two_variables())[0])


def test_without_noise_there_is_exactly_none():
    optimizer = DPSGD(1.0, clip=0.5, noise_multiplier=0, expected_batch_size=10)
    (change,) = steps(optimizer, two_variables())
    assert np.all(change == 0)
