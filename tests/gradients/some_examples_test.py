"""Later checks replace some examples; how much is rounding is measured."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import randoms, squash, two_by_two, variable
from tfdpclip.gradients import per_example_norms, replaced_rows, rerun

pytestmark = pytest.mark.every_check
W = variable(3, 5)
X = randoms(50, 3)
ANY = [tf.TensorSpec([None, 3])]


def tried(losses, x=X, steps=4, before=lambda i: None):
    """How many rows the copies had at most where some were replaced, in each step."""
    most, found = tf.Variable(0), []
    tensors = rerun.Rerun.tensors

    def noted(self, part, rows, *args, **options):
        replaces = tf.reduce_any(tf.not_equal(rows, tf.range(tf.size(rows))))
        most.assign(tf.maximum(most, tf.where(replaces, tf.size(rows), 0)))
        return tensors(self, part, rows, *args, **options)

    @tf.function(input_signature=ANY, autograph=False)
    def step(x):
        return per_example_norms(losses(x), [W], recheck_rate=0.0)

    with mock.patch.object(rerun.Rerun, "tensors", noted):
        for i in range(steps):
            before(i)
            most.assign(0)
            step(x)
            found.append(int(most))
    return found


@pytest.mark.slow
def test_the_first_check_replaces_all_and_later_ones_some():
    assert tried(lambda x: squash(x @ W)) == [50, 18, 0, 18]
    assert tried(lambda x: squash(x @ W), X[:17]) == [17, 17, 0, 17]
    assert tried(lambda x: squash(x @ W), X[:9]) == [9, 9, 0, 9]


def test_an_empty_batch_is_not_checked():
    assert tried(lambda x: squash(x @ W), X[:0]) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "xla"]
)
def test_those_of_the_first_half_may_all_be_no_numbers(compiled):
    @tf.function(input_signature=ANY, autograph=False, jit_compile=compiled)
    def step(x):
        losses = tf.reduce_sum(tf.square(x @ W), axis=1)
        return per_example_norms(losses, [W], check_gradients="always")

    for bad, size, first in ((np.nan, 2, 1), (np.nan, 3, 1), (1e30, 5, 3)):
        x = X.numpy()[:size]
        x[:first] = bad
        finite = np.isfinite(step(x))
        assert finite.tolist() == [i >= first for i in range(size)]


@pytest.mark.slow
def test_what_mixes_later_shows_among_some():
    gate = tf.Variable(0.0)

    def losses(x):
        hidden = x @ W
        return squash(hidden + gate * (two_by_two(hidden) - hidden))

    with pytest.raises(tf.errors.InvalidArgumentError, match="Isolation"):
        tried(losses, before=lambda i: gate.assign(float(i > 0)), steps=2)
    gate.assign(0.0)
    assert tried(losses) == [50, 18, 0, 18]


@pytest.mark.slow
def test_labels_that_the_loss_closes_over_need_the_whole_batch():
    labels = tf.constant(np.arange(50.0, dtype=np.float32))
    found = tried(lambda x: squash(tf.tanh(x @ W)) + tf.reduce_sum(W) * labels)
    assert found == [50, 50, 0, 50]


@pytest.mark.slow
def test_random_numbers_go_with_their_examples():
    def losses(x):
        return squash((x * tf.random.uniform([tf.shape(x)[0], 3])) @ W)

    assert tried(losses) == [50, 18, 0, 18]


def amplified(by_place, times):
    """A model that magnifies what is off in the data, which depends on the place."""

    def losses(x):
        odd = tf.cast(tf.range(tf.shape(x)[0]) % 2, tf.float32)
        return squash(tf.sin(times * ((x * (1 + by_place * odd[:, tf.newaxis])) @ W)))

    return losses


def test_a_model_that_magnifies_rounding_is_no_model_that_looks_at_places():
    """A last digit of the data, many times as large in what comes of it."""
    assert tried(amplified(1.2e-7, 60.0)) == [50, 18, 0, 18]


@pytest.mark.slow
def test_it_would_be_if_what_it_magnifies_were_not_measured(monkeypatch):
    monkeypatch.setattr(replaced_rows, "_MOST_NOISE", 0.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="another place"):
        tried(amplified(1.2e-7, 60.0), steps=1)


@pytest.mark.parametrize("by_place, times", [(1e-4, 1.0), (1e-4, 300.0)])
@pytest.mark.thinned(2)
def test_what_depends_on_its_place_does(by_place, times):
    with pytest.raises(tf.errors.InvalidArgumentError, match="another place"):
        tried(amplified(by_place, times))


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 6])
def test_only_a_batch_of_static_size_is_never_taken_in_part(length):
    """Whatever else has a length that is static, such as a mask that all share."""
    w, found = variable(3, 5), []
    plain = rerun.Rerun._resized_steps

    def noted(self):
        found.append(plain(self))
        return found[-1]

    @tf.function(
        input_signature=[tf.TensorSpec([1, 3], tf.bool), tf.TensorSpec([length, 3])]
    )
    def step(mask, x):
        _, hidden = tf.while_loop(  # which hides the length
            lambda i, _: i < 1,
            lambda i, h: (i + 1, tf.tanh(h)),
            (0, tf.where(mask, x, 0.0) @ w),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 5])),
        )
        return per_example_norms(squash(hidden), [w])

    with mock.patch.object(rerun.Rerun, "_resized_steps", noted):
        norms = step([[True, False, True]], randoms(6, 3))
    assert norms.shape == [6]
    assert {steps is None for steps in found} == {length is not None}
