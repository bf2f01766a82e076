"""A lower bound on epsilon from many runs with and without one record."""

import math

import numpy as np
from scipy import stats


def many_runs_lower_bound(with_record, without, delta, confidence=0.95):
    """The epsilon that scores of runs with a record, and without, refute; or 0.

    A first half of the runs chooses the threshold of the scores, and the second half
    bounds the error rates (Clopper-Pearson): a private mechanism has
    ``1 - fnr <= e^epsilon fpr + delta``, and the same with the two exchanged.
    """
    inside, outside = np.ravel(with_record), np.ravel(without)
    cut_in, cut_out = inside.size // 2, outside.size // 2
    best, threshold, above = -math.inf, 0.0, True
    for value in np.concatenate([inside[:cut_in], outside[:cut_out]]):
        tpr = (np.sum(inside[:cut_in] >= value) + 0.5) / (cut_in + 1)
        fpr = (np.sum(outside[:cut_out] >= value) + 0.5) / (cut_out + 1)
        for ratio, side in ((tpr / fpr, True), ((1 - fpr) / (1 - tpr), False)):
            if ratio > best:
                best, threshold, above = ratio, value, side
    hits, tries = inside[cut_in:] >= threshold, outside[cut_out:] >= threshold
    if not above:
        hits, tries = ~tries, ~hits
    level = 1 - (1 - confidence) / 2
    found = stats.binomtest(int(hits.sum()), hits.size, alternative="greater")
    low = found.proportion_ci(level).low
    found = stats.binomtest(int(tries.sum()), tries.size, alternative="less")
    high = found.proportion_ci(level).high
    return max(0.0, math.log((low - delta) / high)) if low > delta else 0.0
