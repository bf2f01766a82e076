"""A label, and a weight, for each token or pixel of a record: still one record."""

import functools
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.compile_test import COUNT, EXPECTED, check
from tests.keras.helpers import L, mostly_slow
from tests.stack import KERAS_3, MEAN
from tfdpclip import sampling
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    per_example_norms,
)
from tfdpclip.keras import PerExampleLoss
from tfdpclip.sampling import class_weights, drawer

VOCABULARY, LENGTH, RECORDS = 6, 4, 60
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, VOCABULARY, (RECORDS, LENGTH)).astype("int32")
LABELS = np.roll(TOKENS, -1, axis=1)
LENGTHS = 1 + np.arange(RECORDS) % LENGTH
KEPT = np.arange(LENGTH) < LENGTHS[:, None]
EACH = (RNG.random((RECORDS, LENGTH)) * KEPT).astype("float32")
ROWS = np.linspace(0, 2, RECORDS, dtype="float32")
REFUSALS = (LossStructureError, ExampleIsolationError)


def crossentropy(**options):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Positions(L.Layer):
    def build(self, shape):
        self.table = self.add_weight(name="table", shape=shape[1:])

    def call(self, x):
        return x + self.table


def tagger(mask_zero=False):
    table = L.Embedding(VOCABULARY, 3, mask_zero=mask_zero)
    layers = [tf.keras.Input((LENGTH,), dtype="int32"), table, L.Dense(VOCABULARY)]
    return tf.keras.Sequential(layers)


def transformer():
    x = tf.keras.Input((LENGTH,), dtype="int32")
    h = Positions()(L.Embedding(VOCABULARY, 4)(x))
    h = L.add([h, L.MultiHeadAttention(1, 4)(h, h, use_causal_mask=True)])
    return tf.keras.Model(x, L.Dense(VOCABULARY)(L.LayerNormalization()(h)))


def lstm():
    table, cell = L.Embedding(VOCABULARY, 4), L.LSTM(4, return_sequences=True)
    layers = [tf.keras.Input((LENGTH,), dtype="int32"), table, cell]
    return tf.keras.Sequential([*layers, L.Dense(VOCABULARY)])


MODELS = {"tagger": tagger, "transformer": transformer, "lstm": lstm}
WEIGHTS = {"none": None, "records": ROWS[::9, None], "tokens": EACH[-COUNT:]}


# Comparisons with the gradients of one backward pass for each record.


@pytest.mark.parametrize(
    "model, weights, static",
    [
        ("tagger", "none", False),
        ("tagger", "records", True),
        ("tagger", "tokens", False),
        pytest.param("transformer", "tokens", True, marks=pytest.mark.slow),
        pytest.param("transformer", "records", False, marks=pytest.mark.slow),
        pytest.param("lstm", "tokens", False, marks=pytest.mark.slow),
        pytest.param("lstm", "records", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_record_of_many_labels_has_one_gradient(model, weights, static):
    check(
        MODELS[model](),
        crossentropy(),
        TOKENS[:COUNT],
        LABELS[:COUNT],
        weight=WEIGHTS[weights],
        static=static,
    )


@pytest.mark.parametrize("reduction, weights", [("sum", "tokens"), ("none", "none")])
@pytest.mark.thinned(2)
def test_masks_of_tokens_without_a_divisor_of_the_batch(reduction, weights):
    scale = EXPECTED if reduction == "sum" else 1 / LENGTH
    check(
        tagger(mask_zero=True),
        crossentropy(reduction=reduction),
        (TOKENS * KEPT)[:COUNT],
        LABELS[:COUNT],
        weight=WEIGHTS[weights],
        scale=scale,
    )


@pytest.mark.parametrize(
    "masked, weights, length",
    [(False, "tokens", None), (True, "none", None), (False, "records", LENGTH)],
)
@pytest.mark.thinned(3)
def test_ignored_labels_are_divided_by_a_records_own(masked, weights, length):
    check(
        tagger(mask_zero=masked),
        PerExampleLoss(crossentropy(ignore_class=-1), length),
        (TOKENS * KEPT)[:COUNT],
        np.where(KEPT, LABELS, -1)[:COUNT],
        weight=WEIGHTS[weights],
        static=length is None,
    )


def test_what_a_loss_of_ignored_labels_is():
    y, logits = np.where(KEPT, LABELS, -1), RNG.normal(size=(RECORDS, LENGTH, 6))
    each = crossentropy(reduction="none")(LABELS, logits.astype("float32")).numpy()
    expected = np.mean((each * KEPT).sum(1) / LENGTHS)
    for ignored in (-1, 0):
        loss = PerExampleLoss(crossentropy(ignore_class=ignored))
        given = np.where(KEPT, y, ignored)
        assert float(loss(given, logits)) == pytest.approx(expected, rel=1e-5)
    # Of a record without any label that counts.
    loss = PerExampleLoss(crossentropy(ignore_class=-1))
    assert float(loss(0 * y - 1, logits)) == 0


def test_a_loss_of_ignored_labels_is_saved_as_it_was_given():
    loss = PerExampleLoss(crossentropy(ignore_class=-1))
    again = PerExampleLoss.from_config(loss.get_config())
    y, logits = np.where(KEPT, LABELS, -1), np.zeros((RECORDS, LENGTH, 6), "float32")
    assert float(again(y, logits)) == float(loss(y, logits))


BY_BATCH = {
    "mask": (True, {}, None),
    "ignored": (False, {"ignore_class": -1}, None),
    "ignored_weighted": (False, {"ignore_class": -1, "reduction": MEAN}, EACH[:COUNT]),
}
if KERAS_3:
    BY_BATCH["weights"] = False, {"reduction": "mean_with_sample_weight"}, EACH[:COUNT]


@pytest.mark.parametrize("name", BY_BATCH)
def test_a_mean_over_the_tokens_of_a_batch_is_refused(name):
    masked, options, weights = BY_BATCH[name]
    model = tagger(mask_zero=masked)
    options = dict(options)
    optimizer = dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=0.0, expected_batch_size=COUNT
    )
    model.compile(optimizer, crossentropy(**options), jit_compile=False)
    labels = np.where(KEPT, LABELS, -1) if "ignore_class" in options else LABELS
    before = model.get_weights()
    with pytest.raises(REFUSALS, match=r"loss=dpc.keras.PerExampleLoss\(tf.keras") as e:
        model.train_on_batch((TOKENS * KEPT)[:COUNT], labels[:COUNT], weights)
    assert "atch normalisation" not in str(e.value)
    for value, was in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, was)


# Batches bring weights that Keras can multiply with the losses.


def plan_for(epochs=1):
    return dpc.keras.PrivacyPlan(
        epsilon=8, delta=1e-3, examples=RECORDS, batch_size=15, epochs=epochs
    )


def trained(data, make=tagger, loss=None, change=lambda batches: batches, **options):
    plan = plan_for()
    model = make()
    optimizer = plan.optimizer(dpc.keras.DPAdam, 0.01)
    model.compile(optimizer, loss or crossentropy(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(
            change(plan.batches(data)),
            epochs=plan.epochs,
            verbose=0,
            callbacks=plan.callbacks,
        ).history
    assert int(model.optimizer.iterations) == plan.steps
    assert 0 < history["loss"][-1] < 2 * np.log(VOCABULARY)
    return history


@pytest.mark.parametrize(
    "make, weights, jit",
    [
        ("tagger", "tokens", False),
        ("tagger", "none", True),
        pytest.param("transformer", "none", "default", marks=pytest.mark.slow),
        pytest.param("transformer", "tokens", False, marks=pytest.mark.slow),
        pytest.param("lstm", "tokens", "default", marks=pytest.mark.slow),
        pytest.param("lstm", "records", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_language_models_are_trained_by_a_plan(make, weights, jit):
    more = {"none": (), "records": (ROWS,), "tokens": (EACH,)}[weights]
    history = trained(
        (TOKENS, LABELS, *more),
        MODELS[make],
        metrics=["accuracy"],
        weighted_metrics=[tf.keras.metrics.SparseCategoricalAccuracy("weighed")],
        **({} if jit == "default" else {"jit_compile": jit}),
    )
    assert 0 <= history["weighed"][-1] <= 1


@pytest.mark.slow
def test_labels_that_a_function_of_a_record_makes():
    def shifted(tokens):
        return tokens[:-1], tokens[1:]

    def change(batches):
        return batches.map(shifted).map_batches(lambda x, y: (x, y))

    longer = np.concatenate([TOKENS, TOKENS[:, :1]], axis=1)
    history = trained(longer, change=change, jit_compile=False)
    assert 0 < history["epsilon"][-1] <= 8


@pytest.mark.slow
def test_rows_that_fill_a_batch_up_add_nothing(monkeypatch):
    found = []
    for filled in (False, True):
        if filled:
            monkeypatch.setattr(drawer.Drawer, "varies", False)
        tf.keras.utils.set_random_seed(5)
        batches = sampling.Poisson(0.2).batches((TOKENS, LABELS, EACH), seed=4)
        model = tagger()
        optimizer = dpc.keras.DPSGD(
            0.5, clip=0.3, noise_multiplier=0.0, expected_batch_size=12
        )
        model.compile(optimizer, crossentropy(), jit_compile=False)
        budget = dpc.keras.PrivacyBudget(np.inf, 1e-3, batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(batches, verbose=0, callbacks=[budget])
        found.append(model.get_weights())
    for drawn, other in zip(*found, strict=True):
        np.testing.assert_allclose(drawn, other, rtol=1e-5, atol=1e-6)


class Fetched:
    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return tuple(tf.nest.map_structure(lambda a: a[index], p) for p in self.parts)


SCHEMES = {
    "poisson": sampling.Poisson(0.2),
    "fixed": sampling.FixedSize(9, RECORDS),
    "replacement": sampling.FixedSize(9, RECORDS, replacement=True),
    "shuffled": sampling.ShuffledEpochs(9, RECORDS),
    "full": sampling.FullBatch(),
    "separated": sampling.MinSeparation(RECORDS, 9),
}
SOURCES = {
    "arrays": lambda *parts: parts,
    "fetched": Fetched,
    "pipeline": lambda *parts: tf.data.Dataset.from_tensor_slices(parts),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.thinned(4)
def test_every_scheme_draws_each_weight_with_its_label(name, source):
    # A weight equals its label, so a wrong pair is seen.
    labels = np.arange(1, RECORDS * LENGTH + 1).reshape(RECORDS, LENGTH)
    data = SOURCES[source](labels[:, 0], labels, labels.astype("float32"))
    batches = SCHEMES[name].batches(data, accumulation_steps=2)
    assert batches.element_spec[-1].shape == (batches.physical_batch_size, LENGTH)
    drawn = 0
    for x, y, weights in batches.take(4):
        np.testing.assert_array_equal(y, weights)
        np.testing.assert_array_equal(x, y[:, 0])
        drawn += np.count_nonzero(x)
    assert drawn or name == "poisson"


def shapes_of(*data):
    specs = sampling.FullBatch().batches(data).element_spec[-1]
    return tf.nest.map_structure(lambda spec: tuple(spec.shape[1:]), specs)


IMAGES = np.zeros((RECORDS, 3, 5), int)
ONE = np.zeros(RECORDS, int)


@pytest.mark.parametrize(
    "labels, weights, expected",
    [
        (ONE, ROWS, ()),
        (ONE, ROWS[:, None], ()),
        (ONE[:, None], ROWS[:, None], ()),
        (LABELS, ROWS, (1,)),
        (LABELS, ROWS[:, None], (1,)),
        (LABELS, EACH, (LENGTH,)),
        (LABELS, KEPT, (LENGTH,)),
        # These losses take numbers, or classes as vectors.
        (LABELS.astype("float32"), ROWS, ()),
        (LABELS > 3, ROWS, ()),
        (np.eye(6)[LABELS], EACH, (LENGTH, 1)),
        (np.eye(6)[LABELS], EACH[..., None], (LENGTH, 1)),
        (IMAGES, ROWS, (1, 1)),
        (IMAGES, IMAGES[:, :, 0], (3, 1)),
        (IMAGES, IMAGES, (3, 5)),
        ({"a": LABELS, "b": ONE}, ROWS, (1,)),
        ((LABELS, IMAGES), ROWS, ((1,), (1, 1))),
        ({"a": LABELS, "b": ONE}, {"a": EACH, "b": ROWS}, {"a": (LENGTH,), "b": ()}),
        ((LABELS, LABELS), EACH, (LENGTH,)),
    ],
)
def test_weights_have_the_axes_of_losses(labels, weights, expected):
    assert shapes_of(TOKENS, labels, weights) == expected


def several(by_name=True):
    x = tf.keras.Input((LENGTH,), dtype="int32")
    h = L.Embedding(VOCABULARY, 3)(x)
    tags = L.Dense(VOCABULARY, name="tags")(h)
    kind = L.Dense(3, name="kind")(L.Flatten()(h))
    return tf.keras.Model(x, {"tags": tags, "kind": kind} if by_name else [tags, kind])


@pytest.mark.slow
@pytest.mark.parametrize("weights", mostly_slow(["each"], ["none", "records", "each"]))
def test_several_outputs_have_weights_of_their_own(weights):
    more = {"none": (), "records": (ROWS,), "each": ({"tags": EACH, "kind": ROWS},)}
    labels = {"tags": LABELS, "kind": TOKENS[:, 0] % 3}
    losses = {"tags": crossentropy(), "kind": crossentropy()}
    data = (TOKENS, labels, *more[weights])
    history = trained(data, several, losses, jit_compile=False)
    assert 0 < history["epsilon"][-1] <= 8


@pytest.mark.slow
def test_several_outputs_in_a_list_have_weights_in_a_tuple():
    labels, losses = (LABELS, TOKENS[:, 0] % 3), [crossentropy(), crossentropy()]

    def make():
        return several(by_name=False)

    trained((TOKENS, labels, (EACH, ROWS)), make, losses, jit_compile=False)
    if KERAS_3:
        labels = {"tags": labels[0], "kind": labels[1]}
        weights = {"tags": EACH, "kind": ROWS}
        match = r"\(y\['tags'\], y\['kind'\]\), \(sample_weight\['tags'\]"
        with pytest.raises(ValueError, match=match):
            trained((TOKENS, labels, weights), make, losses)


@pytest.mark.slow
def test_functions_of_records_leave_weights_of_several_shapes():
    batches = sampling.FullBatch().batches((TOKENS, (LABELS, IMAGES), ROWS))
    for change in (batches.map, batches.map_batches):
        *_, weights = next(iter(change(lambda x, y: (x, y))))
        assert [w.shape[1:] for w in weights] == [[1], [1, 1]]
        for given in weights:
            np.testing.assert_array_equal(np.ravel(given), ROWS)


def test_class_weights_multiply_those_of_tokens():
    def by_class(x, y):
        return x, y, tf.constant([1.0, 3.0])

    change = class_weights.weighted_by_class(by_class, VOCABULARY)
    for given in map(
        tf.constant, (EACH[:2], ROWS[:2, None], ROWS[:2], EACH[:2, :, None])
    ):
        _, _, weights = change(TOKENS[:2], tf.constant(LABELS[:2, 0]), given)
        expected = given * np.reshape([1, 3], (2, *[1] * (given.ndim - 1)))
        np.testing.assert_allclose(weights, expected)


ONE_HOT = np.eye(VOCABULARY)[LABELS[:, 0]]
BY_CLASS = dict(enumerate([0.5, 1.0, 2.0, 3.0, 4.0, 5.0]))


@pytest.mark.parametrize(
    "labels, by_class",
    [
        (LABELS, BY_CLASS),
        (LABELS, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}),
        (LABELS.astype("float32"), BY_CLASS),
        (np.tile(LABELS[:, None], (1, 3, 1)), BY_CLASS),
        (ONE_HOT.astype(int), BY_CLASS),
    ],
    ids=["tokens", "as many as classes", "as numbers", "pictures", "one-hot integers"],
)
def test_class_weights_of_tokens_are_refused_where_keras_would_take_places(
    labels, by_class
):
    batches = sampling.Poisson(0.3).batches((TOKENS, labels))
    model = tagger()
    optimizer = dpc.keras.DPSGD(
        0.1, noise_multiplier=1.0, expected_batch_size=batches.expected_batch_size
    )
    model.compile(optimizer, PerExampleLoss(crossentropy()))
    with pytest.raises(ValueError, match=r"class_weight is for .*np.take\(weights, y"):
        model.fit(batches, class_weight=by_class, verbose=0)
    assert batches._drawer.steps_drawn() == 0


def _assert_refused(data, classes, match, units=LENGTH):
    """Checks that `fit` refuses before any draw, and trains the same data without."""
    batches = sampling.Poisson(0.5).batches(data)
    model = tf.keras.Sequential([tf.keras.Input((LENGTH,)), L.Dense(units)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=match):
        model.fit(batches, class_weight=classes, verbose=0)
    assert batches._drawer.steps_drawn() == 0


@pytest.mark.parametrize("several", [False, True], ids=["tokens", "several classes"])
def test_class_weights_of_numbers_that_name_no_one_class_are_refused(several):
    """As many columns as classes, so that only their values tell."""
    classes = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    y = (LABELS > 2) if several else LABELS
    match = r"must be one-hot.*Record \d+ has.*\(x, y, sample_weight\)"
    _assert_refused((TOKENS, y.astype("float32")), classes, match)


#: Labels [n], of which one is none of three classes.
def _one_bad(label, dtype):
    labels = np.arange(len(TOKENS)) % 3
    labels = labels.astype(dtype)
    labels[5] = label
    return labels


BAD_LABELS = [(3, "int32"), (-1, "int64"), (np.nan, "float32"), (255, "uint8")]


@pytest.mark.parametrize("label, dtype", BAD_LABELS)
@pytest.mark.parametrize("axes", [0, 1])
def test_a_label_without_a_class_weight_is_an_error_before_a_draw(label, dtype, axes):
    labels = np.reshape(_one_bad(label, dtype), (-1, *[1] * axes))
    match = r"weights for the classes 0 to 2, and y of record 5 is.*sample_weight"
    classes = {0: 1.0, 1: 2.0, 2: 3.0}
    _assert_refused((TOKENS, labels), classes, match, units=1)
    # The line of the error: labels of weight 0 may be anything.
    weights = np.where(np.arange(len(TOKENS)) == 5, 0.0, 1.0)
    batches = sampling.FullBatch().batches((TOKENS, labels, weights))
    change = class_weights.on_elements(
        _keras_function(), batches.element_spec[1], batches._arrays
    )
    _, y, found = change(*next(iter(batches)))
    np.testing.assert_array_equal(y, labels)
    assert np.ravel(found)[5] == 0 and np.count_nonzero(found) == len(TOKENS) - 1


@functools.cache
def _keras_function():
    """Keras's own function of `class_weight`, as `fit` gives it to `Batches.map`."""
    seen, original = [], sampling.Batches.map

    def noted(batches, function, *args, **kwargs):
        seen.append(function)
        return original(batches, function, *args, **kwargs)

    model = tf.keras.Sequential([tf.keras.Input((1,)), L.Dense(1)])
    model.compile("sgd", "mse")
    batches = sampling.FullBatch().batches((np.ones((3, 1)), np.arange(3)))
    with mock.patch.object(sampling.Batches, "map", noted):
        model.fit(batches, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, verbose=0)
    (function,) = filter(class_weights.is_class_weights, seen)
    return function


@pytest.mark.parametrize("label, dtype", BAD_LABELS)
def test_a_label_without_a_class_that_is_only_found_when_drawn_counts_for_nothing(
    label, dtype
):
    """An error would tell that this record was drawn."""
    labels = _one_bad(label, dtype)
    data = tf.data.Dataset.from_tensor_slices((TOKENS, labels))
    change = class_weights.on_elements(
        _keras_function(), data.batch(2).element_spec[1], None
    )
    for given in (np.ones(len(labels), "f"), np.ones((len(labels), 1), "f")):
        _, y, found = change(TOKENS, tf.constant(labels), tf.constant(given))
        expected = np.where(
            np.arange(len(labels)) == 5, 0, np.arange(len(labels)) % 3 + 1
        )
        np.testing.assert_array_equal(np.ravel(found), expected)
        np.testing.assert_array_equal(y, labels)


def test_a_label_that_is_not_one_hot_counts_for_nothing_when_drawn():
    labels = np.eye(3, dtype="float32")[np.zeros(6, int)]
    labels[1:5] = [0, 0, 0], [1, 1, 0], [2, -1, 0], [np.nan, 0, 1]
    change = class_weights.on_elements(
        _keras_function(), tf.TensorSpec([None, 3]), None
    )
    _, _, found = change(TOKENS[:6], tf.constant(labels), tf.ones(6))
    np.testing.assert_array_equal(found, [1, 0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    "labels, line",
    [(np.array(["cat", "dog"]), r"np.unique\(y"), (np.array([True, False]), "int32")],
    ids=["texts", "bools"],
)
def test_class_weights_of_labels_that_are_no_numbers_name_the_line(labels, line):
    y = labels[np.arange(len(TOKENS)) % 2]
    _assert_refused((TOKENS, y), {0: 1.0, 1: 2.0}, line, units=1)


@pytest.mark.slow
def test_class_weights_train_with_accumulation():
    """Keras 3 asks for `prefetch(tf.data.AUTOTUNE)` beside `class_weight`."""
    plan = dpc.keras.PrivacyPlan(
        8, 1e-3, examples=RECORDS, batch_size=20, epochs=1, physical_batch_size=12
    )
    model = tf.keras.Sequential([tf.keras.Input((LENGTH,)), L.Dense(1)])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), "mse")
    batches = plan.batches((TOKENS, np.arange(RECORDS) % 2))
    assert batches.accumulation_steps > 1
    classes = {0: 1.0, 1: 2.0}
    model.fit(batches, class_weight=classes, verbose=0, callbacks=plan.callbacks)
    assert plan.ledger.steps == int(model.optimizer.iterations.numpy()) == 3


def test_autotuned_prefetching_leaves_the_elements_of_a_step_together():
    batches = sampling.Poisson(0.5).batches((TOKENS, LABELS), accumulation_steps=2)
    assert batches.prefetch(tf.data.AUTOTUNE) is batches
    with pytest.raises(ValueError, match="prefetch must be 0"):
        batches.prefetch(2)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_class_weight_that_is_no_factor_is_refused(weight):
    y = np.arange(len(TOKENS)) % 2
    match = "class_weight holds .* for class 1"
    _assert_refused((TOKENS, y), {0: 1.0, 1: weight}, match, units=1)


def test_the_line_of_that_error_weighs_each_token_by_its_class():
    weights = np.array([*BY_CLASS.values()])
    full = sampling.FullBatch().batches((TOKENS, LABELS, np.take(weights, LABELS)))
    _, y, found = next(iter(full))
    np.testing.assert_array_equal(found, weights[y])


@pytest.mark.parametrize(
    "labels, found",
    [
        (LABELS[:, 0], LABELS[:, 0]),
        (LABELS[:, :1], LABELS[:, :1]),
        (ONE_HOT.astype("float32"), LABELS[:, 0]),
        (LABELS[..., None], LABELS[..., None]),
        (np.eye(VOCABULARY, dtype="float32")[LABELS], LABELS[..., None]),
    ],
    ids=["[n]", "[n, 1]", "one-hot", "[n, T, 1]", "one-hot tokens"],
)
def test_class_weights_of_other_labels_are_those_of_their_classes(labels, found):
    seen = []

    class Seen(tf.keras.losses.Loss):
        def call(self, y, prediction):
            return tf.reduce_mean(prediction) * tf.ones(tf.shape(y)[:1])

    class Model(tf.keras.Model):
        def train_step(self, data):
            seen.append([part.numpy() for part in data])
            return {"loss": tf.constant(0.0)}

    model = Model()
    model.compile("sgd", Seen(), run_eagerly=True)
    batches = sampling.FullBatch().batches((TOKENS, labels))
    model.fit(batches, class_weight=BY_CLASS, verbose=0)
    (_, y, weights), *_ = seen
    np.testing.assert_array_equal(y, labels)
    expected = np.array([*BY_CLASS.values()])[found]
    np.testing.assert_array_equal(np.ravel(weights), np.ravel(expected))


@pytest.mark.parametrize(
    "made",
    [
        lambda losses, weights: tf.reduce_mean(losses * weights),
        lambda losses, weights: tf.reduce_sum(losses * weights) / 4,
        lambda losses, weights: losses * weights,
        lambda losses, weights: tf.reduce_mean(losses) * weights,
        lambda losses, weights: tf.reduce_mean(tf.reduce_mean(losses) * weights),
    ],
    ids=["mean", "sum", "each", "of a mean", "mean of a mean"],
)
def test_weights_of_records_along_the_wrong_axis_are_named(made):
    """Where a batch has as many records as a record has tokens, nothing else tells."""
    table = tf.Variable(RNG.normal(size=(VOCABULARY, VOCABULARY)).astype("float32"))

    @tf.function
    def step(x, y, weights):
        logits = tf.gather(table, x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return per_example_norms(made(losses, weights), [table])

    @tf.function
    def mended(x, y, weights):
        loss = PerExampleLoss(crossentropy())
        value = loss(y, tf.gather(table, x), sample_weight=weights)
        return per_example_norms(value, [table])

    batch = TOKENS[:LENGTH], LABELS[:LENGTH], ROWS[:LENGTH]
    line = "sample_weight to .*PerExampleLoss|axis=-1"
    with pytest.raises(LossStructureError, match=line):
        step(*batch)
    assert mended(*batch).shape == [LENGTH]


# Weights of wrong shapes or values raise where they are given.

BOTH = {"a": LABELS, "b": ONE}
NAN, BELOW = EACH.copy(), EACH.copy()
NAN[3, 1], BELOW[3, 1] = np.nan, -1
WRONG = {
    "longer": ((LABELS, np.ones((RECORDS, 5))), r"\[n, 5\].* fits \[n\] or .*\[n, 4\]"),
    "one_record": ((LABELS, EACH[0]), r"sample_weight of shape \(4,\)"),
    "an_axis_more": ((LABELS, EACH[..., None]), r"sample_weight\[..., 0\]\)"),
    "a_row_more": ((LABELS, np.ones(RECORDS + 1)), r"sample_weight of shape \(61,\)"),
    "other_keys": ((BOTH, {"a": EACH, "c": ROWS}), r"sample_weight\['c'\].*y\['b'\]"),
    "a_key_less": ((BOTH, {"a": EACH}), r"y\['b'\]\. Give weights for each"),
    "for_one": ((LABELS, {"y": EACH}), r"labels are y\. Give one array"),
    "a_list": ((LABELS, [EACH]), r"labels are y\. Give one array"),
    "a_tuple": ((LABELS, (EACH,)), r"sample_weight\[0\], and the labels are y\."),
    "of_no_labels": ((ONE, EACH), r"\[n, 4\] meets .* \[n\], and fits \[n\] or \[n, 1"),
    "not_of_all": ((BOTH, EACH), r"\[n, 4\] meets .* \[n\], and fits"),
    "nan": ((LABELS, NAN), r"sample_weight holds nan: .*np.where\(np.isfinite"),
    "negative": ((LABELS, BELOW), r"sample_weight holds -1.0"),
    "strings": ((LABELS, EACH.astype(str)), r"holds string.*astype\('float32'\)"),
    "ragged": (([[1], *[[1, 2]] * 59], ROWS), r"y must be rectangular.*pad_sequences"),
    "ragged_tensor": (
        (tf.ragged.constant([[1], *[[1, 2]] * 59]),),
        r"y is a RaggedTensor.*to_tensor",
    ),
    "nothing": ((LABELS, None), r"sample_weight is None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_refused_by_name(name):
    parts, match = WRONG[name]
    with pytest.raises(ValueError, match=match):
        plan_for().batches((TOKENS, *parts))


@pytest.mark.parametrize("source", ["fetched", "pipeline"])
def test_wrong_shapes_of_single_records_are_refused_at_once(source):
    with pytest.raises(ValueError, match=r"\[n, 3\] meets .*\[n, 4\]"):
        plan_for().batches(SOURCES[source](TOKENS, LABELS, EACH[:, :3]))


def flat():
    layers = [L.Embedding(VOCABULARY, 3), L.Flatten(), L.Dense(LENGTH, "sigmoid")]
    return tf.keras.Sequential([tf.keras.Input((LENGTH,), dtype="int32"), *layers])


def test_weights_that_meet_no_losses_are_refused_before_a_step(monkeypatch):
    monkeypatch.setattr(drawer.Drawer, "next_element", None)  # Nothing is drawn.
    with pytest.raises(ValueError, match=r"\[n, 4\], do not fit .*\[n\]\. Give"):
        trained((TOKENS, LABELS > 3, EACH), flat, "binary_crossentropy")


def test_classes_of_tokens_may_be_floats():
    """Batches take floats for the entries of one label, with one loss."""
    history = trained((TOKENS, LABELS.astype("float32")))
    assert 0 < history["epsilon"][-1] <= 8


def test_a_weight_that_a_map_leaves_behind_is_refused():
    batches = plan_for().batches((TOKENS, LABELS, EACH))
    for change in (batches.map, batches.map_batches):
        with pytest.raises(ValueError, match=r"\[n, 4\] meets labels y of shape \[n"):
            change(lambda x, y: (x, tf.cast(y[..., :2], tf.float32)))


def of_images(y_true, y_pred):
    """One loss for each image, as Keras 3's Dice(axis=(1, 2, 3)) has it."""
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=[1, 2, 3])


@pytest.mark.parametrize("weights", [(), (ROWS,), (ROWS[:, None],)])
def test_a_loss_for_each_image_takes_a_weight_for_each_image(weights):
    images = RNG.standard_normal((RECORDS, 4, 4, 1)).astype("float32")
    found = []
    for shape, loss in [((4, 4, 1), of_images), ((16,), "mse")]:
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential(
            [
                tf.keras.Input((4, 4, 1)),
                L.Conv2D(1, 3, padding="same"),
                L.Reshape(shape),
            ]
        )
        optimizer = dpc.keras.DPSGD(
            0.5,
            clip=dpc.FixedClip(0.1),
            noise_multiplier=0.0,
            expected_batch_size=RECORDS,
        )
        model.compile(optimizer, loss)
        labels = (images > 0).astype("float32").reshape([RECORDS, *shape])
        batches = sampling.FullBatch().batches((images, labels, *weights))
        budget = dpc.keras.PrivacyBudget(np.inf, 1e-5, batches)
        model.fit(batches, epochs=2, verbose=0, callbacks=[budget])
        found.append(np.concatenate([w.numpy().ravel() for w in model.weights]))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not KERAS_3, reason="Dice is a loss of Keras 3")
@pytest.mark.parametrize("name", ["Dice", "Tversky"])
def test_a_loss_over_the_whole_batch_says_which_axes_to_give(name):
    kind = getattr(tf.keras.losses, name)
    images = RNG.standard_normal((RECORDS, 4, 4, 1)).astype("float32")
    data = images, (images > 0).astype("float32")

    def fit(loss):
        plan = plan_for()
        layers = [tf.keras.Input((4, 4, 1)), L.Conv2D(1, 3, padding="same")]
        model = tf.keras.Sequential([*layers, L.Activation("sigmoid")])
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0), loss)
        batches = plan.batches(data)
        model.fit(batches, verbose=0, callbacks=plan.callbacks)

    with pytest.raises(LossStructureError, match=rf"{name}\(axis=\(1, 2, 3\)\)"):
        fit(kind())
    fit(kind(axis=(1, 2, 3)))
    fit(PerExampleLoss(kind(axis=(1, 2, 3))))
