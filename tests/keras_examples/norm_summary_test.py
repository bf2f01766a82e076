"""Summaries and pictures of norms."""

import numpy as np
import pytest

from keras_examples.norm_summary import summarize_norms


def test_summary():
    norms = np.arange(1.0, 101.0)
    found = summarize_norms([*norms, np.nan, np.inf], 25.0, 0.5)
    assert (found.count, found.dropped) == (100, 2)
    assert found.mean == pytest.approx(50.5)
    assert found.fraction_clipped == 0.75 and found.clip_norm == 25.0
    assert found.target == found.quantiles[0.5] == pytest.approx(50.5)
    assert found.quantiles[0.95] == pytest.approx(np.quantile(norms, 0.95))
    row = found.row()
    assert row["norm_5%"] == pytest.approx(5.95) and row["dropped"] == 2
    plain = summarize_norms(norms)
    assert np.isnan([plain.clip_norm, plain.fraction_clipped, plain.target]).all()


def test_a_norm_at_the_clip_norm_is_not_clipped():
    assert summarize_norms([1.0, 1.0], 1.0).fraction_clipped == 0.0


def test_norms_that_are_not_finite_have_no_summary():
    with pytest.raises(ValueError, match="norms has no finite"):
        summarize_norms([np.nan])
