"""Variables that are shared, transformed or used in odd places.

Every case is compared with gradients taken one example at a time by the framework's own
differentiation, for two batch sizes in the same trace.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    IDS,
    IMAGE,
    SEQUENCE,
    X,
    assert_matches,
    batch_of,
    check,
    check_engine,
    flat,
    last_axes_first,
    one_at_a_time,
    opaque,
    randoms,
    squash,
    traced,
    variable,
)
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import (
    JacobianFallbackWarning,
    OneByOneWarning,
    PerExampleGradients,
    clipped_sum,
)


def splits(x, v):
    a, b, c = tf.split(v, 3, axis=1)
    return squash((x @ a) * (x @ b)) + squash(x @ c)


def reused_pieces(x, v):
    a, b, _ = tf.split(v, 3, axis=1)
    return squash((x @ a) * (x @ a + x @ b))


def overlapping_splits(x, v):
    return squash(x @ tf.split(v, 3, axis=1)[0]) + squash(x @ tf.split(v, 2, axis=1)[1])


def split_transposition(x, v):
    a, b = tf.split(tf.transpose(v), [5, 7], axis=0)
    return squash(tf.matmul(x, a, transpose_b=True)) * squash(x @ tf.transpose(b))


def unstacked(x, v):
    return tf.add_n([squash(x @ u) * (k + 1.0) for k, u in enumerate(tf.unstack(v))])


def class_token(make):
    def per_example(x, token, w):
        return squash(tf.concat([make(x, token), x], 1) @ w)

    return per_example


def repeated(x, t):
    return tf.repeat(t, batch_of(x) if x.shape[0] is None else x.shape[0], axis=0)


def disentangled(x, positions, query, key):
    """Attention to relative positions, of which every example has a copy (DeBERTa)."""
    copies = repeated(x, tf.nn.l2_normalize(positions, -1)[tf.newaxis])
    q, k = x @ query, x @ key
    content = tf.matmul(q, k, transpose_b=True)
    to_position = tf.matmul(q, copies @ key, transpose_b=True)
    from_position = tf.matmul(k, copies @ query, transpose_b=True)
    return squash(content) + squash(to_position) + squash(tf.sin(from_position))


def rbf(x, v):
    apart = tf.math.squared_difference(x[:, :, tf.newaxis], v)
    return squash(tf.exp(-tf.reduce_sum(apart, -1)))


# name: (function of the data and the variables, the shapes of the variables, data).
CASES = {
    "layer_called_twice": (lambda x, v: squash(tf.tanh(x @ v) @ v), [(3, 3)], X),
    "shared_over_time": (lambda x, v: squash(tf.tanh(x @ v) @ v), [(3, 3)], SEQUENCE),
    "v_plus_its_transpose": (
        lambda x, v: squash(x @ (v + tf.transpose(v))),
        [(3, 3)],
        SEQUENCE,
    ),
    "v_then_its_transpose": (
        lambda x, v: squash(tf.tanh(x @ v) @ tf.transpose(v)),
        [(3, 4)],
        X,
    ),
    "transposed_product": (
        lambda x, v: squash(tf.matmul(tf.tanh(x @ v), v, transpose_b=True)),
        [(3, 4)],
        X,
    ),
    "elementwise_square": (lambda x, v: squash(x @ (v * v)), [(3, 4)], SEQUENCE),
    "matrix_square": (lambda x, v: squash(x @ (v @ v)), [(3, 3)], X),
    "low_rank_product_first": (
        lambda x, a, b: squash(x @ (a @ b)),
        [(3, 2), (2, 5)],
        SEQUENCE,
    ),
    "low_rank_beside_full": (
        lambda x, w, a, b: squash(x @ w + (x @ a) @ b),
        [(3, 5), (3, 2), (2, 5)],
        X,
    ),
    "weight_normalisation": (
        lambda x, g, v: squash(x @ (g * tf.nn.l2_normalize(v, 0))),
        [(5,), (3, 5)],
        SEQUENCE,
    ),
    "spectral_scaling": (lambda x, v: squash(x @ (v / tf.norm(v))), [(3, 5)], X),
    "frozen_spectral_scaling": (
        lambda x, v: squash(x @ (v / tf.stop_gradient(tf.norm(v)))),
        [(3, 5)],
        X,
    ),
    "split": (splits, [(3, 12)], SEQUENCE),
    "pieces_used_twice": (reused_pieces, [(3, 12)], SEQUENCE),
    "two_overlapping_splits": (overlapping_splits, [(3, 12)], X),
    "split_of_a_transposition": (split_transposition, [(3, 12)], X),
    "unstacked": (unstacked, [(3, 3, 4)], SEQUENCE),
    "slices": (
        lambda x, v: squash(x @ v[0]) + squash(x @ v[1, :, ::2]),
        [(2, 3, 4)],
        SEQUENCE,
    ),
    "joined_variables": (
        lambda x, v, w: squash(x @ tf.concat([v, w], 1)),
        [(3, 3), (3, 2)],
        X,
    ),
    "stacked_variables": (
        lambda x, v, w: squash(x @ tf.stack([v, w])[1]) + squash(x @ v),
        [(3, 3), (3, 3)],
        X,
    ),
    "reshaped": (lambda x, v: squash(x @ tf.reshape(v, [3, 8])), [(4, 6)], SEQUENCE),
    "two_ranks": (
        lambda x, v: squash(x @ v) + squash(x[:, 0] @ v) + squash(x * v[0]),
        [(3, 3)],
        SEQUENCE,
    ),
    "bias_of_two_ranks": (
        lambda x, v: squash(x + v) + 2 * squash(x[:, 0] + v),
        [(3,)],
        SEQUENCE,
    ),
    "scalar": (lambda x, s: squash(x * s) + squash(x + s), [()], SEQUENCE),
    "scalar_exponent": (lambda x, s: squash(tf.pow(tf.abs(x), s)), [()], X),
    "temperature": (lambda x, s: squash(x / tf.exp(s)), [()], SEQUENCE),
    "tied_embedding": (
        lambda i, v: squash(tf.tanh(tf.gather(v, i)) @ tf.transpose(v)),
        [(10, 3)],
        IDS,
    ),
    "tied_embedding_by_handle": (
        lambda i, v: squash(
            tf.matmul(tf.tanh(tf.nn.embedding_lookup(v, i)), v, transpose_b=True)
        ),
        [(10, 3)],
        IDS,
    ),
    "lookup_of_one_id_only": (
        lambda i, v: squash(tf.gather(v, 0 * i)),
        [(10, 3)],
        IDS,
    ),
    "long_lookup_with_repeats": (
        lambda i, v: squash(tf.gather(v, tf.tile(i, [1, 6]))),
        [(10, 3)],
        IDS,
    ),
    "lookup_in_a_reshaped_table": (
        lambda i, v: squash(tf.gather(tf.reshape(v, [5, 6]), i % 5)),
        [(10, 3)],
        IDS,
    ),
    "mean_of_lookups": (
        lambda i, v: squash(tf.reduce_mean(tf.gather(v, i), axis=1)),
        [(10, 3)],
        IDS,
    ),
    "class_token_broadcast": (
        class_token(lambda x, t: tf.broadcast_to(t, [batch_of(x), 1, 3])),
        [(1, 1, 3), (3, 3)],
        SEQUENCE,
    ),
    "class_token_tiled": (
        class_token(lambda x, t: tf.tile(t, [batch_of(x), 1, 1])),
        [(1, 1, 3), (3, 3)],
        SEQUENCE,
    ),
    "class_token_repeated": (
        class_token(repeated),
        [(1, 1, 3), (3, 3)],
        SEQUENCE,
    ),
    "relative_positions": (disentangled, [(4, 3), (3, 2), (3, 2)], SEQUENCE),
    "relative_positions_that_are_frozen": (
        lambda x, q, k: disentangled(x, randoms(4, 3), q, k),
        [(3, 2), (3, 2)],
        SEQUENCE,
    ),
    "class_token_added_to_zeros": (
        class_token(lambda x, t: t + tf.zeros([batch_of(x), 1, 1])),
        [(1, 1, 3), (3, 3)],
        SEQUENCE,
    ),
    "class_token_times_ones": (
        class_token(lambda x, t: tf.ones_like(x[:, :1]) * t),
        [(1, 1, 3), (3, 3)],
        SEQUENCE,
    ),
    "positions": (lambda x, p: squash(x + p), [(6, 3)], SEQUENCE),
    "positions_looked_up": (
        lambda x, p: squash(x + tf.gather(p, tf.range(tf.shape(x)[1]))),
        [(6, 3)],
        SEQUENCE,
    ),
    "positions_tiled": (
        lambda x, p, w: squash((x + tf.tile(p[tf.newaxis], [batch_of(x), 1, 1])) @ w),
        [(6, 3), (3, 3)],
        SEQUENCE,
    ),
    "parameter_on_the_left": (
        lambda x, v: squash(tf.matmul(v, x, transpose_a=True)),
        [(6, 4)],
        SEQUENCE,
    ),
    "tensordot_over_time": (
        lambda x, v: squash(tf.tensordot(x, v, [[1], [0]])),
        [(6, 4)],
        SEQUENCE,
    ),
    "heads_tiled": (
        lambda x, v: squash(tf.tile(x[:, tf.newaxis], [1, 2, 1, 1]) @ v),
        [(2, 3, 5)],
        SEQUENCE,
    ),
    "heads_stacked": (
        lambda x, v: squash(tf.stack([x, 2 * x], 1) @ v),
        [(2, 3, 5)],
        SEQUENCE,
    ),
    "choice_by_the_data": (
        lambda x, v, s: squash(tf.where(x > 0, v * x, x * tf.exp(s))),
        [(3,), ()],
        SEQUENCE,
    ),
    "choice_between_variables": (
        lambda x, v, s: squash(tf.where(x > 0, v, s) * x),
        [(3,), ()],
        SEQUENCE,
    ),
    "maximum": (lambda x, v: squash(tf.maximum(x, v)), [(3,)], SEQUENCE),
    "radial_basis": (rbf, [(3, 3)], SEQUENCE),
    "attention_pooling": (
        lambda x, v: squash(tf.einsum("btd,t->bd", x, tf.nn.softmax(v))),
        [(6,)],
        SEQUENCE,
    ),
    "one_filter_at_two_scales": (
        lambda x, k: (
            squash(tf.nn.conv2d(x, k, 1, "SAME"))
            + squash(tf.nn.conv2d(x, k, 2, "VALID"))
        ),
        [(3, 3, 2, 2)],
        IMAGE,
    ),
    "one_filter_twice": (
        lambda x, k: squash(
            tf.nn.conv2d(tf.tanh(tf.nn.conv2d(x, k, 1, "SAME")), k, 1, "SAME")
        ),
        [(3, 2, 2, 2)],
        IMAGE,
    ),
    "filter_and_dense_kernel": (
        lambda x, k: squash(tf.nn.conv2d(x, k, 1, "SAME")) + squash(x @ k[0, 0]),
        [(1, 1, 2, 3)],
        IMAGE,
    ),
    "filter_normalised": (
        lambda x, k: squash(
            tf.nn.conv2d(x, k - tf.reduce_mean(k, [0, 1, 2]), 1, "SAME")
        ),
        [(3, 3, 2, 2)],
        IMAGE,
    ),
    "explicit_padding": (
        lambda x, k: squash(
            tf.nn.conv2d(x, k, [1, 2, 1, 1], [[0, 0], [2, 1], [0, 1], [0, 0]])
        ),
        [(3, 2, 2, 3)],
        IMAGE,
    ),
    "explicit_padding_by_depth": (
        lambda x, k: squash(
            tf.nn.depthwise_conv2d(x, k, [1] * 4, [[0, 0], [2, 1], [0, 1], [0, 0]])
        ),
        [(3, 2, 2, 2)],
        IMAGE,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(12)
def test_sharing_matches_one_example_at_a_time(name):
    check(CASES[name])


STATIC = [
    "shared_over_time",
    "split",
    "joined_variables",
    "tied_embedding",
    "positions",
    "heads_tiled",
    "scalar",
    "one_filter_twice",
    "class_token_tiled",
    "class_token_broadcast",
    "positions_tiled",
    "class_token_repeated",
    "relative_positions",
]


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.thinned(6)
def test_sharing_matches_with_a_static_batch_size(name):
    check(CASES[name], dynamic=False)


def einsum(equation):
    def per_example(x, v):
        if equation.startswith("t"):
            x = last_axes_first(x)
        # Near 1, a tanh's last digit is much of its gradient.
        out = tf.tanh(0.2 * tf.einsum(equation, x, v))
        batch = equation.split("->")[1].index("b")
        return tf.reduce_sum(out, [i for i in range(out.shape.rank) if i != batch])

    return per_example


EINSUMS = {
    "tbd,df->tbf": (3, 4),
    "btd,df->bf": (3, 4),
    "btd,tf->bdf": (6, 4),
    "btd,td->b": (6, 3),
    "btd,tdf->bf": (6, 3, 4),
    "btd,tf->bf": (6, 4),
    "btd,ef->btdef": (2, 3),
    "btd,df->fbt": (3, 4),
    "btd,d->bt": (3,),
    "btd,->btd": (),
    "btd,hdk->bhtk": (2, 3, 4),
}


@pytest.mark.parametrize("equation", EINSUMS)
@pytest.mark.thinned(3)
def test_any_einsum_of_data_and_a_parameter_has_a_rule(equation):
    check((einsum(equation), [EINSUMS[equation]], SEQUENCE))


def loop(x, v):
    return squash(opaque(x, v))


FALLBACKS = {
    "loop": (loop, [(3, 3)], X),
    "map": (
        lambda x, v: tf.map_fn(lambda e: tf.reduce_sum(tf.tanh(e @ v)), x),
        [(3, 3)],
        SEQUENCE,
    ),
    "branch": (
        lambda x, v, w: squash(
            tf.cond(tf.reduce_sum(v) > 0, lambda: x @ v, lambda: x @ w)
        ),
        [(3, 3), (3, 3)],
        X,
    ),
    "diagonal_of_the_data": (
        lambda x, v: squash(tf.einsum("bdd,df->bf", x[:, :3], v)),
        [(3, 4)],
        SEQUENCE,
    ),
    "summed_label_of_the_parameter": (
        lambda x, v: tf.tanh(tf.einsum("btd,de->b", x, v)),
        [(3, 4)],
        SEQUENCE,
    ),
    "gather_nd": (
        lambda i, v: squash(tf.gather_nd(v, i[..., tf.newaxis])),
        [(10, 3)],
        IDS,
    ),
    "lookup_along_another_axis": (
        lambda i, v: tf.reduce_sum(tf.tanh(tf.gather(v, i % 3, axis=1)), [0, 2]),
        [(10, 3)],
        IDS,
    ),
    "half_of_a_model": (
        lambda x, v, w: loop(x @ w, v),
        [(3, 3), (3, 3)],
        X,
    ),
    "shared_with_an_ordinary_layer": (
        lambda x, v: loop(x, v) + squash(x @ v),
        [(3, 3)],
        X,
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.slow
def test_what_has_no_rule_falls_back_and_warns(name):
    # What the proof does not read is not differentiated as a whole, either.
    unknown = name in ("gather_nd", "map")
    kind = OneByOneWarning if unknown else JacobianFallbackWarning
    with pytest.warns(kind, match="one example at a time" if unknown else "Jacobian"):
        check(FALLBACKS[name], no_fallback=False)


@pytest.mark.slow
def test_an_einsum_with_an_ellipsis_has_a_rule():
    check((lambda x, v: squash(tf.einsum("...d,df->...f", x, v)), [(3, 4)], SEQUENCE))


def test_per_head_weights_meet_broadcast_data():
    per_example = lambda x, v: squash(x[:, tf.newaxis] @ v)  # noqa: E731
    check((per_example, [(2, 3, 5)], SEQUENCE))


@pytest.mark.slow
def test_two_transpositions_of_one_variable_are_told_apart():
    def per_example(x, v):
        one = tf.reshape(tf.transpose(v, [1, 0, 2]), [3, 9])
        other = tf.reshape(tf.transpose(v, [2, 1, 0]), [3, 9])
        return squash(x @ one) + 2 * squash(x @ other)

    check((per_example, [(3, 3, 3)], X))


@pytest.mark.slow
def test_a_variable_used_per_example_and_in_a_regulariser():
    v, w = variable(3, 3), variable(3, 3, seed=2)
    regulariser = lambda: tf.nn.l2_loss(v @ w)  # noqa: E731

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        loss = tf.reduce_mean(squash(tf.tanh(x @ v) @ w)) + regulariser()
        gradients = PerExampleGradients(loss, [v, w])
        ones = tf.ones_like(gradients.norms)
        return (
            gradients.norms,
            gradients.weighted_sum(ones),
            gradients.shared_gradients(),
        )

    expected = one_at_a_time(lambda x: squash(tf.tanh(x @ v) @ w), [v, w], X)
    norms, sums, shared = step(X)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    np.testing.assert_allclose(flat(sums, [v, w]), expected.sum(0), rtol=1e-4)
    with tf.GradientTape() as tape:
        value = regulariser()
    np.testing.assert_array_equal(
        flat(shared, [v, w]), flat(tape.gradient(value, [v, w]), [v, w])
    )


def test_variables_without_a_gradient_give_zeros():
    """Unused, behind a stopped gradient, behind an integer, or in an unused branch."""
    used, unused, stopped = variable(3, 3), variable(2, 2), variable(3, 3)
    rounded, zeroed = variable(3), variable(3, 2)
    variables = [unused, used, stopped, rounded, zeroed]

    def per_example(x):
        hidden = x @ used + tf.stop_gradient(x @ stopped)
        _ = x @ zeroed
        steps = tf.cast(tf.cast(x * rounded, tf.int32), tf.float32)
        return squash(hidden + steps)

    expected = one_at_a_time(per_example, variables, X)
    step = traced(per_example, variables, [X])
    assert_matches(step, variables, expected, [X])
    _, sums = step(tf.ones([BATCH]), X)
    for v, total in zip(variables, sums, strict=True):
        assert total.shape == v.shape
        assert bool(tf.reduce_any(total != 0)) == (v is used)


def test_only_the_variables_asked_for_count():
    """Frozen layers: their gradients are in no norm and no sum."""
    first, second = variable(3, 3), variable(3, 3, seed=2)
    for chosen in ([first], [second]):
        check_engine(lambda x: squash(tf.tanh(x @ first) @ second), chosen, X)


def test_the_clipped_sum_never_exceeds_its_bound_with_shared_variables():
    table, scale = variable(10, 3), variable()

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.int32)])
    def step(i):
        hidden = tf.tanh(tf.gather(table, i)) * scale
        loss = squash(tf.matmul(hidden, table, transpose_b=True))
        return clipped_sum(loss, [table, scale], FixedClip(0.5))

    for i in range(BATCH):
        sums, _ = step(IDS[i : i + 1])
        total = np.linalg.norm(flat(sums, [table, scale]))
        assert total <= 0.5 * (1 + 1e-5)
