"""The arguments of the running call of `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._keras_marks import variable_of_call
from tfdpclip.sampling.columns import share_memory


def callbacks_of_fit() -> list[Any]:
    """The callbacks of the running call of `fit`."""
    callbacks = variable_of_call("fit", "callbacks")
    return list(getattr(callbacks, "callbacks", None) or ())


def validation_data_of_fit() -> Any:
    """The validation data of the running call of `fit`, or None."""
    return variable_of_call("fit", "validation_data")


def overlap(data: Any, private: Sequence[np.ndarray]) -> bool:
    """Whether any array of some data shares memory with a private array."""
    arrays = [a for a in tf.nest.flatten(data) if isinstance(a, np.ndarray)]
    return any(share_memory(one, other) for one in arrays for other in private)
