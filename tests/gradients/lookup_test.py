"""Norms of embeddings' gradients, token by token."""

import numpy as np
import pytest
import tensorflow as tf

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
