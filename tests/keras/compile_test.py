"""Ordinary compile and fit: every loss against one example at a time, noise off."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import (
    DPSGD,
    L,
    example,
    expected_sum,
    flat,
    gradients_one_at_a_time,
    mostly_slow,
)
from tests.stack import KERAS_3, MEAN, keras2_only
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import ExampleIsolationError, LossStructureError
from tfdpclip.keras import PrivacyBudget
from tfdpclip.sampling import Poisson

COUNT, EXPECTED = 7, 10
RULE = FixedClip(0.3)


def tokens(count=COUNT):
    return np.random.default_rng(7).integers(1, 6, size=(count, 4)).astype("int32")


def numbers(*shape, seed=0, count=COUNT):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape)).astype("float32")


def classes(*shape, of=3):
    return np.random.default_rng(3).integers(of, size=(COUNT, *shape)).astype("int32")


def mlp(units=1, activation=None, **options):
    layers = [L.Dense(4, "tanh", **options), L.Dense(units, activation)]
    return tf.keras.Sequential([tf.keras.Input((3,)), *layers])


def check(
    model,
    loss,
    x,
    y,
    *,
    weight=None,
    class_weight=None,
    regulariser=None,
    scale=1.0,
    static=True,
    **options,
):
    """Compares a step of fit with the clipped gradients of single examples.

    Args:
      weight: sample weights, or the weights that `class_weight` should give.
      regulariser: computes the part of the loss that depends on no example.
      scale: the factor on each example's loss, for a summed loss.
    """
    tf.keras.utils.set_random_seed(4)
    optimizer = DPSGD(1.0, clip=RULE, noise_multiplier=0, expected_batch_size=EXPECTED)
    jit = options.pop("jit_compile", False)
    model.compile(optimizer, loss, jit_compile=jit, **options)
    start = model.get_weights()
    variables = model.trainable_variables

    def loss_of(i):
        xi, yi = example(x, i), example(y, i)
        wi = None if weight is None else example(weight, i)
        predictions = model(xi, training=True)
        value = tf.reduce_sum(model.compute_loss(xi, yi, predictions, wi))
        return scale * (value - (regulariser() if regulariser else 0.0))

    gradients = gradients_one_at_a_time(loss_of, variables, COUNT)
    total = expected_sum(RULE, gradients) / EXPECTED
    if regulariser:
        with tf.GradientTape() as tape:
            value = regulariser()
        total = total + flat(tape.gradient(value, variables), variables)
    model.set_weights(start)
    before = flat(variables)
    given = None if class_weight is not None else weight
    if static:
        model.train_on_batch(x, y, sample_weight=given, class_weight=class_weight)
    else:
        data = (x, y) if given is None else (x, y, given)
        data = tf.data.Dataset.from_tensor_slices(data).batch(COUNT)
        model.fit(data, verbose=0, class_weight=class_weight)
    norms = np.linalg.norm(gradients, axis=1)
    # Some are clipped and some are not, or the test shows little.
    assert norms.max() > float(RULE.norm)
    np.testing.assert_allclose(before - flat(variables), total, rtol=1e-4, atol=2e-6)


both_shapes = pytest.mark.parametrize("static", [True, False], ids=["static", "any"])

LOSSES = {
    "mse": (1, None, lambda: numbers(1, seed=1)),
    "mae": (2, None, lambda: numbers(2, seed=1)),
    "huber": (1, None, lambda: numbers(1, seed=1)),
    "log_cosh": (1, None, lambda: numbers(1, seed=1)),
    "binary_crossentropy": (1, "sigmoid", lambda: classes(1, of=2)),
    "sparse_categorical_crossentropy": (3, "softmax", lambda: classes()),
    "categorical_crossentropy": (3, "softmax", lambda: np.eye(3)[classes()]),
    "kl_divergence": (3, "softmax", lambda: np.eye(3)[classes()]),
    "poisson": (1, "softplus", lambda: classes(1)),
    "cosine_similarity": (3, None, lambda: numbers(3, seed=1)),
}
QUICK = [name for name in LOSSES if name not in ("huber", "log_cosh", "poisson")]


@pytest.mark.parametrize("static", mostly_slow([True], [True, False]))
@pytest.mark.parametrize("name", mostly_slow(QUICK, LOSSES))
@pytest.mark.thinned(6)
def test_a_loss_by_name(name, static):
    units, activation, labels = LOSSES[name]
    x = 3 * numbers(3)
    check(mlp(units, activation), name, x, labels().astype("float32"), static=static)


@both_shapes
@pytest.mark.parametrize("reduction", ["none", "sum", MEAN])
@pytest.mark.parametrize("weighted", mostly_slow([True], [True, False]))
@pytest.mark.thinned(4)
def test_every_reduction(reduction, weighted, static):
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    weight = np.linspace(0.2, 3, COUNT, dtype=np.float32) if weighted else None
    # A sum is taken for the mean times the public number of examples.
    scale = EXPECTED if reduction == "sum" else 1.0
    x, y = numbers(3), numbers(1, seed=1)
    check(mlp(), loss, x, y, weight=weight, scale=scale, static=static)


@pytest.mark.slow
@both_shapes
def test_class_weights(static):
    y = classes()
    by_class = {0: 0.5, 1: 2.0, 2: 1.0}
    weight = np.array([by_class[int(c)] for c in y], np.float32)
    loss = "sparse_categorical_crossentropy"
    check(
        mlp(3, "softmax"),
        loss,
        3 * numbers(3),
        y,
        weight=weight,
        class_weight=by_class,
        static=static,
    )


def two_outputs():
    x = tf.keras.Input((3,))
    hidden = L.Dense(4, "tanh")(x)
    outputs = {"a": L.Dense(1, name="a")(hidden), "b": L.Dense(2, name="b")(hidden)}
    return tf.keras.Model(x, outputs)


@both_shapes
@pytest.mark.parametrize("loss_weights", [None, {"a": 0.3, "b": 2.0}])
@pytest.mark.slow
def test_several_outputs(loss_weights, static):
    y = {"a": numbers(1, seed=1), "b": numbers(2, seed=2)}
    loss = {"a": "mse", "b": "mae"}
    check(two_outputs(), loss, numbers(3), y, loss_weights=loss_weights, static=static)


def test_sample_weights_for_several_outputs():
    y = {"a": numbers(1, seed=1), "b": numbers(2, seed=2)}
    one, two = np.linspace(0, 2, COUNT), np.linspace(2, 0, COUNT)
    weight = {"a": one.astype("float32"), "b": two.astype("float32")}
    check(two_outputs(), {"a": "mse", "b": "mae"}, numbers(3), y, weight=weight)


def test_weights_of_outputs_are_none_of_batches_with_the_same_outputs():
    """The weights of the first output were taken for the weights of an element."""
    y = {"a": numbers(1, seed=1), "b": numbers(2, seed=2)}
    batches = Poisson(0.5).batches((numbers(3), y))
    one, two = np.linspace(0, 2, COUNT), np.linspace(2, 0, COUNT)
    weight = {"a": one.astype("float32"), "b": two.astype("float32")}
    check(two_outputs(), {"a": "mse", "b": "mae"}, numbers(3), y, weight=weight)
    assert batches.scheme.rate == 0.5  # Alive until now.


@pytest.mark.slow
def test_a_weight_of_zero_for_one_output_is_not_padding():
    y = {"a": numbers(1, seed=1), "b": numbers(2, seed=2)}
    weight = {"a": np.array([1, 0, 0, 1, 0, 1, 1], np.float32)}
    if KERAS_3:
        weight["b"] = None
    model = two_outputs()
    optimizer = DPSGD(1.0, clip=1e6, noise_multiplier=0, expected_batch_size=COUNT)
    plain = tf.keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    for one, kind in ((model, optimizer), (plain, tf.keras.optimizers.SGD(1.0))):
        one.compile(kind, {"a": "mse", "b": "mse"})
        one.train_on_batch(numbers(3), y, sample_weight=weight)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_weights_of_zero_take_an_example_out():
    """Examples of weight 0 are padding, whatever their data."""
    x, y = numbers(3), numbers(1, seed=1)
    x[[1, 4]] *= 1e3
    weight = np.array([1, 0, 1, 1, 0, 1, 1], np.float32)
    check(mlp(), "mse", x, y, weight=weight)


@both_shapes
@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
def test_weight_decay_is_added_once_and_is_not_clipped(static, jit):
    model = mlp(kernel_regularizer=tf.keras.regularizers.L1L2(0.3, 4.0))
    kernel = model.layers[0].kernel

    def regulariser():
        return tf.reduce_sum(0.3 * tf.abs(kernel) + 4.0 * tf.square(kernel))

    x, y = numbers(3), numbers(1, seed=1)
    options = {"static": static, "jit_compile": jit}
    check(model, "mse", x, y, regulariser=regulariser, **options)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_weight_decay_is_the_same_however_long_a_logical_step_takes(scale):
    for k in (1, 3):
        model = tf.keras.Sequential(
            [tf.keras.Input((3,)), L.Dense(1, use_bias=False, kernel_regularizer="l2")]
        )
        kernel = model.trainable_variables[0]
        kernel.assign(scale * tf.ones_like(kernel))
        optimizer = DPSGD(
            1.0,
            clip=1e-6,
            noise_multiplier=0,
            expected_batch_size=3,
            accumulation_steps=k,
        )
        model.compile(optimizer, "mse")
        x = np.zeros((3, 3), np.float32)
        model.fit(x, x[:, :1], batch_size=3 // k, verbose=0)
        # The default L2 factor is 0.01.
        np.testing.assert_allclose(kernel.numpy(), 0.98 * scale, rtol=1e-5)


@pytest.mark.parametrize("penalty", mostly_slow(["l2"], ["l1", "l2", "l1_l2"]))
@both_shapes
def test_an_activity_regulariser_belongs_to_each_example(penalty, static):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((3,)),
            L.Dense(4, "tanh", activity_regularizer=penalty),
            L.Dense(1),
        ]
    )
    check(model, "mse", numbers(3), numbers(1, seed=1), static=static)


@pytest.mark.slow
def test_padding_is_padding_for_an_activity_regulariser_as_well():
    """The regulariser's term has no weights; the loss's weights mark the padding."""
    moved = []
    for padding in (0, 5):
        tf.keras.utils.set_random_seed(4)
        hidden = L.Dense(4, "tanh", activity_regularizer="l2")
        model = tf.keras.Sequential([tf.keras.Input((3,)), hidden, L.Dense(1)])
        optimizer = DPSGD(1.0, clip=RULE, noise_multiplier=0, expected_batch_size=1)
        model.compile(optimizer, "mse")
        weight = np.repeat([1.0, 0.0], [COUNT, padding]).astype("float32")
        x, y = numbers(3, count=COUNT + padding), numbers(1, count=COUNT + padding)
        x[:COUNT], y[:COUNT] = numbers(3), numbers(1, seed=1)
        start = flat(model.trainable_variables)
        model.train_on_batch(x, y, sample_weight=weight)
        moved.append(flat(model.trainable_variables) - start)
    np.testing.assert_allclose(*moved, rtol=1e-4, atol=1e-5)


class Penalised(tf.keras.Model):
    """Adds losses in `call`: per example, their mean, or of the weights alone."""

    def __init__(self, kind):
        super().__init__()
        self.hidden, self.out = L.Dense(4, "tanh"), L.Dense(1)
        self.kind = kind

    def of_weights(self):
        return tf.reduce_sum(tf.square(self.out.kernel))

    def call(self, x):
        hidden = self.hidden(x)
        outputs = self.out(hidden)
        each = tf.reduce_sum(tf.square(hidden), axis=1)
        if self.kind == "each":
            self.add_loss(each)
        elif self.kind == "mean":
            self.add_loss(tf.reduce_mean(each))
        elif self.kind == "mean_scaled":
            self.add_loss(0.5 * tf.reduce_mean(tf.square(hidden)))
        else:
            self.add_loss(self.of_weights())
        return outputs


@both_shapes
@pytest.mark.parametrize("kind", ["mean", "mean_scaled", "weights"])
@pytest.mark.thinned(3)
def test_add_loss(kind, static):
    model = Penalised(kind)
    model(numbers(3))
    regulariser = model.of_weights if kind == "weights" else None
    x, y = numbers(3), numbers(1, seed=1)
    check(model, "mse", x, y, regulariser=regulariser, static=static)


@keras2_only("Keras 3 adds losses of any shapes")
def test_a_loss_for_each_example_that_is_added_is_named_with_the_line():
    batches = Poisson(0.5).batches((numbers(3), numbers(1, seed=1)))
    model = Penalised("each")
    options = {"noise_multiplier": 1.0, "expected_batch_size": COUNT / 2}
    model.compile(DPSGD(0.1, clip=RULE, **options), "mse")
    budget = PrivacyBudget(math.inf, 1e-5, batches)
    with pytest.raises(LossStructureError, match=r"add_loss\(tf\.reduce_mean\(losses"):
        model.fit(batches, verbose=0, callbacks=[budget])


def sequence_model(units=1, activation=None):
    layers = [L.Embedding(6, 3), L.Conv1D(4, 2, padding="causal", activation="tanh")]
    head = L.Dense(units, activation)
    return tf.keras.Sequential([tf.keras.Input((4,), dtype="int32"), *layers, head])


@pytest.mark.slow
@both_shapes
@pytest.mark.parametrize("weighted", mostly_slow(["step"], [None, "example", "step"]))
def test_sequence_losses(weighted, static):
    shape = {"example": (COUNT, 1), "step": (COUNT, 4)}.get(weighted)
    weight = None
    if shape:
        weight = np.linspace(0, 2, shape[0] * shape[1]).reshape(shape)
        weight = weight.astype("float32")
    model = sequence_model(3, "softmax")
    loss = "sparse_categorical_crossentropy"
    check(model, loss, tokens(), classes(4), weight=weight, static=static)


@both_shapes
@pytest.mark.parametrize("binary", [True, False], ids=["0_1", "-1_1"])
@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
@pytest.mark.thinned(6)
def test_hinge_converts_each_label_by_itself(loss, binary, static):
    y = classes(1, of=2).astype("float32")
    check(mlp(), loss, 3 * numbers(3), y if binary else 2 * y - 1, static=static)


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
@pytest.mark.thinned(2)
def test_another_label_of_one_example_changes_nobody_elses(loss):
    """If a label were 5, Keras would convert none of the batch's labels to -1 and 1."""
    x, y = 3 * numbers(3), classes(1, of=2).astype("float32")
    y[0], moved = 5, []
    for labels in (y, np.where(np.arange(COUNT)[:, None] == 0, 1, y)):
        tf.keras.utils.set_random_seed(4)
        model = mlp()
        model.compile(
            DPSGD(1.0, clip=RULE, noise_multiplier=0, expected_batch_size=1), loss
        )
        start = flat(model.trainable_variables)
        model.train_on_batch(x, labels)
        moved.append(flat(model.trainable_variables) - start)
    assert np.linalg.norm(moved[0] - moved[1]) <= 2 * float(RULE.norm) + 1e-5


@pytest.mark.parametrize("jit", [False, True])
def test_a_loss_written_by_hand(jit):
    def pinball(y, p):
        return tf.reduce_mean(tf.maximum(0.7 * (y - p), 0.3 * (p - y)), axis=-1)

    check(mlp(), pinball, 3 * numbers(3), numbers(1, seed=1), jit_compile=jit)


def test_shared_and_frozen_layers():
    shared = L.Dense(3, "tanh")
    frozen = L.Dense(3, trainable=False)
    layers = [tf.keras.Input((3,)), shared, frozen, shared, L.Dense(1)]
    check(tf.keras.Sequential(layers), "mse", 2 * numbers(3), numbers(1, seed=1))


@pytest.mark.slow
def test_frozen_batch_normalisation():
    norm = L.BatchNormalization(trainable=False)
    layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), norm, L.Dense(1)]
    check(tf.keras.Sequential(layers), "mse", 2 * numbers(3), numbers(1, seed=1))


def test_metrics_and_weighted_metrics_are_left_alone():
    model = mlp(3, "softmax")
    optimizer = DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=COUNT)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = numbers(3), classes()
    before = model.evaluate(x, y, verbose=0)
    history = model.fit(x, y, batch_size=COUNT, verbose=0, validation_data=(x, y))
    assert history.history["loss"][0] == pytest.approx(before[0], rel=1e-4)
    assert history.history["accuracy"][0] == pytest.approx(before[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
def test_masked_sequences_that_end_in_one_vector():
    layers = [L.Embedding(6, 3, mask_zero=True), L.LSTM(3), L.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((4,), dtype="int32"), *layers])
    x = tokens()
    x[:, 2:] = 0
    check(model, "mse", x, 3 * numbers(1, seed=1))


class Mended(tf.keras.layers.Layer):
    """Subtracts the mean of the batch until it is mended."""

    wrong = True

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        x = x - tf.reduce_mean(x, axis=0) if self.wrong else x
        return x * tf.convert_to_tensor(self.scale)


@pytest.mark.parametrize("given", [True, False], ids=["Input", "no Input"])
def test_a_mended_layer_trains_after_the_refusal(given):
    x = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
    layer = Mended()
    first = [tf.keras.Input((3,))] if given else []
    model = tf.keras.Sequential([*first, layer, tf.keras.layers.Dense(1)])
    plan = dpc.keras.PrivacyPlan(8.0, 1e-4, examples=40, batch_size=10, epochs=3)
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    batches = plan.batches((x, x[:, :1]))

    def fit():
        model.fit(batches, verbose=0, callbacks=plan.callbacks)

    with pytest.raises(ExampleIsolationError, match="a Mean"):
        fit()
    layer.wrong = False
    if KERAS_3 and not given:
        # Keras does not give these weights values any more.
        with pytest.raises(ValueError, match="has no value.*Make the model anew"):
            fit()
        return
    fit()
    assert int(model.optimizer.iterations) == 4
