"""Where the batch is on axis 1, gradients are right or refused."""

import warnings

import pytest
import tensorflow as tf

from tests.gradients.cases import (
    BATCH,
    L,
    check,
    check_engine,
    integers,
    last_axes_first,
    randoms,
    variable,
)
from tfdpclip.gradients import JacobianFallbackWarning


# The batch on axis 1: as many steps as, and more steps than, examples.
def over_time_major(act):
    def per_example(x, v):
        return tf.reduce_sum(tf.tanh(act(last_axes_first(x), v)), [0, 2])

    return per_example


TIME_MAJOR = {
    "bias": over_time_major(lambda x, v: x + v),
    "scale": over_time_major(lambda x, v: x * v),
    "quotient": over_time_major(lambda x, v: x / v),
}


@pytest.mark.parametrize("steps", [BATCH, 2 * BATCH, 2 * BATCH + 1])
@pytest.mark.parametrize("name", ["bias", "scale"])
@pytest.mark.slow
@pytest.mark.every_check
def test_time_major_elementwise_parameters_have_a_rule(name, steps):
    check((TIME_MAJOR[name], [(3,)], randoms(BATCH, steps, 3)))


@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.parametrize("steps", [BATCH, 2 * BATCH, 2 * BATCH + 1])
@pytest.mark.every_check
@pytest.mark.slow
def test_time_major_quotients_are_right_or_refused(steps):
    assert_right_or_refused((TIME_MAJOR["quotient"], [(3,)], randoms(BATCH, steps, 3)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.every_check
def test_time_major_lookups_are_right_or_refused():
    def per_example(i, v):
        return tf.reduce_sum(tf.tanh(tf.gather(v, tf.transpose(i))), [0, 2])

    assert_right_or_refused((per_example, [(10, 3)], integers(BATCH, 2 * BATCH)))


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("steps", [1, 2, BATCH, 2 * BATCH])
@pytest.mark.every_check
@pytest.mark.slow
def test_time_major_layers_have_rules(steps, dynamic):
    first, second = L.Dense(4, "tanh"), L.Dense(3, "tanh")
    data = randoms(BATCH, steps, 3)
    first.build(data.shape)
    second.build([BATCH, steps, 4])

    def per_example(x):
        return tf.reduce_sum(second(first(last_axes_first(x))), [0, 2])

    variables = first.trainable_variables + second.trainable_variables
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error" if steps > 1 else "ignore", JacobianFallbackWarning
        )
        check_engine(per_example, variables, data, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.every_check
def test_layers_have_rules_where_the_examples_are_in_the_middle(dynamic):
    """Row r of `[T B S, D]` belongs to example (r // S) mod B."""
    kernel, bias = variable(3, 4), variable(4, seed=1)

    def per_example(x):
        middle = tf.transpose(x, [1, 0, 2, 3])
        hidden = tf.reshape(middle, [-1, 3])
        for _ in range(2):
            hidden = tf.tanh(hidden @ kernel + bias)[:, :3]
        hidden = tf.reshape(hidden, tf.shape(middle))
        return tf.reduce_sum(tf.square(hidden), [0, 2, 3])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_engine(
            per_example, [kernel, bias], randoms(BATCH, 2, 5, 3), dynamic=dynamic
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning")
@pytest.mark.every_check
def test_a_parameter_before_the_batch_axis_is_right_or_refused():
    per_example = lambda x, v: tf.reduce_sum(tf.tanh(x * v), [0, 1])  # noqa: E731
    assert_right_or_refused((per_example, [(1, BATCH, 1)], randoms(BATCH)))


def assert_right_or_refused(case):
    """An error must say why; TensorFlow's own about shapes does not."""
    try:
        check(case, no_fallback=False)
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        assert "xample" in str(error)
