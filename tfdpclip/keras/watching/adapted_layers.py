"""Layers of a model that learned something of data by `adapt`, without noise."""

from __future__ import annotations

import warnings
from typing import Any

from tfdpclip._arguments import shown
from tfdpclip._docs import see
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.private_state import PrivateStateWarning

# The attribute of a layer whose statistics are declared to be public.
_PUBLIC = "_tfdpclip_public_statistics"
_FROM = {
    "Normalization": (
        "Normalization(mean=m.mean, variance=m.variance) with "
        "m = statistics.moments(x, low=..., high=...)"
    ),
    "Discretization": "Discretization(bin_boundaries=[...]) with public ones",
}


def public_statistics(layer: Any) -> Any:
    """Says that what a layer was adapted to is public data, and returns the layer.

    A plan, or a `PrivacyBudget`, warns of layers with statistics that `adapt` took from
    data: they are a release without noise. Of these layers they say so in the
    statement's assumptions instead.

    Args:
      layer: A layer, such as `Normalization` or `TextVectorization`.

    Returns:
      The same layer.

    Raises:
      ValueError: If it is no layer.

    >>> import tensorflow as tf
    >>> public_statistics(tf.keras.layers.StringLookup(name="cities")).name
    'cities'
    """
    if not hasattr(layer, "get_config") or not hasattr(layer, "call"):
        raise ValueError(
            "layer must be a Keras layer, such as a Normalization that was adapted to "
            f"public data, got {shown(layer)}."
        )
    setattr(layer, _PUBLIC, True)
    return layer


def assumed_of(model: Any) -> list[str]:
    """What a statement assumes of the adapted layers of a model.

    Warns of those that were not declared to be public.
    """
    found = [layer for layer in _compat.layers_of(model) if _compat.is_adapted(layer)]
    said = [layer for layer in found if getattr(layer, _PUBLIC, False)]
    for layer in found:
        if layer in said:
            continue
        kind = type(layer).__name__
        write = _FROM.get(
            kind, f"{kind}(vocabulary=statistics.vocabulary(values).tokens)"
        )
        warnings.warn(
            f"Layer {layer.name!r} has statistics that adapt took from data, without "
            f"noise: of private data, no epsilon covers them. Write {write}, of "
            "statistics = dpc.keras.PrivateStatistics(...). If the data were public: "
            "dpc.keras.public_statistics(layer)."
            + see("features-made-before-training"),
            PrivateStateWarning,
            stacklevel=3,
        )
    names = ", ".join(sorted(repr(layer.name) for layer in found))
    return [f"what was adapted is of public data: {names}"] if found else []
