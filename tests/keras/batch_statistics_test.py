"""Batch normalisation may train if its moving statistics are of public data."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L, some_data
from tests.stack import KERAS_3
from tfdpclip._variables import unwrapped
from tfdpclip.keras import PublicBatchStatistics

C = 0.5


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
    """A layer that is called twice."""
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
    """The statistics of every normalisation, from a training pass over public data."""
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
    """Trains twice from the same start on different private data, with learning rate 0.

    The weights stay equal, so the moving statistics must be equal as well.
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


class ReadsStatistics(Subclassed):
    """Trains in inference mode."""

    def train_step(self, data):
        x, y, w = tf.keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=False), w)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class MetricsAfterwards(ReadsStatistics):
    """Measures the new weights by a second call, in training mode."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"mean": tf.reduce_mean(self(data[0], training=True))}


@pytest.mark.parametrize("unit", ["example", "batch"])
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}], ids=str)
@pytest.mark.thinned(2)
def test_a_step_that_writes_statistics_after_the_private_step_is_refused(unit, options):
    x, y = some_data(24, 3)
    model = MetricsAfterwards()
    model(x)
    size = {"expected_batch_size": 8} if unit == "example" else {}
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, unit=unit, **size)
    model.compile(optimizer, "mse", **options)
    callbacks = [PublicBatchStatistics(x)]
    with pytest.raises(Exception, match="training=False"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)


def test_statistics_that_are_written_after_the_step_are_not_read_in_the_next():
    """In a loop, which no callback watches."""
    x, y = some_data(8, 3)
    model = bn_sequential()
    PublicBatchStatistics(x).attach(model)
    optimizer = DPSGD(0.1, clip=C, noise_multiplier=1.0, expected_batch_size=8)

    @tf.function
    def step():
        losses = tf.square(model(x, training=False) - y)[:, 0]
        optimizer.minimize(losses, model.trainable_variables)
        return model(x, training=True)

    step()
    with pytest.raises(tf.errors.InvalidArgumentError, match="training=False"):
        step()


@pytest.mark.slow
def test_statistics_that_are_computed_again_may_be_read():
    """In every epoch, the public statistics are others."""
    x, y = some_data(24, 3)
    model = ReadsStatistics()
    model(x)
    options = {"noise_multiplier": 1.0, "expected_batch_size": 8}
    model.compile(DPSGD(0.1, clip=C, **options), "mse")
    seen = [v.numpy() for v in statistics(model)]
    public = PublicBatchStatistics(x)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[public])
    assert any(np.any(v != w) for v, w in zip(statistics(model), seen, strict=True))
