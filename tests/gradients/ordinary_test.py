"""Ordinary models and losses work, and equal one example at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    SEQUENCE,
    X,
    check_engine,
    integers,
    randoms,
    squash,
    variable,
)
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    OneByOneWarning,
    per_example_norms,
)

L = tf.keras.layers
IDS = integers(5, 6)
pytestmark = pytest.mark.filterwarnings(
    "ignore::tfdpclip.gradients.JacobianFallbackWarning"
)
both_shapes = pytest.mark.parametrize("dynamic", [True, False], ids=["any", "static"])
PICTURES = tf.sigmoid(randoms(5, 4, 4, 3))


def over(layer):
    """A dense layer after a layer without a gradient."""
    kernel = variable(10, 3)

    def per_example(ids):
        return squash(tf.cast(layer(ids), tf.float32) @ kernel)

    return per_example, [kernel], IDS


def pictures(change):
    kernel = variable(2, 2, 3, 2)

    def per_example(x):
        return squash(tf.nn.conv2d(change(x), kernel, 1, "SAME"))

    return per_example, [kernel], PICTURES


BEFORE = {
    "multi_hot": lambda: over(L.CategoryEncoding(10, "multi_hot")),
    "counts": lambda: over(L.CategoryEncoding(10, "count")),
    "contrast": lambda: pictures(lambda x: tf.image.adjust_contrast(x, 2.0)),
    "hue": lambda: pictures(lambda x: tf.image.adjust_hue(x, 0.2)),
    "saturation": lambda: pictures(lambda x: tf.image.adjust_saturation(x, 2.0)),
    "brightness": lambda: pictures(lambda x: tf.image.adjust_brightness(x, 0.2)),
    "gamma": lambda: pictures(lambda x: tf.image.adjust_gamma(x, 0.5)),
    "grey": lambda: pictures(
        lambda x: tf.repeat(tf.image.rgb_to_grayscale(x), 3, axis=-1)
    ),
}


@both_shapes
@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.thinned(12)
def test_ops_without_a_gradient_before_the_first_variable(name, dynamic):
    per_example, variables, data = BEFORE[name]()
    options = {"dynamic": dynamic, "check_gradients": "always"}
    check_engine(per_example, variables, data, **options)


@pytest.mark.slow
def test_random_contrast_before_the_first_variable():
    kernel, layer = variable(2, 2, 3, 2), L.RandomContrast(0.5)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3])])
    def step(x):
        loss = squash(tf.nn.conv2d(layer(x, training=True), kernel, 1, "SAME"))
        return per_example_norms(loss, [kernel], check_gradients="always")

    assert np.all(step(PICTURES) > 0)


W = variable(3, 4)
TIME, CELL = variable(4, 4), variable(3, 4)


def time_major(x):
    h = tf.transpose(x, [1, 0, 2]) @ CELL
    return squash(tf.transpose(tf.tanh(h), [1, 0, 2]) @ TIME)


def steps_in_a_list(x):
    steps = [tf.tanh(step @ CELL) for step in tf.unstack(x, axis=1)]
    return squash(tf.reduce_max(tf.stack(steps, axis=0), 0))


def two_views(x):
    views = tf.stack([x, 2 * x], axis=0)
    h = tf.tanh(tf.einsum("vbd,de->vbe", views, W))
    return tf.reduce_sum(h[0] * h[1], -1)


def averaged_views(x):
    views = tf.stack([x @ W, tf.sin(x) @ W], axis=0)
    return squash(tf.reduce_mean(views, axis=0))


def tiled_features(x):
    return squash(tf.tile(x, [1, 2]) @ tf.concat([W, 2 * W], 0))


def tiled_in_time(x):
    h = tf.tile(x[:, tf.newaxis], [1, 6, 1])
    return squash(h * SEQUENCE[:1] @ W)


def mapped(x):
    return squash(tf.vectorized_map(lambda row: tf.tanh(row) * 2, x) @ W)


def swapped_heads(x):
    h = tf.reshape(x @ CELL, [-1, 6, 2, 2])
    h = tf.transpose(h, [0, 2, 1, 3])
    a = tf.nn.softmax(tf.matmul(h, h, transpose_b=True)) @ h
    return squash(tf.reshape(tf.transpose(a, [0, 2, 1, 3]), [-1, 6, 4]) @ TIME)


VIEWS = {
    "time_major": (time_major, [CELL, TIME], SEQUENCE),
    "steps_in_a_list": (steps_in_a_list, [CELL], SEQUENCE),
    "two_views": (two_views, [W], X),
    "averaged_views": (averaged_views, [W], X),
    "tiled_features": (tiled_features, [W], X),
    "tiled_in_time": (tiled_in_time, [W], X),
    "mapped": (mapped, [W], X),
    "swapped_heads": (swapped_heads, [CELL, TIME], SEQUENCE),
}


@both_shapes
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.slow
def test_views_of_the_batch(name, dynamic):
    per_example, variables, data = VIEWS[name]
    options = {"dynamic": dynamic, "check_gradients": "always"}
    check_engine(per_example, variables, data, **options)


# Mixing that may begin later.


def groups(x):
    return tf.cast(x[:, 0] > 9, tf.int32)


BY_PLACE = {
    "segment_mean": lambda x: tf.gather(
        tf.math.unsorted_segment_mean(x @ W, groups(x), 2), groups(x)
    ),
    "sorted_segments": lambda x: tf.gather(
        tf.math.segment_sum(x @ W, tf.sort(groups(x))), groups(x)
    ),
    "counts": lambda x: (
        (x @ W) * tf.cast(tf.math.bincount(groups(x), minlength=4), tf.float32)
    ),
}


@both_shapes
@pytest.mark.parametrize("name", BY_PLACE)
def test_sums_whose_places_are_data_are_refused_by_name(name, dynamic):
    """Whether or not two examples of this batch share a place."""

    @tf.function(input_signature=[tf.TensorSpec([None if dynamic else 5, 3])])
    def step(x):
        return per_example_norms(squash(BY_PLACE[name](x)), [W])

    with pytest.raises(ExampleIsolationError, match="combines the examples"):
        step(X)


# Scatters to places that are data are no sums that a model has: no lemma names them.
SCATTERED = {
    "scattered": lambda x: tf.tensor_scatter_nd_add(
        x @ W, groups(x)[:, tf.newaxis], x @ W
    ),
    "into_a_table": lambda x: tf.gather(
        tf.scatter_nd(groups(x)[:, tf.newaxis], x @ W, [2, 4]), groups(x)
    ),
}


@both_shapes
@pytest.mark.parametrize("name", SCATTERED)
def test_scatters_whose_places_are_data_are_taken_one_example_at_a_time(name, dynamic):
    @tf.function(input_signature=[tf.TensorSpec([None if dynamic else 5, 3])])
    def step(x):
        loss = squash(SCATTERED[name](x))
        # The comparison finds that these losses combine examples.
        return per_example_norms(loss, [W], check_gradients="never")

    with pytest.warns(OneByOneWarning):
        norms = step(X).numpy()
    # In a graph of static shape, every row of the batch is the example.
    copies = 1 if dynamic else 5
    for i, norm in enumerate(norms):
        with tf.GradientTape() as tape:
            loss = squash(SCATTERED[name](tf.repeat(X[i : i + 1], copies, 0)))[0]
        gradient = tf.convert_to_tensor(tape.gradient(loss, W))
        np.testing.assert_allclose(norm, tf.norm(gradient), rtol=1e-4)


COUNTS = {
    "where": lambda x: tf.shape(tf.where(x[:, 0] > 0))[0],
    "mask": lambda x: tf.size(tf.boolean_mask(x, x[:, 0] > 0)),
    "unique": lambda x: tf.size(tf.unique(groups(x))[0]),
    "range": lambda x: tf.size(tf.range(2 + tf.reduce_max(groups(x)))),
    "zeros": lambda x: tf.shape(tf.zeros([2 + tf.reduce_max(groups(x)), 3]))[0],
    "after_a_sum": lambda x: tf.size(
        tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0), axis=1)
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_number_of_entries_that_the_data_decide_is_no_batch_size(name):
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        count = tf.cast(COUNTS[name](x), tf.float32)
        return per_example_norms(tf.reduce_sum(squash(x @ W)) / count, [W])

    with pytest.raises(LossStructureError, match="data of the whole batch"):
        step(X)


@both_shapes
@pytest.mark.slow
def test_segments_of_steps_are_an_examples_own(dynamic):
    """Time first, summed by public numbers of segments."""

    def per_example(x):
        h = tf.transpose(x, [1, 0, 2])
        h = tf.math.unsorted_segment_sum(h, [0, 0, 1, 1, 2, 0], 3)
        return squash(tf.transpose(h, [1, 0, 2]) @ W)

    check_engine(per_example, [W], SEQUENCE, dynamic=dynamic, check_gradients="always")


@pytest.mark.slow
def test_what_a_parameter_is_added_to_may_be_rounding_alone():
    """Adds a parameter to means that are zero but for rounding, as MobileNetV3 does.

    A copy of an example in a different place has different rounding errors, and the
    same gradient.
    """
    w, beta = variable(1, 1, 64, 33), variable(33)

    def moments(h):
        mean = tf.reduce_mean(h, [1, 2], keepdims=True)
        spread = tf.reduce_mean(tf.square(h - mean), [1, 2], keepdims=True)
        return mean, tf.math.rsqrt(spread + 1e-3)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 64])])
    def step(x):
        mean, inverse = moments(x)
        h = tf.nn.conv2d((x - mean) * inverse, w, 1, "SAME")
        mean, inverse = moments(h)
        loss = squash(h * inverse + (beta - mean * inverse))
        return per_example_norms(loss, [w, beta], check_gradients="always")

    for seed in range(3):
        assert np.all(step(randoms(16, 4, 4, 64, seed=seed)) > 0)
