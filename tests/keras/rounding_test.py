"""The bound holds in floating point too: no record gets through by rounding."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import L, flat, mostly_slow
from tfdpclip.clipping import AutomaticClip, FixedClip
from tfdpclip.gradients import clipped_sum

pytestmark = pytest.mark.unchecked

# A record may exceed the bound by the rounding of a norm and of a product, no more.
SLACK = 1 + 1e-3

RULES = [FixedClip(1.0), AutomaticClip(0.01), FixedClip(1e-3, normalize=True)]


def nearly_opposite(shape, size, gap, seed=0):
    """`[1, 2, ...]`: two steps whose difference is a `gap`-th of them."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(shape)
    base *= size / np.linalg.norm(base)
    other = base * (1 - gap) + 0.3 * gap * size * rng.standard_normal(shape)
    return np.stack([base, other])[np.newaxis].astype("float32")


def dense_sequence(x, w):
    return tf.einsum("btk,ku->btu", x, w)


def dense_twice(x, w):
    return tf.stack([x[:, 0] @ w, x[:, 1] @ w], axis=1)


def convolution(x, w):
    # A 1 x 1 kernel over the two steps.
    kernel = tf.reshape(w, [1, 1, *w.shape])
    return tf.nn.conv2d(x[:, tf.newaxis], kernel, 1, "VALID")[:, 0]


USES = {"sequence": dense_sequence, "twice": dense_twice, "conv": convolution}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("jit", mostly_slow([False], [False, True]))
@pytest.mark.slow
def test_a_gradient_that_cancels_does_not_escape_the_clip(use, jit):
    """Two large parts of a record's gradient nearly cancel; the small rest is clipped.

    A norm from products of all pairs loses the difference where the gap is below the
    square root of the precision.
    """
    rng = np.random.default_rng(1)
    w = tf.Variable(0.1 * rng.standard_normal((32, 32)).astype("float32"))
    sign = tf.constant([1.0, -1.0])[:, tf.newaxis]

    @tf.function(jit_compile=jit)
    def all_rules(x):
        loss = tf.reduce_sum(use(x, w) * sign, axis=[1, 2])
        return [clipped_sum(loss, [w], rule, ())[0][0] for rule in RULES]

    worst = 0.0
    for size in (1.0, 1e3, 1e6):
        for gap in (1e-1, 1e-3, 3e-4, 1e-4):
            x = tf.constant(nearly_opposite(32, size, gap))
            for rule, total in zip(RULES, all_rules(x), strict=True):
                bound = float(rule.sensitivity(()))
                worst = max(worst, np.linalg.norm(total.numpy()) / bound)
    assert worst <= SLACK


def test_a_token_that_comes_twice_does_not_escape_the_clip():
    table = tf.Variable(tf.zeros([5, 8]))
    ids = tf.constant([[2, 2]])

    @tf.function
    def release(z):
        loss = tf.reduce_sum(tf.gather(table, ids) * z, axis=[1, 2])
        return [clipped_sum(loss, [table], rule, ())[0][0] for rule in RULES]

    worst = 0.0
    for size in (1.0, 1e6):
        for gap in (1e-1, 3e-4, 1e-4):
            z = nearly_opposite(8, size, gap) * np.array([1, -1])[:, np.newaxis]
            released = release(tf.constant(z, tf.float32))
            for rule, total in zip(RULES, released, strict=True):
                bound = float(rule.sensitivity(()))
                worst = max(worst, np.linalg.norm(total.numpy()) / bound)
    assert worst <= SLACK


@pytest.mark.thinned(4)
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-3, 1e3, 1e15, 1e30])
def test_factors_of_very_different_size_do_not_escape_the_clip(scale):
    """x times `scale` and dz over `scale`: the gradient is the same."""
    w = tf.Variable(tf.zeros([4, 3]))

    @tf.function
    def release(x, s):
        loss = tf.reduce_sum((x @ w) / s, axis=1)
        return clipped_sum(loss, [w], FixedClip(0.1), ())

    x = np.random.default_rng(0).standard_normal((1, 4)).astype("float32")
    (total,), _ = release(tf.constant(x * scale, tf.float32), tf.constant(scale))
    assert np.linalg.norm(total) <= 0.1 * SLACK


def test_a_norm_that_overflows_drops_the_record_and_no_other():
    w = tf.Variable(tf.zeros([2]))

    @tf.function
    def release(x):
        return clipped_sum(tf.linalg.matvec(x, w), [w], FixedClip(1.0), ())

    (total,), norms = release(tf.constant([[1e30, 1e30], [3.0, 4.0]]))
    np.testing.assert_allclose(total.numpy(), [0.6, 0.8], rtol=1e-6)
    assert norms.numpy()[1] == pytest.approx(5)


COARSE = {
    "dense": lambda: L.Dense(4),
    "unrolled": lambda: L.LSTM(4, unroll=True),
    "conv": lambda: L.Conv1D(4, 2),
    "embedding": lambda: L.Embedding(5, 4),
    "lstm": lambda: L.LSTM(4),
    "gru": lambda: L.GRU(4),
}


@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.parametrize("name", mostly_slow(["dense", "embedding", "lstm"], COARSE))
@pytest.mark.slow
def test_the_sum_over_many_examples_is_not_rounded_to_bfloat16(name):
    """1000 equal clipped records add up to 1000 C, and a further record adds C."""
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        tf.keras.utils.set_random_seed(1)
        layer = COARSE[name]()
        one = np.random.default_rng(0).standard_normal((1, 2, 3)).astype("float32")
        if name == "embedding":
            one = np.array([[1, 3]], np.int32)
        model = tf.keras.Sequential([layer, L.Flatten()])
        model(one)

        @tf.function(input_signature=[tf.TensorSpec([None, *one.shape[1:]], one.dtype)])
        def release(x):
            outputs = tf.cast(model(x, training=True), tf.float32)
            loss = tf.reduce_sum(outputs, axis=1)
            return clipped_sum(loss, model.trainable_variables, FixedClip(1e-3), ())[0]

        before = None
        for count in (1, 1000, 1001, 1002, 1003):
            total = flat(release(np.repeat(one, count, axis=0))) / 1e-3
            assert np.linalg.norm(total) == pytest.approx(count, rel=1e-3)
            if before is not None and count > 1000:
                assert np.linalg.norm(total - before) <= SLACK
            before = total
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
