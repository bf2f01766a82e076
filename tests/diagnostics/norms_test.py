"""Summaries and pictures of norms."""

import numpy as np
import pytest

from tests.diagnostics.plots import check_picture
from tfdpclip.diagnostics import plot_norms, summarize_norms


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


def test_bad_arguments():
    with pytest.raises(ValueError, match="norms has no finite"):
        summarize_norms([np.nan])
    with pytest.raises(ValueError, match="norms must be"):
        summarize_norms([[1.0]])
    with pytest.raises(ValueError, match="norms must be"):
        summarize_norms([-1.0])
    for bad in (0.0, np.nan, -1.0, "x"):
        with pytest.raises(ValueError, match="clip_norm"):
            summarize_norms([1.0], bad)
    for bad in (1.5, np.nan, "x"):
        with pytest.raises(ValueError, match="target_quantile"):
            summarize_norms([1.0], 1.0, bad)


def test_violins(tmp_path):
    rng = np.random.default_rng(0)
    norms = {k: np.exp(rng.normal(size=200) - k) for k in range(4)}
    norms[3][:5] = 0.0
    figure = plot_norms(
        norms, tmp_path / "v.png", clip_norms=[1, 1, 0.5, 0.2], xlabel="epoch"
    )
    check_picture(figure, tmp_path / "v.png", labels=1)
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1", "2", "3"]
    note = figure.get_supxlabel()
    assert "not to be released" in note and "5 norms that are 0" in note
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert labels == ["median", "middle half", "clip norm"]
    public = plot_norms({"a": norms[0]}, public=True)
    assert public.get_supxlabel() == ""


def test_violins_of_odd_norms(tmp_path):
    """Equal norms, none, and long names of layers."""
    norms = {"block_1/attention/kernel": [2.0] * 9, "empty": [], "block_2": [1.0, 3.0]}
    figure = plot_norms(norms, tmp_path / "v.png")
    check_picture(figure, tmp_path / "v.png", labels=1)
    for nothing in ({}, {"a": [0.0, np.nan]}):
        with pytest.raises(ValueError, match="norms"):
            plot_norms(nothing)
    with pytest.raises(ValueError, match="clip_norms"):
        plot_norms({"a": [1.0]}, clip_norms=0.0)
