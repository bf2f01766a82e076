"""Finds layers whose random numbers come from a seed, such as a seeded dropout."""

from __future__ import annotations

import numbers
from typing import Any

from tfdpclip import _tf_private
from tfdpclip.keras import _compat

# Keras 2 and 3: the attribute of a layer that draws random numbers.
_GENERATORS = ("_random_generator", "seed_generator")
# What a layer that draws only now and then is made with: 0 if it never draws.
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev", "factor")


def assumptions_about(model: Any) -> list[str]:
    """The assumptions of a statement about the random numbers of a model's layers.

    With a known seed the numbers belong to places in the batch, and one record less
    moves the records behind it to other numbers.
    """
    common = _tf_private.global_seed() is not None
    found = [
        layer
        for layer in _compat.layers_of(model)
        if _draws(layer) and (common or getattr(layer, "seed", None) is not None)
    ]
    names = ", ".join(sorted(repr(layer.name) for layer in found))
    return [f"the seed of the random numbers of {names} is secret"] if found else []


def _draws(layer: Any) -> bool:
    """Whether a layer draws random numbers in training."""
    if not any(getattr(layer, name, None) is not None for name in _GENERATORS):
        return False
    rates = [getattr(layer, name) for name in _RATES if hasattr(layer, name)]
    return not rates or not all(map(_is_nothing, rates))


def _is_nothing(rate: Any) -> bool:
    # Anything but a number, such as a range of factors or a variable, may draw.
    return rate is None or (isinstance(rate, numbers.Real) and rate == 0)
