"""Wrong arguments raise errors that name the fix."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, OPTIMIZERS, L, flat, linear, some_data
from tests.stack import KERAS_3, keras2_only
from tfdpclip.clipping import QuantileClip
from tfdpclip.gradients import ExampleIsolationError, LossStructureError
from tfdpclip.keras import PrivacyPlan, multi_worker_strategy, privatize

SETTINGS = {"clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 8}
X, Y = some_data(8)

BAD = {
    "noise_multiplier": [math.nan, math.inf, -0.1, "1", True, None],
    "expected_batch_size": [math.nan, math.inf, -1, 0, "8", True, None],
    "clip": [math.nan, math.inf, -1.0, 0, "quantile", True, b"1", [1.0]],
    "accumulation_steps": [0, -1, 1.5, "2", True, None],
    "check_gradients": ["sometimes", None, True, 1],
    "gradient_memory": [0, -1, math.nan, "1", None],
    "seed": ["7", 1.5, True],
}


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_argument_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        DPSGD(0.1, **{**SETTINGS, name: value})


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", ["noise_multiplier", "expected_batch_size"])
def test_a_missing_argument_is_named_with_a_line_that_works(kind, name):
    settings = {k: v for k, v in SETTINGS.items() if k != name}
    with pytest.raises(ValueError, match=f"{kind.__name__} needs {name}, for example"):
        kind(0.1, **settings)
    with pytest.raises(ValueError, match="noise_multiplier and expected_batch_size"):
        kind(0.1)


def test_numbers_of_other_types_are_taken():
    optimizer = DPSGD(
        clip=np.float32(1.0),
        noise_multiplier=np.float64(1.0),
        expected_batch_size=np.int64(8),
    )
    assert optimizer.expected_batch_size == 8.0
    assert isinstance(optimizer.get_config()["noise_multiplier"], float)


def test_a_count_that_is_too_precise_is_refused_with_what_would_work():
    with pytest.raises(ValueError, match="too precise.*above.*records per step"):
        DPSGD(
            clip=QuantileClip(count_stddev=0.5),
            noise_multiplier=1.0,
            expected_batch_size=10,
        )
    with pytest.raises(
        ValueError, match="no clip norm can follow.* 2 records.*Automatic"
    ):
        DPSGD(clip=QuantileClip(), noise_multiplier=1.0, expected_batch_size=1)
    with pytest.raises(ValueError, match="count"):
        DPSGD(
            clip=QuantileClip(count_stddev=0.0),
            noise_multiplier=1.0,
            expected_batch_size=64,
        )


@pytest.mark.parametrize(
    "thing",
    ["sgd", None, object, DPSGD, L.Dense]
    + ([] if KERAS_3 else [tf.keras.optimizers.legacy.SGD]),
)
def test_privatize_takes_optimizer_classes_only(thing):
    with pytest.raises(ValueError, match="optimizer_class"):
        privatize(thing)


def trains_nothing():
    model = linear(bias=True)
    model.trainable = False
    return model


@pytest.mark.parametrize(
    "eager",
    [False, pytest.param(True, marks=keras2_only("run_eagerly=True is refused"))],
)
def test_a_model_with_nothing_to_train_is_refused(eager):
    model = trains_nothing()
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(DPSGD(0.1, **SETTINGS), loss, run_eagerly=eager)
    with pytest.raises(ValueError, match="no trainable variables"):
        model.fit(X, Y, verbose=0)


def compiled(model, loss="mse", **options):
    model.compile(DPSGD(0.1, **SETTINGS), loss, **options)
    return model


def normalised():
    layers = [tf.keras.Input((2,)), L.Dense(4), L.BatchNormalization(), L.Dense(1)]
    return tf.keras.Sequential(layers)


def normalised_images():
    layers = [
        tf.keras.Input((2,)),
        L.Dense(16),
        L.Reshape((4, 4, 1)),
        L.Conv2D(2, 2),
        L.BatchNormalization(),
        L.Flatten(),
        L.Dense(1),
    ]
    return tf.keras.Sequential(layers)


def normalised_last():
    layers = [tf.keras.Input((2,)), L.Dense(1), L.BatchNormalization(scale=False)]
    return tf.keras.Sequential(layers)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("loss", ["mse", "none"])
@pytest.mark.parametrize("make", [normalised, normalised_images, normalised_last])
@pytest.mark.thinned(3)
def test_batch_normalisation_in_training_mode_is_refused(make, loss, jit):
    if loss == "none":
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model = compiled(make(), loss, jit_compile=jit)
    before = flat(model.trainable_variables)
    with pytest.raises(ExampleIsolationError, match="GroupNormalization"):
        model.train_on_batch(X, Y)
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.slow
def test_a_masked_mean_over_the_batch_is_refused():
    layers = [L.Embedding(5, 3, mask_zero=True), L.LSTM(2, return_sequences=True)]
    model = tf.keras.Sequential([tf.keras.Input((4,)), *layers, L.Dense(1)])
    compiled(model)
    x = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 1, 1, 1]], np.int32)
    with pytest.raises((LossStructureError, ExampleIsolationError), match="mean"):
        model.train_on_batch(x, np.zeros((3, 4, 1), np.float32))


@pytest.mark.parametrize("reduced", [False, True])
def test_labels_without_the_last_axis_are_refused(reduced):
    """[B] against [B, 1] broadcasts to a [B, B] table of every pair of examples."""
    w = tf.Variable([[1.0], [2.0]])
    optimizer = DPSGD(0.1, **SETTINGS)

    @tf.function
    def step(x, y):
        loss = tf.square(x @ w - y)
        loss = tf.reduce_mean(loss) if reduced else loss
        optimizer.minimize(loss, [w])

    with pytest.raises((LossStructureError, ExampleIsolationError)):
        step(X, Y[:, 0])


COUPLED = {
    "variance": lambda p, y: tf.math.reduce_variance(p),
    "root": lambda p, y: tf.sqrt(tf.reduce_mean(tf.square(p - y))),
    "largest": lambda p, y: tf.reduce_max(tf.square(p - y)),
    "ratio": lambda p, y: tf.reduce_sum(tf.square(p - y)) / tf.reduce_sum(tf.square(y)),
    "product": lambda p, y: tf.reduce_mean(p) * tf.reduce_mean(p * y),
    "contrast": lambda p, y: tf.reduce_mean(tf.nn.log_softmax(p @ tf.transpose(y))),
    "squared": lambda p, y: tf.square(tf.reduce_mean(p)),
    "sorted": lambda p, y: tf.reduce_mean(tf.square(tf.sort(p, axis=0) - y)),
    "shuffled": lambda p, y: tf.reduce_mean(tf.square(p - tf.roll(p, 1, 0)) * y),
}


@pytest.mark.parametrize("signature", [8, None], ids=["static", "any"])
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.every_check
@pytest.mark.thinned(3)
def test_a_loss_that_combines_examples_is_refused(name, signature):
    model = linear(kernel="ones")
    optimizer = DPSGD(0.1, **SETTINGS)

    @tf.function(
        input_signature=[tf.TensorSpec([signature, 2]), tf.TensorSpec([signature, 1])]
    )
    def step(x, y):
        optimizer.minimize(COUPLED[name](model(x), y), model.trainable_variables)

    before = flat(model.trainable_variables)
    refusals = LossStructureError, ExampleIsolationError
    with pytest.raises((*refusals, tf.errors.InvalidArgumentError)) as caught:
        step(X, Y)
    if not isinstance(caught.value, refusals):
        assert "ExampleIsolationError" in str(caught.value)
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


def test_the_refusal_of_a_loss_shows_what_to_write():
    model = linear(kernel="ones")
    compiled(model, lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p))))
    with pytest.raises(ValueError, match=r"reduction='none'"):
        model.train_on_batch(X, Y)


@keras2_only("run_eagerly=True is refused, see held_loss_test.py")
def test_an_eager_scalar_says_what_to_do():
    model = compiled(linear(), run_eagerly=True)
    with pytest.raises(LossStructureError, match="reduction='none'"):
        model.train_on_batch(X, Y)


def test_eager_code_without_a_tape_says_what_to_do():
    optimizer, w = DPSGD(0.1, **SETTINGS), tf.Variable([1.0, 1.0])
    with pytest.raises(LossStructureError, match="tape"):
        optimizer.minimize(tf.linalg.matvec(X, w), [w])


def test_a_loss_that_does_not_depend_on_the_variables_is_refused():
    optimizer, w = DPSGD(0.1, **SETTINGS), tf.Variable([1.0, 1.0])

    @tf.function
    def step(x):
        optimizer.minimize(tf.reduce_sum(x, axis=1), [w])

    with pytest.raises(LossStructureError, match="does not depend"):
        step(X)


def test_a_loss_of_the_weights_alone_is_refused():
    optimizer, w = DPSGD(0.1, **SETTINGS), tf.Variable([1.0, 1.0])

    @tf.function
    def step():
        optimizer.minimize(tf.reduce_sum(w * w), [w])

    with pytest.raises(LossStructureError, match="no example"):
        step()


@pytest.mark.parametrize("first", [False, True])
def test_gradients_made_by_hand_are_refused(first):
    model = compiled(linear(kernel="ones"))
    if first:
        model.train_on_batch(X, Y)
    before = flat(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)

    with pytest.raises(ValueError, match="minimize"):
        step(X, Y)
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


def test_private_gradients_that_were_changed_are_refused():
    model, optimizer = linear(), DPSGD(0.1, **SETTINGS)

    @tf.function
    def step(x, y):
        loss = tf.square(model(x) - y)[:, 0]
        pairs = optimizer.compute_gradients(loss, model.trainable_variables)
        extra = tf.gradients(loss, model.trainable_variables)
        optimizer.apply_gradients(
            [(g + e, v) for (g, v), e in zip(pairs, extra, strict=True)]
        )

    with pytest.raises(ValueError, match="minimize"):
        step(X, Y)


def test_private_gradients_are_applied_once():
    model, optimizer = linear(), DPSGD(0.1, **SETTINGS)

    @tf.function
    def step(x, y):
        loss = tf.square(model(x) - y)[:, 0]
        pairs = optimizer.compute_gradients(loss, model.trainable_variables)
        optimizer.apply_gradients(pairs)
        optimizer.apply_gradients(pairs)

    with pytest.raises(ValueError, match="minimize"):
        step(X, Y)


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_float16_is_refused_with_the_type_to_use(policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        layers = [tf.keras.Input((2,)), L.Dense(2), L.Dense(1, dtype="float32")]
        with pytest.raises(ValueError, match="mixed_bfloat16"):
            compiled(tf.keras.Sequential(layers)).train_on_batch(X, Y)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@keras2_only("refused when it is made, see held_loss_test.py")
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_scale_optimizer_around_a_private_one_is_refused(dynamic):
    wrapped = tf.keras.mixed_precision.LossScaleOptimizer(
        DPSGD(0.1, **SETTINGS),
        dynamic=dynamic,
        initial_scale=1024.0,
    )
    model = linear(kernel="ones")
    model.compile(wrapped, "mse")
    before = flat(model.trainable_variables)
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        model.train_on_batch(X, Y)
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 trains on several workers")
def test_several_workers_are_refused():
    with pytest.raises(NotImplementedError, match="several workers.*tf_keras"):
        multi_worker_strategy()


@pytest.mark.parametrize(
    "arguments",
    [
        {"class_weight": "balanced"},
        {"class_weight": {"no": 1.0, "yes": 5.0}},
        {"validation_split": 0.1},
        {"y": np.zeros(60)},
        {"sample_weight": np.ones(60)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_fit_takes_beside_arrays_is_refused_beside_batches(arguments):
    """Keras refuses it: docs/data.md says so, and has the lines to write."""
    x = np.linspace(0, 1, 240, dtype="float32").reshape(60, 4)
    plan = PrivacyPlan(8, 1e-4, 60, batch_size=20, epochs=1)
    model = tf.keras.Sequential([L.Input((4,)), L.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(plan.optimizer(DPSGD, 0.1, clip=1.0), loss)
    batches = plan.batches((x, np.arange(60) % 2))
    with pytest.raises((ValueError, TypeError, AttributeError)):
        model.fit(batches, callbacks=plan.callbacks, verbose=0, **arguments)
    assert plan.ledger.steps == 0
