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
