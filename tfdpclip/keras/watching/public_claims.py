"""What a run takes for public: data of callbacks, and variables of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras.watching.fit_arguments import callbacks_of_fit, overlap


class PublicDataCallback(tf.keras.callbacks.Callback):
    """A callback that measures public data, without noise.

    Args:
      public_data: the data.
    """

    def __init__(self, public_data: Any):
        super().__init__()
        self.public_data = public_data


def assumptions_about(model: Any) -> list[str]:
    """What a statement says of the public data and variables of a call of `fit`."""
    texts = [
        f"the data of {type(callback).__name__} are public"
        for callback in _with_public_data()
    ]
    declared = getattr(model.optimizer, "_public_variables", None)
    names = ", ".join(repr(name) for name in getattr(declared, "names", ()))
    if names:
        texts.append(f"the public_variables {names} hold no private data")
    return texts


def refuse_private_data(private: Sequence[np.ndarray]) -> None:
    """Raises if a callback measures private arrays without noise.

    Args:
      private: the arrays that were given for the batches, as far as they are known.
    """
    for callback in _with_public_data():
        if overlap(callback.public_data, private):
            name = type(callback).__name__
            raise PrivacyMismatchError(
                f"The data of {name} are in the private batches, too, and {name} "
                "measures them without noise. Give it public data, "
                f"{name}((public_x, public_y)), or keep apart what may be public: "
                "plan.batches((x[1000:], y[1000:])), and x[:1000]."
                + see("clip-norms-from-private-data")
            )


def _with_public_data() -> list[PublicDataCallback]:
    return [c for c in callbacks_of_fit() if isinstance(c, PublicDataCallback)]
