"""Lengths that only the step knows: how many rows an example has, or that all have as
many, is told from the graph; and nothing is told that holds for some batches only."""

import pytest
import tensorflow as tf

from tfdpclip.gradients.flows.dataflow import Dataflow

#: Sequences of any length.
SHAPE = (None, None, 4)


def flow_of(make, shape=SHAPE, dtype=tf.float32):
    """The flow of `make(data)`."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec(shape, dtype)])
    def trace(data):
        out = make(data)
        found.append(Dataflow([out, data], [])[out])
        return out

    trace.get_concrete_function()
    return found[0]


def rows(x):
    return tf.reshape(x, [-1, 4])


def count(x):
    return tf.shape(x)[0]


EVEN = {
    "steps_as_rows": rows,
    "activations_of_them": lambda x: tf.nn.gelu(rows(x) * 2.0),
    "products_of_them": lambda x: rows(x) @ tf.ones([4, 3]),
    "their_sums": lambda x: tf.reduce_sum(rows(x), 1),
    "their_classes": lambda x: tf.one_hot(tf.argmax(rows(x), 1), 4),
    "pairs_beside_each_other": lambda x: tf.concat([rows(x), rows(x)], 1),
    "all_numbers": lambda x: tf.reshape(x, [-1]),
    "halves_of_steps": lambda x: tf.reshape(x, [-1, 2]),
}


@pytest.mark.parametrize("name", EVEN)
def test_rows_are_even_though_nobody_knows_how_many(name):
    flow = flow_of(EVEN[name])
    assert flow.leads and flow.even and flow.rows is None and not flow.minor


BACK = {
    "to_the_shape_before": lambda x: tf.reshape(rows(x) + 1.0, tf.shape(x)),
    "to_examples_of_any_length": lambda x: tf.reshape(rows(x), [count(x), -1, 4]),
    "by_a_dense": lambda x: tf.tensordot(x, tf.ones([4, 3]), 1),
    "losses_of_tokens": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.zeros(tf.shape(x)[:2], tf.int32), x
    ),
    "norms_of_steps": lambda x: tf.reshape(
        tf.nn.l2_normalize(tf.reshape(x, [1, -1, 4]), -1), tf.shape(x)
    ),
}


@pytest.mark.parametrize("name", BACK)
def test_rows_become_examples_again(name):
    flow = flow_of(BACK[name])
    assert flow.leads and flow.rows == 1 and flow.coupled is None


NOT_EVEN = {
    # Three numbers are of two examples if a step has four and there is one step.
    "rows_across_examples": lambda x: tf.reshape(x, [-1, 3]),
    "rows_of_several_steps": lambda x: tf.reshape(x, [-1, 8]),
    "after_time_came_first": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4]),
    "in_an_order_that_is_drawn": lambda x: tf.random.shuffle(rows(x)),
}


@pytest.mark.parametrize("name", NOT_EVEN)
def test_rows_of_two_examples_are_not_even(name):
    flow = flow_of(NOT_EVEN[name])
    assert flow.coupled is not None or not (flow.leads and (flow.even or flow.rows))


MADE = {
    "as_many": (lambda x: tf.zeros([count(x), 2]), 1),
    "twice_as_many": (lambda x: tf.zeros([2 * count(x), 2]), 2),
    "of_a_slice_of_the_shape": (lambda x: tf.zeros(tf.shape(x)[:1]), 1),
    "counted": (lambda x: tf.range(count(x)), 1),
    "half_of_twice": (lambda x: tf.zeros([(2 * count(x)) // 2, 2]), 1),
    # Rounded: an odd number of examples gives a different number.
    "twice_the_half": (lambda x: tf.zeros([2 * (count(x) // 2), 2]), None),
    "one_more": (lambda x: tf.zeros([count(x) + 1, 2]), None),
    "counted_from_two": (lambda x: tf.range(2, count(x)), None),
    "every_other": (lambda x: tf.range(0, count(x), 2), None),
    "as_many_as_steps": (lambda x: tf.zeros([tf.shape(x)[1], 2]), None),
}


@pytest.mark.parametrize("name", MADE)
def test_how_many_rows_are_made_is_counted_and_not_guessed(name):
    make, expected = MADE[name]
    flow = flow_of(make)
    assert (flow.rows if flow.leads else None) == expected


WHOLE = {
    "a_slice_as_long_as_the_batch": lambda x: tf.slice(x, [0, 0, 1], [count(x), -1, 2]),
    "cut_at_its_own_end": lambda x: x[: count(x), :, 1:3],
    "words_hashed": lambda x: tf.strings.to_hash_bucket_fast(
        tf.strings.as_string(x), 9
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_takes_all_examples_keeps_them(name):
    flow = flow_of(WHOLE[name])
    assert flow.leads and flow.rows == 1 and flow.coupled is None


PARTS = {
    "as_long_as_the_time": lambda x: x[: tf.shape(x)[1]],
    "one_less_than_the_batch": lambda x: tf.slice(x, [0, 0, 0], [count(x) - 1, -1, -1]),
    "from_the_second": lambda x: tf.slice(x, [1, 0, 0], [-1, -1, -1]),
    "scattered_across_examples": lambda x: tf.tensor_scatter_nd_add(x, [[0]], x[:1]),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_may_take_some_examples_is_not_all_of_them(name):
    flow = flow_of(PARTS[name])
    assert not flow.leads or flow.coupled is not None or flow.rows is None
