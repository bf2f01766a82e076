"""Where the proof ends, each gradient is of one example, through control flow too."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    assert_matches,
    one_at_a_time,
    randoms,
    squash,
    traced,
    variable,
)
from tfdpclip.gradients import ExampleIsolationError, per_example_norms

pytestmark = [
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.OneByOneWarning"),
]
W, V, B = variable(4, 3), variable(3, 3, seed=2), variable(3, seed=3)
X = randoms(5, 6, 4)


def unknown(h):
    """The same numbers, by an op of which the table of ops does not tell."""
    count = tf.shape(h)[0]
    boxes = tf.tile([[0.0, 0.0, 1.0, 1.0]], [count, 1])
    image = h[:, tf.newaxis, :, tf.newaxis]
    return tf.image.crop_and_resize(image, boxes, tf.range(count), [1, 3])[:, 0, :, 0]


def over_time(x):
    """A loop written by hand: the kernel and the bias are read inside."""
    steps, h = x.shape[1], tf.zeros_like(x[:, 0, :3])

    def step(i, h):
        return i + 1, tf.tanh(x[:, i] @ W + h @ V + B)

    return tf.while_loop(lambda i, h: i < steps, step, [0, h])[1]


def over_examples(x):
    return tf.map_fn(lambda row: tf.tanh(tf.reduce_sum(row @ W @ V, 0)), x)


def scanned(x):
    first = tf.zeros_like(x[:, 0] @ W)
    steps = tf.transpose(x, [1, 0, 2])
    return tf.scan(lambda h, row: tf.tanh(row @ W + h @ V), steps, first)[-1]


def chosen(x):
    h = tf.reduce_sum(x @ W, 1)
    big = tf.reduce_sum(B) > 1e9
    return tf.cond(big, lambda: h, lambda: tf.tanh(h @ V + B))


def switched(x):
    h = tf.reduce_sum(x @ W, 1)
    which = tf.cast(tf.reduce_sum(B) > 1e9, tf.int32) + 1
    return tf.switch_case(which, [lambda: h, lambda: h @ V * B, lambda: h @ V])


def branch_in_loop(x):
    def step(i, h):
        new = tf.cond(i % 2 > 0, lambda: h @ V, lambda: h + tf.tanh(x[:, i] @ W))
        return i + 1, new + B

    start = tf.zeros_like(x[:, 0, :3])
    return tf.while_loop(lambda i, h: i < 6, step, [0, start])[1]


def loop_in_loop(x):
    def add(j, h):
        return j + 1, h @ V + B

    def inner(h):
        return tf.while_loop(
            lambda j, h: j < 2, lambda j, h: (j + 1, h @ V + B), [0, h]
        )

    def step(i, h):
        return i + 1, tf.tanh(inner(h)[1] + x[:, i] @ W)

    start = tf.zeros_like(x[:, 0, :3])
    return tf.while_loop(lambda i, h: i < 3, step, [0, start])[1]


@tf.function
def _called(h):
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h @ V), [0, h])[1]


def loop_in_call(x):
    return _called(tf.reduce_sum(x @ W, 1)) * B


def with_own_gradient(x):
    """A custom gradient inside a loop, which reads a tensor outside the loop."""
    scale = tf.reduce_sum(tf.stop_gradient(x) ** 2, [1, 2])[:, tf.newaxis]

    @tf.custom_gradient
    def damped(h):
        return tf.identity(h), lambda dy: dy / (1 + scale)

    def step(i, h):
        return i + 1, damped(h @ V + x[:, i] @ W)

    start = tf.zeros_like(x[:, 0, :3])
    return tf.while_loop(lambda i, h: i < 3, step, [0, start])[1]


FLOWS = [
    over_time,
    over_examples,
    scanned,
    chosen,
    switched,
    branch_in_loop,
    loop_in_loop,
    loop_in_call,
    with_own_gradient,
]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.thinned(3)
def test_gradients_through_control_flow_are_those_of_each_example(flow, dynamic):
    def losses(x):
        return squash(unknown(flow(x)))

    with pytest.warns(UserWarning, match="one example at a time"):
        step = traced(losses, [W, V, B], [X], dynamic)
        expected = one_at_a_time(losses, [W, V, B], X)
        assert_matches(step, [W, V, B], expected, [X], 1e-3)


def ctc(x):
    """Loops whose functions are called as by TensorFlow 1, and memory set to zeros."""
    count = tf.shape(x)[0]
    labels = tf.cast(x[:, :2, 0] > 0, tf.int32) + 1
    lengths = tf.fill([count], 2), tf.fill([count], 6)
    return tf.nn.ctc_loss(labels, x @ W, *lengths, False, blank_index=0)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.slow
def test_gradients_of_ctc_are_those_of_each_example(dynamic):
    """In every step: the loops of CTC write into memory, each into its own."""
    expected = one_at_a_time(ctc, [W], X)
    with pytest.warns(UserWarning, match="one example at a time"):
        step = traced(ctc, [W], [X], dynamic)
        for _ in range(5):
            assert_matches(step, [W], expected, [X], 1e-3)


def ctc_of_sparse_labels(x):
    """As Keras 2's `ctc_batch_cost`: a flat list of the labels of all examples."""
    labels = tf.cast(x[:, :2, 0] > 0, tf.int32)
    places = tf.where(tf.ones_like(labels, tf.bool))
    labels = tf.SparseTensor(
        places, tf.gather_nd(labels, places), tf.cast(tf.shape(labels), tf.int64)
    )
    logits = tf.transpose(x @ W, [1, 0, 2])
    lengths = tf.fill([tf.shape(x)[0]], 6)
    return tf.compat.v1.nn.ctc_loss(labels, logits, lengths)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_gradients_of_ctc_of_listed_labels_are_those_of_each_example(dynamic):
    with pytest.warns(UserWarning, match="one example at a time"):
        step = traced(ctc_of_sparse_labels, [W], [X], dynamic)
        expected = one_at_a_time(ctc_of_sparse_labels, [W], X)
        assert_matches(step, [W], expected, [X], 1e-3)


@pytest.mark.parametrize("flow", [over_time, branch_in_loop, with_own_gradient])
def test_an_unknown_op_that_mixes_behind_a_loop_reaches_no_other_example(flow):
    """In the batch, each loss reads the row at the opposite end."""

    def losses(x):
        h = flow(x)
        count = tf.shape(h)[0]
        boxes = tf.tile([[0.0, 0.0, 1.0, 1.0]], [count, 1])
        others = tf.range(count - 1, -1, -1)
        image = h[:, tf.newaxis, :, tf.newaxis]
        crops = tf.image.crop_and_resize(image, boxes, others, [1, 3])
        return squash(h + crops[:, 0, :, 0])

    step = traced(losses, [W, V, B], [X], check_gradients="never")
    replaced = tf.concat([100 * X[:1], X[1:]], 0)
    ones = tf.ones([5])
    np.testing.assert_allclose(
        step(ones, replaced)[0][1:], step(ones, X)[0][1:], rtol=1e-5
    )


SEED = tf.Variable([3, 7])


def dropped_out(h):
    drawn = tf.random.stateless_uniform([5, 3], SEED)
    return tf.where(drawn < 0.4, h, 0.0), drawn < 0.4


def with_the_same_draws(h):
    drawn = tf.random.stateless_uniform([5, 3], [3, 7])
    return h * drawn, drawn


@pytest.mark.every_check
def test_draws_of_a_static_batch_are_the_examples_own():
    """Masks have the shape of the batch: an example has its own row, not the first."""
    x = X[:, 0]
    step = traced(lambda x: squash(unknown(dropped_out(x @ W)[0])), [W], [x], False)
    mask = tf.cast(dropped_out(tf.zeros([5, 3]))[1], tf.float32)
    expected = one_at_a_time(lambda x, m: squash(m * (x @ W)), [W], x, mask)
    assert_matches(step, [W], expected, [x], 1e-4)
    # A different first example leaves the rest as it was.
    ones = tf.ones([5])
    replaced = tf.concat([100 * x[:1], x[1:]], 0)
    np.testing.assert_allclose(
        step(ones, replaced)[0][1:], step(ones, x)[0][1:], rtol=1e-5
    )


def test_draws_of_a_constant_seed_do_not_tell_places_apart():
    """Every example has the numbers of the first place, wherever it is."""
    x = X[:, 0]
    step = traced(
        lambda x: squash(unknown(with_the_same_draws(x @ W)[0])),
        *([W], [x], False),
        check_gradients="never",
    )
    ones = tf.ones([5])
    turned = step(ones, tf.roll(x, 1, 0))[0]
    np.testing.assert_allclose(turned, tf.roll(step(ones, x)[0], 1, 0), rtol=1e-5)


@pytest.mark.every_check
def test_a_drawn_matrix_of_the_batchs_length_is_whole():
    """It has as many rows as the batch, and each example reads all of them."""
    x, seed = randoms(3, 3), tf.Variable([1, 2])

    def losses(x):
        drawn = tf.random.stateless_normal([3, 3], seed)
        return squash(unknown((x @ drawn) @ V))

    expected = one_at_a_time(losses, [V], x)
    assert_matches(traced(losses, [V], [x], False), [V], expected, [x], 1e-3)


@pytest.mark.every_check
def test_labels_that_a_function_closes_over_are_to_be_arguments():
    labels = tf.constant([0, 1, 1, 0, 1])  # A constant of the graph, as it is small.

    @tf.function
    def step(x):
        logits = tf.reduce_sum(tf.tanh(x @ W), axis=1)[:, :2]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return per_example_norms(losses, [W])

    said = "arguments of the function"
    refused = pytest.raises(tf.errors.InvalidArgumentError, match=said)
    with pytest.warns(UserWarning, match=said), refused:
        step(X)


def test_after_a_refusal_a_strategy_can_be_used():
    """The refusal is raised in a loop over the examples, in TensorFlow's own loop."""

    def in_pairs(x):
        h = tf.tanh(x @ W)
        pairs = tf.reduce_sum(tf.reshape(h, [-1, 2, 3]), axis=1)
        return tf.reduce_sum(h + tf.repeat(pairs, 2, axis=0), axis=1)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    def step(x):
        return per_example_norms(in_pairs(x), [W])

    with pytest.raises(ExampleIsolationError):
        step(X[0])
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        assert tf.Variable(1.0).numpy() == 1


FEWER = {
    "slice": lambda z: z[:3],
    "slice_op": lambda z: tf.slice(z, [0], [3]),
    "gather": lambda z: tf.gather(z, [0, 1, 2]),
    "half": lambda z: z[: tf.shape(z)[0] // 2],
    "without_the_last": lambda z: z[:-1],
    "without_the_first": lambda z: z[1:],
    "every_other": lambda z: z[::2],
    "split": lambda z: tf.split(z, 2)[0],
    "stacked": lambda z: tf.stack([z[0], z[1], z[2]]),
    "of_two_halves": lambda z: z[: tf.shape(z)[0] // 2] - z[tf.shape(z)[0] // 2 :],
    "first_and_rest": lambda z: tf.concat([z[:1], z[2:]], 0),
}


@pytest.mark.every_check
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FEWER)
def test_a_loss_that_leaves_out_examples_by_their_place_is_refused(name, dynamic, jit):
    """Without an earlier record another example has the place: two gradients move."""
    x = randoms(6, 4)
    step = traced(
        lambda x: FEWER[name](squash(x @ W)), [W], [x], dynamic=dynamic, jit=jit
    )
    weights = tf.ones([3 if dynamic else 6])
    try:
        norms, _ = step(weights, x)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        said = f"{type(error).__name__} {error}"
        named = "LossStructureError" in said or "ExampleIsolationError" in said
        # XLA drops the assertion, and finds some of the shapes impossible by itself.
        assert named or (jit and dynamic)
    else:
        assert jit and dynamic
        assert not np.isfinite(norms).any()


def in_a_loop_over_examples(loss_of):
    """`loss_of(i, x, losses)` writes the loss of example i to a list."""

    def losses(x):
        count = tf.shape(x)[0]
        listed = tf.TensorArray(tf.float32, size=count, element_shape=[])

        def step(i, listed):
            return i + 1, loss_of(i, x, listed)

        return tf.while_loop(lambda i, _: i < count, step, (0, listed))[1].stack()

    return losses


def _own(row):
    return squash(row[tf.newaxis] @ W)[0]


def in_every_other_place(i, x, listed):
    write = lambda: listed.write(i, _own(x[i]))  # noqa: E731
    return tf.cond(i % 2 > 0, write, lambda: listed.write(i, 0.0))


def in_a_case_of_places(i, x, listed):
    write = lambda: listed.write(i, _own(x[i]))  # noqa: E731
    none = lambda: listed.write(i, 0.0)  # noqa: E731
    return tf.switch_case(i % 3, [write, none, none])


def in_a_branch_in_a_branch(i, x, listed):
    inner = lambda: in_every_other_place(i, x, listed)  # noqa: E731
    return tf.cond(tf.shape(x)[1] > 0, inner, lambda: listed)


def after_as_many_steps_as_the_place(i, x, listed):
    _, row = tf.while_loop(lambda j, _: j < i, lambda j, r: (j + 1, r / 2), [0, x[i]])
    return listed.write(i, _own(row))


def after_steps_from_the_place_on(i, x, listed):
    _, row = tf.while_loop(lambda j, _: j < 9, lambda j, r: (j + 1, r / 2), [i, x[i]])
    return listed.write(i, _own(row))


BY_PLACE = [
    in_every_other_place,
    in_a_case_of_places,
    in_a_branch_in_a_branch,
    after_as_many_steps_as_the_place,
    after_steps_from_the_place_on,
]


@pytest.mark.every_check
@pytest.mark.parametrize("loss_of", BY_PLACE)
def test_a_loop_that_does_by_place_is_refused_or_made_alone(loss_of):
    """One record less would bring the rest into other branches and numbers of steps."""
    x = tf.tile(randoms(1, 4), [6, 1])
    step = traced(in_a_loop_over_examples(loss_of), [W], [x])
    try:
        norms, _ = step(tf.ones([6]), x)
    except (ExampleIsolationError, tf.errors.InvalidArgumentError) as error:
        assert "ExampleIsolationError" in f"{type(error).__name__} {error}"
    else:
        np.testing.assert_allclose(norms, tf.fill([6], norms[0]), rtol=1e-5)
