"""Groups of layers of similar gradient norm, for --layers=groups:4.

Nguyen et al. (2023) clip layers in groups. Layers share a group if the logarithms of
their norms on public data are close: exact k-means in one dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfdpclip.clipping.groups import layer_of

# Norms are taken as at least this share of the largest.
_FLOOR = 1e-6


def similar_layers(
    names: Sequence[str], norms: Mapping[str, float], count: int
) -> dict[str, list[str]]:
    """The names of the variables of each group, for `groups=` of clip rules.

    Args:
      names: the variables' names, in order.
      norms: public gradient norms by layer, of `dpc.keras.public_gradient_norms`.
      count: the number of groups.

    Raises:
      ValueError: if there are fewer layers than groups.

    >>> similar_layers(["a/w", "b/w", "c/w"], {"a": 1.0, "b": 50.0, "c": 1.1}, 2)
    {'norms_0': ['a/w', 'c/w'], 'norms_1': ['b/w']}
    """
    if count > len(norms):
        raise ValueError(f"{count} groups of {len(norms)} layers: take fewer groups.")
    layers, sizes = list(norms), np.array(list(norms.values()))
    floor = sizes.max() * _FLOOR if sizes.max() > 0 else 1.0
    values = np.log(np.maximum(sizes, floor))
    order = np.argsort(values, kind="stable")
    group_of = {}
    for place, cluster in zip(order, _partition(values[order], count), strict=True):
        group_of[layers[place]] = f"norms_{cluster}"
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of[layer_of(name)], []).append(name)
    return groups


def _partition(values: np.ndarray, count: int) -> list[int]:
    """The cluster of each sorted value: exact one-dimensional k-means."""
    size = len(values)
    sums = np.concatenate([[0], np.cumsum(values)])
    squares = np.concatenate([[0], np.cumsum(values**2)])

    def spread(start, end):
        total = sums[end] - sums[start]
        return squares[end] - squares[start] - total * total / (end - start)

    best = np.full((count + 1, size + 1), np.inf)
    cut = np.zeros((count + 1, size + 1), int)
    best[0, 0] = 0
    for k in range(1, count + 1):
        for end in range(k, size + 1):
            options = [best[k - 1, s] + spread(s, end) for s in range(k - 1, end)]
            choice = int(np.argmin(options))
            best[k, end], cut[k, end] = options[choice], choice + k - 1
    clusters, end = [0] * size, size
    for k in range(count, 0, -1):
        start = cut[k, end]
        clusters[start:end] = [k - 1] * (end - start)
        end = start
    return clusters
