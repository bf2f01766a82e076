"""unit="batch": the gradient of a physical batch is what is clipped.

One example moves the clipped gradient from anywhere in the ball to anywhere in it, so
the sensitivity is twice the rule's; batch normalisation may train, if what it keeps of
the batches is public.
"""

import json
import math
import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import (
    DPSGD,
    DPAdam,
    DPRecorder,
    L,
    Scatter,
    flat,
    mostly_slow,
    some_data,
)
from tests.stack import KERAS_3, MEAN, keras2_only
from tfdpclip import accounting, sampling
from tfdpclip._variables import unwrapped
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.clipping import (
    AutomaticClip,
    FixedClip,
    LayerwiseClip,
    PublicNormClip,
    QuantileClip,
    ScaledClip,
)
from tfdpclip.keras import PrivacyBudget, PrivateStateWarning, PublicBatchStatistics

SLACK = 1 + 1e-4
C = 0.5

RULES = {
    "fixed": FixedClip(C),
    "normalize": FixedClip(C, normalize=True),
    "quantile": QuantileClip(0.5, C, count_stddev=0.0),
    "automatic": AutomaticClip(),
    "layerwise": LayerwiseClip(C),
    "layerwise_quantile": LayerwiseClip(QuantileClip(0.5, C, count_stddev=0.0)),
    "public": PublicNormClip(C, norms={"one": 3.0, "bn": 1.0, "two": 0.1}),
    "scaled": ScaledClip({"one": 2.0, "bn": 1.0, "two": 9.0}, C),
}


def mixing_model():
    """Batch normalisation, and a layer that adds the neighbour's row."""
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential(
        [
            tf.keras.Input((3,)),
            L.Dense(4, name="one"),
            L.BatchNormalization(name="bn"),
            Scatter(),
            L.Dense(1, name="two"),
        ]
    )


class Steps:
    """Logical steps without noise; gives the released sum over the noise scales."""

    def __init__(self, rule, k=1, jit=False, make=mixing_model, public=None):
        self.model = make()
        self.k = k
        self.optimizer = DPRecorder(
            clip=rule, noise_multiplier=0, unit="batch", accumulation_steps=k
        )
        self.variables = self.model.trainable_variables
        self.optimizer.build(self.variables)
        self.state = [v.numpy() for v in self.optimizer._clip_state]
        if public is None:
            public = some_data(8, 3)[0]
        PublicBatchStatistics(public).attach(self.model)
        loss = tf.keras.losses.MeanSquaredError()

        @tf.function(
            input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])],
            jit_compile=jit,
        )
        def step(x, y):
            value = loss(y, self.model(x, training=True))
            self.optimizer.minimize(value, self.variables)

        self._step = step

    def __call__(self, batches):
        for variable, value in zip(self.optimizer._clip_state, self.state, strict=True):
            variable.assign(value)
        rule, state = self.optimizer.clip, self.optimizer.clip_state
        scales = np.asarray(rule.noise_scales(state))
        groups = rule.assignment or [0] * len(self.variables)
        scales = np.broadcast_to(scales, [max(groups) + 1])
        for x, y in batches:
            self._step(x, y)
        parts = zip(self.optimizer.seen, groups, strict=True)
        return self.k * np.concatenate(
            [p.numpy().ravel() / scales[g] for p, g in parts]
        )


def neighbours(kind):
    """Two batches that differ in their last example, and one without it."""
    x, y = some_data(6, 3, seed=4)
    other_x, other_y = x.copy(), y.copy()
    if kind == "opposite":
        y[-1], other_y[-1] = 1e4, -1e4
    elif kind == "nan":
        other_x[-1] = math.nan
    elif kind == "inf":
        other_y[-1] = math.inf
    else:
        other_x[-1], other_y[-1] = 1e3, 1e3
    return (x, y), (other_x, other_y), (x[:-1], y[:-1])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "rule", mostly_slow(["fixed", "layerwise_quantile", "scaled"], RULES)
)
@pytest.mark.slow
def test_one_example_moves_a_step_by_at_most_twice_the_noise_scale(rule, k):
    steps = Steps(RULES[rule], k)
    rest = [some_data(5, 3, seed=i) for i in range(1, k)]
    worst = 0.0
    for kind in ("opposite", "large", "nan", "inf"):
        released = [steps([batch, *rest]) for batch in neighbours(kind)]
        for a, b in ((0, 1), (0, 2), (1, 2)):
            moved = np.linalg.norm(released[a] - released[b])
            assert np.isfinite(moved) and moved <= 2 * SLACK, kind
            worst = max(worst, moved)
        if k == 1:
            assert np.linalg.norm(released[0]) <= SLACK
    # The factor 2 is needed: add-or-remove of one example reaches well beyond 1.
    assert worst > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_the_sensitivity_holds_compiled_by_xla(jit):
    steps = Steps(RULES["layerwise"], 1, jit)
    for kind in ("opposite", "nan"):
        first, second, _ = neighbours(kind)
        moved = np.linalg.norm(steps([first]) - steps([second]))
        assert moved <= 2 * SLACK


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rule", ["fixed", "layerwise", "automatic"])
def test_a_batch_with_an_example_that_is_not_a_number_is_dropped(rule):
    steps = Steps(RULES[rule], 1)
    _, bad, _ = neighbours("nan")
    assert np.all(steps([bad]) == 0)
    good, _, _ = neighbours("large")
    assert np.any(steps([good]) != 0)


def plain_gradient(model, x, y, loss):
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    return tape.gradient(value, model.trainable_variables)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("reduction", [MEAN, "none", "sum"])
@pytest.mark.thinned(3)
def test_a_huge_clip_without_noise_is_plain_training(reduction, k):
    """The mean of the plain gradients of the groups, which is also the divisor."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    batches = [some_data(n, 3, seed=n, outputs=2) for n in (5, 8)[:k]]

    def scalar(y, p):
        return tf.reduce_mean(loss(y, p))

    expected = sum(flat(plain_gradient(model, *b, scalar)) for b in batches) / k
    optimizer = DPRecorder(
        clip=1e9, noise_multiplier=0, unit="batch", accumulation_steps=k
    )
    model.compile(optimizer, loss)
    for batch in batches:
        model.train_on_batch(*batch)
    np.testing.assert_allclose(flat(optimizer.seen), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_fit_is_the_base_optimizers_own_where_nothing_is_clipped():
    results = []
    for optimizer in (
        tf.keras.optimizers.Adam(0.01),
        DPAdam(0.01, clip=1e9, noise_multiplier=0, unit="batch"),
    ):
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)]
        model = tf.keras.Sequential(layers)
        model.compile(optimizer, "mse")
        model.fit(*some_data(20, 3, outputs=2), batch_size=5, epochs=3, verbose=0)
        results.append(flat(model.trainable_variables))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_batch_and_group_clipping_of_known_gradients():
    """Gradients (3, 4), (-3, 4), (0, 2), C = 1: by hand."""
    gradients = np.array([[3, 4], [-3, 4], [0, 2]], np.float32)
    expected = {
        # The mean is (0, 10/3).
        ((0, 1, 2),): [0, 1],
        # The mean of the first two is (0, 4), and (0, 2) is alone.
        ((0, 1), (2,)): [0, 2],
        ((0,), (1,), (2,)): [0, 2.6],
    }
    for groups, total in expected.items():
        w = tf.Variable([0.0, 0.0])
        optimizer = DPRecorder(
            clip=1.0, noise_multiplier=0, unit="batch", accumulation_steps=len(groups)
        )

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def step(x, w=w, optimizer=optimizer):
            optimizer.minimize(tf.reduce_mean(tf.linalg.matvec(x, w)), [w])

        for group in groups:
            step(gradients[list(group)])
        found = optimizer.seen[0].numpy() * len(groups)
        np.testing.assert_allclose(found, total, atol=1e-6)


@pytest.mark.parametrize("z", [1.3])
def test_the_noise_is_z_times_the_clip_over_the_number_of_groups(z):
    """Six standard errors: a false alarm in 2e-9."""
    w = tf.Variable(tf.zeros([20_000]))
    optimizer = DPRecorder(
        clip=C, noise_multiplier=z, unit="batch", accumulation_steps=4
    )

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        optimizer.minimize(tf.reduce_sum(x) * w[0], [w])

    for count in (3, 0, 5, 1):
        step(tf.zeros([count]))
    noise = optimizer.seen[0].numpy()
    assert np.std(noise) == pytest.approx(z * C / 4, rel=6 / math.sqrt(40_000))
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("static", [False, True])
def test_an_empty_batch_is_a_step_of_noise(static):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(2)])
    optimizer = DPSGD(1.0, clip=C, noise_multiplier=1.0, unit="batch")
    loss = tf.keras.losses.MeanSquaredError()
    size = 0 if static else None

    @tf.function(input_signature=[tf.TensorSpec([size, 3]), tf.TensorSpec([size, 2])])
    def step(x, y):
        optimizer.minimize(loss(y, model(x)), model.trainable_variables)

    before = flat(model.trainable_variables)
    step(tf.zeros([0, 3]), tf.zeros([0, 2]))
    after = flat(model.trainable_variables)
    assert np.all(np.isfinite(after)) and np.all(after != before)


def test_padding_alone_is_a_step_of_noise():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(2)])
    optimizer = DPRecorder(clip=C, noise_multiplier=0, unit="batch")
    model.compile(optimizer, "mse")
    x, y = some_data(4, 3, outputs=2)
    model.train_on_batch(x, y, sample_weight=np.zeros(4, np.float32))
    assert np.all(flat(optimizer.seen) == 0)


def test_a_quantile_is_of_the_groups_and_needs_a_count_stddev():
    with pytest.raises(ValueError, match="count_stddev"):
        DPSGD(clip=QuantileClip(), noise_multiplier=1.0, unit="batch")
    rule = QuantileClip(0.5, 1.0, 1.0, count_stddev=0.0)
    optimizer = DPRecorder(
        clip=rule, noise_multiplier=0, unit="batch", accumulation_steps=4
    )
    w = tf.Variable([0.0])

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        optimizer.minimize(tf.reduce_mean(x) * w[0], [w])

    for norm in (0.5, 0.1, 0.2, 3.0):
        step(tf.constant([norm, norm]))
    # Three of four groups are within: the fraction is 3/4, whatever their sizes.
    assert float(optimizer.clip_norm) == pytest.approx(math.exp(-0.25), rel=1e-5)


def test_embeddings_shared_variables_and_float64_are_clipped_whole():
    class Tied(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.table = self.add_weight(
                name="table", shape=(7, 3), initializer="normal"
            )
            self.dense = L.Dense(3, dtype="float64")

        def call(self, ids):
            hidden = tf.cast(self.dense(tf.gather(self.table, ids)), tf.float32)
            logits = tf.einsum("btd,vd->btv", hidden, self.table)
            return tf.reduce_mean(logits, axis=[1, 2])[:, tf.newaxis]

    model = Tied()
    optimizer = DPRecorder(clip=C, noise_multiplier=0, unit="batch")
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).integers(7, size=(6, 4))
    model.train_on_batch(x, np.full([6, 1], 1e4, np.float32))
    assert np.linalg.norm(flat(optimizer.seen)) == pytest.approx(C, rel=1e-5)


# What batch normalisation keeps.


def bn_sequential():
    layers = [tf.keras.Input((3,)), L.Dense(4), L.BatchNormalization(), L.Dense(1)]
    return tf.keras.Sequential(layers)


def bn_nested():
    return tf.keras.Sequential([tf.keras.Input((3,)), bn_sequential(), L.Dense(1)])


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = bn_nested()
        self.norm = L.BatchNormalization(momentum=0.5)
        self.dense = L.Dense(1)

    def call(self, x, training=None):
        x = self.inner(x, training=training)
        return self.dense(self.norm(x, training=training))


class Decorated(Subclassed):
    """The batch is normalised within a function of its own."""

    def call(self, x, training=None):
        # Keras 3 would not tell a tf.function whether it trains.
        return self.inside(x, training)

    @tf.function
    def inside(self, x, training):
        return super().call(x, training=training)


def bn_twice():
    """One layer, called twice."""
    entry = tf.keras.Input((3,))
    norm = L.BatchNormalization()
    first = norm(L.Dense(4)(entry))
    return tf.keras.Model(entry, L.Dense(1)(norm(L.Dense(4)(first))))


MODELS = {
    "sequential": bn_sequential,
    "nested": bn_nested,
    "subclassed": Subclassed,
    "decorated": Decorated,
    "twice": bn_twice,
}
WAYS = {
    "plain": ({}, 1),
    "jit": ({"jit_compile": True}, 1),
    "several": ({"steps_per_execution": 3}, 1),
    "several_jit": ({"steps_per_execution": 3, "jit_compile": True}, 1),
    "accumulation": ({}, 3),
    "accumulation_several": ({"steps_per_execution": 2}, 3),
}


def statistics(model):
    norms = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, L.BatchNormalization)
    ]
    return [v for layer in norms for v in (layer.moving_mean, layer.moving_variance)]


WEIGHTS_FILE = "its.weights.h5" if KERAS_3 else "weights.h5"


class Watch(tf.keras.callbacks.Callback):
    """Keeps the statistics at the end of every execution, and their file's."""

    def __init__(self, path):
        super().__init__()
        self.path, self.seen = path, []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([v.numpy() for v in statistics(self.model)])
        self.model.save_weights(self.path)


def public_statistics(model, public):
    """Of every normalisation, from one training pass over the public data."""
    copy_of = [v.numpy() for v in model.weights]
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, L.BatchNormalization)
    ]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    model(tf.constant(public), training=True)
    found = [v.numpy() for v in statistics(model)]
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    for variable, value in zip(model.weights, copy_of, strict=True):
        variable.assign(value)
    return found


QUICK_WAYS = [
    ("sequential", "plain"),
    ("nested", "several"),
    ("subclassed", "accumulation"),
    ("sequential", "several_jit"),
    ("decorated", "plain"),
    ("twice", "jit"),
]


def every_way():
    for model in MODELS:
        for way in WAYS:
            marks = [] if (model, way) in QUICK_WAYS else [pytest.mark.slow]
            yield pytest.param(model, way, marks=marks, id=f"{model}-{way}")


@pytest.mark.parametrize("name, way", list(every_way()))
@pytest.mark.slow
def test_moving_statistics_never_depend_on_private_data(name, way, tmp_path):
    """Two runs on other private data, from one start, with a learning rate of 0.

    Then the weights are the same, and everything that is kept must be, too.
    """
    options, k = WAYS[way]
    public = some_data(8, 3, seed=5)[0]
    found = []
    for seed in (1, 2):
        tf.keras.utils.set_random_seed(3)
        model = MODELS[name]()
        optimizer = DPSGD(
            0.0, clip=C, noise_multiplier=1.0, unit="batch", accumulation_steps=k
        )
        model.compile(optimizer, "mse", **options)
        watch = Watch(str(tmp_path / WEIGHTS_FILE))
        x, y = some_data(24, 3, seed=seed)
        model.fit(
            100 * x + 50,
            y,
            batch_size=4,
            epochs=2,
            verbose=0,
            callbacks=[watch, PublicBatchStatistics(public)],
        )
        expected = public_statistics(model, public)
        for seen in (*watch.seen, [v.numpy() for v in statistics(model)]):
            for value, public_value in zip(seen, expected, strict=True):
                if name != "twice":
                    np.testing.assert_allclose(value, public_value, 1e-4, 1e-5)
        model.load_weights(watch.path)
        found.append((watch.seen, [v.numpy() for v in statistics(model)]))
    tf.nest.map_structure(np.testing.assert_array_equal, *found)


@pytest.mark.slow
def test_statistics_follow_the_weights_before_every_evaluation():
    public, private = some_data(64, 3, seed=5)[0], some_data(32, 3, seed=6)
    model = bn_sequential()
    model.compile(DPSGD(0.5, clip=C, noise_multiplier=1.0, unit="batch"), "mse")
    seen = []

    class AtTest(tf.keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            expected = public_statistics(self.model, public)
            for v, value in zip(statistics(self.model), expected, strict=True):
                np.testing.assert_allclose(v, value, rtol=1e-3, atol=1e-5)
            seen.append(batch)

    model.fit(
        *private,
        epochs=3,
        verbose=0,
        validation_data=some_data(8, 3),
        callbacks=[PublicBatchStatistics(public), AtTest()],
    )
    assert len(seen) == 3


def test_statistics_of_many_public_batches_are_pooled():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((50, 3)) * [1, 5, 0.1] + [0, 3, 9]).astype("float32")
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.BatchNormalization()])
    PublicBatchStatistics(x, batch_size=7).attach(model)
    norm = model.layers[0]
    np.testing.assert_allclose(norm.moving_mean, x.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, x.var(0), rtol=1e-3)
    assert norm.momentum == 0.99


def test_statistics_of_images_are_pooled():
    """The fused kernel gives the unbiased variance of each batch."""
    x = np.random.default_rng(0).standard_normal((10, 2, 2, 3)).astype("float32")
    layers = [tf.keras.Input((2, 2, 3)), L.BatchNormalization()]
    model = tf.keras.Sequential(layers)
    PublicBatchStatistics(x, batch_size=2).attach(model)
    expected = x.reshape(-1, 3).var(0)
    np.testing.assert_allclose(model.layers[0].moving_variance, expected, rtol=0.03)


def test_training_without_public_statistics_is_refused_and_leaves_none():
    model = bn_sequential()
    model.compile(DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch"), "mse")
    before = [v.numpy() for v in statistics(model)]
    with pytest.raises(ValueError, match="moving_mean.*PublicBatchStatistics"):
        model.fit(*some_data(8, 3), verbose=0)
    for variable, value in zip(statistics(model), before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("name", ["nested", "subclassed", "decorated"])
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}], ids=str)
@pytest.mark.thinned(4)
def test_hidden_normalisation_is_refused_as_well(name, options):
    model = MODELS[name]()
    # Keras 3 builds where nothing is written, and a tf.function keeps that trace.
    model(some_data(2, 3)[0])
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(optimizer, "mse", **options)
    with pytest.raises(ValueError, match="PublicBatchStatistics"):
        model.fit(*some_data(12, 3), batch_size=4, verbose=0)


def test_a_frozen_normalisation_needs_nothing():
    model = bn_sequential()
    model.layers[1].trainable = False
    model.compile(DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch"), "mse")
    model.fit(*some_data(8, 3), verbose=0)
    assert np.all(statistics(model)[0].numpy() == 0)


@pytest.mark.parametrize("data", [None, "x", 3])
def test_public_data_that_is_no_data_is_refused(data):
    with pytest.raises(ValueError, match="data must be arrays"):
        PublicBatchStatistics(data)


def test_public_statistics_say_what_they_cannot_do():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    with pytest.raises(ValueError, match="no BatchNormalization"):
        PublicBatchStatistics(some_data(4, 3)[0]).attach(model)
    with pytest.raises(ValueError, match="batch_size"):
        PublicBatchStatistics(some_data(4, 3)[0], batch_size=0)
    with pytest.raises(ValueError, match="no examples"):
        PublicBatchStatistics(np.zeros([0, 3], np.float32)).attach(bn_sequential())


def test_a_data_set_and_pairs_are_public_data_too():
    x, y = some_data(8, 3)
    found = []
    for data in (x, (x, y), tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
        tf.keras.utils.set_random_seed(1)
        model = bn_sequential()
        PublicBatchStatistics(data).attach(model)
        found.append([v.numpy() for v in statistics(model)])
    for others in zip(*found, strict=True):
        np.testing.assert_array_equal(others[1], others[0])
        np.testing.assert_array_equal(others[2], others[0])


class Keeps(L.Layer):
    """Keeps something of each batch; `read` whether the step reads it."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def build(self, shape):
        self.mean = self.add_weight(
            name="mean",
            shape=(shape[-1],),
            initializer="zeros",
            trainable=False,
        )

    def call(self, x, training=None):
        if not training:
            return x - self.mean
        mean = tf.reduce_mean(x, axis=0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean if self.read else mean)
        return x - mean


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=str)
@pytest.mark.slow
def test_another_layers_state_is_warned_about(read, options):
    model = tf.keras.Sequential([tf.keras.Input((3,)), Keeps(read), L.Dense(1)])
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    with pytest.warns(PrivateStateWarning, match="mean:0.*without noise") as found:
        model.fit(*some_data(8, 3), batch_size=2, verbose=0)
    # Nothing is said about the metrics.
    text = str([w.message for w in found if w.category is PrivateStateWarning][0])
    assert "total" not in text and "count" not in text


def _in_a_case(variable, value):
    write = [lambda: variable.assign(value), lambda: variable.assign(-value)]
    tf.switch_case(tf.cast(tf.reduce_sum(value) > 0, tf.int32), write)


WRITES = {
    "some entries": lambda v, value: v.scatter_nd_add([[0], [1]], value[:2]),
    "rows": lambda v, value: v.scatter_update(tf.IndexedSlices(value[0], 0)),
    "a slice": lambda v, value: v[:2].assign(value[:2]),
    "in a case": _in_a_case,
    "of a frozen layer": lambda v, value: v.assign(value),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("how", WRITES)
def test_so_is_what_is_written_in_other_ways(how):
    class Written(L.Layer):
        def build(self, shape):
            frozen = how == "of a frozen layer"
            self.mean = self.add_weight(
                name="mean", shape=(3,), initializer="zeros", trainable=frozen
            )
            self.trainable = not frozen

        def call(self, x):
            WRITES[how](unwrapped(self.mean), tf.reduce_mean(x, axis=0))
            return x

    model = tf.keras.Sequential([tf.keras.Input((3,)), Written(), L.Dense(1)])
    model.compile(
        DPSGD(0.1, clip=C, noise_multiplier=1.0, expected_batch_size=2), "mse"
    )
    with pytest.warns(PrivateStateWarning, match="mean:0.*without noise"):
        model.fit(*some_data(4, 3), batch_size=2, verbose=0)


def test_statistics_that_are_put_back_are_not_read_before_that():
    """A layer that normalises by the running mean that it has just written."""

    class Running(L.BatchNormalization):
        def call(self, x, training=None, mask=None):
            mean = unwrapped(self.moving_mean)
            mean.assign(0.5 * mean + 0.5 * tf.reduce_mean(x, axis=0))
            return x - mean

    x, y = some_data(8, 3)
    model = tf.keras.Sequential([tf.keras.Input((3,)), Running(), L.Dense(1)])
    options = {"noise_multiplier": 1.0, "expected_batch_size": 8}
    model.compile(DPSGD(0.1, clip=C, **options), "mse")
    with pytest.raises(Exception, match="The loss reads the variable"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[PublicBatchStatistics(x)])


@pytest.mark.slow
def test_metrics_and_dropout_are_no_private_state():
    layers = [tf.keras.Input((3,)), L.Dense(4), L.Dropout(0.5), L.Dense(1)]
    model = tf.keras.Sequential(layers)
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(optimizer, "mse", metrics=["mae", tf.keras.metrics.AUC()])
    x, y = some_data(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivateStateWarning)
        model.fit(x, (y > 0).astype("float32"), verbose=0)
    assert int(optimizer.iterations) == 1


@keras2_only("run_eagerly=True is refused, see held_loss_test.py")
def test_eager_steps_are_refused():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(optimizer, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match='unit="batch" needs a graph'):
        model.fit(*some_data(8, 3), verbose=0)


# Settings.


@pytest.mark.parametrize("unit", ["group", "batches", None, 1])
def test_a_unit_that_is_none_is_refused(unit):
    with pytest.raises(ValueError, match="unit must be one of example, person, batch"):
        DPSGD(clip=C, noise_multiplier=1.0, unit=unit)


def test_the_unit_is_known_and_saved():
    optimizer = DPSGD(clip=C, noise_multiplier=1.0, unit="batch")
    assert (optimizer.unit, optimizer.expected_batch_size) == ("batch", None)
    groups = DPSGD(clip=C, noise_multiplier=1.0, unit="batch", accumulation_steps=3)
    assert groups.unit == "group"
    for one in (optimizer, groups):
        again = DPSGD.from_config(
            json.loads(json.dumps(one.get_config(), default=float))
        )
        assert again.unit == one.unit
        assert again.get_config() == one.get_config()


# Accounting.


def drawn(k=1, count=60, rate=0.2, scheme=None, **options):
    x, y = some_data(count, 3)
    scheme = sampling.Poisson(rate) if scheme is None else scheme
    return scheme.batches((x, y), accumulation_steps=k, **options)


def fit(batches, k=1, epochs=2, **options):
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(
        0.1, clip=C, noise_multiplier=3.0, unit="batch", accumulation_steps=k
    )
    model.compile(optimizer, "mse", **options)
    budget = PrivacyBudget(math.inf, 1e-5, batches)
    model.fit(batches, epochs=epochs, verbose=0, callbacks=[budget])
    return budget, optimizer


def test_the_ledger_counts_batch_clipping_with_half_the_noise():
    budget, _ = fit(drawn())
    expected = accounting.epsilon(1.5, 10, sampling.Poisson(0.2), 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-3)
    assert "batch" in str(budget.statement)


def test_group_clipping_needs_independent_groups():
    with pytest.raises(PrivacyMismatchError, match="independent_groups=True"):
        fit(drawn(3), 3)
    budget, optimizer = fit(drawn(3, independent_groups=True), 3)
    assert int(optimizer.iterations) == budget.ledger.steps == 10
    expected = accounting.epsilon(1.5, 10, sampling.Poisson(0.2), 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-3)


def test_group_clipping_of_the_full_batch():
    batches = drawn(2, scheme=sampling.FullBatch(), independent_groups=True)
    budget, _ = fit(batches, 2, epochs=3)
    expected = accounting.epsilon(1.5, 3, sampling.FullBatch(), 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected, rel=1e-6)


def test_independent_groups_are_for_group_clipping_only():
    batches = drawn(3, independent_groups=True)
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(1)])
    optimizer = DPSGD(
        0.1,
        clip=C,
        noise_multiplier=3.0,
        expected_batch_size=12,
        accumulation_steps=3,
    )
    model.compile(optimizer, "mse")
    with pytest.raises(PrivacyMismatchError, match="independent_groups"):
        model.fit(
            batches, verbose=0, callbacks=[PrivacyBudget(math.inf, 1e-5, batches)]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [sampling.FixedSize(12, 60), sampling.ShuffledEpochs(12, 60)],
    ids=["fixed", "shuffled"],
)
def test_replacing_a_record_changes_one_group_anyway(scheme):
    """Neighbours are by replacement there: groups may be filled in order."""
    batches = drawn(3, scheme=scheme)
    assert batches.independent_groups
    budget, _ = fit(batches, 3)
    assert budget.ledger.steps == 10
    with pytest.raises(ValueError, match="independent_groups"):
        drawn(3, scheme=scheme, independent_groups=True)


def test_a_scheme_with_a_capacity_has_no_independent_groups():
    scheme = sampling.Poisson(0.2, capacity=20, population=60)
    with pytest.raises(ValueError, match="independent_groups"):
        drawn(3, scheme=scheme, independent_groups=True)


def groups_of(batches, steps):
    """`[steps, count]`: the group of each record, -1 for those not drawn.

    Records are told apart by their first feature.
    """
    k = batches.accumulation_steps
    elements = iter(batches.repeat())
    found = np.full([steps, batches.population], -1)
    for step in range(steps):
        for group in range(k):
            x, _, weight = next(elements)
            ids = x.numpy()[weight.numpy() > 0, 0].astype(int)
            assert np.all(found[step, ids] == -1)
            found[step, ids] = group
    return found


def numbered(count, rate, k, **options):
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    return sampling.Poisson(rate).batches(
        (x, x), accumulation_steps=k, independent_groups=True, **options
    )


@pytest.mark.slow
def test_every_record_goes_to_a_group_of_its_own_choice():
    """Each of (record, group) and of (pair of records, same group) by a binomial.

    Bounds of 6 standard deviations for 2 x 30 x 3 and 435 counts: below 1e-6.
    """
    count, k, steps = 30, 3, 3000
    found = groups_of(numbered(count, 0.5, k), steps)
    drawn_at_all = found >= 0
    n = steps * 0.5
    assert np.all(np.abs(drawn_at_all.sum(0) - n) < 6 * math.sqrt(n / 2))
    for group in range(k):
        hits = (found == group).sum(0)
        p = 0.5 / k
        sd = math.sqrt(steps * p * (1 - p))
        assert np.all(np.abs(hits - steps * p) < 6 * sd)
    together = np.zeros([count, count])
    for group in range(k):
        member = (found == group).astype(float)
        together += member.T @ member
    p = 0.25 / k
    sd = math.sqrt(steps * p * (1 - p))
    off = together[~np.eye(count, dtype=bool)]
    assert np.all(np.abs(off - steps * p) < 6 * sd)


@pytest.mark.slow
def test_group_sizes_are_binomial():
    """Filled one after the other they would be equal, or the last one short."""
    count, k, steps = 40, 4, 2000
    found = groups_of(numbered(count, 0.5, k), steps)
    sizes = np.stack([(found == group).sum(1) for group in range(k)], axis=1)
    p = 0.5 / k
    mean, variance = count * p, count * p * (1 - p)
    # Six standard errors of the mean and (with kurtosis near 3) of the variance.
    assert abs(sizes.mean() - mean) < 6 * math.sqrt(variance / sizes.size)
    assert abs(sizes.var() / variance - 1) < 6 * math.sqrt(2.1 / sizes.size)
    # The sizes of two groups are nearly uncorrelated under Poisson sampling.
    expected = -p / (1 - p)
    found = np.corrcoef(sizes[:, 0], sizes[:, 1])[0, 1]
    assert abs(found - expected) < 6 / math.sqrt(steps)


@pytest.mark.slow
def test_a_record_more_leaves_the_others_where_they_are():
    """The coupling behind the accounting, by the conditional distribution.

    Given who else was drawn, the others' groups are as likely with the record as
    without it: chi-square over the 2 x 8 outcomes of three others, 1e-7 quantile of
    7 degrees of freedom (46.5).
    """
    batches = numbered(4, 0.999999, 2)
    found = groups_of(batches, 4000)
    outcome = found[:, 0] * 4 + found[:, 1] * 2 + found[:, 2]
    with_first = np.bincount(outcome[found[:, 3] == 0], minlength=8)
    with_second = np.bincount(outcome[found[:, 3] == 1], minlength=8)
    total = with_first + with_second
    expected = np.outer([with_first.sum(), with_second.sum()], total / total.sum())
    table = np.stack([with_first, with_second])
    assert ((table - expected) ** 2 / expected).sum() < 46.5
    assert np.all(total > 300)


def test_independent_groups_never_repeat_a_step():
    batches = numbered(30, 0.5, 3, seed=5)
    again = numbered(30, 0.5, 3, seed=5)
    first = groups_of(batches, 20)
    np.testing.assert_array_equal(first, groups_of(again, 20))
    assert len({row.tobytes() for row in first}) == 20


@pytest.mark.slow
def test_group_sizes_stay_below_the_capacity_of_their_rows():
    batches = numbered(200, 0.3, 4)
    found = groups_of(batches, 300)
    sizes = np.stack([(found == group).sum(1) for group in range(4)])
    assert sizes.max() < batches.physical_batch_size


# Learning.


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (data.images / 16.0).astype("float32")[..., np.newaxis]
    return x, data.target


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.slow
def test_batch_clipping_learns_digits_with_batch_normalisation(k):
    """Chance is 10%; the noise on a mean of 64 examples is that of z = 0.2."""
    x, y = digits()
    public, private = (x[:300], y[:300]), (x[300:1500], y[300:1500])
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            L.Conv2D(16, 3, strides=2, use_bias=False),
            L.BatchNormalization(),
            L.ReLU(),
            L.Flatten(),
            L.Dense(10),
        ]
    )
    optimizer = DPAdam(
        0.01, clip=0.3, noise_multiplier=0.2, unit="batch", accumulation_steps=k
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        *private,
        batch_size=64,
        epochs=6 * k,
        verbose=0,
        callbacks=[PublicBatchStatistics(public)],
    )
    _, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
    assert accuracy > 0.6


def _kept_in_python():
    kept = [0.0]

    def swap(value):
        before, kept[0] = kept[0], float(value)
        return np.float32(before)

    return lambda y: tf.py_function(swap, [tf.reduce_mean(y)], tf.float32)


def _kept_in_numpy():
    return lambda y: tf.numpy_function(np.mean, [y], tf.float32)


def _kept_in_a_queue():
    queue = tf.queue.FIFOQueue(9, [tf.float32], shapes=[[]])
    queue.enqueue(1.0)

    def swap(y):
        before = queue.dequeue()
        with tf.control_dependencies([queue.enqueue(tf.reduce_mean(y))]):
            return tf.identity(before)

    return swap


def _kept_in_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
    key = tf.constant(3, tf.int64)

    def swap(y):
        before = table.lookup(key)
        with tf.control_dependencies([table.insert(key, tf.reduce_mean(y))]):
            return tf.identity(before)

    return swap


def _kept_in_a_file(path="no/such/file"):
    return lambda y: tf.strings.to_number(tf.io.read_file(path)) + 0 * y[0, 0]


def _inside(function):
    return lambda y: tf.function(function)(y)


@pytest.mark.parametrize(
    "kept",
    [
        _kept_in_python(),
        _kept_in_numpy(),
        _kept_in_a_queue(),
        _kept_in_a_table(),
        _kept_in_a_file(),
        _inside(_kept_in_python()),
        _inside(_kept_in_a_queue()),
        _inside(_kept_in_a_table()),
    ],
)
@pytest.mark.thinned(6)
def test_what_another_batch_left_does_not_reach_this_ones_gradient(kept):
    model = tf.keras.Sequential([L.Dense(1)])
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(
        optimizer, lambda y, p: tf.reduce_mean((y - p) ** 2) * tf.reshape(kept(y), [])
    )
    with pytest.raises(Exception, match="may be\\s+of other batches"):
        model.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), verbose=0)
    assert int(optimizer.iterations) == 0


def test_nor_by_a_gradient_of_its_own():
    swap = _kept_in_python()

    @tf.custom_gradient
    def passing(p, y):
        def backward(upstream):
            return upstream + tf.reshape(swap(y), []), None

        return tf.identity(p), backward

    model = tf.keras.Sequential([L.Dense(1)])
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch")
    model.compile(optimizer, lambda y, p: tf.reduce_mean((y - passing(p, y)) ** 2))
    with pytest.raises(Exception, match="may be\\s+of other batches"):
        model.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), verbose=0)


@pytest.mark.slow
def test_what_keeps_nothing_is_allowed_in_a_clipped_batch():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2.0], tf.int64, tf.float32), 1.0
    )

    def loss(y, p):
        tf.debugging.assert_all_finite(p, "p")
        weight = table.lookup(tf.ones([], tf.int64))
        parts = tf.map_fn(lambda row: row * 2, p - y)
        return weight * tf.reduce_mean(parts**2)

    model = tf.keras.Sequential(
        [L.Dense(4), L.Dropout(0.5), L.Reshape((2, 2)), L.LSTM(3), L.Dense(1)]
    )
    model.compile(DPSGD(0.1, clip=C, noise_multiplier=1.0, unit="batch"), loss)
    model.fit(np.ones((8, 2), np.float32), np.ones((8, 1), np.float32), verbose=0)
    assert int(model.optimizer.iterations) == 1
