"""The step itself finds errors of the engine or the model as it runs."""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import integers, randoms, squash, two_by_two, variable
from tfdpclip.clipping import FixedClip, LayerwiseClip
from tfdpclip.gradients import (
    ExampleIsolationError,
    PerExampleGradients,
    clipped_sum,
    engine,
    per_example_norms,
)
from tfdpclip.gradients.forms import base_form, outer
from tfdpclip.gradients.forms.perturbation import Perturbation
from tfdpclip.gradients.forms.records import RecordGradients
from tfdpclip.gradients.proof import fallback
from tfdpclip.gradients.rules.combine import VariableGradient
from tfdpclip.kernel import certificate

pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]
X = randoms(6, 3)
W, U = variable(3, 5), variable(5, 4)


def model(x):
    return squash(tf.tanh(tf.tanh(x @ W) @ U))


def opaque(x, v):
    """A use that no rule covers."""
    return tf.cond(tf.reduce_sum(v) < 1e9, lambda: x @ v, lambda: x @ -v)


def half_opaque(x):
    return squash(tf.tanh(opaque(tf.tanh(x @ W), U)))


def sums_of(per_example=model, rule=None, x=X, jit=False, **options):
    rule = FixedClip(0.1) if rule is None else rule.bind(["w", "u"])

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3])], jit_compile=jit, autograph=False
    )
    def step(x):
        state = rule.initial_state()
        return clipped_sum(per_example(x), [W, U], rule, state, **options)

    return step(x)[0]


def in_part(values, share=0.9):
    """Values of which a share is left, for an example and for all."""
    return tf.nest.map_structure(lambda t: share * t, values)


_explicit_norms = base_form.Explicit.squared_norms
_outer_norms = outer.Outer.squared_norms
_outer_sum = outer.Outer.weighted_sum
_jacobian = fallback.jacobian
_total = RecordGradients.record_norms
_perturbed = Perturbation.squared_norms
_sums = PerExampleGradients._sums


def _wrong_jacobian(*args):
    return [v + 0.1 * tf.abs(v) for v in _jacobian(*args)]


def _of_one_example_only(self, budget):
    """A norm that is wrong for the first example only."""
    found = _outer_norms(self, budget)
    first = tf.equal(tf.range(tf.shape(found)[0]), 0)
    return tf.where(first, 0.2 * found, found)


def _other_group(self, assignment=None):
    found = _total(self, assignment)
    return found if assignment is None else tf.reverse(found, [1])


def _with_weights(change):
    """Sums in which the weights of the examples are changed first."""
    return lambda self, columns, finite: _sums(self, list(map(change, columns)), finite)


def _of_u(factor):
    def sums(self, columns, finite):
        first, second = _sums(self, columns, finite)
        return [first, factor * second]

    return sums


def _one_more(weights, times):
    return weights * (1 + times * tf.one_hot(1, tf.shape(weights)[0]))


# For each bug: the patched object and attribute, the bug, and the model's options.
PLANTED = {
    "norms_too_small": (
        outer.Outer,
        "squared_norms",
        lambda self, budget: in_part(_outer_norms(self, budget)),
        {},
    ),
    "one_norm_too_small": (outer.Outer, "squared_norms", _of_one_example_only, {}),
    "sums_too_large": (
        outer.Outer,
        "weighted_sum",
        lambda self, weights: in_part(_outer_sum(self, weights), 1.05),
        {},
    ),
    "sums_of_transposed_entries": (
        outer.Outer,
        "weighted_sum",
        lambda self, weights: tf.reverse(_outer_sum(self, weights), [0]),
        {},
    ),
    "sums_that_are_no_numbers": (
        outer.Outer,
        "weighted_sum",
        lambda self, weights: in_part(_outer_sum(self, weights), math.nan),
        {},
    ),
    "a_wrong_converter": (
        fallback,
        "jacobian",
        _wrong_jacobian,
        {"per_example": half_opaque},
    ),
    "norms_of_the_total_too_small": (
        RecordGradients,
        "record_norms",
        lambda self, assignment=None: in_part(_total(self, assignment)),
        {},
    ),
    "norms_of_other_groups": (
        RecordGradients,
        "record_norms",
        _other_group,
        {"rule": LayerwiseClip(0.1)},
    ),
    "another_perturbation": (
        Perturbation,
        "squared_norms",
        lambda self, gradients, size: 0.5 * _perturbed(self, gradients, size),
        {"perturbation": (1.0, tf.constant([1, 2]))},
    ),
    **{
        name: (PerExampleGradients, "_sums", bug, {})
        for name, bug in {
            "an_example_twice": _with_weights(lambda w: _one_more(w, 1.0)),
            "an_example_left_out": _with_weights(lambda w: _one_more(w, -1.0)),
            "weights_of_other_examples": _with_weights(lambda w: tf.roll(w, 1, 0)),
            "weights_left_out": _with_weights(tf.ones_like),
            "a_forgotten_variable": _of_u(0.0),
            "a_variable_times_1.01": _of_u(1.01),
        }.items()
    },
    "uses_that_are_taken_apart": (
        VariableGradient,
        "_join",
        lambda self: setattr(self, "_orthogonal", True),
        {"per_example": lambda x: squash(tf.tanh(x @ W) @ U + tf.tanh(2 * x @ W) @ U)},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.thinned(6)
def test_a_wrong_engine_is_found_by_the_step_itself(name):
    target, attribute, bug, options = PLANTED[name]
    sums_of(**options)
    # An error of a single example is found only if the check draws that example.
    order = tf.identity if name == "one_norm_too_small" else certificate.shuffled
    with (
        mock.patch.object(certificate, "shuffled", order),
        mock.patch.object(target, attribute, bug),
        pytest.raises(tf.errors.InvalidArgumentError, match="GradientMismatchError"),
    ):
        sums_of(**options)


@pytest.mark.slow
def test_the_error_names_variable_and_op():
    bug = PLANTED["norms_too_small"][2]
    with (
        mock.patch.object(outer.Outer, "squared_norms", bug),
        pytest.raises(tf.errors.InvalidArgumentError, match=f"{W.name}.*MatMul"),
    ):
        sums_of()


@pytest.mark.slow
def test_compiled_code_drops_everybody_if_a_norm_is_wrong():
    """XLA cannot raise in the middle of a step."""
    assert np.any(sums_of(jit=True)[0] != 0)
    bug = PLANTED["norms_too_small"][2]
    with mock.patch.object(outer.Outer, "squared_norms", bug):
        sums = sums_of(jit=True)
    for part in sums:
        np.testing.assert_array_equal(part, tf.zeros_like(part))


@pytest.mark.slow
def test_what_failed_once_fails_ever_after():
    """Also if only some batches show the failure."""
    gate = tf.Variable(1.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        hidden = x @ W
        return per_example_norms(squash(hidden + gate * two_by_two(hidden)), [W])

    refusals = (ExampleIsolationError, tf.errors.InvalidArgumentError)
    with pytest.raises(refusals, match="example"):
        step(X)
    gate.assign(0.0)
    with pytest.raises(refusals):
        step(X)


@pytest.mark.slow
def test_every_loss_of_a_step_is_tested():
    """A second loss is tested, also when each Python branch has a different loss."""

    @tf.function
    def step(x, mixes):
        good = per_example_norms(squash(x @ W), [W])
        hidden = x @ W
        hidden = two_by_two(hidden) if mixes else tf.tanh(hidden)
        return good + per_example_norms(squash(hidden), [W])

    step(X, False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Isolation"):
        step(X, True)


@pytest.mark.slow
def test_another_trace_is_tested_though_the_first_one_passed():
    @tf.function
    def step(x):
        # In the first trace examples stay apart, in the second they meet in pairs.
        hidden = x @ W
        mixed = two_by_two(hidden) if x.shape[0] != 5 else tf.tanh(hidden)
        return per_example_norms(squash(mixed), [W])

    step(X[:5])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Isolation"):
        step(X[:4])


def mixing_after(ids, table):
    """Examples meet behind a use without a rule, before any use with a rule."""
    rows = tf.map_fn(lambda i: table[i], ids, fn_output_signature=tf.float32)
    return squash(rows + tf.reverse(rows, [0]))


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_integer_inputs_do_not_hide_mixing(dynamic):
    table = variable(10, 3)
    ids = integers(6)

    @tf.function(input_signature=[tf.TensorSpec([None if dynamic else 6], ids.dtype)])
    def step(ids):
        return per_example_norms(mixing_after(ids, table), [table])

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="example"):
        step(ids)


def test_a_loss_of_which_nothing_can_be_tested_is_refused():
    """Data that pass through Python allow neither probes nor a second run."""
    table = variable(10, 3)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def step(ids):
        own = tf.numpy_function(lambda i: i, [ids], tf.int32)
        own = tf.ensure_shape(own, [None])
        return per_example_norms(mixing_after(own, table), [table])

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="example"):
        step(tf.constant([1, 2, 3]))


def test_statistics_behind_stopped_gradients_are_found():
    """No gradient shows them, and no op that the graph analysis knows."""

    def per_example(x):
        hidden = x @ W
        rows = tf.map_fn(lambda h: tf.reduce_sum(h), tf.stop_gradient(hidden))
        largest = tf.numpy_function(np.max, [rows], tf.float32)
        return squash(hidden) * tf.ensure_shape(largest, [])

    with pytest.raises(ExampleIsolationError, match="Python"):
        sums_of(per_example)


@pytest.mark.slow
def test_random_numbers_of_a_second_backward_pass_are_those_of_the_first():
    """Norms and sums are made with the same numbers."""

    def per_example(x):
        @tf.recompute_grad
        def block(h):
            return tf.nn.dropout(tf.tanh(h @ W), 0.5)

        return squash(tf.tanh(block(x)) @ U)

    sums_of(per_example)
    # If the block is not recognised, computing one example at a time uses the same mask
    # in both passes.
    with mock.patch.object(engine, "inline_calls", lambda loss: loss):
        sums = sums_of(per_example, memory=1, check_gradients="never")
    assert all(np.isfinite(total).all() for total in sums)


def test_a_variable_that_is_listed_twice_is_refused():
    @tf.function
    def step(x):
        return per_example_norms(squash(x @ W), [W, W])

    with pytest.raises(ValueError, match="more than once"):
        step(X)


def test_the_check_can_be_left_out():
    bug = PLANTED["norms_too_small"][2]
    right = sums_of(check_gradients="never")
    with mock.patch.object(outer.Outer, "squared_norms", bug):
        wrong = sums_of(check_gradients="never")
    # Without the check, records were clipped too little and no error was raised.
    assert np.linalg.norm(wrong[1]) > 1.01 * np.linalg.norm(right[1])


@pytest.mark.slow
def test_the_status_is_not_shared():
    """Each loss has its own status; see `tfdpclip.gradients.status`."""
    made = []

    @tf.function
    def step(x):
        for _ in range(2):
            made.append(PerExampleGradients(squash(x @ W), [W]).status)
        return x

    step(X)
    assert len({id(status) for status in made}) == len(made) == 2
    assert not any(status.failed for status in made)


@tf.custom_gradient
def scaled_on_the_way_back(h, x):
    """Isolated forwards; backwards linear in each row, but with a sign of the batch."""
    sign = tf.sign(tf.reduce_max(x) - 4.5)
    return tf.identity(h), lambda dy: (dy * sign, tf.zeros_like(x))


OUTLIER = tf.concat([X[:-1], 5.0 + tf.zeros_like(X[:1])], axis=0)
NOT_A_NUMBER = tf.concat([X[:-1], np.nan + tf.zeros_like(X[:1])], axis=0)
# Effects of one example on all other examples that hardly any batch shows.
RARE = {
    "on_the_way_back": (
        lambda x: squash(tf.tanh(scaled_on_the_way_back(x @ W, x)) @ U),
        OUTLIER,
    ),
    "a_gate_that_one_example_opens": (
        lambda x: squash(tf.tanh(x @ W + tf.where(x[-1, 0] > 4, 5.0, 0.0)) @ U),
        OUTLIER,
    ),
    "the_last_row": (
        lambda x: squash(tf.tanh(x @ W) @ U + tf.stop_gradient(x[-1:, :1])),
        OUTLIER,
    ),
}


@pytest.mark.parametrize("size", [6, 5], ids=["even", "odd"])
@pytest.mark.parametrize("name", RARE)
@pytest.mark.slow
def test_what_one_example_does_to_the_others_is_found(name, size):
    per_example, x = RARE[name]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        sums_of(per_example, x=x[-size:], check_gradients="always")


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.slow
def test_examples_that_are_not_finite_are_no_false_alarm(size):
    x = NOT_A_NUMBER[-size:]
    assert np.isfinite(sums_of(x=x, check_gradients="always")[0]).all()


@pytest.mark.slow
def test_custom_gradients_that_keep_examples_apart_pass():
    def per_example(x):
        return squash(tf.nn.silu(tf.nn.silu(x @ W) @ U))

    for x in (X, OUTLIER * 100):
        for total in sums_of(per_example, check_gradients="always", x=x):
            assert np.isfinite(total).all() and np.any(total != 0)


# A softmax does not see a term added to all classes: the term's gradient is zero except
# for the rounding of a sum. So is the gradient of the keys' bias in attention.
UNSEEN = {
    "broadcast": lambda logits, b: logits + b,
    "row_by_row": lambda logits, b: tf.reshape(
        tf.nn.bias_add(tf.reshape(logits, [-1, 1]), b), tf.shape(logits)
    ),
    "used_twice": lambda logits, b: logits + b + b,
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.slow
def test_a_group_of_rounding_alone_is_no_false_alarm(name):
    bias = variable(1)
    labels = tf.nn.softmax(X @ randoms(3, 4))

    @tf.function(autograph=False)
    def step(x, labels):
        logits = UNSEEN[name](30 * x @ W @ U, bias)
        loss = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
        rule = LayerwiseClip(0.1, groups="variable").bind(["w", "u", "b"])
        return clipped_sum(
            loss, [W, U, bias], rule, rule.initial_state(), check_gradients="always"
        )

    assert abs(step(X, labels)[0][2].numpy().item()) < 1e-4


def a_table_in_a_branch(x):
    """The gradient has looked-up rows, whose number is unknown."""
    ids = tf.cast(x[:, 0] > 0, tf.int32)
    public = tf.convert_to_tensor(True)
    rows = tf.cond(public, lambda: tf.gather(W, ids), lambda: -tf.gather(W, ids))
    return squash(tf.tanh(rows) @ U)


@pytest.mark.parametrize("per_example", [a_table_in_a_branch])
@pytest.mark.slow
def test_gradients_of_rows_that_were_looked_up_are_compared(per_example):
    for total in sums_of(per_example, check_gradients="always"):
        assert np.isfinite(total).all() and np.any(total != 0)


def test_a_trained_variable_that_the_batch_writes_to_is_refused():
    def per_example(x):
        W.assign(tf.tile(x[:1, :, tf.newaxis], [1, 1, 5])[0])
        return model(x)

    before = tf.identity(W)
    try:
        with pytest.raises(ExampleIsolationError, match="writes"):
            sums_of(per_example)
    finally:
        W.assign(before)
