"""Norms and sums are true for every type and every size of the numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    IDS,
    IMAGE,
    SEQUENCE,
    Block,
    X,
    assert_matches,
    check_engine,
    flat,
    one_at_a_time,
    opaque,
    randoms,
    squash,
    traced,
    variable,
)
from tfdpclip.clipping import AutomaticClip, FixedClip
from tfdpclip.gradients import JacobianFallbackWarning, PerExampleGradients, clipped_sum
from tfdpclip.gradients.forms.base_form import Budget
from tfdpclip.gradients.forms.outer import Outer

L = tf.keras.layers
MANY = 40
pytestmark = pytest.mark.filterwarnings(
    "ignore::tfdpclip.gradients.JacobianFallbackWarning"
)


# Types: (function of the data and the variables, shapes of the variables, data).
FORMS = {
    "dense": (lambda x, v: x @ v, [(3, 9)], X),
    "dense_over_time": (lambda x, v: x @ v, [(3, 9)], SEQUENCE),
    "gram": (lambda x, v: x @ v, [(3, 90)], SEQUENCE),
    "bias": (lambda x, v: x + v, [(3,)], SEQUENCE),
    "scale": (lambda x, v: x * v, [(3,)], SEQUENCE),
    "quotient": (lambda x, v: x / tf.exp(v), [(3,)], SEQUENCE),
    "einsum": (
        lambda x, v: tf.einsum("btd,tdf->btf", x, v),
        [(6, 3, 4)],
        SEQUENCE,
    ),
    "filter": (lambda x, v: tf.nn.conv2d(x, v, 1, "SAME"), [(3, 2, 2, 5)], IMAGE),
    "filter_by_depth": (
        lambda x, v: tf.nn.depthwise_conv2d(x, v, [1] * 4, "SAME"),
        [(3, 2, 2, 2)],
        IMAGE,
    ),
    "lookup": (lambda i, v: tf.gather(v, i), [(10, 3)], IDS),
    "tied": (
        lambda i, v: tf.matmul(tf.gather(v, i), v, transpose_b=True),
        [(10, 3)],
        IDS,
    ),
    "sum_with_transposition": (
        lambda x, v: x @ (v + tf.transpose(v)),
        [(3, 3)],
        SEQUENCE,
    ),
    "weight_normalisation": (
        lambda x, g, v: x @ (g * tf.nn.l2_normalize(v, 0)),
        [(9,), (3, 9)],
        SEQUENCE,
    ),
    "split": (
        lambda x, v: (x @ tf.split(v, 3, 1)[0]) * (x @ tf.split(v, 3, 1)[2]),
        [(3, 9)],
        SEQUENCE,
    ),
    "centred": (
        lambda x, v: x @ (v - tf.nn.moments(v, [0])[0]),
        [(3, 3)],
        SEQUENCE,
    ),
    "joined": (
        lambda x, v, w: x @ tf.concat([v, w], 1),
        [(3, 3), (3, 2)],
        SEQUENCE,
    ),
    "loop": (opaque, [(3, 3)], X),
}


def typed(name, dtype, variable_type=tf.float32):
    """The form computed in `dtype`, with its variables and data."""
    function, shapes, data = FORMS[name]
    variables = [
        tf.Variable(tf.cast(randoms(*shape, seed=i), variable_type))
        for i, shape in enumerate(shapes)
    ]

    def per_example(x):
        x = tf.cast(x, dtype) if x.dtype.is_floating else x
        out = function(x, *(tf.cast(v, dtype) for v in variables))
        keep = tf.float64 if dtype == tf.float64 else tf.float32
        out = tf.tanh(tf.cast(out, keep))
        return tf.reduce_sum(out, axis=list(range(1, out.shape.rank)))

    return per_example, variables, data


def check_doubles(name, **options):
    per_example, variables, data = typed(name, tf.float64, tf.float64)
    if data.dtype.is_floating:
        data = tf.cast(data, tf.float64)
    check_engine(per_example, variables, data, **options)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.thinned(18)
def test_double_precision_matches_one_example_at_a_time(name):
    check_doubles(name)


@pytest.mark.parametrize("name", ["gram", "filter", "lookup", "tied", "loop"])
@pytest.mark.thinned(3)
def test_double_precision_in_chunks(name):
    check_doubles(name, memory=1)


def assert_exact_sums(step, variables, data):
    """The sum over the batch is the exact sum of what each example adds to it.

    A sum that was rounded to a coarse type would be off by 1e-3.
    """
    count = len(data)
    norms, total = step(tf.ones([count]), data)
    each = np.stack(
        [flat(step(tf.one_hot(i, count), data)[1], variables) for i in range(count)]
    )
    np.testing.assert_allclose(norms, np.linalg.norm(each, axis=1), rtol=1e-5)
    expected = each.sum(0)
    atol = 1e-6 * np.abs(each).sum(0).max()
    np.testing.assert_allclose(flat(total, variables), expected, rtol=1e-5, atol=atol)
    assert norms.dtype == tf.float32
    return expected


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.thinned(12)
def test_coarse_activations_have_exact_norms_and_sums(name):
    per_example, variables, data = typed(name, tf.bfloat16)
    data = tf.concat([data] * 3, 0)
    step = traced(per_example, variables, [data])
    expected = assert_exact_sums(step, variables, data)
    reference = one_at_a_time(per_example, variables, data).sum(0)
    np.testing.assert_allclose(expected, reference, atol=0.03 * np.abs(reference).max())


BF16_MODELS = {
    "mlp": (lambda: [L.Dense(7, "relu"), L.LayerNormalization(), L.Dense(3)], X),
    "cnn": (
        lambda: [
            L.Conv2D(5, 2, activation="relu"),
            L.GroupNormalization(1),
            L.SeparableConv2D(2, 2),
            L.PReLU(),
            L.Flatten(),
            L.Dense(3),
        ],
        IMAGE,
    ),
    "lstm": (lambda: [L.Embedding(10, 4), L.LSTM(3), L.Dense(2)], IDS),
    "transformer": (lambda: [L.Dense(6), Block()], SEQUENCE),
}


@pytest.mark.parametrize(
    "name",
    list(BF16_MODELS),
)
@pytest.mark.thinned(4)
def test_mixed_bfloat16_models_have_exact_norms_and_sums(name):
    layers, data = BF16_MODELS[name]
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = tf.keras.Sequential(layers())
        model(data)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    data = tf.concat([data] * 3, 0)
    step = traced(lambda x: squash(model(x)), model.trainable_variables, [data])
    assert_exact_sums(step, model.trainable_variables, data)


def test_bfloat16_variables_have_exact_sums():
    for transform in (lambda v: v, lambda v: v * v):
        v = tf.Variable(tf.cast(randoms(3, 4), tf.bfloat16))
        data = tf.tile(X, [8, 1])
        step = traced(
            lambda x, v=v, t=transform: squash(tf.cast(x, tf.bfloat16) @ t(v)),
            [v],
            [data],
        )
        assert_exact_sums(step, [v], data)


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_float16_is_refused_with_what_to_do(policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        dense = L.Dense(2)
        dense(X)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    step = tf.function(
        lambda x: PerExampleGradients(squash(dense(x)), dense.trainable_variables).norms
    )
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        step(X)


# Sizes.

SPREADS = {
    "dense": (lambda x, v: x @ v, [(3, 4)], X),
    "dense_over_time": (lambda x, v: x @ v, [(3, 4)], SEQUENCE),
    "gram": (lambda x, v: x @ v, [(3, 90)], SEQUENCE),
    "bias": (lambda x, v: x + v, [(3,)], SEQUENCE),
    "filter": (lambda x, v: tf.nn.conv2d(x, v, 1, "SAME"), [(3, 2, 2, 5)], IMAGE),
    "filter_gram": (
        lambda x, v: tf.nn.conv2d(x, v, 1, "SAME"),
        [(3, 3, 24, 64)],
        randoms(BATCH, 3, 3, 24),
    ),
    "sum_with_transposition": (
        lambda x, v: x @ (v + tf.transpose(v)),
        [(3, 3)],
        SEQUENCE,
    ),
}


def linear(name):
    """Losses that are linear: the gradient of an example is a multiple of its data."""
    function, shapes, data = SPREADS[name]
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]

    def per_example(x, scale):
        out = function(x, *variables)
        return scale * tf.reduce_sum(out, list(range(1, out.shape.rank)))

    return per_example, variables, data


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.thinned(3)
def test_gradients_of_any_size_in_one_batch_keep_their_own_norms(name):
    """Neither an enormous neighbour nor a tiny one matters."""
    per_example, variables, data = linear(name)
    scale = tf.constant([1.0, 1e-12, 1e12, 0.0, -1.0])
    expected = one_at_a_time(per_example, variables, data, scale)
    step = traced(per_example, variables, [data, scale])
    norms, _ = step(tf.ones([BATCH]), data, scale)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    assert norms[3] == 0.0


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("exponent", [-19, -15, 15, 18])
@pytest.mark.thinned(18)
def test_norms_of_extreme_factors_are_never_too_small(name, exponent):
    """Huge data with a tiny gradient at the output: squares underflow or overflow."""
    per_example, variables, data = linear(name)
    factor = 10.0**exponent
    scale = tf.fill([BATCH], np.float32(1 / factor))
    data = data * factor
    if name == "bias":
        scale = tf.ones_like(scale)
    expected = one_at_a_time(per_example, variables, data, scale)
    step = traced(per_example, variables, [data, scale])
    norms, _ = step(tf.ones([BATCH]), data, scale)
    wanted = np.linalg.norm(expected, axis=1)
    assert np.all((norms >= wanted * (1 - 1e-5)) | ~np.isfinite(norms)), (norms, wanted)
    sums, _ = clipped(per_example, variables, [data, scale], FixedClip(0.5))
    assert np.linalg.norm(sums) <= 0.5 * BATCH * (1 + 1e-5)


def clipped(per_example, variables, data, rule):
    @tf.function
    def step(*tensors):
        return clipped_sum(per_example(*tensors), variables, rule)

    sums, norms = step(*data)
    return flat(sums, variables), norms.numpy()


@pytest.mark.parametrize("rule", [FixedClip(1.0), AutomaticClip(0.01)], ids=str)
@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-6, 0.0])
@pytest.mark.thinned(9)
def test_terms_that_cancel_never_let_an_example_through(gap, rule):
    """The Gram form of a nearly vanishing sum of large terms."""
    v = tf.Variable(tf.zeros([8, 64]))
    row = 1e5 * np.ones([1, 1, 8], np.float32)
    x = tf.constant(np.concatenate([row, row * np.float32(1 - gap)], 1))
    signs = tf.constant([1.0, -1.0])

    def per_example(x):
        return tf.reduce_sum(signs * tf.reduce_sum(x @ v, 2), 1)

    expected = np.linalg.norm(one_at_a_time(per_example, [v], x))
    sums, norms = clipped(per_example, [v], [x], rule)
    assert norms[0] >= expected * (1 - 1e-5)
    assert np.linalg.norm(sums) <= 1 + 1e-5


def test_lookups_that_cancel_never_let_an_example_through():
    v = tf.Variable(tf.zeros([4, 2]))
    sign = tf.constant([1e4, -1e4 * (1 - 1e-4)])

    def per_example(ids):
        return tf.reduce_sum(sign * tf.reduce_sum(tf.gather(v, ids), 2), 1)

    ids = tf.constant([[1, 1], [1, 2]])
    expected = np.linalg.norm(one_at_a_time(per_example, [v], ids), axis=1)
    sums, norms = clipped(per_example, [v], [ids], FixedClip(0.1))
    assert np.all(norms >= expected * (1 - 1e-5))
    assert np.linalg.norm(sums) <= 0.2 * (1 + 1e-5)


# Numbers that are not finite.

NASTY = {"nan": np.nan, "inf": np.inf, "huge": 3e38}
MODELS = {
    "dense": (lambda x, v: squash(x @ v), [(3, 4)], X),
    "dense_over_time": (lambda x, v: squash(x @ v), [(3, 40)], SEQUENCE),
    "bias": (lambda x, v: tf.reduce_sum(tf.square(x + v), [1, 2]), [(3,)], SEQUENCE),
    "scale": (lambda x, v: tf.reduce_sum(x * v, [1, 2]), [(3,)], SEQUENCE),
    "filter": (
        lambda x, v: tf.reduce_sum(tf.nn.conv2d(x, v, 1, "SAME"), [1, 2, 3]),
        [(3, 2, 2, 3)],
        IMAGE,
    ),
    "shared": (lambda x, v: squash(tf.tanh(x @ v) @ tf.transpose(v)), [(3, 3)], X),
    "product": (lambda x, v: tf.reduce_sum(x @ (v @ v), 1), [(3, 3)], X),
}


@pytest.mark.parametrize("nasty", NASTY)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_an_example_that_is_not_finite_is_dropped_and_nobody_else_moves(name, nasty):
    per_example, shapes, data = MODELS[name]
    variables = [variable(*shape) for shape in shapes]
    bad = data.numpy()
    bad[2].flat[:2] = NASTY[nasty]
    step = traced(lambda x: per_example(x, *variables), variables, [data])
    weights = tf.constant([1.0, 2.0, 0.0, 1.0, 0.5])
    clean, wanted = step(weights, data)
    norms, sums = step(weights, tf.constant(bad))
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(norms.numpy()[others], clean.numpy()[others], rtol=1e-5)
    if not np.isfinite(norms[2]):
        # Its own weight is not asked.
        _, sums = step(tf.tensor_scatter_nd_update(weights, [[2]], [5.0]), bad)
    np.testing.assert_allclose(
        flat(sums, variables),
        flat(wanted, variables),
        rtol=1e-5,
        atol=1e-5 * np.abs(flat(wanted, variables)).max(),
    )


def test_a_batch_of_nothing_but_nan_gives_zeros():
    v, w = variable(3, 4), variable(4)
    step = traced(lambda x: squash(x @ v + w), [v, w], [X])
    for value in (np.nan, np.inf):
        norms, sums = step(tf.ones([BATCH]), tf.fill([BATCH, 3], value))
        assert not np.isfinite(norms).any() or value == np.inf
        assert np.all(np.isfinite(flat(sums, [v, w])))


@pytest.mark.slow
def test_a_fallback_that_cannot_keep_nan_apart_fails():
    v = variable(3, 3)
    step = traced(lambda x: squash(opaque(x, v)), [v], [X])
    bad = tf.tensor_scatter_nd_update(X, [[1, 0]], [np.nan])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
        step(tf.ones([BATCH]), bad)


@pytest.mark.slow
def test_gradients_that_vanish_have_norm_exactly_zero():
    v, w = variable(3, 4), variable(3)
    data = tf.concat([X[:2], tf.zeros([2, 3]), X[4:]], 0)
    step = traced(
        lambda x: (
            tf.reduce_sum(tf.nn.relu(x @ v) * 0 + x @ v, 1) + tf.reduce_sum(x * w, 1)
        ),
        [v, w],
        [data],
    )
    norms, _ = step(tf.ones([BATCH]), data)
    assert (norms.numpy() == 0).tolist() == [False, False, True, True, False]


def test_rounding_does_not_grow_with_the_batch():
    v = variable(3, 4)
    data = tf.tile(X[:1], [MANY * 50, 1])
    step = traced(lambda x: squash(x @ v), [v], [data])
    expected = one_at_a_time(lambda x: squash(x @ v), [v], X[:1])
    norms, sums = step(tf.ones([len(data)]), data)
    np.testing.assert_allclose(norms, np.linalg.norm(expected), rtol=1e-5)
    np.testing.assert_allclose(
        flat(sums, [v]), len(data) * expected[0], rtol=1e-5, atol=1e-4
    )


def test_double_precision_weights_reach_double_precision():
    """Sums in float64 are not computed in float32."""
    v = tf.Variable(tf.cast(randoms(3, 4), tf.float64))
    data = tf.cast(X, tf.float64)
    per_example = lambda x: tf.reduce_sum(tf.tanh(x @ v), 1)  # noqa: E731
    expected = one_at_a_time(per_example, [v], data)
    step = traced(per_example, [v], [data])
    assert_matches(step, [v], expected, [data], tolerance=1e-6)
    _, sums = step(tf.ones([BATCH]), data)
    np.testing.assert_allclose(flat(sums, [v]), expected.sum(0), rtol=1e-12)


@pytest.mark.slow
def test_the_fallback_is_as_exact_as_the_rules():
    """The two ways to the same gradients agree."""
    v = variable(3, 3)
    direct = lambda x: squash(tf.tanh(tf.tanh(tf.tanh(x @ v) @ v) @ v))  # noqa: E731
    expected = one_at_a_time(direct, [v], X)
    with pytest.warns(JacobianFallbackWarning):
        step = traced(lambda x: squash(opaque(x, v)), [v], [X])
        assert_matches(step, [v], expected, [X])
    assert_matches(traced(direct, [v], [X]), [v], expected, [X])


@pytest.mark.parametrize("groups", [None, 2])
def test_norms_of_single_products_are_exact_at_any_scale(groups):
    """Whichever rows of a batch float32 could not square."""
    rng = np.random.default_rng(0)
    scales = [1.0, 0.0, 1e-30, 1e-12, 1e25, 1.0, 1e-20, 1.0, np.nan, np.inf]
    lead = [len(scales)] + ([groups] if groups else [])
    x, z = (rng.normal(size=[*lead, 1, k]).astype("float32") for k in (5, 3))
    for i, scale in enumerate(scales):
        x[i] *= np.float32(scale)
    # Small where the first factor is huge: the product is an ordinary number.
    z[4] *= np.float32(1e-25)
    z[6] *= np.float32(1e20)
    form = Outer(tf.constant(x), tf.constant(z), None, [5, 3], 1, ())
    found = form.squared_norms(Budget(2**20, 4)).numpy()
    wide = [part.astype("float64") ** 2 for part in (x, z)]
    expected = np.sum(wide[0].sum(-1) * wide[1].sum(-1), tuple(range(1, len(lead) + 1)))
    np.testing.assert_allclose(found[:8], expected[:8], rtol=1e-5, atol=1e-45)
    assert not np.isfinite(found[8:]).any()
    assert found[4] > 0.01 and found[6] > 0.01


# Complex numbers.


RE, IM = variable(4, 3, seed=4), variable(4, 3, seed=5)
COMPLEX = {
    "matmul": lambda x: tf.complex(x, 2 * x) @ tf.complex(RE, IM),
    "mul": lambda x: tf.complex(x, 2 * x)[:, :3] * tf.complex(RE[0], IM[0]),
    "add": lambda x: tf.complex(x, 2 * x)[:, :3] + tf.complex(RE[0], IM[0]),
    "einsum": lambda x: tf.einsum(
        "bi,io->bo", tf.complex(x, 2 * x), tf.complex(RE, IM)
    ),
    "spectrum": lambda x: tf.signal.rfft(x) * tf.complex(RE[0], IM[0]),
    "gather": lambda x: tf.gather(tf.complex(RE, IM), tf.cast(x[:, 0] > 0, tf.int32)),
    "phase": lambda x: tf.complex(x[:, :3], x[:, 1:]) * tf.exp(tf.complex(0.0, RE[0])),
}


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
def test_complex_numbers_within_a_loss_match_one_example_at_a_time(name):
    """Their imaginary parts count in the gradients of real variables."""

    def loss(x):
        z = COMPLEX[name](x)
        return squash(tf.concat([tf.math.real(z), tf.math.imag(z)], 1))

    check_engine(loss, [RE, IM], randoms(5, 4), tolerance=1e-4)


def test_a_complex_variable_is_refused_with_what_to_do():
    """The norm and the sum were those of the real part of its gradient."""
    w = tf.Variable(tf.complex([1.0, 2.0], [0.5, -1.0]), name="phases")

    def loss(x):
        return tf.reduce_sum(tf.square(tf.abs(tf.complex(x, x) + w)), 1)

    with pytest.raises(ValueError, match=r"'phases:0'.*tf.complex\(real, imag\)"):
        clipped(loss, [w], [randoms(4, 2)], FixedClip(1.0))
