"""Neither an example's place in the batch nor the batch's size decides its gradient."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    per_example_norms,
)

pytestmark = pytest.mark.every_check

SIZE = 10
W = tf.Variable(np.random.default_rng(0).standard_normal((3, 4)), dtype=tf.float32)
X = tf.constant(np.random.default_rng(1).standard_normal((SIZE, 3)), tf.float32)


def norms(change, static, jit=False, data=X):
    """The norms of a dense layer whose rows go through `change(hidden, x)`."""

    @tf.function(
        input_signature=[tf.TensorSpec([SIZE if static else None, 3])],
        jit_compile=jit,
        autograph=False,
    )
    def step(x):
        loss = tf.reduce_sum(tf.square(change(tf.tanh(x @ W), x)), axis=1)
        found = per_example_norms(loss, [W])
        return found

    return step(data)


def by_place(hidden, x):
    place = tf.range(tf.shape(x)[0])
    return hidden * (1.0 + tf.cast(place, tf.float32))[:, tf.newaxis]


def every_other(hidden, x):
    odd = tf.range(tf.shape(x)[0]) % 2
    return tf.where((odd == 0)[:, tf.newaxis], hidden, 3.0 * hidden)


def by_place_behind_a_mask(hidden, x):
    return by_place(tf.nn.dropout(hidden, 0.5), x)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("change", [by_place, every_other, by_place_behind_a_mask])
@pytest.mark.slow
def test_a_loss_that_depends_on_the_place_is_refused(change, static):
    # With a static batch, the range is a constant with a row for each place.
    said = "(depends on their places|a constant with a row for each place)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        norms(change, static)


def parity(hidden, x):
    return hidden * tf.cast(tf.shape(x)[0] % 2, tf.float32)


def root(hidden, x):
    return hidden / tf.sqrt(tf.cast(tf.shape(x)[0], tf.float32))


def where_many(hidden, x):
    return tf.where(tf.shape(x)[0] > 5, hidden, 3.0 * hidden)


def in_a_branch(hidden, x):
    return tf.cond(tf.shape(x)[0] > 5, lambda: hidden, lambda: 3.0 * hidden)


@pytest.mark.parametrize("change", [parity, root, where_many, in_a_branch])
def test_a_loss_that_depends_on_the_size_is_refused(change):
    with pytest.raises(ExampleIsolationError, match="number of examples"):
        norms(change, static=False)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "divisor, stands",
    [
        (lambda n: tf.maximum(n, 1), True),
        (lambda n: tf.maximum(0.5, tf.cast(n, tf.float32)), True),
        (lambda n: tf.maximum(n, 30), False),
        (lambda n: tf.minimum(n, 30), False),
    ],
    ids=["1 or more", "a half or more", "30 or more", "30 or less"],
)
def test_a_mean_is_over_all_examples(divisor, stands):
    """From 30 on, a further example would not change the share, or before 30."""

    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def mean(x):
        total = tf.reduce_sum(tf.tanh(x @ W))
        loss = total / tf.cast(divisor(tf.shape(x)[0]), tf.float32)
        return per_example_norms(loss, [W])

    if stands:
        plain = norms(lambda hidden, x: tf.sqrt(hidden + 1), static=False)
        np.testing.assert_allclose(mean(X), plain, rtol=1e-6)
        return
    with pytest.raises(LossStructureError, match="other than by a power"):
        mean(X)


GENERATOR = tf.random.Generator.from_seed(1)


def set_anew(hidden, x):
    total = tf.reduce_sum(tf.cast(x > 0, tf.int64))
    GENERATOR.reset_from_seed(total)
    return hidden * GENERATOR.uniform([])


def skipped(hidden, x):
    GENERATOR.skip(tf.reduce_sum(tf.cast(x > 0, tf.int64)))
    return hidden * GENERATOR.uniform([])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("change", [set_anew, skipped])
def test_a_generator_that_examples_move_is_refused(change, static):
    with pytest.raises(ExampleIsolationError, match="draws random numbers"):
        norms(change, static)


def set_to_a_constant(hidden, x):
    GENERATOR.reset_from_seed(7)
    return hidden * GENERATOR.uniform([])


def of_a_generator(hidden, x):
    return hidden * GENERATOR.uniform(tf.shape(hidden))


def by_integers(hidden, x):
    scale = tf.cast(x[:, :1] > 0, tf.int32) * tf.shape(x)[0] + 1
    return hidden * tf.cast(scale, tf.float32)


def as_many_times(hidden, x):
    wide = tf.tile(hidden[:, tf.newaxis], [1, tf.shape(x)[0], 1])
    return tf.reduce_sum(wide, axis=1)


def as_many_steps(hidden, x):
    _, found = tf.while_loop(
        lambda i, _: i < tf.shape(x)[0],
        lambda i, h: (i + 1, 0.9 * h),
        (tf.constant(0), hidden),
        shape_invariants=(tf.TensorShape([]), hidden.shape),
    )
    return found


def one_of_several(hidden, x):
    return tf.switch_case(
        tf.shape(x)[0] // 4 % 2, [lambda: hidden, lambda: 3.0 * hidden]
    )


def column(hidden, x):
    return hidden * x[:, tf.shape(x)[0] % 3][:, tf.newaxis]


@tf.custom_gradient
def on_the_way_back(hidden):
    count = tf.cast(tf.shape(hidden)[0], tf.float32)
    return tf.identity(hidden), lambda dy: dy / count


def averaged_on_the_way_back(hidden, x):
    return on_the_way_back(hidden)


SIZED = [
    *(by_integers, as_many_times, as_many_steps, one_of_several, column),
    averaged_on_the_way_back,
]


@pytest.mark.parametrize("change", SIZED)
@pytest.mark.slow
def test_a_size_that_no_op_shows_is_found(change):
    errors = ExampleIsolationError, tf.errors.InvalidArgumentError
    with pytest.raises(errors, match="number of examples"):
        norms(change, static=False)


def with_a_seed_of_the_size(hidden, x):
    count = tf.shape(x)[0]
    return hidden * tf.random.stateless_uniform(tf.shape(hidden), [count, 1])


def test_a_seed_that_is_made_of_the_size_is_refused():
    with pytest.raises(ExampleIsolationError, match="seed of random numbers"):
        norms(with_a_seed_of_the_size, static=False)


@pytest.mark.parametrize("change", [parity, root, where_many, in_a_branch, *SIZED])
@pytest.mark.thinned(15)
def test_a_static_size_is_public(change):
    assert np.all(np.isfinite(norms(change, static=True)))


def masks(hidden, x):
    return tf.nn.dropout(hidden, 0.5)


def noise(hidden, x):
    return hidden + tf.random.normal(tf.shape(hidden))


def stateless(hidden, x):
    seed = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32)
    return tf.nn.experimental.stateless_dropout(hidden, 0.5, seed=seed)


def with_one_seed(hidden, x):
    return tf.nn.experimental.stateless_dropout(hidden, 0.5, seed=[1, 2])


STEP = tf.Variable(3, trainable=False)


def with_the_step_for_a_seed(hidden, x):
    seed = tf.stack([STEP, 0])
    return tf.nn.experimental.stateless_dropout(hidden, 0.5, seed=seed)


def with_the_step_folded_in(hidden, x):
    seed = tf.random.experimental.stateless_fold_in([1, 2], STEP)
    return hidden + tf.random.stateless_normal(tf.shape(hidden), seed)


PUBLIC_SEEDS = [with_one_seed, with_the_step_for_a_seed, with_the_step_folded_in]


@pytest.mark.parametrize("change", PUBLIC_SEEDS)
def test_one_seed_for_all_steps_gives_every_example_the_first_numbers(change):
    """And the number of the step is as public as a constant."""
    alike = tf.tile(X[:1], [SIZE, 1])
    found = norms(change, static=False, data=alike)
    np.testing.assert_allclose(found, tf.fill([SIZE], found[0]), rtol=1e-5)


@pytest.mark.every_check
@pytest.mark.parametrize("change", [*PUBLIC_SEEDS, with_a_seed_of_the_size])
def test_one_seed_for_all_steps_and_a_static_size_are_refused(change):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="seed random numbers anew"
    ):
        norms(change, static=True)


DROPOUT = tf.keras.layers.Dropout(0.5)


STATE = tf.Variable([3, 4], trainable=False)


def with_the_state_of_a_generator(hidden, x):
    return tf.nn.experimental.stateless_dropout(hidden, 0.5, seed=STATE)


def keras_masks(hidden, x):
    return DROPOUT(hidden, training=True)


def masks_in_a_loop(hidden, x):
    return tf.map_fn(lambda row: tf.nn.dropout(row, 0.5), hidden)


def masks_along_another_axis(hidden, x):
    return tf.transpose(tf.nn.dropout(tf.transpose(hidden), 0.5))


def chosen(hidden, x):
    rows = tf.range(tf.shape(x)[0])
    places = tf.stack([rows, tf.cast(x[:, 0] > 0, tf.int32)], axis=1)
    return tf.gather_nd(hidden, places)[:, tf.newaxis]


def of_a_padded_sequence(hidden, x):
    mask = tf.sequence_mask(tf.cast(tf.abs(x[:, 0]) * 2, tf.int32), 4)
    return hidden * tf.cast(mask, tf.float32)


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        masks,
        noise,
        stateless,
        keras_masks,
        masks_in_a_loop,
        masks_along_another_axis,
        with_the_state_of_a_generator,
        chosen,
        of_a_padded_sequence,
        set_to_a_constant,
        of_a_generator,
    ],
)
@pytest.mark.slow
def test_random_numbers_and_rows_by_number_pass(change, static, jit):
    if jit and change is masks_in_a_loop:
        pytest.skip("XLA does not compile random numbers in a list of tensors")
    assert np.all(np.isfinite(norms(change, static, jit)))


def through_layers(rows):
    """`[SIZE, 4]`, each row made of the same row of `rows` by layers of TensorFlow."""
    rows = tf.nn.swish(tf.nn.bias_add(rows @ tf.ones([4, 4]), [0.0, 1.0, 2.0, 3.0]))
    images = tf.reshape(rows, [SIZE, 2, 2, 1])
    images = tf.nn.conv2d(images, tf.ones([2, 2, 1, 3]), 1, "SAME")
    kernel, shape = tf.ones([2, 2, 1, 3]), [SIZE, 2, 2, 1]
    images = tf.nn.conv2d_transpose(images, kernel, shape, 1)
    return tf.reshape(images, [SIZE, 4])


def test_layers_of_drawn_rows_are_proven_for_a_static_batch(recwarn):
    def change(hidden, x):
        return hidden + through_layers(tf.random.normal([SIZE, 4]))

    assert np.all(np.isfinite(norms(change, static=True)))
    assert not [w for w in recwarn if "OneByOneWarning" in str(w.message)]


def test_layers_of_constant_rows_by_place_are_refused():
    by_number = tf.reshape(tf.range(4.0 * SIZE), [SIZE, 4])
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row for each place"):
        norms(lambda hidden, x: hidden * through_layers(by_number), True)
