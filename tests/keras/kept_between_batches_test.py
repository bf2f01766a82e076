"""State kept from a batch raises a warning, and reaches no later gradient."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, L, some_data
from tfdpclip._variables import unwrapped
from tfdpclip.keras import PrivateStateWarning

C = 0.5


class Keeps(L.Layer):
    """Keeps a mean of each batch; `read` says whether the step reads the kept mean."""

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
    with pytest.raises(Exception, match="of\\s+other batches"):
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
    with pytest.raises(Exception, match="of\\s+other batches"):
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
