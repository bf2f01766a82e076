"""Norms of embeddings' gradients, token by token."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.cases import (
    assert_matches,
    integers,
    one_at_a_time,
    randoms,
    squash,
    traced,
    variable,
)
from tfdpclip.gradients.forms import base_form, lookup


def lookup_norms(ids, rows=7, steps=30):
    z = tf.random.stateless_normal([len(ids), steps, 3], [1, 2])
    form = lookup.Lookup(tf.constant(ids), z, [rows, 3], steps)
    return form.squared_norms(base_form.Budget(2**20, 4)).numpy(), z.numpy()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("on_cpus", [True, False])
def test_repeated_tokens_are_added_up(monkeypatch, on_cpus, count):
    """Also of batches that do not fall into equal parts."""
    monkeypatch.setattr(lookup, "on_cpus", lambda: on_cpus)
    ids = np.random.default_rng(0).integers(0, 7, [count, 30])
    found, z = lookup_norms(ids)
    assert len(found) == count
    for i in range(count):
        rows = np.zeros([7, 3])
        np.add.at(rows, ids[i], z[i])
        assert found[i] == pytest.approx(np.sum(rows**2), rel=1e-5)


@pytest.mark.parametrize("wrong", [-1, 7, 8, 1000])
def test_where_unknown_tokens_raise_no_error_they_spoil_only_their_own_example(
    monkeypatch, wrong
):
    """A GPU looks up zeros for them, so the example's norm must not be trusted."""
    monkeypatch.setattr(lookup, "on_cpus", lambda: False)
    ids = np.random.default_rng(0).integers(0, 7, [4, 30])
    expected, _ = lookup_norms(ids)
    ids[1, 5] = wrong
    found, _ = lookup_norms(ids)
    assert not np.isfinite(found[1])
    np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-5)


@pytest.mark.parametrize("rows", [7, 40 * lookup._ENTRIES])
@pytest.mark.parametrize("wrong", [None, -1, -8, "rows", "more"])
def test_compiled_norms_add_up_an_examples_tokens_alone(rows, wrong):
    """XLA raises no error for an unknown token, and drops its gradient.

    The places come from a table of first places, or by sorting where `rows` are many.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 7, [4, 30])
    ids[:, :3] = rows - 1
    if wrong is not None:
        ids[1, 4:7] = {"rows": rows, "more": 3 * rows + 2}.get(wrong, wrong)

    @tf.function(jit_compile=True)
    def compute(ids, z):
        form = lookup.Lookup(ids, z, [rows, 3], 30)
        pooled = lookup.PooledLookup(ids, tf.ones([4, 30]), z[:, 0], [rows, 3], 30)
        budget = base_form.Budget(2**20, 4)
        return form.squared_norms(budget), pooled.squared_norms(budget)

    z = rng.standard_normal([4, 30, 3]).astype(np.float32)
    found = compute(tf.constant(ids), tf.constant(z))
    for values, norms in zip((z, np.repeat(z[:, :1], 30, axis=1)), found, strict=True):
        norms = norms.numpy()
        for i in range(4):
            known = (ids[i] >= 0) & (ids[i] < rows)
            table = np.zeros([rows, 3])
            np.add.at(table, ids[i][known], values[i][known])
            true = np.sum(table**2)
            # The norm of an example with unknown tokens is no smaller than the truth.
            assert norms[i] >= true * (1 - 1e-5)
            if known.all():
                assert norms[i] == pytest.approx(true, rel=1e-4)


IDS = integers(5, 40, below=7)
MASK = tf.cast(integers(5, 40, below=2), tf.float32)[:, :, tf.newaxis]
PLACES = randoms(1, 40, 1)


def looked_up(ids, v):
    return tf.gather(v, ids)


POOLED = {
    "mean": lambda ids, v, m: tf.reduce_mean(looked_up(ids, v), 1),
    "sum": lambda ids, v, m: tf.reduce_sum(looked_up(ids, v), -2),
    "keep_dims": lambda ids, v, m: tf.reduce_mean(looked_up(ids, v), 1, keepdims=True),
    "masked": lambda ids, v, m: tf.math.divide_no_nan(
        tf.reduce_sum(looked_up(ids, v) * m, 1), tf.reduce_sum(m, 1)
    ),
    "by_position": lambda ids, v, m: tf.reduce_sum(looked_up(ids, v) * PLACES, 1),
    "two_axes": lambda ids, v, m: tf.reduce_mean(
        looked_up(tf.reshape(ids, [-1, 4, 10]), v), [1, 2]
    ),
    "all_masked": lambda ids, v, m: tf.reduce_sum(looked_up(ids, v) * (0 * m), 1),
    "by_token": lambda ids, v, m: tf.reduce_sum(
        looked_up(ids, v) * (tf.cast(ids, tf.float32)[..., tf.newaxis] / 9), 1
    ),
    "scaled": lambda ids, v, m: tf.reduce_mean(2.0 * looked_up(ids, v) / 3.0, 1),
    "masked_and_scaled": lambda ids, v, m: tf.reduce_sum(
        (looked_up(ids, v) * 2.0) * m / 30.0, 1
    ),
}
NOT_POOLED = {
    "used_twice": lambda ids, v, m: tf.add_n(
        [tf.reduce_mean(rows, 1) + rows[:, 0] for rows in [looked_up(ids, v)]]
    ),
    "squared": lambda ids, v, m: tf.reduce_sum(tf.square(looked_up(ids, v)), 1),
    "times_itself": lambda ids, v, m: tf.add_n(
        [tf.reduce_sum(rows * rows, 1) for rows in [looked_up(ids, v)]]
    ),
    "scaled_by_its_own": lambda ids, v, m: tf.add_n(
        [tf.reduce_sum(rows * rows[..., :1], 1) for rows in [looked_up(ids, v)]]
    ),
    "other_factors_for_each_entry": lambda ids, v, m: tf.reduce_sum(
        looked_up(ids, v) * randoms(40, 3), 1
    ),
    "divided_by_each_entry": lambda ids, v, m: tf.reduce_sum(
        looked_up(ids, v) / (2 + tf.abs(randoms(40, 3))), 1
    ),
    "a_divisor": lambda ids, v, m: tf.reduce_sum(1.0 / (9 + looked_up(ids, v)), 1),
    "over_the_width": lambda ids, v, m: tf.reduce_sum(looked_up(ids, v), 2),
    "over_everything": lambda ids, v, m: tf.reduce_sum(looked_up(ids, v), [1, 2])[
        :, tf.newaxis
    ],
    "maximum": lambda ids, v, m: tf.reduce_max(looked_up(ids, v), 1),
    "half_of_the_steps": lambda ids, v, m: tf.reduce_sum(looked_up(ids, v)[:, 7:], 1),
    "own_gradient": lambda ids, v, m: tf.reduce_sum(
        reversed_gradient(looked_up(ids, v)), 1
    ),
}


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda dy: dy * tf.range(40.0)[:, tf.newaxis]


def check_lookup(function, monkeypatch, **options):
    """Whether the sum over tokens was seen; asserts that norms and sums are right."""
    made = []
    make = lookup.PooledLookup.__init__

    def init(self, *args, **named):
        made.append(self)
        make(self, *args, **named)

    monkeypatch.setattr(lookup.PooledLookup, "__init__", init)
    v = variable(7, 3)
    per_example = lambda ids, m: squash(function(ids, v, m) / 10)  # noqa: E731
    data = (IDS, MASK)
    expected = one_at_a_time(per_example, [v], *data)
    assert_matches(traced(per_example, [v], data, **options), [v], expected, data)
    return bool(made)


@pytest.mark.every_check
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", POOLED)
def test_rows_that_are_only_summed_are_kept_as_one_row(monkeypatch, name, jit):
    assert check_lookup(POOLED[name], monkeypatch, jit=jit)


@pytest.mark.every_check
@pytest.mark.parametrize("name", NOT_POOLED)
def test_rows_of_another_use_are_kept(monkeypatch, name):
    assert not check_lookup(NOT_POOLED[name], monkeypatch)


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1.0, 1e12, 1e18])
def test_a_norm_is_right_whatever_the_sizes_of_its_factors(size):
    """Neither their squares nor the row's may leave the range of float32."""
    ids, factors = np.zeros([2, 30], int), np.ones([2, 30], np.float32)
    row = np.full([2, 3], 1 / size, np.float32)
    form = lookup.PooledLookup(
        *map(tf.constant, (ids, factors * np.float32(size), row)), [7, 3], 30
    )
    found = form.squared_norms(base_form.Budget(2**20, 4))
    np.testing.assert_allclose(found, [2700.0, 2700.0], rtol=1e-5)
