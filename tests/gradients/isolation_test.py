"""Examples that reach each other's gradients are refused."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    assert_reaches_no_other,
    assert_refused,
    integers,
    norms_of,
    randoms,
    squash,
    two_by_two,
    variable,
)
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import ExampleIsolationError, clipped_sum, per_example_norms

L = tf.keras.layers
# Divisible in as many ways as mixing may need.
X, W = randoms(4, 3), variable(3, 5)
pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]


def dense(x):
    return x @ W


MIXING = {
    "rolled": lambda x: squash(tf.roll(dense(x), 1, axis=0)),
    "rolled_before": lambda x: squash(dense(tf.roll(x, 1, axis=0))),
    "reversed": lambda x: squash(dense(x) + tf.reverse(dense(x), [0])),
    "reversed_before": lambda x: squash(dense(tf.reverse(x, [0]))),
    "reversed_by_slices": lambda x: squash(dense(x)[::-1]),
    "less_the_mean": lambda x: squash(dense(x) - tf.reduce_mean(dense(x), 0)),
    "data_less_the_mean": lambda x: squash(
        dense(x - tf.reduce_mean(x, 0, keepdims=True))
    ),
    "softmax_over_the_batch": lambda x: squash(tf.nn.softmax(dense(x), axis=0)),
    "in_batch_negatives": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(x)[0]), tf.matmul(dense(x), dense(x), transpose_b=True)
    ),
    "products_of_examples": lambda x: squash(
        tf.matmul(dense(x), dense(x), transpose_b=True)
    ),
    "covariance": lambda x: squash(dense(x @ tf.matmul(x, x, transpose_a=True))),
    "cumulative": lambda x: squash(tf.cumsum(dense(x))),
    "cumulative_product": lambda x: squash(tf.math.cumprod(dense(x))),
    "sorted": lambda x: squash(tf.sort(dense(x), axis=0)),
    "permuted_by_the_data": lambda x: squash(
        tf.gather(dense(x), tf.argsort(dense(x)[:, 0])[::-1])
    ),
    "permuted": lambda x: squash(tf.gather(dense(x), [1, 0, 3, 2])),
    "best_example": lambda x: squash(
        dense(x) + tf.gather(dense(x), tf.argmax(dense(x)[:, 0]))
    ),
    "first_example": lambda x: squash(dense(x) + dense(x)[:1]),
    "neighbours": lambda x: squash(
        tf.concat([dense(x)[1:] - dense(x)[:-1], dense(x)[:1]], 0)
    ),
    "in_pairs": lambda x: squash(two_by_two(dense(x))),
    "minor_for_major": lambda x: squash(
        tf.reshape(tf.transpose(dense(x)), [tf.shape(x)[0], 5])
    ),
    "normalised_over_the_batch": lambda x: squash(
        tf.math.l2_normalize(dense(x), axis=0)
    ),
    "normalised_altogether": lambda x: squash(tf.math.l2_normalize(dense(x))),
    "by_the_maximum": lambda x: squash(dense(x) / tf.reduce_max(tf.abs(dense(x)), 0)),
    "stopped_statistic": lambda x: squash(
        dense(x) / tf.stop_gradient(tf.math.reduce_std(dense(x)))
    ),
    "stopped_roll": lambda x: squash(
        dense(x) * tf.stop_gradient(tf.roll(dense(x), 1, 0))
    ),
    "partitioned": lambda x: squash(
        tf.concat(tf.dynamic_partition(dense(x), tf.cast(x[:, 0] > 0, tf.int32), 2), 0)
    ),
    "mixed_up": lambda x: squash(dense(0.5 * x + 0.5 * tf.random.shuffle(x))),
    "transposed_twice": lambda x: squash(
        tf.transpose(tf.transpose(dense(x)) @ (1.0 + tf.eye(tf.shape(x)[0])))
    ),
    "losses_rolled": lambda x: squash(dense(x)) + tf.roll(squash(dense(x)), 1, 0),
    "losses_by_rank": lambda x: (
        squash(dense(x)) * tf.cast(tf.argsort(squash(dense(x))), tf.float32)
    ),
    "scan": lambda x: squash(tf.scan(lambda a, b: tf.tanh(a + b), dense(x))),
}
BY_CHANCE = {
    "branch": lambda x: tf.cond(
        tf.random.uniform([]) < 0.1, lambda: tf.roll(x, 1, 0), lambda: x
    ),
    "case": lambda x: tf.switch_case(
        tf.random.uniform([], 0, 30, tf.int32) // 29,
        [lambda: x, lambda: tf.reverse(x, [0])],
    ),
    "branch_in_a_loop": lambda x: tf.while_loop(
        lambda i, h: i < 2,
        lambda i, h: (i + 1, BY_CHANCE["branch"](h)),
        [0, x],
    )[1],
}
# Other examples scale an example's gradient or switch it off; no loss changes.
GRADIENT_ONLY = {
    "hardest": lambda v: v >= 0.5 * tf.math.top_k(v, 1)[0][0],
    "ranks": lambda v: tf.argsort(v) > 1,
    "any_rank": lambda v: tf.fill(
        tf.shape(v), tf.reduce_any(tf.math.top_k(v, 1).indices > 1)
    ),
    "above_the_first": lambda v: v >= v[0],
    "searched": lambda v: tf.searchsorted(tf.sort(v), v) > 1,
    "scan": lambda v: tf.scan(lambda a, b: 0.5 * a + b, v) > 1.0,
    "mapped": lambda v: tf.map_fn(lambda e: e > v[0], v, fn_output_signature=tf.bool),
    "vectorized": lambda v: tf.vectorized_map(lambda e: e > v[0], v),
    "histogram": lambda v: (
        v > tf.cast(tf.histogram_fixed_width(v, [0.0, 5.0])[0], tf.float32)
    ),
    "spectrum": lambda v: v > tf.abs(tf.signal.rfft(v))[0] / 4,
    "softmax": lambda v: tf.nn.softmax(v[tf.newaxis])[0] > 0.2,
}


@pytest.mark.parametrize("name", BY_CHANCE)
def test_mixing_by_chance_is_refused_from_the_graph(name):
    with pytest.raises(ExampleIsolationError, match="Roll|ReverseV2"):
        norms_of(lambda x: squash(BY_CHANCE[name](dense(x))), [W], X, when="never")


#: The proof ends at these ops, and each gradient is made of its example alone.
ALONE = frozenset("above_the_first scan mapped vectorized histogram".split())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", GRADIENT_ONLY)
def test_whose_gradient_counts_may_not_depend_on_others(name, dynamic):
    def by_mask(x):
        own = squash(dense(x))
        return tf.where(GRADIENT_ONLY[name](own), own, tf.stop_gradient(own))

    def by_factor(x):
        own = squash(dense(x))
        g = tf.stop_gradient(tf.cast(GRADIENT_ONLY[name](own), tf.float32))
        return g * own + tf.stop_gradient((1 - g) * own)

    for per_example in (by_mask, by_factor):
        if name in ALONE:
            assert_reaches_no_other(per_example, [W], X, dynamic=dynamic)
            continue
        with pytest.raises(ExampleIsolationError, match="combines the ex|number of ex"):
            norms_of(per_example, [W], X, dynamic=dynamic, when="never")


# Shows only when it runs: the graph has reshapes, whose meaning depends on shapes.
IN_PAIRS = MIXING["in_pairs"]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.thinned(6)
def test_mixing_of_any_kind_is_refused(name, dynamic):
    assert_refused(MIXING[name], [W], X, dynamic=dynamic)


def of_scalars(name):
    return lambda x: tf.reduce_mean(MIXING[name](x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rolled", "less_the_mean", "in_batch_negatives", "in_pairs", "mixed_up"]
)
def test_a_mean_of_mixed_losses_is_refused(name):
    assert_refused(of_scalars(name), [W], X)


class Attend(L.Layer):
    """Attention over axis 0."""

    def build(self, shape):
        self.attention = L.MultiHeadAttention(1, 2)

    def call(self, x):
        x = tf.transpose(x, [1, 0, 2])
        return tf.transpose(self.attention(x, x), [1, 0, 2])


@pytest.mark.parametrize("rank", [2, 4])
def test_batch_normalisation_in_training_is_refused_by_name(rank):
    layer = L.BatchNormalization()
    layer.build([None, *[1] * (rank - 2), 5])

    def per_example(x):
        hidden = tf.reshape(dense(x), [-1, *[1] * (rank - 2), 5])
        return squash(layer(hidden, training=True))

    with pytest.raises(ExampleIsolationError, match="is batch normalisation") as found:
        norms_of(per_example, [W, *layer.trainable_variables], X)
    # The message names the right remedy, and no other remedy.
    assert "dpc.keras.convert_batchnorm(model)" in str(found.value)
    assert "PerExampleLoss" not in str(found.value)


@pytest.mark.slow
def test_sequences_whose_batch_is_elsewhere_are_refused():
    data = randoms(4, 6, 3)
    attend = Attend()
    attend(data)
    kernel = variable(3, 3, 5)
    cases = {
        "attention": (lambda x: squash(attend(x)), attend.trainable_variables),
        "reinterpreted": (
            lambda x: squash(tf.reshape(tf.transpose(dense(x), [1, 0, 2]), [-1, 6, 5])),
            [W],
        ),
        "softmax": (lambda x: squash(tf.nn.softmax(dense(x), axis=0)), [W]),
        "einsum": (
            lambda x: squash(tf.einsum("btd,ctd->bct", dense(x), dense(x))),
            [W],
        ),
    }
    for per_example, variables in cases.values():
        assert_refused(per_example, variables, data)
    # Six losses of four records have no row to read.
    with pytest.raises(tf.errors.InvalidArgumentError):
        norms_of(lambda x: squash(dense(tf.reshape(x, [6, -1, 3]))), [W], data)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        norms_of(
            lambda x: squash(
                tf.transpose(
                    tf.nn.conv1d(tf.transpose(x, [1, 0, 2]), kernel, 1, "SAME"),
                    [1, 0, 2],
                )
            ),
            [kernel],
            data,
        )


def test_mixing_of_integer_features_is_refused():
    table = variable(10, 3)
    ids = integers(4)
    for per_example in (
        lambda i: squash(tf.roll(tf.one_hot(i, 10), 1, axis=0) @ table),
        lambda i: squash(tf.gather(tf.one_hot(i, 10), [1, 0, 3, 2]) @ table),
        lambda i: squash(
            tf.gather(tf.sign(tf.cast(i - 4, tf.float32)), [1, 0, 3, 2])[:, tf.newaxis]
            @ table[:1]
        ),
    ):
        assert_refused(per_example, [table], ids)


def test_permuted_ids_are_refused():
    table = variable(10, 3)
    permuted = lambda i: squash(tf.gather(table, tf.gather(i, [1, 0, 3, 2])))  # noqa: E731
    assert_refused(permuted, [table], integers(4))


@pytest.mark.slow
def test_the_error_names_the_op_and_its_type():
    with pytest.raises(ExampleIsolationError, match=r"'Reshape\w*' \(a Reshape\)"):
        norms_of(IN_PAIRS, [W], X)


@pytest.mark.slow
def test_first_checks_once_and_never_does_not():
    mixing = MIXING["minor_for_major"]
    assert_refused(mixing, [W], X, when="first")
    assert norms_of(mixing, [W], X, when="never").shape == [4]
    with pytest.raises(ValueError, match="check_gradients"):
        norms_of(mixing, [W], X, when="sometimes")


@pytest.mark.slow
def test_a_batch_that_shows_nothing_does_not_settle_the_comparison():
    """Batches of no example and of a single example show nothing."""

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return per_example_norms(MIXING["minor_for_major"](x), [W])

    step(X[:0])
    step(X[:1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Isolation"):
        step(X)


@pytest.mark.slow
def test_a_second_function_of_the_same_name_is_checked_too():
    def make(mix):
        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def step(x):
            other = two_by_two if mix else tf.tanh
            return per_example_norms(squash(other(dense(x))), [W])

        return step

    make(False)(X)
    with pytest.raises(ExampleIsolationError):
        make(True)(X)


@pytest.mark.slow
def test_compiled_code_drops_everybody_where_it_cannot_raise():
    @tf.function(jit_compile=True)
    def step(x):
        loss = IN_PAIRS(x)
        return clipped_sum(loss, [W], FixedClip(1.0), check_gradients="always")

    sums, _ = step(X)
    np.testing.assert_array_equal(sums[0], tf.zeros_like(W))


def test_a_little_mixing_of_two_logits_is_refused_each_time():
    table, labels = variable(50, 2), tf.constant([0, 1] * 8)

    def mixed(ids):
        z = tf.gather(table, ids)
        m = tf.nn.avg_pool1d(z[tf.newaxis], 31, 1, "SAME")[0]
        z += 9e-4 * (m - tf.stop_gradient(m))
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, z)

    for _ in range(3):
        assert_refused(mixed, [table], tf.range(16))


@tf.custom_gradient
def clipped_on_the_way_back(x):
    return tf.identity(x), lambda dy: tf.clip_by_value(dy, -1.0, 1.0)


@pytest.mark.slow
def test_a_gradient_that_does_not_scale_with_the_loss_is_that_of_each_example():
    def per_example(x):
        return tf.reduce_sum(tf.square(clipped_on_the_way_back(dense(x))), axis=1)

    found = norms_of(per_example, [W], X)
    for i, norm in enumerate(found):
        with tf.GradientTape() as tape:
            loss = per_example(X[i : i + 1])
        np.testing.assert_allclose(norm, tf.norm(tape.gradient(loss, W)), rtol=1e-5)


@pytest.mark.slow
def test_an_error_does_not_speak_of_gradient_functions_where_there_are_none():
    with pytest.raises(ExampleIsolationError) as caught:
        norms_of(IN_PAIRS, [W], X)
    assert "custom_gradient" not in str(caught.value)
