"""Ways past the analysis and past the comparison of batches: each is refused.

State that is no variable is written and read by ops that no tensor joins; and draws
that depend on the data cannot be computed again with new data.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.fuzz.channels import CHANNELS, through
from tests.gradients.cases import (
    assert_reaches_no_other,
    norms_of,
    randoms,
    squash,
    variable,
)
from tfdpclip.gradients import ExampleIsolationError

pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]
X = randoms(24, 3)
W, U = variable(3, 5), variable(5, 4)


def largest(h):
    return tf.reduce_max(tf.norm(tf.stop_gradient(h), axis=1))


class Array:
    """A tensor array of TensorFlow 1's control flow, which lives for one run."""

    def write(self, value):
        self._handle, self._flow = tf.raw_ops.TensorArrayV3(
            size=1, dtype=tf.float32, element_shape=tf.TensorShape([])
        )
        return tf.raw_ops.TensorArrayWriteV3(
            handle=self._handle, index=0, value=value, flow_in=self._flow
        )

    def read(self):
        return tf.raw_ops.TensorArrayReadV3(
            handle=self._handle,
            index=tf.identity(0),
            flow_in=tf.identity(self._flow),
            dtype=tf.float32,
        )


class PythonInDataSet(CHANNELS["python"]):
    def read(self):
        read = super().read
        data = tf.data.Dataset.from_tensors(0.0).map(lambda _: read())
        return data.reduce(0.0, lambda old, new: new)


KINDS = CHANNELS | {"array": Array, "Python in a data set": PythonInDataSet}


@pytest.mark.parametrize("kind", KINDS.values())
def test_what_is_written_elsewhere_and_read_again_is_refused(kind):
    channel = kind()

    def loss(x):
        h = x @ W
        return squash(h / (1 + through(channel, largest(h))) @ U)

    with pytest.raises(ExampleIsolationError, match="other batches|Python code"):
        norms_of(loss, [W, U], X)


@pytest.mark.parametrize("kind", KINDS.values())
def test_and_so_on_the_way_back(kind):
    channel = kind()

    @tf.custom_gradient
    def damped(h):
        return tf.identity(h), lambda dy: dy / (1 + through(channel, largest(h)))

    with pytest.raises(ExampleIsolationError, match="other batches|Python code"):
        norms_of(lambda x: squash(damped(x @ W) @ U), [W, U], X)


@pytest.mark.parametrize("size", [1, 24])
def test_a_gradient_is_looked_at_whether_anything_is_checked_or_not(size):
    queue = CHANNELS["queue"]()

    @tf.custom_gradient
    def damped(h):
        return tf.identity(h), lambda dy: dy / (1 + through(queue, largest(h)))

    def loss(x):
        return squash(damped(x @ W) @ U)

    with pytest.raises(ExampleIsolationError, match="other batches"):
        norms_of(loss, [W, U], X[:size], dynamic=False, when="never")


@pytest.mark.parametrize("kind", [CHANNELS["table"], CHANNELS["queue"]])
def test_what_an_earlier_batch_left_is_refused(kind):
    channel = kind()

    def loss(x):
        h, before = x @ W, tf.reshape(channel.read(), [])
        with tf.control_dependencies([channel.write(tf.maximum(before, largest(h)))]):
            return squash(h / (1 + tf.identity(before)) @ U)

    with pytest.raises(ExampleIsolationError, match="other batches"):
        norms_of(loss, [W, U], X)


@pytest.mark.slow
def test_a_table_that_nobody_writes_to_is_read():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], [0.5, 2.0], tf.int32, tf.float32),
        1.0,
    )
    kinds = tf.range(24) % 3

    def loss(x, kinds):
        return squash(x @ W @ U) * table.lookup(kinds)

    assert norms_of(loss, [W, U], X, kinds).shape == [24]


def assert_not_damped(loss):
    """Asserts that a giant in row 0 does not make the remaining gradients small."""
    factors = np.where(np.arange(len(X)) == 0, 1e8, 1.0).astype("float32")
    norms = norms_of(loss, [W], X * factors[:, np.newaxis])
    # A squashed row may be flat of its own accord; damping by row 0 flattens all rows.
    assert (norms.numpy()[1:] > 1e-3).mean() > 0.5


DRAWS = {
    "categorical": lambda h: h * (0.5 + tf.one_hot(_drawn_classes(h), 5)),
    "gamma": lambda h: h + 0.001 * tf.random.gamma([], tf.nn.softplus(h) + 0.1),
    "poisson": lambda h: h + tf.stop_gradient(tf.random.poisson([], h**2)),
    "in a loop": lambda h: tf.map_fn(lambda row: row * tf.random.uniform([], 0.9), h),
    "in a branch": lambda h: tf.cond(
        tf.random.uniform([]) < 0.9, lambda: tf.nn.dropout(h, 0.1), lambda: h
    ),
}


def _drawn_classes(h):
    return tf.random.categorical(tf.stop_gradient(h), 1)[:, 0]


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_for_one_example_sees_no_other(name):
    """In the batch, each row is damped by the norm of row 0."""

    def loss(x):
        h = tf.stop_gradient(x @ W)
        row = tf.cast(h[:, 0] > 1e9, tf.int32)
        scale = 1 / (1 + tf.norm(tf.gather(h, row), axis=1))
        scale, h = tf.stop_gradient(scale)[:, tf.newaxis], x @ W
        damped = scale * h + tf.stop_gradient((1 - scale) * h)
        return squash(DRAWS[name](damped) @ U)

    assert_not_damped(loss)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.thinned(3)
def test_what_is_known_to_be_apart_need_not_be(name):
    found = norms_of(lambda x: squash(DRAWS[name](x @ W) @ U), [W, U], X)
    assert np.isfinite(found).all()


def test_nor_does_a_gradient_of_its_own_pass_there():
    @tf.custom_gradient
    def damped(h):
        return tf.identity(h), lambda dy: dy / (1 + largest(h))

    def loss(x):
        return squash(DRAWS["gamma"](damped(x @ W)) @ U)

    assert_not_damped(loss)


def test_nor_does_one_in_a_loop():
    def loss(x):
        h = x @ W

        @tf.custom_gradient
        def damped(row):
            return tf.identity(row), lambda dy: dy / (1 + largest(h))

        draw = tf.random.uniform
        return squash(tf.map_fn(lambda row: damped(row) * draw([], 0.9), h) @ U)

    assert_not_damped(loss)


@pytest.mark.slow
def test_what_is_drawn_from_a_seed_is_computed_again():
    def loss(x):
        h = x @ W
        kept = tf.random.stateless_gamma(tf.shape(h), [1, 2], tf.nn.softplus(h) + 0.1)
        return squash((h + 0.001 * kept) @ U)

    assert np.isfinite(norms_of(loss, [W, U], X)).all()


def test_nor_does_a_gradient_of_the_batch_pass_outside_of_loops():
    @tf.custom_gradient
    def damped(h):
        return tf.identity(h), lambda dy: dy / (1 + largest(h))

    assert_reaches_no_other(lambda x: squash(damped(x @ W) @ U), [W, U], X)
