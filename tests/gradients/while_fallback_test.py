"""Loops whose variables cannot be recorded fall back to a Jacobian, and say so."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    SEQUENCE,
    check_engine,
    randoms,
    shaken,
    squash,
    variable,
)
from tests.keras.helpers import mostly_slow
from tfdpclip.gradients import (
    JacobianFallbackWarning,
    OneByOneWarning,
    per_example_norms,
)

L = tf.keras.layers


def until_all_are_done():
    """How long the loop runs depends on the data."""
    w = variable(3, 3)

    def per_example(x):
        def body(h):
            moved = tf.tanh(h @ w)
            going = tf.reduce_sum(tf.square(h), 1, keepdims=True) > 0.4
            return tf.where(going, moved, h)

        def going(h):
            return tf.reduce_any(tf.reduce_sum(tf.square(h), 1) > 0.4)

        return squash(tf.while_loop(going, body, (x[:, 0],), maximum_iterations=5)[0])

    return per_example, [w], SEQUENCE


def changed_on_the_way():
    """The weights themselves go through the recurrence."""
    w = variable(3, 3)

    def per_example(x):
        _, h, _ = tf.while_loop(
            lambda t, h, v: t < 4,
            lambda t, h, v: (t + 1, tf.tanh(h @ v), 0.5 * v),
            (0, x[:, 0], w + 0.0),
        )
        return squash(h)

    return per_example, [w], SEQUENCE


def used_again_from_the_loop():
    """A loop variable that no step changes is used after the loop."""
    w = variable(3, 3)

    def per_example(x):
        _, h, v = tf.while_loop(
            lambda t, h, v: t < 4,
            lambda t, h, v: (t + 1, tf.tanh(h @ v), v),
            (0, x[:, 0], w + 0.0),
        )
        return squash(h @ v)

    return per_example, [w], SEQUENCE


def scaled_by_the_step():
    w = variable(3, 3)

    def per_example(x):
        _, h = tf.while_loop(
            lambda t, h: t < 4,
            lambda t, h: (t + 1, tf.tanh(h @ (w * tf.cast(t, tf.float32)))),
            (0, x[:, 0]),
        )
        return squash(h)

    return per_example, [w], SEQUENCE


def in_a_branch_of_the_body():
    w = variable(3, 3)

    def per_example(x):
        def body(t, h):
            even = tf.equal(t % 2, 0)
            return t + 1, tf.cond(even, lambda: tf.tanh(h @ w), lambda: h)

        return squash(tf.while_loop(lambda t, h: t < 4, body, (0, x[:, 0]))[1])

    return per_example, [w], SEQUENCE


def one_example_a_step():
    w = variable(3, 3)

    def per_example(x):
        return squash(tf.map_fn(lambda row: tf.tanh(row @ w), x))

    return per_example, [w], SEQUENCE


WITHOUT_RULE = {
    "changed_on_the_way": changed_on_the_way,
    "used_again_from_the_loop": used_again_from_the_loop,
    "scaled_by_the_step": scaled_by_the_step,
    "in_a_branch_of_the_body": in_a_branch_of_the_body,
}


@pytest.mark.parametrize("name", mostly_slow(("changed_on_the_way",), WITHOUT_RULE))
def test_what_cannot_be_recorded_falls_back_and_says_so(name):
    per_example, variables, data = WITHOUT_RULE[name]()
    with pytest.warns(JacobianFallbackWarning, match="while|While|map"):
        check_engine(per_example, variables, data)


@pytest.mark.slow
def test_a_loop_over_the_examples_runs_for_each_example_alone():
    per_example, variables, data = one_example_a_step()
    with pytest.warns(OneByOneWarning, match="map"):
        check_engine(per_example, variables, data)


@pytest.mark.slow
def test_a_loop_that_the_data_end_runs_for_each_example_alone():
    per_example, variables, data = until_all_are_done()
    with pytest.warns(OneByOneWarning, match="While"):
        check_engine(per_example, variables, data)


@pytest.mark.slow
def test_a_fallback_next_to_a_recorded_loop():
    """Its Jacobian goes through a loop that records."""
    layer = shaken(L.SimpleRNN(3), SEQUENCE)
    per_example, variables, _ = changed_on_the_way()

    def both(x):
        return squash(layer(x)) * per_example(x)

    with pytest.warns(JacobianFallbackWarning, match="while"):
        check_engine(both, [*layer.trainable_variables, *variables], SEQUENCE)


@pytest.mark.slow
def test_a_compiled_loop_over_the_examples_has_the_norms_of_each_alone():
    w, x = variable(3), randoms(4, 3)

    def norms(x):
        losses = tf.map_fn(lambda row: tf.reduce_sum(tf.sort(row * w) ** 2), x)
        return per_example_norms(losses, [w])

    with pytest.warns(OneByOneWarning):
        found = tf.function(norms, jit_compile=True, autograph=False)(x)
    exact = np.linalg.norm(2 * x**2 * w.numpy(), axis=1)
    np.testing.assert_allclose(found, exact, rtol=1e-5)
