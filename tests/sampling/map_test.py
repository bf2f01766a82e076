"""`Batches.map`: each record in gives one record out, for every function."""

import importlib.util
import inspect

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests import stack
from tfdpclip import accounting, sampling
from tfdpclip.sampling import provenance, record_map, refusals

_RECORDS = 60


def _numbered(count=_RECORDS):
    x = np.arange(1, count + 1, dtype=np.float32)[:, None] * [1.0, 10.0]
    return x.astype(np.float32), np.arange(1, count + 1)


def _batches(rate=0.2, data=None, **options):
    data = _numbered() if data is None else data
    return sampling.Poisson(rate).batches(data, **options)


class TestRecords:
    def test_each_record_becomes_one_record(self):
        batches = _batches(steps=20)
        mapped = batches.map(lambda x, y: (x[:1] + 1000.0, {"out": y * 2}))
        assert isinstance(mapped, sampling.Batches)
        rows = batches.physical_batch_size
        assert mapped.element_spec[0] == tf.TensorSpec((rows, 1), tf.float32)
        assert mapped.element_spec[1]["out"] == tf.TensorSpec((rows,), tf.int64)
        for x, y, weights in mapped:
            real = weights.numpy() > 0
            np.testing.assert_array_equal(
                2 * (x.numpy()[real, 0] - 1000), y["out"].numpy()[real]
            )
            # Padding is not transformed.
            assert np.all(x.numpy()[~real] == 0)

    def test_it_is_the_same_draw(self):
        batches = _batches(accumulation_steps=2, steps=5)
        mapped = batches.map(lambda x, y: (x, y)).repeat().take(6)
        assert mapped.scheme == batches.scheme
        assert mapped.expected_batch_size == batches.expected_batch_size
        assert mapped._drawer is batches._drawer
        assert mapped.steps_per_epoch == 3
        assert len(list(mapped)) == 6
        assert batches._drawer.steps_drawn() == 3

    def test_a_function_may_have_more_arguments_with_defaults(self):
        """As `preprocess_samples` of KerasHub's models, through which `fit` maps."""

        def preprocess(x, y=None, sample_weight=None, factor=3.0):
            return (x * factor, y) if sample_weight is None else x

        batches = sampling.FullBatch().batches(_numbered())
        x, y, _ = next(iter(batches.map(preprocess)))
        np.testing.assert_array_equal(x, 3 * _numbered()[0])
        np.testing.assert_array_equal(y, _numbered()[1])

    def test_a_function_that_changes_nothing_is_not_run(self, monkeypatch):
        def refuse(*arguments):
            raise AssertionError("each record went through the function")

        monkeypatch.setattr(record_map, "apply_to_records", refuse)
        x = {"a": np.ones((6, 2)), "b": np.arange(6)}
        batches = sampling.FullBatch().batches((x, np.arange(6)))
        found, y, _ = next(iter(batches.map(lambda x, y=None, weight=None: (x, y))))
        np.testing.assert_array_equal(found["b"], x["b"])
        np.testing.assert_array_equal(y, x["b"])
        for changes in (
            lambda x, y: ({"a": x["a"], "b": y}, x["b"]),
            lambda x, y: (x, None),
            lambda x, y: (x["a"], y),
            lambda x, y: (x, y + 0),
        ):
            with pytest.raises(AssertionError, match="each record"):
                batches.map(changes)

    def test_an_empty_draw_is_an_element(self):
        def check(x, y):
            with tf.control_dependencies([tf.debugging.assert_positive(x)]):
                return x / x, y  # Padding would be NaN.

        mapped = _batches(1e-9, steps=3).map(check)
        elements = list(mapped)
        assert len(elements) == 3
        assert all(np.all(x.numpy() == 0) for x, _, _ in elements)

    def test_features_alone_and_nests(self):
        x = {"a": np.ones((6, 2)), "b": np.array(list("abcdef"))}
        full = sampling.FullBatch()
        (found, y, _) = next(iter(full.batches(x).map(lambda r: r["b"] + "!")))
        assert y is None and found.numpy().tolist() == [
            c.encode() + b"!" for c in "abcdef"
        ]
        labelled = full.batches(x).map(lambda r: (r, tf.reduce_sum(r["a"])))
        (found, y, _) = next(iter(labelled))
        assert set(found) == {"a", "b"} and y.numpy().tolist() == [2.0] * 6

    def test_every_record_has_its_own_randomness(self):
        batches = sampling.FullBatch().batches(_numbered(), steps=3)
        generator = tf.random.Generator.from_non_deterministic_state()
        mapped = batches.map(
            lambda x, y: (tf.random.normal([2]), generator.normal([2]))
        )
        found = [np.concatenate([x, y], 1) for x, y, _ in mapped]
        values = np.concatenate(found).ravel()
        # 720 float32 normals: two of them agree with probability below 0.02, three
        # pairs with one below 1e-6.
        assert len(np.unique(values)) >= len(values) - 3

    def test_keras_layers_augment(self):
        images = np.random.default_rng(0).random((20, 8, 8, 3), np.float32)
        batches = sampling.FullBatch().batches((images, np.arange(20)), steps=2)
        augment = tf.keras.Sequential(
            [tf.keras.layers.RandomFlip(), tf.keras.layers.RandomRotation(0.1)]
        )

        def augmented():
            return batches.map(
                lambda x, y: (augment(x, training=True), y),
                num_parallel_calls=tf.data.AUTOTUNE,
            )

        if stack.KERAS_3:  # Its layers count their draws in a variable.
            with pytest.raises(ValueError, match="put random layers into the model"):
                augmented()
            return
        one, two = (x.numpy() for x, _, _ in augmented())
        assert one.shape == images.shape
        assert not np.allclose(one, two)

    def test_weights_are_kept(self):
        x, y = _numbered()
        weights = np.linspace(1, 2, _RECORDS)
        batches = sampling.FullBatch().batches((x, y, weights))
        mapped = batches.map(lambda x, y: (x * 0, y))
        np.testing.assert_allclose(next(iter(mapped))[2], weights, rtol=1e-6)

    def test_mean_and_deviation_are_no_secret(self):
        mean, deviation = np.float32([1.0, 2.0]), tf.constant([3.0, 4.0])
        batches = sampling.FullBatch().batches(_numbered())
        mapped = batches.map(lambda x, y: ((x - mean) / deviation, y))
        x = next(iter(mapped))[0].numpy()
        np.testing.assert_allclose(x, (_numbered()[0] - mean) / deviation, rtol=1e-6)

    @pytest.mark.slow
    def test_large_public_constants_are_declared(self):
        table = np.random.default_rng(0).random((_RECORDS + 1, 2), np.float32)
        kept = tf.constant(table)
        variable = tf.Variable(table)
        for function, public in (
            (lambda x, y: (tf.gather(table, y), y), table),
            (lambda x, y: (tf.gather(kept, y), y), kept),
            (lambda x, y: (tf.gather(variable, y), y), variable),
        ):
            with pytest.raises(ValueError, match="public="):
                _batches().map(function)
            next(iter(_batches().map(function, public=[public])))

    def test_a_function_may_write_into_its_dict(self):
        """As functions of `tf.data.Dataset.map` may."""

        def encode(x, y):
            x["sum"] = x["a"] + x.pop("b")
            del x["a"]
            return x, y

        ones = np.ones(4, "float32")
        batches = sampling.FullBatch().batches(({"a": ones, "b": 2 * ones}, ones))
        x, _, _ = next(iter(batches.map(encode)))
        assert list(x) == ["sum"] and x["sum"].numpy().tolist() == [3.0] * 4


WORDS = np.array(["a cat", "a dog", "an eel"] * 20)


def vectorizers():
    layers = tf.keras.layers
    table = tf.lookup.KeyValueTensorInitializer(["a cat", "a dog"], [1, 2])
    static = tf.lookup.StaticHashTable(table, 0)
    mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, 0)
    mutable.insert(tf.constant(["a cat", "a dog"]), tf.constant([1, 2]))
    adapted = layers.TextVectorization(output_sequence_length=2)
    adapted.adapt(["a cat", "a dog"])
    return {
        "table": static.lookup,
        "mutable table": mutable.lookup,
        "vocabulary": layers.StringLookup(vocabulary=["a cat", "a dog"]),
        "TextVectorization": layers.TextVectorization(
            vocabulary=["cat", "dog"], output_sequence_length=2
        ),
        "adapted": adapted,
    }


@pytest.mark.parametrize("name", vectorizers())
def test_a_lookup_that_nobody_writes_to_is_public(name):
    function = vectorizers()[name]
    shape = [2] * (function(tf.constant(WORDS)).shape.rank - 1)
    mapped = sampling.FullBatch().batches((WORDS, np.arange(60)))
    mapped = mapped.map(lambda x, y: (tf.ensure_shape(function(x), shape), y))
    x, _, _ = next(iter(mapped))
    np.testing.assert_array_equal(x, function(tf.constant(WORDS)))
    assert "vocabularies) that the function, given to map" in mapped.assumptions[0]


def test_a_variable_may_be_declared_beside_a_lookup():
    lookup, scale = vectorizers()["vocabulary"], tf.Variable(2.0)
    batches = sampling.FullBatch().batches((WORDS, np.arange(60)))

    def encode(x, y):
        return tf.cast(lookup(x), tf.float32) * scale, y

    with pytest.raises(ValueError, match=r"public=\[variable\]"):
        batches.map(encode)
    next(iter(batches.map(encode, public=[scale])))


class Task:
    """A task of KerasHub, as far as `fit` maps its preprocessor."""

    def preprocess_samples(self, x, y=None, sample_weight=None):
        tokens = tf.gather(np.arange(1000) % 7, tf.strings.length(x) + [0, 1, 2])
        return {"tokens": tokens}, tokens[1:], tf.constant([True, False])

    preprocess_samples.__module__ = "keras_hub.src.models.task"


def test_the_preprocessor_of_a_task_runs_and_is_an_assumption():
    """Its vocabulary may be large, and it weighs the tokens of each text."""
    mapped = sampling.Poisson(0.5).batches(WORDS).map(Task().preprocess_samples)
    assert "preprocessor of Task works on each record" in mapped.assumptions[0]
    for x, y, weights in mapped:
        assert x["tokens"].shape[1] == 3 and y.shape == weights.shape
        real = x["tokens"].numpy().any(axis=1)
        np.testing.assert_array_equal(weights, real[:, None] * [1.0, 0.0])


HUB = stack.KERAS_3 and importlib.util.find_spec("keras_hub") is not None


def text_classifier(models):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "eel"]
    tokenizer = models.BertTokenizer(words + [f"word{i}" for i in range(200)])
    backbone = models.BertBackbone(209, 1, 2, 8, 16, max_sequence_length=8, dropout=0)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    task = models.BertTextClassifier(
        backbone=backbone, num_classes=3, preprocessor=preprocessor
    )
    return task, (WORDS, np.arange(60) % 3)


def language_model(models):
    symbols = ["<|endoftext|>", "Ġ", "an", *"acdegilnot"]
    tokenizer = models.GPT2Tokenizer({s: k for k, s in enumerate(symbols)}, ["a n"])
    backbone = models.GPT2Backbone(
        len(symbols), 1, 2, 8, 16, max_sequence_length=8, dropout=0
    )
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    return models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor), WORDS


@pytest.mark.slow
@pytest.mark.skipif(not HUB, reason="keras_hub is not installed")
@pytest.mark.parametrize("make", [text_classifier, language_model])
@pytest.mark.parametrize("physical", [None, 8])
def test_a_task_of_keras_hub_is_fitted_on_texts(make, physical):
    import keras_hub

    task, data = make(keras_hub.models)
    plan = dpc.keras.PrivacyPlan(
        8, 1e-3, examples=60, batch_size=20, epochs=1, physical_batch_size=physical
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1, clip=1.0)
    task.compile(optimizer, dpc.keras.PerExampleLoss(loss), weighted_metrics=[])
    batches = plan.batches(data)
    task.fit(batches, verbose=0, callbacks=plan.callbacks)
    assert "preprocessor of " in str(plan.statement())
    # The elements are what the preprocessor makes of each text.
    x, _, weights = next(iter(batches.map(task.preprocess_samples)))
    count = int((weights.numpy().reshape(len(weights), -1) > 0).any(axis=1).sum())
    texts = next(iter(sampling.FullBatch().batches(WORDS)))[0]
    expected = task.preprocessor(texts)
    expected = expected[0] if isinstance(expected, tuple) else expected
    rows = {tuple(row) for row in np.array(expected["token_ids"])}
    assert {tuple(row) for row in x["token_ids"].numpy()[:count]} <= rows


_X, _Y = _numbered()
_BANK = tf.Variable(tf.zeros([2]), trainable=False)
_MUTABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
_ITERATOR = iter(tf.data.Dataset.from_tensor_slices(_X).repeat())


def _remember(x, y):
    _BANK.assign(x)
    return x, y


def _remembered(x, y):
    return x + _BANK, y


def _replayed(x, y):
    mixed = tf.cond(tf.random.uniform([]) < 0.5, lambda: next(_ITERATOR), lambda: x)
    return mixed, y


def _inserted(x, y):
    _MUTABLE.insert(y, y)
    return x, y


class TestWhatIsNoFunctionOfOneRecord:
    @pytest.mark.thinned(2)
    @pytest.mark.parametrize(
        "function, match",
        [
            (lambda x, y, w: (0.5 * x + 0.5 * tf.reverse(x, [0]), y, w), "one record"),
            (lambda x, y: (x, y, 1.0), "sample weight"),
            (lambda x, y: None, "returns nothing"),
            (lambda x, y: (tf.constant(_X), y), "each of the 60 records"),
            (lambda x, y: (0.5 * x + 0.5 * tf.constant(_X)[y - 1], y), "60 records"),
            (lambda x, y: (tf.gather(_X[:59].ravel(), [0, 1]), y), "bytes or more"),
            (_remember, "variable or a table"),
            (_remembered, "variable or a table"),
            (_replayed, "a second data set"),
            (_inserted, "variable or a table"),
            (lambda x, y: (tf.numpy_function(lambda a: a, [x], x.dtype), y), "Python"),
            (lambda x, y: (tf.py_function(lambda a: a, [x], x.dtype), y), "Python"),
            (lambda x, y: (x + tf.cast(tf.timestamp(), x.dtype), y), "Timestamp"),
            (lambda x, y: (x[: tf.cast(y, tf.int32)], y), "static shape"),
            (lambda x, y: (tf.io.read_file("/etc/hostname"), y), "same for all"),
        ],
        ids=lambda value: value if isinstance(value, str) else "function",
    )  # fmt: skip
    def test_is_refused(self, function, match):
        with pytest.raises(ValueError, match=match):
            _batches().map(function)

    def test_writing_stays_refused_where_reading_is_declared(self):
        with pytest.raises(ValueError, match="AssignVariableOp"):
            _batches().map(_remember, public=[_BANK])

    def test_a_function_that_looks_for_the_batch_does_not_find_it(self):
        """The function's arguments have no path to the remaining records."""
        seen = []

        def look(x, y):
            seen.append([op.type for op in x.graph.get_operations()])
            seen.append(x.graph.outer_graph)
            return x, y

        next(iter(_batches().map(look)))
        assert all(set(types) == {"Placeholder"} for types in seen[::2])
        assert not any(isinstance(g, tf.__internal__.FuncGraph) for g in seen[1::2])

    @pytest.mark.parametrize("value", [3, None, "f"])
    def test_no_function(self, value):
        with pytest.raises(ValueError, match="map_func must be"):
            _batches().map(value)


class TestWholeBatches:
    @pytest.mark.slow
    def test_are_an_assumption(self):
        batches = _batches().map_batches(lambda x, y: (x[::-1], y))
        assert "the function, which is assumed to keep" in batches.assumptions[0]
        assert batches.map(lambda x, y: (x, y)).repeat().assumptions
        assert not _batches().assumptions

    @pytest.mark.parametrize(
        "function, match",
        [
            (lambda x, y: (x[:3], y), "must keep the batch's"),
            (lambda x, y: (x, y, y), "sample weight"),
            (lambda x, y: (tf.repeat(x, 2, 0), y), "must keep the batch's"),
        ],
    )
    def test_rows_and_weights_stay(self, function, match):
        with pytest.raises(ValueError, match=match):
            _batches().map_batches(function)

    def test_rows_that_are_known_late_are_counted(self):
        batches = _batches().map_batches(
            lambda x, y: (tf.boolean_mask(x, tf.random.uniform([len(x)]) < 0.01), y)
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="must keep"):
            list(batches)


class TestMethodsOfDatasets:
    """Each method gives batches, refuses, or makes no data set of these."""

    _ARGUMENTS = {
        "map": (lambda x, y: (x, y),),
        "map_batches": (lambda x, y: (x, y),),
        "prefetch": (1,),
        "take": (2,),
        "with_options": (tf.data.Options(),),
        "apply": (lambda batches: batches.repeat(),),
    }

    def test_all_of_them(self):
        batches = _batches()
        for name in dir(tf.data.Dataset):
            if name.startswith("_") or name in refusals.READING:
                continue
            static = inspect.getattr_static(tf.data.Dataset, name)
            if isinstance(static, (staticmethod, classmethod)):
                continue
            method = getattr(batches, name)
            if name in self._ARGUMENTS or name == "repeat":
                derived = method(*self._ARGUMENTS.get(name, ()))
                assert type(derived) is sampling.Batches, name
                assert derived._drawer is batches._drawer, name
                with pytest.raises(ValueError, match="which records meet"):
                    derived.cache()
            else:
                with pytest.raises(ValueError, match="which records meet"):
                    method(1, 2)

    @pytest.mark.parametrize(
        "derive",
        [
            lambda b: b.map(lambda x, y: (x, y)).repeat().take(6),
            lambda b: b.take(6).map_batches(lambda x, y: (x, y)),
            lambda b: b.map(lambda x, y: (x + tf.random.normal([2]), y)),
        ],
    )
    def test_nothing_is_drawn_ahead(self, derive):
        for data in (_numbered(), _numbered()[0]):
            batches = _batches(data=data, accumulation_steps=2)
            if isinstance(data, tuple):
                batches = derive(batches)
            stream = iter(batches)
            for expected in range(1, 6):
                next(stream)
                assert batches._drawer.delivered == expected

    def test_apply_gives_batches_only(self):
        for function in (
            lambda batches: tf.data.Dataset.map(batches, lambda *e: e),
            lambda batches: tf.data.Dataset.range(3),
            lambda batches: _batches(),
        ):
            with pytest.raises(ValueError, match="which records meet"):
                _batches().apply(function)

    def test_nothing_runs_ahead_within_a_step(self):
        for batches in (
            _batches(accumulation_steps=2),
            sampling.ShuffledEpochs(7, 60).batches(_numbered()),
        ):
            with pytest.raises(ValueError, match="prefetch must be 0"):
                batches.prefetch(1)
            for name in ("inject_prefetch", "map_parallelization"):
                options = tf.data.Options()
                setattr(options.experimental_optimization, name, True)
                with pytest.raises(ValueError, match=name):
                    batches.with_options(options)

    def test_origin_is_known_through_own_methods_only(self):
        batches = _batches()
        derived = batches.map(lambda x, y: (x, y)).prefetch(1)
        assert provenance.origin(iter(derived)._dataset) is derived
        assert provenance.origin(tf.data.Dataset.prefetch(derived, 1)) is None
        assert provenance.drawers_of(tf.data.Dataset.zip((batches, derived))) == [
            batches._drawer
        ]


GENERATOR = tf.random.Generator.from_seed(1)
SEEDED = {
    "an op": lambda x: x + tf.random.normal(x.shape, seed=5),
    "a generator": lambda x: x + GENERATOR.normal(x.shape),
    "a branch": lambda x: tf.cond(
        x[0] > 0, lambda: x, lambda: x + tf.random.uniform(x.shape, seed=2)
    ),
}


@pytest.mark.parametrize("function", SEEDED.values(), ids=SEEDED)
def test_the_seed_of_random_numbers_is_an_assumption(function):
    mapped = sampling.Poisson(0.1).batches(np.zeros((40, 3), "float32")).map(function)
    assert any("seed of the random numbers" in text for text in mapped.assumptions)


UNSEEDED = {
    "an op": lambda x: x + tf.random.normal(x.shape),
    "one seed for all": lambda x: x + tf.random.stateless_normal(x.shape, [1, 2]),
    "none": lambda x: 2 * x,
}


@pytest.mark.parametrize("function", UNSEEDED.values(), ids=UNSEEDED)
def test_fresh_random_numbers_need_no_assumption(function):
    tf.random.set_seed(None)
    mapped = sampling.Poisson(0.1).batches(np.zeros((40, 3), "float32")).map(function)
    assert not mapped.assumptions


@pytest.fixture
def global_seed():
    tf.random.set_seed(5)
    yield
    tf.random.set_seed(None)


def _numbers_of_epochs(batches):
    return [np.sort(np.ravel(next(iter(batches))[0])) for _ in range(2)]


RANDOM = {
    "an op": lambda x: x + tf.random.uniform([1]),
    "a branch": lambda x: tf.cond(
        x[0] > -1, lambda: x + tf.random.normal([1]), lambda: x
    ),
    "a library's function": lambda x: tf.image.random_brightness(x[None, None], 0.5)[
        0, 0
    ],
    "a tf.function": tf.function(lambda x: x + tf.random.uniform([1])),
}


@pytest.mark.parametrize("function", RANDOM.values(), ids=RANDOM)
@pytest.mark.parametrize("method", ["map", "map_batches"])
def test_every_epoch_has_numbers_of_its_own_under_a_global_seed(
    global_seed, function, method
):
    """A random op of tf.data begins anew with each iterator."""
    batches = sampling.FullBatch().batches(np.zeros((16, 1), "float32"))
    if method == "map_batches":
        function = lambda x: x + tf.random.uniform([16, 1])  # noqa: E731
    changed = getattr(batches, method)(function)
    first, second = _numbers_of_epochs(changed)
    assert len(set(first)) > 8
    assert not np.isin(first, second).any()
    assert tf.random.uniform([]).numpy() == _first_number()  # The seed is as before.


def _first_number():
    tf.random.set_seed(5)
    return tf.random.uniform([]).numpy()


def test_the_lengths_of_fit_have_numbers_of_their_own_too(global_seed):
    batches = sampling.Poisson(0.9).batches(np.zeros((16, 1), "float32"))
    changed = batches.map(RANDOM["an op"])
    changed.take_as_drawn(True)
    first, second = _numbers_of_epochs(changed)
    assert not np.isin(first, second).any()


def test_numbers_that_repeat_by_a_seed_of_the_op_are_said():
    batches = sampling.FullBatch().batches(np.zeros((16, 1), "float32"))
    with pytest.warns(UserWarning, match="each epoch has the same numbers"):
        changed = batches.map(lambda x: x + tf.random.uniform([1], seed=3))
    first, second = _numbers_of_epochs(changed)
    assert np.array_equal(first, second)


def test_seeded_draws_have_seeded_numbers_and_a_warning(global_seed):
    """An experiment with `seed=` can be run again."""
    runs = []
    for _ in range(2):
        tf.random.set_seed(5)
        drawn = sampling.Poisson(0.5).batches(np.zeros((16, 1), "float32"), seed=1)
        with pytest.warns(UserWarning, match="each epoch has the same numbers"):
            runs.append(_numbers_of_epochs(drawn.map(RANDOM["an op"]))[0])
    assert np.array_equal(*runs)


@pytest.mark.parametrize("parallel", [None, 2])
def test_a_pipeline_whose_numbers_may_repeat_is_named(global_seed, parallel, tmp_path):
    data = tf.data.Dataset.from_tensor_slices(np.zeros((16, 1), "float32"))
    data = data.map(RANDOM["an op"], num_parallel_calls=parallel)
    with pytest.warns(UserWarning, match=r"plan.batches\(data\).map\(augment\)"):
        sampling.FullBatch().batches(data)
    stream = sampling.Stream(data, 16, folder=tmp_path)
    with pytest.warns(UserWarning, match=r"plan.batches\(data\).map\(augment\)"):
        sampling.RandomAllocation(1).batches(stream)


def test_the_ledger_of_a_loop_has_the_assumptions_about_the_data():
    drawn = sampling.Poisson(0.1).batches(np.zeros((40, 3), "float32"))
    for data in (drawn.map_batches(lambda x: 2 * x), drawn.map(SEEDED["an op"])):
        ledger = accounting.Ledger(1e-5)
        ledger.begin(noise_multiplier=1.0, sampling=data)
        (text,) = data.assumptions
        assert text in ledger.statement().assumptions
