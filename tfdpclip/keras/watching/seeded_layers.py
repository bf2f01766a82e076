"""Layers whose random numbers come from a seed, such as a seeded dropout.

The numbers of a layer belong to places in the batch, and must be secret. A given seed
is an assumption of the statement. A layer without a given seed has a state, in Keras 3,
that begins by one of 10^9 numbers, and that exports of the model contain; so the states
begin anew, by the operating system's entropy, when `fit` begins and after each epoch.
"""

from __future__ import annotations

import numbers
import secrets
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._variables import components
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.constant_state import forget_values

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
        if _draws(layer)
        and (common or any(seed is not None for seed in _compat.seeds_given_to(layer)))
    ]
    names = ", ".join(sorted(repr(layer.name) for layer in found))
    return [f"the seed of the random numbers of {names} is secret"] if found else []


def begin_anew(model: Any) -> None:
    """Gives random generators without a seed a state of new entropy.

    The new states tell nothing of the numbers that were drawn before. With a common
    seed (`tf.random.set_seed`), which a statement assumes to be secret, the states stay
    as they are.
    """
    if _tf_private.global_seed() is not None:
        return
    states = _compat.unseeded_states_of(model)
    for state in states:
        for part in components(state):
            size, bound = part.shape.num_elements(), _compat.RANDOM_STATES
            drawn = [secrets.randbelow(bound) for _ in range(size)]
            part.assign(tf.reshape(tf.constant(drawn, part.dtype), part.shape))
    forget_values(states)


def _draws(layer: Any) -> bool:
    """Whether a layer draws random numbers in training."""
    if not _compat.seeds_given_to(layer):
        return False
    rates = [getattr(layer, name) for name in _RATES if hasattr(layer, name)]
    return not rates or not all(map(_is_nothing, rates))


def _is_nothing(rate: Any) -> bool:
    # Anything but a number, such as a range of factors or a variable, may draw.
    return rate is None or (isinstance(rate, numbers.Real) and rate == 0)
