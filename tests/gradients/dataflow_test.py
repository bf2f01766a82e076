"""What the static analysis says of tensors: axes, rows, and combined examples."""

import pytest
import tensorflow as tf

from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.flow import DATA, PUBLIC, SIZE


def flow_of(make, *shapes, dtype=tf.float32, variables=()):
    """The flow of `make(data)`, and whether an op coupled the examples."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec(s, dtype) for s in shapes])
    def trace(*data):
        out = make(*data)
        graph = tf.compat.v1.get_default_graph()
        handles = [graph.capture(v.handle) for v in variables]
        found.append(Dataflow([out, *data], handles, shapes[0][0])[out])
        return out

    trace.get_concrete_function()
    return found[0]


SEQUENCES = (None, 6, 4)

# name: (function, shape, axes, rows of axis 0).
KNOWN = {
    "elementwise": (lambda x: tf.tanh(x) + 1, SEQUENCES, (0,), 1),
    "products": (lambda x: x @ tf.ones([4, 5]), SEQUENCES, (0,), 1),
    "sum_of_features": (lambda x: tf.reduce_sum(x, -1), SEQUENCES, (0,), 1),
    "sum_of_all_but_the_batch": (
        lambda x: tf.reduce_sum(x, [1, 2]),
        SEQUENCES,
        (0,),
        1,
    ),
    "flattened": (lambda x: tf.reshape(x, [-1, 24]), SEQUENCES, (0,), 1),
    "steps_as_rows": (lambda x: tf.reshape(x, [-1, 4]), SEQUENCES, (0,), 6),
    "steps_as_rows_and_back": (
        lambda x: tf.reshape(tf.reshape(x, [-1, 4]), [-1, 6, 4]),
        SEQUENCES,
        (0,),
        1,
    ),
    "entries_as_rows": (lambda x: tf.reshape(x, [-1]), SEQUENCES, (0,), 24),
    "pairs_of_steps": (lambda x: tf.reshape(x, [-1, 8]), SEQUENCES, (0,), 3),
    "steps_first": (lambda x: tf.transpose(x, [1, 0, 2]), SEQUENCES, (1,), None),
    "steps_first_and_back": (
        lambda x: tf.transpose(tf.transpose(x, [1, 0, 2]), [1, 0, 2]),
        SEQUENCES,
        (0,),
        None,
    ),
    "new_first_axis": (lambda x: tf.expand_dims(x, 0), (None, 4), (1,), None),
    "expanded": (lambda x: tf.expand_dims(x, 1), SEQUENCES, (0,), 1),
    "squeezed": (lambda x: tf.squeeze(x, 1), (None, 1, 4), (0,), 1),
    "sliced_in_time": (lambda x: x[:, 1:3], SEQUENCES, (0,), 1),
    "one_step": (lambda x: x[:, -1], SEQUENCES, (0,), 1),
    "last_feature": (lambda x: x[..., -1], SEQUENCES, (0,), 1),
    "joined_features": (lambda x: tf.concat([x, x], -1), SEQUENCES, (0,), 1),
    "split_features": (lambda x: tf.split(x, 2, -1)[1], SEQUENCES, (0,), 1),
    "stacked": (lambda x: tf.stack([x, x], 1), SEQUENCES, (0,), 1),
    "unstacked": (lambda x: tf.unstack(x, axis=1)[2], SEQUENCES, (0,), 1),
    "reversed_in_time": (lambda x: tf.reverse(x, [1]), SEQUENCES, (0,), 1),
    "rolled_in_time": (lambda x: tf.roll(x, 1, 1), SEQUENCES, (0,), 1),
    "cumulative_in_time": (lambda x: tf.cumsum(x, 1), SEQUENCES, (0,), 1),
    "softmax": (lambda x: tf.nn.softmax(x), SEQUENCES, (0,), 1),
    "attention": (lambda x: tf.matmul(x, x, transpose_b=True), SEQUENCES, (0,), 1),
    "einsum": (
        lambda x: tf.einsum("btd,bsd->bts", x, x),
        SEQUENCES,
        (0,),
        1,
    ),
    "einsum_batch_last": (
        lambda x: tf.einsum("btd->tdb", x),
        SEQUENCES,
        (2,),
        None,
    ),
    "convolved": (
        lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 2, 5]), 2, "SAME"),
        (None, 7, 6, 2),
        (0,),
        1,
    ),
    "pooled": (
        lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"),
        (None, 7, 6, 2),
        (0,),
        1,
    ),
    "space_to_batch_and_back": (
        lambda x: tf.batch_to_space(
            tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]), [2, 2], [[0, 0], [0, 0]]
        ),
        (None, 6, 4, 2),
        (0,),
        1,
    ),
    "broadcast_against_a_table": (
        lambda x: x + tf.constant([[1.0] * 4] * 6),
        SEQUENCES,
        (0,),
        1,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_batch_is_followed(name):
    make, shape, axes, rows = KNOWN[name]
    flow = flow_of(make, shape)
    assert flow.kind == DATA and flow.coupled is None
    assert flow.axes == axes
    assert rows is None or (flow.rows == rows and not flow.minor)


@pytest.mark.parametrize("name", KNOWN)
def test_a_static_batch_size_changes_nothing(name):
    make, shape, axes, rows = KNOWN[name]
    flow = flow_of(make, (12, *shape[1:]))
    assert flow.kind == DATA and flow.coupled is None
    assert flow.axes == axes
    assert rows is None or (flow.rows == rows and not flow.minor)


def to_batch(x):
    return tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])


@pytest.mark.parametrize("batch", [None, 12])
def test_space_to_batch_has_the_examples_running_fastest(batch):
    flow = flow_of(to_batch, (batch, 6, 4, 2))
    assert (flow.axes, flow.rows, flow.minor) == ((0,), 4, True)


SPLITS_ROWS = {
    "rows": lambda x: tf.reshape(to_batch(x), [-1, 2, 2]),
    "entries": lambda x: tf.reshape(to_batch(x), [-1, 4]),
}


@pytest.mark.parametrize("batch", [None, 12])
@pytest.mark.parametrize("name", SPLITS_ROWS)
def test_rows_that_are_cut_up_no_longer_have_the_examples_running_fastest(name, batch):
    """Row r belongs to example (r // k) mod B: neither order describes that."""
    flow = flow_of(SPLITS_ROWS[name], (batch, 6, 4, 2))
    assert flow.axes is None or not flow.leads or flow.rows is None


# Nothing is claimed of what depends on how the examples are arranged.
UNKNOWN = {
    "part_of_the_batch": lambda x: x[1:],
    "one_example": lambda x: x[0],
    "split_batch": lambda x: tf.split(x, 2, 0)[0],
    "two_batches": lambda x: tf.concat([x, x], 0),
    "wrong_reshape": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4]),
    "rows_of_two_examples": lambda x: tf.reshape(x, [-1, 48]),
    "unknown_op": lambda x: tf.linalg.inv(x[:, :4]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_claimed(name):
    flow = flow_of(UNKNOWN[name], SEQUENCES)
    if flow.coupled is None and flow.axes is not None:
        assert not (flow.leads and flow.rows is not None)


COUPLED = {
    "mean": lambda x: tf.reduce_mean(x, 0),
    "sum_of_everything": lambda x: tf.reduce_sum(x),
    "maximum": lambda x: tf.reduce_max(x, [0, 1]),
    "less_the_mean": lambda x: x - tf.reduce_mean(x, 0, keepdims=True),
    "softmax_over_the_batch": lambda x: tf.nn.softmax(tf.transpose(x)),
    "cumulative": lambda x: tf.cumsum(x, 0),
    "covariance": lambda x: tf.einsum("btd,bte->tde", x, x),
    "second_moments": lambda x: tf.matmul(x[:, 0], x[:, 0], transpose_a=True),
    "rolled": lambda x: tf.roll(x, 1, 0),
    "reversed": lambda x: tf.reverse(x, [0]),
    "shuffled": lambda x: tf.random.shuffle(x),
    "masked": lambda x: tf.boolean_mask(x, x[:, :, 0] > 0),
    "after_a_stopped_gradient": lambda x: x * tf.stop_gradient(tf.reduce_mean(x)),
    "carried_along": lambda x: tf.linalg.inv((x - tf.reduce_mean(x, 0))[:, :4]),
    "normalised": lambda x: tf.compat.v1.nn.fused_batch_norm(
        x[..., tf.newaxis], tf.ones([1]), tf.zeros([1]), is_training=True
    )[0],
}


@pytest.mark.parametrize("batch", [None, 12])
@pytest.mark.parametrize("name", COUPLED)
def test_combined_examples_are_flagged(name, batch):
    assert flow_of(COUPLED[name], (batch, 6, 4)).coupled is not None


@pytest.mark.parametrize("batch", [None, 12, 1])
def test_layer_normalisations_detour_is_not_flagged(batch):
    layer = tf.keras.layers.LayerNormalization()
    layer.build((None, 6, 4))
    flow = flow_of(layer, (batch, 6, 4), variables=layer.trainable_variables)
    assert flow.coupled is None and flow.trained
    assert flow.axes in ((0,), None)


def test_products_of_all_pairs_have_two_batch_axes():
    flow = flow_of(lambda x: tf.matmul(x, x, transpose_b=True), (None, 4))
    assert flow.axes == (0, 1)
    flow = flow_of(lambda x: x[:, 0] - x[:, :1], (None, 4))
    assert flow.axes == (0, 1)


SIZES = {
    "batch": (lambda x: tf.shape(x)[0], 1),
    "as_a_number": (lambda x: tf.cast(tf.shape(x)[0], tf.float32), 1),
    "entries": (lambda x: tf.size(x), 1),
    "reciprocal": (lambda x: 1 / tf.shape(x)[0], -1),
    "square": (lambda x: tf.shape(x)[0] * tf.size(x), 2),
    "root": (lambda x: tf.sqrt(tf.cast(tf.shape(x)[0], tf.float32)), None),
    "one_more": (lambda x: tf.shape(x)[0] + 1, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_carry_their_power_of_the_batch_size(name):
    make, power = SIZES[name]
    flow = flow_of(make, (None, 4))
    assert (flow.kind, flow.power) == (SIZE, power)


def test_the_length_of_a_sequence_is_no_batch_size():
    flow = flow_of(lambda x: tf.shape(x)[1], (None, None, 4))
    assert flow.kind == PUBLIC or flow.power == 0
    flow = flow_of(lambda x: tf.range(tf.shape(x)[1]), (None, None, 4))
    assert flow.kind != DATA


def test_what_is_made_for_the_batch_is_the_batchs():
    for make in (
        lambda x: tf.zeros([tf.shape(x)[0], 3]),
        lambda x: tf.random.normal([tf.shape(x)[0], 3]),
        lambda x: tf.range(tf.shape(x)[0]),
        lambda x: tf.tile(tf.ones([1, 3]), [tf.shape(x)[0], 1]),
        lambda x: tf.ones_like(x),
    ):
        flow = flow_of(make, (None, 4))
        assert flow.leads and flow.rows == 1 and flow.coupled is None


def test_only_what_depends_on_a_variable_is_trained():
    v = tf.Variable(tf.ones([4, 4]))
    trained = {
        "product": lambda x: x @ v,
        "through_a_sum": lambda x: tf.reduce_sum(x @ v, -1),
        "variable": lambda x: v * 2,
    }
    other = {
        "data": lambda x: x * 2,
        "stopped": lambda x: tf.stop_gradient(x @ v),
        "shape": lambda x: tf.cast(tf.shape(x @ v), tf.float32),
        "integers": lambda x: tf.cast(x @ v, tf.int32),
        "comparison": lambda x: x @ v > 0,
    }
    for make in trained.values():
        assert flow_of(make, (None, 4), variables=[v]).trained
    for make in other.values():
        assert not flow_of(make, (None, 4), variables=[v]).trained
