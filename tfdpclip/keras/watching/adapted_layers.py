"""Finds layers whose statistics `adapt` computed from data, without noise."""

from __future__ import annotations

import warnings
from typing import Any

from tfdpclip._arguments import shown
from tfdpclip._docs import see
from tfdpclip._notes import NOTES
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.private_state import PrivateStateWarning

_FROM = {
    "Normalization": (
        "Normalization(mean=m.mean, variance=m.variance) with "
        "m = statistics.moments(x, low=..., high=...)"
    ),
    "Discretization": "Discretization(bin_boundaries=[...]) with public boundaries",
}


def public_statistics(layer: Any) -> Any:
    """Declares that a layer was adapted to public data, and returns the layer.

    A `PrivacyBudget` (also that of a plan) warns of layers whose statistics `adapt`
    computed from data: such statistics are a release without noise. For a declared
    layer there is no warning, and the statement lists the declaration among its
    assumptions.

    Args:
      layer: A layer, such as `Normalization` or `TextVectorization`.

    Returns:
      The same layer.

    Raises:
      ValueError: If the argument is no layer.
    >>> import tensorflow as tf
    >>> public_statistics(tf.keras.layers.StringLookup(name="cities")).name
    'cities'
    """
    if not hasattr(layer, "get_config") or not hasattr(layer, "call"):
        raise ValueError(
            "layer must be a Keras layer, such as a Normalization that was adapted to "
            f"public data, got {shown(layer)}."
        )
    NOTES.public_layers.add(layer)
    return layer


def assumptions_about(model: Any) -> list[str]:
    """The assumptions of a statement about the adapted layers of a model.

    Warns of adapted layers that were not declared to be public.
    """
    found = [layer for layer in _compat.layers_of(model) if _compat.is_adapted(layer)]
    for layer in found:
        if layer in NOTES.public_layers:
            continue
        kind = type(layer).__name__
        write = _FROM.get(
            kind, f"{kind}(vocabulary=statistics.vocabulary(values).tokens)"
        )
        warnings.warn(
            f"Layer {layer.name!r} has statistics that adapt took from data, without "
            f"noise: for private data, no epsilon covers them. Write {write}, where "
            "statistics = dpc.keras.PrivateStatistics(...). For public data, write "
            "dpc.keras.public_statistics(layer)."
            + see("features-made-before-training"),
            PrivateStateWarning,
            stacklevel=3,
        )
    names = ", ".join(sorted(repr(layer.name) for layer in found))
    return [f"the layers {names} were adapted to public data"] if found else []
