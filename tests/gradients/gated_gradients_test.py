"""Scaling of a gradient by other examples is found even if no loss changes."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import assert_refused, norms_of, randoms, squash, variable
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import clipped_sum

pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]
X, IDS = randoms(24, 3), tf.range(24) % 7
W, U, TABLE = variable(3, 5), variable(5, 4), variable(7, 5)


def gated(value, scale):
    """`value`, and a gradient of so many times its own."""
    scale = tf.stop_gradient(scale)
    return scale * value + tf.stop_gradient((1 - scale) * value)


def sizes(h):
    return tf.norm(h, axis=-1)


def hidden(x):
    return tf.tanh(x @ W)


def with_gate(gate):
    return lambda x: squash(gate(hidden(x)) @ U)


def of_losses(gate):
    def loss(x):
        losses = squash(hidden(x) @ U)
        return gated(losses, tf.cast(gate(losses), losses.dtype))

    return loss


def row_wise(h):
    """A scale for each row."""
    return h[:, tf.newaxis]


@tf.custom_gradient
def of_the_first(h):
    scale = 1 / (1 + sizes(h)[0])
    return tf.identity(h), lambda dy: scale * dy


@tf.custom_gradient
def of_the_mean_on_the_way_back(h):
    return tf.identity(h), lambda dy: dy - tf.reduce_mean(dy, 0, keepdims=True)


def straight_through(h):
    """Gives the next layer a mixed input, but the values of the unmixed input."""
    mixed = h * (1 + tf.sort(sizes(h))[-1])
    return tf.stop_gradient(h @ U - mixed @ U) + mixed @ U


GATED = {
    "hard_examples": of_losses(lambda t: t >= 0.5 * tf.math.top_k(t, 1)[0][0]),
    "not_the_hardest": of_losses(lambda t: t < tf.sort(t)[-1]),
    "the_hardest_alone": of_losses(lambda t: t >= tf.sort(t)[-1]),
    "importance": of_losses(lambda t: t / tf.sort(t)[-1]),
    "more_than_the_first": of_losses(lambda t: t > t[0]),
    "ranks": of_losses(lambda t: tf.argsort(tf.argsort(t)) < 12),
    "searched": of_losses(lambda t: tf.searchsorted(tf.sort(t), t) < 12),
    "softmax_of_a_row": of_losses(lambda t: tf.nn.softmax(t[tf.newaxis])[0]),
    "spectrum": of_losses(lambda t: tf.math.sigmoid(tf.math.real(
        tf.signal.fft(tf.cast(t, tf.complex64))[0]
    )) * tf.ones_like(t)),
    "damped": with_gate(
        lambda h: gated(h, tf.minimum(1.0, 1.5 / tf.sort(sizes(h))[-1]))
    ),
    "scanned": with_gate(
        lambda h: gated(h, tf.math.sigmoid(row_wise(tf.scan(tf.add, sizes(h)))))
    ),
    "singular_values": with_gate(
        lambda h: gated(h, 1 / (1 + tf.linalg.svd(h, compute_uv=False)[0]))
    ),
    "convolved": with_gate(
        lambda h: gated(
            h,
            tf.math.sigmoid(
                tf.nn.conv1d(h[tf.newaxis], tf.ones([3, 5, 1]), 1, "SAME")[0]
            ),
        )
    ),
    "custom_gradient": with_gate(of_the_first),
    "gradients_meet": with_gate(of_the_mean_on_the_way_back),
    "straight_through": lambda x: squash(straight_through(hidden(x))),
    # Copies of these examples do not open the gate.
    "for_outliers": with_gate(
        lambda h: tf.cond(
            tf.sort(sizes(h))[-1] > 20 * tf.sort(sizes(h))[0],
            lambda: tf.stop_gradient(h),
            lambda: tf.identity(h),
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.thinned(8)
def test_other_examples_scale_no_gradient(name, dynamic):
    assert_refused(GATED[name], [W, U], X, dynamic=dynamic)


@pytest.mark.parametrize("name", ["hard_examples", "damped", "straight_through"])
def test_compiled_code_drops_everybody(name):
    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        return clipped_sum(GATED[name](x), [W, U], FixedClip(1.0))[0]

    try:
        sums = step(X)
    except ValueError as error:  # the graph told
        assert "xample" in str(error)
        return
    assert all(np.all(total == 0) for total in sums)


def test_tokens_that_cannot_be_outliers_show_it_too():
    def loss(ids):
        losses = squash(tf.gather(TABLE, ids) @ U)
        return gated(losses, losses / tf.sort(losses)[-1])

    assert_refused(loss, [TABLE, U], IDS)


def test_a_variable_without_a_rule_is_compared_as_well():
    def loss(x):
        h = tf.map_fn(lambda row: tf.linalg.matvec(W, row, transpose_a=True), x)
        return squash(gated(h, 1 / tf.sort(sizes(h))[-1]))

    assert_refused(loss, [W], X)


OWN = {
    "hard_in_itself": of_losses(lambda t: t > 0.3),
    "its_own_size": with_gate(
        lambda h: gated(h, tf.minimum(1.0, row_wise(1 / sizes(h))))
    ),
    "its_largest_entries": with_gate(
        lambda h: gated(h, tf.cast(h >= tf.math.top_k(h, 2)[0][:, 1:], h.dtype))
    ),
    "its_own_ranks": with_gate(
        lambda h: gated(h, tf.cast(tf.argsort(h, axis=1) < 2, h.dtype))
    ),
    "rounded": with_gate(lambda h: h + tf.stop_gradient(tf.round(4 * h) / 4 - h)),
    "twice_on_the_way_back": with_gate(
        tf.custom_gradient(lambda h: (tf.identity(h), lambda dy: 2 * dy))
    ),
    "its_own_entropy": of_losses(lambda t: tf.math.sigmoid(t)),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.thinned(15)
def test_an_example_scales_its_own(name, dynamic):
    norms = norms_of(OWN[name], [W, U], X, dynamic=dynamic)
    for i in range(0, 24, 9):
        with tf.GradientTape() as tape:
            loss = OWN[name](X[i : i + 1])
        found = tape.gradient(loss, [W, U])
        np.testing.assert_allclose(norms[i], tf.linalg.global_norm(found), rtol=1e-4)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
@pytest.mark.slow
def test_small_batches_pass(size):
    norms = norms_of(lambda x: squash(hidden(x) @ U), [W, U], X[:size])
    assert norms.shape == [size]


@pytest.mark.slow
def test_data_that_become_integers_are_not_scaled():
    """Ids that come as floats end where the table does."""

    def loss(x):
        ids = tf.cast(x, tf.int32)
        return squash(tf.gather(TABLE, ids) @ U)

    assert norms_of(loss, [TABLE, U], tf.cast(IDS, tf.float32)).shape == [24]


@pytest.mark.slow
def test_ops_that_fail_for_some_numbers_are_not_given_outliers():
    def loss(x):
        checked = tf.debugging.check_numerics(tf.exp(30 * x), "too large")
        return squash(tf.math.log1p(checked) @ W)

    assert norms_of(loss, [W], 0.1 * X).shape == [24]


@tf.custom_gradient
def scaled_by_chance(h):
    """Backwards, a scale of everybody's is drawn from the gamma distribution."""

    def backwards(dy):
        return dy * tf.random.gamma([], 1.0 + tf.reduce_mean(tf.abs(h)))

    return tf.identity(h), backwards
