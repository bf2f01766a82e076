"""Examples that reach each other's gradients are refused; ordinary models are not."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    IDS,
    SEQUENCE,
    Block,
    flat,
    integers,
    randoms,
    squash,
    transformer,
    variable,
)
from tests.gradients.layers_test import LAYERS as ORDINARY
from tests.gradients.layers_test import head, images
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import (
    ExampleIsolationError,
    LossStructureError,
    PerExampleGradients,
    chance,
    clipped_sum,
    per_example_norms,
    row_tables,
)

L = tf.keras.layers
# Divisible in as many ways as mixing may need.
X, W = randoms(4, 3), variable(3, 5)
pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]


def norms_of(per_example, variables, *data, dynamic=True, when="always", jit=False):
    lead = None if dynamic else len(data[0])
    specs = [tf.TensorSpec([lead, *t.shape[1:]], t.dtype) for t in data]

    @tf.function(input_signature=specs, jit_compile=jit, autograph=False)
    def step(*tensors):
        loss = per_example(*tensors)
        return per_example_norms(loss, variables, check_isolation=when)

    return step(*data)


def assert_refused(per_example, variables, *data, **options):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
        norms_of(per_example, variables, *data, **options)
    own = isinstance(caught.value, (ExampleIsolationError, LossStructureError))
    if not own:
        assert "ExampleIsolationError" in str(caught.value)


def dense(x):
    return x @ W


def two_by_two(h):
    """Rows 2k and 2k + 1 get their sum."""
    pairs = tf.reduce_sum(tf.reshape(h, [-1, 2, 5]), 1)
    return tf.repeat(pairs, 2, axis=0)


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
# Others scale an example's gradient, or choose who has one: no loss changes.
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
        with pytest.raises(ExampleIsolationError, match="combines the examples"):
            norms_of(per_example, [W], X, dynamic=dynamic, when="never")


# Shows only when it runs: the graph has reshapes, which may mean anything.
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
    # What mends it, and not what would mend something else.
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
        "reshape": (lambda x: squash(dense(tf.reshape(x, [6, -1, 3]))), [W]),
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
def test_the_error_names_the_variable_and_the_op():
    with pytest.raises(tf.errors.InvalidArgumentError, match="Variable.*MatMul"):
        norms_of(IN_PAIRS, [W], X)


@pytest.mark.slow
def test_first_checks_once_and_never_does_not():
    assert_refused(IN_PAIRS, [W], X, when="first")
    assert norms_of(IN_PAIRS, [W], X, when="never").shape == [4]
    with pytest.raises(ValueError, match="check_isolation"):
        norms_of(IN_PAIRS, [W], X, when="sometimes")


@pytest.mark.slow
def test_a_batch_that_proves_nothing_does_not_settle_the_first_check():
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
    with pytest.raises(tf.errors.InvalidArgumentError, match="Isolation"):
        make(True)(X)


@pytest.mark.slow
def test_compiled_code_drops_everybody_where_it_cannot_raise():
    @tf.function(jit_compile=True)
    def step(x):
        loss = IN_PAIRS(x)
        return clipped_sum(loss, [W], FixedClip(1.0), check_isolation="always")

    sums, _ = step(X)
    np.testing.assert_array_equal(sums[0], tf.zeros_like(W))


# No false alarms.


# Slow to trace, and not another kind.
_VARIANTS = ("lstm_unrolled_1", "gru_unrolled_1", "lstm_stacked", "gru_sequences")


@pytest.mark.parametrize("name", [n for n in ORDINARY if n not in _VARIANTS])
@pytest.mark.slow
def test_ordinary_layers_pass(name):
    """For batches of several sizes, of one and of none, with an example of NaN."""
    shape, layers = ORDINARY[name]
    tf.keras.utils.set_random_seed(3)
    x, _ = images(*shape, batch=8)
    model = head(*layers())
    model(x)

    @tf.function(input_signature=[tf.TensorSpec([None, *shape])])
    def step(x):
        loss = squash(model(x, training=True))
        gradients = PerExampleGradients(
            loss, model.trainable_variables, check_isolation="always"
        )
        return gradients.norms, gradients.isolated

    bad = tf.tensor_scatter_nd_update(x, [[1]], [tf.fill(shape, np.nan)])
    recurrent = any(word in name for word in ("lstm", "gru", "rnn", "bidirectional"))
    for batch in (x, x[:3], x[:1], x if recurrent else bad, 1e-6 * x, 1e3 * x):
        norms, isolated = step(batch)
        assert norms.shape == [len(batch)] and bool(isolated)


RANDOM = {
    "dropout": lambda: [L.Dense(6), L.Dropout(0.5), L.Dense(5)],
    "spatial_dropout": lambda: [L.Dense(6), L.SpatialDropout1D(0.5), L.Dense(5)],
    "gaussian_noise": lambda: [L.Dense(6), L.GaussianNoise(1.0), L.Dense(5)],
    "gaussian_dropout": lambda: [L.Dense(6), L.GaussianDropout(0.5), L.Dense(5)],
    "alpha_dropout": lambda: [L.Dense(6, "selu"), L.AlphaDropout(0.3), L.Dense(5)],
    "attention_dropout": lambda: [L.Dense(6), Dropped(), L.Dense(5)],
    "recurrent_dropout": lambda: [L.LSTM(3, dropout=0.3, unroll=True)],
    "transformer_block": lambda: [L.Dense(6), Block()],
    "standardised": lambda: [L.Normalization(mean=0.5, variance=2.0), L.Dense(4)],
    "unit_norm": lambda: [L.Dense(4), L.UnitNormalization()],
    "sorted_features": lambda: [L.Dense(4), L.Lambda(lambda h: tf.sort(h, axis=-1))],
    "best_features": lambda: [
        L.Dense(6),
        L.Lambda(lambda h: tf.math.top_k(h, 2).values),
    ],
    "rolled_in_time": lambda: [L.Dense(4), L.Lambda(lambda h: tf.roll(h, 1, axis=1))],
    "reversed_in_time": lambda: [L.Dense(4), L.Lambda(lambda h: h[:, ::-1])],
    "patches": lambda: [
        L.Reshape((4, 3, 1)),
        L.Lambda(
            lambda h: tf.image.extract_patches(
                h, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID"
            )
        ),
        L.Dense(3),
    ],
    "resized": lambda: [
        L.Reshape((4, 3, 1)),
        L.Conv2D(2, 2),
        L.Resizing(5, 5),
        L.Conv2D(2, 2),
    ],
    "cumulative_in_time": lambda: [L.Dense(4), L.Lambda(lambda h: tf.cumsum(h, 1))],
    "random_scale": lambda: [
        L.Lambda(lambda h: h * tf.random.uniform(tf.shape(h)[:1])[:, None, None]),
        L.Dense(4),
    ],
}


class Dropped(L.Layer):
    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 3, dropout=0.4)

    def call(self, x, training=None):
        return x + self.attention(x, x, training=training)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.slow
def test_random_and_odd_layers_pass(name, dynamic):
    tf.keras.utils.set_random_seed(2)
    data = randoms(8, 4, 3)
    model = head(*RANDOM[name]())
    model(data)
    options = {"dynamic": dynamic}
    per_example = lambda x: squash(model(x, training=True))  # noqa: E731
    norms = norms_of(per_example, model.trainable_variables, data, **options)
    assert np.all(norms.numpy() > 0)


@pytest.mark.slow
def test_a_transformer_and_its_lengths_pass():
    model = transformer()
    for dynamic in (True, False):
        norms = norms_of(
            lambda i: squash(model(i)), model.trainable_variables, IDS, dynamic=dynamic
        )
        assert np.all(norms.numpy() > 0)


@pytest.mark.slow
def test_positions_of_a_dynamic_length_pass():
    """Also where there are as many steps as examples."""
    positions, kernel = variable(8, 3), variable(3, 4)

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3])])
    def step(x):
        where = tf.range(tf.shape(x)[1])
        loss = squash((x + tf.gather(positions, where)) @ kernel)
        return per_example_norms(loss, [positions, kernel], check_isolation="always")

    for steps in (4, 6, 8):
        x = randoms(4, steps, 3)
        one = [step(x[i : i + 1])[0] for i in range(4)]
        np.testing.assert_allclose(step(x), one, rtol=1e-5)


SQUARES = {
    "positions": lambda x, v: squash(x @ v + v),
    "table": lambda x, v: squash((x + tf.constant(TABLE.numpy())) @ v),
    "captured_table": lambda x, v: squash((x + TABLE) @ v),
    "products_in_time": lambda x, v: squash(tf.matmul(x @ v, x, transpose_b=True)),
    "zeros": lambda x, v: squash(x @ v + tf.zeros([4, 4])),
    "causal": lambda x, v: squash(tf.linalg.band_part(tf.ones([4, 4]), -1, 0) @ x @ v),
}
TABLE = randoms(4, 4, seed=7)
UNIFORM = pytest.mark.xfail(
    strict=False, reason="a uniform constant looks like a batch"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=UNIFORM if n in ("zeros", "causal") else ())
        for n in SQUARES
    ],
)
@pytest.mark.slow
def test_a_batch_as_long_as_the_other_axes_passes(name):
    """B = T = D, static: nothing tells the axes apart but the graph."""
    data, v = randoms(4, 4, 4), variable(4, 4)
    per_example = lambda x: SQUARES[name](x, v)  # noqa: E731
    one = [norms_of(per_example, [v], data[i : i + 1])[0] for i in range(4)]
    found = norms_of(per_example, [v], data, dynamic=False)
    np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.slow
def test_two_views_of_each_example_pass():
    """A model run on both halves at once, as siamese networks do."""
    v = variable(3, 4)

    def per_example(x):
        both = tf.tanh(tf.concat([x, x[:, ::-1]], 0) @ v)
        left, right = tf.split(both, 2, axis=0)
        return tf.reduce_sum(left * right, 1)

    try:
        norms = norms_of(per_example, [v], X)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        assert "Isolation" in str(error)
        return
    expected = [norms_of(per_example, [v], X[i : i + 1])[0] for i in range(4)]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["dense_3d", "conv2d_same", "layer_norm", "lstm"],
)
@pytest.mark.slow
def test_ordinary_layers_pass_when_compiled(name):
    shape, layers = ORDINARY[name]
    x, _ = images(*shape)
    model = head(*layers())
    model(x)

    @tf.function(jit_compile=True)
    def step(x):
        return clipped_sum(
            squash(model(x)),
            model.trainable_variables,
            FixedClip(1.0),
            check_isolation="always",
        )

    sums, _ = step(x)
    assert np.any(flat(sums, model.trainable_variables) != 0)


@pytest.mark.slow
def test_large_and_tiny_examples_side_by_side_pass():
    model = head(L.Dense(6, "tanh"), L.LayerNormalization(), L.Dense(5))
    data = SEQUENCE * tf.constant([1e-6, 1.0, 1e4, 0.0, 30.0])[:, None, None]
    model(data)
    norms = norms_of(lambda x: squash(model(x)), model.trainable_variables, data)
    assert np.all(np.isfinite(norms)) and np.all(norms.numpy() > 0)


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, None])
def test_weights_of_the_comparison_have_no_blind_rows(width):
    """(a, -a) has a product 0 with half of all random signs; so have other patterns.

    All four products below 1 / 200 of the length: 2e-9 of draws of one row, so that
    1,200 rows raise a false alarm in 3e6 runs.
    """
    patterns = np.zeros([6, 8], np.float32)
    patterns[0, :2] = 1, -1
    patterns[1, :4] = 1, -1, 1, -1
    patterns[2] = 1
    patterns[3, 5] = 1
    patterns[4, :3] = 2, -1, -1
    patterns[5] = np.arange(8)
    patterns /= np.linalg.norm(patterns, axis=1, keepdims=True)
    table_of = table_maker(width)
    for _ in range(200):
        table = table_of(patterns)
        np.testing.assert_allclose(table[:, -1], 1, rtol=1e-6)
        assert np.abs(table[:, :-1]).max(1).min() > 1 / 200


def table_maker(width):
    @tf.function(input_signature=[tf.TensorSpec([None, width])])
    def table_of(rows):
        weights = row_tables.Weights(chance.run_seed())
        parts = row_tables.tables([(rows, row_tables.Layout())], weights)
        return row_tables.join(parts).joined

    return table_of


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-10, 1e10, 1e25])
def test_a_table_knows_how_large_rows_are_whose_squares_are_not_numbers(scale):
    """Below 1 / 200 of the length: 2e-9 of draws of one row, as above."""
    rows = scale * np.random.default_rng(0).standard_normal([50, 30])
    table = table_maker(30)(tf.constant(rows, tf.float32)).numpy()
    sizes = table[:, -1] / np.linalg.norm(rows, axis=1)
    assert sizes.min() > 1 / 200
    assert sizes.max() < 2 * np.sqrt(30)


def test_tables_of_no_rows_and_of_rows_of_nothing():
    assert table_maker(None)(tf.zeros([0, 3])).shape == [0, row_tables.WIDTH]
    for width in (0, None):
        found = table_maker(width)(tf.zeros([4, 0]))
        np.testing.assert_array_equal(found, np.zeros([4, row_tables.WIDTH]))


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
def test_a_gradient_that_does_not_scale_with_the_loss_is_refused_for_that():
    def per_example(x):
        return tf.reduce_sum(tf.square(clipped_on_the_way_back(dense(x))), axis=1)

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        norms_of(per_example, [W], X)
    for part in ("does not scale with its loss", "custom_gradient", "IdentityN"):
        assert part in str(caught.value)
    # Which would be written with backslashes.
    assert "\\'" not in str(caught.value)


@pytest.mark.slow
def test_an_error_does_not_speak_of_gradient_functions_where_there_are_none():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        norms_of(IN_PAIRS, [W], X)
    assert "custom_gradient" not in str(caught.value)
