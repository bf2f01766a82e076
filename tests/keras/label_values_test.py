"""Texts and numbers on which a step would fail are errors before any draw.

A failure in the middle of a run tells that the record was drawn.
"""

import re
import traceback
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import L
from tests.stack import KERAS_3
from tfdpclip.gradients import LossStructureError, per_example_norms
from tfdpclip.keras import PerExampleLoss, loss_shapes

COUNT = 60
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32")
CLASSES = np.arange(COUNT) % 3
TEXTS = np.array(["cat", "dog", "eel"])[CLASSES]
CROSSENTROPY = tf.keras.losses.SparseCategoricalCrossentropy


def one_output(units=3):
    return tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(units)])


def two_outputs():
    x = tf.keras.Input((3,))
    return tf.keras.Model(
        x, {"a": L.Dense(3, name="a")(x), "b": L.Dense(1, name="b")(x)}
    )


def of_ids(layer):
    return tf.keras.Sequential(
        [tf.keras.Input((2,), dtype="int32"), layer, L.Flatten(), L.Dense(1)]
    )


class Subclass(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.last = L.Dense(3)

    def call(self, x, training=False):
        return self.last(x)


def difference(y, prediction):
    return tf.reduce_sum(tf.square(y[:, tf.newaxis] - prediction), axis=-1)


def frame_of(data, labels):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": data[:, 0], "b": data[:, 1], "c": data[:, 2]})
    return frame, pandas.Series(labels).astype("category")


def fit(data, model, loss, **options):
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=COUNT, batch_size=20, epochs=1)
    optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0)
    model.compile(optimizer, loss, **options)
    batches = plan.batches(data)
    try:
        model.fit(batches, verbose=0, callbacks=plan.callbacks)
    except Exception:
        assert batches._drawer.steps_drawn() == 0  # No draw.
        raise
    assert int(model.optimizer.iterations) == plan.steps


@pytest.mark.parametrize(
    "data",
    [
        (X, TEXTS),
        (X, TEXTS.astype(object)),
        (X, list(TEXTS)),
        list(zip(X, TEXTS, strict=True)),
        tf.data.Dataset.from_tensor_slices((X, TEXTS)),
        "frame",
    ],
    ids=["array", "objects", "list", "list of records", "pipeline", "frame"],
)
def test_texts_as_labels_of_numbers_are_an_error_before_a_draw(data):
    data = frame_of(X, TEXTS) if isinstance(data, str) else data
    match = r"y holds texts, and loss .*classes, y = np.unique\(y.*StringLookup"
    with pytest.raises(ValueError, match=match):
        fit(data, one_output(1), "mse")


@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        "sparse_categorical_crossentropy",
        CROSSENTROPY(from_logits=True),
        PerExampleLoss("sparse_categorical_crossentropy"),
        difference,
    ],
    ids=["mse", "name", "Loss", "PerExampleLoss", "function"],
)
@pytest.mark.parametrize("make", [one_output, Subclass])
def test_texts_are_refused_for_every_loss_that_takes_numbers(make, loss):
    model = make()
    model.compile("sgd", loss)
    batches = dpc.sampling.Poisson(0.5).batches((X, TEXTS))
    with pytest.raises(ValueError, match="y holds texts, and loss"):
        loss_shapes.refuse_misfit(model, batches._drawer.specs)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", CROSSENTROPY()])
@pytest.mark.parametrize("tokens", [False, True])
def test_one_hot_labels_are_refused_where_a_loss_takes_class_numbers(loss, tokens):
    shape = (4, 3) if tokens else (3,)
    model = tf.keras.Sequential([tf.keras.Input(shape), L.Dense(3)])
    x = np.zeros([COUNT, *shape], "float32")

    def refuse(labels):
        batches = dpc.sampling.Poisson(0.5).batches((x, labels))
        loss_shapes.refuse_misfit(model, batches._drawer.specs)

    model.compile("sgd", loss)
    classes = np.zeros(x.shape[:-1], "int64")
    refuse(classes)
    refuse(classes[..., None])
    with pytest.raises(ValueError, match=r"y has 3 numbers.*np\.argmax\(y, axis=-1\)"):
        refuse(np.eye(3)[classes])
    model.compile("sgd", "categorical_crossentropy")
    refuse(np.eye(3)[classes])


@pytest.mark.parametrize("make", [one_output, Subclass])
def test_missing_labels_are_refused_before_a_step(make):
    model = make()
    model.compile("sgd", "mse")
    batches = dpc.sampling.Poisson(0.5).batches(X)
    with pytest.raises(ValueError, match=r"no labels y, .*\(\(x, y\)\).*frame\["):
        loss_shapes.refuse_misfit(model, batches._drawer.specs)
    labelled = dpc.sampling.Poisson(0.5).batches((X, X))
    loss_shapes.refuse_misfit(model, labelled._drawer.specs)


@pytest.mark.parametrize(
    ("labels", "units", "loss", "refused"),
    [
        (CLASSES, 3, "mse", KERAS_3),  # Keras 2 makes them [n, 1].
        (CLASSES, 1, "mse", False),
        (CLASSES, 3, "sparse_categorical_crossentropy", False),
        (CLASSES[:, None], 3, "mse", False),
        (X, 3, "mse", False),
        (X, 4, "mse", False),  # Keras names the shapes.
    ],
)
def test_labels_that_meet_the_outputs_of_other_records_are_refused(
    labels, units, loss, refused
):
    said = []
    # Labels [n, 3] beside outputs [n, 3, 3] are like labels [n] beside [n, 3].
    for shape, y in (((3,), labels), ((3, 3), np.stack([labels] * 3, 1))):
        model = tf.keras.Sequential([tf.keras.Input(shape), L.Dense(units)])
        model.compile("sgd", loss)
        x = np.zeros([COUNT, *shape], "float32")
        batches = dpc.sampling.Poisson(0.5).batches((x, y))
        try:
            loss_shapes.refuse_misfit(model, batches._drawer.specs)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    several = labels is CLASSES and (units, loss) == (3, "mse")
    assert ["Give labels of the output's shape" in text for text in said] == [
        refused,
        several,
    ]
    assert (
        not refused or "y has the shape [n], and the model's output [n, 3]" in said[0]
    )
    assert not several or "[n, 3], and the model's output [n, 3, 3]" in said[1]


def test_labels_that_a_step_of_ones_own_changes_may_have_any_shape():
    class OneHot(tf.keras.Model):
        def train_step(self, data):
            return super().train_step((data[0], tf.one_hot(data[1], 3)))

    x = tf.keras.Input((3,))
    model = OneHot(x, L.Dense(3)(x))
    model.compile("sgd", "mse")
    batches = dpc.sampling.Poisson(0.5).batches((X, CLASSES))
    loss_shapes.refuse_misfit(model, batches._drawer.specs)
    plain = tf.keras.Model(model.inputs, model.outputs)
    plain.compile("sgd", "mse")
    with (
        pytest.raises(ValueError, match="output's shape") if KERAS_3 else nullcontext()
    ):
        loss_shapes.refuse_misfit(plain, batches._drawer.specs)


@pytest.mark.parametrize("fault", ["no labels", "texts", "a class without an output"])
def test_data_at_fault_beside_those_of_fit_refuse_nothing(fault):
    scheme = dpc.sampling.FixedSize(COUNT // 4, COUNT)
    labels = np.arange(COUNT) % 3
    texts = labels.astype(str)
    wrong = {"no labels": X, "texts": (X, texts)}.get(fault, (X, labels + 7))
    # The callback finds one of all batches of the scheme, in no fixed order.
    others = [scheme.batches(wrong) for _ in range(20)]
    optimizer = dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=9.0, expected_batch_size=COUNT // 4
    )
    model = tf.keras.Sequential([L.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    # The budget knows the scheme, and not which batches fit gets.
    budget = dpc.keras.PrivacyBudget(3.0, 1e-5, scheme)
    model.fit(scheme.batches((X, labels)), callbacks=[budget], verbose=0)
    assert budget.ledger.steps == 4
    del others


def test_labels_that_a_step_or_no_loss_needs_may_be_missing():
    class Autoencoder(Subclass):
        def train_step(self, data):
            return super().train_step((data[0], data[0]))

    model = Autoencoder()
    model.compile("sgd", "mse")
    batches = dpc.sampling.Poisson(0.5).batches(X)
    specs = batches._drawer.specs
    loss_shapes.refuse_misfit(model, specs)
    model = one_output()
    model.compile("sgd")
    loss_shapes.refuse_misfit(model, specs)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no labels y"):
        loss_shapes.refuse_misfit(model, specs)


def test_a_loss_that_reads_texts_is_not_refused():
    def length(y, prediction):
        lengths = tf.cast(tf.strings.length(y), tf.float32)
        return tf.square(lengths - prediction[:, 0])

    model = one_output(1)
    model.compile("sgd", length)
    batches = dpc.sampling.Poisson(0.5).batches((X, TEXTS))
    specs = batches._drawer.specs
    loss_shapes.refuse_misfit(model, specs)
    model.compile("sgd", lambda y, prediction: tf.square(y - prediction[:, 0]))
    with pytest.raises(ValueError, match="y holds texts"):
        loss_shapes.refuse_misfit(model, specs)


def test_the_column_of_several_labels_is_named():
    model = two_outputs()
    model.compile("sgd", {"a": CROSSENTROPY(from_logits=True), "b": "mse"})
    y = {"a": TEXTS, "b": CLASSES.astype("float32")}
    batches = dpc.sampling.Poisson(0.5).batches((X, y))
    with pytest.raises(ValueError, match=r"y\['a'\] holds texts"):
        loss_shapes.refuse_misfit(model, batches._drawer.specs)
    with pytest.raises(ValueError, match=r"y\['a'\] holds the class 3, .*3 outputs"):
        loss_shapes.refuse_unknown_ids(model, (X, {**y, "a": CLASSES + 1}))
    loss_shapes.refuse_unknown_ids(model, (X, {**y, "a": CLASSES}))


def test_texts_as_inputs_of_numbers_are_refused_by_name():
    match = r"x holds texts, and input .* takes numbers.*StringLookup"
    with pytest.raises(ValueError, match=match):
        fit((np.stack([TEXTS] * 3, 1), X[:, :1]), one_output(1), "mse")


def test_a_step_of_ones_own_that_makes_numbers_of_texts_is_named():
    table = tf.Variable(tf.ones([3, 1]))

    @tf.function
    def step(x, y):
        losses = tf.square(tf.cast(y, tf.float32) - (x @ table)[:, 0])
        return per_example_norms(losses, [table])

    with pytest.raises(LossStructureError, match=r"reads texts as numbers.*np.unique"):
        step.get_concrete_function(tf.constant(X), tf.constant(TEXTS))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [False, True])
def test_the_lines_of_that_error_train(pipeline):
    classes, y = np.unique(TEXTS, return_inverse=True)
    data = (X, y)
    if pipeline:
        lookup = L.StringLookup(vocabulary=classes, num_oov_indices=0)
        data = tf.data.Dataset.from_tensor_slices((X, TEXTS))
        data = data.map(lambda x, y: (x, lookup(y)))
    model = one_output()
    fit(data, model, CROSSENTROPY(from_logits=True))
    assert int(model.optimizer.iterations) == 3


def with_one(value, dtype="int32"):
    labels = CLASSES.astype(dtype)
    labels[7] = value
    return labels


OUT_OF_RANGE = [(3, "int32"), (-1, "int64"), (255, "uint8"), (np.nan, "float32")]


def test_a_class_without_an_output_is_an_error_before_a_draw():
    match = "y holds the class 3, .*3 outputs, for classes 0 to 2.*np.unique"
    with pytest.raises(ValueError, match=match):
        fit((X, with_one(3)), one_output(), CROSSENTROPY(from_logits=True))


@pytest.mark.parametrize("value, dtype", OUT_OF_RANGE[:3] if KERAS_3 else OUT_OF_RANGE)
@pytest.mark.parametrize("axes", [(), (1,)])
def test_a_class_without_an_output_is_refused(value, dtype, axes):
    for loss in (CROSSENTROPY(), PerExampleLoss(CROSSENTROPY(from_logits=True))):
        model = one_output()
        model.compile("sgd", loss)
        with pytest.raises(ValueError, match="y holds the class"):
            labels = with_one(value, dtype).reshape(-1, *axes)
            loss_shapes.refuse_unknown_ids(model, (X, labels))
        good = CLASSES.astype(dtype).reshape(-1, *axes)
        loss_shapes.refuse_unknown_ids(model, (X, good))


def test_a_class_without_an_output_is_found_for_tokens_and_for_pictures():
    for shape in ((4,), (4, 5)):
        model = tf.keras.Sequential([tf.keras.Input((*shape, 2)), L.Dense(3)])
        model.compile("sgd", CROSSENTROPY())
        labels = np.zeros((COUNT, *shape), int)
        loss_shapes.refuse_unknown_ids(model, (None, labels))
        labels[5, ..., -1] = 3
        with pytest.raises(ValueError, match="y holds the class 3"):
            loss_shapes.refuse_unknown_ids(model, (None, labels))


@pytest.mark.parametrize("ignored", [-1, 255])
def test_an_ignored_class_is_no_class_without_an_output(ignored):
    model = one_output()
    loss = CROSSENTROPY(from_logits=True, ignore_class=ignored)
    model.compile("sgd", PerExampleLoss(loss))
    loss_shapes.refuse_unknown_ids(model, (X, with_one(ignored)))
    labels = with_one(ignored)
    labels[9] = 3
    with pytest.raises(ValueError, match="y holds the class 3"):
        loss_shapes.refuse_unknown_ids(model, (X, labels))


@pytest.mark.parametrize("loss", ["mse", "hinge", "poisson", "binary_crossentropy"])
def test_losses_of_all_numbers_refuse_none(loss):
    numbers, classes = one_output(1), one_output()
    numbers.compile("sgd", loss)
    classes.compile("sgd", CROSSENTROPY(from_logits=True))
    for value, dtype in OUT_OF_RANGE:
        data = (X, with_one(value, dtype))
        loss_shapes.refuse_unknown_ids(numbers, data)
        with pytest.raises(ValueError, match="y holds the class"):
            loss_shapes.refuse_unknown_ids(classes, data)


@pytest.mark.parametrize(
    "layer",
    # Keras 3 leaves out ids that CategoryEncoding has no entry for.
    [L.Embedding(5, 2)] + [L.CategoryEncoding(5, "multi_hot")] * (not KERAS_3),
    ids=lambda layer: type(layer).__name__,
)
def test_an_id_without_an_entry_is_refused(layer):
    model = of_ids(layer)
    model.compile("sgd", "mse")
    ids = np.arange(2 * COUNT).reshape(COUNT, 2) % 5
    y = np.zeros(COUNT, "float32")
    loss_shapes.refuse_unknown_ids(model, (ids, y))
    ids[9, 1] = 5
    with pytest.raises(ValueError, match=r"x (gives .* the id 5|holds a value with)"):
        loss_shapes.refuse_unknown_ids(model, (ids, y))


def test_an_id_without_an_entry_is_an_error_before_a_draw():
    ids = np.full((COUNT, 2), 5)
    match = r"x gives layer 'embedding\w*' the id 5, .*ids 0 to 4.*IntegerLookup"
    with pytest.raises(ValueError, match=match):
        fit((ids, np.zeros(COUNT)), of_ids(L.Embedding(5, 2)), "mse")


class Recommender(tf.keras.Model):
    """A subclassed model, whose layers have no `input`."""

    def __init__(self, split):
        super().__init__()
        self.split = split
        self.users = L.Embedding(COUNT, 4, name="users")
        self.items = L.Embedding(7, 4, name="items")

    def call(self, x):
        user, item = self.split(x)
        both = self.users(user) * self.items(item)
        return tf.reduce_sum(both, -1, keepdims=True)


# How users and items come in x, how the model takes x apart, and the name of the items.
TWO_TABLES = {
    "dict": (
        lambda u, i: {"user": u, "item": i},
        lambda x: (x["user"], x["item"]),
        r"x\['item'\]",
    ),
    "tuple": (lambda u, i: (u, i), lambda x: x, r"x\[1\]"),
    "columns": (lambda u, i: np.stack([u, i], 1), lambda x: (x[:, 0], x[:, 1]), "x"),
    "hashed": (
        lambda u, i: {"user": u, "item": i + 7000},
        lambda x: (x["user"], x["item"] - 7000),
        r"x\['item'\]",
    ),
}


@pytest.mark.parametrize("how", TWO_TABLES)
def test_each_table_is_tried_on_the_ids_that_it_reads(how):
    join, split, name = TWO_TABLES[how]
    users, items = np.arange(COUNT), np.arange(COUNT) % 7
    loss_shapes.refuse_unknown_ids(Recommender(split), (join(users, items),))
    for bad in (7, -1 - 7 * KERAS_3):  # Keras 3 counts negative ids from the end.
        items[11] = bad
        match = f"{name} gives layer 'items' the id -?[178], .*ids 0 to 6"
        with pytest.raises(ValueError, match=match):
            loss_shapes.refuse_unknown_ids(Recommender(split), (join(users, items),))


@pytest.mark.slow
def test_two_tables_of_different_sizes_train():
    users, items = np.arange(COUNT), np.arange(COUNT) % 7
    x = {"user": users, "item": items}
    model = Recommender(TWO_TABLES["dict"][1])
    fit((x, np.zeros(COUNT, "float32")), model, "mse")
    assert int(model.optimizer.iterations) == 3


def lookups(oov):
    """Lookups with their records, of which only the last one has no entry."""
    words = L.StringLookup(vocabulary=["cat", "dog"], num_oov_indices=oov)
    yield words, np.array(["cat", "dog"] * 10 + ["secret"])
    yield words, np.array(["cat", "dog"] * 10 + ["secret"], object)
    numbers = L.IntegerLookup(vocabulary=[30, 50], num_oov_indices=oov)
    yield numbers, np.array([30, 50] * 10 + [40])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("by_column", [False, True])
def test_a_value_outside_of_a_vocabulary_is_an_error_before_a_draw(place, by_column):
    for oov in (0, 1):
        lookup, values = list(lookups(oov))[place]
        kind = "int64" if values.dtype.kind == "i" else "string"
        inputs = tf.keras.Input((1,), dtype=kind, name="pet")
        outputs = L.Dense(1)(L.Flatten()(L.Embedding(3, 2)(lookup(inputs))))
        model = tf.keras.Model({"pet": inputs} if by_column else inputs, outputs)
        for stop in (-1, None):
            x = values[:stop, np.newaxis]
            x = {"pet": x} if by_column else x
            if oov or stop:
                loss_shapes.refuse_unknown_ids(model, (x,))
                continue
            name = r"x\['pet'\]" if by_column else "x"
            match = f"{name} holds a value without an entry.*_lookup.*num_oov_indices=1"
            with pytest.raises(ValueError, match=match) as caught:
                loss_shapes.refuse_unknown_ids(model, (x,))
            assert "secret" not in str(caught.value)


@pytest.mark.parametrize("place", range(3))
def test_a_map_that_fails_on_a_record_is_an_error_before_a_draw(place):
    for oov in (0, 1):
        lookup, values = list(lookups(oov))[place]
        for stop in (-1, None):
            x = values[:stop].astype(str) if values.dtype == object else values[:stop]
            parts = {"pet": x, "age": np.zeros(len(x), "float32")}
            batches = dpc.sampling.Poisson(0.5).batches((parts, np.zeros(len(x))))

            def look_up(x, y, lookup=lookup):
                return {"pet": lookup(x["pet"]), "age": x["age"]}, y

            if oov or stop:
                batches.map(look_up)
                continue
            match = r"map: .* value of x\['pet'\]:.*num_oov_indices=1"
            with pytest.raises(ValueError, match=match) as caught:
                batches.map(look_up)
            assert "secret" not in str(caught.value) and "40" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_step_that_fails_on_a_record_is_counted_without_its_values(
    streamed, mapped, tmp_path
):
    """The failure tells that the record was drawn, so the step is no free step."""
    lookup, values = list(lookups(0))[0]
    data = tf.data.Dataset.from_tensor_slices((values[-9:], np.zeros(9, "float32")))
    options = {"sampling": "random_allocation"} if streamed else {}
    plan = dpc.keras.PrivacyPlan(8, 1e-3, 9, batch_size=3, epochs=9, **options)
    inputs = tf.keras.Input((), dtype="int64" if mapped else "string")
    ids = inputs if mapped else lookup(inputs)
    outputs = L.Dense(1)(L.Embedding(3, 2)(ids))
    model = tf.keras.Model(inputs, outputs)
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), "mse")
    if streamed:
        data = dpc.sampling.Stream(data, examples=9, folder=tmp_path)
    batches = plan.batches(data)
    if mapped:
        batches = batches.map(lambda x, y: (lookup(x), y))
    with pytest.raises(ValueError, match="num_oov_indices=1") as caught:
        model.fit(batches, epochs=9, verbose=0, callbacks=plan.callbacks)
    shown = "".join(traceback.format_exception(caught.value))
    assert "secret" not in shown and "lookup" in shown
    done = int(re.search("after ([0-9]+) steps, and the step that", shown).group(1))
    assert done == plan.ledger.steps and plan.ledger.reserved == 1
    stated = dpc.accounting.epsilon(
        plan.noise_multiplier, done + 1, batches.scheme, delta=1e-3
    )
    assert plan.ledger.epsilon() == pytest.approx(stated, rel=1e-6)


def test_a_vocabulary_larger_than_its_table_is_an_error_before_a_draw():
    lookup = L.StringLookup(vocabulary=["cat", "dog", "eel"])  # Four entries.
    for rows in (4, 3):
        inputs = tf.keras.Input((1,), dtype="string")
        outputs = L.Dense(1)(L.Flatten()(L.Embedding(rows, 2)(lookup(inputs))))
        model = tf.keras.Model(inputs, outputs)
        if rows == 4:
            loss_shapes.refuse_unknown_ids(model, (TEXTS[:, np.newaxis],))
            continue
        with pytest.raises(ValueError, match="x gives layer 'embedding.* the id 3"):
            loss_shapes.refuse_unknown_ids(model, (TEXTS[:, np.newaxis],))


def test_records_that_a_function_changes_are_not_judged_by_their_first_numbers():
    batches = dpc.sampling.Poisson(0.5).batches((X, CLASSES + 1))
    mapped = batches.map(lambda x, y: (x, y - 1))
    assert mapped._drawer.arrays is None and mapped._arrays is None
