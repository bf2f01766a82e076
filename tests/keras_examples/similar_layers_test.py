"""Layers of similar gradient norm share a group."""

import itertools

import numpy as np
import pytest

from keras_examples.similar_layers import similar_layers
from tfdpclip.clipping import LayerwiseClip

NAMES = ["embed/table", "d1/kernel", "d1/bias", "d2/kernel", "d2/bias"]
NORMS = {"embed": 100.0, "d1": 1.0, "d2": 1.1}


def assignment(count, names=tuple(NAMES), norms=None):
    groups = similar_layers(names, norms or NORMS, count)
    return LayerwiseClip(1.0, groups=groups).bind(names).assignment


def test_layers_of_similar_norm_are_put_together():
    assert assignment(1) == (0, 0, 0, 0, 0)
    assert assignment(2) == (0, 1, 1, 1, 1)
    assert assignment(3) == (0, 1, 1, 2, 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_groups_are_the_best_of_all_ways_to_cut_the_sorted_norms(count, seed):
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(size=7))
    names = [f"l{i}/w" for i in range(7)]
    norms = {f"l{i}": v for i, v in enumerate(values)}
    found = np.array(assignment(count, names, norms))
    logs = np.log(values)

    def spread(labels):
        return sum(np.var(logs[labels == g]) * np.sum(labels == g) for g in set(labels))

    order = np.argsort(logs)
    best = np.inf
    for cuts in itertools.combinations(range(1, 7), count - 1):
        labels = np.empty(7, int)
        for group, part in enumerate(np.split(order, cuts)):
            labels[part] = group
        best = min(best, spread(labels))
    assert spread(found) == pytest.approx(best, rel=1e-9)


def test_norms_of_zero_are_small_norms():
    zero = {"embed": 0.0, "d1": 0.0, "d2": 1.0}
    found = assignment(2, norms=zero)
    assert found[0] == found[1] == found[2] != found[3]
    assert len(set(assignment(2, norms=dict.fromkeys(zero, 0.0)))) == 2


def test_more_groups_than_layers_are_refused():
    with pytest.raises(ValueError, match="9 groups of 3 layers"):
        assignment(9)
