"""The picture of an audit."""

from __future__ import annotations

import numpy as np

from tfdpclip import pictures


def draw_scores(report, path):
    """Two histograms of scores: canaries that were included, and that were not."""
    if report.scores is None or report.included is None:
        raise ValueError(
            "The report has no scores to draw: take the one that dpc.testing.audit, "
            "audit_keras or audit_aggregator returns."
        )
    figure, axes = pictures.new(6.0, 3.2, grid="y")
    ax = axes[0, 0]
    scores = np.asarray(report.scores, np.float64)
    finite = np.isfinite(scores)
    edges = np.histogram_bin_edges(scores[finite], bins=20)
    for k, (label, chosen) in enumerate(
        (("not in", ~report.included), ("in", report.included))
    ):
        shown = scores[chosen & finite]
        color = pictures.COLORS[k]
        label = f"{label} the data: {int(chosen.sum())}"
        ax.hist(shown, edges, color=color, alpha=0.45, label=label)
        ax.hist(
            shown, edges, color=color, histtype="step", linestyle="-" if k else "--"
        )
    ax.set(xlabel="score of a canary", ylabel="canaries")
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=9)
    claim = "" if report.claimed is None else f", claimed: {report.claimed:.3g}"
    pictures.title(figure, f"epsilon is at least {report.lower_bound:.3g}{claim}")
    return pictures.finish(figure, path)
