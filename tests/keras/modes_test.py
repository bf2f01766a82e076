"""Ways of running a step and of calling it, by plain arithmetic; noise off."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    OPTIMIZERS,
    DPAdam,
    DPRecorder,
    L,
    example,
    expected_sum,
    flat,
    gradients_one_at_a_time,
    linear,
    mostly_slow,
    some_data,
)
from tests.stack import keras2_only
from tfdpclip.clipping import AutomaticClip, FixedClip, QuantileClip

RULE = FixedClip(0.4)
CONFIGURATION = {"clip": RULE, "noise_multiplier": 0, "expected_batch_size": 8}
X, Y = some_data(8, 3)


def mlp():
    tf.keras.utils.set_random_seed(5)
    layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(1)]
    return tf.keras.Sequential(layers)


def clipped_mean(model, x=X, y=Y, rule=RULE):
    """The right answer, one example at a time."""

    def loss_of(i):
        predictions = model(example(x, i), training=True)
        return tf.reduce_mean(tf.square(predictions - example(y, i)))

    variables = model.trainable_variables
    gradients = gradients_one_at_a_time(loss_of, variables, len(x))
    return expected_sum(rule, gradients) / 8


def moved(model, act):
    before = flat(model.trainable_variables)
    act()
    return before - flat(model.trainable_variables)


def assert_close(a, b, rtol=1e-4):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


def tensor_loss(model, x, y, kind):
    each = tf.reduce_mean(tf.square(model(x, training=True) - y), axis=1)
    return tf.reduce_mean(each) if kind == "scalar" else each


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("tape", mostly_slow([True], [True, False]))
@pytest.mark.parametrize("shape", [8, None])
@pytest.mark.thinned(3)
def test_a_custom_loop(jit, kind, tape, shape):
    model, optimizer = mlp(), DPSGD(1.0, **CONFIGURATION)
    expected = clipped_mean(model)

    @tf.function(
        input_signature=[tf.TensorSpec([shape, 3]), tf.TensorSpec([shape, 1])],
        jit_compile=jit,
    )
    def step(x, y):
        if tape:
            with tf.GradientTape() as recorded:
                loss = tensor_loss(model, x, y, kind)
            optimizer.minimize(loss, model.trainable_variables, tape=recorded)
        else:
            loss = tensor_loss(model, x, y, kind)
            optimizer.minimize(loss, model.trainable_variables)
        return loss

    assert_close(moved(model, lambda: step(X, Y)), expected)
    assert int(optimizer.iterations) == 1


def test_a_callable_loss():
    model, optimizer = mlp(), DPSGD(1.0, **CONFIGURATION)
    expected = clipped_mean(model)

    @tf.function
    def step(x, y):
        optimizer.minimize(
            lambda: tensor_loss(model, x, y, "scalar"),
            lambda: model.trainable_variables,
        )

    assert_close(moved(model, lambda: step(X, Y)), expected)


@pytest.mark.filterwarnings("ignore:Eager steps")
@pytest.mark.parametrize("tape", [False, True])
def test_eager_code_takes_one_loss_per_example(tape):
    model, optimizer = mlp(), DPSGD(1.0, **CONFIGURATION)
    expected = clipped_mean(model)

    def act():
        if tape:
            with tf.GradientTape() as recorded:
                loss = tensor_loss(model, X, Y, "vector")
            optimizer.minimize(loss, model.trainable_variables, tape=recorded)
        else:
            optimizer.minimize(
                lambda: tensor_loss(model, X, Y, "vector"), model.trainable_variables
            )

    assert_close(moved(model, act), expected)


@pytest.mark.filterwarnings("ignore:Eager steps")
@keras2_only("run_eagerly=True is refused, see held_loss_test.py")
def test_run_eagerly():
    model = mlp()
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(DPSGD(1.0, **CONFIGURATION), loss, run_eagerly=True)
    expected = clipped_mean(model)
    assert_close(moved(model, lambda: model.train_on_batch(X, Y)), expected)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("steps", mostly_slow([2], [1, 2, 3]))
@pytest.mark.slow
def test_steps_per_execution_and_jit_change_nothing(steps, jit):
    results = []
    for options in ({}, {"steps_per_execution": steps, "jit_compile": jit}):
        model = mlp()
        optimizer = DPSGD(
            0.5, clip=QuantileClip(0.5, 0.3), noise_multiplier=0, expected_batch_size=2
        )
        model.compile(optimizer, "mse", **options)
        model.fit(X[:6], Y[:6], batch_size=2, shuffle=False, verbose=0)
        results.append((flat(model.trainable_variables), float(optimizer.clip_norm)))
        assert int(optimizer.iterations) == 3
    assert_close(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)


@pytest.mark.slow
def test_a_short_last_batch_counts_as_it_is():
    model = mlp()
    model.compile(DPSGD(1.0, **CONFIGURATION), "mse")
    first, second = mlp(), clipped_mean(mlp(), X[:5], Y[:5])
    assert_close(
        moved(model, lambda: model.fit(X[:5], Y[:5], batch_size=8, verbose=0)), second
    )
    assert first is not model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", mostly_slow(["adamw", "rmsprop"], [n for n in OPTIMIZERS if n != "nadam"])
)
@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
def test_what_follows_the_gradient_is_the_base_classes_own(name, jit):
    """Gradients far within the clip: private and plain training are the same."""
    plain_class = OPTIMIZERS[name].__bases__[1]
    results = []
    for kind, arguments in (
        (OPTIMIZERS[name], {**CONFIGURATION, "clip": 1e6}),
        (plain_class, {}),
    ):
        model = mlp()
        model.compile(kind(0.1, **arguments), "mse", jit_compile=jit)
        for _ in range(3):
            model.train_on_batch(X, Y)
        results.append(flat(model.trainable_variables))
    assert_close(*results)


@pytest.mark.slow
def test_momentum_decay_averaging_and_clipvalue_are_passed_on():
    results = []
    shared = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "use_ema": True}
    shared.update(clipvalue=0.05, ema_momentum=0.5)
    for kind, arguments in (
        (DPSGD, {**CONFIGURATION, "clip": 1e6}),
        (tf.keras.optimizers.SGD, {}),
    ):
        model = mlp()
        model.compile(kind(0.1, **shared, **arguments), "mse")
        model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        results.append(flat(model.trainable_variables))
    assert_close(*results)


@pytest.mark.slow
def test_normalized_and_automatic_clips_divide_by_what_they_say():
    for rule in (FixedClip(0.4, normalize=True), AutomaticClip(0.05)):
        model = mlp()
        optimizer = DPSGD(1.0, clip=rule, noise_multiplier=0, expected_batch_size=8)
        model.compile(optimizer, "mse")
        expected = clipped_mean(model, rule=rule)
        assert_close(moved(model, lambda m=model: m.train_on_batch(X, Y)), expected)


@pytest.mark.parametrize("k", [1, 2])
def test_a_schedule_advances_once_per_logical_step(k):
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [1.0, 0.1, 0.01]
    )
    model = linear(inputs=1)
    optimizer = DPSGD(
        schedule,
        clip=1.0,
        noise_multiplier=0,
        expected_batch_size=2,
        accumulation_steps=k,
    )
    model.compile(optimizer, lambda y, p: p[:, 0])
    x = np.full((6, 1), 9.0, np.float32)
    model.fit(x, x, batch_size=2 // k, verbose=0)
    assert int(optimizer.iterations) == 3
    np.testing.assert_allclose(model.get_weights()[0], -1.11, rtol=1e-5)


def test_the_learning_rate_can_be_changed_in_a_callback():
    rates = [1.0, 0.1, 0.0]
    model = linear(inputs=1)
    optimizer = DPSGD(5.0, clip=1.0, noise_multiplier=0, expected_batch_size=2)
    model.compile(optimizer, lambda y, p: p[:, 0])
    x = np.full((2, 1), 9.0, np.float32)
    scheduler = tf.keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])
    model.fit(x, x, batch_size=2, epochs=3, verbose=0, callbacks=[scheduler])
    np.testing.assert_allclose(model.get_weights()[0], -1.1, rtol=1e-5)
    optimizer.learning_rate = 2.0
    model.train_on_batch(x, x)
    np.testing.assert_allclose(model.get_weights()[0], -3.1, rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_mixed_bfloat16(jit):
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = mlp()
        model.compile(DPSGD(1.0, **CONFIGURATION), "mse", jit_compile=jit)
        assert model.trainable_variables[0].dtype == tf.float32
        change = moved(model, lambda: model.train_on_batch(X, Y))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    expected = clipped_mean(mlp())
    assert np.linalg.norm(change - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
@pytest.mark.thinned(3)
def test_one_coarse_example_stays_within_the_clip(policy, jit):
    """In bfloat16 the norm is measured on the very gradient that is summed."""
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = mlp()
        model.build((None, 3))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    optimizer = DPRecorder(clip=1e-3, noise_multiplier=0, expected_batch_size=1)
    for v in model.trainable_variables:
        v.assign(v + 0.3)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])], jit_compile=jit)
    def step(x):
        loss = tf.reduce_sum(tf.cast(model(x), tf.float32), axis=1)
        optimizer.minimize(loss, model.trainable_variables)

    # The base class gets variables of type bfloat16 rounded after the noise.
    slack = 1e-5 if policy == "mixed_bfloat16" else 2**-8
    for i in range(8):
        step(X[i : i + 1])
        assert np.linalg.norm(flat(optimizer.seen)) <= 1e-3 * (1 + slack)


@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.parametrize("k", [1, 2])
def test_float64(jit, k):
    tf.keras.mixed_precision.set_global_policy("float64")
    try:
        model = mlp()
        optimizer = DPSGD(1.0, **CONFIGURATION, accumulation_steps=k)
        model.compile(optimizer, "mse", jit_compile=jit)
        x, y = X.astype("float64"), Y.astype("float64")
        expected = clipped_mean(model, x, y)

        def act():
            model.fit(x, y, batch_size=8 // k, shuffle=False, verbose=0)

        assert_close(moved(model, act), expected)
        assert model.trainable_variables[0].dtype == tf.float64
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.parametrize("name", mostly_slow(["LSTM"], ["LSTM", "GRU"]))
@pytest.mark.slow
def test_recurrent_layers_under_jit(name):
    tf.keras.utils.set_random_seed(5)
    layers = [tf.keras.Input((4, 3)), getattr(L, name)(3), L.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile(DPSGD(1.0, **CONFIGURATION), "mse", jit_compile=True)
    x = np.random.default_rng(0).standard_normal((8, 4, 3)).astype("float32")
    expected = clipped_mean(model, x)
    assert_close(moved(model, lambda: model.train_on_batch(x, Y)), expected)


@pytest.mark.slow
def test_compute_gradients_and_apply_gradients_are_one_step():
    model, optimizer = mlp(), DPAdam(0.1, **CONFIGURATION)
    twin, other = mlp(), DPAdam(0.1, **CONFIGURATION)

    @tf.function
    def in_two(x, y):
        loss = tensor_loss(model, x, y, "scalar")
        pairs = optimizer.compute_gradients(loss, model.trainable_variables)
        optimizer.apply_gradients(pairs)

    @tf.function
    def in_one(x, y):
        loss = tensor_loss(twin, x, y, "scalar")
        other.minimize(loss, twin.trainable_variables)

    for _ in range(2):
        in_two(X, Y)
        in_one(X, Y)
    assert_close(flat(model.trainable_variables), flat(twin.trainable_variables))


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_an_optimizer_that_was_built_first_can_be_traced_late(k):
    model = mlp()
    optimizer = DPAdam(0.1, **CONFIGURATION, accumulation_steps=k)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y, train):
        loss = tensor_loss(model, x, y, "scalar")
        if train:
            optimizer.minimize(loss, model.trainable_variables)
        return loss

    step(X, Y, False)
    step(X, Y, True)
    step(X, Y, True)
    assert int(optimizer.iterations) == 2 // k


@pytest.mark.slow
def test_data_that_a_function_closes_over():
    model, optimizer = mlp(), DPSGD(1.0, **CONFIGURATION)
    expected = clipped_mean(model)
    x, y = tf.constant(X), tf.constant(Y)

    @tf.function
    def step():
        loss = tensor_loss(model, x, y, "scalar")
        optimizer.minimize(loss, model.trainable_variables)

    assert_close(moved(model, step), expected)


@pytest.mark.slow
def test_two_functions_can_share_an_optimizer():
    """Batches of two shapes, each traced on its own."""
    model, optimizer = mlp(), DPSGD(1.0, **CONFIGURATION)

    @tf.function
    def step(x, y):
        loss = tensor_loss(model, x, y, "scalar")
        optimizer.minimize(loss, model.trainable_variables)

    for count in (8, 5, 8):
        expected = clipped_mean(model, X[:count], Y[:count])
        assert_close(moved(model, lambda n=count: step(X[:n], Y[:n])), expected)


@pytest.mark.slow
def test_the_clip_norm_can_be_read_while_training():
    rule = QuantileClip(0.5, 0.3)
    optimizer = DPSGD(0.5, clip=rule, noise_multiplier=0, expected_batch_size=2)
    model = mlp()
    model.compile(optimizer, "mse")
    seen = []
    note = tf.keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append(float(optimizer.clip_norm))
    )
    model.fit(X, Y, batch_size=2, verbose=0, callbacks=[note])
    assert len(seen) == 4 and len(set(seen)) > 1
    inside = tf.function(lambda: optimizer.clip_norm)
    assert float(inside()) == seen[-1]
